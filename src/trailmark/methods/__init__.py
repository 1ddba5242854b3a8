"""Methods by name: each a `Config` and a `run`. `sft` and `online` are here; `my_package.my_module` may be anybody's."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Protocol

from trailmark.config import RunConfig
from trailmark.errors import RecipeError, nearest
from trailmark.store import Run

METHODS = {name: f"trailmark.methods.{name}" for name in ("sft", "online", "reflect", "oreo", "oreo_rounds")}


class MethodModule(Protocol):
    Config: type[RunConfig]

    def run(self, config: Any, run: Run, resume: bool = False) -> dict[str, float]: ...


def get_method(name: str) -> Any:
    """The module (or, for "package.module:Name", the object) of a method."""
    if name in METHODS:
        return importlib.import_module(METHODS[name])
    if name.isidentifier() and importlib.util.find_spec(name) is None:
        raise RecipeError(
            f"unknown method '{name}'.{nearest(name, METHODS)} A method of your own is named package.module"
        )
    module, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        found = getattr(found, attribute) if attribute else found
    except (ImportError, AttributeError) as problem:
        raise RecipeError(f"method '{name}' cannot be imported: {problem}") from problem
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

    about = describe(config.model)
    lines = [
        f"model: {config.model.name} ({about['family']}, {about['parameters']:,} parameters, context {about['context']})"
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
