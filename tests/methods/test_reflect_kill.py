"""SIGKILL at named points inside writes, then resume: ppo, critic, replay and curriculum go on as if nothing had
happened.

Run with `make test-kill`. The comparison is `trailmark diff`: weights, optimisers, random state, episodes, metrics.
"""

import os
import signal
import subprocess
import sys

import pytest

from trailmark.runs.diff import diff_runs

pytestmark = pytest.mark.kill

RECIPE = """
method: reflect
out: {out}
steps: 10
task: {{name: taxi, options: {{mode: full, history: none, menu: false, walls: false}}}}
teacher: {{prompts: 4}}
sft: {{reflector: 2, policy: 2, batch: 4}}
rl:
  {{algorithm: ppo, prompts_per_step: 12, replay_batch: 3, entropy: 0.01,
    critic: {{kind: {critic}, head: {head}, every: 2, passes: 2}}}}
curriculum: {{kind: modes}}
final: {{n: 6, references: true}}
eval: {{every: 5, n: 3}}
thought: 12
reflect_prob: 0.75
model: {{name: tiny, shape: {{layers: 1, width: 16, heads: 2, context: 128}}}}
engine: {{max_num_seqs: 16, max_len: 128}}
checkpoint: {{every: 3, keep_last: 2, keep_best: 1}}
"""
POINTS = ["checkpoint.weights#1", "stage.made#1", "stage.half#1", "metrics.after#3", "stage.renamed#2",
          "evaluation.half#1", "checkpoint.weights#5", "checkpoint.optimiser#8", "checkpoint.state#4",
          "checkpoint.renamed#3", "checkpoint.pruned", "metrics.after#9", "segment.half#3",
          "segment.renamed#7", "evaluation.half#2"]  # fmt: skip


def start(folder, name, critic, head, *more, env=None):
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE.format(out=folder / name, critic=critic, head=head))
    return subprocess.run(
        [sys.executable, "-m", "trailmark", "train", str(path), *more], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )  # fmt: skip


@pytest.fixture(scope="module", params=[("shared", "linear"), ("separate", "mlp")], ids="-".join)
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    done = start(folder, "whole", *request.param)
    assert done.returncode == 0, done.stderr
    return folder / "whole", request.param


def without_load(recipe):
    """The policy's stage names the folder of the reflector's."""
    return {k: v for k, v in recipe.items() if k != "load"}


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed_it_is_the_same_run(whole, tmp_path, point):
    run, kind = whole
    dead = start(tmp_path, "run", *kind, env={"TRAILMARK_KILL_AT": point})
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    done = start(tmp_path, "run", *kind, "--resume")
    assert done.returncode == 0, done.stderr
    said = subprocess.run([sys.executable, "-m", "trailmark", "diff", str(run), str(tmp_path / "run")],
                          capture_output=True, text=True)  # fmt: skip
    assert said.stdout.strip() == "identical", said.stdout
    for stage in ("reflector", "policy"):
        assert diff_runs(run / stage, tmp_path / "run" / stage, words=without_load) == []
    for path in (run / "evaluation").iterdir():
        assert path.read_bytes() == (tmp_path / "run" / "evaluation" / path.name).read_bytes()
