"""Packages stand in an order: nothing that a package imports leads back to it, not even inside a function."""

import ast
from collections import defaultdict
from pathlib import Path

import trailmark

ROOT = Path(trailmark.__file__).parent


def imports(root):
    """Package or module at the top -> what it imports of its kind."""
    edges = defaultdict(set)
    for file in root.rglob("*.py"):
        mine = file.relative_to(root).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module == "trailmark":
                names = [f"trailmark.{a.name}" for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            edges[mine] |= {n.split(".")[1] for n in names if n.startswith("trailmark.")} - {mine}
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


def test_packages_form_an_order():
    edges = imports(ROOT)
    assert {"types", "tasks"} <= edges["rollout"] and "methods" in edges["evaluate"]  # the imports are seen at all
    assert circles(edges) == set(), "these import each other, directly or in a circle"
