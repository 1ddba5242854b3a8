"""A person at the table, driven through a pipe."""

import json

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.commands.play import _asker
from trailmark.formats import own_episodes
from trailmark.models.tiny import tiny_tokenizer
from trailmark.tasks import get_task
from trailmark.tasks.base import Observation, Step
from trailmark.terminal_play import STOPPED, PersonPlay, episode_of, play_in_terminal
from trailmark.types import Invalid, Player, Scored, Task


def run(words, typed, **more):
    return CliRunner().invoke(app, ["play", *map(str, words)], input=typed, **more)


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "repo"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "core.py").write_text("x = 1\n")
    (folder / "README.md").write_text("Hello \x1b[31m\n")
    return folder


def test_a_repository_is_explored_and_the_episode_saved(repo, tmp_path):
    out = tmp_path / "e.jsonl"
    done = run(
        ["auto-explore", "--repo", repo, "--query", "x?", "--target", "src/core.py", "--out", out],
        "cd src\n1\nid core.py\n",
    )
    assert done.exit_code == 0, done.output
    assert f"won, return 12; 3 steps saved to {out}" in done.output
    (episode,) = own_episodes.read(out).episodes
    assert [t.action for t in episode.turns] == ["2", "1", "1"] and [t.reward for t in episode.turns] == [-1, -1, 14]
    assert episode.outcome == Scored(12.0, True) and episode.terminated
    assert episode.players == {"policy": Player("person", "person")}
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(episode.turns[0].prompt).startswith("# Task\nx?\n# Current folder\n")
    assert tokenizer.decode(episode.turns[0].tokens) == "2"
    shown = CliRunner().invoke(app, ["inspect", str(out), "--tokenizer", "tiny"])
    assert shown.exit_code == 0 and "success 12" in shown.output and "3 turns" in shown.output


def test_free_exploration_and_terminal_letters(repo, tmp_path):
    done = run(["auto-explore", "--repo", repo, "--out", tmp_path / "e.jsonl"], "cat README.md\n:quit\n")
    assert done.exit_code == 0 and "Hello \ufffd[31m" in done.output and "\x1b" not in done.output


def test_table_words(tmp_path):
    out = tmp_path / "e.jsonl"
    done = run(
        ["taxi", "mode=full", "--split", "all", "--out", out],
        "history\nundo\nhelp\n\nsouth\nundo\nsouth\nnorth\nhistory\nquit\n",
    )
    assert done.exit_code == 0
    assert (
        "nothing yet" in done.output
        and "There is nothing to undo." in done.output
        and "Undone." in done.output
    )
    assert "1. 0 (south): -0.05\n2. 1 (north): -0.05\n" in done.output
    (episode,) = own_episodes.read(out).episodes
    assert [t.action for t in episode.turns] == ["0", "1"]
    assert episode.outcome == Invalid(STOPPED) and not episode.terminated and not episode.truncated


def test_end_of_file_saves(tmp_path):
    done = run(["taxi", "--split", "all", "--out", tmp_path / "e.jsonl"], "south")
    assert done.exit_code == 0 and len(own_episodes.read(tmp_path / "e.jsonl").episodes[0].turns) == 1


def test_bytes_that_are_no_text(tmp_path):
    done = run(["auto-explore", "--repo", tmp_path, "--out", tmp_path / "e.jsonl"], b"")
    assert done.exit_code == 2 and "no file that can be read" in done.output
    (tmp_path / "a.py").write_text("x\n")
    done = run(["auto-explore", "--repo", tmp_path, "--out", tmp_path / "e.jsonl"], b"cat \xff\xfe.py\nid a.py\n")
    assert done.exit_code == 0 and "2 steps saved" in done.output
    assert own_episodes.read(tmp_path / "e.jsonl").episodes[0].turns[0].action == "cat \ufffd\ufffd.py"


def test_an_input_that_is_closed_is_at_its_end(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert _asker()() is None


def test_nothing_played_nothing_saved(tmp_path):
    done = run(["taxi", "--out", tmp_path / "e.jsonl"], "")
    assert done.exit_code == 0 and "nothing is saved" in done.output and not list(tmp_path.iterdir())


def test_control_c_saves(tmp_path, monkeypatch):
    lines = iter(["south"])

    def ask():
        for line in lines:
            return line
        raise KeyboardInterrupt

    monkeypatch.setattr("trailmark.commands.play._asker", lambda: ask)
    done = run(["taxi", "--split", "all", "--out", tmp_path / "e.jsonl"], "")
    assert done.exit_code == 0 and "1 step saved" in done.output
    assert len(own_episodes.read(tmp_path / "e.jsonl").episodes) == 1


def test_a_file_that_came_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def ask():
        (tmp_path / "e.jsonl").write_text("of another play")
        return "south" if not asked.append(1) and len(asked) == 1 else None

    asked = []
    monkeypatch.setattr("trailmark.commands.play._asker", lambda: ask)
    done = run(["taxi", "--split", "all", "--out", "e.jsonl"], "")
    assert done.exit_code == 0 and "1 step saved to play-taxi-1.jsonl" in done.output
    assert (tmp_path / "e.jsonl").read_text() == "of another play"


def test_files_get_free_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run(["taxi"], "south\n").exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["play-taxi-1.jsonl", "play-taxi-2.jsonl"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["taxy"], "no task 'taxy'"),
        (["taxi", "--split", "nix"], "no split 'nix'"),
        (["taxi", "--split", "all", "--start", "301"], "has 300 starts, so there is no number 301"),
        (["taxi", "--game", "x"], "no option 'game'"),
        (["taxi", "--repo", "x"], "no option 'repo'"),
        (["auto-explore", "--repo", "none"], "repository 'none' cannot be opened"),
        (["taxi", "--out", "none/e.jsonl"], "there is no such folder"),
        (["taxi", "--tokenizer", "none-such/model"], "none-such/model"),
    ],
)
def test_mistakes(words, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(words, "south\n")
    assert done.exit_code == 2 and why in done.output and "Traceback" not in done.output


def test_a_file_is_not_overwritten(tmp_path):
    (tmp_path / "e.jsonl").write_text("mine\n")
    done = run(["taxi", "--out", tmp_path / "e.jsonl"], "south\n")
    assert done.exit_code == 2 and "exists" in done.output and (tmp_path / "e.jsonl").read_text() == "mine\n"


class Talk:
    """A conversation: the world answers whatever is said; 'help' is one of its own words."""

    name, markov = "talk", False

    def __init__(self, moods=()):
        self.moods = list(moods)

    def tasks(self, split="train", n=None, seed=0):
        return [Task("t", seed)]

    def make(self):
        return self

    def reset(self, task):
        self.n = 0
        return Observation(
            "Say something." + (self.moods.pop() if self.moods else ""), "", ("help",), ("ask for help",)
        )

    def step(self, action):
        self.n += 1
        return Step(
            Observation(f"You said {action}."), 0.5, self.n == 2, False, Scored(1.0, True) if self.n == 2 else None
        )


def type_lines(person_play, *lines):
    said, typed = [], iter(lines)
    play_in_terminal(person_play, lambda: next(typed, None), said.append)
    return "".join(said)


def test_a_conversation_grows():
    person_play = PersonPlay(Talk(), Task("t"))
    type_lines(person_play, "help", "more")
    tokenizer = tiny_tokenizer()
    episode = episode_of(person_play, tokenizer)
    assert [t.action for t in episode.turns] == ["help", "more"] and episode.turns[1].continues == 0
    said = tokenizer.decode(episode.sequence(1))
    assert (
        said.index("Say something.") < said.index("help") < said.index("You said help.") < said.index("more<|im_end|>")
    )


def test_a_word_of_the_world_goes_to_the_world_and_with_a_colon_to_trailmark():
    person_play = PersonPlay(Talk(), Task("t"))
    assert "Commands" in type_lines(person_play, ":help") and not person_play.played
    type_lines(person_play, "ask for help")
    assert person_play.played[0][0] == "help"


def test_a_world_that_cannot_be_played_again_keeps_its_steps():
    person_play = PersonPlay(Talk(["!", "?"]), Task("t"))
    said = type_lines(person_play, "a", ":undo")
    assert "nothing was undone" in said and len(person_play.played) == 1


def test_what_a_person_played_is_what_a_model_would_have_seen(tmp_path):
    """The saved prompts are those of `solo` for the same actions."""
    from trailmark.engines.scripted import ScriptedEngine
    from trailmark.rollout.play import Seat, play

    source, tokenizer = get_task("taxi"), tiny_tokenizer()
    (task,) = source.tasks("all", 1)
    person_play = PersonPlay(source, task)
    type_lines(person_play, *"010101010101010")
    mine, moves = episode_of(person_play, tokenizer), iter("010101010101010")
    (theirs,) = play(
        source, [task], [Seat("policy", ScriptedEngine(lambda p, d: next(moves), tokenizer), max_tokens=1)]
    )
    assert [(t.prompt, t.tokens, t.action, t.reward) for t in mine.turns] == [
        (t.prompt, t.tokens, t.action, t.reward) for t in theirs.turns
    ]
    assert mine.outcomes == theirs.outcomes and json.dumps(mine.task.id) == json.dumps(theirs.task.id)
