"""Seats of every kind at one desk: a chat server in a conversation, turns that begin with given words, worlds of
several actors, and rewards that belong to sides."""

import asyncio
import dataclasses

import numpy as np
import pytest
from rollout_talk import TOKENIZER, Talk, encode, seat, speaker

from trailmark.commands.serve import serving
from trailmark.credit.turns import outcome_of, side_of, turn_returns, turn_rewards
from trailmark.engines.base import Completion, EngineError
from trailmark.engines.http import HttpEngine
from trailmark.engines.local import LocalEngine
from trailmark.engines.scripted import ScriptedEngine
from trailmark.rollout.branch import Point, branch
from trailmark.rollout.play import Seat, play
from trailmark.runs.episode_json import from_json, to_json
from trailmark.serve.body import ChatBody, read
from trailmark.serve.errors import ApiError
from trailmark.tasks.base import Observation, Step
from trailmark.tasks.check import check_task
from trailmark.types import Episode, Failed, Player, SamplingLaw, Scored, Task, Turn


class Told:
    """A server that knows messages only: it keeps what it is sent and answers with a count."""

    name, version, tokenizer = "told", 0, None

    def __init__(self):
        self.heard = []

    async def chat(self, messages, law, max_tokens, stops, seed, key, **more):
        self.heard.append([dict(m) for m in messages])
        return [Completion((), (), (), f"line {len(messages)}", "stopped")]


def test_a_chat_server_is_sent_the_conversation_as_it_grows():
    engine = Told()
    (e,) = play(Talk(), Talk().tasks(n=1), [Seat("policy", engine, kind="remote")])
    user, assistant = ({"role": r} for r in ("user", "assistant"))
    first = {**user, "content": "word 0: begin."}
    assert engine.heard == [
        [first],
        [first, {**assistant, "content": "line 1"}, {**user, "content": "word 1: line 1."}],
    ]
    assert [(t.text, t.action, t.tokens, t.prompt, t.logp) for t in e.turns] == [
        ("line 1", "line 1", (), (), ()), ("line 3", "line 3", (), (), ()),
    ]  # fmt: skip
    assert isinstance(e.outcome, Scored) and from_json(to_json(e)) == e
    ((again,),) = branch(Talk(), [Point(e, 1)], [Seat("policy", engine)])
    assert again.turns == e.turns and engine.heard[2] == engine.heard[1]  # what was said before is sent again


class Spelled(Told):
    """A server whose tokenizer is known here. It says the same in every turn."""

    tokenizer = TOKENIZER

    async def chat(self, messages, law, max_tokens, stops, seed, key, prefix="", **more):
        self.heard.append((law.min_tokens, max_tokens, prefix))
        tokens = encode("the same line".removeprefix(prefix))
        return [Completion(tokens, (), (), TOKENIZER.decode(tokens), "stopped")]


def test_a_chat_server_that_goes_on_inside_a_turn_has_what_is_left_of_its_limits():
    engine = Spelled()
    seat = Seat("policy", engine, SamplingLaw(min_tokens=5), max_tokens=20, speaks="chat")
    (e,) = play(Talk(), Talk().tasks(n=1), [seat])
    ((again,),) = branch(Talk(), [Point(e, 0, 3)], [seat])
    begun = TOKENIZER.decode(e.turns[0].tokens[:3])
    assert engine.heard[0] == (5, 20, "") and engine.heard[2] == (2, 17, begun)
    assert again.turns[0].text == "the same line" and again.turns[0].forced == e.turns[0].tokens[:3]


def test_labels_need_a_tokenizer():
    class Menu(Talk):
        markov = True

        def make(self):
            world = super().make()
            world.see = lambda: Observation("which?", "", ("a", "b"))
            return world

    (e,) = play(Menu(), Menu().tasks(n=1), [Seat("policy", Told())])
    assert (
        "seat 'policy' is a chat server whose tokenizer is not known here: its answer cannot be held to labels"
        in e.outcome.error
    )


@pytest.fixture(scope="module")
def lm():
    from trailmark.models.lm import LM
    from trailmark.models.tiny import build, tiny_config

    return LM(build(tiny_config("llama", vocab=len(TOKENIZER), kv_heads=2, context=512), 0), TOKENIZER, "tiny")


@pytest.fixture(scope="module")
def url(lm):
    with serving(LocalEngine(lm, 4, 256), "tiny") as url:
        yield url


LETTERS = tuple(i for c in "abcdefgh " for i in encode(c))  # a text of these is encoded again as it was written
LAW = SamplingLaw(0.9, allowed=(*LETTERS, TOKENIZER.eos_token_id))


@pytest.mark.parametrize("prefix", ["", "Thought 1:"])
def test_a_model_behind_our_server_plays_as_it_does_here(lm, url, prefix):
    """The conversation goes as messages to the server and as tokens to the model here: the same draws, texts and
    log-probs."""

    async def protocol(desk):
        while not desk.over:
            said = {"role": "user", "content": desk.observation.text}
            await desk.act((await desk.ask("policy", messages=[said], prefix=prefix)).text)

    tasks = Talk().tasks(n=2)
    here = play(Talk(), tasks, [Seat("policy", LocalEngine(lm, 4, 256), LAW, 8)], protocol, n=2, seed=3)
    for tokenizer in (None, TOKENIZER):
        engine = HttpEngine(url, "tiny", tokenizer)
        there = play(
            Talk(), tasks, [Seat("policy", engine, LAW, 8, kind="remote", speaks="chat")], protocol, n=2, seed=3
        )
        for a, b in zip(here, there):
            said = lambda e: [(t.text, t.tokens, t.logp, t.logq, t.action, t.reward, t.stop) for t in e.turns]
            assert said(a) == said(b) and isinstance(a.outcome, Scored) and a.outcome == b.outcome
            assert all(t.text.startswith(prefix) and t.forced == encode(prefix) for t in a.turns)
            assert [t.forced for t in b.turns] == [encode(prefix) if tokenizer else ()] * len(b.turns)


def test_a_prefix_is_forced_and_never_trained_on(lm):
    """Its tokens stand between prompt and answer, and the text is decoded as one: a letter may be cut in two by the
    border."""
    engine = ScriptedEngine(lambda prompt, draw: "ends" if prompt.endswith("begins and ") else "wrong", TOKENIZER)

    async def protocol(desk):
        await desk.act((await desk.ask("policy", text="question\n", prefix="begins and ")).text)
        await desk.act((await desk.ask("policy", text="question\n")).text)

    (e,) = play(Talk(), Talk().tasks(n=1), [Seat("policy", engine)], protocol)
    first, second = e.turns
    assert first.forced == encode("begins and ") and first.tokens == (*encode("ends"), TOKENIZER.eos_token_id)
    assert first.text == first.action == "begins and ends" and (second.forced, second.text) == ((), "wrong")
    ((again,),) = branch(
        Talk(), [Point(e, 0, 2)], [Seat("policy", ScriptedEngine(lambda *_: "!", TOKENIZER))], protocol
    )
    assert again.turns[0].forced == encode("begins and en") and again.turns[0].text == "begins and en!"
    ((whole,),) = branch(Talk(), [Point(e, 0)], [Seat("policy", engine)], protocol)
    assert whole.turns[0].forced == encode("begins and ") and whole.turns[0].text == "begins and ends"


def test_a_server_that_cannot_go_on_behind_a_prefix_says_so(url):
    engine = HttpEngine(f"{url}/v1/chat/completions", "tiny")  # an endpoint that tells nothing of itself
    with pytest.raises(EngineError, match="cannot continue a given beginning .'Thought 1:'.*vLLM"):
        asyncio.run(engine.chat([{"role": "user", "content": "hi"}], prefix="Thought 1:"))


def test_a_server_of_another_model_is_refused(url):
    with pytest.raises(EngineError, match="serves 'tiny', but no model 'large'"):
        asyncio.run(HttpEngine(url, "large").must_serve())
    asyncio.run(HttpEngine(url, "tiny").must_serve())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"continue_final_message": True}, "needs a last message of the assistant"),
        ({"add_generation_prompt": False}, "must be the opposite"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "must be the opposite"),
    ],
)
def test_what_our_server_refuses_to_go_on_with(more, said):
    import json

    body = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], **more}
    with pytest.raises(ApiError, match=said):
        read(ChatBody, json.dumps(body).encode())


# --- several actors, several sides ----------------------------------------------------------------------------------


class Haggle:
    """Two sides speak in turn. Naming a price pays the buyer 10 minus it and the seller the price, at once."""

    name, markov = "haggle", False

    def __init__(self, one_outcome=False):
        self.one_outcome = one_outcome

    def tasks(self, split="train", n=1, seed=0):
        return [Task(f"h{k}", seed, {"rounds": 4}) for k in range(n or 1)]

    def make(self):
        return HaggleWorld(self.one_outcome)


class HaggleWorld:
    def __init__(self, one_outcome):
        self.one_outcome = one_outcome

    def reset(self, task):
        self.left, self.total = task.data["rounds"], {"buyer": 0.0, "seller": 0.0}
        return Observation("begin", seat="anna")

    def step(self, action):
        if self.left <= 0:
            from trailmark.errors import TaskError

            raise TaskError("it is over")
        self.left -= 1
        price = int(action) if action.isdecimal() else 0
        paid = {"buyer": 10.0 - price, "seller": float(price)}
        self.total = {side: self.total[side] + r for side, r in paid.items()}
        over = self.left == 0
        outcome = {side: Scored(r) for side, r in self.total.items()}
        who = "anna" if self.left % 2 == 0 else "bert"
        return Step(Observation(f"heard {action}", seat=who), paid, over, False,
                    (Scored(1.0) if self.one_outcome else outcome) if over else None)  # fmt: skip


def table(a=lambda *_: "3", b=lambda *_: "4"):
    return [
        Seat("anna", ScriptedEngine(a, TOKENIZER), side="buyer", kind="scripted"),
        Seat("bert", ScriptedEngine(b, TOKENIZER), side="seller", kind="scripted"),
    ]


def test_a_world_says_whose_turn_it_is_and_pays_both_sides():
    (e,) = play(Haggle(), Haggle().tasks(), table())
    assert [(t.seat, t.action, t.reward, t.rewards) for t in e.turns] == [
        ("anna", "3", 7.0, {"seller": 3.0}), ("bert", "4", 4.0, {"buyer": 6.0}),
        ("anna", "3", 7.0, {"seller": 3.0}), ("bert", "4", 4.0, {"buyer": 6.0}),
    ]  # fmt: skip
    assert e.outcomes == {"buyer": Scored(26.0), "seller": Scored(14.0)} and from_json(to_json(e)) == e
    assert (side_of(e, "anna"), outcome_of(e, "anna"), outcome_of(e, "bert")) == ("buyer", Scored(26.0), Scored(14.0))
    assert [t.continues for t in e.turns] == [None, None, 0, 1]  # each seat has a conversation of its own
    # Anna is paid for her own word and for the answer to it. The 3 that Bert gets for her first word came before his.
    assert turn_rewards(e, "anna").tolist() == [13.0, 13.0] and turn_rewards(e, "bert").tolist() == [4.0 + 3.0, 4.0]
    assert turn_returns(e, "anna", 0.5).tolist() == [13 + 6.5, 13.0] and turn_returns(e, "bert", 0.5).tolist() == [
        9.0,
        4.0,
    ]
    assert check_task(Haggle()).ok
    ((again,),) = branch(Haggle(), [Point(e, 2)], table())
    assert again.turns == e.turns
    (one,) = play(Haggle(one_outcome=True), Haggle().tasks(), table())
    assert one.outcomes == {"buyer": Scored(1.0), "seller": Scored(1.0)}
    (alone,) = play(Haggle(), Haggle().tasks(), table()[:1])
    assert alone.outcomes == {"buyer": Failed("TaskError: there is no seat 'bert' (seats: anna)")}


def test_an_adviser_earns_what_its_words_led_to():
    """Adviser, actor, adviser, adviser, actor, adviser: rewards 1 and 2, discount 1/2 for each action."""
    turn = lambda seat, reward=None: Turn(
        seat, (1,), (2, 3), action=None if reward is None else "x", reward=reward or 0.0
    )
    turns = (turn("adviser"), turn("actor", 1.0), turn("adviser"), turn("adviser"), turn("actor", 2.0), turn("adviser"))
    e = Episode("e", Task("t"), "t", turns, {"self": Scored(3.0)}, True)
    assert turn_rewards(e, "adviser").tolist() == [1.0, 2.0, 2.0, 0.0] and turn_rewards(e, "actor").tolist() == [
        1.0,
        2.0,
    ]
    assert turn_returns(e, "adviser", 0.5).tolist() == [2.0, 2.0, 2.0, 0.0] and turn_returns(
        e, "actor", 0.5
    ).tolist() == [2.0, 2.0]
    other = dataclasses.replace(e, players={"adviser": Player("frozen", side="coach")})
    assert turn_rewards(other, "adviser").tolist() == [0.0] * 4  # of another side, which nobody paid


def test_where_every_turn_acts_the_credit_is_the_discounted_return_to_the_last_bit():
    rng = np.random.default_rng(0)
    for _ in range(50):
        rewards = rng.normal(size=rng.integers(1, 9)).tolist()
        action = rng.choice(["a", None])  # a file may name no actions at all
        turns = tuple(Turn("policy", (1,), (2,), action=action, reward=r) for r in rewards)
        e = Episode("e", Task("t"), "t", turns, {"self": Scored(0.0)})
        ahead, want = 0.0, []
        for r in reversed(rewards):
            ahead = r + 0.97 * ahead
            want.insert(0, ahead)
        assert turn_returns(e, "policy", 0.97).tolist() == want


def test_plays_of_one_side_are_written_as_before():
    (e,) = play(Talk(), Talk().tasks(n=1), [seat(speaker)])
    assert '"side"' not in to_json(e) and '"rewards"' not in to_json(e)
