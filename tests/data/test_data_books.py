"""From books to rows: what each stage may see, caps, a server that goes away, and rows that pass the leak rule."""

import asyncio
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from data_fixtures import rows as lines
from data_fixtures import teaching, tree
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.errors import DataError
from trailmark.methods.vrcli.stories.books import read_books
from trailmark.methods.vrcli.stories.leaks import runs, words_of
from trailmark.methods.vrcli.stories.sentences import common_run, main_names, names, salient, sentences
from trailmark.methods.vrcli.stories.writer import PIECE, QUESTIONS, Rules
from trailmark.tasks.stories.rows import FIELDS, read_rows

ANN = [
    "said that Ann was tall",
    "told Ann the truth about",
    "heard how Ann wanted to leave",
    "knew that Ann was kind to",
]


def chapter(book, k, extra=""):
    """About 250 words, with a word of its own: secretK."""
    end = "and Bob who had met Cid near the river number"
    said = [f"In {book} on day {n} the baker {ANN[(n + k) % 4]} {end} {n * 7 + k}." for n in range(10)]
    return {
        "book": book,
        "chapter": k + 1,
        "heading": f"Part {k + 1}",
        "text": f"{' '.join(said)} It held secret{k}. {extra}",
    }


def write(path, made):
    path.write_text("".join(json.dumps(r) + "\n" for r in made))
    return path


def run(files, out, *words, code=0):
    done = CliRunner().invoke(app, ["data", "books", *map(str, files), "--out", str(out), *map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


def secrets(text):
    return sorted({int(k) for k in re.findall(r"secret(\d+)", text)})


def script(messages):
    """A writer that tells which secrets it was shown."""
    (said,) = [m["content"] for m in messages]
    shown = " ".join(f"secret{k}" for k in secrets(said))
    if "Rate from 1 to 5" in said:
        return "3" if "doubtful" in said else "x" if "odd" in said else "5."
    if "Split a sentence" in said:
        whole = said.rsplit("Sentence: ", 1)[1].split("\n")[0]
        return "Something else entirely was invented." if "Bob" in whole else whole.replace(" and ", ". And ")
    if "goals" in said and "reach or give up" in said:
        return "None."
    if "Answer from this chapter alone" in said:
        name = re.search(r"novel\. .*?(Ann|Bob|Cid)", said)[1]
        doubt = " This is doubtful." if "look like" in said else " This is odd." if "learn?" in said else ""
        return f"{name} met one and {name} saw {shown}.{doubt}"
    return f"It shows {shown}. " + "So it goes on. " * 20


BOOK = [chapter("toy", k) for k in range(6)]


def test_a_toy_book_has_targets_2_and_3(tmp_path):
    said = run([write(tmp_path / "toy.jsonl", BOOK)], tmp_path / "out")
    assert "chapters: 1 books, 6 chapters" in said and "rows: 2 rows" in said
    made = read_rows(tmp_path / "out/rows.jsonl")
    assert [r.chapter_index for r in made] == [2, 3] and {r.story_id for r in made} == {"toy"}
    for row in made:
        k = row.chapter_index
        assert row.next_chapter == f"Part {k + 1}\n\n{BOOK[k]['text'].strip()}" and row.header == f"Part {k + 1}"
        assert row.story_text == f"Part {k}\n\n{BOOK[k - 1]['text'].strip()}" and row.last_n_chapters == 1
        assert list(row.character_sheets) == ["Ann", "Bob", "Cid"]
    assert set(lines(tmp_path / "out/rows.jsonl")[0]) == {*FIELDS, "id"}
    two = run([tmp_path / "toy.jsonl"], tmp_path / "out", "--last", 2)
    assert "stage 'rows' is made again" in two
    assert lines(tmp_path / "out/rows.jsonl")[0]["story_text"].count("secret") == 2


@pytest.mark.parametrize("who", ["offline", "server"])
def test_nothing_before_k_knows_chapter_k(who, tmp_path):
    made = [chapter("long", k, "Ann wanted gold.") for k in range(9)]
    file = write(tmp_path / "long.jsonl", made)
    with teaching(script) as server:
        words = ["--teacher", server.url, "--model", "m", "--retries", 0] if who == "server" else []
        run([file], tmp_path / "out", *words)
    out, seen = tmp_path / "out", []
    for r in lines(out / "summaries.jsonl"):
        assert all(j < r["upto"] for j in secrets(r["text"]))
    for r in lines(out / "verified.jsonl"):
        assert set(secrets(r["sentence"])) <= {r["chapter"]}
    for r in lines(out / "sheets.jsonl"):
        assert all(j < r["upto"] for j in secrets(r["text"])) and 2 <= r["upto"] <= 6
        seen += secrets(r["text"])
    for r in lines(out / "rows.jsonl"):
        k = r["chapter_index"]
        before = [r["prior_plot_summary"], r["story_text"], *r["character_sheets"].values()]
        assert all(j < k for text in before for j in secrets(text))
    assert len(lines(out / "summaries.jsonl")) == 10 and len(lines(out / "rows.jsonl")) == 5
    if who == "server":
        assert max(seen) == 5  # what chapter 5 says is known before chapter 6: facts arrive at once
        assert secrets(lines(out / "summaries.jsonl")[-1]["text"]) == list(range(9))  # the plan of the whole story
        assert [secrets(r["text"]) for r in lines(out / "synopses.jsonl")] == [[k] for k in range(9)]


def test_what_a_server_is_asked(tmp_path):
    """Eight questions a character and chapter, caps of tokens, greedy ratings, short sources as they are."""
    with teaching(script) as server:
        run([write(tmp_path / "toy.jsonl", BOOK)], tmp_path / "out", "--teacher", server.url, "--model", "m")
        asked = [(b["messages"][0]["content"], b) for _, _, b in server.asked]
    of = lambda text: [(said, b) for said, b in asked if text in said]
    assert len(of("Tell in one paragraph")) == 6
    questions = of("Answer from this chapter alone")
    assert len(questions) == 6 * 3 * 8 and len(QUESTIONS) == 8
    assert all(b["max_tokens"] == 300 and b["stop"] == ["\n"] and b["temperature"] == 0.6 for _, b in questions)
    assert all(b["max_tokens"] == 1 and b["temperature"] == 0.0 for _, b in of("Rate from 1 to 5"))
    assert all(b["max_tokens"] == 50 for _, b in of("Split a sentence"))
    joined = ["\n".join(f"Chapter {r['chapter'] + 1}: {r['text']}" for r in lines(tmp_path / "out/synopses.jsonl")[:k])
              for k in range(7)]  # fmt: skip
    sizes = [len(t.encode()) // 4 for t in joined]
    kept = {r["upto"]: r["text"] for r in lines(tmp_path / "out/summaries.jsonl")}
    long = [k for k in range(7) if sizes[k] >= 200]
    assert 3 <= long[0] <= 5 and all(kept[k] == joined[k] for k in range(long[0]))
    assert {b["max_tokens"] for _, b in of("These are summaries")} == {int(0.8 * sizes[k]) for k in long}


def test_facts_are_split_and_rated(tmp_path):
    with teaching(script) as server:
        run([write(tmp_path / "toy.jsonl", BOOK)], tmp_path / "out", "--teacher", server.url, "--model", "m")
    facts, kept = lines(tmp_path / "out/facts.jsonl"), lines(tmp_path / "out/verified.jsonl")
    ann = [f["sentence"] for f in facts if f["character"] == "Ann" and f["chapter"] == 1 and f["question"] == "known"]
    assert ann == ["Ann met one.", "And Ann saw secret1."]  # parts that stand in the original
    bob = [f["sentence"] for f in facts if f["character"] == "Bob" and f["chapter"] == 1 and f["question"] == "known"]
    assert bob == ["Bob met one and Bob saw secret1."]  # an invented part: the original stays
    assert not any(f["question"] == "completed" for f in facts)
    assert any("doubtful" in f["sentence"] for f in facts) and any("odd" in f["sentence"] for f in facts)
    assert not any("doubtful" in f["sentence"] or "odd" in f["sentence"] for f in kept)  # "x" counts as 1
    assert json.loads((tmp_path / "out/reports/verify.json").read_text())["left_out"] == {"facts rated below 5": 36}


def test_a_server_that_goes_away_costs_nothing(tmp_path):
    file = write(tmp_path / "toy.jsonl", BOOK)
    with teaching(script) as server:
        words = ["--teacher", server.url, "--model", "m", "--retries", 0, "--at-once", 1]
        run([file], tmp_path / "whole", *words)
        wanted, total = tree(tmp_path / "whole", (".lock", "answers.jsonl")), len(server.asked)
        server.asked.clear()
        server.faults = ["fine"] * 40 + [500] * 10
        said = run([file], tmp_path / "torn", *words, code=1)
        assert "the same command asks only for what failed" in said and len(server.asked) == 50
        assert len(lines(tmp_path / "torn/synopses.jsonl")) == 6 and not (tmp_path / "torn/facts.jsonl").exists()
        run([file], tmp_path / "torn", *words)
        assert len(server.asked) == total + 10 and tree(tmp_path / "torn", (".lock", "answers.jsonl")) == wanted
        run([file], tmp_path / "torn", *words)
        assert len(server.asked) == total + 10


def test_offline_rows_pass_the_leak_rule_and_are_deterministic(tmp_path):
    made = [chapter(book, k) for book in ("one", "two", "three") for k in range(6)]
    packed = tmp_path / "books.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in made).encode()))
    run([packed], tmp_path / "a")
    run([packed], tmp_path / "b")
    assert tree(tmp_path / "a", (".lock",)) == tree(tmp_path / "b", (".lock",))
    texts = {(r["book"], r["chapter"] - 1): set(runs(words_of(r["text"]))) for r in made}
    for r in lines(tmp_path / "a/synopses.jsonl"):
        assert not set(runs(words_of(r["text"]))) & texts[r["book"], r["chapter"]] and "secret" not in r["text"][:7]
    plan = {r["book"]: r["text"] for r in lines(tmp_path / "a/summaries.jsonl") if r["upto"] == 6}
    assert all(not set(runs(words_of(plan[book]))) & mine for (book, _), mine in texts.items())


def test_real_sentences():
    text = "Mr. Hill saw St. Paul. “Who is he?” Ann asked. I. It cost 3.5 pounds!\n\nNo. J. Smith left… Then all slept."
    assert sentences(text) == ["Mr. Hill saw St. Paul.", "“Who is he?”", "Ann asked.", "I.", "It cost 3.5 pounds!",
                               "No. J. Smith left…", "Then all slept."]  # fmt: skip
    assert sentences("  ") == []


def test_names_by_hand():
    text = "Then Elizabeth saw Darcy. The rose was for Elizabeth, and Rose took it. He told Mr. Darcy. London slept."
    assert names(text) == {"Elizabeth": 2, "Darcy": 2}
    chapters = [
        "So Peter Blood ran to Peter Blood. So Peter Blood met Arabella.",
        "For Arabella, Peter Blood and Pitt ran.",
    ]
    assert main_names(chapters, 2) == ["Blood", "Arabella"] and main_names(chapters, 0) == []


def test_salient_sentences_are_no_neighbours():
    text = "A dull start. The river rose. The river fell. Nothing else. The river river froze over the river bed."
    assert salient(text, 1) == [0] and salient(text, 3) == [0, 2, 4] and salient("", 3) == []


def test_common_runs():
    assert common_run("abcde", "xbcdy") == 3 and common_run("", "a") == 0 and common_run("aa", "aaaa") == 2


def test_summaries_by_rules_lose_pieces_not_chapters():
    rules = Rules(lambda text: len(text.split()))
    text = "Chapter 1: a b … c d … e f\nChapter 2: g h … i j"
    assert asyncio.run(rules.summary(text, 30)) == text
    assert asyncio.run(rules.summary(text, 13)) == "Chapter 1: a b\nChapter 2: g h … i j"
    assert asyncio.run(rules.summary(text, 12)) == "Chapter 1: a b\nChapter 2: g h"
    assert asyncio.run(rules.summary(text, 5)) == "Chapter 2: g h"
    assert asyncio.run(rules.sheet("Ann", "one two\nthree\nfour", 2)) == "three\nfour"
    piece = asyncio.run(rules.synopsis("I", "One two three four five six seven eight nine. Ten.")).split(" … ")[0]
    assert piece == "One two three four five six seven …" and PIECE == 7


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ([{**BOOK[0], "chapter": 0}], "toy.jsonl:1: key 'chapter': must be a whole number from 1"),
        ([BOOK[0], BOOK[0]], "toy.jsonl:2: key 'chapter': book 'toy' has a second chapter 1."),
        ([BOOK[0], BOOK[2]], "toy.jsonl: book 'toy' has no chapter 2."),
        ([{**BOOK[0], "text": " "}], "toy.jsonl:1: key 'text': the chapter is empty."),
        ([{"book": "toy"}], "toy.jsonl:1: key 'chapter': is missing"),
        ([], "toy.jsonl: holds no chapters."),
    ],
)
def test_bad_books(made, says, tmp_path):
    with pytest.raises(DataError) as said:
        read_books([write(tmp_path / "toy.jsonl", made)], 1)
    assert says in str(said.value)


def test_mistakes_of_the_command(tmp_path):
    toy = write(tmp_path / "toy.jsonl", BOOK)
    assert "no book has 5 chapters" in run([write(tmp_path / "few.jsonl", BOOK[:4])], tmp_path / "few", code=2)
    assert "there is no stage 'sheet'. Did you mean 'sheets'?" in run([toy], tmp_path / "o", "--stage", "sheet", code=2)
    (tmp_path / "names.json").write_text('{"toy": "Ann"}')
    said = run([toy], tmp_path / "o", "--names", tmp_path / "names.json", code=2)
    assert "names.json: must be an object of books and their characters" in said
    (tmp_path / "names.json").write_text('{"toy": ["Bob"]}')
    run([toy], tmp_path / "o", "--names", tmp_path / "names.json")
    assert list(lines(tmp_path / "o/rows.jsonl")[0]["character_sheets"]) == ["Bob"]
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    assert "bad.jsonl.gz: cannot be read" in run([tmp_path / "bad.jsonl.gz"], tmp_path / "p", code=2)


def test_the_skipped_chapters_are_an_option(tmp_path):
    toy = write(tmp_path / "toy.jsonl", BOOK)
    run([toy], tmp_path / "o", "--skip", 1)
    assert [r["chapter_index"] for r in lines(tmp_path / "o/rows.jsonl")] == [1, 2, 3, 4]
    run([toy], tmp_path / "o", "--skip", 1, "--last", 3)
    assert [r["last_n_chapters"] for r in lines(tmp_path / "o/rows.jsonl")] == [1, 2, 3, 3]  # as many as there are


@pytest.mark.kill
@pytest.mark.parametrize("at", ["stage.begun#4", "stories.half#4", "stories.renamed#6", "stage.made#7"])
def test_a_kill_at_any_point_leads_to_the_same_files(at, tmp_path):
    toy = write(tmp_path / "toy.jsonl", BOOK)
    run([toy], tmp_path / "whole")
    words = [sys.executable, "-m", "trailmark", "data", "books", str(toy), "--out", str(tmp_path / "torn")]
    killed = subprocess.run(words, env={**os.environ, "TRAILMARK_KILL_AT": at}, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "torn", (".lock",)) == tree(tmp_path / "whole", (".lock",))


@pytest.mark.data
def test_three_real_novels(tmp_path):
    """Rules make rows that pass the leak rule; people are found; nothing of a chapter is known before it."""
    if "TRAILMARK_DATA" not in os.environ:
        pytest.skip("TRAILMARK_DATA names no folder")
    novels = Path(os.environ["TRAILMARK_DATA"]) / "novels/chapters_visible_test.jsonl.gz"
    run([novels], tmp_path / "books")
    made = read_rows(tmp_path / "books/rows.jsonl")
    assert len(made) >= 60 and len({r.story_id for r in made}) == 3
    (mystery,) = {tuple(r.character_sheets) for r in made if "red-house" in r.story_id}
    assert set(mystery) == {"Cayley", "Antony", "Mark"}
    done = CliRunner().invoke(
        app, ["data", "stories", str(tmp_path / "books/rows.jsonl"), "--out", str(tmp_path / "rl")]
    )
    assert done.exit_code == 0, done.output
    about = json.loads((tmp_path / "rl/statistics.json").read_text())
    assert all(0 <= about[s]["leak"] < 0.01 and about[s]["books"] == 1 for s in ("train", "val", "test"))
    assert all(about[s]["prompt"]["max"] <= 12000 for s in ("train", "val", "test"))
