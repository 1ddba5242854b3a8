"""What steps earn in step_rl on hand-made answers of one and two turns, and each algorithm's credit token by token."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trailmark.config import ModelConfig
from trailmark.errors import ModelError
from trailmark.methods.online_configs import StepRewards
from trailmark.methods.step_rl import (
    StepJudge,
    StepRlMethod,
    against_group,
    grpo_credit,
    judged_steps,
    on_tokens,
    open_rewards,
    ppo_credit,
    remax_credit,
    spans_of,
    spread,
    summary_of_steps,
    turn_rewards,
)
from trailmark.models.tiny import tiny_tokenizer
from trailmark.types import Episode, Sample, Scored, Task, Turn

WORDS = tiny_tokenizer()
SAID = ["Thought 1: a\n", "Action 1: b\n", "Thought 2: c\n", "Action 2: d"]


def written(*parts, seat="policy", stop="stopped", **more):
    """A turn whose steps are the parts, with the token that ends it behind them."""
    ids = [WORDS(p, add_special_tokens=False)["input_ids"] for p in parts]
    ends = np.cumsum([0, *map(len, ids)]).tolist()
    tokens = (*(t for p in ids for t in p), WORDS.eos_token_id)
    return Turn(seat, (1, 2), tokens, steps=tuple(pairwise(ends)), stop=stop, text="".join(parts), **more)


def play(*turns, right=True, name="e", group="g"):
    return Episode(name, Task("t"), group, turns, {"self": Scored(float(right), right)})


SCORES = {("e", 0): np.array([0.9, 0.1, 0.5, 0.2])}
SCORES_3 = {("e", 0): np.array([0.9, 0.1, 0.5])}


@pytest.mark.parametrize(
    ("running", "wanted"),
    [
        ("none", [0.9, 0.0, 0.5, 0.0]),
        ("sum", [0.9, 0.0, 1.4, 0.0]),
        ("product", [0.9, 0.0, 0.45, 0.0]),
        ("min", [0.9, 0.0, 0.5, 0.0]),
    ],
)
def test_steps_of_skipped_types_earn_nothing_and_take_nothing_from_others(running, wanted):
    e = play(written(*SAID))
    pay = lambda **s: turn_rewards(e, "policy", SCORES, StepRewards(model="m", running=running, **s), WORDS)[0].tolist()
    assert pay(skip=["Action"]) == pytest.approx(wanted, abs=1e-12)
    assert pay(skip=["Action"], alpha=0.5) == pytest.approx([x / 2 for x in wanted], abs=1e-12)
    assert pay(skip=["Action"], right=2.0) == pytest.approx([*wanted[:3], 2.0], abs=1e-12)  # the outcome is paid still
    assert pay(skip=["Thought", "Action"]) == [0.0] * 4 and pay(skip=["Observation"]) == pytest.approx(pay())


def test_the_outcome_is_paid_once_at_the_last_turn_of_the_seat():
    """Two turns of the policy, one of another seat between them, and one of the other behind them."""
    turns = (written("a\n", "b"), written("x", seat="other"), written("c"), written("y", seat="other"))
    scores = {("e", 0): np.array([0.3, 0.6]), ("e", 1): np.array([9.0]), ("e", 2): np.array([0.4])}
    pay = lambda won, **s: [
        r.tolist() for r in turn_rewards(play(*turns, right=won), "policy", scores, StepRewards(**s))
    ]
    assert pay(True, model="m") == [[0.3, 0.6], [0.4]]
    assert pay(True, model="m", right=2.0, wrong=-3.0) == [[0.3, 0.6], [2.0]]
    assert pay(False, model="m", right=2.0, wrong=-3.0, clip=2.5) == [[0.3, 0.6], [-2.5]]
    assert pay(True, model="m", running="sum") == [pytest.approx([0.3, 0.9]), [0.4]]  # a turn begins anew
    e = play(*turns)
    paid = on_tokens(e, [np.array([0.3, 0.6]), np.array([0.4])], "policy", True)
    assert [p.tolist() for p in paid] == [[0, 0.3, 0, 0.6], [0, 0.4]]  # at the tokens that end the turns
    paid = on_tokens(e, [np.array([0.3, 0.6]), np.array([0.4])], "policy", False)
    assert [p.tolist() for p in paid] == [[0, 0.3, 0.6, 0], [0.4, 0]]


def test_a_turn_without_steps_is_one():
    bare = replace(written("a\n", "b"), steps=())
    assert spans_of(play(bare), 0) == ((0, 4),) and spans_of(play(written("a\n", "b")), 0) == ((0, 2), (2, 3))
    assert turn_rewards(play(bare), "policy", {}, StepRewards(right=1.0))[0].tolist() == [1.0]
    silent = replace(bare, tokens=())
    assert turn_rewards(play(silent), "policy", {}, StepRewards(right=1.0)) == []


def test_a_group_is_compared_over_all_turns_of_its_answers():
    """0 and 1 | 2 in two turns, 3 | 4 | 5 in another answer: mean 2.5, variance 17.5 / 5."""
    a, b = play(written("a\n", "b"), written("c"), name="a"), play(written("d\n", "e\n", "f"), name="b")
    earned = {"a": [np.array([0.0, 1.0]), np.array([2.0])], "b": [np.array([3.0, 4.0, 5.0])]}
    every = {name: [np.ones(len(r), bool) for r in rewards] for name, rewards in earned.items()}
    got = against_group([a, b], earned, "policy", False, every)
    z = [(x - 2.5) / math.sqrt(3.5) for x in range(6)]
    assert got["a"][0].tolist() == pytest.approx([0, z[0], z[1], 0], abs=1e-8)
    assert got["a"][1].tolist() == pytest.approx([z[2], 0], abs=1e-8)
    assert got["b"][0].tolist() == pytest.approx([0, z[3], 0, z[4], z[5], 0], abs=1e-8)


def group_credit(answers, scores, settings):
    """What the tokens of some answers are paid, by group."""
    earned = {e.id: turn_rewards(e, "policy", scores, settings, WORDS) for e in answers}
    compared = {e.id: judged_steps(e, "policy", settings, WORDS) for e in answers}
    return {name: p[0].tolist() for name, p in against_group(answers, earned, "policy", False, compared).items()}


def test_outcomes_alone_are_compared_answer_with_answer():
    """Outcomes 1, 0, 0 have mean 1/3 and deviation sqrt(1/3). Steps that nothing is paid for are worth 0 to all, so a
    long answer costs nothing."""
    long, short = written("a\n", "b\n", "c"), written("d")
    answers = [play(long, name="r"), play(long, right=False, name="l"), play(short, right=False, name="s")]
    got = group_credit(answers, {}, StepRewards(right=1.0))
    high, low = (2 / 3) / math.sqrt(1 / 3), -(1 / 3) / math.sqrt(1 / 3)
    assert got["r"] == pytest.approx([0, 0, 0, 0, high, 0], abs=1e-8)
    assert got["l"] == pytest.approx([0, 0, 0, 0, low, 0], abs=1e-8) and got["s"] == pytest.approx([low, 0], abs=1e-8)
    unpaid = {(e.id, 0): np.array([0.7, 0.2, 0.9][: len(e.turns[0].steps)]) for e in answers}
    assert group_credit(answers, unpaid, StepRewards(model="m", alpha=0.0, right=1.0)) == got


def test_types_that_earn_nothing_are_not_compared():
    """Thoughts 0.9 and 0.5 have mean 0.7 and deviation sqrt(0.08). The Action between them has 0, not -0.7."""
    e = play(written(*SAID[:3]))
    z = 0.2 / math.sqrt(0.08)
    (got,) = group_credit([e], SCORES_3, StepRewards(model="m", skip=["Action"])).values()
    ends = [end - 1 for _, end in e.turns[0].steps]
    assert [got[k] for k in ends] == pytest.approx([z, 0.0, -z], abs=1e-8)
    assert sum(map(abs, got)) == pytest.approx(2 * z, abs=1e-8)
    both = StepRewards(model="m", skip=["Action"], right=1.0)
    (found,) = judged_steps(play(written(*SAID)), "policy", both, WORDS)
    assert found.tolist() == [True, False, True, True]


def sample(**streams):
    """Two tokens of a prompt and three written ones."""
    rows = {k: np.array([7.0, 7.0, *v]) if k != "reward" else np.array([0.0, 0.0, *v]) for k, v in streams.items()}
    weight = np.array([0.0, 0.0, 1.0, 1.0, 1.0])
    return Sample(np.arange(5), {"weight": weight, **rows}, {"weight": 3.0}, episode="e", group="g")


def test_credit_of_grpo_is_what_is_paid_at_or_behind_a_token():
    s = sample(reward=[1.0, -0.5, 2.0], old=[0, 0, 0], ref=[1, 1, 1])
    got = grpo_credit(s).streams["advantage"]
    assert got.tolist() == [0, 0, 2.5, 1.5, 2.0]  # neither a discount nor the price of the KL


def test_credit_of_remax():
    """(3 - 1) with 0.5 for each token to come, less 0.1 times the gaps 1, 0 and -1."""
    s = sample(reward=[1.0, 0.0, 2.0], old=[0, 0, 0], ref=[-1, 0, 1])
    got = remax_credit(s, 1.0, kl=0.1, gamma=0.5).streams["advantage"]
    assert got.tolist() == pytest.approx([0, 0, 0.5 - 0.1, 1.0, 2.0 + 0.1], abs=1e-12)


@pytest.mark.parametrize(
    ("stop", "end"), [("stopped", 0.0), ("length", 0.6), ("context_full", 0.6), ("forced_end", 0.6), ("label", 0.0)]
)
def test_credit_of_ppo(stop, end):
    """lam 0: delta_t = r_t + gamma V_{t+1} - V_t, where a cut answer goes on with what the critic says of its end."""
    streams = {"reward": [0.0, 0.0, 1.0], "old": [0, 0, 0], "ref": [-1, 0, 1], "value": [0.1, 0.2, 0.3]}
    s = sample(**streams, after=[0.4, 0.5, 0.6])
    got = ppo_credit(s, written("a", stop=stop).cut_off, kl=0.1, gamma=0.5, lam=0.0)
    delta = [-0.1 + 0.5 * 0.2 - 0.1, 0.5 * 0.3 - 0.2, 1.1 + 0.5 * end - 0.3]
    assert got.streams["advantage"].tolist() == pytest.approx([0, 0, *delta], abs=1e-12)
    returns = [d + v for d, v in zip(delta, streams["value"])]
    assert got.streams["returns"].tolist() == pytest.approx([0, 0, *returns], abs=1e-12)
    assert got.mass == {"weight": 3.0, "value_weight": 3.0}
    assert got.streams["old_value"].tolist() == s.streams["value"].tolist()


def test_spread_and_what_is_summary_of_steps():
    assert spread(np.array([1.0, 2.0]), np.array([False, True, False, True])).tolist() == [0, 1, 0, 2]
    s = sample(old=[0.0, 1.0, 2.0], ref=[1.0, 1.0, -1.0])
    earned = {"e": [np.array([1.0, 2.0]), np.array([3.0])], "f": [np.array([4.0])]}
    assert summary_of_steps([s], earned) == {
        "step_reward": 2.5, "steps_written": 2.0, "answer_reward": 5.0, "kl_reference": pytest.approx(2 / 3),
    }  # fmt: skip


def test_the_judge_reads_probabilities_or_raw_numbers(make_lm):
    lm = make_lm("llama", dtype=torch.float64)
    lm.add_head("step", 3, zero=False, seed=1)
    e = play(written("a\n", "b"), written("x", seat="other"))
    read = lambda **s: StepJudge(lm, StepRewards(model="m", **s)).read([e], "policy")
    (logits,) = [np.array([read(raw=True, classes=[c])[0]["e", 0][n] for c in range(3)]) for n in (1,)]
    p = [math.exp(x) / sum(map(math.exp, logits)) for x in logits]
    found, (note,) = read(classes=[0, 2])
    assert list(found) == [("e", 0)] and found["e", 0][1] == pytest.approx(p[0] + p[2], abs=1e-9)
    assert (note.name, note.level, note.turn, note.values) == ("step_score", "step", 0, tuple(found["e", 0]))
    assert read()[0]["e", 0][1] == pytest.approx(p[2], abs=1e-9)  # none: the last class
    assert read(raw=True)[0]["e", 0][1] == logits[2] == read(raw=True, classes=[0, 2])[0]["e", 0][1]
    with pytest.raises(ModelError) as found:
        StepJudge(lm, StepRewards(model="m", classes=[1, 1]))
    assert str(found.value) == "head 'step' of 'tiny-llama' has classes 0 to 2; [1, 1] is no set of some of them."
    assert open_rewards(StepRewards(right=1.0), ModelConfig(name="tiny"), WORDS).read([e], "policy") == ({}, [])
    with pytest.raises(ModelError, match="model 'tiny-gpt2' has no head 'step' to read values from"):
        StepJudge(make_lm(), StepRewards(model="m"))


def test_an_answer_without_steps_is_not_the_best_of_its_group():
    """Scores -3 and -1 have mean -2 and deviation sqrt(2). An answer that says nothing has no step to be judged: it is
    no step worth 0."""
    answers = [play(written("a\n", "b"), name="said"), play(replace(written("c"), steps=()), name="empty")]
    scores, z = {("said", 0): np.array([-3.0, -1.0])}, 1 / math.sqrt(2)
    got = group_credit(answers, scores, StepRewards(model="m", raw=True))
    assert got["said"] == pytest.approx([0, -z, z, 0], abs=1e-8) and got["empty"] == [0, 0]
    paid = group_credit(answers, scores, StepRewards(model="m", right=1.0))
    assert paid["empty"][-1] != 0  # the outcome is its own


def test_a_whole_turn_as_one_step_is_judged_by_the_reward_model():
    method = SimpleNamespace(
        tokenizer=WORDS,
        config=SimpleNamespace(rewards=StepRewards(model="m", split="turn")),
        seat="policy",
    )
    e = play(replace(written("a\n", "b"), steps=()), written("x", seat="other"))
    marked = StepRlMethod.stored(method, e)
    assert marked.turns[0].steps == ((0, 3),) and marked.turns[1] == e.turns[1]  # without the token that ends it
    paid = turn_rewards(marked, "policy", {("e", 0): np.array([0.7])}, method.config.rewards)
    assert [p.tolist() for p in paid] == [[0.7]]
