import os
import random
from pathlib import Path

import pytest
from small_home import ERRANDS, game_file, names, write_download

from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import TaskError
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.branch import Point, branch
from trailmark.rollout.play import Seat, play
from trailmark.tasks import get_task
from trailmark.tasks.alfworld.source import ASK_AGAIN, parse_action
from trailmark.tasks.check import check_task
from trailmark.types import Invalid, Scored, Task

TOKENIZER = tiny_tokenizer([str(n) for n in range(10, 30)])
PLACE = "train/" + names()["pick_and_place_simple"]
ROOM = """\
You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a countertop 1, a desk 1, a fridge \
1, a microwave 1, a shelf 2, a shelf 1, and a sinkbasin 1.

Your task is to: put a mug in cabinet."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_download(tmp_path_factory.mktemp("games"))


@pytest.fixture
def make(folder):
    return lambda **options: get_task("alfworld", games=str(folder), **options)


def begin(source, id=PLACE, seed=0):
    world = source.make()
    return world, world.reset(source.task(id, seed))


def label(world, command):
    return world.way_to(command)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle_labels": True, "labels": list("abcde"), "step_cost": 0.01},
        {"expert": "exploring", "dialect": "put"},
        {"mode": "text"},
        {"mode": "text", "dialect": "put", "opening": "apart"},
        {"mode": "text", "malformed": "stop", "opening": "none"},
    ],
)
def test_it_keeps_what_a_task_promises(make, options):
    report = check_task(make(**options), episodes=4)
    assert report.ok, report
    assert report.counts["ended"] == 4


# --- labels ------------------------------------------------------------------------------------------------------


def test_a_prompt_is_the_room_the_path_and_the_commands(make):
    world, seen = begin(make())
    assert seen.state == f"{ROOM}\n\nPrevious path:\nnone\n\n"
    assert seen.menu == (
        "Choose one action:\nAction 0: go to cabinet 1\nAction 1: go to countertop 1\nAction 2: go to desk 1\n"
        "Action 3: go to fridge 1\nAction 4: go to microwave 1\nAction 5: go to shelf 1\nAction 6: go to shelf 2\n"
        "Action 7: go to sinkbasin 1\nAction 8: inventory\nAction 9: look\n"
    )
    assert seen.labels == tuple("0123456789") and seen.actions[1] == "go to countertop 1"
    world.step("1")
    step = world.step(label(world, "take mug 1 from countertop 1"))
    assert step.observation.state == (
        f"{ROOM}\n\nPrevious path:\nStep 1: go to countertop 1\n"
        "You arrive at countertop 1. On the countertop 1, you see a mug 1.\n"
        "Step 2: take mug 1 from countertop 1\nYou pick up the mug 1 from the countertop 1.\n\n"
    )


def test_an_unknown_label_leaves_the_prompt_as_it_was_and_costs_a_step(make):
    world, seen = begin(make(horizon=2, shuffle_labels=True))
    step = world.step("no such label")
    assert step.observation == seen and step.reward == 0 and not step.over and not step.info["known"]
    step = world.step("99")
    assert step.truncated and step.outcome == Scored(0.0, False)


def test_winning_pays_one_less_the_cost_of_every_step(make):
    world, _ = begin(make(step_cost=0.125))
    rewards = [world.step(label(world, c)).reward for c in ERRANDS["pick_and_place_simple"][3][:-1]]
    step = world.step(world.oracle())
    assert rewards == [-0.125] * 4 and step.reward == 0.875
    assert step.terminated and not step.truncated and step.outcome == Scored(0.375, True)
    with pytest.raises(TaskError, match="is over"):
        world.step("0")


def test_the_last_step_of_the_horizon_may_still_win(make):
    world, _ = begin(make(horizon=5))
    for _ in range(5):
        step = world.step(world.oracle())
    assert step.terminated and not step.truncated and step.outcome == Scored(1.0, True)


def test_default_horizons_are_those_of_the_methods(make):
    assert (make().horizon, make(mode="text").horizon) == (15, 40)
    assert (make().markov, make(mode="text").markov) == (True, False)


def test_more_commands_than_labels_are_paged_and_turning_costs_a_step(make):
    world, seen = begin(make(labels=list("abcde")))
    assert seen.actions == ("go to cabinet 1", "go to countertop 1", "go to desk 1", "next page")
    assert seen.labels == tuple("abce")
    step = world.step("e")
    assert step.observation.state == seen.state and world.steps == 1
    assert step.observation.actions == (
        "go to fridge 1",
        "go to microwave 1",
        "go to shelf 1",
        "previous page",
        "next page",
    )
    assert world.way_to("go to sinkbasin 1") == ("e", False) and world.way_to("go to desk 1") == ("d", False)
    step = world.step("a")
    assert step.observation.actions[0] == "examine fridge 1" and world.command == "go to fridge 1"


def test_shuffled_labels_list_the_same_commands_in_an_order_of_the_tasks_own(make):
    source, plain = make(shuffle_labels=True), make()
    (_, a), (_, b), (_, c), (_, d) = begin(source), begin(source), begin(source, seed=1), begin(plain)
    assert a == b and a.labels == c.labels == d.labels
    assert a.actions != c.actions != d.actions and sorted(a.actions) == sorted(d.actions)
    world, seen = begin(source)
    at = seen.actions.index("go to desk 1")
    world.step(seen.labels[at])
    assert world.command == "go to desk 1"


def test_labels_are_those_that_the_tokenizer_has(make):
    source = make()
    source.bind(TOKENIZER)
    assert source.labels[:30] == tuple(map(str, range(30))) and source.labels[30] == "a" and len(source.labels) == 82
    source.bind(tiny_tokenizer())
    assert len(source.labels) == 62
    talk = make(mode="text")
    talk.bind(None)
    assert len(talk.labels) == 252


def test_a_policy_plays_by_labels(make):
    source = make()
    source.bind(TOKENIZER)
    world, _ = begin(source)

    def policy(prompt, draw):
        said = world.oracle()
        world.step(said)
        return said

    seat = Seat("policy", ScriptedEngine(policy, TOKENIZER))
    (episode,) = play(source, [source.task(PLACE)], [seat])
    assert episode.outcome == Scored(1.0, True) and len(episode.turns) == 5
    assert all(len(t.tokens) == 1 and t.continues is None for t in episode.turns)


# --- text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, command",
    [
        ("Thought: hm\nAction: go to desk 1", "go to desk 1"),
        ("Action:go to desk 1  \nAction: look", "go to desk 1"),
        ("I say Action: look\nand more", "look"),
        ("go to desk 1", None),
        ("Action:", None),
        ("action: look", None),
    ],
)
def test_the_command_stands_behind_the_first_action(text, command):
    assert parse_action(text) == command


def test_a_conversation_in_the_put_dialect_reads_as_the_published_ones(make):
    source = make(mode="text", dialect="put", opening="none")
    world, seen = begin(source)
    assert seen.text == ROOM and seen.labels == ()
    said = [
        "Action: go to countertop 1",
        "Thought: there it is.\nAction: take mug 1 from countertop 1",
        "Action: go to cabinet 1",
        "Action: open cabinet 1",
        "Action: move mug 1 to cabinet 1",
        "Action: put mug 1 in/on cabinet 1",
    ]
    steps = [world.step(s) for s in said]
    assert [s.observation.text for s in steps] == [
        "Observation: On the countertop 1, you see a mug 1.",
        "Observation: You pick up the mug 1 from the countertop 1.",
        "Observation: The cabinet 1 is closed.",
        "Observation: You open the cabinet 1. The cabinet 1 is open. In it, you see a apple 2.",
        "Observation: Nothing happens.",
        "Observation: You put the mug 1 in/on the cabinet 1.",
    ]
    assert [s.reward for s in steps] == [0, 0, 0, 0, 0, 1] and steps[-1].terminated


def test_older_games_can_be_played_in_either_dialect(tmp_path):
    (tmp_path / "game.tw-pddl").write_text(game_file(dialect="put"))
    for dialect, put in (("put", "put mug 1 in/on cabinet 1"), ("move", "move mug 1 to cabinet 1")):
        source = get_task("alfworld", games=str(tmp_path), mode="text", dialect=dialect, opening="none")
        (task,) = source.tasks("train")
        world = source.make()
        world.reset(task)
        first = world.step("Action: go to countertop 1").observation.text
        assert first.startswith(
            "Observation: On the" if dialect == "put" else "Observation: You arrive at countertop 1. On"
        )
        assert source.tasks("train")[0].data == task.data
        for command in ERRANDS["pick_and_place_simple"][3][1:-1]:
            world.step(f"Action: {command}")
        assert world.oracle() == f"Action: {put}" and world.step(f"Action: {put}").terminated


def test_a_malformed_answer_is_asked_for_again_or_ends_the_play(make):
    world, _ = begin(make(mode="text", horizon=2))
    step = world.step("I am not sure.")
    assert step.observation.text == f"Observation: {ASK_AGAIN}" and "'Action: '" in ASK_AGAIN and not step.over
    assert world.step("Action: look").truncated
    world, _ = begin(make(mode="text", malformed="stop"))
    step = world.step("I am not sure.")
    assert step.terminated and step.reward == 0 and step.outcome == Invalid("no 'Action:' in the answer")


def test_the_instruction_is_joined_or_stands_apart(make):
    joined, apart = make(mode="text"), make(mode="text", opening="apart")
    assert begin(joined)[1].text == f"{joined.instruction}\n\n{ROOM}" and joined.first_messages == []
    assert begin(apart)[1].text == ROOM
    assert apart.first_messages == [
        {"role": "user", "content": apart.instruction},
        {"role": "assistant", "content": "OK"},
    ]
    assert "move (thing) to (place)" in apart.instruction
    assert "put (thing) in/on (place)" in make(mode="text", dialect="put").instruction
    assert make(opening="apart").first_messages == []


def scripted(commands):
    left = iter(commands)
    return Seat("policy", ScriptedEngine(lambda prompt, draw: f"Action: {next(left)}", TOKENIZER), max_tokens=100)


def test_a_conversation_opens_with_instruction_and_ok_and_can_be_re_entered(make):
    source = make(mode="text", opening="apart")
    plan = ERRANDS["pick_and_place_simple"][3]
    (episode,) = play(source, [source.task(PLACE)], [scripted(plan)])
    assert episode.outcome == Scored(1.0, True) and [t.action for t in episode.turns] == [f"Action: {c}" for c in plan]
    start = TOKENIZER.decode(episode.turns[0].prompt)
    assert start == (
        f"<|im_start|>user\n{source.instruction}<|im_end|>\n<|im_start|>assistant\nOK<|im_end|>\n"
        f"<|im_start|>user\n{ROOM}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert all(t.continues == i - 1 for i, t in enumerate(episode.turns) if i)
    ((again,),) = branch(source, [Point(episode, 3)], [scripted(["look", *plan[3:]])])
    assert [t.action for t in again.turns[:3]] == [f"Action: {c}" for c in plan[:3]]
    assert again.outcome == Scored(1.0, True) and len(again.turns) == 6


# --- tasks -------------------------------------------------------------------------------------------------------


def test_tasks_are_all_in_order_or_a_seeded_draw_without_repeats(make):
    source = make()
    everything = source.tasks("seen")
    assert [t.data["game"] for t in everything] == list(source.games.ids("valid_seen"))
    assert everything[0].id == "alfworld/" + everything[0].data["game"]
    assert everything[0].meta == {"task_type": "look_at_obj_in_light"}
    four = source.tasks("train", 4, seed=3)
    assert four == source.tasks("train", 4, seed=3) != source.tasks("train", 4, seed=4)
    assert source.tasks("train", 2, seed=3) == four[:2]
    many = source.tasks("train", 14, seed=3)
    assert len({t.id for t in many}) == 14 and sorted({t.data["game"] for t in many[:6]}) == list(
        source.games.ids("train")
    )
    assert many[6].id.endswith("~2")


def test_filters_leave_the_games_that_were_asked_for(make):
    only = make(only=["pick_and_place_simple-Mug-None-Cabinet"]).tasks("train")
    assert [t.data["game"] for t in only] == [PLACE]
    assert len(make(task_types=["look_at_obj_in_light", "pick_two_obj_and_place"]).tasks("train")) == 2
    one = make(game="valid_seen/look_at").tasks("train")
    assert [t.data["game"] for t in one] == ["valid_seen/" + names()["look_at_obj_in_light"]]
    with pytest.raises(TaskError, match="no game of split 'train' in .* is Tomato"):
        make(only="Tomato").tasks("train")


def test_games_that_cannot_be_played_are_left_out_and_counted(tmp_path):
    for name, text in (("a", game_file()), ("b", game_file(solvable=False)), ("c", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "game.tw-pddl").write_text(text)
    source = get_task("alfworld", games=str(tmp_path))
    assert [t.data["game"] for t in source.tasks("train", 3)] == ["train/a"] * 3
    assert sorted(source.games.skipped) == ["train/b", "train/c"]
    (tmp_path / "a" / "game.tw-pddl").write_text("")
    with pytest.raises(TaskError, match="no game of split 'train' can be played"):
        get_task("alfworld", games=str(tmp_path)).tasks("train", 1)


def test_a_broken_game_says_what_is_wrong_when_it_is_to_be_played(tmp_path):
    (tmp_path / "game.tw-pddl").write_text(game_file(pddl_problem="(define (problem"))
    source = get_task("alfworld", games=str(tmp_path / "game.tw-pddl"))
    with pytest.raises(TaskError, match=r"cannot be played: .*game\.tw-pddl"):
        source.make().reset(source.tasks("train")[0])
    with pytest.raises(TaskError, match="needs data 'game'"):
        source.make().reset(Task("x"))


@pytest.mark.parametrize(
    "options, why",
    [
        ({"mode": "label"}, "no mode 'label'. Did you mean 'labels'"),
        ({"dialect": "x"}, "no dialect 'x'"),
        ({"malformed": "retri"}, "no malformed 'retri'. Did you mean 'retry'"),
        ({"opening": "join"}, "no opening 'join'. Did you mean 'joined'"),
        ({"expert": "see"}, "no expert 'see'. Did you mean 'seeing'"),
        ({"task_types": ["pick_two"]}, "no task type 'pick_two'"),
        ({"only": 3}, "option 'only' must be a list of texts"),
        ({"horizon": 0}, "horizon of at least 1"),
        ({"labels": ["a", "b"]}, "too few"),
        ({"game": "Tomato"}, "has 'Tomato' in its name"),
        ({"mod": "text"}, "has no option 'mod'"),
    ],
)
def test_wrong_options_are_said(make, options, why):
    with pytest.raises(TaskError, match=why):
        make(**options)


# --- experts and snapshots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"expert": "exploring"}, {"labels": list("abcdefgh")}, {"mode": "text"}])
def test_the_oracle_wins_every_game(make, options):
    source = make(horizon=60, **options)
    for task in source.tasks("train"):
        world = source.make()
        world.reset(task)
        while not (step := world.step(world.oracle())).over:
            pass
        assert step.outcome.success, task.id


def test_the_oracle_is_silent_where_nothing_can_be_won(make):
    world, _ = begin(make())
    for command in ("go to desk 1", "take bear 1 from desk 1"):
        world.step(label(world, command))
    assert world.oracle() is None


@pytest.mark.parametrize("options", [{"shuffle_labels": True, "expert": "exploring"}, {"mode": "text", "horizon": 90}])
def test_ten_random_walks_from_one_snapshot_copied_twice_are_identical(make, options):
    source = make(**options)
    world, _ = begin(source)
    for _ in range(3):
        world.step(world.oracle())
    kept, steps = world.copy(), world.steps
    for seed in range(10):
        one, two = kept.copy(), kept.copy()
        assert walk(one, seed) == walk(two, seed)
    assert len({str(walk(kept.copy(), seed)) for seed in range(10)}) == 10
    assert kept.steps == steps and kept.oracle() == world.oracle(), "what a copy does is its own"


def walk(world, seed, length=12):
    draw, seen = random.Random(seed), []
    for _ in range(length):
        if world.over:
            break
        step = world.step(draw.choice(world.shown.labels if world.source.mode == "labels" else world.example_actions()))
        seen.append((step, None if step.over else world.oracle(), sorted(world.play.facts)))
    return seen


def test_a_world_that_was_never_reset_can_be_copied_too(make):
    with pytest.raises(TaskError, match="is over"):
        make().make().copy().step("0")


@pytest.mark.data
def test_on_real_games_the_task_keeps_its_promises():
    games = str(Path(os.environ["TRAILMARK_DATA"]) / "alfworld")
    for options in ({}, {"mode": "text", "dialect": "put"}):
        report = check_task(get_task("alfworld", games=games, **options), episodes=6, split="seen")
        assert report.ok, report
    tomato = get_task("alfworld", games=games, only=["pick_and_place_simple-Tomato-None-Microwave"])
    assert len(tomato.tasks("train")) == len(tomato.games.ids("train", tomato.only)) > 0
