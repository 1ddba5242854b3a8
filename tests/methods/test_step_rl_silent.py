"""An answer that ends at once has no step. A reward model says nothing of it, and no algorithm of step_rl pays it 0."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from trailmark.config import ModelConfig, resolve
from trailmark.learn.checkpoint import save_model
from trailmark.methods import step_rl
from trailmark.methods.online_configs import StepRlRecipe
from trailmark.methods.step_rl import StepRlMethod
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.runs.store import Run
from trailmark.types import Episode, Player, Scored, Task, Turn

WORDS = tiny_tokenizer()
TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 64}}


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A reward model whose head was never trained, but is not 0."""
    folder = tmp_path_factory.mktemp("judge")
    lm = load_model(ModelConfig.model_validate({**TINY, "seed": 3}))
    lm.add_head("step", 2, zero=False, seed=1)
    save_model(lm, folder / "value", folder / "base")
    return str(folder / "value")


def answer(name, *parts, group="g"):
    ids = [WORDS(p, add_special_tokens=False)["input_ids"] for p in parts]
    ends = np.cumsum([0, *map(len, ids)]).tolist()
    tokens = (*(t for p in ids for t in p), WORDS.eos_token_id)
    turn = Turn("policy", (5, 6), tokens, logp=(-1.0,) * len(tokens), steps=tuple(pairwise(ends)), stop="stopped",
                text="".join(parts), action="x")  # fmt: skip
    players = {"policy": Player("trained", "tiny")}
    return Episode(name, Task(group), group, (turn,), {"self": Scored(1.0, True)}, terminated=True, players=players)


PLAYED = [answer("said", "a\n", "b"), answer("empty"), answer("more", "c\n", "d"), answer("other", "e", group="h")]


def method(path, judge, algorithm, **rewards):
    given = {
        "method": "step_rl", "out": str(path), "model": TINY, "steps": 1, "prompts_per_step": 2, "n": 2,
        "algorithm": algorithm,
        "task": {"name": "arith", "options": {"level": 1}}, "engine": {"max_num_seqs": 4, "max_len": 64},
        "rewards": {"model": judge, "raw": True, **rewards}, "critic": {"name": "tiny"},
    }  # fmt: skip
    made = StepRlMethod(resolve(given, StepRlRecipe), Run.create(path, "method: step_rl\n"))
    made.batch = lambda step: (PLAYED, [])
    return made


def greedy_answers(monkeypatch, *answers):
    monkeypatch.setattr(step_rl, "play", lambda *a, **k: list(answers))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax"])
def test_an_answer_without_steps_is_left_out_and_counted(tmp_path, monkeypatch, judge, algorithm):
    greedy_answers(monkeypatch, answer("g1", "a"), answer("g2", "b", group="h"))
    m = method(tmp_path / "run", judge, algorithm)
    first = next(iter(m.updates(1)))
    assert sorted({s.episode for s in first.samples}) == ["more", "other", "said"]
    assert m._metrics["answers_without_steps"] == 1 and m._metrics["steps_written"] == 5 / 3


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax"])
def test_where_the_outcome_is_paid_it_has_that(tmp_path, monkeypatch, judge, algorithm):
    greedy_answers(monkeypatch, answer("g1"), answer("g2", "b", group="h"))
    m = method(tmp_path / "run", judge, algorithm, right=1.0)
    first = next(iter(m.updates(1)))
    assert sorted({s.episode for s in first.samples}) == ["empty", "more", "other", "said"]
    assert m._metrics["answers_without_steps"] == 1
    paid = {s.episode: float(s.streams["reward"].sum()) for s in first.samples}
    if algorithm != "grpo":
        assert paid["empty"] == 1.0


def test_a_greedy_answer_without_steps_is_no_baseline(tmp_path, monkeypatch, judge):
    greedy_answers(monkeypatch, answer("g1"), answer("g2", "b", group="h"))
    m = method(tmp_path / "run", judge, "remax")
    first = next(iter(m.updates(1)))
    assert {s.episode for s in first.samples} == {"other"} and m._metrics["failed_greedy"] == 1


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax"])
def test_a_step_of_nothing_but_silence_changes_no_weight(tmp_path, monkeypatch, judge, algorithm):
    greedy_answers(monkeypatch, answer("g1"))
    m = method(tmp_path / "run", judge, algorithm)
    m.batch = lambda step: ([replace(PLAYED[1], id=f"e{k}") for k in range(2)], [])
    assert list(m.updates(1)) == [] and m._metrics["answers_without_steps"] == 2
