"""Worlds to act in. `get_task("taxi", mode="pickup")` or `get_task("my_package.my_task:Make")`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark import registry
from trailmark.errors import RecipeError, TaskError, nearest
from trailmark.trust import import_module, may_run

if TYPE_CHECKING:
    from trailmark.score.base import Judge
    from trailmark.tasks.base import TaskSource


def task_names() -> tuple[str, ...]:
    """The tasks of the library and of installed packages."""
    return tuple(sorted(registry.names("tasks")))


def task_class(name: str) -> Any:
    """The class of a task with a name."""
    return registry.load("tasks", name)


def get_task(name: str, /, **options: Any) -> TaskSource:
    """A task by its name, or a user's own task by `module:callable`, made with `options`. Imports only what it needs.
    If a task cannot judge itself, its option `reward` names the judge (`score/config.py`), which becomes the source's
    `judge`. `time_limits` are the most seconds that its worlds may take to `reset` and to `step`."""
    from trailmark.score.open_judge import open_judge
    from trailmark.tasks.base import declared
    from trailmark.time_limits import TimeLimits

    known = registry.place("tasks", name)
    if ":" not in name and known is None:
        hint = " Write your own task as 'my_package.my_task:Make'." if "." in name else nearest(name, task_names())
        raise TaskError(f"There is no task '{name}'.{hint}")
    factory = load_object(name, f"task '{name}'") if known is None else registry.load("tasks", name)
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # not callable, or a C function without a signature
        signature = None
    own = () if signature is None else signature.parameters
    reward = None if "reward" in own else options.pop("reward", None)
    limits = None if "time_limits" in own else options.pop("time_limits", None)
    if signature is not None:
        _check_options(name, signature, options)
    try:
        source = factory(**options)
    except (TypeError, ValueError, KeyError, ImportError) as e:
        raise TaskError(f"task '{name}' could not be made: {type(e).__name__}: {e}") from e
    if missing := [part for part in ("name", "markov", "tasks", "make") if not hasattr(source, part)]:
        raise TaskError(f"task '{name}' is not a TaskSource: its {type(source).__name__} lacks {', '.join(missing)}.")
    source = declared(source)
    if limits is not None:
        try:
            source.time_limits = TimeLimits.of(limits)
        except TaskError as e:
            raise TaskError(f"task '{name}': {e}") from None
    if reward is None:
        return source
    try:
        judge = open_judge(reward)
    except RecipeError as e:
        raise RecipeError(f"task '{name}': {str(e).removeprefix('recipe: ')}") from None
    return with_judge(source, judge)


def with_judge(source: Any, judge: Judge) -> Any:
    """The source with this judge as its own."""
    from trailmark.tasks.base import declared

    source = declared(source)
    if not source.judged:
        raise TaskError(f"task '{source.name}' judges its plays itself: leave out 'reward'.")
    source.judge = judge
    judge.bind(source)
    return source


def keep_judge(source: Any, run: str | Path) -> None:
    """Bind the source's judge to this run, where it stores its answers. A run keeps the judge that it began with."""
    from trailmark.tasks.base import declared

    if (judge := declared(source).judge) is not None:
        judge.keep(Path(run) / "judge")


def load_object(path: str, what: str) -> Callable[..., Any]:
    """The callable at `module:attribute`. If there is none, the TaskError says that `what` needed it. It is
    a task of the registry, or code that a person named (`trust.py`)."""
    if path not in registry.ours("tasks").values():
        may_run(path, what)
    module_name, _, attribute = path.partition(":")
    try:
        module = import_module(module_name)
    except Exception as e:  # the user's module may raise anything at import
        if isinstance(e, ModuleNotFoundError) and e.name and f"{module_name}.".startswith(f"{e.name}."):
            raise TaskError(f"{what}: there is no module '{e.name}' to import; is its folder on PYTHONPATH?") from e
        raise TaskError(f"{what}: importing '{module_name}' failed with {type(e).__name__}: {e}") from e
    found = getattr(module, attribute, None) if attribute else None
    if not callable(found):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise TaskError(f"{what}: module '{module_name}' has nothing callable named '{attribute}'."
                        f"{nearest(attribute, known) if known else ''}")  # fmt: skip
    return found


def _check_options(name: str, signature: inspect.Signature, options: dict[str, Any]) -> None:
    kinds, parameters = inspect.Parameter, signature.parameters
    named = {k: p for k, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    if not any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()):
        for key in options:
            if key not in named:
                hint = nearest(key, named) if named else " It takes none."
                raise TaskError(f"task '{name}' has no option '{key}'.{hint}")
    for key, p in named.items():
        if p.default is kinds.empty and key not in options:
            raise TaskError(f"task '{name}' needs the option '{key}'.")


def task_options(words: Sequence[str]) -> dict[str, Any]:
    """The key=value words of a command line as keyword arguments of a task."""
    from trailmark.marked_yaml import parse

    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise TaskError(f"option '{word}': expected key=value, such as mode=pickup.")
        options[key] = parse(value, f"option '{word}'", line=False)[0]
    return options
