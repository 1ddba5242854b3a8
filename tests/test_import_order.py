"""Packages stand in an order: what one imports does not import it back, at the top of a file or inside a function."""

import ast
from collections import defaultdict
from pathlib import Path

import trailmark

ROOT = Path(trailmark.__file__).parent
KNOWN = {("evaluate", "methods"), ("rollout", "tasks")}  # still to be taken apart


def test_no_two_packages_import_each_other():
    edges = defaultdict(set)
    for file in ROOT.rglob("*.py"):
        mine = file.relative_to(ROOT).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            edges[mine] |= {n.split(".")[1] for n in names if n.startswith("trailmark.")} - {mine}
    circles = {tuple(sorted((a, b))) for a in edges for b in edges[a] if a in edges.get(b, ())}
    assert circles <= KNOWN, f"these import each other: {sorted(circles - KNOWN)}"
