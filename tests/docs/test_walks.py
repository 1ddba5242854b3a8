"""The walks of docs/design.md: at most fifteen stops each, and every file:function that they name is there."""

import ast
import re
from pathlib import Path

import pytest

import trailmark

ROOT = Path(trailmark.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs/design.md").read_text()
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


@pytest.mark.parametrize("walk", WALKS)
def test_every_stop_is_there(walk):
    stops = [re.findall(r"`([\w/]+\.py):([\w.]+)`", line) for line in WALKS[walk]]
    assert all(stops), "each stop names a file and a function"
    missing = [f"{file}:{name}" for stop in stops for file, name in stop if name not in names(file)]
    assert missing == []
