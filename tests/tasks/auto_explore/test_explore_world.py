"""Costs, ends, menus and observations of one episode."""

import random

import pytest

from trailmark.errors import TaskError
from trailmark.tasks import get_task
from trailmark.tasks.auto_explore.commands import quote, way_to
from trailmark.tasks.auto_explore.oracle import best_command, label_of
from trailmark.tasks.check import check_task
from trailmark.tasks.labels import CHOICES
from trailmark.types import Scored, Task


def begin(repo, target="src/deep/inner.py", split="all", **options):
    source = get_task("auto-explore", repo=str(repo), query="Where is y?", target=target, **options)
    world = source.make()
    return world, world.reset(source.tasks(split, 1)[0])


def test_observation(repo):
    world, seen = begin(repo)
    assert seen.state == (
        "# Task\nWhere is y?\n# Current folder\n\n# Entries of the folder\n"
        "README.md\ndocs/\nmy file.py\nnotes.xyz\nsetup.py\nsrc/\n# Commands so far\n# Result of the last command\n"
    )
    assert seen.menu == (
        "# Commands\n0. cat README.md\n1. id README.md\n2. cd docs\n3. cat \"my file.py\"\n4. id \"my file.py\"\n"
        "5. cat setup.py\n6. id setup.py\n7. cd src\n"
    )  # fmt: skip
    assert seen.labels == tuple("01234567") and seen.actions[7] == "cd src"
    seen = world.step("7").observation
    assert seen.state == (
        "# Task\nWhere is y?\n# Current folder\nsrc/\n# Entries of the folder\ncore.py\ndata.csv\ndeep/\n"
        "# Commands so far\ncd src\n# Result of the last command\ncd src\nSuccess: the current folder is src/.\n"
    )
    assert seen.actions == ("cd ..", "cat core.py", "id core.py", "cat data.csv", "id data.csv", "cd deep")
    seen = world.step("3").observation
    assert seen.state.endswith(
        "# Commands so far\ncd src\ncat data.csv\n# Result of the last command\ncat data.csv\n"
        "Success: the content of src/data.csv:\n0,0\n1,1\n2,4\n3,9\n4,16\n(cut: the first 5 lines are shown)\n"
    )
    assert seen.actions == ("cd ..", "cat core.py", "id core.py", "id data.csv", "cd deep")
    assert world.step("0").observation.state.endswith("Success: the current folder is the root.\n")


def test_the_best_way_costs_n_minus_h(repo):
    """cd, cd, cat, id: costs 1, 1, 1, -14, in all -11."""
    world, _ = begin(repo)
    steps = [world.step(c) for c in way_to("src/deep/inner.py")]
    assert [-s.reward for s in steps] == [1, 1, 1, -14]
    assert steps[-1].terminated and not steps[-1].truncated and steps[-1].outcome == Scored(11.0, True)
    assert steps[-1].info == {
        "command": "id inner.py", "cost": -14.0, "identified": "src/deep/inner.py", "steps": 4, "total_cost": -11.0
    }  # fmt: skip
    assert steps[-1].observation.labels == ()
    with pytest.raises(TaskError, match="over"):
        world.step("0")


@pytest.mark.parametrize("before", [0, 1, 13])
def test_a_wrong_id_costs_n_plus_h(repo, before):
    world, _ = begin(repo)
    for _ in range(before):
        assert world.step("ls").reward == -1
    last = world.step("id README.md")
    assert last.terminated and last.outcome == Scored(-(before + 1 + 15), False)


def test_the_horizon_costs_2h(repo):
    world, _ = begin(repo)
    steps = [world.step("ls") for _ in range(15)]
    assert steps[-1].truncated and not steps[-1].terminated and steps[-1].outcome == Scored(-30.0, False)
    assert not any(s.over for s in steps[:-1])


def test_success_with_the_last_step_counts(repo):
    world, _ = begin(repo)
    for _ in range(14):
        world.step("ls")
    last = world.step("id src/deep/inner.py")
    assert last.terminated and not last.truncated and last.outcome == Scored(0.0, True)


def test_error_and_warning_costs(repo):
    """Counted from what the world answers, never from words inside a file."""
    (repo / "Error.txt").write_text("Error Warning Error\n")
    world, _ = begin(repo, error_cost=2, warning_cost=1)
    replies = ("cat nothing.py", "fly", "cat Error.txt", "ls")
    assert [world.step(r).reward for r in replies] == [-3, -2, -1, -1]
    world, _ = begin(repo)
    assert [world.step(r).reward for r in replies] == [-1, -1, -1, -1]


def test_any_of_several_targets_wins(repo):
    for path in ("setup.py", "docs/guide.rst"):
        world, _ = begin(repo, target=["setup.py", "docs/guide.rst"])
        assert world.step(f"id {path}").outcome == Scored(14.0, True)


def test_first_step(repo):
    assert begin(repo, first_step=True)[0].step("cd src").outcome == Scored(115.0, True)
    assert begin(repo, first_step=True)[0].step("cd docs").outcome == Scored(-16.0, False)
    assert begin(repo, "setup.py", first_step=True)[0].step("cat setup.py").outcome == Scored(115.0, True)
    assert begin(repo, "setup.py", first_step=True)[0].step("id setup.py").outcome == Scored(14.0, True)


def test_easy_names_the_file(repo):
    assert begin(repo, easy=True)[0].query == "Find the file src/deep/inner.py."


def test_free_exploration_has_no_success(repo):
    source = get_task("auto-explore", repo=str(repo))
    (task,) = source.tasks("train")
    world = source.make()
    world.reset(task)
    assert task.data["leaveout"] == 0 and world.step("id setup.py").outcome == Scored(-1.0, None)


@pytest.mark.parametrize(
    ("reply", "command"),
    [("7", "cd src"), (" 7 \n", "cd src"), ("7.", "cd src"), ("7. cd src", "cd src"), ("..7..", "cd src"),
    ("cd src", "cd src"),
     ('cat "my file.py"', 'cat "my file.py"'), ("cat 'my file.py'", 'cat "my file.py"'),
     ("cat my\\ file.py", 'cat "my file.py"'),
     ("cat src/deep/../core.py", "cat src/deep/../core.py"), ("seven", ""), ("", ""), ("7 8", ""), ("77", "")],
)  # fmt: skip
def test_replies(repo, reply, command):
    world, _ = begin(repo)
    assert world.step(reply).info["command"] == command
    assert world.result.startswith(command or "Warning: ")


def test_names_with_spaces_are_recorded_as_plain_paths(repo):
    world, _ = begin(repo, "my file.py")
    last = world.step('id "my file.py"')
    assert last.info["identified"] == "my file.py" and last.outcome.success


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("ls", "Success:\nREADME.md\ndocs/\nmy file.py\nnotes.xyz\nsetup.py\nsrc/\n"),
        ("ls src", "Success:\ncore.py\ndata.csv\ndeep/\n"),
        ("head -n 1 src/core.py", "Success: the content of src/core.py:\ndef core():\n"),
        ("head -1 src/core.py", "Success: the content of src/core.py:\ndef core():\n"),
        ("tail -n 1 src/core.py", "Success: the content of src/core.py:\n    return 1\n"),
        ("tail -n 0 src/core.py", "Success: the content of src/core.py:\n"),
        ("tail -n x src/core.py", "Error: 'x' is not a number of lines.\n"),
        ("cd src/deep", "Success: the current folder is src/deep/.\n"),
        ("cd", "Success: the current folder is the root.\n"),
        ("cd setup.py", "Error: setup.py is not a folder.\n"),
        ("cat setup.py/x.py", "Error: setup.py is not a folder.\n"),
        ("cat src", "Error: src is a folder.\n"),
        ("cat .", "Error: the root is a folder.\n"),
        ("cat notes.xyz", "Error: notes.xyz is not a kind of file that can be read here.\n"),
        ("id notes.xyz", "Error: notes.xyz is not a kind of file that can be read here.\n"),
        ("id nothing.py", "Error: there is no such file or folder.\n"),
        ("cat", "Error: cat takes one path, not 0.\n"),
        ("cat 'x", "Error: a quotation mark is not closed.\n"),
    ],
)
def test_commands_of_ones_own(repo, command, answer):
    world, _ = begin(repo)
    step = world.step(command)
    assert world.result.endswith(answer) and not step.over


def test_leave_out_keeps_targets_and_takes_its_share(repo):
    """1,000 episodes: 'README.md' is there in half of them (3 sigma: 453 to 547), the target and its folders always."""
    world, _ = begin(repo, leaveout=0.5)
    there = {"README.md": 0, "docs": 0, "src": 0, "src/deep": 0}
    for task in world.source.tasks("train", 1000):
        world.reset(task)
        top, below = world._view("").entries, world._view("src").entries
        for name in there:
            there[name] += name in top if "/" not in name else name.split("/")[1] in below
        assert "inner.py" in world._view("src/deep").entries
    assert there["src"] == there["src/deep"] == 1000
    assert 453 <= there["README.md"] <= 547 and 453 <= there["docs"] <= 547


def test_what_is_left_out_cannot_be_named(repo):
    world, _ = begin(repo, leaveout=0.5)
    for task in world.source.tasks("train", 20):
        world.reset(task)
        gone = "docs" not in world._view("").entries
        world.step("cat docs/guide.rst")
        assert ("Error: there is no such" in world.result) == gone or "guide.rst" not in world._view("docs").entries


def test_leave_out_depends_on_the_task_alone(repo):
    world, _ = begin(repo, leaveout=0.5)
    a, b = world.source.tasks("train", 2)
    seen = world.reset(a)
    world.reset(b)
    assert world.reset(a) == seen == world.source.make().reset(a)
    assert {world.reset(t).menu for t in world.source.tasks("train", 20)} != {seen.menu}


def test_shuffled_labels(repo):
    world, seen = begin(repo, shuffle_labels=True)
    used = set()
    for task in world.source.tasks("train", 300):
        seen = world.reset(task)
        assert len(set(seen.labels)) == len(seen.labels) and set(seen.labels) <= set(CHOICES)
        used |= set(seen.labels)
        for label, command in zip(seen.labels, seen.actions):
            assert f"{label}. {command}\n" in seen.menu
        if "cd src" in seen.actions:
            assert world.step(seen.labels[seen.actions.index("cd src")]).info["command"] == "cd src"
    assert len(used) > 240


def test_pages_of_a_large_folder(tmp_path):
    for i in range(40):
        (tmp_path / f"f{i:02}.py").write_text(f"{i}\n")
    source = get_task("auto-explore", repo=str(tmp_path), target="f39.py", labels=list("abcdefghij"), horizon=20)
    world = source.make()
    seen = world.reset(source.tasks("all")[0])
    assert len(seen.labels) == 9 and seen.actions[-1] == "next page" and "(page 1 of 10)" in seen.menu
    pages = 1
    while "cat f39.py" not in seen.actions:
        seen = world.step(label_of(seen, "cat f39.py", world.commands)).observation
        pages += 1
    assert pages == 10 and seen.actions[-1] == "previous page" and world.history == []
    assert world.step(label_of(seen, "cat f39.py", world.commands)).info["command"] == "cat f39.py"
    assert "(page 1 of 10)" in world._see().menu
    assert world.step("id f39.py").outcome == Scored(20.0 - 11, True)


def test_turning_pages_forth_and_back(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.py").write_text("x")
    source = get_task("auto-explore", repo=str(tmp_path), labels=list("abcd"))
    world = source.make()
    first = world.reset(source.tasks("all")[0])
    second = world.step("next page").observation
    assert second.actions == ("cat 1.py", "id 1.py", "previous page", "next page")
    assert world.step(second.labels[2]).observation.menu == first.menu


def test_the_oracle_from_anywhere(repo):
    world, _ = begin(repo)
    for c in ("cd docs", "cat guide.rst"):
        world.step(c)
    done = []
    while not world.over:
        done.append(best_command(world))
        world.step(done[-1])
    assert done == ["cd ..", "cd src", "cd deep", "cat inner.py", "id inner.py"]


@pytest.mark.parametrize("options", [{}, {"shuffle_labels": True}, {"labels": list("abcd")}])
def test_the_oracle_s_labels_lead_to_the_target(repo, options):
    """Also with shuffled labels, and over the pages of a short alphabet: 4 commands, and the turning of pages."""
    world, _ = begin(repo, horizon=30, **options)
    while not world.over:
        step = world.step(world.oracle())
    assert step.outcome.success and world.oracle() is None
    assert world.history == ["cd src", "cd deep", "cat inner.py", "id inner.py"]
    assert world.steps == 4 if "labels" not in options else world.steps > 4
    free, _ = begin(repo, target=None)
    assert free.oracle() is None


@pytest.mark.parametrize("options", [{}, {"shuffle_labels": True}, {"leaveout": 0.5}, {"labels": list("abc")}])
def test_the_protocol_is_kept(repo, options):
    report = check_task(get_task("auto-explore", repo=str(repo), target="src/core.py", **options), episodes=10)
    assert report.ok, report


def test_the_repository_is_the_same_after_1000_random_episodes(repo, digest):
    world, _ = begin(repo, leaveout=0.5, shuffle_labels=True)
    before, draw = digest(repo), random.Random(0)
    for task in world.source.tasks("train", 1000):
        seen, over = world.reset(task), False
        while not over:
            step = world.step(draw.choice(seen.labels))
            seen, over = step.observation, step.over
    assert digest(repo) == before


def test_binary_and_foreign_text_are_refused(repo):
    (repo / "bin.py").write_bytes(b"a\0b")
    (repo / "latin.txt").write_bytes("é".encode("latin-1"))
    (repo / "empty.md").write_text("")
    world, _ = begin(repo)
    for command, answer in (
        ("cat bin.py", "Error: bin.py is a binary file.\n"),
        ("cat latin.txt", "Error: latin.txt is not UTF-8 text.\n"),
        ("head latin.txt", "Error: latin.txt is not UTF-8 text.\n"),
        ("cat empty.md", "Success: the content of empty.md:\n"),
    ):
        world.step(command)
        assert world.result == f"{command}\n{answer}"


def test_a_huge_file_is_shown_by_its_beginning(repo):
    with (repo / "huge.py").open("wb") as f:
        f.truncate(1 << 34)  # a sparse file of 16 GiB
        f.write(b"x" * 10)
    with (repo / "long.py").open("w") as f:
        f.write("x" * (3 << 20))
    world, _ = begin(repo)
    world.step("cat huge.py")
    assert world.result.endswith("Error: huge.py is a binary file.\n")
    world.step("cat long.py")
    assert len(world.result) < 2200 and world.result.endswith("(cut: the first 500 tokens are shown)\n")
    world.step("tail long.py")
    assert world.result.endswith("Error: long.py is too large to show its end.\n")


def test_tasks_that_cannot_be_played(repo):
    world, _ = begin(repo)
    for data, why in (
        ({}, "needs data repo, query and targets"),
        ({"repo": "repo", "query": "q", "targets": ["none.py"]}, "target 'none.py' is not a readable file"),
        ({"repo": "other", "query": "q", "targets": []}, "where is the repository 'other'"),
    ):
        with pytest.raises(TaskError, match=why):
            world.reset(Task("t", 0, data))


def test_quoting_comes_back():
    import shlex

    for name in (
        "a.py",
        "my file.py",
        "$(touch x).py",
        "a'b.py",
        'a"b.py',
        "a\\b.py",
        "a;b.py",
        "#a.py",
        "a b'c\"d.py",
        "-n.py",
        "ä.py",
    ):
        assert shlex.split(quote(name)) == [name]
    assert quote("my file.py") == '"my file.py"' and quote("$x.py") == "$x.py"
