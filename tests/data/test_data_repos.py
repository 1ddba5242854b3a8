"""The exact tree of the kept files."""

import os

import pytest
from data_fixtures import tree, write_tree

from trailmark.errors import DataError
from trailmark.methods.reflect.explore.repos import filter_repository
from trailmark.tasks.auto_explore.repo import snapshot

LONG = "words that are long enough\n"
STAYS = {
    "decision.py": LONG,  # "ci" is a part of no name here
    "social/license_text.md": LONG,
    "v1.0/notes.txt": LONG,  # a folder with a dot is a folder
    "src/special.py": LONG,
    "Dockerfile": "short",  # a name without a dot is not looked into
    "my file.md": LONG,
    "ten.md": "0123456789",
    "accents.md": "é" + "e" * 9,  # nine of ten
}
GOES = {
    ".github/a.py": LONG, "_private.py": LONG, "src/__init__.py": LONG, "LICENSE": LONG, "LICENSE.md": LONG,
    "Makefile": LONG,
    "docs/conf.py": LONG, "artwork/a.md": LONG, "dev-requirements.txt": LONG, "ci/run.sh": LONG, "src/ci.py": LONG,
    "tests/test_a.py": LONG, "examples/a.py": LONG, "naïve.py": LONG, "logo.svg": LONG,
    "latin.txt": b"caf\xe9 and cake",
    "nine.md": "012345678", "umlauts.md": "ää" + "a" * 8, "only/hidden/.x.py": LONG, "big.txt": b"a" * 2_000_001,
}  # fmt: skip


def test_the_tree(tmp_path):
    write_tree(tmp_path / "repo", {**STAYS, **GOES})
    os.symlink("/etc", tmp_path / "repo" / "outside")
    os.mkfifo(tmp_path / "repo" / "pipe.py")
    counts = filter_repository(tmp_path / "repo", tmp_path / "kept")
    assert tree(tmp_path / "kept") == {k: v.encode() for k, v in sorted(STAYS.items())}
    assert counts.kept == {"files": 8}
    assert counts.left_out == {
        "hidden name": 2, "private name": 2, "name of a kind left out": 10, "name that is not ASCII": 1,
        "unsupported suffix": 1, "not UTF-8 text": 1, "too short": 1, "mostly not ASCII": 1, "too long": 1,
        "link or special file": 2,
    }  # fmt: skip
    (tmp_path / "kept" / "decision.py").write_text("mine")
    assert filter_repository(tmp_path / "repo", tmp_path / "kept") == counts  # what is there stays as it is
    assert (tmp_path / "kept" / "decision.py").read_text() == "mine"


def test_too_long_too_deep_and_binary(tmp_path):
    """A name without a dot is not looked into, but not copied whatever its size either."""
    deep = "d/" * 63
    files = {
        "a.py": LONG,
        "dump": b"a" * 2_000_001,
        "nul.py": b"x = 1\0" * 9,
        f"{deep}in.py": LONG,
        f"{deep}d/out.py": LONG,
    }
    write_tree(tmp_path / "repo", files)
    counts = filter_repository(tmp_path / "repo", tmp_path / "kept")
    assert set(tree(tmp_path / "kept")) == {"a.py", f"{deep}in.py"} == set(snapshot(tmp_path / "kept").files)
    assert counts.left_out == {"too long": 1, "not UTF-8 text": 1, "folder too deep": 1}


def test_without_rules(tmp_path):
    write_tree(tmp_path / "repo", {**STAYS, **GOES})
    os.symlink("decision.py", tmp_path / "repo" / "link.py")
    counts = filter_repository(tmp_path / "repo", tmp_path / "kept", rules=False)
    hidden = {".github/a.py", "only/hidden/.x.py"}
    assert set(tree(tmp_path / "kept")) == {*STAYS, *GOES} - hidden
    assert counts.left_out == {"hidden name": 2, "link or special file": 1}


def test_a_half_copy_is_made_again(tmp_path):
    write_tree(tmp_path / "repo", {"a.py": LONG})
    write_tree(tmp_path / ".kept.part", {"old.py": LONG})  # left by a process that died
    filter_repository(tmp_path / "repo", tmp_path / "kept")
    assert tree(tmp_path) == {"kept/a.py": LONG.encode(), "repo/a.py": LONG.encode()}


def test_nothing_to_read(tmp_path):
    write_tree(tmp_path / "repo", {"tests/a.py": LONG, "Dockerfile": LONG})
    with pytest.raises(DataError, match="repo: holds no file that could be read"):
        filter_repository(tmp_path / "repo", tmp_path / "kept")
    with pytest.raises(DataError, match="is no folder"):
        filter_repository(tmp_path / "nowhere", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
