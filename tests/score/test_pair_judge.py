"""`trailmark judge`: a model compares texts in both orders, and writes the file that `trailmark votes` reads."""

import csv
import json
import re

import pytest
from judging import serving_judge
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.methods.vrcli.pair_judge import DIMENSIONS
from trailmark.methods.vrcli.pairwise import read_comparisons, score

BOOKS = {"one": ["scifi"], "two": ["scifi", "romance"], "three": []}


def call(*words, code=0):
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == code, done.output
    return done


def dump(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def files(tmp_path):
    """Three rows of three books, and texts of three systems. `answer <k>` says for the stand-in which row it is."""
    stories = [
        {"id": f"r{k}", "story_id": book, "chapter_index": 2, "next_chapter": f"Gold {k}.",
         "next_chapter_synopsis": f"answer <{k}>", "story_text": "Ann {sat}."}
        for k, book in enumerate(BOOKS)
    ]  # fmt: skip
    call("data", "stories", dump(tmp_path / "rows.jsonl", stories), "--out", tmp_path / "s", "--over", 0)
    rows = [json.loads((tmp_path / f"s/{s}.jsonl").read_text()) for s in ("train", "val", "test")]
    dump(tmp_path / "all.jsonl", sorted(rows, key=lambda r: r["id"]))
    size = {"base": 3, "sft": 2, "rl": 5}
    for name, n in size.items():
        texts = [{"id": f"r{k}", "text": f"{name} {k}" + " word" * n + " <END_OF_CHAPTER> junk"} for k in range(3)]
        dump(tmp_path / f"{name}.jsonl", texts)
    (tmp_path / "genres.json").write_text(json.dumps(BOOKS))
    return tmp_path


def words(files, url, *more, names=("base", "sft", "rl")):
    systems = [f"{n}={files / f'{n}.jsonl'}" for n in names]
    out = files / "votes.csv"
    how = ["--server", url, "--out", out, "--retries", 0, "--at-once", 1]  # so that no connection is refused
    return ["judge", files / "all.jsonl", *systems, *how, *more]


def shown(messages):
    text = messages[0]["content"]
    name = re.findall(r'"id": "(\w+)"', text)[-1]
    return name, *re.search(r"Answer A:\n(.*)\n\nAnswer B:\n(.*?)\n\n", text, re.S).groups()


def reply(name, **votes):
    return json.dumps({"id": name, **{c: votes.get(c, votes["all"]) for c in DIMENSIONS}})


def longer(messages):
    """Likes the longer text, except: plot goes to what is shown first, language is a tie whenever the first is base."""
    name, a, b = shown(messages)
    assert "<END_OF_CHAPTER>" not in a + b and "Ann {sat}." in messages[0]["content"]
    best = "A" if len(a.split()) > len(b.split()) else "B"
    return reply(name, all=best, plot="A", language="tie" if a.startswith("base") else best, creativity="tie")


def test_the_file_is_what_votes_reads(files):
    with serving_judge(longer) as (url, asked):
        done = call(*words(files, url, "--genres", files / "genres.json", "--json"))
        result = json.loads(done.stdout)
        assert sum(asked.values()) == 18 == result["asked"]  # three pairs of systems, three rows, two orders
        again = json.loads(call(*words(files, url, "--genres", files / "genres.json", "--json")).stdout)
        assert sum(asked.values()) == 18 and again["asked"] == 0 and again["counts"] == result["counts"]
    counts = result["counts"]
    assert list(counts) == ["base rl", "base sft", "rl sft"]
    tally = lambda pair, c: tuple(counts[pair][c][k] for k in ("wins", "losses", "ties", "swayed"))
    assert tally("base rl", "overall_quality") == (0, 3, 0, 0) and tally("rl sft", "overall_quality") == (3, 0, 0, 0)
    assert all(tally(pair, "plot") == (0, 0, 0, 3) for pair in counts)  # the first is always liked: all ties
    assert all(tally(pair, "creativity") == (0, 0, 3, 0) for pair in counts)
    assert tally("base sft", "language") == (0, 0, 0, 3) and tally("rl sft", "language") == (3, 0, 0, 0)
    with (files / "votes.csv").open() as f:
        table = list(csv.DictReader(f))
    assert list(table[0]) == [*DIMENSIONS, "options", "texts", "scifi", "romance"] and len(table) == 9
    first = table[0]
    assert first["options"] == "base,rl" and first["overall_quality"] == "rl" and first["plot"] == "same"
    assert [(r["scifi"], r["romance"]) for r in table[:3]] == [("True", "False"), ("True", "True"), ("False", "False")]
    found = read_comparisons(files / "votes.csv")
    s = score(found, "rl", "base", "overall_quality", "romance")
    assert (s.wins, s.losses, s.ties) == (1, 0, 0)
    said = json.loads(call("votes", files / "votes.csv", "--json").stdout)["files"][0]
    (pair,) = [p for p in said["pairs"] if (p["first"], p["second"]) == ("rl", "base")]
    assert pair["overall_quality"]["win_rate"] == 1.0 and pair["plot"]["ties"] == 3
    assert pair["subsets"] == {"romance": 1.0, "scifi": 1.0} and said["dimension"] == "overall_quality"


def test_a_judge_that_dies_loses_nothing(files):
    """The server fails on one row: nothing is written, unless so much may fail. When it is back, only that row is asked
    about."""
    broken = True

    def answer(messages):
        if broken and "answer <1>" in messages[0]["content"]:
            return 500
        return longer(messages)

    with serving_judge(answer) as (url, asked):
        done = call(*words(files, url, names=("base", "rl")), code=1)
        assert "1 of 3 pairs failed (the first: row 'r1', base and rl): judge 'wise'" in done.stderr
        assert not (files / "votes.csv").exists()
        done = call(*words(files, url, "--failures", 0.34, names=("base", "rl")))
        assert "1 of 3 pairs have no verdict" in done.stderr and "row 'r1', base and rl: judge 'wise'" in done.stderr
        assert "base > rl" in done.stdout and len(read_comparisons(files / "votes.csv")) == 2
        broken, before = False, sum(asked.values())
        call(*words(files, url, names=("base", "rl")))
        assert sum(asked.values()) - before == 2 and len(read_comparisons(files / "votes.csv")) == 3


def test_a_judge_that_is_gone_ends_the_work(files, monkeypatch):
    monkeypatch.setattr("trailmark.failures.PATIENCE", 2)
    with serving_judge(lambda messages: 500) as (url, asked):
        said = call(*words(files, url), code=1).output
        assert "pairs: 2 requests in a row failed" in said and "What was answered is kept" in said
        assert sum(asked.values()) == 4 and not (files / "votes.csv").exists()
    monkeypatch.setattr("trailmark.failures.PATIENCE", 100)
    with serving_judge(lambda messages: "I like both.") as (url, asked):
        said = call(*words(files, url, "--again", 1, names=("base", "rl")), code=1).output
        assert "3 of 3 pairs failed (the first: row 'r0', base and rl): judge 'wise' gave no mark" in said
    said = call(*words(files, url), code=1).output
    assert "cannot be reached" in said


def test_other_dimensions(files):
    (files / "c.json").write_text(json.dumps({"short": "which is shorter", "kind": "which is kinder"}))

    def answer(messages):
        name, a, b = shown(messages)
        assert "- short: which is shorter" in messages[0]["content"]
        return json.dumps({"id": name, "short": "A" if len(a) < len(b) else "B", "kind": "tie"})

    with serving_judge(answer) as (url, _):
        call(*words(files, url, "--criteria", files / "c.json", "--n", 2, "--served", "wise"))
    found = read_comparisons(files / "votes.csv")
    assert len(found) == 6 and {c.winners["short"] for c in found if c.options == ("base", "rl")} == {"base"}


def test_what_is_refused(files, tmp_path):
    with serving_judge(longer) as (url, asked):
        refused = lambda *more, **kind: " ".join(call(*words(files, url, *more, **kind), code=2).output.split())
        assert "name two systems or more" in refused(names=("base",))
        assert "no model 'nobody'" in refused("--served", "nobody")
        (files / "g.json").write_text('{"one": ["scifi"]}')
        assert "g.json: has no book 'two', to which row 'r1' belongs" in refused("--genres", files / "g.json")
        (files / "g.json").write_text(json.dumps({b: ["plot"] for b in BOOKS}))
        assert "'plot' cannot be a genre" in refused("--genres", files / "g.json")
        (files / "g.json").write_text("[1]")
        assert "must hold one JSON object" in refused("--genres", files / "g.json")
        assert "must hold one JSON object" in refused("--criteria", files / "g.json")
        dump(files / "sft.jsonl", [{"id": "r9", "text": "x"}])
        assert "is 'r9', which is no row of the data" in refused()
        dump(files / "sft.jsonl", [{"id": "r0", "text": "x"}])
        dump(files / "rl.jsonl", [{"id": "r1", "text": "x"}])
        assert "rl and sft have no row in common" in refused(names=("sft", "rl"))
        (files / "votes.csv").write_text("mine")
        assert "votes.csv exists: choose another file" in refused(names=("base", "sft"))
        assert (files / "votes.csv").read_text() == "mine" and not asked
