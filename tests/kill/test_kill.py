"""SIGKILL at seeded moments and at named points inside writes, then resume: the run is the one that was never
interrupted.

Run with `make test-kill`. Every comparison is `trailmark diff`: weights, optimiser, random state, episodes, metrics.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.kill

SFT = """
method: sft
data: {data}
eval_data: {data}
out: {out}
steps: 12
batch: 3
model: {{name: tiny, shape: {{layers: 2, width: 32, heads: 2, context: 128}}}}
learner: {{optim: {{lr: 1e-3, schedule: cosine, warmup: 0.1}}, ema: 0.9}}
checkpoint: {{every: 3, keep_last: 2, keep_best: 1, metric: eval/nll, mode: min}}
eval: {{every: 4}}
"""
POLICY_GRADIENT = """
method: policy_gradient
out: {out}
steps: 8
starts: 3
n: 4
task: {{name: taxi, options: {{mode: pickup, history: none, menu: false}}}}
model: {{name: tiny, shape: {{layers: 2, width: 32, heads: 2, context: 128}}, lora: {lora}}}
engine: {{slots: 4}}
objective: {{kind: clipped, beta: 0.01}}
passes: 2
learner: {{optim: {{lr: 1e-3}}}}
checkpoint: {{every: 2, keep_last: 2}}
eval: {{every: 3, n: 8}}
"""
OREO = """
method: oreo
data: {scored}
out: {out}
steps: 10
batch: 4
kl: {{target: 0.01, lr: 0.1}}
model: {{name: tiny, shape: {{layers: 2, width: 32, heads: 2, context: 128}}}}
critic: {{lora: {{rank: 2}}, optim: {{lr: 1e-2}}}}
learner: {{optim: {{lr: 1e-3, schedule: cosine, warmup: 0.03}}}}
checkpoint: {{every: 2, keep_last: 2}}
"""
POINTS = [
    "checkpoint.begin", "checkpoint.weights#2", "checkpoint.optimiser", "checkpoint.state#2", "checkpoint.synced",
    "checkpoint.renamed#2", "checkpoint.pruned", "metrics.before#5", "metrics.after#4", "timings.after#3",
    "segment.before#3", "segment.half#4", "segment.synced#2", "segment.renamed#3", "recipe.half", "recipe.renamed",
    "annotation.half#3", "annotation.renamed#4",
]  # fmt: skip


def recipe(folder, kind, name, data_folder=None):
    data, scored = ((data_folder or folder) / name for name in ("data.jsonl", "scored.jsonl"))
    if not data.exists():
        rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(5) for b in range(4)]
        data.write_text("".join(json.dumps(r) + "\n" for r in rows))
        rows += [{**r, "response": "7"} for r in rows]
        scored.write_text("".join(json.dumps({**r, "reward": int(k < 20)}) + "\n" for k, r in enumerate(rows)))
    path = folder / f"{name}.yaml"
    lora = "{rank: 2}" if kind == "lora" else "null"
    text = {"sft": SFT, "oreo": OREO}.get(kind, POLICY_GRADIENT)
    path.write_text(text.format(data=data, scored=scored, out=folder / name, lora=lora))
    return path


def start(path, *more, env=None):
    command = [sys.executable, "-m", "trailmark", "train", str(path), *more]
    return subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, stderr=subprocess.PIPE, text=True
    )


def finish(path):
    begun = (path.parent / path.stem).exists()  # a run that was killed while it imported torch has no folder yet
    done = start(path, *(["--resume"] if begun else []))
    _, said = done.communicate()
    assert done.returncode == 0, said


def same(a, b):
    out = subprocess.run([sys.executable, "-m", "trailmark", "diff", str(a), str(b)], capture_output=True, text=True)
    assert out.stdout.strip() == "identical", out.stdout


def readable(run):
    """A reader of a running or killed run never sees a broken line, nor half a checkpoint."""
    from trailmark.runs.store import read_episodes, read_metrics

    if (run / "recipe.yaml").exists():
        steps = [row["step"] for row in read_metrics(run)]
        assert steps == list(range(1, len(steps) + 1))
        list(read_episodes(run / "episodes"))
        for folder in (run / "checkpoints").glob("[0-9]*"):
            try:
                state = json.loads((folder / "state.json").read_text())
            except FileNotFoundError:
                assert not folder.exists()  # pruned since it was listed: it goes as a whole
                continue
            assert state["step"] == int(folder.name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted runs, and how long they take."""
    folder = tmp_path_factory.mktemp("whole")
    seconds = {}
    for kind in ("sft", "policy_gradient", "lora", "oreo"):
        began = time.monotonic()
        done = start(recipe(folder, kind, kind))
        _, said = done.communicate()
        assert done.returncode == 0, said
        seconds[kind] = time.monotonic() - began
    return folder, seconds


@pytest.mark.parametrize("kind", ["sft", "policy_gradient", "oreo"])
@pytest.mark.parametrize("moment", range(20))
def test_killed_at_a_seeded_moment(tmp_path, whole, kind, moment):
    """Twenty moments each, from the first second to the last; some runs are killed twice."""
    folder, seconds = whole
    draw = random.Random(f"{kind}{moment}")
    path = recipe(tmp_path, kind, "run", whole[0])
    for _ in range(1 + moment % 2):
        running = start(path, *(["--resume"] if (tmp_path / "run" / "recipe.yaml").exists() else []))
        deadline = time.monotonic() + seconds[kind] * draw.uniform(0.45, 1.0)
        while time.monotonic() < deadline and running.poll() is None:
            time.sleep(0.05)
            readable(tmp_path / "run")
        running.send_signal(signal.SIGKILL)
        running.wait()
        readable(tmp_path / "run")
    finish(path)
    same(tmp_path / "run", folder / kind)


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        (k, p)
        for k in ("sft", "policy_gradient", "lora", "oreo")
        for p in POINTS
        if k in ("policy_gradient", "lora") or not p.startswith(("segment", "annotation"))
    ],
)
def test_killed_inside_a_write(tmp_path, whole, kind, point):
    path = recipe(tmp_path, kind, "run", whole[0])
    dying = start(path, env={"TRAILMARK_KILL_AT": point})
    _, said = dying.communicate()
    assert dying.returncode == -signal.SIGKILL, said
    readable(tmp_path / "run")
    finish(path)
    same(tmp_path / "run", whole[0] / kind)
