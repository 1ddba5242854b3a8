import os
import random
from pathlib import Path

import pytest
from small_home import ERRANDS, game_file, names, write_download

from trailmark.errors import TaskError
from trailmark.tasks.alfworld.experts import Exploring, Seeing, Wish, plan, wish_of
from trailmark.tasks.alfworld.exploring import Errand, read_errand
from trailmark.tasks.alfworld.games import Games

IDLE = ("look", "inventory", "examine", "help")


@pytest.fixture
def games(tmp_path):
    return Games(write_download(tmp_path, ["train"]))


def game_of(games, task_type):
    return games.game(f"train/{names()[task_type]}")


def home(tmp_path, task_type, things):
    (tmp_path / "game.tw-pddl").write_text(game_file(task_type, things=things))
    games = Games(tmp_path / "game.tw-pddl")
    return games.game(games.ids("train")[0])


def shortest(play, limit=10):
    """Breadth first over the engine itself: slow, and certain."""
    level, seen = [play], {play.state}
    for length in range(limit + 1):
        if any(p.won for p in level):
            return length
        after = []
        for p in level:
            for command, action in p.actions():
                if command.startswith(IDLE):
                    continue
                q = p.copy()
                q.apply(action)
                if q.state not in seen:
                    seen.add(q.state)
                    after.append(q)
        level = after
    return None


# --- the seeing expert ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task_type", ERRANDS)
def test_the_plan_is_the_one_a_person_would_find(games, task_type):
    game = game_of(games, task_type)
    assert plan(game.start()) == tuple(ERRANDS[task_type][3])
    play = game.start()
    for left in range(len(ERRANDS[task_type][3]), 0, -1):
        assert len(plan(play)) == left and not play.won
        play.step(Seeing().action(play))
    assert play.won and plan(play) == ()


@pytest.mark.parametrize("task_type", [t for t in ERRANDS if t != "pick_two_obj_and_place"])
def test_no_plan_is_shorter_from_the_start_and_from_wherever_a_walk_has_led(tmp_path, task_type):
    few = {"mug 1": "fridge 1", "apple 1": "cabinet 1", "book 1": "shelf 2", "desklamp 1": "desk 1"}
    game = home(tmp_path, task_type, few)
    draw = random.Random(task_type)
    for steps in (0, 3, 6, 12):
        play = game.start()
        for _ in range(steps):
            play.step(draw.choice(play.commands()))
        assert len(plan(play)) == shortest(play), play.observation


def test_two_things_are_brought_to_one_place_the_shortest_way(tmp_path):
    game = home(tmp_path, "pick_two_obj_and_place", {"apple 1": "fridge 1", "apple 2": "cabinet 1"})
    play = game.start()
    assert len(plan(play)) == shortest(play) == 10
    for command in (
        "go to shelf 2",
        "go to fridge 1",
        "open fridge 1",
        "take apple 1 from fridge 1",
        "go to cabinet 1",
    ):
        play.step(command)
    assert len(plan(play)) == shortest(play) == 7


def test_a_thing_in_the_way_is_put_down_where_it_costs_least(games):
    play = game_of(games, "pick_and_place_simple").start()
    for command in ("go to shelf 2", "take book 1 from shelf 2"):
        play.step(command)
    assert plan(play)[0] in ("move book 1 to shelf 1", "move book 1 to shelf 2") and len(plan(play)) == 6
    play.step("go to countertop 1")
    assert plan(play)[:2] == ("move book 1 to countertop 1", "take mug 1 from countertop 1")


def test_where_nothing_can_be_won_any_more_there_is_no_plan(games):
    play = game_of(games, "pick_and_place_simple").start()
    for command in ("go to desk 1", "take bear 1 from desk 1"):
        play.step(command)
    assert plan(play) is None and shortest(play, 3) is None
    with pytest.raises(TaskError, match="cannot be won from here"):
        Seeing().action(play)


def test_a_won_play_needs_nothing(games):
    play = game_of(games, "pick_and_place_simple").start()
    for command in ERRANDS["pick_and_place_simple"][3]:
        play.step(command)
    with pytest.raises(TaskError, match="is won"):
        Seeing().action(play)


def test_older_games_are_planned_in_their_own_words(tmp_path):
    games = Games(write_download(tmp_path, ["train"], "put"))
    for task_type in ERRANDS:
        play = game_of(games, task_type).start()
        for command in plan(play):
            play.step(command)
        assert play.won
    assert command == "put apple 2 in/on shelf 1"


def test_wishes_are_read_off_the_goal(games):
    assert wish_of(game_of(games, "pick_two_obj_and_place")) == Wish("appletype", "shelftype", 2)
    assert wish_of(game_of(games, "pick_heat_then_place_in_recep")) == Wish("mugtype", "countertoptype", 1, "ishot")
    assert wish_of(game_of(games, "look_at_obj_in_light")) == Wish("booktype", lamp="desklamptype")


def test_a_goal_of_another_kind_is_refused(tmp_path):
    text = game_file(walkthrough=["look"]).replace("(receptacleType ?r cabinetType)", "(opened ?r)")
    (tmp_path / "game.tw-pddl").write_text(text)
    games = Games(tmp_path / "game.tw-pddl")
    with pytest.raises(TaskError, match="none of the six types"):
        plan(games.game(games.ids("train")[0]).start())


# --- the exploring expert ---------------------------------------------------------------------------------------


class Curtain:
    """A play of which nothing but the observation can be seen."""

    def __init__(self, play):
        self._play = play

    @property
    def observation(self):
        return self._play.observation

    def __getattr__(self, name):
        raise AssertionError(f"the exploring expert looked at '{name}'")


def explore(play, seed=0, limit=60):
    expert, done = Exploring(seed), []
    while not play.won and len(done) < limit:
        done.append(expert.action(Curtain(play)))
        play.step(done[-1])
    return done


@pytest.mark.parametrize("task_type", ERRANDS)
@pytest.mark.parametrize("seed", range(5))
def test_it_wins_by_what_it_has_read(games, task_type, seed):
    play = game_of(games, task_type).start()
    done = explore(play, seed)
    assert play.won and len(done) < 30
    again = game_of(games, task_type).start()
    assert explore(again, seed) == done, "the same seed, the same way"


def test_it_looks_in_likely_places_first_and_the_seed_decides_among_equals(games):
    game = game_of(games, "pick_clean_then_place_in_recep")
    first = {explore(game.start(), seed)[0] for seed in range(20)}
    assert first == {"go to countertop 1"}  # 19 % for one step; the fridge's 37 % take two
    lamp = game_of(games, "look_at_obj_in_light")
    ways = {tuple(explore(lamp.start(), seed)) for seed in range(20)}
    assert len(ways) > 1


@pytest.mark.parametrize("task_type", ERRANDS)
def test_it_goes_on_from_wherever_other_hands_have_led_it(games, task_type):
    for seed in range(4):
        play, expert, draw = game_of(games, task_type).start(), Exploring(seed), random.Random(seed)
        expert.see(play)
        for _ in range(80):
            own, did = expert.decide(), None
            if draw.random() < 0.4:
                did = draw.choice([c for c in play.commands() if "bear" not in c])
            play.step(did or own)
            if play.won:
                break
            expert.see(play.observation, did or own)
        assert play.won


def test_it_reads_both_dialects(tmp_path):
    games = Games(write_download(tmp_path, ["train"], "put"))
    play, expert = game_of(games, "pick_two_obj_and_place").start(), Exploring()
    for _ in range(40):
        command = expert.action(play).replace("move ", "put ").replace(" to shelf", " in/on shelf")
        play.step(command.replace("go in/on", "go to"))
        if play.won:
            break
    assert play.won


def test_what_others_tried_in_vain_teaches_it_nothing(games):
    play, expert = game_of(games, "pick_clean_then_place_in_recep").start(), Exploring()
    expert.see(play)
    expert.see(play.step("clean apple 1 with fridge 1"), "clean apple 1 with fridge 1")
    assert expert.memory.useless == set()
    expert.see(play.step(expert.decide()))
    own = expert.decide()
    expert.see("Nothing happens.", own)
    assert own == "go to fridge 1" and expert.memory.near("fridge 1"), "one cannot go to where one is"


def test_where_no_place_takes_a_thing_back_it_waits(games):
    play, expert = game_of(games, "pick_and_place_simple").start(), Exploring()
    expert.see(play)
    for command in ("go to desk 1", "take bear 1 from desk 1"):
        expert.see(play.step(command), command)
    done = []
    for _ in range(60):
        done.append(expert.decide())
        expert.see(play.step(done[-1]))
    assert not play.won and done[-3:] == ["look"] * 3
    assert "move bear 1 to fridge 1" in done and done.count("move bear 1 to desk 1") == 1


def test_it_must_see_a_play_from_its_beginning():
    with pytest.raises(TaskError, match="from its first observation on"):
        Exploring().action("On the desk 1, you see nothing.")
    with pytest.raises(TaskError, match="does not understand the task 'wash the dishes'"):
        Exploring().action("Looking quickly around you, you see a sink 1.\n\nYour task is to: wash the dishes.")


@pytest.mark.parametrize(
    "sentence, errand",
    [
        ("put a mug in cabinet", ("place", "mug", "cabinet")),
        ("put some mug on desk", ("place", "mug", "desk")),
        ("put a clean mug in desk", ("clean", "mug", "desk")),
        ("clean some mug and put it in desk", ("clean", "mug", "desk")),
        ("put a hot mug in desk", ("heat", "mug", "desk")),
        ("heat some mug and put it in desk", ("heat", "mug", "desk")),
        ("put a cool mug in desk", ("cool", "mug", "desk")),
        ("cool some mug and put it in desk", ("cool", "mug", "desk")),
        ("put two mug in desk", ("two", "mug", "desk")),
        ("find two mug and put them in desk", ("two", "mug", "desk")),
        ("look at mug under the desklamp", ("light", "mug", "desklamp")),
        ("examine the mug with the floorlamp", ("light", "mug", "floorlamp")),
    ],
)
def test_every_form_of_a_task_is_understood(sentence, errand):
    assert read_errand(f"...\n\nYour task is to: {sentence}.") == Errand(*errand)


@pytest.mark.data
def test_on_real_games_plans_win_and_are_as_short_as_the_stored_ones():
    games = Games(Path(os.environ["TRAILMARK_DATA"]) / "alfworld")
    for id in games.ids("seen"):
        game = games.game(id)
        stored, planned, play = game.start(), plan(game.start()), game.start()
        for command in game.walkthrough:
            stored.step(command)
        for command in planned:
            play.step(command)
        assert stored.won and play.won and len(planned) <= len(game.walkthrough), id


@pytest.mark.data
def test_on_real_games_the_exploring_expert_wins():
    games = Games(Path(os.environ["TRAILMARK_DATA"]) / "alfworld")
    lengths = [len(explore(games.game(id).start(), limit=101)) for id in games.ids("seen")]
    assert sum(n <= 40 for n in lengths) == 140 and sum(n <= 15 for n in lengths) >= 130
