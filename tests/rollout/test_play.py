"""Playing: what an engine is sent, what an episode keeps, and what a crash may never do."""

import math

import numpy as np
import pytest
import torch
from rollout_talk import TOKENIZER, Recorder, Talk, encode, seat, speaker

from trailmark.credit.groups import group_relative
from trailmark.engines.local import LocalEngine
from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import TaskError
from trailmark.models.attention import Layout
from trailmark.rollout.branch import Point, branch
from trailmark.rollout.play import Seat, label_ids, play, solo, stop_ids
from trailmark.samples import build_samples, scored
from trailmark.tasks.arith import Arith
from trailmark.tasks.solved import END, Solved
from trailmark.tasks.taxi import Taxi, decode, draw, optimal_action, optimal_length
from trailmark.types import Failed, Invalid, Parent, Player, SamplingLaw, Scored, Task

# --- solo -----------------------------------------------------------------------------------------------------------


def test_taxi_with_an_oracle():
    """On every start the return is 2 - 0.05 (n - 2) with n the shortest way, and success."""
    source = Taxi(horizon=18, history="none", menu=False)
    maps = {draw(s): s for s in range(500) if decode(s)[2] != decode(s)[3]}
    assert len(maps) == sum(decode(s)[2] != decode(s)[3] for s in range(500))  # a map says which state it is
    episodes = play(source, source.tasks("all")[::7], [seat(lambda prompt, _: optimal_action(maps[prompt]))])
    assert len(episodes) == 43
    for e in episodes:
        n = optimal_length(e.task.data["state"])
        assert len(e.turns) == n and e.terminated and not e.truncated
        assert e.outcome.success and e.outcome.reward == pytest.approx(2 - 0.05 * (n - 2), abs=1e-12)
        assert sum(t.reward for t in e.turns) == pytest.approx(e.outcome.reward, abs=1e-12)
        assert [t.action for t in e.turns] == [t.text for t in e.turns]
        assert all(len(t.tokens) == 1 and len(t.law.allowed) == 6 and t.continues is None for t in e.turns)


def test_taxi_horizon_and_bump():
    source = Taxi(horizon=4, history="none", menu=False)
    tasks = [Task("t", 0, {"state": 328, "mode": "full"})]  # row 3, column 1
    back_and_forth = iter("0101")
    (e,) = play(source, tasks, [seat(lambda *_: next(back_and_forth))])
    assert (e.terminated, e.truncated, e.outcome) == (False, True, Scored(-0.2, False))
    (e,) = play(source, tasks, [seat(lambda *_: "4")])  # nobody to pick up
    assert (e.terminated, e.truncated, e.outcome) == (True, False, Scored(-0.5, False))


def test_solved_with_a_script():
    source = Solved("tree", problems=2, depth=3, inner=True, early=True)
    episodes = play(source, source.tasks(n=6), [seat(lambda _, draw: draw.choice("ab"), kind="scripted")], n=4, seed=5)
    assert [e.id for e in episodes[:5]] == [f"solved-tree-0-0/{k}" for k in range(4)] + ["solved-tree-1-1/0"]
    assert len({e.group for e in episodes}) == 6 and all(e.id.startswith(f"{e.group}/") for e in episodes)
    for e in episodes:
        p = source.problems[e.task.data["problem"]]
        text = "".join(t.action for t in e.turns)
        state, total = p.walk(text)
        assert state == END and e.outcome.reward == pytest.approx(total, abs=1e-12) and e.seed == 5
        assert [t.prompt for t in e.turns] == [
            encode(f"tree {e.task.data['problem']}: {text[:k]}\na b? ") for k in range(len(text))
        ]
        assert e.players == {"policy": Player("scripted", "scripted")}
    assert len({"".join(t.action for t in e.turns) for e in episodes}) > 5
    again = play(
        source, source.tasks(n=6), [seat(lambda _, d: d.choice("ab"), kind="scripted")], n=4, seed=5, at_once=1
    )
    assert again == episodes
    other = play(source, source.tasks(n=6), [seat(lambda _, d: d.choice("ab"), kind="scripted")], n=4, seed=6)
    assert [e.turns for e in other] != [e.turns for e in episodes]


def test_arith_with_gold_answers():
    source = Arith(level=2, invalid_unparsed=True)
    tasks = source.tasks(n=9)
    answers = {
        t.data["question"] + "\n": [t.meta["gold"], "#### 999999", "no idea"][k % 3] for k, t in enumerate(tasks)
    }
    episodes = play(source, tasks, [seat(lambda prompt, _: answers[prompt])])
    for k, e in enumerate(episodes):
        want = [Scored(1.0, True), Scored(0.0, False), Invalid("no line '#### number' to read the answer from")][k % 3]
        assert e.outcome == want
        (turn,) = e.turns
        assert turn.tokens == encode(turn.text) + (TOKENIZER.eos_token_id,) and turn.stop == "stopped"
        assert (
            turn.prompt == encode(e.task.data["question"] + "\n")
            and turn.action == answers[e.task.data["question"] + "\n"]
        )
    kept, dropped = scored(episodes)
    assert len(kept) == 6 and dropped == {"invalid": 3, "failed": 0}


def test_a_script_that_says_more_than_it_may():
    """What a turn says, what the world is told and its tokens are one thing, also where the budget cuts."""
    source = Arith()
    (e,) = play(source, source.tasks(n=1), [seat(lambda *_: "#### 12345", max_tokens=6)])
    (turn,) = e.turns
    assert len(turn.tokens) == 6
    assert TOKENIZER.decode(turn.tokens) == turn.text == turn.action == "#### 1"
    assert turn.stop == "length"


def logits_after(lm, tokens):
    ids = torch.tensor([tokens])
    pos = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        return lm.logits(lm.hidden(ids, Layout(torch.full_like(ids, ids.shape[1]), pos), pos)[0]).numpy()


def log_softmax(z):
    z = z - z.max()
    return z - math.log(np.exp(z).sum())


@pytest.mark.parametrize("task", ["solved", "taxi", "arith"])
def test_a_model_plays_and_its_numbers_are_its_own(tiny, task):
    """Both log-probs of every token, recomputed over the whole sequence: under the model and under the law."""
    law = SamplingLaw(temperature=0.7)
    source = {"solved": Solved("tree", depth=3), "taxi": Taxi(history="none", menu=False), "arith": Arith()}[task]
    tasks = source.tasks(n=3)
    one = Seat("policy", tiny, law, max_tokens=12, kind="trained")
    episodes = play(source, tasks, [one], n=3, seed=2)
    assert len(episodes) == 9 and all(isinstance(e.outcome, Scored) for e in episodes)
    for e in episodes:
        assert e.players["policy"].kind == "trained" and e.players["policy"].model == "tiny-gpt2"
        for i, turn in enumerate(e.turns):
            rows = logits_after(tiny.lm, e.sequence(i))[len(e.context(i)) - 1 : -1]
            assert len(rows) == len(turn.tokens) == len(turn.logp) == len(turn.logq)
            for z, t, logp, logq in zip(rows, turn.tokens, turn.logp, turn.logq):
                assert logp == pytest.approx(log_softmax(z)[t], abs=1e-9)
                kept = np.arange(len(z)) if turn.law.allowed is None else np.array(turn.law.allowed)
                assert logq == pytest.approx(log_softmax(z[kept] / 0.7)[list(kept).index(t)], abs=1e-9)
            if task == "arith":
                ended = turn.tokens[-1] == TOKENIZER.eos_token_id
                assert turn.text == TOKENIZER.decode(turn.tokens[:-1] if ended else turn.tokens)
                assert turn.stop == ("stopped" if ended else "length") and (ended or len(turn.tokens) == 12)
            else:
                assert turn.text in ("ab" if task == "solved" else "012345") and turn.law.temperature == 0.7
    assert play(source, tasks, [one], n=3, seed=2) == episodes
    alone = play(source, tasks[1:2], [one], n=3, seed=2, at_once=1)
    assert [[t.tokens for t in e.turns] for e in alone] == [[t.tokens for t in e.turns] for e in episodes[3:6]]


# --- what fails -----------------------------------------------------------------------------------------------------


def test_a_world_that_raises_takes_nobody_with_it():
    tasks = Talk().tasks(n=4)
    broken = Talk(breaks={("talk-1", 2), ("talk-3", "reset")})
    whole = play(Talk(), tasks, [seat(speaker)], n=2)
    episodes = play(broken, tasks, [seat(speaker)], n=2)
    assert [isinstance(e.outcome, Failed) for e in episodes] == [False, False, True, True, False, False, True, True]
    assert [e for e in episodes if isinstance(e.outcome, Scored)] == [whole[k] for k in (0, 1, 4, 5)]
    assert episodes[2].outcome == Failed("KeyError: 'no such room'")
    assert episodes[6].outcome == Failed("RuntimeError: the world does not open") and episodes[6].turns == ()
    # What was written before the crash is kept, for people; the turn that met it has no action.
    assert [t.action for t in episodes[2].turns] == ["line 1", None]
    assert not episodes[2].terminated and not episodes[2].truncated
    kept, dropped = scored(episodes)
    assert dropped == {"invalid": 0, "failed": 4}
    assert {e.group for e in kept} == {"talk-0", "talk-2"}
    rewards = [e.outcome.reward if isinstance(e.outcome, Scored) else math.nan for e in episodes]
    a = group_relative(rewards, [e.group for e in episodes], scale="none")
    assert np.isnan(a).tolist() == [isinstance(e.outcome, Failed) for e in episodes]
    assert np.mean([e.outcome.reward for e in kept]) == np.mean([whole[k].outcome.reward for k in (0, 1, 4, 5)])


def test_a_prompt_too_long_fails_its_episode_alone(make_lm):
    engine = LocalEngine(make_lm("gpt2", dtype=torch.float64, width=32, context=512), slots=4, max_len=64)
    tasks = [Task(f"q{k}", 0, {"question": "1+" * n + "1=?", "answer": 0}) for k, n in enumerate((2, 40, 5))]
    episodes = play(Arith(), tasks, [Seat("policy", engine, max_tokens=8)])
    assert [type(e.outcome) for e in episodes] == [Scored, Failed, Scored]
    prompt = len(encode("1+" * 40 + "1=?\n"))
    assert episodes[1].outcome.error == (
        f"engine: the prompt has {prompt} tokens and 'tiny-gpt2' holds 64: shorten it or raise engine.max_len"
    )
    assert [t.stop for t in episodes[1].turns] == ["failed"] and scored(episodes)[1] == {"invalid": 0, "failed": 1}


def test_an_engine_that_breaks_fails_what_it_was_writing_and_goes_on(tiny, monkeypatch):
    source = Solved("tree", depth=2)
    before = play(source, source.tasks(n=1), [Seat("policy", tiny)], n=3)

    def broken(hidden):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(tiny.lm, "logits", broken)
        episodes = play(source, source.tasks(n=1), [Seat("policy", tiny)], n=3)
    assert {e.outcome for e in episodes} == {Failed("engine: engine 'tiny-gpt2' failed: RuntimeError: out of memory")}
    assert scored(episodes) == ([], {"invalid": 0, "failed": 3})
    assert play(source, source.tasks(n=1), [Seat("policy", tiny)], n=3) == before


def test_a_protocol_that_stops_early_is_invalid():
    async def once(desk):
        await desk.act((await desk.ask("policy", messages=[{"role": "user", "content": desk.observation.text}])).text)

    (e,) = play(Talk(), Talk().tasks(n=1), [seat(speaker)], once)
    assert e.outcome == Invalid("the protocol ended before the world did") and len(e.turns) == 1


def test_mistakes_are_sentences():
    async def both(desk):
        await desk.ask("policy", text="a", messages=[{"role": "user", "content": "b"}])

    (e,) = play(Talk(), Talk().tasks(n=1), [seat(speaker)], both)
    assert e.outcome == Failed("TaskError: seat 'policy' must be asked with either text or messages")
    with pytest.raises(TaskError, match=r"label '10' is 2 tokens in this tokenizer; labels must be single tokens"):
        label_ids(TOKENIZER, ("1", "10"))
    with pytest.raises(TaskError, match="two labels are the same token"):
        label_ids(TOKENIZER, ("1", "1"))
    assert stop_ids(TOKENIZER, chat=True) == stop_ids(TOKENIZER) == (TOKENIZER.eos_token_id,)


# --- conversations --------------------------------------------------------------------------------------------------


def test_a_scripted_conversation_is_its_template():
    engine = Recorder(ScriptedEngine(speaker, TOKENIZER))
    episodes = play(Talk(), Talk().tasks(), [seat(engine)])
    for e in episodes:
        messages = []
        for i, turn in enumerate(e.turns):
            assert engine.of(e, i).prompt == e.context(i) and turn.continues == (i - 1 if i else None)
            shown = f"{e.task.data['word']} {i}: {'begin' if not i else f'line {i}'}."
            messages += [{"role": "user", "content": shown}]
            asked = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert TOKENIZER.decode(e.context(i)) == asked
            messages += [{"role": "assistant", "content": f"line {i + 1}"}]
        assert TOKENIZER.decode(e.sequence(len(e.turns) - 1)) + "\n" == TOKENIZER.apply_chat_template(
            messages, tokenize=False
        )
        (sample,) = build_samples([e], "policy")
        on = sample.streams["weight"] != 0
        assert TOKENIZER.decode(sample.tokens[on]) == "".join(f"line {k + 1}<|im_end|>" for k in range(len(e.turns)))


@pytest.mark.parametrize("world", ["talk", "solved"])
def test_a_models_conversation_extends_token_by_token(tiny, world):
    """Whatever bytes a random model writes: each request is the one before, what was written, and what is new."""
    engine = Recorder(tiny)
    source = Talk() if world == "talk" else Solved("tree", depth=4)
    protocol = solo("policy", markov=False) if world == "talk" else solo("policy", chat=True)
    episodes = play(source, source.tasks(n=3), [Seat("policy", engine, max_tokens=7)], protocol, n=3, seed=1)
    assert len(engine.asked) == sum(len(e.turns) for e in episodes)
    for e in episodes:
        assert isinstance(e.outcome, Scored) and len(e.turns) >= 2
        for i, turn in enumerate(e.turns):
            asked = engine.of(e, i)
            assert asked.prompt == e.context(i)
            assert turn.continues == (i - 1 if i else None)
            if i:
                assert asked.prompt == engine.of(e, i - 1).prompt + e.turns[i - 1].tokens + turn.prompt
        (sample,) = build_samples([e], "policy")
        assert tuple(sample.tokens.tolist()) == e.sequence(len(e.turns) - 1)
        on = sample.streams["weight"] != 0
        assert sample.tokens[on].tolist() == [t for turn in e.turns for t in turn.tokens]
        assert sample.streams["old"][on].tolist() == [q for turn in e.turns for q in turn.logq]


def test_two_seats_have_two_conversations():
    """A thinker's words reach the actor as text; each seat continues its own turns."""

    async def advised(desk):
        while not desk.over:
            thought = await desk.ask("thinker", messages=[{"role": "user", "content": desk.observation.text}])
            said = f"{desk.observation.text} Advice: {thought.text}"
            await desk.act((await desk.ask("policy", messages=[{"role": "user", "content": said}])).text)

    thinker = Seat("thinker", ScriptedEngine(lambda *_: "think", TOKENIZER, "sage"))
    (e,) = play(Talk(), Talk().tasks(n=1), [seat(speaker), thinker], advised)
    assert [t.seat for t in e.turns] == ["thinker", "policy"] * 2
    assert [t.continues for t in e.turns] == [None, None, 0, 1]
    assert [t.action for t in e.turns] == [None, "line 1", None, "line 2"]
    assert "Advice: think" in TOKENIZER.decode(e.context(3)) and "Advice" not in TOKENIZER.decode(e.context(2))
    assert {n: p.model for n, p in e.players.items()} == {"policy": "scripted", "thinker": "sage"}
    again = branch(Talk(), [Point(e, k) for k in range(4)], [seat(speaker), thinker], advised)
    for k, ((b,),) in enumerate(zip(again)):
        assert b.turns == e.turns and b.outcome == e.outcome and b.parent == Parent(e.id, k)


def test_a_seat_may_be_asked_both_ways():
    """A question on its own between two turns of a conversation is no part of it."""

    async def mixed(desk):
        while not desk.over:
            turn = await desk.ask("policy", messages=[{"role": "user", "content": desk.observation.text}])
            await desk.ask("policy", text="aside")
            await desk.act(turn.text)

    (e,) = play(Talk(), Talk().tasks(n=1), [seat(speaker)], mixed)
    assert isinstance(e.outcome, Scored), e.outcome
    assert [t.continues for t in e.turns] == [None, None, 0, None]
    assert e.turns[1].prompt == e.turns[3].prompt == encode("aside")
    assert e.context(2) == e.sequence(0) + e.turns[2].prompt and "aside" not in TOKENIZER.decode(e.context(2))


def test_slow_worlds_wait_side_by_side():
    """Sixteen worlds that each wait at a barrier for all the others: only threads get through."""
    import threading

    barrier = threading.Barrier(16, timeout=20)

    class Slow(Solved):
        slow = True

        def make(self):
            world = super().make()
            step = world.step

            def waiting(action):
                barrier.wait()
                return step(action)

            world.step = waiting
            return world

    source = Slow(kind="bandit", actions=2)
    episodes = play(source, source.tasks(n=1), [seat(lambda *_: "a")], n=16)
    assert all(isinstance(e.outcome, Scored) for e in episodes)
