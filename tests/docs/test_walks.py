"""Every file:function is there that is named by the walks of docs/design.md (at most fifteen stops each), and by the
table of equations at the top of each paper's method.py."""

import ast
import re
from pathlib import Path

import pytest

import trailmark

ROOT = Path(trailmark.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs/design.md").read_text()
POINTER = re.compile(r"`([\w/]+\.py):([\w.]+)`")
WALKS = {walk: re.findall(r"(?m)^\d+\. .*$", text)
         for walk, text in re.findall(r"(?m)^\*(A [^*\n]+)\*.*\n\n((?:\d+\. .*\n)+)", PAGE)}  # fmt: skip


def names(file):
    """The functions and classes of a module; those of a class as Class.name."""
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{inner.name}" for inner in ast.walk(node)
                        if inner is not node and isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef))  # fmt: skip


def test_the_three_walks_are_on_the_page():
    assert [len(stops) for stops in WALKS.values()] == [15, 15, 14]
    first, second, third = WALKS
    assert first.startswith("A GRPO step") and second == "A stage of LPR" and third == "A turn of a served search"


def missing(text):
    return [f"{file}:{name}" for file, name in POINTER.findall(text) if name not in names(file)]


@pytest.mark.parametrize("walk", WALKS)
def test_every_stop_is_there(walk):
    assert all(map(POINTER.search, WALKS[walk])), "each stop names a file and a function"
    assert missing("\n".join(WALKS[walk])) == []


@pytest.mark.parametrize("paper", ["lpr", "oreo", "reflect", "vrcli"])
def test_every_equation_of_a_paper_is_where_its_method_says(paper):
    about = ast.get_docstring(ast.parse((ROOT / "methods" / paper / "method.py").read_text()))
    table = about.split("The paper's equations, and where they are")[1]
    assert len(POINTER.findall(table)) >= 5 and missing(table) == []
