"""Clean-up and automatic metrics of written chapters, by hand and by a plain table."""

import csv
import json
import random

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.methods.vrcli.chapters import ENDS, clean, common_subsequence, measures, rouge_l
from trailmark.methods.vrcli.pairwise import read_metrics
from trailmark.stats.intervals import mean_of


@pytest.mark.parametrize("end", ENDS)
def test_the_end_marker(end):
    assert clean(f"One.\n\nTwo. {end} And more.\n{end}") == "One.\n\nTwo."


def test_the_first_repeated_paragraph():
    assert clean("One.\n\nTwo\nlines.\n\nThree.\n\nTwo  lines.\n\nFour.") == "One.\n\nTwo\nlines.\n\nThree."
    assert clean("One.\n\nTwo.\n\nTwo!\n \nThree.") == "One.\n\nTwo.\n\nTwo!\n \nThree."


def test_the_fourth_long_line():
    long, short = "a b c d e f g h i j", "a b c d e f g h i"
    text = "\n".join(f"{long}\nx{k}" for k in range(6))
    assert clean(text) == f"{long}\nx0\n{long}\nx1\n{long}\nx2"
    whole = "\n".join(f"{short}\nx{k}" for k in range(6))
    assert clean(whole) == whole


def test_windows_of_twenty_words():
    """Two words in turn: the window at word 2 is the one at word 0, and has two different words."""
    dull = " ".join(["yes no"] * 30)
    assert clean(dull) == dull and clean(dull, windows=True) == "yes no"
    rich = " ".join(f"w{k}" for k in range(20))
    text = " ".join(f"{rich} {k}." for k in range(12))
    assert clean(text, windows=True) == " ".join(f"{rich} {k}." for k in range(9))  # the tenth time is cut


def test_a_clean_chapter_stays():
    text = "I\n\n“Who?” said Ann.\n\nNobody knew."
    assert clean(text, windows=True) == text == clean(f"\n{text}\n")


def table(a, b):
    rows = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            rows[i + 1][j + 1] = rows[i][j] + 1 if x == y else max(rows[i][j + 1], rows[i + 1][j])
    return rows[-1][-1]


def test_common_subsequences_equal_the_table():
    draw = random.Random(0)
    for _ in range(60):
        a, b = (draw.choices("abcde"[: draw.randint(1, 5)], k=draw.randint(0, 40)) for _ in range(2))
        assert common_subsequence(a, b) == table(a, b)
    assert common_subsequence("abcbdab", "bdcaba") == 4


def test_rouge_by_hand():
    p, r, f = rouge_l("The cat sat.", "the dog, the cat and a hat SAT here")
    assert (p, r) == (1.0, 3 / 9) and f == pytest.approx(0.5)
    assert rouge_l("a b c", "A, b! c") == (1.0, 1.0, 1.0) and rouge_l("a", "b") == (0.0, 0.0, 0.0) == rouge_l("", "b")


def test_measures_by_hand():
    m = measures("one two one two one.\n\nTwo three", {"plan": "one two three", "sheets": "two one two"})
    assert m["words"] == 7 and m["unique_words"] == 5 and m["unique_words_percent"] == pytest.approx(500 / 7)
    assert m["paragraphs"] == 2
    # trigrams: 121 212 121 212 123, three of them different; the input has 123 and 212
    assert m["unique_trigrams_percent"] == 60.0 and m["unseen_trigrams_percent"] == pytest.approx(100 / 3)
    assert m["plan_rouge_l_p"] == pytest.approx(3 / 7) and m["plan_rouge_l_f"] == pytest.approx(0.6)
    assert m["sheets_rouge_l_p"] == pytest.approx(3 / 7)
    assert m["rouge_l_p"] == pytest.approx(5 / 7)  # 1 2 2 1 2 of 1 2 3 2 1 2


def test_identical_and_disjoint_texts():
    text = "It rained all day on the roof."
    same, other = measures(text, {"a": text}), measures(text, {"a": "Nobody came home before nine."})
    assert (
        same["rouge_l_f"] == same["rouge_l_p"] == same["a_rouge_l_f"] == 1.0 and same["unseen_trigrams_percent"] == 0.0
    )
    assert other["rouge_l_f"] == other["rouge_l_p"] == 0.0 and other["unseen_trigrams_percent"] == 100.0


@pytest.fixture
def files(tmp_path):
    rows = [{"id": k, "next_chapter": "x", "next_chapter_synopsis": f"The hen number {k} flies.",
             **({"story_text": "It was dark."} if k == "a" else {})} for k in "abc"]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    texts = {
        "copy": "The hen number {} flies. <END_OF_CHAPTER> more",
        "own": "A {} fox sleeps.\n\nA fox wakes again here.",
    }
    for name, text in texts.items():
        made = [{"id": k, "text": text.format(k)} for k in "abc"]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in made))
    return tmp_path


def run(files, *words, code=0):
    made = [f"{w}={files / w}.jsonl" if w in ("copy", "own") else str(w) for w in words]
    done = CliRunner().invoke(app, ["chapters", *made, "--rows", str(files / "rows.jsonl")])
    assert done.exit_code == code, done.output
    return done.output


def test_the_command(files):
    out = files / "metrics.csv"
    found = json.loads(run(files, "copy", "own", "--json", "--out", out))["systems"]
    assert found["copy"]["unseen_trigrams_percent"]["value"] == 0.0
    assert found["own"]["unseen_trigrams_percent"]["value"] == 100.0 and found["own"]["paragraphs"]["value"] == 2.0
    f = [2 * 5 / (5 + 8), 1.0, 1.0]  # row a was also shown three words of the previous chapter
    assert found["copy"]["rouge_l_f"] == mean_of(f, list("abc")).plain() and found["copy"]["texts"] == 3
    assert found["copy"]["previous_rouge_l_p"]["n"] == 1 and found["copy"]["words"]["value"] == 5.0
    held = read_metrics(out)
    assert held.values["copy", "rouge_l_f"].tolist() == pytest.approx(f)
    assert len(list(csv.reader(out.open()))) == 1 + sum(len(v) for v in held.values.values())
    assert "Written texts" in run(files, "copy", "own")
    raw = json.loads(run(files, "copy", "--raw", "--json"))["systems"]["copy"]
    assert raw["words"]["value"] == 7.0


def test_mistakes(files):
    assert "'copy.jsonl' is not NAME=FILE" in run(files, "copy.jsonl", code=2)
    assert "two systems are called 'copy'" in run(files, "copy", "copy", code=2)
    (files / "own.jsonl").write_text('{"id": "a", "text": "x"}\n{"id": "z", "text": "x"}\n')
    assert "own.jsonl:2: key 'id': is 'z', which is no row of the data." in run(files, "own", code=2)
    (files / "own.jsonl").write_text('{"id": "a", "text": " "}\n')
    assert "own.jsonl:1: key 'text': is empty" in run(files, "own", code=2)


def test_a_text_without_trigrams_has_no_share_of_them():
    """Two words: nothing could be copied or new. In a mean, 0 would stand for a copy."""
    m = measures("Owl sat", {"a": "the owl sat there"})
    assert m["words"] == 2 and m["rouge_l_p"] == 1.0 and m["unique_words_percent"] == 100.0
    assert not {"unique_trigrams_percent", "unseen_trigrams_percent"} & m.keys()
