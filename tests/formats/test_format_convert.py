import json

import pytest
from format_files import TINY, put, take
from typer.testing import CliRunner

from trailmark import formats
from trailmark.commands.app import app
from trailmark.errors import DataError
from trailmark.runs.store import read_segment
from trailmark.types import Annotation, Episode, Scored, Task, Turn

ITEM = {
    "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo", "score": "0.50"}],
    "score": 1,
}


def convert(*words):
    return CliRunner().invoke(app, ["convert", *map(str, words)])


def test_through_our_own_file_and_back(tmp_path):
    source, own, out = put(tmp_path, [ITEM]), tmp_path / "own.jsonl", tmp_path / "out.json"
    TINY.save_pretrained(tmp_path / "model")
    done = convert(source, own, "--from", "sharegpt", "--to", "episodes", "--tokenizer", tmp_path / "model")
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{own}: 1 episodes\n", "")
    assert read_segment(own)[0].outcome == Scored(1.0)
    assert read_segment(tmp_path / "own.annotations.jsonl", Annotation)[0].values == (0.5,)
    done = convert(own, out, "--from", "episodes", "--to", "sharegpt", "--tokenizer", "tiny")
    assert done.exit_code == 0 and json.dumps(take(out)) == json.dumps([ITEM])
    done = convert(own, tmp_path / "m.jsonl", "--from", "episodes", "--to", "messages", "--tokenizer", "tiny")
    assert done.stderr == "'messages' has no room for: score, reward\n"
    again = convert(own, out, "--from", "episodes", "--to", "agent", "--tokenizer", "tiny")
    assert again.exit_code == 2 and "is already there" in again.stderr and json.dumps(take(out)) == json.dumps([ITEM])
    again = convert(own, out, "--from", "episodes", "--to", "agent", "--tokenizer", "tiny", "--overwrite")
    assert again.exit_code == 0 and take(out)[0]["reward"] == 1


def test_mistakes_are_sentences_and_leave_nothing(tmp_path):
    source, out = put(tmp_path, [ITEM, {"conversation": []}]), tmp_path / "out.jsonl"
    words = (source, out, "--from", "sharegpt", "--to", "messages", "--tokenizer", "tiny")
    for at, word, says in [
        (3, "shargpt", "error: there is no format 'shargpt'. Did you mean 'sharegpt'?\n"),
        (5, "csv", "error: there is no format 'csv'. Known: agent, episodes, "),
        (0, source, f"error: {source}: key '[1].conversation': is not known. Did you mean 'conversations'?\n"),
        (7, tmp_path, "has no tokenizer"),
    ]:
        done = convert(*(word if k == at else w for k, w in enumerate(words)))
        assert done.exit_code == 2 and says in done.stderr and done.stdout == ""
    done = convert(*words, "--skip-bad")
    assert done.exit_code == 0 and done.stderr.startswith("left out 1 rows; the first: ") and len(take(out)) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.json", "out.jsonl"]


def test_the_view_of_one_seat(tmp_path):
    ask, answer = tuple(TINY.encode("go", add_special_tokens=False)), tuple(TINY.encode("on<|im_end|>"))
    turns = (Turn("policy", ask, answer, text="on"), Turn("critic", ask, answer, text="on"))
    e = Episode("a", Task("a"), "a", turns, {"self": Scored(0.5)})
    with pytest.raises(DataError, match="has the seats policy, critic: say whose view"):
        formats.write("trajectories", tmp_path / "out.jsonl", [e], TINY)
    with pytest.raises(DataError, match="has no turn of seat 'judge'"):
        formats.write("trajectories", tmp_path / "out.jsonl", [e], TINY, seat="judge")
    formats.write("trajectories", tmp_path / "out.jsonl", [e], TINY, seat="critic")
    assert take(tmp_path / "out.jsonl") == [{"prompt": "go", "response": "on", "reward": 0.5}]
    with pytest.raises(DataError, match="there are no episodes to write"):
        formats.write("trajectories", tmp_path / "none.jsonl", [], TINY)


def test_annotations_of_other_episodes_are_refused(tmp_path):
    e = Episode("a", Task("a"), "a", (Turn("policy", (1,), (2,)),), {"self": Scored(0.5)})
    notes = [Annotation("a", "v", "turn", (1.0,), 0)]
    formats.write("episodes", tmp_path / "x.jsonl", [e], TINY, annotations=notes)
    assert formats.read("episodes", tmp_path / "x.jsonl", TINY).annotations == notes
    formats.write("episodes", tmp_path / "x.jsonl", [e], TINY)  # the old annotations are removed
    assert formats.read("episodes", tmp_path / "x.jsonl", TINY).annotations == []
    formats.write("episodes", tmp_path / "x.jsonl", [e], TINY, annotations=[Annotation("b", "v", "turn", (1.0,), 0)])
    with pytest.raises(DataError, match=r"x.annotations.jsonl:1: key 'episode': is 'b', which x.jsonl does not hold"):
        formats.read("episodes", tmp_path / "x.jsonl", TINY)
