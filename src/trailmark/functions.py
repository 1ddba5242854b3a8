"""A user's functions, found by name: `my_file.py:score` or `package.module:score`."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trailmark.errors import RecipeError, nearest
from trailmark.trust import FromSource, code_file, import_module, may_run


def load_function(path: str, key: str = "reward") -> tuple[Callable[..., Any], Path]:
    """The function at `my_file.py:score` or `package.module:score`, and its file. The file is imported, and nothing
    else is run; it must be code that a person named (`trust.py`). Errors name `key`, the recipe key with the function's
    name."""
    where, _, name = path.rpartition(":")
    if not where or not name:
        raise RecipeError(f"{key}: '{path}' must be my_file.py:function or package.module:function.")
    may_run(path, key)
    module = _from_file(Path(where), key) if where.endswith(".py") else _from_package(where, key)
    found = getattr(module, name, None)
    if not callable(found):
        known = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
        hint = nearest(name, known) if known else " It has no functions."
        raise RecipeError(f"{key}: {where} has no function '{name}'.{hint}")
    return found, Path(getattr(module, "__file__", None) or where)


def function_file(path: str) -> Path | None:
    """The file that defines the function `path`, found without running it. None: there is no file, or it is not
    Python."""
    where = path.rpartition(":")[0]
    if where.endswith(".py"):
        return Path(where)
    return code_file(path) if where else None


def _from_file(file: Path, key: str) -> Any:
    if not file.is_file():
        raise RecipeError(f"{key}: there is no file {file}.")
    name = f"_own_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file, loader=FromSource(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.resolve().parent))  # the function may import files next to its own, as a script may
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        del sys.modules[name]
        raise RecipeError(f"{key}: importing {where_it_failed(problem, file)}.") from problem
    finally:
        sys.path.remove(str(file.resolve().parent))
    return module


def _from_package(name: str, key: str) -> Any:
    try:
        return import_module(name)
    except (Exception, SystemExit) as problem:
        if isinstance(problem, ModuleNotFoundError) and problem.name and f"{name}.".startswith(f"{problem.name}."):
            raise RecipeError(
                f"{key}: there is no module '{problem.name}'; a file is written my_file.py:score."
            ) from problem
        raise RecipeError(f"{key}: importing '{name}' failed with {type(problem).__name__}: {problem}.") from problem


def where_it_failed(problem: BaseException, file: Path) -> str:
    """The file, the line and the problem. The line is the last one in the user's own file."""
    if isinstance(problem, SyntaxError):
        return f"{problem.filename}:{problem.lineno} failed with SyntaxError: {problem.msg}"
    lines = [f.lineno for f in traceback.extract_tb(problem.__traceback__) if Path(f.filename).name == file.name]
    at = f":{lines[-1]}" if lines else ""
    return f"{file}{at} failed with {type(problem).__name__}: {_text(problem)}"


def _text(problem: BaseException) -> str:
    """The message of an exception. A user's exception class may fail to give one."""
    try:
        return str(problem)
    except Exception:
        return "(its message cannot be read)"
