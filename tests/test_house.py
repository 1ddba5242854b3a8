"""The house stays small: a budget of lines for each package, and for what a method must import."""

import ast
from pathlib import Path

import trailmark

ROOT = Path(trailmark.__file__).parent
TESTS = Path(__file__).parent
OWN = ("tasks", "data", "methods")  # they grow with each paper and each world
LINES = {  # budgets, a little above what there is; a package that needs more says why in docs/design.md
    "models": 4830, "evaluate": 2620, "engines": 2350, "runs": 2120, "serve": 2240, "commands": 1540, "score": 1960,
    "rollout": 1510, "formats": 1600, "verify": 1310, "report": 1190, "learn": 1120, "seats": 790, "objectives": 500,
    "credit": 500, "ask": 380, "stats": 290, "terminal": 280,
}  # fmt: skip
TOP = 5180  # the modules at the top, together
ALL, COMMON = 64_400, 32_150
LONGEST = 500  # of one file
# Imports inside functions are counted.
REACHES = {"learn.loop": 7400, "rollout.play": 6100, "methods.base": 13_400, "tests/methods/sixth_method.py": 14_850}


def size(path):
    return path.read_text().count("\n")


FILES = {".".join(("trailmark", *p.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): p
         for p in ROOT.rglob("*.py")}  # fmt: skip


def imports(path):
    """The modules of ours that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        named = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        named += [f"{m}.{a.name}" for m in named for a in node.names]
        named += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        yield from (m for m in named if m in FILES)


def closure(start):
    """The modules of ours that a module of ours, or a file of the tests, imports, and those that they import."""
    seen, todo = set(), list(imports(TESTS.parent / start)) if start.endswith(".py") else [f"trailmark.{start}"]
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += imports(FILES[name])
    return seen


def test_packages_keep_to_their_budgets():
    of = {}
    for path in FILES.values():
        parts = path.relative_to(ROOT).parts
        of.setdefault(parts[0] if len(parts) > 1 else "", []).append(size(path))
    found = {name: sum(sizes) for name, sizes in of.items()}
    assert set(LINES) == set(found) - {"", *OWN}, "each package has a budget"
    over = {name: lines for name, lines in found.items() if lines > LINES.get(name, TOP if not name else ALL)}
    assert over == {} and sum(found.values()) <= ALL
    assert sum(n for name, n in found.items() if name not in OWN) <= COMMON


def test_no_file_is_a_house_of_its_own():
    assert {str(p.relative_to(ROOT)): size(p) for p in FILES.values() if size(p) > LONGEST} == {}


def test_what_a_part_of_the_core_imports():
    found = {name: sum(size(FILES[m]) for m in closure(name)) for name in REACHES}
    assert {name: lines for name, lines in found.items() if lines > REACHES[name]} == {}
