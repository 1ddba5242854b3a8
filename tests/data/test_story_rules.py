"""The rules behind stories: sentences, names, runs, leaks, splits and lengths, against plain loops."""

import asyncio
import gzip
import json
import lzma
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from trailmark.errors import DataError
from trailmark.methods.vrcli.stories.books import Book, read_books, read_characters
from trailmark.methods.vrcli.stories.leaks import leaked, words_of
from trailmark.methods.vrcli.stories.sentences import common_run, main_names, salient, sentences
from trailmark.methods.vrcli.stories.setup import (
    NO_FILTERS,
    Filters,
    Setup,
    counter,
    report,
    spaced_words,
    split_rows,
    spread,
)
from trailmark.methods.vrcli.stories.writer import CUES, PIECE, PIECES, QUESTIONS, Rules
from trailmark.tasks.stories import prompts as p
from trailmark.tasks.stories.lengths import fit, target_length
from trailmark.tasks.stories.plans import MARKERS, has_marker, plan_of
from trailmark.tasks.stories.rows import StoryRow, TalkRow, content_id

BOOK = {"book": "b", "chapter": 1, "text": "t"}


def text_of(draw, n):
    return " ".join(draw.choice("ab") + draw.choice("xy") for _ in range(n))


def test_common_runs_equal_a_search_of_all_pieces():
    draw = random.Random(0)
    for _ in range(80):
        a, b = ("".join(draw.choices("abc", k=draw.randint(0, 9))) for _ in range(2))
        pieces = [a[i:j] for i in range(len(a)) for j in range(i + 1, len(a) + 1)]
        assert common_run(a, b) == max((len(x) for x in pieces if x in b), default=0) == common_run(b, a)


def test_leaks_equal_a_search_of_all_runs():
    draw = random.Random(1)
    for _ in range(60):
        gold, shown = text_of(draw, draw.randint(3, 12)), text_of(draw, 30)
        words, inside = gold.split(), f" {shown} "
        mine = [f" {' '.join(words[k : k + 3])} " for k in range(len(words) - 2)]
        want = sum(run in inside for run in mine) / len(mine)
        asked = [{"role": "user", "content": shown.upper().replace(" ", ", ")}]  # case and points do not count
        assert leaked(gold, "", asked, 3) == pytest.approx(want)
    assert words_of("It’s 3 o'clock—NOW!") == ["it", "s", "3", "o", "clock", "now"]


def test_salient_sentences_are_in_order_apart_and_as_many_as_asked():
    draw = random.Random(2)
    text = " ".join(f"{draw.choice(('River', 'Mountain', 'Castle'))} number {k} shines brightly." for k in range(15))
    for n in range(6):
        found = salient(text, n)
        assert len(found) == n == len(set(found)) and found == sorted(found) and (not n or found[0] == 0)
        assert all(b - a >= 2 for a, b in pairwise(found))
    synopsis = asyncio.run(Rules(len).synopsis("", text)).removesuffix(" …").split(" … ")
    assert len(synopsis) <= PIECES and all(len(x.split()) <= PIECE and x in text for x in synopsis)


def test_names_keep_their_rank_when_chapters_change_places():
    chapters = ["So Ann met Bob. Then Ann ran, and Bob saw Ann.", "For Bob, Cid was new.", "Here Cid told Ann of Cid."]
    want = main_names(chapters, 3)  # Ann 4 in 2 chapters, Bob 3 in 2, Cid 3 in 2: ties by the alphabet
    assert want == ["Ann", "Bob", "Cid"] == main_names(chapters[::-1], 3)
    assert main_names(chapters, 1) == ["Ann"] and main_names(chapters, 9) == want and main_names([], 2) == []
    assert sentences("He saw Dr. Who. Next!") == ["He saw Dr. Who.", "Next!"]


def test_facts_by_rules_are_sentences_with_a_cue():
    rules = Rules(len)
    ask = lambda question, text: asyncio.run(rules.facts("Ann", question, text))
    assert set(CUES) == set(QUESTIONS)
    for question, cues in CUES.items():
        cue = cues.split()[0]
        assert ask(question, f"Ann zzz. Ann {cue} zzz. Bob {cue} zzz.") == [f"Ann {cue} zzz."]
        assert ask(question, f"Anna {cue} zzz.") == [] == ask(question, "Ann zzz.")
        assert ask(question, f"Ann {cue} " + "z " * 40) == []  # longer than 40 words
    assert asyncio.run(rules.rate("Ann ran.", "So.\nAnn\n ran. Yes.")) == 5
    assert asyncio.run(rules.rate("Ann runs.", "Ann ran.")) == 1 and asyncio.run(rules.simpler("x")) == ["x"]


@pytest.mark.parametrize("by", ["book", "row"])
def test_splits_part_the_rows_whatever_their_order(by):
    name = (lambda r: r.story_id) if by == "book" else (lambda r: r.gold)
    for books in (3, 4, 7, 20, 41):
        rows = [StoryRow(f"{b}-{k}", f"gold {b} {k % 2}", story_id=f"b{b}") for b in range(books) for k in range(3)]
        for shares in ((0.1, 0.1), (0.5, 0.4), (0.9, 0.9), (0.0, 0.0)):
            plan = Setup(by=by, shares=shares, seed=books)
            parts = split_rows(rows, plan, Path("f"))
            assert sorted(r.id for some in parts.values() for r in some) == sorted(r.id for r in rows)
            held = [{name(r) for r in parts[s]} for s in ("train", "val", "test")]
            total = len(set(map(name, rows)))
            assert all(held) and sum(map(len, held)) == total
            if sum(shares) < 0.5:
                assert [len(h) for h in held[1:]] == [max(1, round(s * total)) for s in shares]
            mixed = split_rows(random.Random(0).sample(rows, len(rows)), plan, Path("f"))
            assert [{r.id for r in mixed[s]} for s in mixed] == [{r.id for r in parts[s]} for s in parts]


def test_given_splits_are_read_from_their_names():
    rows = [StoryRow(str(k), f"g{k}", story_id=f"b{k}", split=s, where=f"line {k}")
            for k, s in enumerate(("train", "validation", "hidden_test", "val"))]  # fmt: skip
    ask = lambda some: {s: [r.id for r in x] for s, x in split_rows(some, Setup(by="given"), Path("f")).items()}
    assert ask(rows) == {"train": ["0"], "val": ["1", "3"], "test": ["2"]}
    for some, says in (
        (rows[:2], "f: no row is in split 'test': name one, or let --by book or --by row draw the splits."),
        (rows[:1] + rows[2:3], "f: no row is in split 'val': name one, or let --by book or --by row draw the splits."),
        ([*rows, replace(rows[0], id="x", split="dev", where="line 9")],
         "f: line 9 (id 'x') has split 'dev', and --by given needs train, val or test in each row."),
        ([*rows, replace(rows[0], id="x", split="test", where="line 9")],
         "f: book 'b0' is in train and in test (line 9)."),
    ):  # fmt: skip
        with pytest.raises(DataError) as error:
            ask(some)
        assert str(error.value) == says


def test_counts_and_filters():
    assert spaced_words("a b") == 2 and spaced_words("a  b") == 3 and spaced_words("a\nb") == 1
    assert counter(None)([{"content": "abcd" * 3}, {"content": "é"}]) == 3  # 14 bytes
    assert spread([2, 4, 9]) == {"max": 9, "min": 2, "mean": 5.0, "std": 2.94}
    talk = TalkRow("t", ({"role": "user", "content": "x"},), "short")
    assert NO_FILTERS.refuses(talk, []) == "" and Filters(over=None, previous=1).refuses(talk, []) == ""
    about = {"rows": 2, "books": 0, "prompt": spread([1, 3]), "gold": spread([5, 5]), "leak": 0.0125}
    lines = report({"tokens": "four bytes each", "train": {**about, "books": 2}, "val": about, "test": about})
    assert lines[0] == "tokens: four bytes each"
    assert lines[1] == "train: 2 rows of 2 books; prompt 1–3, mean 2 ± 1; gold 5–5, mean 5 ± 0; largest leak 1.25 %"
    assert lines[2].startswith("val: 2 rows; prompt")


def test_wanted_lengths_are_exact():
    for tokens in range(1, 30_000, 7):
        t = target_length(tokens)
        assert t.words == 100 * -(-375 * tokens // 100_000) and t.words % 100 == 0
        assert t.min_tokens == tokens // 2 and t.max_tokens == -(-3 * tokens // 2)
    with pytest.raises(ValueError, match="a chapter of 0 tokens has no length"):
        target_length(0)


def test_a_cut_row_keeps_as_many_words_as_fit():
    """Against trying every number of words, with a count of characters."""
    row = StoryRow("i", "gold", story_text="one  two\nthree four five six", next_chapter_synopsis="s")
    size = lambda r: sum(len(m["content"]) for m in p.reasoning(p.pieces(r)))
    words = ["", "six", "five six", "four five six", "three four five six", "two\nthree four five six"]
    sizes = [size(row.with_previous(w)) for w in words]
    assert sizes == sorted(sizes)
    for most in range(sizes[0], size(row)):
        want = max(k for k, s in enumerate(sizes) if s <= most)
        assert fit(row, p.Show(), most, lambda m: sum(len(x["content"]) for x in m)).story_text == words[want]
    assert p.last_chapters(True) == p.last_chapters("all") == ("entire story so far", "Entire Story So Far")


def test_plans_hold_no_marker_that_was_cut():
    for first in MARKERS:
        for second in MARKERS:
            answer = f"x {first} y {second} z"
            assert plan_of(answer) == "z" and has_marker(answer) and not has_marker(answer, ["Goal:"])
    assert plan_of("a. Plan: b", ["Plan:"]) == "b"


def test_ids_do_not_depend_on_the_order_of_keys():
    assert content_id({"a": 1, "b": "é"}) == content_id({"b": "é", "a": 1}) != content_id({"a": 1, "b": "e"})
    assert len(content_id("x")) == 16 and int(content_id("x"), 16) >= 0


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_books_in_any_order_and_packing(ending, tmp_path):
    lines = [{**BOOK, "chapter": k, "heading": f" H{k} ", "text": f" text {k}\n"} for k in (3, 1, 2)]
    raw = ("\ufeff" + "".join(json.dumps(r) + "\n\n" for r in lines)).encode()
    path = tmp_path / f"b.jsonl{ending}"
    path.write_bytes({"": lambda x: x, ".gz": gzip.compress, ".xz": lzma.compress}[ending](raw))
    wanted = Book("b", "", ("Ann",), (("H1", "text 1"), ("H2", "text 2"), ("H3", "text 3")))
    assert read_books([path], 1, {"b": ["Ann"]}) == [wanted]
    assert list(wanted.targets(1)) == [1] and not wanted.targets(2)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([{**BOOK, "chapter": True}], "b.jsonl:1: key 'chapter': must be a whole number from 1, not True."),
        ([BOOK, {**BOOK, "chapter": 2, "split": "test"}],
         "b.jsonl:2: key 'split': book 'b' is in split '' and in 'test'."),
        ([BOOK, {**BOOK, "chapter": 4}], "b.jsonl: book 'b' has no chapter 2."),
        (b"\xff\n", "b.jsonl: is not UTF-8 text (byte 0)."),
    ],
)  # fmt: skip
def test_bad_books_are_one_sentence(lines, says, tmp_path):
    path = tmp_path / "b.jsonl"
    path.write_bytes(lines if isinstance(lines, bytes) else "".join(json.dumps(r) + "\n" for r in lines).encode())
    with pytest.raises(DataError) as error:
        read_books([path], 1)
    assert str(error.value) == f"{tmp_path}/{says}"


def test_characters_from_a_file(tmp_path):
    path = tmp_path / "names.json"
    assert read_characters(None) == {}
    path.write_text('{"b": ["Ann", "Bob"]}')
    assert read_characters(path) == {"b": ["Ann", "Bob"]}
    for text in ('["Ann"]', '{"b": []}', '{"b": [""]}', '{"b": [1]}', "{"):
        path.write_text(text)
        with pytest.raises(DataError, match=r"names.json: (must be an object of books|is not JSON)"):
            read_characters(path)
    with pytest.raises(DataError, match="none.json: cannot be read"):
        read_characters(tmp_path / "none.json")


CHINESE = (
    "老猫在河边睡觉，风从山上吹来。小兰说她听见了声音！可是没有人相信她。"
    "天黑了，雨下了一夜。早上路不见了，只有三只鸡知道为什么。"
)


def test_sentences_of_other_scripts():
    assert sentences("Анна ушла. Борис, напр. он, остался! 3 дня спустя он тоже ушёл.") == [
        "Анна ушла.", "Борис, напр. он, остался!", "3 дня спустя он тоже ушёл."]  # fmt: skip
    assert sentences("猫睡了。「雨？」她说。") == ["猫睡了。", "「雨？」", "她说。"]
    assert sentences("قالت ليلى؟ نعم. ثم نامت.") == ["قالت ليلى؟", "نعم.", "ثم نامت."]
    assert sentences("He fell. and rose. _He_ sat.") == ["He fell. and rose. _He_ sat."]  # as before


def test_a_synopsis_by_rules_does_not_copy_a_chapter_without_spaces():
    """A character counts as a word, for the synopsis and for the leak rule."""
    said = asyncio.run(Rules(len).synopsis("", CHINESE))
    pieces = said.removesuffix(" …").split(" … ")
    assert pieces[0] == "老猫在河边睡觉" and len(pieces) > 1 and all(piece in CHINESE for piece in pieces)
    assert all(len(words_of(piece)) <= PIECE for piece in pieces)
    assert leaked(CHINESE, "", [{"role": "user", "content": said}]) == 0


def test_a_missing_chapter_names_the_file_of_its_book(tmp_path):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, book, numbers in zip(files, "ab", [(1, 2), (1, 3)]):
        path.write_text("".join(json.dumps({"book": book, "chapter": k, "text": "x"}) + "\n" for k in numbers))
    with pytest.raises(DataError, match=r"b\.jsonl: book 'b' has no chapter 2"):
        read_books(files, 3)
