"""Whose code is run. A recipe may name Python code: a task `guess:Guess`, a method `my.module:Class`, a function
`my_file.py:score`. A recipe that comes with somebody else's run must not choose what is run here.

Code is run if a person named it: on the command line, in a recipe file given there that belongs to no run, or from
Python. What was run once is remembered by name, place and content, outside of all runs, so a run of one's own can be
evaluated and served without a word more. Everything else needs `--trust`.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from trailmark import registry
from trailmark.errors import RecipeError

TRUST = "--trust"
SIGNS = ("checkpoints", "episodes", "metrics.jsonl", "versions.json", ".lock")  # of a run, beside its recipe


class FromSource(importlib.machinery.SourceFileLoader):
    """Compiles the file as it is now. Bytecode beside it may be that of other code: somebody may have put it there,
    and Python knows its own by time and length alone."""

    def path_stats(self, path: Any) -> Any:
        raise OSError("no stored bytecode")


class _Sources:
    """Finds modules that are not installed, and reads their sources: these are what a person may have read."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        finder = importlib.machinery.PathFinder
        spec = None if name.partition(".")[0] == "trailmark" else finder.find_spec(name, path, target)
        if spec is None or spec.origin is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        if _installed(Path(spec.origin)):
            return None
        spec.loader = FromSource(spec.name, spec.origin)
        return spec


class _Said:
    """What a person wrote. `words` is None in a Python program: then only what a run names is refused."""

    words: ClassVar[list[str] | None] = None
    everything: ClassVar[bool] = False
    of_runs: ClassVar[set[str]] = set()
    of_files: ClassVar[set[str]] = set()  # what recipe files name that a Python program gave


@contextlib.contextmanager
def command(words: Sequence[str]) -> Iterator[list[str]]:
    """Run a command with these words. Gives the words without `--trust`, which may stand anywhere."""
    before = _Said.words, _Said.everything
    rest = [w for w in words if w != TRUST]
    _Said.everything = len(rest) < len(words)
    _Said.words = [w for w in rest if not os.path.isdir(w)]  # a folder named like code is a folder
    try:
        yield rest
    finally:
        _Said.words, _Said.everything = before


def named_by_person(recipe: Mapping[str, Any]) -> None:
    """Note the texts of a recipe file that a person gave."""
    if _Said.words is not None:
        _Said.words += [*_texts(recipe), f"method={recipe.get('method')}"]
    else:
        _Said.of_files.update(_texts(recipe))


def named_by_run(recipe: Mapping[str, Any]) -> None:
    """Note the texts of a recipe that lies in a run."""
    _Said.of_runs.update(_texts(recipe))


def of_a_run(file: Path) -> bool:
    """Whether a recipe file lies in a run's folder, which holds `recipe.yaml` and what a run writes beside it."""
    above = list(file.resolve().parents)[:4]
    return any((p / "recipe.yaml").exists() and any((p / sign).exists() for sign in SIGNS) for p in above)


def may_run(name: str, key: str) -> None:
    """Raise an error if nobody here named the code `name`. Nothing is imported to find that out."""
    if name in registry.ours("players").values():
        return
    file = code_file(name)
    if _Sources not in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), _Sources)
    free = _Said.words is None and (name not in _Said.of_runs or name in _Said.of_files)
    if free or _Said.everything or _is_named(name):
        if file is not None and (mark := _mark(name, file)) is not None:
            with contextlib.suppress(OSError):  # without a place to remember it, it is asked again
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
        return
    if file is not None and (mark := _mark(name, file)) is not None and mark.exists():
        return
    what = f"would import and run {file}" if file is not None else "would import and run that code"
    how = f"add {TRUST} to the command" if _Said.words is not None else "call trailmark.trust.trust_everything()"
    raise RecipeError(
        f"{key}: '{name}' is code that the recipe of a run names and you did not: it {what}. Read it first; if you "
        f"trust it, {how}."
    )


def trust_everything() -> None:
    """For Python programs: run whatever the recipes of runs name."""
    _Said.everything = True


def import_module(name: str) -> Any:
    """Import a module of ours, or one that a person named. That one may lie in the working directory."""
    if not name.startswith("trailmark."):
        find_here()
    return importlib.import_module(name)


def find_here() -> None:
    """Let modules in the working directory be found, once a person has named code. Before that, a file there must not
    pass for a package that is not installed."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def code_file(name: str) -> Path | None:
    """The file of `my_file.py:score`, `package.module:Class` or `package.module`, found without importing anything."""
    where = name.rpartition(":")[0] or name
    if where.endswith(".py"):
        return Path(where) if Path(where).is_file() else None
    known: str | None = None
    places: Sequence[str] | None = None
    for part in where.split("."):
        known = part if known is None else f"{known}.{part}"
        spec = _spec(known, places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
        if places is None:
            break
    return Path(spec.origin) if known == where and spec.has_location and spec.origin else None


def source_text(file: Path) -> bytes:
    """The content of a file, followed by that of the files next to it that it imports, and that these import. So a
    change in a helper is a change of the function. A file that imports none gives its own content."""
    folder, seen, text = file.resolve().parent, [file.resolve()], b""
    for path in seen:
        data = path.read_bytes()
        text += data
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in names:
                beside = folder / f"{name.partition('.')[0]}.py"
                if beside.is_file() and beside.resolve() not in seen:
                    seen.append(beside.resolve())
    return text


def _package_text(name: str, file: Path) -> bytes:
    """The files of the package that `name` is in, and of packages beside it that are imported. An installed package is
    its own."""
    where = name.rpartition(":")[0] or name
    parts = [] if where.endswith(".py") else where.split(".")[: None if file.name == "__init__.py" else -1]
    root = file.resolve().parents[len(parts)]
    seen = [file.resolve()]
    if _installed(root):
        return b""
    for path in seen:
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        names += [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module and not n.level]
        for first in sorted({*parts[:1], *(n.partition(".")[0] for n in names)}):
            files = [root / f"{first}.py", *sorted((root / first).rglob("*.py"))]
            seen += [f.resolve() for f in files if f.is_file() and f.resolve() not in seen]
    return b"".join(path.read_bytes() for path in seen[1:])


def _installed(file: Path) -> bool:
    return "site-packages" in file.parts or any(file.is_relative_to(p) for p in {sys.prefix, sys.base_prefix})


def _spec(name: str, places: Sequence[str] | None) -> Any:
    """What Python would import under a full name. `places` are the folders of the package above it."""
    from importlib.machinery import PathFinder

    with contextlib.suppress(Exception):  # finders of other people
        for finder in sys.meta_path:
            if spec := finder.find_spec(name, places):
                return spec
        if places is None:
            return PathFinder.find_spec(name, [os.getcwd()])
    return None


def _is_named(name: str) -> bool:
    words = _Said.words or ()
    if ":" not in name:
        return f"method={name}" in words
    whole = re.compile(rf"(?<![\w./:-]){re.escape(name)}(?![\w./:-])")
    return any(whole.search(word) for word in words)


def _mark(name: str, file: Path) -> Path | None:
    """The file that remembers this code: an empty file, whose name is a hash of name, place and content."""
    try:
        home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        text = f"{name}\n{file.resolve()}\n".encode() + source_text(file) + _package_text(name, file)
    except (OSError, RuntimeError):  # no home, or a file that cannot be read
        return None
    return home / "trailmark" / "trusted" / hashlib.sha256(text).hexdigest()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)
