"""What the two players are shown and may say: truncation, labels, and one forward pass for a decision."""

import pytest

from trailmark.config import ModelConfig
from trailmark.engines.local import LocalEngine
from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import RecipeError, TaskError
from trailmark.methods.reflect import play as how
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.encode import encode
from trailmark.rollout.play import Seat, play
from trailmark.rollout.reference_players import oracle_player, random_player
from trailmark.tasks import get_task
from trailmark.tasks.base import Observation, Step
from trailmark.types import Scored, Task

TOKENIZER = tiny_tokenizer()
SIZE = lambda text: len(TOKENIZER.encode(text, add_special_tokens=False))
STATE = (
    "Task: find the red key.\nYou stand at the door.\n"
    + "".join(f"step {k}: nothing\n" for k in range(40))
    + "Now: dark\n"
)


@pytest.mark.parametrize("limit", [150, 151, 177, 300, 500, 700])
def test_what_is_too_long_loses_its_middle_and_fits_to_the_token(limit):
    rest = " # Analyze:\nopen it # Action:\n"
    made = how.fit(TOKENIZER, STATE, rest, limit)
    assert SIZE(made + rest) <= limit
    assert made.startswith("Task: find the red key.\n") and made.endswith("Now: dark\n") and made.count("[...]") == 1
    head, tail = made.split(how.CUT)
    assert STATE.startswith(head) and STATE.endswith(tail)
    before = STATE[: len(STATE) - len(tail)].rsplit("\n", 2)[-2] + "\n"
    assert SIZE(head + how.CUT + before + tail + rest) > limit  # one more line would not have fitted


def test_what_fits_is_left_alone_and_what_cannot_fit_is_refused():
    exact = SIZE(STATE + " # Action:\n")
    assert how.fit(TOKENIZER, STATE, " # Action:\n", exact) == STATE
    assert how.fit(TOKENIZER, STATE, " # Action:\n", exact - 1) != STATE
    with pytest.raises(TaskError, match="take 11 tokens, and a prompt may have 12"):
        how.fit(TOKENIZER, STATE, " # Action:\n", 12)
    one_line = how.fit(TOKENIZER, "x" * 300, "!", 100)
    assert SIZE(one_line + "!") == 100 and one_line.startswith("xxx") and one_line.endswith("xxx")


def test_menus_are_relabelled_and_read():
    for menu in (
        "Choose one action:\n0. south\n1. north\n",
        "Action 0: go 1\nAction 1: take 0\n",
        "0: a\n1: b. 1. c\n",
    ):
        assert how.menu_labels(menu) == ("0", "1")
        new = how.relabel(menu, {"0": "17", "1": "b"})
        assert how.menu_labels(new) == ("17", "b") and how.relabel(new, {"17": "0", "b": "1"}) == menu
    assert how.relabel("Action 0: go 1\n", {"0": "1", "1": "0"}) == "Action 1: go 1\n"


def test_new_labels_are_distinct_and_uniform():
    known = tuple("abcdef")
    drawn = [how.new_labels(("0", "1"), "alphabet", known, f"n {k}") for k in range(3000)]
    assert all(len(set(d.values())) == 2 and set(d.values()) <= set(known) for d in drawn)
    counts = [sum(d["0"] == x for d in drawn) for x in known]
    assert sum((c - 500) ** 2 / 500 for c in counts) < 20.5  # chi-square with 5 degrees of freedom, 0.1 %
    both = [how.new_labels(("0", "1"), "permute", (), f"n {k}")["0"] for k in range(1000)]
    assert 430 < both.count("0") < 570
    assert how.new_labels(("0", "1"), "alphabet", known, "x") == how.new_labels(("0", "1"), "alphabet", known, "x")
    with pytest.raises(TaskError, match="3 actions are listed, and there are 2 labels"):
        how.new_labels(("0", "1", "2"), "alphabet", ("a", "b"), "x")


class Menu:
    """Two actions, of which "north" wins; what it is told is kept."""

    name, markov = "menu", True

    def __init__(self):
        self.told = []

    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"t{k}") for k in range(n or 20)]

    def make(self):
        return self

    def reset(self, task):
        return Observation("A fork.\n", "0. south\n1. north\n", ("0", "1"), ("south", "north"))

    def step(self, action):
        self.told.append(action)
        return Step(Observation("end"), 0.0, True, False, Scored(float(action == "1"), action == "1"))


def reader(wanted):
    """A policy that reads the menu and says the label of the action it wants."""

    def say(prompt, draw):
        return next(line.split(".")[0] for line in prompt.splitlines() if line.endswith(wanted))

    return Seat("policy", ScriptedEngine(say, TOKENIZER))


@pytest.mark.parametrize("shuffle", ["none", "permute", "alphabet"])
def test_a_shuffled_label_reaches_the_world_as_its_action(shuffle):
    world = Menu()
    talk = how.Talk(False, shuffle=shuffle, alphabet=tuple("0123456789abc"))
    episodes = play(world, world.tasks(), [reader("north")], how.two_players(talk))
    assert world.told == ["1"] * 20 and all(e.outcome.success for e in episodes)
    said = {e.turns[0].text for e in episodes}
    assert said == {"1"} if shuffle == "none" else len(said) > 1
    for e in episodes:  # only what is listed there may be drawn
        assert len(e.turns[0].law.allowed) == 2


def test_a_label_that_is_not_listed_is_never_taken_for_one():
    world = Menu()
    talk = how.Talk(False, "alphabet", "alphabet", alphabet=tuple("0123456789"))
    seat = Seat("policy", ScriptedEngine(lambda prompt, draw: "1", TOKENIZER))
    play(world, world.tasks(n=60), [seat], how.two_players(talk))
    assert set(world.told) == {"0", "1", "1 (not listed)"} and world.told.count("1 (not listed)") > 30


def test_shuffling_needs_a_menu_of_lines():
    with pytest.raises(RecipeError, match="does not list each label"):
        how.shuffled_menu(how.Talk(shuffle="permute"), "go 0 or 1", ("0", "1"), "x")


@pytest.fixture(scope="module")
def engine():
    model = ModelConfig(name="tiny", shape={"layers": 1, "width": 16, "heads": 2, "context": 256})
    return LocalEngine(load_model(model, [how.ANALYZE, how.ACTION]), 8, 256)


@pytest.mark.parametrize("head", ["listed", "alphabet", "vocabulary"])
def test_what_a_label_is_drawn_from(engine, head):
    """The probabilities of the allowed tokens sum to 1: log q of each draw is the model's own, renormalised over
    them."""
    import math

    world = Menu()
    talk = how.Talk(False, head, alphabet=("0", "1", "2", "3"))
    episodes = play(world, world.tasks(n=40), [Seat("policy", engine)], how.two_players(talk))
    size = {"listed": 2, "alphabet": 4}.get(head)
    for e in episodes:
        (turn,) = e.turns
        assert len(turn.tokens) == 1
        assert turn.law.allowed is None if size is None else len(turn.law.allowed) == size
        if size is None:
            assert turn.logq == turn.logp
    if size is not None:
        own = {t.tokens[0]: t for e in episodes for t in e.turns}
        assert sum(math.exp(t.logq[0]) for t in own.values()) == pytest.approx(
            1, abs=1e-5
        )  # every label was drawn once
        assert {t.text for t in own.values()} == set("0123"[:size])


def test_one_forward_for_a_decision(engine):
    """Label scores come from one pass over the prompt: as many prefills as distinct prompts, and nothing is decoded
    after."""
    source = get_task("taxi", mode="pickup", history="none", walls=False)
    before = engine.counts.prefills
    episodes = play(source, source.tasks("all")[:12], [Seat("policy", engine)], how.two_players(how.Talk(False)))
    prompts = {t.prompt for e in episodes for t in e.turns}
    decisions = sum(len(e.turns) for e in episodes)
    assert len(prompts) <= engine.counts.prefills - before <= decisions
    assert all(len(t.tokens) == 1 for e in episodes for t in e.turns)


def test_random_and_oracle_rows():
    source = get_task("taxi", mode="pickup", history="none")
    best = oracle_player(source, 1, TOKENIZER)
    assert len(best) == 300 and all(e.outcome.success for e in best)
    full = oracle_player(get_task("taxi", mode="full", history="none"), 1, TOKENIZER)
    assert sum(e.outcome.success for e in full) == 242  # 80.7 % within 15 steps
    luck = random_player(source, 1, TOKENIZER)
    assert luck == random_player(source, 1, TOKENIZER) and sum(e.outcome.success for e in luck) < 15
    assert {t.action for e in luck for t in e.turns} == set("012345")
    with pytest.raises(TaskError, match="does not know its best action"):
        oracle_player(Menu(), 1, TOKENIZER)


def test_a_reflection_that_grew_in_the_policy_s_tokens_is_cut_and_the_play_goes_on():
    """32 broken bytes are 96 bytes as U+FFFD: 32 tokens of a reflector, 96 of the policy."""
    tokenizer, talk, menu = tiny_tokenizer(), how.Talk(thought=32), "0. up\n1. down\n"
    for limit in (64, 80, 100, 200):
        prompt = talk.policy_prompt(tokenizer, "You are at the gate.\n" * 3, "\ufffd" * 32, menu, limit)
        assert len(encode(tokenizer, prompt)) < limit and prompt.endswith(menu + how.ACTION) and how.ANALYZE in prompt
    assert "\ufffd" * 32 + menu in prompt  # where there is room, nothing is lost
    with pytest.raises(TaskError, match="raise engine.max_len"):
        talk.policy_prompt(tokenizer, "state", "\ufffd" * 32, menu, 30)
