"""Task files, splits, filters, labels of a tokenizer, and errors of a user."""

import json
import os
from pathlib import Path

import pytest

from trailmark.errors import DataError, TaskError
from trailmark.models.tiny import tiny_tokenizer
from trailmark.tasks import get_task
from trailmark.tasks.auto_explore.oracle import best_command
from trailmark.tasks.auto_explore.records import load_records
from trailmark.tasks.labels import CHOICES, alphabet

TARGETS = ("setup.py", "docs/guide.rst", "src/core.py", "src/deep/inner.py")


def row(i, target, split="train", **more):
    return {
        "repo": "repo",
        "version": "1.0",
        "kind": "doc",
        "query": f"Question {i}?",
        "target": target,
        "id": i,
        "split": split,
    } | more


def write(folder, rows, name="tasks_train.jsonl"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.fixture
def made(repo, tmp_path):
    folder = write(tmp_path / "tasks", [row(i, t) for i, t in enumerate(TARGETS)])
    write(folder, [row(9, "README.md", "visible_test")], "tasks_visible_test.jsonl")
    return lambda **options: get_task("auto-explore", tasks=str(folder), repos=str(repo.parent), **options)


def test_splits(made):
    source = made()
    assert [t.data["targets"] for t in source.tasks("all")] == [[t] for t in (*TARGETS, "README.md")]
    assert [t.id for t in source.tasks("test")] == ["repo-9@0.0"] == [t.id for t in source.tasks("visible_test")]
    assert {t.data["leaveout"] for t in source.tasks("train")} == {0.5}
    assert {t.data["leaveout"] for t in source.tasks("test") + source.tasks("all")} == {0.0}
    assert {t.data["leaveout"] for t in made(leaveout=0.2).tasks("test")} == {0.2}
    with pytest.raises(TaskError, match="no split 'trian'. Did you mean 'train'"):
        source.tasks("trian")


def test_training_goes_in_shuffled_passes(made):
    tasks = made().tasks("train", 10, seed=3)
    assert len(tasks) == 10 == len({t.id for t in tasks})
    for one_pass in (tasks[:4], tasks[4:8]):
        assert sorted(t.data["targets"][0] for t in one_pass) == sorted(TARGETS)
    assert tasks == made().tasks("train", 10, seed=3) != made().tasks("train", 10, seed=4)
    assert tasks[0].meta == {"kind": "doc"}


def test_filters(made):
    assert [t.data["targets"] for t in made(depth=[0]).tasks("all")] == [["setup.py"], ["README.md"]]
    assert [t.data["targets"] for t in made(depth=[1, 2], only=["src/"]).tasks("all")] == [
        ["src/core.py"],
        ["src/deep/inner.py"],
    ]
    assert len(made(packages=["repo"]).tasks("all")) == 5
    for one, several in (
        ({"depth": 0}, {"depth": [0]}),
        ({"only": "cor"}, {"only": ["cor"]}),
        ({"packages": "repo"}, {}),
    ):
        assert made(**one).tasks("all") == made(**several).tasks("all")
    for options, why in (
        ({"depth": ["0"]}, r"depth must be a list of whole numbers, not \['0'\]"),
        ({"only": []}, r"only must be a list of texts, not \[\]"),
        ({"query": "Where?"}, "query and target go with repo"),
        ({"packages": ["rebo"]}, "no task is about the package 'rebo'. Did you mean 'repo'"),
        ({"depth": [7]}, r"leave none of 5 tasks \(depths: \[0, 1, 2\]\)"),
    ):
        with pytest.raises(TaskError, match=why):
            made(**options)


def test_a_target_that_is_not_there_is_dropped_and_counted(repo, tmp_path):
    folder = write(
        tmp_path / "t",
        [row(0, "setup.py"), row(1, "gone.py"), row(2, "x.bin"), row(3, ".env.py"), row(4, ["gone.py", "src/core.py"])],
    )
    source = get_task("auto-explore", tasks=str(folder), repos=str(repo.parent))
    assert [t.data["targets"] for t in source.tasks("all")] == [["setup.py"], ["src/core.py"]]
    source.tasks("train")
    assert source.dropped == {
        "targets that cannot be read in their repository": 1,
        "targets that are hidden or of another kind": 2,
    }


def test_a_target_that_is_no_text_is_no_target(repo, tmp_path):
    (repo / "picture.py").write_bytes(b"\x89PNG\0")
    folder = write(tmp_path / "t", [row(0, "setup.py"), row(1, "picture.py")])
    source = get_task("auto-explore", tasks=str(folder), repos=str(repo.parent))
    assert [t.data["targets"] for t in source.tasks("all")] == [["setup.py"]]
    assert source.dropped == {"targets that cannot be read in their repository": 1}
    with pytest.raises(TaskError, match="target 'picture.py' is not a readable file"):
        get_task("auto-explore", repo=str(repo), target="picture.py")


def test_versions_do_not_lead_out_of_the_folder(repo, tmp_path):
    (repo / "repo-").mkdir()
    folder = write(tmp_path / "t", [row(0, "setup.py", version="/../..")])
    (task,) = get_task("auto-explore", tasks=str(folder), repos=str(repo.parent)).tasks("all")
    assert get_task("auto-explore", tasks=str(folder), repos=str(repo.parent)).start(task).library.files.root == repo
    with pytest.raises(TaskError, match="there is no repository 'repo'"):
        get_task("auto-explore", tasks=str(folder), repos=str(repo)).tasks("all")


def test_the_reference_format(repo, tmp_path):
    def record(question, filename, identified, **more):
        base = {"answer": "a", "optimal_path": ["cd src"], "n_level": 1, "model": "m", "root": "data/repos/repo"}
        return (
            base
            | {"question": question, "filename": filename, "trajectories": [{"filename": f} for f in identified]}
            | more
        )

    rows = [
        record("Where?", "src/core.py", ["src/core.py", "setup.py", None]),
        record("Nobody found it", "setup.py", [None]),
        record("Nobody looked", "setup.py", []),
        record("Spaces", 'my file.py', ['"my file.py"']),
        record("From above", "data/repos/repo/setup.py", ["data/repos/repo/setup.py"]),
        record("", "setup.py", ["setup.py"]),
    ]  # fmt: skip
    (tmp_path / "validate.json").write_text(json.dumps(rows))
    source = get_task("auto-explore", tasks=str(tmp_path / "validate.json"), repos=str(repo.parent))
    assert [t.data["targets"] for t in source.tasks("all")] == [
        ["src/core.py", "setup.py"], ["my file.py"], ["setup.py"],
    ]  # fmt: skip
    assert source.dropped == {"records no teacher identified a file for": 2, "records without a question": 1}
    assert len(source.tasks("validate")) == 3
    assert source.tasks("all")[0].meta == {"answer": "a", "optimal_path": ["cd src"], "n_level": 1, "model": "m"}


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("t.jsonl", '{"repo": "r", "query": "q", "target": "a.py"}\nnot json\n', r"t.jsonl:2"),
        ("t.jsonl", '{"repo": "r", "target": "a.py"}\n', r"t.jsonl:1: key 'query': must be a text, not None"),
        ("t.jsonl", '{"repo": "r", "query": "q", "target": 3}\n', r"t.jsonl:1: key 'target': must be a path or a list"),
        (
            "t.jsonl",
            '{"repo": "r", "query": "q", "target": "a.py", "id": 1}\n' * 2,
            "t.jsonl: a second task has the id 'r-1'",
        ),
        (
            "t.jsonl",
            r'{"repo": "r", "query": "\ud800", "target": "a.py"}',
            "t.jsonl:1: key 'query': holds half a surrogate",
        ),
        (
            "t.json",
            '[{"question": "q", "root": "r", "trajectories": 5}]',
            "t.json:1: key 'trajectories': must be a list",
        ),
        ("t.jsonl", "", "there is no task in .*the file is empty"),
        ("t.json", "{}", "t.json: must be a list"),
        ("t.json", "[1]", "record 1 must be an object"),
        ("t.json", '[{"question": "q"}]', "t.json:1: key 'root': must be a text"),
        ("t.json", "[", "cannot be read as JSON"),
        ("t.csv", "", "ends in .jsonl or .json"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, why):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=why):
        load_records(tmp_path / name)


def test_places_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        load_records(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="holds no task files"):
        load_records(tmp_path)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "needs either tasks"),
        ({"repo": "x", "tasks": "y"}, "needs either tasks"),
        ({"horizon": 0}, "horizon of at least 1"),
        ({"leaveout": 1.0}, "below 1, not 1.0"),
        ({"error_cost": -1}, "must not be negative"),
        ({"labels": ["a", "a", "b"]}, "listed twice"),
        ({"target": "src/cor.py"}, "Did you mean 'src/core.py'"),
        ({"target": "../outside.py"}, "is not a readable file"),
        ({"horizn": 3}, "no option 'horizn'"),
    ],
)
def test_options_that_cannot_be(repo, options, why):
    with pytest.raises(TaskError, match=why):
        get_task("auto-explore", **({"repo": str(repo)} | options if options else {}))


def test_a_folder_that_trailmark_data_wrote_is_a_task(repo, tmp_path):
    """Its splits are read and not the stages before them; its repositories lie in it; walks do not travel with every
    episode."""
    import shutil

    made = tmp_path / "made"
    shutil.copytree(repo, made / "repos" / "repo")
    both = [row(0, "setup.py", "train", trajectories=[{"filename": "setup.py"}]), row(1, "src/core.py", "test")]
    write(made, both, "tasks.jsonl"), write(made, both, "tasks_filtered.jsonl")
    write(made, both[:1], "train.jsonl"), write(made, both[1:], "test.jsonl")
    source = get_task("auto-explore", tasks=str(made))
    assert [len(source.tasks(s)) for s in ("train", "test", "all")] == [1, 1, 2]
    assert "trajectories" not in source.tasks("train")[0].meta
    assert get_task("auto-explore", tasks=str(made / "test.jsonl")).tasks("all")[0].data["targets"] == ["src/core.py"]


def test_a_repository_that_is_nowhere(tmp_path):
    folder = write(tmp_path / "t", [row(0, "setup.py")])
    with pytest.raises(TaskError, match="where is the repository 'repo'"):
        get_task("auto-explore", tasks=str(folder)).tasks()
    with pytest.raises(TaskError, match="there is no repository 'repo' in"):
        get_task("auto-explore", tasks=str(folder), repos=str(tmp_path)).tasks()


def test_the_folder_with_the_version_goes_first(repo, tmp_path):
    (repo.parent / "repo-1.0").mkdir()
    (repo.parent / "repo-1.0" / "setup.py").write_text("the right one\n")
    folder = write(tmp_path / "t", [row(0, "setup.py")])
    source = get_task("auto-explore", tasks=str(folder), repos=str(repo.parent))
    world = source.make()
    world.reset(source.tasks("all")[0])
    world.step("cat setup.py")
    assert world.result.endswith("the right one\n")


def test_binding_to_a_tokenizer(repo):
    source = get_task("auto-explore", repo=str(repo), target="src/core.py", max_tokens=10)
    assert source.labels == CHOICES
    world = source.make()
    (task,) = source.tasks("all")
    world.reset(task)
    world.step("cat src/core.py")
    assert world.result.endswith("src/core.py:\ndef core():\n    return 1\n")  # 25 bytes are 7 tokens
    source.bind(tiny_tokenizer())
    assert source.labels == alphabet(tiny_tokenizer()) and len(source.labels) == 62
    world.reset(task)
    world.step("cat src/core.py")
    assert world.result.endswith("src/core.py:\ndef core()\n(cut: the first 10 tokens are shown)\n")


def test_labels_that_the_tokenizer_does_not_have(repo):
    source = get_task("auto-explore", repo=str(repo), labels=["a", "b", "c", "17"])
    with pytest.raises(TaskError, match="label '17' is not a single token"):
        source.bind(tiny_tokenizer())
    source.bind(tiny_tokenizer(["17"]))
    assert source.labels == ("a", "b", "c", "17")


def test_a_model_plays_it(repo):
    """Labels are single tokens of the bound tokenizer, so a seat that is restricted to them can choose any."""
    from trailmark.engines.scripted import ScriptedEngine
    from trailmark.rollout.play import Seat, play

    tokenizer = tiny_tokenizer()
    source = get_task("auto-explore", repo=str(repo), target="src/core.py", shuffle_labels=True)
    source.bind(tokenizer)
    policy = lambda prompt, draw: draw.choice(
        [x.partition(".")[0] for x in prompt.rpartition("# Commands\n")[2].splitlines()]
    )
    episodes = play(source, source.tasks("train", 20), [Seat("policy", ScriptedEngine(policy, tokenizer))])
    assert all(e.terminated or e.truncated for e in episodes)
    assert {len(t.tokens) for e in episodes for t in e.turns} == {1}


@pytest.mark.data
def test_every_target_of_the_real_tasks_is_found(tmp_path_factory):
    """All 542 tasks of 11 real packages. They are fetched into TRAILMARK_CACHE once; with a filled cache no network is
    needed."""
    root = os.environ.get("TRAILMARK_DATA")
    assert root, "set TRAILMARK_DATA to the folder of data"
    source = get_task("auto-explore", tasks=str(Path(root) / "autoexplore"))
    world, won = source.make(), 0
    tasks = source.tasks("all") + source.tasks("train")
    for task in tasks:
        world.reset(task)
        step = world.step(best_command(world))
        while not step.over:
            step = world.step(best_command(world))
        assert step.info["steps"] == task.data["targets"][0].count("/") + 2
        won += step.outcome.success
    assert not source.dropped and won == len(tasks) == 542 + 445
