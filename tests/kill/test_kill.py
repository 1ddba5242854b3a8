"""Signals at seeded moments and at named points inside writes, then resume: the run is the one that was never
interrupted. After SIGKILL it goes on from its last checkpoint; SIGTERM, SIGINT and SIGHUP write one.

Run with `make test-kill`. Every comparison is `trailmark diff`: weights, optimiser, random state, episodes, metrics.
"""

import functools
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
prompts_per_step: 3
n: 4
task: {{name: taxi, options: {{mode: pickup, history: none, menu: false}}}}
model: {{name: tiny, shape: {{layers: 2, width: 32, heads: 2, context: 128}}, lora: {lora}}}
engine: {{max_num_seqs: 4}}
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
PREFERENCE = """
method: preference
objective: kto
data: {scored}
out: {out}
steps: 10
batch: 4
model: {{name: tiny, shape: {{layers: 2, width: 32, heads: 2, context: 128}}}}
learner: {{optim: {{lr: 1e-3}}, ema: 0.9}}
"""
REWARD_MODEL = """
method: reward_model
kind: outcome
format: trajectories
data: {scored}
out: {out}
steps: 10
batch: 4
model: {{name: tiny, shape: {{layers: 2, width: 32, heads: 2, context: 128}}}}
learner: {{optim: {{lr: 1e-3}}}}
"""
STEP_RL = """
method: step_rl
out: {out}
steps: 6
prompts_per_step: 3
n: 2
task: {{name: arith, options: {{level: 1}}}}
sampling: {{max_tokens: 8}}
model: {{name: tiny, shape: {{layers: 2, width: 32, heads: 2, context: 128}}}}
engine: {{max_num_seqs: 4}}
learner: {{optim: {{lr: 1e-3}}}}
eval: {{every: 3, n: 4}}
"""
RECIPES = {
    "sft": SFT, "oreo": OREO, "policy_gradient": POLICY_GRADIENT, "lora": POLICY_GRADIENT,
    "overlap": POLICY_GRADIENT + "overlap: true\n", "preference": PREFERENCE, "reward_model": REWARD_MODEL,
    "step_rl": STEP_RL,
}  # fmt: skip
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
    path.write_text(RECIPES[kind].format(data=data, scored=scored, out=folder / name, lora=lora))
    return path


def start(path, *more, env=None):
    command = [sys.executable, "-m", "trailmark", "train", str(path), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, preexec_fn=heard)


def heard():
    """A shell ignores SIGINT, and nohup SIGHUP, for what runs in the background; the runs here shall hear them."""
    for sign in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, signal.SIG_DFL)


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
    """The uninterrupted run of a kind, and how long it takes."""
    folder = tmp_path_factory.mktemp("whole")

    @functools.cache
    def made(kind):
        began = time.monotonic()
        done = start(recipe(folder, kind, kind))
        _, said = done.communicate()
        assert done.returncode == 0, said
        return folder / kind, time.monotonic() - began

    return made


@pytest.mark.parametrize("kind", ["sft", "policy_gradient", "oreo"])
@pytest.mark.parametrize("moment", range(20))
def test_killed_at_a_seeded_moment(tmp_path, whole, kind, moment):
    """Twenty moments each, from the first second to the last; some runs are killed twice."""
    uninterrupted, seconds = whole(kind)
    draw = random.Random(f"{kind}{moment}")
    path = recipe(tmp_path, kind, "run", uninterrupted.parent)
    for _ in range(1 + moment % 2):
        running = start(path, *(["--resume"] if (tmp_path / "run" / "recipe.yaml").exists() else []))
        deadline = time.monotonic() + seconds * draw.uniform(0.45, 1.0)
        while time.monotonic() < deadline and running.poll() is None:
            time.sleep(0.05)
            readable(tmp_path / "run")
        running.send_signal(signal.SIGKILL)
        running.wait()
        readable(tmp_path / "run")
    finish(path)
    same(tmp_path / "run", uninterrupted)


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
    uninterrupted, _ = whole(kind)
    path = recipe(tmp_path, kind, "run", uninterrupted.parent)
    dying = start(path, env={"TRAILMARK_KILL_AT": point})
    _, said = dying.communicate()
    assert dying.returncode == -signal.SIGKILL, said
    readable(tmp_path / "run")
    finish(path)
    same(tmp_path / "run", uninterrupted)


def asked_to_end(running, sign, run):
    """The run says how it goes on, and each of its steps is in a checkpoint."""
    _, said = running.communicate()
    assert running.returncode == 128 + sign, said
    assert "Traceback" not in said and "--resume" in said, said
    readable(run)
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    done = max((row["step"] for row in map(json.loads, lines)), default=0)
    assert done == max((int(p.name) for p in (run / "checkpoints").glob("[0-9]*")), default=0), said


TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
EVERY = [(kind, sign) for kind in ("sft", "policy_gradient", "overlap", "oreo") for sign in (TERM, INT, HUP)]


@pytest.mark.parametrize(("kind", "sign"), [*EVERY, ("preference", TERM), ("reward_model", INT), ("step_rl", HUP)])
def test_asked_to_end_at_a_seeded_moment(tmp_path, whole, kind, sign):
    """After a number of steps and part of one more; 0 is while the models are loaded."""
    uninterrupted, _ = whole(kind)
    path, run = recipe(tmp_path, kind, "run", uninterrupted.parent), tmp_path / "run"
    draw = random.Random(f"{kind}{sign}")
    after, wait = draw.randrange(4), draw.uniform(0, 0.1)
    running = start(path)
    there = run / "metrics.jsonl" if after else run / "recipe.yaml"
    while running.poll() is None and not (there.exists() and there.read_bytes().count(b"\n") >= after):
        time.sleep(0.005)
    time.sleep(wait)
    running.send_signal(sign)
    asked_to_end(running, sign, run)
    finish(path)
    same(run, uninterrupted)


@pytest.mark.parametrize(
    ("kind", "point", "sign"),
    [
        ("sft", "checkpoint.weights#2", TERM), ("sft", "metrics.before#5", INT), ("oreo", "checkpoint.renamed#2", HUP),
        ("lora", "checkpoint.pruned", INT), ("policy_gradient", "segment.half#4", TERM),
        ("policy_gradient", "timings.after#3", HUP), ("overlap", "metrics.after#4", TERM),
        ("overlap", "segment.renamed#3", INT), ("overlap", "annotation.half#3", HUP),
    ],
)  # fmt: skip
def test_asked_to_end_inside_a_write(tmp_path, whole, kind, point, sign):
    uninterrupted, _ = whole(kind)
    path = recipe(tmp_path, kind, "run", uninterrupted.parent)
    env = {"TRAILMARK_KILL_AT": point, "TRAILMARK_KILL_WITH": signal.Signals(sign).name}
    asked_to_end(start(path, env=env), sign, tmp_path / "run")
    finish(path)
    same(tmp_path / "run", uninterrupted)
