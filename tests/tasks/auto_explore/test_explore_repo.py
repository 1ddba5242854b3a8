"""The snapshot: what is in it, and what cannot be read through it."""

import os
import threading

import pytest

from trailmark.errors import TaskError
from trailmark.tasks.auto_explore.repo import Entry, Refused, snapshot


def test_names_are_sorted_and_hidden_ones_are_missing(repo):
    made = snapshot(repo)
    assert [e.name for e in made.folders[""]] == ["README.md", "docs", "my file.py", "notes.xyz", "setup.py", "src"]
    assert made.folders["src"] == (
        Entry("core.py", "src/core.py", "code"),
        Entry("data.csv", "src/data.csv", "data"),
        Entry("deep", "src/deep", None),
    )
    assert made.files == [
        "README.md", "docs/guide.rst", "my file.py", "setup.py", "src/core.py", "src/data.csv", "src/deep/inner.py"
    ]  # fmt: skip
    assert made.skipped == {"hidden entries": 2, "files of other kinds": 1}


def test_links_devices_and_odd_names_are_not_in_it(repo, tmp_path):
    outside = tmp_path / "outside.py"
    outside.write_text("secret")
    (repo / "out.py").symlink_to(outside)
    (repo / "inside.py").symlink_to(repo / "setup.py")
    (repo / "loop").symlink_to(repo)
    os.mkfifo(repo / "pipe.py")
    (repo / "two\nlines.py").write_text("x")
    with open(os.fsencode(repo) + b"/\xff.py", "w") as f:
        f.write("x")
    made = snapshot(repo)
    assert made.files == snapshot(repo).files and not {"out.py", "inside.py", "pipe.py"} & set(made.files)
    assert "loop" not in made.folders and all("\n" not in f for f in made.files)
    assert made.skipped["links"] == 3 and made.skipped["devices, pipes and sockets"] == 1
    assert made.skipped["names that cannot be shown"] == 2


def test_a_file_with_a_second_name_is_a_link(repo, tmp_path):
    """The other name may lie outside; also one that is made after the listing, and one that lies inside."""
    outside = tmp_path / "outside.py"
    outside.write_text("secret")
    os.link(outside, repo / "hard.py")
    os.link(repo / "setup.py", repo / "again.py")
    made = snapshot(repo)
    assert not {"hard.py", "again.py", "setup.py"} & set(made.files) and made.skipped["hard links"] == 3
    assert not {"hard.py", "setup.py"} & {e.name for e in made.folders[""]}
    os.link(repo / "src" / "core.py", tmp_path / "taken.py")
    with pytest.raises(Refused, match="has a second name"):
        made.read("src/core.py", 10)
    (tmp_path / "all").mkdir()
    os.link(outside, tmp_path / "all" / "a.py")
    with pytest.raises(TaskError, match=r"no file that can be read \(found: 1 hard links\).*a copy of the folder"):
        snapshot(tmp_path / "all")


def test_reading(repo):
    made = snapshot(repo)
    assert made.read("src/core.py", 1000) == (b"def core():\n    return 1\n", False)
    assert made.read("src/core.py", 3) == (b"def", True)
    for path in ("notes.xyz", "src", "", "../outside.py", "/etc/passwd", "src/../setup.py", ".env.py"):
        with pytest.raises(Refused, match="not a file of this repository"):
            made.read(path, 10)


def swap_file_for_link(repo, outside):
    (repo / "setup.py").unlink()
    (repo / "setup.py").symlink_to(outside)


def swap_file_for_pipe(repo, outside):
    (repo / "setup.py").unlink()
    os.mkfifo(repo / "setup.py")


def swap_file_for_same_bytes(repo, outside):
    (repo / "setup.py").rename(repo / "setup.old")
    (repo / "setup.py").write_text("import that\n")


def grow(repo, outside):
    with (repo / "setup.py").open("a") as f:
        f.write("more\n")


def remove(repo, outside):
    (repo / "setup.py").unlink()


@pytest.mark.parametrize("change", [swap_file_for_link, swap_file_for_pipe, swap_file_for_same_bytes, grow, remove])
def test_a_file_that_is_another_one_by_now_is_refused(repo, tmp_path, change):
    """None of them blocks, and none shows what is outside."""
    outside = tmp_path / "outside.py"
    outside.write_text("import this\n")
    made = snapshot(repo)
    change(repo, outside)
    with pytest.raises(Refused, match=r"has changed|any more"):
        made.read("setup.py", 1000)


def test_a_folder_swapped_for_a_link_is_refused(repo, tmp_path):
    made = snapshot(repo)
    (repo / "src").rename(tmp_path / "elsewhere")
    (repo / "src").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="any more"):
        made.read("src/core.py", 1000)


def test_a_moved_root_is_refused(repo, tmp_path):
    made = snapshot(repo)
    repo.rename(tmp_path / "moved")
    repo.mkdir()
    (repo / "setup.py").write_text("import this\n")
    with pytest.raises(Refused, match="moved away"):
        made.read("setup.py", 1000)


def test_a_file_that_grows_while_it_is_read(repo, monkeypatch):
    """The writer appends between two reads; the answer is a refusal and not an endless read."""
    import trailmark.tasks.auto_explore.repo as module

    made, real = snapshot(repo), os.read
    path = repo / "setup.py"

    def read(fd, n):
        part = real(fd, n)
        with path.open("a") as f:
            f.write("more\n")
        return part

    monkeypatch.setattr(module.os, "read", read)
    done = []

    def ask():
        with pytest.raises(Refused, match="has changed"):
            made.read("setup.py", 1 << 20)
        done.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(30)
    assert done


def test_no_descriptor_is_left_open(repo):
    made = snapshot(repo)
    before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        made.read("src/deep/inner.py", 10)
        with pytest.raises(Refused):
            made.read("nothing", 10)
    assert len(os.listdir("/dev/fd")) == before


def test_a_root_that_is_swapped_while_it_is_listed(repo, tmp_path, monkeypatch):
    """What was opened first and what is there later are not the same folder."""
    import trailmark.tasks.auto_explore.repo as module

    seen = iter([(1, 1), (2, 2)])
    monkeypatch.setattr(module, "_identity", lambda fd: next(seen))
    with pytest.raises(TaskError, match="cannot be listed .*moved away"):
        snapshot(repo)


def test_bad_roots(repo, tmp_path):
    with pytest.raises(TaskError, match="cannot be opened"):
        snapshot(tmp_path / "nothing")
    with pytest.raises(TaskError, match="is not a folder"):
        snapshot(repo / "setup.py")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "a.bin").write_bytes(b"x")
    with pytest.raises(TaskError, match=r"no file that can be read \(found: 1 files of other kinds\)"):
        snapshot(tmp_path / "bare")
    with pytest.raises(TaskError, match="more than 3 entries"):
        snapshot(repo, most_entries=3)
