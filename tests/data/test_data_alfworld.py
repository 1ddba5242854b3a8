"""ALFWorld data: the rule's reflection on a path, without a game. With the real games, every row replays."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.methods.reflect.alfworld_guide import AlfworldGuide, situation
from trailmark.methods.reflect.decisions import read_decisions
from trailmark.methods.reflect.plays import Last
from trailmark.tasks import get_task


@pytest.mark.parametrize("path, found", [
    ((), ("", "")),
    ((("go to fridge 1", "The fridge 1 is closed."), ("open fridge 1", "In it, you see a mug 1.")), ("fridge 1", "")),
    ((("go to shelf 1", "You see a mug 1."), ("take mug 1 from shelf 1", "You pick up the mug 1.")),
    ("shelf 1", "mug 1")),
    ((("take mug 1 from shelf 1", "Nothing happens."), ("go to sofa 1", "Nothing happens.")), ("", "")),
    ((("take pen 2 from desk 1", "You pick up the pen 2."), ("move pen 2 to desk 1", "You move it.")), ("", "")),
    ((("take pen 2 from desk 1", "You pick up the pen 2."), ("put pen 2 in/on desk 1", "You put it.")), ("", "")),
])  # fmt: skip
def test_where_and_with_what(path, found):
    assert situation(path) == found


def test_what_is_said():
    class World:
        path = (("go to shelf 1", "You see a mug 1."),)
        oracle_command = lambda self: "move mug 1 to sofa 1"

    class Source:
        dialect = "put"
        make = lambda self: World()

    guide = AlfworldGuide(Source())
    assert guide.rule(Last("go to shelf 1", False)) == (
        "We are at shelf 1 with nothing in hand. The last step, go to shelf 1, did not help. Next: put mug 1 in/on "
        "sofa 1"
    )
    World.path = ()
    assert guide.rule(None) == "We are in the middle of the room with nothing in hand. Next: put mug 1 in/on sofa 1"


@pytest.mark.parametrize("expert, good", [("seeing", {"go to fridge 1", "go to cabinet 1"}), ("exploring", set())])
def test_what_is_as_good_as_the_best(tmp_path, monkeypatch, expert, good):
    """Of two apples either may be fetched first. The exploring expert does not know where they are."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "tasks" / "alfworld")
    from small_home import write_download

    write_download(tmp_path)
    source = get_task("alfworld", games=str(tmp_path), task_types=["pick_two_obj_and_place"], expert=expert)
    guide = AlfworldGuide(source)
    seen = guide.world.reset(source.tasks("train")[0])
    best = guide.best(seen)
    found = {a for x, a in zip(seen.labels, seen.actions) if guide.good(x, best)}
    assert found == good | {seen.actions[seen.labels.index(best)]}
    assert guide.world.path == ()  # nothing was done


def test_labels_only(tmp_path):
    done = CliRunner().invoke(app, ["data", "alfworld", f"games={tmp_path}", "--out", str(tmp_path / "x")])
    assert done.exit_code == 2 and "error: " in done.stderr and "Traceback" not in done.output


@pytest.mark.data
@pytest.mark.parametrize("expert", ["seeing", "exploring"])
def test_every_row_replays(tmp_path, expert):
    if "TRAILMARK_DATA" not in os.environ:
        pytest.skip("TRAILMARK_DATA names no folder")
    games = Path(os.environ["TRAILMARK_DATA"]) / "alfworld"
    words = [f"games={games}", f"expert={expert}", "horizon=30"]
    done = CliRunner().invoke(
        app, ["data", "alfworld", *words, "--out", str(tmp_path), "--starts", "12", "--perturb", "0.3"]
    )
    assert done.exit_code == 0, done.output
    source = get_task("alfworld", games=str(games), expert=expert, horizon=30)
    starts = {t.id: t for t in source.tasks("train", 12, 0)}
    decisions, world, won = read_decisions(tmp_path), source.make(), 0
    for d in decisions:
        if d.step == 0:
            seen = world.reset(starts[d.task])
        assert (d.state, d.menu, d.labels, d.actions) == (seen.state, seen.menu, seen.labels, seen.actions)
        assert d.oracle == world.oracle() and d.reflection.endswith(f"Next: {d.command('oracle')}")
        step = world.step(d.action)
        seen, won = step.observation, won + (step.over and step.outcome.success)
    assert won >= 8 and 0.15 < sum(d.perturbed for d in decisions) / len(decisions) < 0.45
