"""The native engine repeats the recorded texts of the original word for word, and the comparison shows differences."""

import dataclasses
import lzma
import os
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.errors import DataError, TaskError
from trailmark.tasks.alfworld.compare_original import Report, choose, compare, from_json, says
from trailmark.tasks.alfworld.errand import errand
from trailmark.tasks.alfworld.games import TYPES, Games
from trailmark.tasks.alfworld.original import OriginalGame, available

HERE = Path(__file__).parent / "recordings"
no_original = pytest.mark.skipif(available(), reason="the original is installed")


@pytest.fixture(scope="module")
def games():
    return Games(HERE)


@pytest.fixture(scope="module")
def walks():
    with lzma.open(HERE / "walks.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [from_json(line) for line in lines]


def test_native_says_what_the_original_said(games, walks):
    differences = [str(d) for w in walks for d in compare(w, games.game(w.game))]
    assert not differences, "\n".join(differences[:3])


def test_the_recording_is_worth_comparing_with(games, walks):
    assert Counter(games.card(w.game).task_type for w in walks if w.name == "walkthrough") == dict.fromkeys(TYPES, 2)
    assert Counter(len(w.commands) for w in walks if w.name.startswith("walk ")) == {30: 36}
    verbs = Counter(c.split()[0] for w in walks for c in w.commands)
    assert verbs.keys() == {
        "go", "take", "move", "open", "close", "examine", "use", "heat", "cool", "clean", "slice", "look", "inventory",
        "help",
        "sing",
    }  # fmt: skip
    ends = {w.says[-1].split("\n")[-1].split(" moves")[0] for w in walks if w.name == "walkthrough"}
    assert ends == {"score 1 won True done True"}


def test_errands_are_still_the_recorded_ones(games, walks):
    recorded = {w.game: w.commands for w in walks if w.name == "errand"}
    assert recorded and all(errand(games.game(id)) == commands for id, commands in recorded.items())


def test_a_difference_is_found_and_shown(games, walks):
    walk = walks[0]
    said = walk.says[2].replace("\n> look\n", "\n> look around\n")
    assert said != walk.says[2]
    wrong = dataclasses.replace(walk, says=(*walk.says[:2], said, *walk.says[3:]))
    (found,) = compare(wrong, games.game(walk.game))
    assert (found.step, found.command) == (2, walk.commands[1])
    lines = str(found).split("\n")
    at = f"{walk.game} walkthrough step 2 after '{walk.commands[1]}'"
    assert lines[:2] == [f"--- original {at}", f"+++ native {at}"]
    assert [x for x in lines[2:] if x[0] in "+-"] == ["-> look around", "+> look"]
    report = Report(1, {"x": 1}, 1, len(walk.says), "alfworld", [found])
    assert not report.ok and str(report).endswith("1 differences") and at in str(report)
    assert not Report().ok  # nothing compared is not equality


def test_walkthroughs_win_and_replays_agree_with_menus(games):
    for id in games.ids("seen"):
        game = games.game(id)
        fast, slow = game.start(), Games(HERE).game(id).start()
        for command in game.walkthrough:
            assert not fast.won
            assert command in slow.commands()
            assert fast.step(command) == slow.step(command)
        assert fast.won and fast.moves == len(game.walkthrough)
        assert says(fast) == says(slow) and fast.facts == slow.facts


def test_games_are_spread_over_the_types(games):
    chosen = choose(games, 8, 0)
    assert len(set(chosen)) == 8 and {games.card(id).task_type for id in chosen} == set(TYPES)
    assert chosen == choose(games, 8, 0) and len(choose(games, 100, 0)) == 12


def test_a_line_that_is_no_walk():
    for line in ("", "[]", '{"game": "x"}'):
        with pytest.raises(DataError, match="this is not a recorded walk"):
            from_json(line)


@no_original
def test_without_the_original_it_is_said_how_to_get_it(games):
    with pytest.raises(TaskError, match=r"pip install 'trailmark\[alfworld\]'"):
        OriginalGame("", "", "", id="x")
    result = CliRunner().invoke(app, ["worlds", "check", "alfworld", "--games", str(HERE)])
    assert result.exit_code == 2 and "pip install 'trailmark[alfworld]'" in result.output


def test_worlds_that_have_no_original():
    result = CliRunner().invoke(app, ["worlds", "check", "alfword"])
    assert result.exit_code == 2 and "Did you mean 'alfworld'?" in result.output


@pytest.mark.skipif(not available(), reason="needs the original: pip install 'trailmark[alfworld]'")
def test_with_the_original(games):
    result = CliRunner().invoke(
        app, ["worlds", "check", "alfworld", "--games", str(HERE), "--n", "1", "--walks", "1", "--length", "5"]
    )
    assert result.exit_code == 0 and "all equal" in result.output


@pytest.mark.data
def test_all_walkthroughs_win():
    data = os.environ.get("TRAILMARK_DATA")
    if not data:
        pytest.skip("TRAILMARK_DATA is not set")
    games = Games(Path(data) / "alfworld")
    for split, n in (("valid_seen", 140), ("valid_train", 200), ("train", 3553)):
        won = 0
        for id in games.ids(split):
            game = games.game(id)
            play = game.start()
            for command in game.walkthrough:
                play.step(command)
            won += play.won and play.moves == len(game.walkthrough)
        assert won == n
