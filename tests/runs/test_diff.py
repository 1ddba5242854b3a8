import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.errors import DataError, RunError
from trailmark.runs.diff import diff_runs, few
from trailmark.runs.recipe_keys import diff_recipes
from trailmark.runs.store import Run, write_segment
from trailmark.types import Annotation, Episode, Scored, Task

RECIPE = "method: demo\nname: {name}\nout: {name}\nlearner:\n  optim:\n    lr: 0.1\n"


def bf16(path, values: list[int]) -> None:
    """A safetensors file with one bfloat16 vector, of which numpy knows nothing."""
    head = json.dumps({"w": {"dtype": "BF16", "shape": [len(values)], "data_offsets": [0, 2 * len(values)]}}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + np.array(values, "<u2").tobytes())


@pytest.fixture
def runs(tmp_path):
    with Run.create(tmp_path / "a", RECIPE.format(name="a")) as run:
        for step in (1, 2):
            run.log(step, {"loss": step / 3}, {"seconds": 1.0})
            rows = [Episode(f"e{step}{i}", Task("t"), "g", (), {"p": Scored(0.5)}) for i in range(2)]
            write_segment(run.episodes_dir, step, rows)
        write_segment(run.annotations_dir("mc"), 1, [Annotation("e10", "mc", "turn", (0.5,), 0)])
        (run.checkpoints_dir / "2").mkdir()
        tensors = {"a.weight": np.zeros((2, 3), np.float32), "b.bias": np.zeros(4, np.float64)}
        save_file(tensors, run.checkpoints_dir / "2/model.safetensors")
        bf16(run.checkpoints_dir / "2/half.safetensors", [1, 2, 3])
        (run.checkpoints_dir / "2/state.json").write_text('{"step": 2, "rng": {"torch": [1, 2]}}')
        (run.checkpoints_dir / "2/notes.bin").write_bytes(b"abc")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b/recipe.yaml").write_text(RECIPE.format(name="b"))
    (tmp_path / "b/timings.jsonl").write_text('{"step":1,"seconds":9.0}\n')
    (tmp_path / "b/episodes/.x.tmp").write_text("half")
    return tmp_path / "a", tmp_path / "b"


def told(runs) -> list[str]:
    return [str(d) for d in diff_runs(*runs)]


def test_equal_runs_may_differ_in_name_place_and_clock(runs):
    assert told(runs) == []


def edit(path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_texts_are_named_by_line_and_key(runs):
    b = runs[1]
    edit(b / "recipe.yaml", "lr: 0.1", "lr: 0.2\n    clip: 1")
    edit(b / "metrics.jsonl", "0.6666666666666666", "0.6666666666666667")
    edit(b / "episodes/000002.jsonl", '"e21","task":{"id":"t"}', '"e21","task":{"id":"u"}')
    edit(b / "annotations/mc/000001.jsonl", "0.5", "0.25")
    edit(b / "checkpoints/2/state.json", "[1, 2]", "[1, 3]")
    edit(b / "checkpoints/2/notes.bin", "abc", "abcd")
    assert told(runs) == [
        "recipe.yaml: key 'learner.optim.lr': 0.1 and 0.2",
        "recipe.yaml: key 'learner.optim.clip': nothing and 1",
        "metrics.jsonl: line 2 (step 2): key 'loss': 0.6666666666666666 and 0.6666666666666667",
        'episodes/000002.jsonl: line 2 (id e21): key \'task.id\': "t" and "u"',
        "annotations/mc/000001.jsonl: line 1 (episode e10): key 'values.0': 0.5 and 0.25",
        "checkpoints/2/notes.bin: the bytes differ (3 and 4 of them)",
        "checkpoints/2/state.json: key 'rng.torch.1': 2 and 3",
    ]


def test_lengths_and_missing_files(runs):
    a, b = runs
    (b / "episodes/000001.jsonl").unlink()
    (a / "checkpoints/2/notes.bin").unlink()
    with (b / "metrics.jsonl").open("a") as f:
        f.write('{"step":3}\n')
    edit(b / "episodes/000002.jsonl", '"e20"', ' "e20"')
    edit(b / "checkpoints/2/state.json", "[1, 2]", "[1, 2, 3]")
    assert told(runs) == [
        "metrics.jsonl: line 3: only in the second run",
        "episodes/000001.jsonl: only in the first run",
        "episodes/000002.jsonl: line 1 (id e20): equal values in other words",
        "checkpoints/2/notes.bin: only in the second run",
        "checkpoints/2/state.json: key 'rng.torch': 2 and 3 entries",
    ]


def test_tensors_are_compared_by_bits(runs):
    b = runs[1]
    minus = np.zeros(4, np.float64)
    minus[2] = -0.0  # equal as a number, other bits
    save_file({"a.weight": np.zeros((2, 3), np.float32), "b.bias": minus}, b / "checkpoints/2/model.safetensors")
    bf16(b / "checkpoints/2/half.safetensors", [1, 2, 4])
    assert told(runs) == [
        "checkpoints/2/half.safetensors: tensor 'w': element 2 of [3] differs",
        "checkpoints/2/model.safetensors: tensor 'b.bias': element 2 of [4] differs",
    ]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a.weight": np.zeros((3, 2), np.float32), "b.bias": np.zeros(4)}, "'a.weight': F32 [2, 3] and F32 [3, 2]"),
        ({"a.weight": np.zeros((2, 3), np.float32)}, "'b.bias': only in the first run"),
        (
            {"a.weight": np.zeros((2, 3), np.float32), "b.bias": np.zeros(4), "c": np.zeros(1)},
            "'c': only in the second",
        ),
    ],
)
def test_tensors_that_do_not_pair(runs, tensors, said):
    save_file(tensors, runs[1] / "checkpoints/2/model.safetensors")
    (only,) = told(runs)
    assert only.startswith(f"checkpoints/2/model.safetensors: tensor {said}")


def test_bad_files_are_sentences(runs, tmp_path):
    with pytest.raises(RunError, match=r"nowhere is not a run: there is no such directory"):
        diff_runs(runs[0], tmp_path / "nowhere")
    (runs[1] / "checkpoints/2/model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(DataError, match=r"model.safetensors: cannot be compared .*\(its header is cut off\)"):
        diff_runs(*runs)
    (runs[1] / "metrics.jsonl").write_text("{\n")
    with pytest.raises(
        DataError, match=r"metrics.jsonl: cannot be compared with .*metrics.jsonl: one of them is damaged"
    ):
        diff_runs(*runs)


def test_recipes_by_key():
    assert diff_recipes("a: 1\nsteps: 2\n", "a: 1.0\nsteps: 3\n", ignored=("steps",)) == ["key 'a': 1 and 1.0"]


def test_many_files_of_one_run_are_a_few_lines(runs):
    """A run that went on longer has hundreds of files that the other has not."""
    a, b = runs
    for step in range(3, 183):
        (b / "episodes" / f"{step:06d}.jsonl").write_text("{}\n")
    edit(b / "recipe.yaml", "lr: 0.1", "lr: 0.2")
    every = diff_runs(a, b)
    lines = few(every)
    assert len(every) == 181 and len(lines) == 6
    assert lines[0] == "recipe.yaml: key 'learner.optim.lr': 0.1 and 0.2"
    assert lines[1] == "episodes/000003.jsonl: only in the second run"
    assert (
        lines[4]
        == "episodes: 177 more files are only in the second run (episodes/000006.jsonl to episodes/000182.jsonl)"
    )
    assert lines[5] == "181 differences in all; --all prints every one"
    assert few(every[:5]) == [str(d) for d in every[:5]]  # few stay as they are
    shell = lambda *words: CliRunner().invoke(app, ["diff", str(a), str(b), *words])
    short, whole = shell(), shell("--all")
    assert short.exit_code == whole.exit_code == 1
    assert short.stdout.splitlines() == lines and whole.stdout.splitlines() == [str(d) for d in every]
    assert few([]) == [] and CliRunner().invoke(app, ["diff", str(a), str(a)]).stdout == "identical\n"
