import json
import lzma
import os
from pathlib import Path

import pytest
from small_home import ERRANDS, names, write_download

from trailmark.errors import DataError
from trailmark.models.tiny import tiny_tokenizer
from trailmark.tasks.alfworld import Games
from trailmark.tasks.alfworld.dialect import command_in, observation_in
from trailmark.tasks.alfworld.source import WELCOME
from trailmark.tasks.alfworld.trajectories import check, read_trajectories

TOKENIZER = tiny_tokenizer([str(n) for n in range(10, 30)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_download(tmp_path_factory.mktemp("games"), ["train"])


@pytest.fixture(scope="module")
def rows(folder):
    """One published play of each type, in the older dialect."""
    games, out = Games(folder), []
    for task_type, name in names().items():
        task, trial = name.split("/")
        game = games.game(f"train/{name}").start()
        talk = [{"from": "human", "value": game.observation}]
        for command in ERRANDS[task_type][3]:
            seen = observation_in("put", game.step(command), command)
            talk += [{"from": "gpt", "value": command_in("put", command)}, {"from": "human", "value": seen}]
        out.append({"task": task, "trial": trial, "in_games": True, "conversations": talk})
    return out


def write(path, rows):
    if path.name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        text = "".join(json.dumps(r) + "\n" for r in rows).encode()
        path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)
    return path


def copied(rows):
    return json.loads(json.dumps(rows))


def eto(row):
    """The same play with an instruction, thoughts and prefixes."""
    talk = [{"from": "human", "value": "Do chores."}, {"from": "gpt", "value": "OK"}]
    for k, m in enumerate(row["conversations"]):
        if m["from"] == "gpt":
            talk.append({"from": "gpt", "value": f"Thought: now I {m['value']}.\nAction: {m['value']}"})
        else:
            said = f"Observation: {m['value']}" if k else m["value"].removeprefix(WELCOME)
            talk.append({"from": "human", "value": said})
    return {
        "id": "7",
        "game_file": f"json_2.1.1/train/{row['task']}/{row['trial']}/game.tw-pddl",
        "conversations": talk[:-1],
    }


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.xz", "t.json"])
def test_every_layout_says_the_same(tmp_path, rows, name):
    told = read_trajectories(write(tmp_path / name, rows)).trajectories
    assert [t.game for t in told] == list(names().values())
    assert told[0].first.startswith("You are in the middle of a room.") and told[0].dialect == "put"
    move = told[0].moves[-1]
    assert (move.said, move.command) == ("put mug 1 in/on cabinet 1",) * 2
    assert move.seen == "You put the mug 1 in/on the cabinet 1."


def test_thoughts_prefixes_and_openings_are_understood(tmp_path, rows):
    told = read_trajectories(write(tmp_path / "eto.json", [eto(r) for r in rows])).trajectories
    bare = read_trajectories(write(tmp_path / "bare.json", rows)).trajectories
    for a, b in zip(told, bare):
        assert (a.game, a.first, [m.command for m in a.moves]) == (b.game, b.first, [m.command for m in b.moves])
        assert [m.seen for m in a.moves[:-1]] == [m.seen for m in b.moves[:-1]] and a.moves[-1].seen is None
    roles = [
        {"role": {"human": "user", "gpt": "assistant"}[m["from"]], "content": m["value"]}
        for m in rows[0]["conversations"]
    ]
    again = read_trajectories(write(tmp_path / "roles.json", [{**rows[0], "conversations": roles}])).trajectories
    assert again[0].moves == bare[0].moves


def test_plays_in_both_dialects_are_replayed_word_for_word(tmp_path, folder, rows):
    newer = copied(rows)
    for r in newer:
        command = ""
        for m in r["conversations"]:
            if m["from"] == "gpt":
                command = m["value"] = command_in("move", m["value"])
            elif command:
                m["value"] = observation_in("move", m["value"], command)
    for kind in (rows, newer, [eto(r) for r in rows]):
        found = check(read_trajectories(write(tmp_path / "t.json", kind)).trajectories, Games(folder))
        assert found.counts == {
            "trajectories": 6,
            "without a game": 0,
            "won": 6,
            "same in every word": 6,
            "different": 0,
        }


def test_what_differs_is_counted_and_shown_with_its_place(tmp_path, folder, rows):
    rows = copied(rows)
    rows[0]["conversations"][4]["value"] = "You pick up the mug 2 from the countertop 1."
    rows[1]["conversations"][0]["value"] = rows[1]["conversations"][0]["value"].replace("a shelf 1", "a shelf 3")
    rows[2]["conversations"] = rows[2]["conversations"][:5]
    rows[3]["task"] = "unknown"
    found = check(read_trajectories(write(tmp_path / "t.jsonl", rows)).trajectories, Games(folder))
    assert found.counts == {"trajectories": 6, "without a game": 1, "won": 4, "same in every word": 3, "different": 2}
    assert [r.at for r in found.replays] == [2, 0, None, None, None, None]
    assert (
        "t.jsonl:1: move 2\n  told 'You pick up the mug 2 from the countertop 1.'\n  seen 'You pick up the mug 1"
        in str(found)
    )


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda r: r.pop("conversations"), "t.jsonl:1: key 'conversations': is missing"),
        (lambda r: r.pop("trial"), "needs 'task' and 'trial', or a 'game_file'"),
        (lambda r: r.update(conversations=[]), "must be a list that is not empty"),
        (lambda r: r["conversations"].pop(0), "says 'Your task is to"),
        (lambda r: r["conversations"].pop(1), r"key 'conversations\[1\]': is not from the expert"),
        (lambda r: r["conversations"][1].update({"from": "robot"}), "is 'robot', which is neither human nor gpt"),
        (lambda r: r["conversations"][1].update(value=" "), r"conversations\[1\]': has no 'Action"),
    ],
)
def test_a_bad_row_is_named_or_left_out_and_counted(tmp_path, rows, change, why):
    rows = copied(rows)
    change(rows[0])
    path = write(tmp_path / "t.jsonl", rows)
    with pytest.raises(DataError, match=why):
        read_trajectories(path)
    told = read_trajectories(path, skip_bad=True)
    assert len(told.trajectories) == 5 and len(told.skipped) == 1


def test_a_file_that_cannot_be_read_is_said(tmp_path, rows):
    for name, data, why in (
        ("a.jsonl.xz", b"not compressed", "a.jsonl.xz: cannot be read"),
        ("b.jsonl", b"{\n", "b.jsonl:1: is not JSON"),
        ("c.json", b"[{]", "c.json: is not JSON"),
        ("d.jsonl", b"\n", "d.jsonl: holds no rows"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=why):
            read_trajectories(tmp_path / name)
    with pytest.raises(DataError, match="nowhere.json: cannot be read"):
        read_trajectories(tmp_path / "nowhere.json")


# --- as episodes -------------------------------------------------------------------------------------------------














@pytest.mark.data
def test_published_plays_win_again_word_for_word():
    folder = Path(os.environ["TRAILMARK_DATA"]) / "alfworld"
    told = read_trajectories(folder / "expert_trajs_train.jsonl.xz").trajectories
    assert len(told) == 3554 and sum(len(t.moves) for t in told) == 60628
    found = check(told[::80], Games(folder)).counts
    assert found["won"] == found["same in every word"] == found["trajectories"] == 45
