"""Re-entering a stored play anywhere: what was stays byte for byte, what follows is new, and another world is
refused."""

import dataclasses
import math

import numpy as np
import pytest
from rollout_talk import TOKENIZER, Recorder, Talk, encode, seat, speaker

from trailmark.engines.base import Completion
from trailmark.errors import TaskError
from trailmark.rollout.branch import Point, branch
from trailmark.rollout.play import Seat, play
from trailmark.samples import build_samples, scored
from trailmark.tasks.arith import Arith
from trailmark.tasks.solved import Solved, evaluate
from trailmark.types import Failed, Parent, SamplingLaw, Scored

# --- anywhere -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", ["talk", "solved"])
def test_re_enter_everywhere(tiny, world):
    """Before every token of every turn: what came before stays byte for byte, what was written of the turn is forced
    on it and never trained, and the engine sees exactly that."""
    source = Talk() if world == "talk" else Solved("tree", depth=3, inner=True)
    stored = play(source, source.tasks(n=2), [Seat("policy", tiny, max_tokens=6)], n=1, seed=3)
    points = [Point(e, k, j) for e in stored for k, t in enumerate(e.turns) for j in range(len(t.tokens))]
    engine = Recorder(tiny)
    found = branch(source, points, [Seat("policy", engine, SamplingLaw(temperature=1.3), max_tokens=6)], n=2, seed=9)
    assert [len(x) for x in found] == [2] * len(points)
    for point, made in zip(points, found):
        e, k, j = point.episode, point.turn, point.token
        for n, b in enumerate(made):
            assert b.turns[:k] == e.turns[:k]
            assert (b.id, b.group, b.seed) == (f"{e.id}>{k}.{j}/{n}", f"{e.id}>{k}.{j}", 9)
            assert b.parent == Parent(e.id, k, j) and b.task == e.task and isinstance(b.outcome, Scored)
            turn = b.turns[k]
            assert turn.forced == e.turns[k].tokens[:j] and turn.prompt == e.turns[k].prompt
            assert turn.continues == e.turns[k].continues and turn.law.temperature == 1.3
            assert engine.of(b, k).prompt == e.context(k) + turn.forced == b.context(k) + turn.forced
            assert all(engine.of(b, i).prompt == b.context(i) for i in range(k + 1, len(b.turns)))
            assert not [
                r for r, _ in engine.asked if r.key in {f"{b.id}\0{i}" for i in range(k)}
            ]  # nothing drawn again
            for s in build_samples([b], "policy"):
                number = s.streams["turn"]
                for i in range(len(b.turns)):
                    where = np.nonzero(number == i)[0]
                    if len(where):
                        at = len(b.context(i)) + len(b.turns[i].forced)
                        assert where.tolist() == list(range(at, at + len(b.turns[i].tokens)))
                        assert (s.streams["weight"][at - len(b.turns[i].forced) : at] == 0).all()
                assert int((s.streams["weight"] != 0).sum()) == int((number >= 0).sum())
    some = slice(None, None, 5)
    again = branch(
        source, points[some], [Seat("policy", tiny, SamplingLaw(temperature=1.3), max_tokens=6)], n=2, seed=9
    )
    assert [[(b.turns[-1].tokens, b.outcome) for b in made] for made in again] == [
        [(b.turns[-1].tokens, b.outcome) for b in made] for made in found[some]
    ]
    for point, (a, b) in zip(points, found):
        if point.turn == 0 and point.token == 0 and world == "talk":
            assert a.turns != b.turns  # two continuations are two draws


def test_the_same_words_lead_to_the_same_state():
    """A speaker that always goes on in the same way: from wherever it is re-entered, the play ends as it did."""
    (stored,) = play(Talk(), Talk().tasks(n=3)[2:], [seat(speaker)])
    points = [Point(stored, k, j) for k, t in enumerate(stored.turns) for j in range(len(t.tokens))]
    assert len(points) > 20
    for point, (b,) in zip(points, branch(Talk(), points, [seat(speaker)])):
        assert b.outcome == stored.outcome and b.terminated
        assert [t.forced + t.tokens for t in b.turns] == [t.tokens for t in stored.turns], point
        for mine, theirs in zip(b.turns, stored.turns):
            assert (mine.text, mine.action, mine.reward) == (theirs.text, theirs.action, theirs.reward)
            assert (mine.prompt, mine.continues) == (theirs.prompt, theirs.continues)


def test_a_greedy_model_goes_on_as_it_did(tiny):
    """At temperature 0 the rest of a turn is the same from wherever it is re-entered, and so is all that follows."""
    greedy = Seat("policy", tiny, SamplingLaw(temperature=0), max_tokens=6)
    source = Solved("tree", depth=4, inner=True)
    (stored,) = play(source, source.tasks(n=1), [greedy])
    for (b,) in branch(source, [Point(stored, k) for k in range(len(stored.turns))], [greedy]):
        assert [dataclasses.replace(t, logp=(), logq=()) for t in b.turns] == [
            dataclasses.replace(t, logp=(), logq=()) for t in stored.turns
        ]
        assert b.outcome == stored.outcome
    (stored,) = play(Talk(), Talk().tasks(n=1), [greedy])
    first = stored.turns[0].tokens
    for j, (b,) in enumerate(branch(Talk(), [Point(stored, 0, j) for j in range(len(first))], [greedy])):
        assert (b.turns[0].forced + b.turns[0].tokens)[: len(first)] == first and b.turns[0].forced == first[:j]


def test_a_branch_of_a_branch(tiny):
    (stored,) = play(Talk(), Talk().tasks(n=1), [Seat("policy", tiny, max_tokens=6)], seed=3)
    ((b,),) = branch(Talk(), [Point(stored, 1, 2)], [Seat("policy", tiny, max_tokens=6)], seed=4)
    ((c,),) = branch(Talk(), [Point(b, 1, 3)], [Seat("policy", tiny, max_tokens=6)], seed=5)
    assert c.turns[0] == b.turns[0] == stored.turns[0]
    assert c.turns[1].forced == stored.turns[1].tokens[:2] + b.turns[1].tokens[:3]
    assert c.parent == Parent(b.id, 1, 3) and c.id == f"{stored.id}>1.2/0>1.3/0"


class Fixed:
    """An engine that writes these tokens."""

    name, version, tokenizer = "fixed", 0, TOKENIZER

    def __init__(self, tokens):
        self.tokens = tokens

    async def sample(self, request):
        zeros = (0.0,) * len(self.tokens)
        return [Completion(self.tokens, zeros, zeros, TOKENIZER.decode(self.tokens), "length")]


def test_a_branch_inside_a_character():
    """A letter of two bytes, entered between them: the turn says the letter, not two broken halves."""
    source, word = Arith(), encode("né")
    assert len(word) == 3
    (stored,) = play(source, source.tasks(n=1), [Seat("policy", Fixed(word))])
    assert stored.turns[0].text == "né"
    ((b,),) = branch(source, [Point(stored, 0, 2)], [Seat("policy", Fixed(word[2:]))])
    assert b.turns[0].forced + b.turns[0].tokens == word
    assert b.turns[0].text == b.turns[0].action == "né"


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(b, at):
    parent = b.parent.episode
    assert isinstance(b.outcome, Failed)
    assert b.outcome.error == (
        f"TaskError: episode '{parent}' cannot be re-entered: at turn {at} seat 'policy' is now shown something else "
        "than was stored"
    )


def test_a_changed_world_is_refused():
    (stored,) = play(Talk(), Talk().tasks(n=3)[2:], [seat(speaker)])
    for changed in (0, 1):
        ((b,),) = branch(Talk(changed_at=changed), [Point(stored, 2, 1)], [seat(speaker)])
        refused(b, changed)
        assert scored([b]) == ([], {"invalid": 0, "failed": 1})


def test_a_world_changed_at_the_very_turn_is_refused():
    """The turn that is entered must see what it saw: its forced tokens were written in answer to that."""
    (stored,) = play(Talk(), Talk().tasks(n=3)[2:], [seat(speaker)])
    for turn in (0, 2):
        ((b,),) = branch(Talk(changed_at=turn), [Point(stored, turn, 1)], [seat(speaker)])
        refused(b, turn)


def test_a_world_that_now_ends_before_the_point_is_refused():
    """Otherwise a play that never reached the point would count as one of its continuations."""
    (stored,) = play(Talk(), Talk().tasks(n=3)[2:], [seat(speaker)])
    ((b,),) = branch(Talk(ends=1), [Point(stored, 2, 1)], [seat(speaker)])
    assert isinstance(b.outcome, Failed) and "cannot be re-entered" in b.outcome.error


def test_points_that_do_not_exist():
    (stored,) = play(Talk(), Talk().tasks(n=1), [seat(speaker)])
    with pytest.raises(TaskError, match=r"has turns 0 to 1: it cannot be entered at turn 2"):
        branch(Talk(), [Point(stored, 2)], [seat(speaker)])
    with pytest.raises(TaskError, match=r"turn 0 of episode 'talk-0/0' has 7 tokens: it cannot be entered at token 8"):
        branch(Talk(), [Point(stored, 0, 8)], [seat(speaker)])


# --- what it is for -------------------------------------------------------------------------------------------------


def test_monte_carlo_values_of_every_state():
    """400 continuations from each state of a small tree: the mean of what is still earned lies within four standard
    errors of V^pi, solved exactly."""
    source = Solved("tree", depth=3, seed=4, inner=True, early=True)
    p = source.problems[0]
    draw = np.random.default_rng(12)
    pi = draw.dirichlet(np.ones(2), size=len(p.next))
    v, _ = evaluate(p.next, p.reward, pi)

    def policy(prompt, dice):
        letters = prompt.removeprefix("tree 0: ").split("\n")[0]
        return "a" if dice.random() < pi[p.walk(letters)[0], 0] else "b"

    points = {}
    for e in play(source, source.tasks(n=1), [seat(lambda _, dice: dice.choice("ab"))], n=60):
        for k in range(len(e.turns)):
            points.setdefault(p.walk("".join(t.action for t in e.turns[:k]))[0], Point(e, k))
    assert sorted(points) == list(range(len(p.next)))
    found = branch(source, list(points.values()), [seat(policy)], n=400, seed=1)
    for (state, point), made in zip(points.items(), found):
        earned = np.array([sum(t.reward for t in b.turns[point.turn :]) for b in made])
        error = earned.std(ddof=1) / math.sqrt(400)
        assert abs(earned.mean() - v[state]) <= 4 * error + 1e-12, state
        assert error > 0 or p.reward[state, 0] == p.reward[state, 1]  # a state in which both letters pay the same
        before = sum(t.reward for t in point.episode.turns[: point.turn])
        assert [b.outcome.reward for b in made] == pytest.approx((earned + before).tolist(), abs=1e-12)
