"""Rows that are read when they are needed are the rows that reading everything at once gives."""

import json
import os
import random
from pathlib import Path

import pytest

from trailmark import chat, formats, progress
from trailmark.config import resolve
from trailmark.errors import DataError
from trailmark.formats import on_demand
from trailmark.formats.conversations import read_rows
from trailmark.formats.rows import RowFile
from trailmark.methods import offline, preference, sft
from trailmark.methods.batches import Batches, batch_rows
from trailmark.methods.oreo import method as oreo
from trailmark.methods.preference import places_of_pairs, places_of_stored, preference_pairs, stored_pairs
from trailmark.models.tiny import tiny_tokenizer
from trailmark.runs.diff import diff_runs
from trailmark.runs.launch import launch
from trailmark.samples import scored
from trailmark.types import Episode, Scored, Task, Turn

TOKENIZER = tiny_tokenizer()
SHAPE = {"layers": 1, "width": 32, "heads": 2, "context": 256}
ODD = ["<think>so</think>yes", " spaced ", "<|im_end|>", "größer ﷺ", "plain", "a\nb", "if a < b"]


def lines(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


@pytest.fixture
def talks(tmp_path):
    draw, rows = random.Random(0), []
    for i in range(60):
        talk = [{"role": "system", "content": "Sum."}] * (i % 3 == 0)
        for j in range(1 + i % 3):
            said = draw.choice(ODD) if i % 4 == 0 else f"{i + j}"
            talk += [{"role": "user", "content": f"{i}+{j}?"}, {"role": "assistant", "content": said}]
        rows.append({"messages": talk})
    return lines(tmp_path / "talks.jsonl", [*rows, {"prompt": "Hi", "response": "you"}])


@pytest.fixture
def trajectories(tmp_path):
    draw, rows = random.Random(0), []
    for i in range(90):
        said = "" if i == 7 else "x" * 300 if i == 11 else draw.choice(ODD) if i % 5 == 0 else f"so\n{i % 9}"
        row = {"prompt": "" if i == 13 else f"{i % 10}+{i % 3}=", "response": said}
        rows.append(row if i == 17 else row | {"reward": draw.randrange(2)})
    return lines(tmp_path / "trajectories.jsonl", rows)


def eager(path, use_chat):
    """Every row of a file of conversations, encoded in a plain loop."""
    out = []
    for _, messages in read_rows(path):
        told = messages if use_chat else sft.as_written(TOKENIZER, messages)
        out.append([
            (list(s.tokens), [int(any(a.start <= t < a.end for a in s.spans)) for t in range(len(s.tokens))])
            for s in chat.sequences(TOKENIZER, told, template="own" if use_chat else None)
        ])  # fmt: skip
    return out


def shown(samples):
    return [(s.tokens.tolist(), s.streams["weight"].astype(int).tolist()) for s in samples]


@pytest.mark.parametrize("limit", [0, 1 << 30])
@pytest.mark.parametrize("use_chat", [True, False])
def test_conversations_are_those_of_a_plain_loop(talks, use_chat, limit, monkeypatch):
    monkeypatch.setattr(on_demand, "LIMIT", limit)
    wanted = eager(talks, use_chat)
    rows = sft.conversation_samples(TOKENIZER, talks, use_chat, 256)
    assert [shown(row) for row in rows] == wanted == [shown(row) for row in rows] and len(rows) == 61
    draws = Batches(rows, 7, 3, 30)
    for step in (*range(1, 12), 5, 30):  # in order, and after a resume
        assert [shown(row) for row in draws.take(step)] == [wanted[r] for r in batch_rows(61, 7, step, 3)]


def test_only_the_rows_of_a_step_are_encoded(tmp_path, monkeypatch):
    path = lines(tmp_path / "many.jsonl", [{"prompt": f"{i}?", "response": f"{i}"} for i in range(500)])
    asked = []
    own = chat.sequences
    monkeypatch.setattr(chat, "sequences", lambda t, m, **k: asked.append(m[0]["content"]) or own(t, m, **k))
    rows = sft.conversation_samples(TOKENIZER, path, True, 256)
    assert asked == ["a"]  # the frame that the template puts around a question and an answer
    draws = Batches(rows, 4, 0, 2)
    draws.take(1), draws.take(2)
    assert sorted(asked[1:]) == sorted(f"{r}?" for step in (1, 2) for r in batch_rows(500, 4, step, 0))


@pytest.mark.parametrize("format", ["trajectories", "pairs", "agent", "react", "episodes", "sharegpt"])
def test_trajectories_are_those_of_the_whole_file(tmp_path, trajectories, format):
    rows = [json.loads(line) for line in Path(trajectories).read_text().splitlines()]
    if format == "pairs":
        rows = [{"prompt": r["prompt"] or "-", "chosen": r["response"] or "-", "rejected": "no"} for r in rows]
    if format in ("agent", "sharegpt"):
        who, what, names = {"agent": ("role", "content", ("user", "assistant"))}.get(
            format, ("from", "value", ("human", "gpt"))
        )
        talk = lambda r, i: [
            {who: names[k % 2], what: t}
            for k, t in enumerate([r["prompt"] or "-", r["response"], "and?", "1"][: 2 + i % 3])
        ]
        reward = {"agent": "reward", "sharegpt": "score"}[format]
        rows = [{"conversations": talk(r, i), reward: r.get("reward")} for i, r in enumerate(rows)]
    if format == "react":
        both = lambda r: [r["response"] or "-", "Thought 1: no"]
        rows = [
            {"text": r["prompt"] or "-", "response": both(r), "pred": ["1", "2"], "label": 1, "id": i}
            for i, r in enumerate(rows)
        ]
    path = lines(tmp_path / "in.jsonl", rows)
    if format == "episodes":
        path = str(tmp_path / "own.jsonl")
        formats.write(
            "episodes", path, formats.read("trajectories", trajectories, TOKENIZER, skip_bad=True).episodes, None
        )
    found = offline.read_scored([path], format, TOKENIZER, "policy", 200)
    whole = formats.read(format, path, TOKENIZER, skip_bad=True).episodes
    whole = whole if format == "pairs" else scored(whole)[0]
    fits = lambda e: e.turns[0].text.strip() and len(e.sequence(len(e.turns) - 1)) <= 200
    wanted = [e for e in whole if fits(e) and [t.continues for t in e.turns[1:]] == list(range(len(e.turns) - 1))]
    assert len(wanted) > 20 and list(found.episodes) == wanted and found.episodes[-1] == wanted[-1]
    assert list(found.episodes.won) == [offline.won(e) for e in wanted]
    names = list(found.episodes.group_names)
    assert [names[g] for g in found.episodes.group] == [e.group for e in wanted]
    if format == "pairs":
        places = places_of_stored(found.episodes)
        assert [(wanted[a], wanted[b]) for a, b in places] == stored_pairs(wanted)
    for cap in (None, 2):
        places = places_of_pairs(found.episodes, cap, 5)
        assert [(wanted[a], wanted[b]) for a, b in places] == preference_pairs(wanted, cap, 5)


def test_a_file_of_pairs_that_lacks_a_side(tmp_path):
    turn = (Turn("policy", (1,), (2,), text="x"),)
    made = [
        Episode(f"e{k}", Task("t"), "g", turn, {"self": Scored(1.0)}, info={"pair": "p", "side": side})
        for k, side in enumerate(("chosen", "chosen"))
    ]
    formats.write("episodes", tmp_path / "e.jsonl", made, None)
    found = offline.read_scored([str(tmp_path / "e.jsonl")], "episodes", TOKENIZER, "policy", 50)
    with pytest.raises(DataError, match="pair 'p' lacks its rejected episode"):
        places_of_stored(found.episodes)


BAD = {
    "no JSON": ('{"prompt": "a", ', "rows.jsonl:201: is not JSON"),
    "missing": ('{"prompt": "a"}', "rows.jsonl:201: key 'response': is missing"),
    "lost": ('{"prompt": "a", "response": "b", "tools": ["x"]}', "rows.jsonl:201: key 'tools': is not read here"),
    "no text": ('{"prompt": "a", "response": 3}', "rows.jsonl:201: key 'response': must be text"),
    "twice": (
        '{"prompt": "a", "prompt": "a", "response": "b"}',
        "rows.jsonl:201: is not JSON: key 'prompt' appears twice",
    ),
}


@pytest.mark.parametrize("method", ["sft", "oreo"])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_in_the_middle_is_refused_before_the_first_step(tmp_path, kind, method):
    bad, says = BAD[kind]
    good = '{"prompt": "a", "response": "b", "reward": 1}\n'
    (tmp_path / "rows.jsonl").write_text(good * 199 + "\n" + bad + "\n" + good * 99)
    recipe = {"method": method, "data": str(tmp_path / "rows.jsonl"), "out": str(tmp_path / "run"), "steps": 1}
    made = sft.SftMethod if method == "sft" else oreo.OreoMethod
    with pytest.raises(DataError) as told:
        launch(made, resolve({**recipe, "model": {"name": "tiny", "shape": SHAPE}}, made.Config))
    assert says in str(told.value) and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_row_that_is_too_long_is_counted_before_the_first_step(tmp_path):
    rows = [{"prompt": "a", "response": "b" * (300 if i in (40, 70) else 200 if i == 50 else 1)} for i in range(90)]
    path = lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"rows.jsonl:41: has \d+ tokens.*context is 256. 2 of 90 rows"):
        sft.conversation_samples(TOKENIZER, path, True, 256)


def test_a_file_that_changes_under_a_run(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines(path, [{"prompt": f"{i}?", "response": "b"} for i in range(50)])
    rows = sft.conversation_samples(TOKENIZER, str(path), True, 256)
    before = shown(rows[3])
    lines(tmp_path / "new.jsonl", [{"prompt": "new", "response": "b"}] * 50)
    os.replace(tmp_path / "new.jsonl", path)  # another file under its name: the run has the first one open
    assert shown(rows[4]) != before and TOKENIZER.decode(rows[4][0].tokens).count("4?") == 1
    rows = sft.conversation_samples(TOKENIZER, str(path), True, 256)
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match="was changed while it was being read"):
        rows[5]


def test_a_pipe_is_read_once_and_a_folder_is_refused(tmp_path):
    text = "".join(json.dumps({"prompt": f"{i}?", "response": "b"}) + "\n" for i in range(3))
    for given in (text, json.dumps([json.loads(line) for line in text.splitlines()])):
        end, begin = os.pipe()
        os.write(begin, given.encode())
        os.close(begin)
        rows = RowFile(f"/dev/fd/{end}")
        assert [rows[i].value["prompt"] for i in (2, 0, 1)] == ["2?", "0?", "1?"]
        os.close(end)
    lines(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}])
    for format in ("episodes", "trajectories"):
        with pytest.raises(DataError, match="is a folder, and rows are read from a file: name one of its files"):
            offline.read_scored([str(tmp_path)], format, TOKENIZER, "policy", 50)


@pytest.mark.parametrize("kind", ["sft", "dpo", "oreo"])
def test_runs_are_the_same_with_and_without_memory(tmp_path, talks, trajectories, kind, monkeypatch):
    """One that keeps no row, and stops and goes on, is the run that keeps them all."""
    of = {
        "sft": (sft.SftMethod, {"method": "sft", "data": talks, "eval_data": talks}),
        "dpo": (preference.PreferenceMethod, {"method": "preference", "data": trajectories}),
        "oreo": (oreo.OreoMethod, {"method": "oreo", "data": trajectories, "level": "step"}),
    }
    made, recipe = of[kind]
    recipe = {**recipe, "model": {"name": "tiny", "shape": SHAPE}, "batch": 8, "checkpoint": {"every": 2}}
    launch(made, resolve({**recipe, "steps": 5, "out": str(tmp_path / "a")}, made.Config))
    monkeypatch.setattr(on_demand, "LIMIT", 0)
    launch(made, resolve({**recipe, "steps": 2, "out": str(tmp_path / "b")}, made.Config))
    launch(made, resolve({**recipe, "steps": 5, "out": str(tmp_path / "b")}, made.Config), resume=True)
    differs = [d for d in diff_runs(tmp_path / "a", tmp_path / "b") if d.file != "recipe.yaml"]  # its steps were 2
    assert differs == []


def test_long_preparation_says_how_far_it_is(talks, monkeypatch, capsys):
    list(progress.counted(range(1000), "reading x", "rows", 1000))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    monkeypatch.setattr(progress, "EVERY", -1.0)
    assert list(progress.counted(range(1000), "reading x", "rows", 1000)) == list(range(1000))
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said] == [f"reading x: {n} of 1" for n in (0, 256, 512, 768)]
    sft.conversation_samples(TOKENIZER, talks, True, 256)
    assert "checking talks.jsonl: 0 of 61 rows" in capsys.readouterr().err
