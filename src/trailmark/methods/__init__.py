"""Methods by name: each a `Config` and a `run`. `sft` and `online` are here; `my_package.my_module` may be anybody's."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any, Protocol

from trailmark.config import RunConfig
from trailmark.errors import RecipeError, nearest
from trailmark.runs.store import Run

METHODS = {name: f"trailmark.methods.{name}" for name in ("sft", "online", "reflect", "oreo", "oreo_rounds")}


class MethodModule(Protocol):
    Config: type[RunConfig]

    def run(self, config: Any, run: Run, resume: bool = False) -> dict[str, float]: ...


NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?")
CALLED = {  # what others call a method, and what it is here
    "grpo": "method: online with credit: group and objective: {kind: clipped} (recipes/arith-grpo.yaml)",
    "rloo": "method: online with credit: leave_one_out",
    "reinforce": "method: online with credit: returns and objective: {kind: weighted_logp}",
    "ppo": "method: reflect with rl.algorithm: ppo, or method: online with objective: {kind: clipped}",
    "imitation": "method: sft",
    "dpo": "method: oreo with objective: dpo",
    "ipo": "method: oreo with objective: ipo",
    "kto": "method: oreo with objective: kto",
    "rejection": "method: oreo with objective: rejection",
    "reflect_rl": "method: reflect",
}
OTHERS = {  # further names of the same
    "dapo": "grpo", "dr_grpo": "grpo", "bnpo": "grpo", "gspo": "grpo", "policy_gradient": "reinforce", "pg": "reinforce",
    "bc": "imitation", "behavior_cloning": "imitation", "behaviour_cloning": "imitation", "finetune": "imitation",
    "rft": "rejection", "rejection_sampling": "rejection", "raft": "rejection", "reflectrl": "reflect_rl",
}  # fmt: skip


def get_config(name: str) -> type[RunConfig]:
    """What a method's recipe may say, without importing what it runs with."""
    from trailmark.methods.configs import RECIPES

    return RECIPES[name] if name in RECIPES else get_method(name).Config


def get_method(name: str) -> Any:
    """The module (or, for "package.module:Name", the object) of a method."""
    if name in METHODS:
        return importlib.import_module(METHODS[name])
    key = re.sub(r"[-_ ]+", "_", name.lower())
    if here := CALLED.get(OTHERS.get(key, key)):
        raise RecipeError(f"unknown method '{name}': here it is {here}.")
    own = "A method of your own is named package.module or package.module:Name."
    if not NAME.fullmatch(name) or (name.isidentifier() and importlib.util.find_spec(name) is None):
        raise RecipeError(f"unknown method '{name}'.{nearest(name, METHODS)} {own}")
    module, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        found = getattr(found, attribute) if attribute else found
    except Exception as problem:  # a module of somebody's may raise anything while it is imported
        raise RecipeError(f"method '{name}' cannot be imported: {type(problem).__name__}: {problem}") from problem
    if not hasattr(found, "Config") or not hasattr(found, "run"):
        raise RecipeError(f"method '{name}' must have a Config (a RunConfig) and run(config, run, resume)")
    return found


def _first_start(task: Any) -> str:
    """A first start of a world; its files, like those of the data, need not be there yet."""
    from trailmark.tasks import get_task

    given = [task.options[key] for key in ("games", "path") if isinstance(task.options.get(key), str)]
    if missing := [place for place in given if not Path(place).exists()]:
        return f"whose {missing[0]} is not here yet"
    return f"first start '{get_task(task.name, **task.options).tasks('train', 1)[0].id}'"


def check(config: RunConfig) -> list[str]:
    """What `--dry-run` can say about a recipe without network or weights."""
    from trailmark.models.load import describe
    from trailmark.seats.names import fix_names

    model = config.model if config.model.shape else fix_names(config).model
    about = describe(model)
    lines = [
        f"model: {model.name} ({about['family']}, {about['parameters']:,} parameters, context {about['context']})"
    ]
    task = getattr(config, "task", None)
    if task is not None:
        lines.append(f"task: {task.name}, {_first_start(task)}")
    data = getattr(config, "data", None)
    if hasattr(method := get_method(config.method), "check"):
        lines += method.check(config)
    elif data is not None:
        from trailmark.formats.messages import count_rows

        here = Path(data).is_file()
        lines.append(f"data: {data}, {f'{count_rows(data)} rows' if here else 'which is not here yet'}")
    return lines
