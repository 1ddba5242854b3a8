"""OREO end to end on files: what they start from, learn, keep, resume and import."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trailmark import methods
from trailmark.config import ModelConfig, dump, resolve
from trailmark.errors import ModelError, RecipeError, RunError
from trailmark.learn.loop import train
from trailmark.methods.oreo import method as oreo
from trailmark.methods.oreo import rounds as oreo_rounds
from trailmark.methods.oreo.data import trajectory_samples
from trailmark.models.load import load_model
from trailmark.models.openrlhf_critic import foreign_head
from trailmark.models.readout import Readout
from trailmark.runs.collect import Collection
from trailmark.runs.diff import diff_runs
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_episodes, read_metrics

TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 64}}


def config(tmp_path, data, name="run", **recipe):
    given = {"method": "oreo", "data": data, "out": str(tmp_path / name), "model": TINY, "steps": 4, "batch": 8}
    return resolve({**given, "learner": {"optim": {"lr": 1e-3}}, **recipe}, oreo.OreoRecipe)


def go(*args, **recipe):
    c = config(*args, **recipe)
    launch(oreo.OreoMethod, c)
    return Run.open(c.out)


# --- start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_it_starts_at_zero(tmp_path, data, lora):
    """A head of zeros: V is 0 everywhere, so the value loss is the mean of R^2 (half are right), and the policy is the
    reference: every KL is 0. Only successes move the policy."""
    run = go(tmp_path, data, model={**TINY, "lora": lora}, critic={"lora": lora}, batch=48, steps=1)
    (row,) = read_metrics(run.path)
    assert row["v_min"] == row["v_max"] == 0.0 and row["value"] == row["policy"] == pytest.approx(0.5)
    assert row["kl"] == pytest.approx(0.0, abs=1e-7) and row["kl_estimate"] == 0.0
    assert row["log_weight_won_median"] == row["log_weight_lost_max"] == 0.0 and row["rows"] == 48
    assert row["policy/grad_norm"] > 0 and row["critic/grad_norm"] > 0


def test_the_reference_of_an_adapter_is_the_adapter(tmp_path, data):
    """A policy that goes on from a LoRA checkpoint is compared with that checkpoint, not with the base below it."""
    first = go(tmp_path, data, "first", model={**TINY, "lora": {"rank": 2}}, learner={"optim": {"lr": 0.1}})
    start = str(first.checkpoints_dir / "000004" / "policy")
    row = read_metrics(go(tmp_path, data, "second", model={"name": start}, steps=1).path)[0]
    assert row["kl_estimate"] == 0.0 and row["kl"] == pytest.approx(0.0, abs=1e-6)
    row = read_metrics(go(tmp_path, data, "third", model={**TINY, "name": start}, ref="tiny", steps=1).path)[0]
    assert row["kl"] > 1e-3  # `ref` names another one


def test_a_value_model_is_saved_and_loaded(tmp_path, data):
    """With its head, whole or as LoRA; `critic.name` goes on with it, and V at its first step is what it was."""
    for lora in (None, {"rank": 2}):
        name = f"lora{bool(lora)}"
        c = config(tmp_path, data, name, critic={"lora": lora}, learner={"optim": {"lr": 0.01}})
        method = oreo.OreoMethod(c, run := Run.create(c.out, dump(c)))
        train(method, c, run)
        folder = run.checkpoints_dir / "000004" / "critic"
        samples = trajectory_samples(method.rows[:4])
        (want, *_) = [s.streams["v"] for s in method.learner.fill(samples, v=Readout("", "head", model="critic"))]
        again = oreo.OreoMethod(config(tmp_path, data, "x", critic={"name": str(folder)}), run)
        got = again.learner.fill(samples, v=Readout("", "head", model="critic"))[0].streams["v"]
        assert np.array_equal(got, want) and np.abs(want).max() > 1e-3
        assert again.models["critic"].adapted == bool(lora)
        run.close()


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"level": "step"},
        {"level": "response", "hinge": 0.1, "kl": {"alpha": 0.3}},
        {"level": "one_step", "states": "step", "split": "sentence"},
        {"level": "undetached", "kl": {"kind": "k3"}},
        {"importance": "sequence", "clip_log": 0.5},
        {"importance": "batch", "level": "step"},
        {"kl": {"kind": "forward", "target": 0.01}},
        {"target": "ema", "learner": {"ema": 0.9, "optim": {"lr": 0.01}}},
        {"freeze": 0.5, "kl": {"target": 0.01}},
        {"reward": {"mul": 2, "add": -1}},
    ],
)
def test_every_option_runs(tmp_path, data, more):
    rows = read_metrics(go(tmp_path, data, **more).path)
    assert all(np.isfinite(list(r.values())).all() for r in rows) and len(rows) == 4
    assert ("log_kl" in rows[-1]) == ("target" in more.get("kl", {}))
    assert ("clip_ratio" in rows[-1]) == ("clip_log" in more)
    assert ("hinge" in rows[-1]) == ("hinge" in more)
    if "reward" in more:
        assert rows[0]["value"] == pytest.approx(1.0)  # R is 1 or -1


def test_a_frozen_policy_waits_and_then_moves(tmp_path, data):
    """freeze 0.5 of 4 steps: the policy stands still for 2, and its schedule has the 2 that are left."""
    optim = {"lr": 1e-2, "schedule": "linear"}
    run = go(tmp_path, data, freeze=0.5, learner={"optim": optim}, checkpoint={"every": 2}, kl={"target": 0.1})
    rows = read_metrics(run.path)
    assert [r.get("policy/lr") for r in rows] == [None, None, 1e-2, 5e-3]
    assert [r["critic/lr"] for r in rows] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    start = load_model(ModelConfig(**TINY)).base.state_dict()
    kept = load_file(run.checkpoints_dir / "000002" / "policy" / "model.safetensors")
    assert all(torch.equal(start[n], t) for n, t in kept.items())
    moved = load_file(run.checkpoints_dir / "000004" / "policy" / "model.safetensors")
    assert not all(torch.equal(start[n], t) for n, t in moved.items())
    assert "log_kl" not in rows[1]  # nor does the coefficient learn while nothing can move
    assert abs(rows[2]["log_kl"]) == pytest.approx(1e-3, rel=1e-4)  # the first step of Adam


def test_critic_only(tmp_path, data):
    run = go(tmp_path, data, critic_only=True)
    assert sorted(p.name for p in (run.checkpoints_dir / "000004").iterdir() if p.is_dir()) == ["critic"]
    assert read_metrics(run.path)[-1]["kl_estimate"] == 0.0


def test_the_moving_average_is_behind(tmp_path, data):
    """At step 1 the average is the policy; later the value's target is another than the policy's own residual."""
    rows = read_metrics(go(tmp_path, data, target="ema", learner={"ema": 0.999, "optim": {"lr": 0.01}}).path)
    assert rows[0]["value"] == rows[0]["policy"] and rows[3]["value"] != rows[3]["policy"]


def test_epochs_count_the_rows(tmp_path, data):
    run = go(tmp_path, data, epochs=2, batch=10, learner={"optim": {"lr": 1e-3, "schedule": "linear"}})
    rows = read_metrics(run.path)
    assert len(rows) == 10 and rows[-1]["policy/lr"] == pytest.approx(1e-4)  # 2 * 48 / 10, and the schedule knows


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"target": "ema"}, "learner.ema"),
        ({"hinge": 0.1}, "level response"),
        ({"level": "step", "states": "token"}, "states: step"),
        ({"format": "nothing"}, "not known"),
        ({"format": "pairs"}, "no rewards"),
        ({"objective": "oreo"}, "'objective': is not known"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, data, more, why):
    with pytest.raises(RecipeError, match=why):
        config(tmp_path, data, **more)


# --- learning -----------------------------------------------------------------------------------------------------


def test_it_learns_which_answers_are_right(tmp_path, data):
    """After some epochs the value of a right answer's last state is near 1 and of a wrong one's near 0, and right
    answers have become likelier than wrong ones."""
    run = go(tmp_path, data, steps=60, batch=48, beta=0.3, kl={"alpha": 0.0}, learner={"optim": {"lr": 3e-3}})
    rows = read_metrics(run.path)
    assert rows[-1]["value"] < 0.1 < rows[0]["value"]
    assert rows[-1]["log_weight_won_median"] > rows[-1]["log_weight_lost_median"] + 1.0


def test_evaluation_plays_the_task(tmp_path, data):
    task = {"name": "arith", "options": {"level": 1}}
    run = go(tmp_path, data, task=task, eval={"every": 2, "n": 3}, engine={"max_num_seqs": 4, "max_len": 64},
             sampling={"temperature": 0, "max_tokens": 6})  # fmt: skip
    assert "eval/success" in read_metrics(run.path)[1]
    assert len(list(read_episodes(run.path / "evaluation"))) == 6


# --- resume -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"kl": {"target": 0.01, "lr": 0.1}, "learner": {"optim": {"lr": 1e-2, "schedule": "cosine", "warmup": 0.03}}},
        {"target": "ema", "learner": {"ema": 0.9, "optim": {"lr": 1e-2}}, "critic": {"lora": {"rank": 2}}},
    ],
)
def test_a_resumed_run_is_the_run(tmp_path, data, more, monkeypatch):
    """Both models, both optimisers, the moving average, the KL coefficient: bit for bit."""
    settings = {"steps": 6, "checkpoint": {"every": 2}, **more}
    whole = go(tmp_path, data, "whole", **settings)
    updates = oreo.OreoMethod.updates

    def dies(self, step):
        if step == 4:
            raise KeyboardInterrupt
        yield from updates(self, step)

    monkeypatch.setattr(oreo.OreoMethod, "updates", dies)
    c = config(tmp_path, data, "parts", **settings)
    with pytest.raises(KeyboardInterrupt):
        launch(oreo.OreoMethod, c)
    monkeypatch.undo()
    launch(oreo.OreoMethod, c, resume=True)
    assert diff_runs(whole.path, tmp_path / "parts") == []
    state = json.loads((whole.checkpoints_dir / "000006" / "state.json").read_text())
    if "kl" in more:
        assert state["learned"]["soft_bellman"]["_steps"] == 6


# --- other people's value models ----------------------------------------------------------------------------------


def their_critic(tmp_path, data):
    """A trained critic of ours and what it says of a row."""
    c = config(tmp_path, data, "ours", learner={"optim": {"lr": 0.01}})
    method = oreo.OreoMethod(c, run := Run.create(c.out, dump(c)))
    train(method, c, run)
    run.close()
    sample = trajectory_samples(method.rows[:1])
    values = lambda m: m.learner.fill(sample, v=Readout("", "head", model="critic"))[0].streams["v"]
    return run.checkpoints_dir / "000004" / "critic", values, values(method), run


@pytest.mark.parametrize("name", ["value_head.weight", "score.weight"])
def test_an_openrlhf_critic(tmp_path, data, name):
    """Theirs has the head among the weights and no output layer for words."""
    ours, values, want, run = their_critic(tmp_path, data)
    theirs = tmp_path / "theirs"
    shutil.copytree(ours, theirs)
    weights = {n: t for n, t in load_file(ours / "model.safetensors").items() if not n.startswith("lm_head")}
    weights[name] = load_file(ours / "heads.safetensors")["value.weight"]
    save_file(weights, theirs / "model.safetensors", metadata={"format": "pt"})
    (theirs / "heads.safetensors").unlink()
    assert foreign_head(theirs) == name and foreign_head(ours) == ""
    method = oreo.OreoMethod(config(tmp_path, data, "x", critic={"name": str(theirs)}), run)
    assert np.array_equal(values(method), want) and np.abs(want).max() > 1e-3
    again = oreo.OreoMethod(config(tmp_path, data, "x", critic={"name": str(theirs)}), run)  # as a resumed run would
    assert np.array_equal(values(again), want)


def test_an_openrlhf_lora_critic(tmp_path, data):
    """The head is adapted too, over a base of zeros that is not stored: it is scale * B @ A and nothing else."""
    folder = tmp_path / "ours" / "checkpoints" / "000004" / "critic"
    c = config(tmp_path, data, "ours", critic={"lora": {"rank": 4, "alpha": 8}}, learner={"optim": {"lr": 0.01}})
    method = oreo.OreoMethod(c, run := Run.create(c.out, dump(c)))
    train(method, c, run)
    run.close()
    theirs = tmp_path / "theirs"
    shutil.copytree(folder, theirs)
    (theirs / "heads.safetensors").unlink()
    draw = torch.Generator().manual_seed(1)
    a, b = torch.randn(4, 32, generator=draw), torch.randn(1, 4, generator=draw)
    adapter = load_file(folder / "adapter_model.safetensors")
    adapter |= {"base_model.model.value_head.lora_A.weight": a, "base_model.model.value_head.lora_B.weight": b}
    save_file(adapter, theirs / "adapter_model.safetensors")
    settings = json.loads((theirs / "adapter_config.json").read_text())
    settings["target_modules"] = [*settings["target_modules"], "value_head"]
    (theirs / "adapter_config.json").write_text(json.dumps(settings))
    with torch.no_grad():
        method.models["critic"].heads["value"].weight.copy_(8 / 4 * (b @ a))
    sample = trajectory_samples(method.rows[:1])
    values = lambda m: m.learner.fill(sample, v=Readout("", "head", model="critic"))[0].streams["v"]
    got = oreo.OreoMethod(config(tmp_path, data, "x", critic={"name": str(theirs)}), run)
    assert np.allclose(values(got), values(method), atol=1e-6) and np.abs(values(got)).max() > 0.1
    assert "value" in got.models["critic"].heads and got.models["critic"].adapted


def test_pickled_weights_are_refused(tmp_path, data):
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickle files"):
        go(tmp_path, data, critic={"name": str(folder)})


# --- rounds -------------------------------------------------------------------------------------------------------

BANDIT = {"name": "solved", "options": {"kind": "bandit", "form": "turns", "rewards": [0, 0, 0, 1]}}


def rounds(tmp_path, name, **more):
    method = methods.get_method("oreo_rounds")
    recipe = {
        "method": "oreo_rounds", "out": str(tmp_path / name), "model": TINY, "steps": 3, "training": 12, "batch": 16,
        "beta": 0.3, "kl": {"alpha": 0.0}, "task": BANDIT,
        "collect": {"prompts": 2, "n": 16, "sampling": {"max_tokens": 4}},
        "learner": {"optim": {"lr": 5e-3}}, "engine": {"max_num_seqs": 8, "max_len": 64}, **more,
    }  # fmt: skip
    return method, resolve(recipe, method.Config)


def test_rounds_rise(tmp_path):
    """Each round plays with the policy of the last; the share of good answers rises."""
    method, c = rounds(tmp_path, "run")
    launch(method, c)
    rows = read_metrics(tmp_path / "run")
    success = [r["collect/success"] for r in rows]
    assert [r["step"] for r in rows] == [1, 2, 3] and success[0] < success[1] < success[2] and success[2] > 0.6
    inner = Run.open(tmp_path / "run" / "round-3")
    named = json.loads((inner.path / "models.json").read_text())["critic.name"]
    assert named["folder"].endswith("round-2/checkpoints/000012/critic") and "episodes/000003.jsonl" in inner.recipe
    first = read_metrics(inner.path)[0]
    assert first["kl_estimate"] == 0.0 and first["v_max"] != 0.0  # a new reference, and a value that is kept
    assert {e.turns[0].version for e in read_episodes(tmp_path / "run" / "episodes")} == {0, 1, 2}


def test_rounds_from_the_start(tmp_path):
    more = {"anchor": "start", "critic_from": "fresh", "learn_from": "all", "steps": 2, "training": 3}
    method, c = rounds(tmp_path, "run", **more)
    launch(method, c)
    first = read_metrics(tmp_path / "run" / "round-2")[0]
    assert first["kl_estimate"] > 0 and first["v_max"] == first["v_min"] == 0.0 and first["rows"] == 64


def test_rounds_may_only_collect(tmp_path):
    method, c = rounds(tmp_path, "run", training=0, steps=2)
    launch(method, c)
    assert len(list(read_episodes(tmp_path / "run" / "episodes"))) == 64 and not (tmp_path / "run" / "round-1").exists()


SMALL = {"steps": 2, "training": 3, "collect": {"prompts": 2, "n": 4, "balanced": 2, "sampling": {"max_tokens": 4}}}


def same_rounds(one, two):
    assert diff_runs(one, two) == []
    last = "round-2/checkpoints/000003"
    for name in ("policy/model.safetensors", "critic/model.safetensors", "critic/heads.safetensors"):
        a, b = (load_file(run / last / name) for run in (one, two))
        assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")
    launch(*rounds(folder, "whole", **SMALL))
    return folder / "whole"


@pytest.mark.parametrize(
    ("home", "place", "call"),
    [(oreo_rounds, "gather", 2), (oreo.OreoMethod, "updates", 5), (Collection, "_keep", 3), (Collection, "_keep", 10)],
)
def test_rounds_resume(tmp_path, monkeypatch, whole, home, place, call):
    method, c = rounds(tmp_path, "parts", **SMALL)
    real, calls = getattr(home, place), []

    def dies(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(home, place, dies)
    with pytest.raises(KeyboardInterrupt):
        launch(method, c)
    monkeypatch.undo()
    launch(method, c, resume=True)
    same_rounds(whole, tmp_path / "parts")


def test_rounds_that_changed_are_made_again(tmp_path, whole, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    launch(*rounds(tmp_path, "run", **SMALL), resume=True)
    same_rounds(whole, run)
    first = (run / "round-1/metrics.jsonl").read_bytes()
    launch(*rounds(tmp_path, "run", **SMALL, critic_from="fresh"), resume=True)
    assert "stage 'round-2' is made again: key 'critic.name'" in capsys.readouterr().err
    assert (run / "round-1/metrics.jsonl").read_bytes() == first
    again = (run / "replaced/round-2-1/metrics.jsonl").read_bytes()
    assert again == (whole / "round-2/metrics.jsonl").read_bytes() != (run / "round-2/metrics.jsonl").read_bytes()
    launch(*rounds(tmp_path, "fresh", **SMALL, critic_from="fresh"))
    assert diff_runs(run, tmp_path / "fresh") == []
    (run / "episodes/000001.jsonl").write_text("")
    with pytest.raises(RunError, match=r"000001.jsonl of stage 'collect-1' was changed after it was made"):
        launch(*rounds(tmp_path, "run", **SMALL, critic_from="fresh"), resume=True)
