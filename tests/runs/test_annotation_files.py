"""Files of annotations: which belong to a file of episodes, and one exact sentence for each that does not fit."""

import pytest

from trailmark.runs.annotations import annotation_files, misfits, named_episodes, read_beside, without_credit
from trailmark.runs.episode_json import to_json
from trailmark.runs.store import write_beside
from trailmark.types import Annotation, Episode, Failed, Player, Scored, Task, Turn


def play(name, outcome=None, kind="trained"):
    """Turn 0: two tokens, no steps. Turn 1: three tokens in two steps."""
    turns = (
        Turn("policy", (1,), (5, 6), (-1.0, -1.0), (-1.0, -1.0)),
        Turn("policy", (2,), (7, 8, 9), (-1.0,) * 3, (-1.0,) * 3, continues=0, steps=((0, 2), (2, 3))),
    )
    outcomes = {"self": outcome or Scored(1.0)}
    return Episode(name, Task("t"), "g", turns, outcomes, players={"policy": Player(kind)})


def note(episode="e", name="mark", level="episode", values=(1.0,), turn=None):
    return Annotation(episode, name, level, tuple(values), turn)


@pytest.fixture
def run(tmp_path):
    for folder in ("episodes", "annotations/mark", "annotations/advantage"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "annotations" / "stray.txt").write_text("no folder")
    file = tmp_path / "episodes" / "000001.jsonl"
    file.write_text(to_json(play("e")) + "\n")
    return file


def put(file, name, notes, more=""):
    path = file.parent.parent / "annotations" / name / file.name
    path.write_text("".join(to_json(n) + "\n" for n in notes) + more)
    return path


def test_which_files_annotate(run, tmp_path):
    assert annotation_files(run) == []
    a, b = put(run, "mark", [note()]), put(run, "advantage", [])
    write_beside(run, [note()])
    beside = run.with_suffix(".annotations.jsonl")
    assert annotation_files(run) == [b, a, beside]  # folders by name, then the file next to it
    other = tmp_path / "other" / "x.jsonl"
    other.parent.mkdir()
    write_beside(other, [note(), note(level="token", values=(0.5, -0.0), turn=0)])
    assert annotation_files(other) == [tmp_path / "other" / "x.annotations.jsonl"]
    assert read_beside(other) == [note(), note(level="token", values=(0.5, -0.0), turn=0)]
    write_beside(other, [])  # the old notes are about other episodes
    assert annotation_files(other) == [] and read_beside(other) == []
    write_beside(other, [])


def test_files_with_names_are_apart_from_segments(tmp_path):
    for name in ("000001.jsonl", "test.jsonl", "b.jsonl", ".hidden.jsonl", "b.annotations.jsonl", "c.partial.jsonl",
                 "notes.txt"):  # fmt: skip
        (tmp_path / name).write_text("")
    assert [p.name for p in named_episodes(tmp_path)] == ["b.jsonl", "test.jsonl"]


FITS = [
    note(), note(level="turn", turn=0), note(level="turn", turn=1), note(level="token", values=(1, 2), turn=0),
    note(level="token", values=(1, 2, 3), turn=1), note(level="step", values=(1, 2), turn=1),
]  # fmt: skip


def test_every_level_that_fits(run):
    for one in FITS:
        put(run, "mark", [one])
        assert misfits(run, [play("e")]) == []
    put(run, "mark", [note(level="step", values=(1,), turn=0)])  # a turn without steps is one step
    assert misfits(run, [play("e")]) == []


@pytest.mark.parametrize(
    "odd, says",
    [
        (note(name="other"), "is called 'other' in a folder of 'mark'"),
        (note("f"), "is about episode 'f', which 000001.jsonl does not hold"),
        (note(values=(1, 2)), "has 2 numbers where episode 'e' needs 1"),
        (note(level="turn", turn=2), "is about turn 2 of episode 'e', which has 2"),
        (note(level="turn", turn=-1), "is about turn -1 of episode 'e', which has 2"),
        (note(level="turn", values=(1, 2), turn=1), "has 2 numbers where turn 1 of episode 'e' needs 1"),
        (note(level="token", values=(1, 2), turn=1), "has 2 numbers where the tokens of turn 1 of episode 'e' need 3"),
        (note(level="step", values=(1,), turn=1), "has 1 numbers where the steps of turn 1 of episode 'e' need 2"),
        (note(level="turn", turn=0), "says again what line 1 says"),
    ],
)
def test_one_sentence_for_each_that_does_not_fit(run, odd, says):
    path = put(run, "mark", [note(level="turn", turn=0), odd])
    assert misfits(run, [play("e")]) == [f"{path}:2: {says}."]


def test_damaged_lines_do_not_hide_the_others(run):
    path = put(run, "mark", [note("f")], "{\n" + to_json(note())[:-1])
    found = misfits(run, [play("e")])
    assert len(found) == 3 and found[0].startswith(f"{path}:1: is about episode 'f'")
    assert found[1].startswith(f"{path}:2: ")
    assert found[2] == f"{path}:3: the line is cut off: it does not end with a newline."


def test_scored_episodes_without_an_advantage_are_counted(run):
    episodes = [play("a"), play("b"), play("c", Failed("x")), play("d", kind="frozen"), play("e")]
    assert without_credit(run, episodes) == ""  # no advantages were written at all
    path = put(run, "advantage", [note("a", "advantage"), note("b", "advantage"), note("e", "advantage")])
    assert without_credit(run, episodes) == ""  # a failed one and a frozen player need none
    path = put(run, "advantage", [note("a", "advantage")], "{\n")
    assert without_credit(run, episodes) == f"{path}: 2 of 3 scored episodes have no advantage, such as 'b'"
    assert without_credit(run.parent.parent / "x.jsonl", episodes) == ""
