"""Every mistake a user can make ends with one clear sentence and exit code 2, and nothing that existed is lost."""

import json
import subprocess
import sys

import forked
import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app

TASK = """
from trailmark.tasks.base import Observation, Step
from trailmark.types import Scored, Task

class Source:
    name, markov = "boom", True
    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"t{seed}-{k}", k) for k in range(n or 2)]
    def make(self):
        return self
    def reset(self, task):
        self.k = task.seed
        return Observation("go ", labels=("a", "b"))
    def step(self, action):
        if BROKEN or self.k == 1:
            raise RuntimeError("the world fell apart")
        won = 1.0 if action == "a" else 0.0
        return Step(Observation("end"), won, True, False, Scored(won))

def Make(broken=False):
    global BROKEN
    BROKEN = broken
    class One(Source):
        def make(self):
            return Source()
    return One()
"""
POLICY_GRADIENT = """
method: policy_gradient
out: {out}
steps: 2
prompts_per_step: 2
n: 2
task: {{name: "worlds:Make"}}
model: {{name: tiny, shape: {{layers: 1, width: 32, heads: 2, context: 64}}}}
engine: {{max_num_seqs: 4}}
"""
SFT = """
method: sft
out: {out}
data: {data}
steps: 2
batch: 2
model: {{name: tiny, shape: {{layers: 1, width: 32, heads: 2, context: 64}}}}
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Commands in a folder. They run in this process; with a limit on the size of files in one of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "worlds", raising=False)
    (tmp_path / "worlds.py").write_text(TASK)
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 3)
    (tmp_path / "pg.yaml").write_text(POLICY_GRADIENT.format(out=tmp_path / "run"))
    (tmp_path / "sft.yaml").write_text(SFT.format(out=tmp_path / "run", data=tmp_path / "data.jsonl"))

    def run(*words, limit=None):
        if not limit:
            done = CliRunner().invoke(app, list(map(str, words)))
            return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)
        code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
        code = f"{code}; from trailmark.commands.app import main; main()"
        return forked.run(
            [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, cwd=tmp_path
        )

    def fails(*words, says, limit=None, code=2):
        done = run(*words, limit=limit)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        for part in says:
            assert part in done.stderr, done.stderr
        return done

    run.fails = fails
    run.folder = tmp_path
    return run


def test_a_run_directory_is_never_overwritten(shell):
    assert shell("train", "sft.yaml").returncode == 0
    before = {p: p.read_bytes() for p in (shell.folder / "run").rglob("*") if p.is_file() and p.name != ".lock"}
    shell.fails("train", "sft.yaml", says=["holds a run", "--resume", "out="])
    assert before == {p: p.read_bytes() for p in (shell.folder / "run").rglob("*") if p.is_file() and p.name != ".lock"}
    shell.fails("train", "sft.yaml", "batch=1", "--resume", says=["batch"])


def test_recipes(shell):
    shell.fails("train", "none.yaml", says=["none.yaml"])
    shell.fails("train", "sft.yaml", "learner.optim.lrr=1", says=["learner.optim.lrr", "Did you mean", "'lr'"])
    shell.fails("train", "sft.yaml", "steps=2020-01-01", says=["steps", "2020-01-01"])
    shell.fails("train", "sft.yaml", "method=sftt", says=["sftt", "Did you mean 'sft'"])
    shell.fails("train", "pg.yaml", "objective={kind: clipped, bta: 1}", says=["objective", "bta"])
    with (shell.folder / "sft.yaml").open("a") as f:
        f.write("nonsense: 3\n")
    shell.fails("train", "sft.yaml", says=["sft.yaml:8", "nonsense"])
    assert not (shell.folder / "run").exists()


def test_data(shell):
    shell.fails("train", "sft.yaml", "data=nowhere.jsonl", says=["nowhere.jsonl", "No such file"])
    (shell.folder / "data.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n{"prompt": "1+1="}\n')
    shell.fails("train", "sft.yaml", says=["data.jsonl:2", "key 'response'"])
    (shell.folder / "data.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n{"prompt": "1+')
    shell.fails("train", "sft.yaml", says=["data.jsonl:2", "not JSON"])
    (shell.folder / "data.jsonl").write_text(json.dumps({"prompt": "x" * 100, "response": "2"}))
    shell.fails("train", "sft.yaml", says=["data.jsonl:1", "context is 64"])


def test_models(shell):
    (shell.folder / "empty").mkdir()
    shell.fails("train", "sft.yaml", "model={name: empty}", says=["empty", "config.json"])
    shell.fails("train", "sft.yaml", "model={name: tiny, device: cuda:77}", says=["cuda:77", "not available"])


def test_a_world_that_raises_is_counted_and_not_scored(shell):
    done = shell("train", "pg.yaml")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (shell.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["failed"] for r in rows] == [2, 2] and all(r["reward"] in (0.0, 0.5, 1.0) for r in rows)
    shell.fails("train", "pg.yaml", "task.options={broken: true}", f"out={shell.folder}/other",
                says=["the 4 episodes failed", "; the first: RuntimeError: the world fell apart"])  # fmt: skip
    shell.fails("train", "pg.yaml", "task.name=worlds:Mke", f"out={shell.folder}/third", says=["Mke"])


def test_a_loss_that_is_not_a_number(shell):
    shell.fails(
        "train", "sft.yaml", "learner.optim={lr: 1e30, clip: null}", "steps=9", says=["not finite", "checkpoint"]
    )


def test_a_full_disk(shell):
    """The first segment or checkpoint does not fit: a sentence, no half-written file, and what was there stays."""
    assert shell("train", "sft.yaml").returncode == 0
    words = ("train", "sft.yaml", f"out={shell.folder}/second")
    shell.fails(*words, limit=20_000, says=["cannot write", "second"], code=1)
    left = [p for p in (shell.folder / "second").rglob("*") if p.is_file() and p.suffix == ".safetensors"]
    assert left == [] and not list((shell.folder / "second" / "checkpoints").iterdir())
    assert shell("train", "sft.yaml", f"out={shell.folder}/second", "--resume").returncode == 0
    assert shell("diff", "run", "second").stdout.strip() == "identical"


def test_episodes_that_are_missing_or_cut(shell):
    assert shell("train", "pg.yaml").returncode == 0
    segment = shell.folder / "run" / "episodes" / "000002.jsonl"
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-7])
    assert shell("train", "pg.yaml", f"out={shell.folder}/b").returncode == 0
    done = shell("diff", "run", "b")
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr and "000002.jsonl" in done.stdout + done.stderr
    from trailmark.errors import DataError
    from trailmark.runs.store import read_segment

    with pytest.raises(DataError, match=r"000002\.jsonl:4: .*cut off"):
        read_segment(segment)
    segment.write_bytes(whole.replace(b'"group"', b'"grop"', 1))
    with pytest.raises(DataError, match=r"000002\.jsonl:1: key 'grop'.*'group'"):
        read_segment(segment)
    with pytest.raises(DataError, match=r"nothing\.jsonl"):
        read_segment(shell.folder / "nothing.jsonl")
