"""Packages stand in an order: nothing that a package imports leads back to it, not even inside a function. And a folder
of tests runs without the others."""

import ast
import functools
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import trailmark
from trailmark.tasks import task_names

ROOT = Path(trailmark.__file__).parent
TESTS = Path(__file__).parent
PAPERS = {p.name for p in (ROOT / "methods").iterdir() if (p / "method.py").exists()}
WORLDS = {p.stem for p in (ROOT / "tasks").iterdir() if p.stem in {name.replace("-", "_") for name in task_names()}}


parsed = functools.cache(ast.parse)


def imported(text, package, types=True):
    """The full names that a module imports anywhere, also inside functions; without `types`, not those that only a type
    checker imports. `package` is the one that the module lies in."""
    tree, skipped = parsed(text), set()
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


def home(module):
    """What a module belongs to: a package or module at the top, a paper (methods.lpr) or a world (tasks.taxi)."""
    parts = module.split(".")[1:]
    inner = len(parts) > 1 and parts[1] in {"methods": PAPERS, "tasks": WORLDS}.get(parts[0], ())
    return ".".join(parts[:2]) if inner else parts[0]


def imports(root):
    """Each home -> those that it imports from."""
    edges = defaultdict(set)
    for module, others in module_imports(root, types=True).items():
        if module != "trailmark":
            edges[home(module)] |= {home(m) for m in others if m != "trailmark"} - {home(module)}
    return edges


def module_imports(root, types=False):
    """Module -> the modules that it imports when it runs, at once or later; with `types` also for a type checker."""
    name = lambda f: ".".join(["trailmark", *f.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
    files = {name(f): f for f in root.rglob("*.py")}
    edges = {}
    for module, file in files.items():
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        names = imported(file.read_text(), package, types)
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


def test_no_two_packages_import_each_other():
    """Here `methods` is one package with its papers: a paper's commands import no command line and no evaluation."""
    edges = defaultdict(set)
    for module, others in imports(ROOT).items():
        edges[module.split(".")[0]] |= {other.split(".")[0] for other in others}
    assert {(a, b) for a in edges for b in edges[a] if a < b and a in edges[b]} == set()


def test_modules_form_an_order():
    """An import inside a function may save time. It never holds two modules together that need each other."""
    edges = module_imports(ROOT)
    assert {"trailmark.registry", "trailmark.score.base"} <= edges["trailmark.score.open_judge"]
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


def test_common_packages_know_no_paper_and_no_world():
    """A paper's folder uses every common package, and no other paper. Worlds say their own answers and metrics."""
    assert {"reflect", "oreo", "lpr", "vrcli"} <= PAPERS and {"alfworld", "taxi", "puzzle", "prompts"} <= WORLDS
    edges = imports(ROOT)
    papers, worlds = {f"methods.{p}" for p in PAPERS}, {f"tasks.{w}" for w in WORLDS} - {"tasks.prompts"}
    assert len(papers & edges.keys()) == len(PAPERS)
    known = {(a, b) for a, others in edges.items() for b in others & papers}
    assert known == set(), "only what is declared in a provides.py knows a paper"
    known = {(a, b) for a, others in edges.items() for b in others & worlds if not a.startswith("methods.")}
    assert known == set(), "only what is declared in a provides.py knows a world"


def test_no_folder_of_tests_has_the_name_of_a_package():
    """Folders of tests can be imported while tests run. TRL looked for a package `vllm`, found `tests/vllm`, and could
    not be imported any more."""
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(n for extra in project["optional-dependencies"].values() for n in extra)]
    packages = {re.split(r"[^\w.-]", name)[0].replace("-", "_").lower() for name in wanted}
    assert packages >= {"trl", "torch", "math_verify"}
    folders = {p.name for p in TESTS.rglob("*") if p.is_dir() and any(p.glob("*.py"))}
    assert not folders & (packages | {"vllm", "deepspeed", "ray", "sglang", "unsloth"})
