"""Packages stand in an order: nothing that a package imports leads back to it, not even inside a function. And a folder
of tests runs without the others."""

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import trailmark

ROOT = Path(trailmark.__file__).parent
TESTS = Path(__file__).parent


def imported(text, package, types=True):
    """The full names that a module imports anywhere, also inside functions; without `types`, not those that only a type
    checker imports. `package` is the one that the module lies in."""
    tree, skipped = ast.parse(text), set()
    for node in () if types else ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            skipped |= {id(inner) for part in node.body for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            yield from (".".join(filter(None, [*above, node.module, a.name])) for a in node.names)


def imports(root):
    """Package or module at the top -> what it imports of its kind."""
    edges = defaultdict(set)
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        names = imported(file.read_text(), ".".join(["trailmark", *parts[:-1]]))
        edges[parts[0]] |= {n.split(".")[1] for n in names if n.startswith("trailmark.")} - {parts[0]}
    return edges


def module_imports(root):
    """Module -> the modules that it imports when it runs, at once or later."""
    name = lambda f: ".".join(["trailmark", *f.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
    files = {name(f): f for f in root.rglob("*.py")}
    edges = {}
    for module, file in files.items():
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        names = imported(file.read_text(), package, types=False)
        edges[module] = {n if n in files else n.rpartition(".")[0] for n in names} & files.keys() - {module}
    return edges


def circles(edges):
    """Groups of packages of which each leads to each other, however long the way."""
    reach = {}
    for start in list(edges):
        seen, todo = set(), [start]
        while todo:
            for there in edges.get(todo.pop(), ()):
                if there not in seen:
                    seen.add(there)
                    todo.append(there)
        reach[start] = seen
    return {tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in reach if a in reach[a]}


def test_a_circle_is_found_however_long():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a", "d"}}
    assert circles(edges) == {("a", "b", "c"), ("d", "e")} and circles({"a": {"b"}, "b": {"c"}, "f": {"a"}}) == set()


def test_every_way_to_import_is_seen():
    text = "from trailmark import a, b\nimport trailmark.c.x as y\nfrom . import d\nfrom .e.f import g\n"
    text += "def late():\n    from ..h import i\n    from trailmark.j.k import l\n"
    want = ["a", "b", "c.x", "own.d", "own.e.f.g", "h.i", "j.k.l"]
    assert list(imported(text, "trailmark.own")) == [f"trailmark.{name}" for name in want]
    checked = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\nimport b\n"
    assert list(imported(checked, "own", types=False)) == ["typing.TYPE_CHECKING", "b"]


def test_packages_form_an_order():
    edges = imports(ROOT)
    assert {"errors", "texts"} <= edges["chat"]
    assert {"types", "tasks"} <= edges["rollout"] and "methods" in edges["evaluate"]  # the imports are seen at all
    assert circles(edges) == set(), "these import each other, directly or in a circle"


def test_modules_form_an_order():
    """An import inside a function may save time. It never holds two modules together that need each other."""
    edges = module_imports(ROOT)
    assert {"trailmark.score.judge", "trailmark.score.base"} <= edges["trailmark.score.open_judge"]
    assert circles(edges) == set(), "these import each other, at once or inside functions"


def test_a_folder_of_tests_needs_no_other_folder():
    """Each folder's tests import helpers of their own folder, or of one that pytest is told of."""
    settings = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    shared = {TESTS.parent / folder for folder in settings["pythonpath"]}
    files, helpers = sorted(TESTS.rglob("*.py")), defaultdict(set)
    for file in files:
        helpers[file.stem].add(file.parent)
    alien = [
        f"{file.relative_to(TESTS)} imports {name}"
        for file in files
        for name in {n.split(".")[0] for n in imported(file.read_text(), "")}
        if name in helpers and not helpers[name] & {file.parent, *shared}
    ]
    assert len(helpers["small_home"]) == 1 and alien == []
    assert [n for n, where in helpers.items() if len(where) > 1 and n not in ("conftest", "__init__")] == []


def test_nothing_else_is_built_on_the_parts_of_reflect_rl_and_oreo():
    """What others need too is not in a method's own files. Only the quickstart names the method that it shows."""
    edges = module_imports(ROOT)
    own = {m for m in edges if m.startswith(("trailmark.methods.reflect", "trailmark.methods.oreo"))}
    assert len(own) == 6
    who = {m for m in edges if edges[m] & own and m not in own}
    assert who == {"trailmark.commands.quickstart"}


def test_no_folder_of_tests_has_the_name_of_a_package():
    """Folders of tests can be imported while tests run. TRL looked for a package `vllm`, found `tests/vllm`, and could
    not be imported any more."""
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(n for extra in project["optional-dependencies"].values() for n in extra)]
    packages = {re.split(r"[^\w.-]", name)[0].replace("-", "_").lower() for name in wanted}
    assert packages >= {"trl", "torch", "math_verify"}
    folders = {p.name for p in TESTS.rglob("*") if p.is_dir() and any(p.glob("*.py"))}
    assert not folders & (packages | {"vllm", "deepspeed", "ray", "sglang", "unsloth"})
