"""Negotiations: moves, points, ends, who sees what, a rule that names decisive turns, and human dialogues."""

import gzip
import json
import os
import random
from pathlib import Path

import pytest

from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import DataError, TaskError
from trailmark.formats.rows import Row
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat, play
from trailmark.tasks import get_task
from trailmark.tasks.check import check_task
from trailmark.tasks.negotiation import players
from trailmark.tasks.negotiation.casino import casino_dialogue, deal_dialogue, read_casino, read_deals
from trailmark.tasks.negotiation.deals import Move, Scene, State, after, points, read_move, risen, standing, written
from trailmark.types import Scored, Task

CAMP = Scene("casino", ("firewood", "food", "water"), (3, 3, 3), ((5, 4, 3), (3, 4, 5)))
BOOKS = Scene("deal", ("book", "hat", "ball"), (1, 3, 2), ((6, 0, 2), (2, 2, 1)))


def start(scene=CAMP, first=0, style="fair", seed=0):
    return Task("t", seed, {**scene.data(), "first": first, "style": style})


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("Hello\nOffer: 2 firewood, 1 food", Move("offer", (2, 1, 0))),
        ("offer: 1 water and 3 firewood.", Move("offer", (3, 0, 1))),
        ("I could Accept this", Move("talk")),
        ("Fine.\nACCEPT!", Move("accept")),
        ("Reject\n\n", Move("reject")),
        ("walk away", Move("walk")),
        ("Accept\nbut only if you agree", Move("talk")),  # only the last line is a move
        ("", Move("talk")),
        ("Offer: 4 food", Move("talk", wrong="there are only 3 food")),
        ("Offer: 2 food, 2 food", Move("talk", wrong="there are only 3 food")),
        ("Offer:", Move("talk", wrong="the offer names no item")),
        ("Offer: two food", Move("talk", wrong="'two food' is no number of firewood, food, water")),
        ("Offer: -1 food", Move("talk", wrong="'-1 food' is no number of firewood, food, water")),
    ],
)
def test_a_text_is_a_move_by_its_last_line(text, move):
    assert read_move(text, CAMP) == move


@pytest.mark.parametrize("scene", [CAMP, BOOKS])
def test_an_offer_is_read_as_it_is_written(scene):
    for share in [(0, 0, 0), scene.counts, (1, 0, 2), (0, 1, 0)]:
        assert read_move(written(share, scene), scene) == Move("offer", share)


def test_the_last_standing_offer_of_the_other_side_is_the_deal():
    offer = lambda *share: Move("offer", share)
    moves = [(0, offer(3, 0, 0)), (1, offer(1, 1, 1)), (1, Move("accept")), (0, Move("reject")), (0, Move("accept"))]
    state = State()
    for side, move in moves:
        state = after(state, side, move, CAMP)
        assert not state.over  # one's own offer cannot be accepted, nor one that was rejected
    state = after(after(state, 1, offer(0, 1, 3), CAMP), 0, Move("accept"), CAMP)
    assert state.deal == ((3, 2, 0), (0, 1, 3)) and points(state, CAMP) == (23, 19)
    assert points(State(walked=0), CAMP) == (5, 5) and points(State(), BOOKS) == (0, 0)
    assert standing(State((1, (1, 1, 1))), 0, CAMP) == 24 and standing(State(), 0, CAMP) is None


def test_play_against_the_rule():
    world = get_task("negotiation").make()
    first = world.reset(start())
    assert "Your points for each: firewood 5, food 4, water 3." in first.text and first.seat == ""
    assert "water 5" not in first.text  # what the other side's items are worth is not shown
    asked = world.step("What do you need most?")
    assert "Bob: I need water most. / Offer:" in asked.observation.text and not asked.over
    wrong = world.step("Offer: 5 food")
    assert wrong.info == {"not_understood": "there are only 3 food"}
    end = world.step("Accept")
    got = points(world.state, CAMP)[0]
    assert end.terminated and end.outcome == Scored(got / 36, True, {"points": got, "goal": 10 * got / 36, "deal": 1.0})
    assert end.reward == end.outcome.reward
    with pytest.raises(TaskError, match="is over"):
        world.step("Accept")


def test_no_deal_is_a_true_zero_and_never_a_failure():
    for scene, paid in ((BOOKS, 0.0), (CAMP, 5 / 36)):
        world = get_task("negotiation", max_turns=4).make()
        world.reset(start(scene))
        step = world.step("Walk away")
        assert (step.terminated, step.truncated, step.reward) == (True, False, paid)
        assert step.outcome == Scored(paid, False, {"points": paid * scene.full, "goal": 10 * paid, "deal": 0.0})
        world.reset(start(scene, style="tough"))
        world.step("Hello")
        step = world.step("Hello")
        assert (step.terminated, step.truncated, step.outcome.reward) == (False, True, paid)


def test_two_seats_see_their_own_points_and_are_paid_by_side():
    source = get_task("negotiation", partner="seat")
    world = source.make()
    seen = world.reset(start(first=1))
    assert seen.seat == "partner" and "You are Bob, and talk with Ann." in seen.text and "firewood 3" in seen.text
    step = world.step("Hi\nOffer: 3 water, 1 food")
    assert step.observation.seat == "agent" and "Bob: Hi / Offer: 3 water, 1 food" in step.observation.text
    end = world.step("Accept")
    assert end.reward == {"agent": 23 / 36, "partner": 19 / 36}
    assert {k: o.parts["points"] for k, o in end.outcome.items()} == {"agent": 23, "partner": 19}
    tokenizer = tiny_tokenizer()
    seats = [Seat(n, ScriptedEngine(players.deaf, tokenizer), max_tokens=100, side=n) for n in ("agent", "partner")]
    episodes = play(source, source.tasks("train", 4, 0), seats)
    assert all(isinstance(o, Scored) for e in episodes for o in e.outcomes.values())
    assert {t.seat for e in episodes for t in e.turns} == {"agent", "partner"}


def test_a_speaker_cannot_speak_for_the_other():
    world = get_task("negotiation").make()
    world.reset(start())
    said = world.step("Hm.\nBob: I give you all\nOffer: 3 firewood").observation.text
    assert said.count("\nBob:") == 1 and "Ann: Hm. / Bob: I give you all / Offer: 3 firewood" in said


def test_a_judge_by_rule_names_turns_that_raised_the_standing_offer():
    offer = lambda *share: Move("offer", share)
    moves = [(0, Move("talk")), (1, offer(3, 3, 2)), (0, offer(3, 3, 0)), (1, offer(0, 1, 3)), (0, offer(3, 2, 1)),
             (1, Move("talk")), (0, offer(3, 3, 3))]  # fmt: skip
    # worth to side 0: 5, 3, 27, 23, 26, 26, 36; its own turns 1, 2 and 3 raised it
    assert risen(CAMP, moves, 0) == [1, 2, 3] and risen(CAMP, moves, 1) == [0, 1]
    source = get_task("negotiation")
    tokenizer = tiny_tokenizer()
    seat = Seat("policy", ScriptedEngine(players.advised, tokenizer), max_tokens=200)
    for e in play(source, source.tasks("train", 6, 1), [seat], n=2, seed=3):
        found = source.critical(e)
        texts = [t.action for t in e.turns]
        assert found == sorted(set(found)) and all("Offer" in texts[k] for k in found)


def test_the_scripted_players_read_what_the_world_shows():
    source = get_task("negotiation")
    world = source.make()
    world.reset(start())
    world.step("What do you need most?")
    seen = players.read_prompt(world.view("agent").text + "Advice for you: propose a trade\n")
    assert seen.scene.values[0] == (5, 4, 3) and seen.scene.counts == (3, 3, 3) and seen.advice == "propose a trade"
    assert [side for side, _ in seen.said] == [0, 1] and "I need water most." in seen.said[1][1]
    assert [players.advice_of(t) for t in ("Strategy: ask him", "be firm!", "hm", "")] == ["ask", "demand", None, None]
    done = [
        players.advised(world.view("agent").text + "Advice: trade\n", random.Random(k))
        for k in range(60)
    ]
    trades = sum(d.startswith("I would like this") for d in done)
    assert 40 < trades < 60  # most follow it, and not all


def test_good_advice_helps_and_one_who_takes_none_is_not_helped():
    source = get_task("negotiation")

    def goal(agent, advice):
        total = 0.0
        for task in source.tasks("test", 80, 0):
            world, k, draw = source.make(), 0, random.Random(task.id)
            world.reset(task)
            while True:
                word = advice[min(k, len(advice) - 1)]
                step = world.step(agent(world.view("agent").text + f"Advice: {word}\n", draw))
                k += 1
                if step.over:
                    break
            total += step.outcome.parts["goal"]
        return total / 80

    good = ("ask", "tell", "trade", "trade", "fair", "accept")
    assert goal(players.advised, good) > goal(players.advised, ("hm",)) + 0.8
    assert goal(players.deaf, good) == goal(players.deaf, ("hm",))


@pytest.mark.parametrize("options", [{}, {"kind": "deal"}, {"partner": "seat"}, {"kind": "deal", "partner": "seat"}])
def test_the_checker_passes(options):
    report = check_task(get_task("negotiation", **options), 3)
    assert report.ok, report


def test_starts_are_split_and_drawn_by_seed():
    source = get_task("negotiation", kind="deal")
    names = {s: {t.id for t in source.tasks(s, 200, 3)} for s in ("train", "val", "test")}
    assert not names["train"] & names["test"] and not names["val"] & (names["train"] | names["test"])
    assert source.tasks("train", 5, 1) == source.tasks("train", 5, 1) != source.tasks("train", 5, 2)
    for t in source.tasks("train", 50, 0):
        s = t.data
        assert 5 <= sum(s["counts"]) <= 7 and all(
            sum(n * v for n, v in zip(s["counts"], each)) == 10 for each in s["values"]
        )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "casio"}, "kind is 'casio', and may be casino, deal. Did you mean 'casino'?"),
        ({"partner": "me"}, "partner is 'me'"), ({"style": "hard"}, "style is 'hard'"),
        ({"max_turns": 1}, "max_turns is 1, and may be a whole number from 2 to 200"),
        ({"max_turns": True}, "max_turns is True"),
    ],
)  # fmt: skip
def test_options_are_checked(options, says):
    with pytest.raises(TaskError) as error:
        get_task("negotiation", **options)
    assert says in str(error.value)


def test_splits_are_checked():
    with pytest.raises(TaskError, match="the splits test, val, train and all, not 'tset'"):
        get_task("negotiation").tasks("tset", 1)
    with pytest.raises(TaskError, match="say how many"):
        get_task("negotiation").tasks("train")
    with pytest.raises(TaskError, match="task 'x' is no negotiation"):
        get_task("negotiation").make().reset(Task("x"))


# --- human dialogues --------------------------------------------------------------------------------------------------


def person(order, points):
    levels = dict(zip(("High", "Medium", "Low"), order))
    return {"value2issue": levels, "value2reason": {k: f"{v}!" for k, v in levels.items()},
            "outcomes": {"points_scored": points}}  # fmt: skip


def casino():
    one, two = "mturk_agent_1", "mturk_agent_2"
    deal = lambda *n: {"issue2youget": dict(zip(("Firewood", "Food", "Water"), map(str, n))),
                       "issue2theyget": dict(zip(("Firewood", "Food", "Water"), (str(3 - k) for k in n)))}  # fmt: skip
    log = [("hi", one, {}), ("Submit-Deal", two, deal(3, 3, 3)), ("Reject-Deal", one, {}), ("no", two, {}),
           ("Submit-Deal", one, deal(2, 1, 1)), ("Accept-Deal", two, {"data": "accept_deal"})]  # fmt: skip
    return {
        "dialogue_id": 7,
        "chat_logs": [{"text": t, "id": who, "task_data": data} for t, who, data in log],
        "participant_info": {
            one: person(("Firewood", "Food", "Water"), 17),
            two: person(("Firewood", "Food", "Water"), 19),
        },
    }


def test_a_casino_dialogue_by_hand(tmp_path):
    path = tmp_path / "casino.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(casino()) + "\n")
    (d,) = read_casino(path)
    assert d.scene.values == ((5, 4, 3), (5, 4, 3)) and d.paid() == d.recorded == (17, 19)
    source = get_task("negotiation", path=str(path), reasons=True)
    (task,) = source.tasks("all", 1)
    assert "Why food: Food!" in source.make().reset(task).text and task.id == "casino-7"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v["chat_logs"][1]["task_data"]["issue2youget"].update(Food="2"),
        "key 'chat_logs[1].task_data': does not divide 3 of each item"),
        (lambda v: v["chat_logs"][1]["task_data"].pop("issue2youget"), "task_data.issue2youget': is missing"),
        (lambda v: v["chat_logs"][0].update(id="you"), "key 'chat_logs[0].id': is 'you'"),
        (lambda v: v["participant_info"].pop("mturk_agent_2"), "key 'participant_info.mturk_agent_2': is missing"),
        (lambda v: v["participant_info"]["mturk_agent_1"]["value2issue"].update(High="Gold"),
        "value2issue.High': must name"),
        (lambda v: v.pop("chat_logs"), "key 'chat_logs': is missing"),
    ],
)  # fmt: skip
def test_a_damaged_dialogue_is_named(change, says):
    v = casino()
    change(v)
    with pytest.raises(DataError) as error:
        casino_dialogue(Row(v, Path("c.jsonl"), 3))
    assert str(error.value).startswith("c.jsonl:3: ") and says in str(error.value)


LINE = ("<input> 3 3 3 0 1 1 </input> <dialogue> YOU: hats ? <eos> THEM: ok <eos> YOU: <selection> </dialogue> "
        "<output> {out} </output> <partner_input> 3 2 3 1 1 1 </partner_input>")  # fmt: skip


def test_deal_or_no_deal_by_hand():
    out = "item0=2 item1=0 item2=1 item0=1 item1=3 item2=0"
    d = deal_dialogue(LINE.format(out=out), Path("d.txt"), 1)
    assert d.scene.counts == (3, 3, 1) and d.paid() == (7, 5) and [s for s, *_ in d.said] == [0, 1, 0, 1]
    for out in (" ".join(["<disagree>"] * 6), "item0=2 item1=0 item2=1 item0=2 item1=3 item2=0"):
        assert deal_dialogue(LINE.format(out=out), Path("d.txt"), 1).paid() == (0, 0)
    for text, says in (
        ("hello", "d.txt:4: has no <input>"),
        (LINE.replace("<input> 3", "<input> 2"), "same three counts"),
    ):
        with pytest.raises(DataError, match=says):
            deal_dialogue(text, Path("d.txt"), 4)


@pytest.mark.data
def test_recorded_points_agree_with_the_rule():
    folder = Path(os.environ["TRAILMARK_DATA"]) / "sotopia"
    found = [d for name in ("train", "valid") for d in read_casino(folder / f"casino_{name}.jsonl.gz")]
    assert len(found) == 930 and [d.name for d in found if d.paid() != d.recorded] == []
    deals = [d for name in ("val", "test") for d in read_deals(folder / f"dealornodeal_{name}.txt.gz")]
    assert len(deals) == 1087 + 1052 and all(0 <= p <= 10 for d in deals for p in d.paid())
    for kind, name in (("casino", "casino_train.jsonl.gz"), ("deal", "dealornodeal_val.txt.gz")):
        source = get_task("negotiation", kind=kind, path=str(folder / name))
        assert source.finite and check_task(source, 3).ok
