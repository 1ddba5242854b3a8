"""Reinforcement in Reflect-RL, to the number: gradient, ratio, critic, memory, stages."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tabular import TabularLM

from trailmark.config import LearnerConfig, ModelConfig, OptimConfig, resolve
from trailmark.errors import ModelError, RecipeError, TaskError
from trailmark.learn.learner import Learner, Update
from trailmark.methods import get_method
from trailmark.methods.reflect import curriculum, method
from trailmark.methods.reflect.config import CurriculumConfig
from trailmark.methods.reflect.play import two_players
from trailmark.models.load import load_model
from trailmark.objectives.value import Value
from trailmark.rollout.play import play
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_episodes, read_metrics
from trailmark.samples import build_samples
from trailmark.tasks import get_task
from trailmark.types import Episode, SamplingLaw, Scored, Task, Turn

TAXI = {"name": "taxi", "options": {"mode": "full", "history": "none", "menu": False, "walls": False}}
TINY = {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 128}}
SMALL = {
    "method": "reflect", "steps": 12, "task": TAXI, "teacher": {"prompts": 4},
    "sft": {"reflector": 4, "policy": 4, "batch": 4},
    "rl": {"algorithm": "ppo", "prompts_per_step": 6, "replay_batch": 3,
           "critic": {"kind": "shared", "every": 2, "passes": 2, "optim": {"lr": 1e-2}}},
    "learner": {"optim": {"lr": 5e-4}}, "curriculum": {"kind": "modes"}, "final": {"n": 5}, "thought": 12,
    "model": TINY, "engine": {"max_num_seqs": 8, "max_len": 128}, "checkpoint": {"every": 5, "keep_last": 2,
    "keep_best": 0},
}  # fmt: skip


def made(tmp_path, **more):
    """A run without stages: play alone, with untaught players."""
    alone = {**SMALL, "sft": {"reflector": 0, "policy": 0}}
    config = resolve({**alone, "out": str(tmp_path / "run"), **more}, method.ReflectRecipe)
    return method.ReflectMethod(config, Run.create(config.out, "method: x\n"))


def bandit(tmp_path, name, **rl_more):
    """The whole method on one step with six labels, of which one pays: no teacher, no reflector."""
    config = resolve({
        "method": "reflect", "out": str(tmp_path / name), "reflect": False, "steps": 70,
        "sft": {"reflector": 0, "policy": 0},
        "task": {"name": "solved", "options": {"kind": "bandit", "actions": 6, "rewards": [0, 0, 0, 1, 0, 0]}},
        "rl": {"prompts_per_step": 16, "replay_batch": 4, **rl_more}, "learner": {"optim": {"lr": 3e-3}}, "model": TINY,
        "engine": {"max_num_seqs": 16, "max_len": 64},
    }, method.ReflectRecipe)  # fmt: skip
    launch(get_method("reflect"), config)
    return [row["success"] for row in read_metrics(tmp_path / name)]


def test_the_policy_gradient_of_a_bandit_is_the_analytic_one():
    """L = -(1/N) sum (G_n - mean G) log pi(a_n):  dL/dz = -(1/N) sum (G_n - mean G) (1[a_n] - pi), over listed
    labels."""
    allowed, draw = (2, 3, 4, 5, 6, 7), np.random.default_rng(5)
    actions, rewards, logits = draw.choice(allowed, 20), draw.normal(size=20), draw.normal(size=8)
    lm: TabularLM = TabularLM([(0, 1)], 8)
    with torch.no_grad():
        lm.model.logits[0] = torch.as_tensor(logits)
    law = SamplingLaw(allowed=allowed)
    plays = [
        Episode(f"e{n}", Task("t"), "g", (Turn("policy", (0, 1), (int(a),), law=law, reward=r),), {"self": Scored(r)})
        for n, (a, r) in enumerate(zip(actions, rewards))
    ]
    learner = Learner({"policy": lm}, LearnerConfig())
    pi = np.where(np.isin(np.arange(8), allowed), np.exp(logits), 0)
    pi /= pi.sum()
    for baseline, base in (("none", 0.0), ("batch", rewards.mean())):
        config = method.RlConfig(baseline=baseline)
        learner.gradient(method.decisions(plays, learner, config, fresh=True), method.objective(config, True))
        want = -np.mean([(r - base) * ((np.arange(8) == a) - pi) for a, r in zip(actions, rewards)], axis=0)
        assert lm.model.logits.grad[0].numpy() == pytest.approx(want, abs=1e-12)
        assert want[:2] == pytest.approx([0, 0])  # what is not listed is not touched


@pytest.mark.parametrize("algorithm", ["pg", "ppo"])
def test_a_bandit_of_six_is_learned(tmp_path, algorithm):
    """From 1/6 to 0.9 in less than 200 iterations."""
    critic = (
        {"kind": "shared", "every": 4, "passes": 2, "optim": {"lr": 1e-2}} if algorithm == "ppo" else {"kind": "none"}
    )
    success = bandit(tmp_path, algorithm, algorithm=algorithm, critic=critic)
    assert np.mean(success[:2]) < 0.5 and np.mean(success[-10:]) > 0.9


def test_entropy_shifts_no_reported_success(tmp_path):
    """The same first step with and without the term: equal rewards and success; the loss has a term more."""
    for name, entropy in (("a", 0.0), ("b", 0.5)):
        run = made(tmp_path / name, steps=1, rl={**SMALL["rl"], "entropy": entropy})
        reports = [run.learner.update(u) for u in run.updates(1)]
        first = run.metrics() if name == "a" else first  # noqa: F821
        assert run.metrics() == first and ("rl/entropy" in reports[0]) == (entropy > 0)


def rollout(run, n=6):
    tasks = run.levels[0].batch(run.source, n, 0, 1, 0)
    return play(run.source, tasks, run.opened.seats, two_players(run.talk), seed=3)


def test_the_ratio_is_1_in_the_first_epoch(tmp_path):
    run = made(tmp_path, learner={"optim": {"lr": 1e-2}})
    config, episodes = run.config.rl, rollout(run)
    samples = method.decisions(episodes, run.learner, config, fresh=True)
    first = run.learner.gradient(samples, method.objective(config, True), ["policy"])
    assert first["ratio"] == 1.0 and first["clip_fraction"] == 0.0 and first["kl_old"] == 0.0
    drawn = method.decisions(episodes, run.learner, config, fresh=False)  # what the sampler wrote down says the same
    for a, b in zip(samples, drawn):
        assert a.streams["old"] == pytest.approx(b.streams["old"], abs=1e-4)
    run.learner.update(Update(samples, method.objective(config, True)))
    assert run.learner.gradient(samples, method.objective(config, True), ["policy"])["ratio"] != 1.0


@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_the_critic_learns_constant_returns_and_leaves_the_policy_alone(tmp_path, kind, head):
    run = made(tmp_path, rl={**SMALL["rl"], "critic": {"kind": kind, "head": head, "optim": {"lr": 3e-2}}})
    policy = run.learner.models["policy"].fingerprint()
    samples = method.decisions(rollout(run), run.learner, run.config.rl, fresh=True)
    assert all((s.streams["value"] == 0).all() for s in samples)  # V starts at 0
    flat = [dataclasses.replace(s, streams={**s.streams, "returns": 2.0 * (s.streams["weight"] != 0)}) for s in samples]
    error = [run.learner.update(Update(flat, Value(), "critic"))["value"] for _ in range(40)]
    assert error[0] == pytest.approx(4.0) and error[-1] < 0.2 * error[0]
    assert run.learner.models["policy"].fingerprint() == policy
    assert kind == "separate" or all(n.startswith("heads.") for n, _ in run.learner.models["critic"].parameters())
    again = method.decisions(rollout(run), run.learner, run.config.rl, fresh=True)
    at = [(s.streams["returns"] - s.streams["value"])[s.streams["weight"] != 0] for s in again]
    assert np.concatenate([s.streams["advantage"][s.streams["weight"] != 0] for s in again]) == pytest.approx(
        np.concatenate(at)
    )


def test_dropout_is_off_in_rollouts(tmp_path):
    """Adapters with dropout: what was drawn is what the learner scores without it, twice over."""
    run = made(tmp_path, model={**TINY, "lora": {"rank": 2, "dropout": 0.5}})
    for lm in run.learner.models.values():
        lm.train(True)
    episodes = rollout(run)
    for lm in run.learner.models.values():
        lm.train(True)
    assert rollout(run) == episodes
    samples = method.decisions(episodes, run.learner, run.config.rl, fresh=True)
    drawn = build_samples(episodes, "policy")
    assert all(a.streams["old"] == pytest.approx(b.streams["old"], abs=1e-4) for a, b in zip(samples, drawn))
    trained = [n for n, _ in run.learner.models["policy"].parameters()]
    assert trained and all("lora_" in n for n in trained)


# --- memory and stages ---------------------------------------------------------------------------------------------


def won(k, success=True):
    return Episode(f"e{k}", Task(f"t{k}"), "g", (), {"self": Scored(1.0, success)})


def test_the_memory_holds_successes_first_in_first_out():
    memory = method.Replay(3)
    assert memory.draw(2, (0, 1)) == []
    memory.add([won(0), won(1, False), won(2)])
    assert [e.id for e in memory.plays] == ["e0", "e2"]
    memory.add([won(3), won(4, False), won(5, None)])  # a world that reports no success: its reward is positive
    assert [e.id for e in memory.plays] == ["e2", "e3", "e5"]
    assert len(memory.draw(50, (0, 1))) == 50 and {e.id for e in memory.draw(50, (0, 1))} == {"e2", "e3", "e5"}
    assert memory.draw(5, (0, 1)) == memory.draw(5, (0, 1)) != memory.draw(5, (0, 2))
    none = method.Replay(0)
    none.add([won(0)])
    assert none.plays == []


def test_depth_stages():
    found = [0] * 2 + [1] * 6 + [2] * 8 + [3] * 3 + [4]
    groups = lambda **more: curriculum.depth_groups(found, CurriculumConfig(kind="depth", **more))
    assert groups(keep=9) == [({0}, 2), ({1}, 6), ({2}, 8), ({3}, 3), ({4}, 1)]
    assert groups() == [({0}, 2), ({1}, 6), ({2, 3, 4}, 12)]
    assert groups(merge_first_two=True) == [({0, 1}, 8), ({2}, 8), ({3, 4}, 4)]
    # nothing to merge with
    assert curriculum.depth_groups([1, 1], CurriculumConfig(merge_first_two=True)) == [({1}, 2)]


def test_a_curriculum_always_advances():
    assert curriculum.level_starts([100, 100, 100], 300) == [0, 100, 200]
    assert curriculum.level_starts([2, 6, 12], 40) == [0, 4, 16]
    assert curriculum.level_starts([100, 100, 100], 9) == [0, 3, 6]  # fewer steps than records
    assert curriculum.level_starts([1000, 1, 1], 5) == [0, 3, 4]
    assert curriculum.level_starts([1, 1, 1000], 5) == [0, 1, 2]
    assert curriculum.level_starts([5, 5, 5], 2) == [0, 1, 2]  # as far as the steps go


def test_depths_of_a_start():
    assert curriculum.depths(Task("a", meta={"depth": 2})) == [2]
    assert curriculum.depths(Task("a", data={"target": "src/x/y.py"})) == [2]
    assert curriculum.depths(Task("a", data={"targets": ["README", "src/y.py"]})) == [0, 1]
    with pytest.raises(TaskError, match="start 'a' has neither depth nor target"):
        curriculum.depths(Task("a"))


def test_stages_of_a_finite_world_are_passed_through_in_shuffled_order():
    records = [Task(f"r{k}", data={"target": "/".join("abc"[: 1 + k % 3])}) for k in range(12)]
    source = SimpleNamespace(name="files", tasks=lambda split, n, seed: records[:n])
    stages = curriculum.make_levels(CurriculumConfig(kind="depth"), source)
    assert [(s.name, s.size) for s in stages] == [("depth 0", 4), ("depth 1", 4), ("depth 2", 4)]
    seen = [t.id for step in (11, 12) for t in stages[1].batch(source, 2, 0, step, 10)]
    assert sorted(seen) == ["r1", "r10", "r4", "r7"]  # one whole pass since the stage began
    assert {t.meta["stage"] for t in stages[2].starts(source, "test", None, 0)} == {"depth 2"}


def test_the_taxi_s_thirds(tmp_path):
    """Pickup, dropoff and full, a third of the steps each; the memory is emptied at each switch; one stage alone on
    demand."""
    run = made(tmp_path)
    assert [run.level_of(k)[0] for k in range(1, 13)] == [0] * 4 + [1] * 4 + [2] * 4
    run.replay.plays = [won(0)]
    list(run.updates(1))
    assert run.replay.plays[0].id == "e0"
    list(run.updates(5))
    assert run.level == 1 and "e0" not in {e.id for e in run.replay.plays}
    alone = made(tmp_path / "alone", curriculum={"kind": "modes", "index": 2})
    assert {alone.level_of(k)[0] for k in range(1, 13)} == {2}
    with pytest.raises(RecipeError, match=r"curriculum\.index is 3, and there are 3 stages"):
        made(tmp_path / "no", curriculum={"kind": "modes", "index": 3})
    with pytest.raises(TaskError, match="have no mode"):
        curriculum.make_levels(CurriculumConfig(kind="modes"), get_task("solved", kind="bandit"))


# --- whole runs ----------------------------------------------------------------------------------------------------


def test_stages_are_played_and_evaluated_one_by_one(tmp_path):
    config = resolve({**SMALL, "out": str(tmp_path / "run"), "eval": {"every": 12, "n": 4},
                      "final": {"n": 5, "references": True}}, method.ReflectRecipe)  # fmt: skip
    launch(get_method("reflect"), config)
    modes = {}
    for e in read_episodes(tmp_path / "run" / "episodes"):
        modes.setdefault(int(e.id.split(":")[0]), set()).add(e.task.data["mode"])
    assert [modes[s] for s in (1, 4, 5, 8, 9, 12)] == [{"pickup"}] * 2 + [{"dropoff"}] * 2 + [{"full"}] * 2
    last = read_metrics(tmp_path / "run")[-1]
    assert {"eval/success/pickup", "eval/success/dropoff", "eval/success/full", "critic/value", "rl/ratio"} <= set(
        last
    ) | {k for row in read_metrics(tmp_path / "run") for k in row}
    from trailmark.evaluate.run import stage_rows
    from trailmark.runs.store import read_segment

    rows = {r["name"]: r for r in stage_rows(read_segment(tmp_path / "run/evaluation/oracle.jsonl"), "oracle")}
    assert list(rows) == ["oracle", "oracle, pickup", "oracle, dropoff", "oracle, full"]
    assert rows["oracle, pickup"]["metrics"]["success"]["value"] == 1.0 and rows["oracle"]["episodes"] == 15


def test_players_of_an_earlier_run(tmp_path):
    """A reflector and a policy are loaded and go on; the reflector stays what it was."""
    first = resolve({**SMALL, "out": str(tmp_path / "first"), "steps": 0, "curriculum": {}}, method.ReflectRecipe)
    launch(get_method("reflect"), first)
    more = {"steps": 2, "sft": {"reflector": 0, "policy": 0}, "curriculum": {}, "final": {"n": 3}}
    more["load"] = {"policy": str(tmp_path / "first"), "reflector": str(tmp_path / "first/checkpoints/000000")}
    second = resolve({**SMALL, **more, "out": str(tmp_path / "second")}, method.ReflectRecipe)
    launch(get_method("reflect"), second)
    reflector = [load_model(ModelConfig(name=str(tmp_path / p / "reflector"))).fingerprint()
                 for p in ("first/checkpoints/000000", "second/checkpoints/000002")]  # fmt: skip
    assert reflector[0] == reflector[1]
    for bad, said in (("nowhere", "there is no folder"), (str(tmp_path), "tokenizer|config.json")):
        wrong = resolve({**SMALL, **more, "out": str(tmp_path / "x"), "load": {"policy": bad}}, method.ReflectRecipe)
        with pytest.raises(ModelError, match=said):
            launch(get_method("reflect"), wrong)


def test_ppo_needs_something_to_compare_with():
    with pytest.raises(RecipeError, match="ppo needs rl.critic.kind"):
        resolve({"method": "reflect", "steps": 400, "rl": {"algorithm": "ppo"}}, method.ReflectRecipe)


def test_every_stage_has_an_optimiser_and_a_schedule_of_its_own(tmp_path):
    """The moments of imitation do not reach play, and every warm-up and schedule counts from its own first step."""
    linear = {"schedule": "linear"}
    config = resolve({
        **SMALL, "out": str(tmp_path / "run"), "steps": 4, "curriculum": {},
        "sft": {"reflector": 2, "policy": 4, "batch": 4, "optim": {"lr": 1e-2, **linear}},
        "rl": {"prompts_per_step": 4, "replay": 0, "baseline": "batch"},
        "learner": {"optim": {"lr": 2e-3, **linear}},
    }, method.ReflectRecipe)  # fmt: skip
    launch(get_method("reflect"), config)
    lr = lambda run, key: [row[key] for row in read_metrics(tmp_path / "run" / run)]
    assert lr("reflector", "lr") == pytest.approx([1e-2, 0.5e-2])
    assert lr("policy", "lr") == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])
    assert lr(".", "rl/lr") == pytest.approx([2e-3, 1.5e-3, 1e-3, 0.5e-3])
    state = json.loads((tmp_path / "run/checkpoints/000004/state.json").read_text())
    assert state["optimiser_steps"] == {"policy": 4}
    moments = load_file(tmp_path / "run/checkpoints/000004/optimiser-policy.safetensors")
    assert {float(t) for name, t in moments.items() if name.startswith("step/")} == {4.0}


def test_optimisers_have_their_own_rates(tmp_path):
    run = made(tmp_path)
    assert isinstance(run.learner.optimisers["critic"].config, OptimConfig)
    assert {n: o.config.lr for n, o in run.learner.optimisers.items()} == {"policy": 5e-4, "critic": 1e-2}
    assert run.learner.optimisers["policy"].total == 12 * 2 * 3  # steps, with and without memory, three epochs
    assert run.learner.optimisers["critic"].total == 12 * 2 // 2 * 2
