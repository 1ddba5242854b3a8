"""Playing and re-entering: what an engine is sent, what an episode keeps, and what a crash may never do."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from trailmark.credit import group_relative
from trailmark.engines.base import Completion
from trailmark.engines.local import LocalEngine
from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import TaskError
from trailmark.models.attention import Layout
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.best_of import best_of
from trailmark.rollout.branch import Point, branch
from trailmark.rollout.play import Seat, label_ids, play, solo, start_all, stop_ids
from trailmark.samples import build_samples, scored
from trailmark.tasks.arith import Arith
from trailmark.tasks.base import Observation, Step
from trailmark.tasks.solved import END, Solved, evaluate
from trailmark.tasks.taxi import Taxi, decode, draw, optimal_action, optimal_length
from trailmark.types import Episode, Failed, Invalid, Parent, Player, SamplingLaw, Scored, Task, Turn

TOKENIZER = tiny_tokenizer()


def encode(text):
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


class Recorder:
    """An engine that remembers what it was asked and answered."""

    def __init__(self, inner):
        self.inner, self.asked = inner, []
        self.tokenizer, self.name, self.version = inner.tokenizer, inner.name, inner.version

    async def sample(self, request):
        done = await self.inner.sample(request)
        self.asked.append((request, done))
        return done

    def of(self, episode, turn):
        """The one request of a turn, found by its key."""
        (found,) = [r for r, _ in self.asked if r.key == f"{episode.id}\0{turn}"]
        return found


class Talk:
    """A world of free text: it answers with what it heard and how often, pays a number made of the letters, and ends
    after `lines` turns. `changed_at` is the turn whose observation reads differently; `ends` cuts it short."""

    name, markov = "talk", False

    def __init__(self, changed_at=None, ends=None, breaks=()):
        self.changed_at, self.ends, self.breaks = changed_at, ends, breaks

    def tasks(self, split="train", n=3, seed=0):
        return [Task(f"talk-{i}", seed, {"lines": 2 + i, "word": "word" * (1 + i)}) for i in range(n)]

    def make(self):
        return TalkWorld(self)


class TalkWorld:
    def __init__(self, source):
        self.source = source

    def reset(self, task):
        self.task, self.heard = task, []
        if (task.id, "reset") in self.source.breaks:
            raise RuntimeError("the world does not open")
        return self.see()

    def see(self):
        mark = "!" if self.source.changed_at == len(self.heard) else "."
        return Observation(
            f"{self.task.data['word']} {len(self.heard)}: {self.heard[-1] if self.heard else 'begin'}{mark}"
        )

    def step(self, action):
        self.heard.append(action)
        if (self.task.id, len(self.heard)) in self.source.breaks:
            raise KeyError("no such room")
        reward = (sum(map(ord, action)) % 7) / 7
        over = len(self.heard) >= (self.source.ends or self.task.data["lines"])
        total = sum((sum(map(ord, h)) % 7) / 7 for h in self.heard)
        return Step(self.see(), reward, over, False, Scored(total) if over else None)


def speaker(prompt, draw):
    """Says "line k", k the number of its turns, going on from what is already in its mouth."""
    said = prompt.split("<|im_start|>assistant\n")
    return f"line {len(said) - 1}".removeprefix(said[-1])


def seat(policy, **options):
    engine = policy if hasattr(policy, "sample") else ScriptedEngine(policy, TOKENIZER)
    return Seat("policy", engine, **options)


@pytest.fixture
def tiny(make_lm):
    return LocalEngine(make_lm("gpt2", dtype=torch.float64, width=32, layers=2, context=512), slots=8, fixed=False)


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
        assert turn.tokens == encode(turn.text) + (TOKENIZER.eos_token_id,) and turn.stop == "stop"
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
                assert turn.stop == ("stop" if ended else "length") and (ended or len(turn.tokens) == 12)
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
    assert episodes[1].turns == () and scored(episodes)[1] == {"invalid": 0, "failed": 1}


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


# --- branching ------------------------------------------------------------------------------------------------------


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


# --- best of n ------------------------------------------------------------------------------------------------------


def test_best_of():
    def e(name, group, outcome, length=1):
        return Episode(name, Task("t"), group, (Turn("policy", (1,), (2,)),) * length, {"self": outcome})

    episodes = [
        e("a0", "a", Scored(0.2)), e("b0", "b", Failed("x")), e("a1", "a", Failed("x")), e("c0", "c", Scored(-1.0), 3),
        e("a2", "a", Scored(0.9)), e("a3", "a", Scored(0.9), 5), e("c1", "c", Invalid("x")), e("b1", "b", Invalid("x")),
    ]  # fmt: skip
    assert [x.id for x in best_of(episodes)] == ["a2", "c0"]  # the first of equals; b has none
    assert [x.id for x in best_of(episodes, score=lambda x: len(x.turns))] == ["a3", "c0"]
    assert best_of([]) == []


def test_best_of_n_plays():
    """With four draws from a uniform player the best of each group has the largest of the group's returns."""
    source = Solved("bandit", problems=3, actions=5)
    episodes = play(source, source.tasks(), [seat(lambda _, dice: dice.choice("abcde"))], n=4)
    for e in best_of(episodes):
        assert e.outcome.reward == max(x.outcome.reward for x in episodes if x.group == e.group)
    assert [e.group for e in best_of(episodes)] == [s.group for s in start_all(source.tasks())]


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
