"""Replies of API models are read correctly. An oracle that answers in many styles wins every world without a miss, and
a reply that names no action is counted as a miss."""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from trailmark.engines.scripted import ScriptedEngine
from trailmark.evaluate.read_action import read_reply
from trailmark.evaluate.run import summarise
from trailmark.evaluate.zero_shot import ZeroShot, read_choice
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat, play_starts, start_all
from trailmark.rollout.reference_players import best_label
from trailmark.tasks import get_task
from trailmark.types import Turn

sys.path.append(str(Path(__file__).parents[1] / "tasks" / "alfworld"))
from small_home import write_download

STYLES = {
    "label behind a mark": lambda x, a: f"There are 2 ways and 10 walls. Action: {x}",
    "command behind a mark": lambda x, a: f"I think.\nAction: {a}",
    "bare label": lambda x, a: x,
    "bare command": lambda x, a: a,
    "label with a point": lambda x, a: f"{x}.",
    "label in brackets": lambda x, a: f"({x})",
    "bold": lambda x, a: f"**Action:** **{x}**",
    "a line of the menu": lambda x, a: f"{x}) {a}",
    "a line of the menu behind a mark": lambda x, a: f"Action: {x}. {a}",
    "as ALFWorld lists it": lambda x, a: f"Thought: I go on.\nAction {x}: {a}",
    "capitals, quotes and a full stop": lambda x, a: f'ACTION: "{a}".',
    "backticks": lambda x, a: f"The next command:\n\n`{a}`\n",
    "JSON with the label": lambda x, a: json.dumps({"thought": "I see 3 things: a, b and I.", "action": x}),
    "JSON with the command": lambda x, a: f"```json\n{json.dumps({'thought': 'go', 'action': a}, indent=1)}\n```",
    "XML": lambda x, a: f"<think>Action: 9, or A?</think>\n<action>{a}</action>",
    "a word before the label": lambda x, a: f"Label {x}",
    "a sentence": lambda x, a: f"After some thought, my choice is {x}.",
    "a reason after it": lambda x, a: f"Action: {a} because it is the only way.",
    "changed its mind": lambda x, a: f"Action: fly to the moon\nNo, that cannot be done.\nAction: {a}",
    "first the answer": lambda x, a: f"{x}\n\nBecause I want to see what is there.",
}


@dataclass
class Oracle(ZeroShot):
    """Knows the best action of a world and says it in a style."""

    style: object = None

    async def say(self, desk, messages):
        label = best_label(desk.world)
        text = self.style(label, dict(zip(desk.observation.labels, desk.observation.actions))[label])
        desk.turns.append(Turn("policy", (), (), text=text))
        return text


def play(source, tasks, style, react=False):
    prompted = Oracle(react, style=style)
    seat = Seat("policy", ScriptedEngine(lambda *_: "", tiny_tokenizer(), "oracle"))
    played = play_starts(source, start_all(tasks), [seat], prompted.protocol())
    return prompted.noted(played)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Three worlds; the menus of two of them have pages, and labels that are words or numbers of other things."""
    root = tmp_path_factory.mktemp("repo") / "kettle"
    names = [f"part_{i}.py" for i in range(12)] + [
        "README",
        "README.md",
        "__init__.py",
        "my file.py",
        "src/a.py",
        "src/a.pyi",
    ]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name}\n")
    games = str(write_download(tmp_path_factory.mktemp("games")))
    return {
        "taxi": get_task("taxi", mode="pickup", history="none"),
        "taxi without a menu": get_task("taxi", mode="pickup", history="none", menu=False),
        "alfworld": get_task("alfworld", games=games),
        "alfworld by letters": get_task("alfworld", games=games, labels=list("IaAbcdefgh"), shuffle_labels=True,
        horizon=40),
        "auto-explore": get_task("auto-explore", repo=str(root), target="my file.py"),
        "auto-explore on pages": get_task(
            "auto-explore", repo=str(root), target="src/a.py", labels=list("AIabcd"), horizon=60
        ),
    }  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "name",
    ["taxi", "taxi without a menu", "alfworld", "alfworld by letters", "auto-explore", "auto-explore on pages"],
)
def test_an_oracle_wins_whatever_way_it_answers(worlds, name, style):
    source = worlds[name]
    tasks = source.tasks("all", 4, 0) if "taxi" in name else source.tasks("train")
    row = summarise(play(source, tasks, STYLES[style], react=style == "bold"))
    assert row["metrics"]["success"]["value"] == 1.0 and row["scored"] == len(tasks)
    assert row["guessed"] == 0 and row["decisions"] >= len(tasks)


NONSENSE = [
    "", "I am not sure", "A good idea would be to think.", "I, for one, do not know.", "Action: I am not sure",
    "Action: A good idea",
    "Action: I will look around the room", "Action: fly to the moon", "Action: none of them", "99", "Action: 99",
    "There are 2 walls.",
    "Action: 2 steps forward", "Action: south or north", "Action: 1 or 2", "1, 2", "Actions: A, B",
    "If I go north, I hit a wall.",
    "I would not choose 3.", "The passenger is north of me.", "<think>Action: 1", "south\nnorth",
    "As an AI, I cannot act.", "Action: ",
]  # fmt: skip


@pytest.mark.parametrize("name", ["taxi", "alfworld by letters", "auto-explore on pages"])
def test_nonsense_is_a_miss_every_time(worlds, name):
    source = worlds[name]
    for said in NONSENSE:
        rows = play(source, source.tasks("train", 1, 0), lambda x, a, said=said: said)
        row = summarise(rows)
        assert row["guessed"] == row["decisions"] > 0, (said, [t.action for t in rows[0].turns])
        assert f"{row['guessed']} of {row['decisions']} answers" in row["warning"]


SHELVES = {"A": "go to shelf 1", "B": "go to shelf 10", "C": "go to shelf 11", "I": "look", "1": "next page",
           "2": "cat README",
           "3": "cat README.md", "4": "cd ..", "5": "cat 'my file.py'", "6": "cat a.py", "7": "cat A.py",
           "8": "cd src"}  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "label"),
    [
        ("Action：B", "B"), ("Action: B<|im_end|>", "B"), ("Action: go to shelf 1</s>\n", "A"),
        ("Action: go to shelf 1", "A"), ("Action: go to shelf 10.", "B"), ("go to shelf 11", "C"),
        ("Action: go to shelf 2", None),
        ("Action: go to shelf 100", None), ("I will go to shelf 10.", "B"), ("I could go to shelf 10.", None),
        ("Action: B) go to shelf 1", None), ("Action: b", "B"), ("Action: Go To Shelf 1", "A"), ("I", "I"),
        ("Action: I", "I"),
        ("cat README.", "2"), ("Action: cat README.md.", "3"), ("cat README.mdx", None), ("cd ..", "4"),
        ("Action: cd ...", "4"),
        ("cat my file.py", "5"), ('Action: cat "my file.py"', "5"), ("cat a.py", "6"), ("cat A.py", "7"),
        ("CAT A.PY", None),
        ("cd src/lib", None), ("Action: cd src && cat a.py", None), ("Action: next page", "1"), ("next page", "1"),
        ("$ cd src", "8"),
        ("Action A: go to shelf 1\nAction B: go to shelf 10\nAction C: go to shelf 11\n\nI choose B.", "B"),
        ("A. go to shelf 1\nB. go to shelf 10", None), ("Action: A\nAction: B", "B"),
        ("Answer: A\nAction: B\nAnswer: C", "B"),
        ("\\boxed{B}", "B"), ("Action:\n```bash\ncd src\n```", "8"), ("{action: B}", "B"), ("Action = 3", "3"),
        ("#3", "3"),
        ("**Action**: `B`", "B"), ("Final Action: B - go to shelf 10", "B"), ("Action: 1. go to shelf 1", None),
    ],
)  # fmt: skip
def test_commands_come_whole_and_before_labels(reply, label):
    assert read_reply(reply, tuple(SHELVES), tuple(SHELVES.values())) == label


def test_a_long_reply_is_read_quickly_enough_to_play():
    """Repeated openings of a mark must not make reading quadratic: this took minutes where it was."""
    for piece in ("<action>", "Action: ", '"action": "', "Label ", "I will go to shelf ", "<think>"):
        assert read_reply(piece * 50_000, list(SHELVES), list(SHELVES.values())) is None


def test_what_is_not_understood_is_drawn_evenly():
    drawn = [read_choice("no idea", tuple("012345"), random.Random(k)) for k in range(600)]
    assert all(blind for _, blind in drawn)
    assert all(60 < [x for x, _ in drawn].count(label) < 140 for label in "012345")
