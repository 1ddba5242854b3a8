"""What methods trained with is what they stored: advantages and values as annotations, cut back by a resume, compared
by diff."""

import json
import shutil

import numpy as np
import pytest

from trailmark.config import resolve
from trailmark.learn.learner import Learner
from trailmark.methods import get_method
from trailmark.methods.policy_gradient import PolicyGradientMethod
from trailmark.runs.diff import diff_runs
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_annotations, read_episodes
from trailmark.samples import annotate_turns, build_samples
from trailmark.types import Episode, Scored, Task, Turn

TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 64}}
TREE = {
    "method": "policy_gradient", "model": TINY, "steps": 3, "prompts_per_step": 2, "n": 4,
    "engine": {"max_num_seqs": 8, "max_len": 64},
    "task": {"name": "solved", "options": {"kind": "tree", "depth": 2, "actions": 2, "seed": 3}},
    "checkpoint": {"every": 1, "keep_last": 9}, "objective": {"kind": "weighted_logp"},
}  # fmt: skip
REFLECT = {
    "method": "reflect", "steps": 2, "reflect": False, "teacher": {"prompts": 2},
    "task": {"name": "taxi", "options": {"mode": "pickup", "history": "none", "horizon": 5}},
    "sft": {"policy": 2, "batch": 2}, "rl": {"prompts_per_step": 3, "critic": {"kind": "shared", "every": 1},
    "replay": 0},
    "model": {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 512}}, "final": {"n": 1},
    "engine": {"max_num_seqs": 4, "max_len": 512},
}  # fmt: skip


def go(tmp_path, name, recipe, **more):
    method = get_method(recipe["method"])
    config = resolve({**recipe, "out": str(tmp_path / name), **more}, method.Config)
    launch(method, config)
    return Run.open(config.out)


@pytest.fixture
def trained(monkeypatch):
    """Every sample that the learner is given for the policy, as (episode, tokens, advantage of each trained token)."""
    seen, update = [], Learner.update

    def watched(self, u):
        for s in u.samples if u.objective.kind not in ("sft", "value") else ():
            on = s.streams["weight"] != 0
            seen.append((s.episode, s.streams["advantage"][on].tolist()))
        return update(self, u)

    monkeypatch.setattr(Learner, "update", watched)
    return seen


def stored(run, name):
    """Episode -> what is stored for each token of the policy, in order."""
    out = {}
    size = {(e.id, i): len(t.tokens) for e in read_episodes(run.episodes_dir) for i, t in enumerate(e.turns)}
    for a in read_annotations(run.annotations_dir(name)):
        values = a.values if a.level == "token" else a.values * size[a.episode, a.turn]
        out.setdefault(a.episode, []).append((a.turn, values))
    return {e: [v for _, values in sorted(rows) for v in values] for e, rows in out.items()}


@pytest.mark.parametrize("credit", ["returns", "group", "leave_one_out"])
def test_policy_gradient_stores_what_it_trains_with(tmp_path, trained, credit):
    run = go(tmp_path, "run", TREE, credit=credit, gamma=0.5)
    used = {}
    for episode, values in trained:
        used.setdefault(episode, []).extend(values)
    assert stored(run, "advantage") == used and len(used) == 3 * 8
    if credit == "leave_one_out":  # by hand: the reward less the mean of the three others of the group
        groups = {}
        for e in read_episodes(run.episodes_dir):
            groups.setdefault(e.group, []).append(e)
        for group in groups.values():
            for e in group:
                others = [o.outcome.reward for o in group if o.id != e.id]
                assert used[e.id] == pytest.approx([e.outcome.reward - np.mean(others)] * len(e.turns))
    named = {a.source for a in read_annotations(run.annotations_dir("advantage"))}
    assert named == {
        "returns": {"return to go, discounted by 0.5"}, "group": {"against its group"},
        "leave_one_out": {"against the others of its group"},
    }[credit]  # fmt: skip


def test_reflect_stores_advantages_and_values(tmp_path, trained):
    run = go(tmp_path, "run", REFLECT)
    advantage, value = stored(run, "advantage"), stored(run, "value")
    used = {}
    for episode, values in trained:
        used.setdefault(episode, []).extend(values)
    assert advantage == used and set(value) == set(used) and len(used) == 2 * 3
    for e in read_episodes(run.episodes_dir):
        rewards = [t.reward for t in e.turns]
        returns = [sum(rewards[i:]) for i in range(len(rewards))]
        assert advantage[e.id] == pytest.approx(np.subtract(returns, value[e.id]), abs=1e-12)


def test_turns_with_one_number_and_turns_with_many():
    turns = (
        Turn("policy", (1,), (5, 6)), Turn("adviser", (2,), (7,)), Turn("policy", (3,), (8, 9, 4), continues=0),
    )  # fmt: skip
    e = Episode("e", Task("t"), "g", turns, {"self": Scored(1.0)})
    samples = build_samples([e], "policy", {"advantage": {"e": [0.25, [1.0, 2.0, 3.0]]}})
    a, b = annotate_turns(samples, [e], "policy", "advantage", "by hand")
    assert (a.level, a.turn, a.values, a.source) == ("turn", 0, (0.25,), "by hand")
    assert (b.level, b.turn, b.values) == ("token", 2, (1.0, 2.0, 3.0))


def test_a_resume_cuts_annotations_back(tmp_path, monkeypatch):
    whole = go(tmp_path, "whole", TREE)
    updates = PolicyGradientMethod.updates

    def dies(self, step):
        yield from updates(self, step)
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(PolicyGradientMethod, "updates", dies)
    config = resolve({**TREE, "out": str(tmp_path / "parts")}, PolicyGradientMethod.Config)
    with pytest.raises(KeyboardInterrupt):
        launch(PolicyGradientMethod, config)
    monkeypatch.undo()
    notes = tmp_path / "parts/annotations/advantage"
    stale = notes / "000007.jsonl"
    shutil.copy(notes / "000003.jsonl", stale)
    launch(PolicyGradientMethod, config, resume=True)
    assert not stale.exists() and diff_runs(whole.path, tmp_path / "parts") == []
    assert len(list(notes.iterdir())) == 3


def test_diff_compares_credit_and_says_where_one_run_has_none(tmp_path):
    run = go(tmp_path, "run", TREE)
    other = shutil.copytree(run.path, tmp_path / "other")
    file = other / "annotations/advantage/000002.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1]["values"][0] += 0.5
    file.write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows))
    (found,) = diff_runs(run.path, other)
    assert found.file == "annotations/advantage/000002.jsonl" and "line 2" in found.what and "values.0" in found.what
    file.unlink()
    (found,) = diff_runs(run.path, other)
    assert (found.file, found.what) == ("annotations/advantage/000002.jsonl", "only in the first run")
    shutil.rmtree(other / "annotations")
    assert {d.what for d in diff_runs(run.path, other)} == {"only in the first run"}
