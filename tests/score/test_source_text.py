"""What belongs to a user's function: its file, the files next to it that it imports, and those that these import."""

from pathlib import Path

import pytest

from trailmark.errors import RecipeError
from trailmark.functions import function_file, load_function
from trailmark.trust import source_text


@pytest.fixture
def folder(tmp_path):
    files = {
        "mine.py": "import json\nimport sourced_b\nfrom sourced_c.inner import x\ndef score(a):\n  import sourced_d\n",
        "sourced_b.py": "from sourced_e import y\nimport mine\n",  # a circle
        "sourced_c.py": "c = 1\n",
        "sourced_d.py": "this is (no Python\n",
        "sourced_e.py": "import sourced_b as again, sourced_f\n",
        "sourced_f.py": "from . import sourced_g\nfrom .sourced_g import z\n",  # a package's own, not next to it
        "sourced_g.py": "g = 1\n",
        "json.txt": "no module",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_file_and_the_files_it_needs_each_once(folder):
    got = source_text(folder / "mine.py").decode()
    order = ["mine", "sourced_b", "sourced_c", "sourced_d", "sourced_e", "sourced_f"]
    assert got == "".join((folder / f"{name}.py").read_text() for name in order)
    assert source_text(folder / "sourced_g.py") == b"g = 1\n"
    assert source_text(folder / "sourced_d.py") == b"this is (no Python\n"


@pytest.mark.parametrize("name, counts", [
    ("mine", True), ("sourced_b", True), ("sourced_c", True), ("sourced_d", True), ("sourced_e", True),
    ("sourced_f", True), ("sourced_g", False),
])  # fmt: skip
def test_a_change_counts_exactly_if_the_function_can_see_it(folder, name, counts):
    before = source_text(folder / "mine.py")
    (folder / f"{name}.py").write_text((folder / f"{name}.py").read_text() + "\n# changed\n")
    assert (source_text(folder / "mine.py") != before) is counts


def test_a_link_is_read_where_it_points(folder, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "mine.py"
    link.symlink_to(folder / "mine.py")
    assert source_text(link) == source_text(folder / "mine.py")


def test_the_file_of_a_function_without_running_it(tmp_path, monkeypatch):
    (tmp_path / "sourced_raises.py").write_text("raise RuntimeError('it was run')\n")
    (tmp_path / "sourced_package").mkdir()
    (tmp_path / "sourced_package" / "__init__.py").write_text("raise RuntimeError('it was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert function_file("a/b.py:f") == Path("a/b.py")
    assert function_file("sourced_raises:f") == tmp_path / "sourced_raises.py"
    for none in ("sourced_none:f", "sourced_package.inner:f", "sys:exit", "score", ":f", ""):
        assert function_file(none) is None


def test_helpers_next_to_the_file_are_found_and_the_path_is_as_before(tmp_path):
    import sys

    (tmp_path / "sourced_helper.py").write_text("def half(x):\n    return x / 2\n")
    file = tmp_path / "uses.py"
    file.write_text("from sourced_helper import half\n\n\ndef score(answer):\n    return half(len(answer))\n")
    before = list(sys.path)
    made, where = load_function(f"{file}:score")
    assert made("four") == 2.0 and where == file and sys.path == before
    file.write_text("x = 1\n1 / 0\n")
    with pytest.raises(RecipeError) as found:
        load_function(f"{file}:score", "judge.path")
    assert str(found.value) == f"judge.path: importing {file}:2 failed with ZeroDivisionError: division by zero."
    assert sys.path == before
    file.write_text("def scores(a): ...\n\n\ndef _hidden(a): ...\n")
    with pytest.raises(RecipeError) as found:
        load_function(f"{file}:score")
    assert str(found.value) == f"reward: {file} has no function 'score'. Did you mean 'scores'?"
    file.write_text("number = 1\n")
    with pytest.raises(RecipeError) as found:
        load_function(f"{file}:number")
    assert str(found.value) == f"reward: {file} has no function 'number'. It has no functions."
