"""DPO, IPO, KTO and rejection sampling end to end on files: what they start from, learn and resume."""

import json
import warnings

import numpy as np
import pytest

from trailmark.config import resolve
from trailmark.errors import DataError, RecipeError
from trailmark.methods import preference
from trailmark.runs.diff import diff_runs
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_episodes, read_metrics, write_segment
from trailmark.types import Episode, Scored, Task, Turn

TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 64}}


def config(tmp_path, data, name="run", **recipe):
    given = {"method": "preference", "data": data, "out": str(tmp_path / name), "model": TINY, "steps": 4, "batch": 8}
    return resolve({**given, "learner": {"optim": {"lr": 1e-3}}, **recipe}, preference.PreferenceRecipe)


def go(*args, **recipe):
    c = config(*args, **recipe)
    launch(preference.PreferenceMethod, c)
    return Run.open(c.out)


@pytest.mark.parametrize("objective", ["rejection", "dpo", "ipo", "hinge", "kto"])
def test_baselines_learn_from_the_same_file(tmp_path, data, objective):
    run = go(tmp_path, data, objective=objective, steps=25, batch=12, learner={"optim": {"lr": 3e-3}})
    rows = read_metrics(run.path)
    name = {"rejection": "nll", "kto": "kto"}.get(objective, "pair")
    assert rows[-1][name] < rows[0][name]
    start = {"rejection": 5.0, "dpo": np.log(2), "ipo": 25.0, "hinge": 1.0, "kto": 0.5}[objective]
    assert rows[0][name] == pytest.approx(start, abs=1.0 if objective == "rejection" else 1e-5)
    assert rows[0]["rows"] == {"rejection": 24, "kto": 48}.get(
        objective, 48
    )  # 12 prompts, two of each kind: 4 pairs each
    assert not (run.checkpoints_dir / "000025" / "critic").exists()


def test_kto_says_when_failures_outweigh_successes(tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text("".join(f'{{"prompt": "{k}", "response": "b", "reward": {int(k < 2)}}}\n' for k in range(10)))
    with pytest.warns(UserWarning, match="8 failures outweigh 2 successes.*undesirable=0.25 balances them"):
        go(tmp_path, str(path), objective="kto", steps=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "objective kto")
        go(tmp_path, str(path), "balanced", objective="kto", undesirable=0.25, steps=1)


def test_capped_pairs_and_files_of_pairs(tmp_path, data):
    assert read_metrics(go(tmp_path, data, objective="dpo", pairs=3, steps=1).path)[0]["rows"] == 36
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 5)
    run = go(tmp_path, str(path), "p", objective="dpo", format="pairs", steps=1)
    assert read_metrics(run.path)[0]["rows"] == 5
    one = tmp_path / "one.jsonl"
    one.write_text('{"prompt": "a", "response": "b", "reward": 1}\n')
    with pytest.raises(DataError, match=r"one\.jsonl.*both a success and a failure"):
        go(tmp_path, str(one), "q", objective="dpo")
    one.write_text('{"prompt": "a", "response": "b", "reward": 0}\n')
    with pytest.raises(DataError, match="no success"):
        go(tmp_path, str(one), "r", objective="rejection")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"format": "pairs", "objective": "kto"}, "no rewards"),
        ({"objective": "ppo"}, "objective"),
        ({"final": {"start": True}}, "final needs a task"),
        ({"final": {"search": ["beam:2"]}}, "search"),
        ({"level": "step"}, "level"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, data, more, why):
    with pytest.raises(RecipeError, match=why):
        config(tmp_path, data, **more)


def test_evaluation_plays_the_task_and_the_start(tmp_path, data):
    task = {"name": "arith", "options": {"level": 1}}
    run = go(tmp_path, data, objective="rejection", task=task, eval={"every": 4, "n": 3}, final={"start": True},
             engine={"max_num_seqs": 4, "max_len": 64}, sampling={"temperature": 0, "max_tokens": 6})  # fmt: skip
    assert "eval/success" in read_metrics(run.path)[-1]
    assert {p.name for p in (run.path / "evaluation").iterdir()} == {"000004.jsonl", "start.jsonl"}
    assert {t.version for e in read_episodes(run.path / "evaluation") for t in e.turns} == {4}


def test_a_resumed_run_is_the_run(tmp_path, data, monkeypatch):
    settings = {"steps": 6, "checkpoint": {"every": 2}, "objective": "kto"}
    whole = go(tmp_path, data, "whole", **settings)
    updates = preference.PreferenceMethod.updates

    def dies(self, step):
        if step == 4:
            raise KeyboardInterrupt
        yield from updates(self, step)

    monkeypatch.setattr(preference.PreferenceMethod, "updates", dies)
    c = config(tmp_path, data, "parts", **settings)
    with pytest.raises(KeyboardInterrupt):
        launch(preference.PreferenceMethod, c)
    monkeypatch.undo()
    launch(preference.PreferenceMethod, c, resume=True)
    assert diff_runs(whole.path, tmp_path / "parts") == []


def test_hinge_smoothing_and_means_start_from_their_formulas(tmp_path, data):
    """The policy is the reference, so h is 0: the hinge is 1, a smoothed DPO ln 2, IPO (1 / (2 beta))^2 either way."""
    first = lambda name, **more: read_metrics(go(tmp_path, data, name, steps=2, **more).path)[0]["pair"]
    assert first("a", objective="hinge") == pytest.approx(1.0, abs=1e-6)
    assert first("b", objective="dpo", smooth=0.3) == pytest.approx(np.log(2), abs=1e-6)
    assert first("c", objective="ipo", per="token", beta=0.5) == pytest.approx(1.0, abs=1e-6)
    for more in ({"smooth": 0.1, "objective": "ipo"}, {"smooth": 0.5}, {"pair_file": "x", "objective": "kto"}):
        with pytest.raises(RecipeError):
            config(tmp_path, data, **more)


def test_means_per_token_divide_each_side_by_its_length(tmp_path):
    sides = [played("a", (5, 6, 7), 1.0), played("b", (5, 8), 0.0)]
    chosen, rejected = preference.pair_samples([tuple(sides)], per="token")
    assert chosen.streams["weight"].tolist() == [0, 0, 1 / 3, 1 / 3, 1 / 3]
    assert rejected.streams["weight"].tolist() == [0, 0, 0.5, 0.5]


def played(name, tokens, reward):
    turn = Turn("policy", (1, 2), tuple(tokens), logp=(-1.0,) * len(tokens), stop="stopped", text=name)
    return Episode(name, Task("t"), "t", (turn,), {"self": Scored(reward)})


def test_pairs_by_name_with_prefixes_that_are_not_trained(tmp_path):
    """Both answers begin with 5, 6. The pair is about what stands behind that, of the second up to its fourth token."""
    episodes = [played("a", (5, 6, 7, 3), 1.0), played("b", (5, 6, 8, 9, 3), 0.0), played("c", (5, 3), 0.0)]
    path = tmp_path / "pairs.jsonl"
    lines = [
        {"chosen": "a", "rejected": "b", "chosen_prefix": 2, "rejected_prefix": 2, "rejected_end": 4},
        {"chosen": "a", "rejected": "c", "margin": 0.5},
        {"chosen": "a", "rejected": "gone"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    pairs, left_out = preference.listed_pairs(episodes, str(path), "policy")
    assert left_out == {"pairs_without_episode": 1} and [(a.id, b.id) for a, b in pairs] == [("a", "b"), ("a", "c")]
    rows = preference.pair_samples(pairs)
    assert [r.tokens.tolist() for r in rows] == [
        [1, 2, 5, 6, 7, 3],
        [1, 2, 5, 6, 8, 9],
        [1, 2, 5, 6, 7, 3],
        [1, 2, 5, 3],
    ]
    assert [r.streams["weight"].tolist() for r in rows] == [
        [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 1, 1],
    ]  # fmt: skip
    write_segment(tmp_path, 1, episodes)
    given = {"format": "episodes", "pair_file": str(path), "steps": 1, "batch": 2}
    run = go(tmp_path, str(tmp_path / "000001.jsonl"), **given)
    assert read_metrics(run.path)[0]["rows"] == 2
    for line, why in (
        (
            {"chosen": "a", "rejected": "b", "chosen_prefix": 4},
            "pairs.jsonl:1: episode 'a' has 4 tokens: there is nothing",
        ),
        ({"chosen": "a", "rejected": "b", "chosen_prefix": "2"}, "chosen_prefix.*must be a number of tokens"),
        ({"chosen": "a", "reject": "b"}, "'reject': is not known. Did you mean 'rejected'"),
        ({"chosen": "x", "rejected": "y"}, "names no two episodes of the data"),
    ):
        path.write_text(json.dumps(line) + "\n")
        with pytest.raises(DataError, match=why):
            preference.listed_pairs(episodes, str(path), "policy")
