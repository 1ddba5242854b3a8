"""How often an actor does what the words of another seat name, counted from stored tokens."""

import json

from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.evaluate.run import summarise
from trailmark.methods.reflect.copy_rate import copy_rate, named
from trailmark.models.tiny import tiny_tokenizer
from trailmark.runs.episode_json import to_json
from trailmark.tasks import get_task
from trailmark.types import Episode, Scored, Task, Turn

WORDS = tiny_tokenizer()
MENU = "Action 3: go to shelf 1\nAction a: go to shelf 10\nAction 7: look\n"


def turn(seat, prompt, text, action=None):
    ids = lambda s: tuple(WORDS.encode(s, add_special_tokens=False))
    return Turn(seat, ids(prompt), ids(text), text=text, action=action)


def play(name, *decisions):
    """(what the reflector said, what the policy heard, its label)"""
    turns = []
    for said, heard, label in decisions:
        turns.append(turn("reflector", "A room.", said))
        turns.append(turn("policy", f"A room.\n1. look\n # Analyze:\n{heard}{MENU} # Action:\n", label, action="0"))
    return Episode(name, Task(name), name, tuple(turns), {"self": Scored(1.0, True)})


def test_what_words_name():
    listed = ["go to shelf 1", "go to shelf 10", "look"]
    assert named("The last step, look, led on. Next: go to shelf 10", listed) == "go to shelf 10"
    assert named("I was at shelf 1. Next: go to shelf 2", listed) is None  # what it names is not listed
    assert named("go to shelf 1 was empty, so look", listed) == "look"
    assert named("go to shelf 10.", listed) == "go to shelf 10" and named("looking around", listed) is None


def test_the_share_of_decisions_that_are_what_the_words_name():
    one, ten, lost = "Next: go to shelf 1", "Next: go to shelf 10", "Next: open fridge 1"
    copied = play("a", (one, one, "3"), (ten, ten, "a"), (one, one, "7"))
    other = play(
        "b", (lost, lost, "3"), (one, "Next: look", "3")
    )  # a command that is not listed; and words that were replaced
    found = copy_rate([copied, other], WORDS)
    assert (found["decisions"], found["naming"]) == (4, 3) and found["value"] == 2 / 3
    assert copy_rate([play("c", (lost, lost, "3"))], WORDS) | {"n": 0} == {
        "value": None, "low": None, "high": None, "n": 0, "method": "", "decisions": 1, "naming": 0,
    }  # fmt: skip
    alone = Episode("d", Task("d"), "d", (turn("policy", "A room.", "3", "0"),), {"self": Scored(0.0, False)})
    assert copy_rate([alone], WORDS) is None and "followed" not in summarise([alone], tokenizer=WORDS)["metrics"]


def test_eval_prints_it_where_words_reach_an_actor(tmp_path):
    file = tmp_path / "e.jsonl"
    file.write_text(to_json(play("a", ("Next: look", "Next: look", "7"))) + "\n")
    plain = CliRunner().invoke(app, ["eval", "--episodes", str(file)])
    assert "--tokenizer NAME adds how often the advice is followed" in plain.stdout
    done = CliRunner().invoke(app, ["eval", "--episodes", str(file), "--tokenizer", "tiny", "--json"])
    assert json.loads(done.stdout)["rows"][0]["metrics"]["followed"]["value"] == 1.0
    assert CliRunner().invoke(app, ["eval", "tiny", "--task", "taxi", "--tokenizer", "tiny"]).exit_code == 2


def test_the_taxi_without_a_menu_has_a_copy_rate(tmp_path):
    """The documented taxi lists no menu: the task says what its labels mean, also for the stored episodes of a run."""
    source = get_task("taxi", mode="pickup", history="none", menu=False, walls=False)
    seen = source.make().reset(source.tasks("all", 1)[0])

    def pair(words, label):
        heard = f"{seen.text} # Analyze:\n{words} # Action:\n"
        return [turn("reflector", seen.text, words), turn("policy", heard, label, action=label)]

    said = [*pair("taxi at 00, passenger at 04; go east", "2"), *pair("taxi at 00, goal at 04; go pick up", "4"),
            *pair("taxi at 01, goal at 04; go north", "0")]  # fmt: skip
    e = Episode("a", Task("a"), "a", tuple(said), {"self": Scored(1.0, True)})
    run = tmp_path / "run"
    (run / "evaluation").mkdir(parents=True)
    (run / "recipe.yaml").write_text("method: reflect\ntask: {name: taxi, options: {menu: false}}\n")
    file = run / "evaluation" / "reflect-rl.jsonl"
    file.write_text(to_json(e) + "\n")
    for path in (run, file):
        done = CliRunner().invoke(app, ["eval", "--episodes", str(path), "--tokenizer", "tiny", "--json"])
        assert json.loads(done.stdout)["rows"][0]["metrics"]["followed"]["value"] == 2 / 3
    assert copy_rate([e], WORDS)["naming"] == 0
    found = copy_rate([e], WORDS, source.commands)
    assert (found["decisions"], found["naming"], found["value"]) == (3, 3, 2 / 3)
    assert summarise([e], tokenizer=WORDS, commands=source.commands)["metrics"]["followed"] == found
    (run / "recipe.yaml").write_text("method: reflect\ntask: {name: 'somewhere.else:Make'}\n")  # code that is not run
    done = CliRunner().invoke(app, ["eval", "--episodes", str(file), "--tokenizer", "tiny", "--json"])
    assert json.loads(done.stdout)["rows"][0]["metrics"]["followed"]["naming"] == 0
