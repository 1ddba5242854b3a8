"""DPO, IPO, KTO and rejection sampling end to end on files: what they start from, learn and resume."""

import warnings

import numpy as np
import pytest

from trailmark.config import resolve
from trailmark.errors import DataError, RecipeError
from trailmark.methods import preference
from trailmark.runs.diff import diff_runs
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_episodes, read_metrics

TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 64}}


def config(tmp_path, data, name="run", **recipe):
    given = {"method": "preference", "data": data, "out": str(tmp_path / name), "model": TINY, "steps": 4, "batch": 8}
    return resolve({**given, "learner": {"optim": {"lr": 1e-3}}, **recipe}, preference.PreferenceRecipe)


def go(*args, **recipe):
    c = config(*args, **recipe)
    launch(preference.PreferenceMethod, c)
    return Run.open(c.out)


@pytest.mark.parametrize("objective", ["rejection", "dpo", "ipo", "kto"])
def test_baselines_learn_from_the_same_file(tmp_path, data, objective):
    run = go(tmp_path, data, objective=objective, steps=25, batch=12, learner={"optim": {"lr": 3e-3}})
    rows = read_metrics(run.path)
    name = {"rejection": "nll", "kto": "kto"}.get(objective, "pair")
    assert rows[-1][name] < rows[0][name]
    start = {"rejection": 5.0, "dpo": np.log(2), "ipo": 25.0, "kto": 0.5}[objective]
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
             engine={"slots": 4, "max_len": 64}, sampling={"temperature": 0, "max_tokens": 6})  # fmt: skip
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
