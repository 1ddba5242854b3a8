"""Playing the next batch while the learner works: one step older, corrected, repeatable, resumable."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from trailmark.config import load_recipe, resolve
from trailmark.methods import get_config, get_method
from trailmark.methods.policy_gradient import truncated
from trailmark.runs.diff import diff_runs
from trailmark.runs.launch import launch
from trailmark.runs.store import read_metrics, read_segment
from trailmark.types import Sample

WORDS = [
    "steps=5", "prompts_per_step=3", "n=4", "sampling.max_tokens=6", "eval={every: 2, n: 4}", "learner.optim.lr=0.01",
    "checkpoint.every=1", "checkpoint.keep_last=9", "engine={max_num_seqs: 12, max_len: 64}",
    "model={name: tiny, shape: {layers: 1, width: 32, heads: 2, context: 64}}",
]  # fmt: skip
REWARD = "def score(prompt, answer, row):\n    return sum(ord(c) % 3 for c in answer) / 10\n"


def recipe(out, *words):
    home = out.parent
    (home / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{k} + {k} ="}) + "\n" for k in range(12)))
    (home / "reward.py").write_text(REWARD)
    given = [f"data={home}/rows.jsonl", f"reward={home}/reward.py:score", f"out={out}"]
    return resolve(load_recipe("recipes/prompts-grpo.yaml", [*WORDS, *given, *words]), get_config("policy_gradient"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    launch(get_method("policy_gradient"), recipe(out, "overlap=true"))
    return out


def test_every_batch_is_one_step_older(whole):
    seen = {}
    for step in range(1, 6):
        episodes = read_segment(whole / "episodes" / f"{step:06d}.jsonl")
        seen[step] = {t.version for e in episodes for t in e.turns}
    assert seen == {1: {0}, 2: {0}, 3: {1}, 4: {2}, 5: {3}}
    rows = read_metrics(whole)
    assert rows[0]["stale_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert all(abs(r["stale_ratio_max"] - 1) > 1e-4 for r in rows[1:]) and "sampler_gap" not in rows[2]


def test_the_same_run_twice(whole):
    again = whole.parent / "again"
    launch(get_method("policy_gradient"), recipe(again, "overlap=true"))
    assert diff_runs(whole, again) == []


def test_a_resumed_run_is_the_same_run(whole):
    out = whole.parent / "short"
    short = recipe(out, "overlap=true")

    class Stop(Exception):
        pass

    class Stopped(get_method("policy_gradient")):
        def updates(self, step):
            if step == 4:
                raise Stop
            return super().updates(step)

    with pytest.raises(Stop):
        launch(Stopped, short)
    assert (out / "ahead" / "000004.jsonl").exists()
    launch(get_method("policy_gradient"), short, resume=True)
    assert diff_runs(whole, out) == []


def test_off_is_as_before(tmp_path):
    launch(get_method("policy_gradient"), recipe(tmp_path / "off"))
    episodes = read_segment(tmp_path / "off" / "episodes" / "000003.jsonl")
    assert {t.version for e in episodes for t in e.turns} == {2}
    assert not (tmp_path / "off" / "ahead").exists()
    assert "ahead" not in json.loads((tmp_path / "off" / "checkpoints" / "000003" / "state.json").read_text())["method"]


def test_weights_by_hand():
    a = Sample(np.arange(4), {"weight": np.array([0, 1, 1, 1.0]), "old": np.log([0.5, 0.5, 0.1, 0.2]),
                              "advantage": np.array([0, 2, 2, -1.0])}, {"weight": 3.0})  # fmt: skip
    b = replace(a, streams={**a.streams, "old": np.log([0.9, 0.25, 0.4, 0.3])})
    (got,), found = truncated([a], [b], 2.0)
    assert got.streams["advantage"] == pytest.approx([0, 1.0, 4.0, -1.5])  # ratios 0.5, 4 cut to 2, 1.5
    assert found == pytest.approx({"stale_ratio": 2.0, "stale_ratio_max": 4.0, "stale_cut": 1 / 3})
    assert math.isclose(a.streams["advantage"][1], 2.0)
