"""A section of a recipe that is given in part keeps the other defaults that its method has for it."""

import pytest

from trailmark.config import Config, resolve
from trailmark.methods import get_config, method_names
from trailmark.recipe import _configs


def _sections(schema, above=()):
    """Every section of a recipe class whose default is another than that of the section's own class."""
    for name, field in schema.model_fields.items():
        default = field.default
        if isinstance(default, Config) and not default.in_full and default != type(default)():
            yield (*above, name), default
        for c in _configs(field.annotation):
            yield from _sections(c, (*above, name))


OWN = [(method, path, default) for method in method_names() for path, default in _sections(get_config(method))]


@pytest.mark.parametrize(("method", "path", "default"), OWN, ids=lambda v: v if isinstance(v, str) else None)
def test_a_section_given_in_part_keeps_the_other_defaults_of_its_method(method, path, default):
    """`checkpoint.every=10` leaves the metric of `sft` what it is: eval/nll."""
    needed = [k for k, f in get_config(method).model_fields.items() if f.is_required()]
    for key, value in default.model_dump(mode="json").items():
        raw = {key: value}
        for name in reversed(path):
            raw = {name: raw}
        found = resolve({**dict.fromkeys(needed, "given"), "method": method, **raw}, get_config(method))
        for name in path:
            found = getattr(found, name)
        assert found == default, key


def test_keys_that_are_given_win_over_the_defaults_of_the_method():
    recipe = {"method": "sft", "data": "d", "checkpoint": {"every": 10, "mode": "max"}}
    found = resolve(recipe, get_config("sft")).checkpoint
    assert (found.every, found.metric, found.mode) == (10, "eval/nll", "max")
    found = resolve({"method": "lpr", "task": {"name": "logic", "options": {"x": 1}}}, get_config("lpr")).task
    assert (found.name, found.options) == ("logic", {"x": 1})


def test_outcomes_are_not_paid_beside_a_reward_model_unless_the_recipe_says_so():
    rewards = lambda given: resolve({"method": "step_rl", **given}, get_config("step_rl")).rewards
    assert rewards({}).right == 1.0 and rewards({"rewards": {"model": "m"}}).right is None
