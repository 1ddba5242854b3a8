"""Methods by name. Each is a class that derives from `methods.base.Method`. A name like `my_package.my_module:MyMethod`
loads a class from anywhere."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark import registry
from trailmark.errors import RecipeError, nearest
from trailmark.fetching import NotHere, nothing_fetched
from trailmark.trust import code_file, import_module, may_run

if TYPE_CHECKING:
    from trailmark.config import RunConfig
    from trailmark.methods.base import Method
    from trailmark.recipe import Loaded

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?")
CALLED = {  # names from the literature -> the recipe that does it here
    "grpo": "method: policy_gradient with credit: group and objective: {kind: clipped} (recipes/arith-grpo.yaml)",
    "rloo": "method: policy_gradient with credit: leave_one_out",
    "reinforce": "method: policy_gradient with credit: returns and objective: {kind: weighted_logp}",
    "ppo": "method: reflect with rl.algorithm: ppo, method: policy_gradient with objective: {kind: clipped}, or "
    "method: step_rl with rewards at the ends of steps",
    "remax": "method: step_rl with algorithm: remax",
    "step_ppo": "method: step_rl with algorithm: ppo",
    "step_grpo": "method: step_rl with algorithm: grpo",
    "imitation": "method: sft",
    "dpo": "method: preference with objective: dpo",
    "ipo": "method: preference with objective: ipo",
    "kto": "method: preference with objective: kto",
    "prm": "method: reward_model with kind: classes",
    "orm": "method: reward_model with kind: outcome",
    "rm": "method: reward_model with kind: pairwise",
    "rejection": "method: preference with objective: rejection",
    "reflect_rl": "method: reflect",
    "online": "method: policy_gradient",
}
OTHERS = {  # other names of methods that Trailmark has
    "dapo": "grpo", "dr_grpo": "grpo", "bnpo": "grpo", "gspo": "grpo", "pg": "reinforce",
    "bc": "imitation", "behavior_cloning": "imitation", "behaviour_cloning": "imitation", "finetune": "imitation",
    "rft": "rejection", "rejection_sampling": "rejection", "raft": "rejection", "reflectrl": "reflect_rl",
    "process_reward_model": "prm", "outcome_reward_model": "orm", "reward": "rm", "pairwise_rm": "rm",
}  # fmt: skip


def get_config(name: str) -> type[RunConfig]:
    """The config class of a method. Importing it does not import torch."""
    known = registry.ours("recipes")
    return registry.resolve(known[name]) if name in known else get_method(name).Config


def method_names() -> list[str]:
    return registry.names("methods")


def resolve_recipe(loaded: Loaded) -> RunConfig:
    """Check a recipe that a person wrote."""
    from trailmark.config import resolve

    return resolve(loaded, get_config(loaded.method))


def complete(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a run with every default filled in, so that two recipes can be compared."""
    from trailmark.config import resolve

    if recipe.get("method") not in registry.ours("methods"):
        return dict(recipe)
    try:
        return resolve(recipe, get_config(recipe["method"])).model_dump(mode="json")
    except RecipeError:  # another version of Trailmark, with other keys: compare the recipe as it is
        return dict(recipe)


def get_method(name: str) -> type[Method]:
    """The class of a method: a name in the registry, "package.module:Class", or "package.module" if that module
    defines exactly one method."""
    from trailmark.config import RunConfig
    from trailmark.methods.base import Method

    own = "To use your own method, write package.module or package.module:Class."
    known = registry.place("methods", name)
    if known is None:
        key = re.sub(r"[-_ ]+", "_", name.lower())
        if here := CALLED.get(OTHERS.get(key, key)):
            raise RecipeError(f"unknown method '{name}': in Trailmark it is {here}.")
        if not NAME.fullmatch(name) or (name.isidentifier() and code_file(name) is None):
            raise RecipeError(f"unknown method '{name}'.{nearest(name, method_names())} {own}")
        may_run(name, "method")
    found: Any = registry.load("methods", name) if known is not None else None
    module, _, attribute = name.partition(":")
    try:
        imported: Any = import_module(module) if known is None else None
        found = getattr(imported, attribute) if attribute else found
    except Exception as problem:  # a user's module may raise anything while it is imported
        raise RecipeError(f"method '{name}' cannot be imported: {type(problem).__name__}: {problem}") from problem
    if found is None:
        here = [v for v in vars(imported).values() if inspect.isclass(v) and v.__module__ == imported.__name__]
        mine = [v for v in here if issubclass(v, Method)]
        if len(mine) != 1:
            which = f"defines {', '.join(v.__name__ for v in mine)}" if mine else "defines none"
            raise RecipeError(
                f"method '{name}': a module must define one class that derives from trailmark.methods.base.Method, "
                f"and this one {which}: name it as {name}:Class."
            )
        found = mine[0]
    if not (inspect.isclass(found) and issubclass(found, Method)):
        raise RecipeError(
            f"method '{name}' is no method: write a class that derives from trailmark.methods.base.Method, with a "
            "Config."
        )
    if not (inspect.isclass(found.Config) and issubclass(found.Config, RunConfig)):
        raise RecipeError(f"method '{name}': its Config must be a class that derives from trailmark.config.RunConfig.")
    return found


def _starts(config: RunConfig, task: Any) -> list[str]:
    """The first start of a task, and how many there are if epochs are counted. The task's files may not exist yet."""
    given = [task.options[key] for key in ("games", "path", "tasks") if isinstance(task.options.get(key), str)]
    if missing := [place for place in given if not Path(place).exists()]:
        return [f"task: {task.name}, whose {missing[0]} is not here yet"]
    method = get_method(config.method)
    try:
        source = method.open_source(config)
        method.check_asked(config, source)
        lines = [f"task: {task.name}, first start '{source.tasks(method.learns_from(config), 1)[0].id}'"]
        epochs = getattr(config, "epochs", None)
        if epochs is not None and (rows := method.walk(config, source)) is not None:
            lines.append(f"epochs: {epochs} passes over {rows.rows:,} rows, {rows.steps(config.steps):,} steps")
        return lines
    except NotHere as e:
        return [f"task: {task.name}, not looked at, because {e}"]


def check(config: RunConfig) -> list[str]:
    """Lines about a recipe for `--dry-run`. Needs neither network nor weights, and fetches nothing."""
    with nothing_fetched():
        return _lines(config)


def _lines(config: RunConfig) -> list[str]:
    from trailmark.models.load import describe
    from trailmark.runs.data_files import no_pipes
    from trailmark.seats.config import described
    from trailmark.seats.open_seats import check_players
    from trailmark.seats.pinned_models import pin_models

    no_pipes(config)
    model = config.model if config.model.shape else pin_models(config).model
    about = describe(model)
    lines = [
        f"model: {model.name} ({about['family']}, {about['parameters']:,} parameters, context {about['context']})"
    ]
    task = getattr(config, "task", None)
    if task is not None:
        lines += _starts(config, task)
    method = get_method(config.method)
    seats = method.seats_of(config)
    if len(seats) > 1:
        check_players(seats)
        lines += described(seats)
    return [*lines, *method.check(config)]
