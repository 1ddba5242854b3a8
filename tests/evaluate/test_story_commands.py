"""`trailmark chapters`, `improvement` and `models`, and the numbers behind them, by plain loops and by hand."""

import json
import random
from itertools import pairwise, product

import numpy as np
import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.errors import DataError, TrailmarkError
from trailmark.methods.vrcli.chapters import clean, common_subsequence, measures, rouge_l, trigrams, words_of
from trailmark.methods.vrcli.commands.chapters import named_files, read_texts
from trailmark.methods.vrcli.plans import CONTROLS, context, control, copied_share, plans_of, read_scored_rows, summary
from trailmark.models import families


def call(*words, code=0):
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def dump(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


# --- chapters ---------------------------------------------------------------------------------------------------------


def test_clean_text_is_a_beginning_and_stays_clean():
    """Every text of up to four paragraphs out of four: cut at the first that was there before, or at the end marker."""
    long = " ".join(f"w{k}" for k in range(10))
    parts = ["One.", "Two lines\nhere.", long, "So <END_OF_CHAPTER> no"]
    for n in range(1, 5):
        for some in product(parts, repeat=n):
            text = "\n\n".join(some)
            want = []
            for part in some:
                head = part.partition("<END")[0].strip()
                if part in want:
                    break
                want.append(head)
                if head != part:
                    break
            assert clean(text) == "\n\n".join(want).strip() == clean(clean(text))
            assert text.startswith(clean(text)) and clean(f"\n{text}\n") == clean(text)


def test_windows_against_a_plain_loop():
    draw = random.Random(3)
    cut = 0
    for size in (2, 3, 12):
        words = [f"v{draw.randrange(size)}" for _ in range(60)] + [f"v{k % size}" for k in range(60)]
        seen, end = [], len(words)
        for k in range(len(words) - 19):
            window = words[k : k + 20]
            again = seen.count(window) + 1
            if again >= 10 or (again > 1 and len(set(window)) <= 10):
                end = k
                break
            seen.append(window)
        assert clean(" ".join(words), windows=True).split() == words[:end]
        cut += end < len(words)
    assert 0 < cut < 3  # twelve different words in turn are no repetition


def test_measures_against_plain_loops():
    draw = random.Random(4)
    for _ in range(20):
        text = " ".join(draw.choice(["The", "hen", "hen,", "flies.", "over\n\n", "it"]) for _ in range(15))
        sections = {"a": "the hen flies over it the hen", "b": "it flies"}
        m, words = measures(text, sections), [w.strip(".,").lower() for w in text.split()]
        grams = [words[k : k + 3] for k in range(len(words) - 2)]
        shown = [s.split()[k : k + 3] for s in sections.values() for k in range(len(s.split()) - 2)]
        different = [g for k, g in enumerate(grams) if g not in grams[:k]]
        assert m["words"] == 15 and m["unique_words"] == len(set(text.split()))
        assert m["unique_trigrams_percent"] == pytest.approx(100 * len(different) / len(grams))
        new = sum(g not in shown for g in different)
        assert m["unseen_trigrams_percent"] == pytest.approx(100 * new / len(different))
        assert m["paragraphs"] == len([x for x in text.split("\n\n") if x.strip()])
        for name, section in sections.items():
            p, r, f = rouge_l(text, section)
            assert (m[f"{name}_rouge_l_p"], m[f"{name}_rouge_l_f"]) == (p, f)
            assert rouge_l(section, text)[:2] == (r, p) and f == pytest.approx(rouge_l(section, text)[2])
            assert p * 15 == pytest.approx(common_subsequence(words, section.split()))
    assert set(measures("", {}).values()) == {0.0} and trigrams(words_of("a b")) == []


def test_names_and_files(tmp_path):
    made = named_files(["a=x.jsonl", "b=y=z.jsonl"], "chapters")
    assert [(name, str(file)) for name, file in made] == [("a", "x.jsonl"), ("b", "y=z.jsonl")]
    for word in ("a", "=x", "a=", "a,b=x"):
        with pytest.raises(TrailmarkError) as error:
            named_files([word], "chapters")
        assert str(error.value) == f"chapters: '{word}' is not NAME=FILE, such as base=base.jsonl."
    path = dump(tmp_path / "t.jsonl", [{"id": 1, "text": "x"}, {"id": "1", "text": " "}])
    assert read_texts(path, {"1": None}, empty=True) == [("1", "x"), ("1", " ")]
    play = {"id": "e/1", "task": {"id": "1"}, "turns": [{"text": "no"}, {"text": "yes"}]}
    assert read_texts(dump(tmp_path / "e.jsonl", [play]), {"1": None}) == [("1", "yes")]
    with pytest.raises(DataError, match=r"t.jsonl:2: key 'text': is empty: there is nothing to measure."):
        read_texts(path, {"1": None})


def test_a_file_of_numbers_is_not_written_over(tmp_path):
    rows = dump(tmp_path / "rows.jsonl", [{"id": "a", "next_chapter": "x", "next_chapter_synopsis": "The hen flies."}])
    own = dump(tmp_path / "own.jsonl", [{"id": "a", "text": "The hen flies. A fox waits."}])
    out = tmp_path / "old.csv"
    out.write_text("kept")
    said = call("chapters", f"own={own}", "--rows", rows, "--out", out, code=2)
    assert "exists: choose another file" in said and out.read_text() == "kept"
    shown = call("chapters", f"own={own}", "--rows", rows)
    assert "own (1)" in shown and "│ words │ 6 [?] │" in shown and "│ synopsis_rouge_l_p │ 0.5 [?] │" in shown


# --- plans ------------------------------------------------------------------------------------------------------------

PIECES = {"plan_heading": "|plan|", "write": "|w", "write_from_plan": "|wp"}


def scored(k, **more):
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "asked"}]
    return {"id": f"r{k}", "prompt": said, "gold": f"gold {k}", "information": f"info {k}", **PIECES, **more}


def test_three_contexts():
    user = lambda plan: context(scored(1), plan)
    assert user(None) == [{"role": "system", "content": "s"}, {"role": "user", "content": "info 1|w"}]
    assert user("")[-1]["content"] == "info 1|wp" and user("{x}")[-1]["content"] == "info 1|plan|{x}|wp"


def test_rows_need_their_pieces(tmp_path):
    path = dump(tmp_path / "r.jsonl", [scored(0), scored(1)])
    assert list(read_scored_rows(path)) == ["r0", "r1"]
    for name in ("gold", *PIECES, "information"):
        bad = scored(1)
        bad[name] = 5
        dump(path, [scored(0), bad])
        with pytest.raises(DataError, match=f"row 'r1' has no '{name}': make the file with `trailmark data stories`."):
            read_scored_rows(path)
    dump(path, [scored(0, prompt="asked")])
    with pytest.raises(DataError, match="the prompt of row 'r0' is no list of messages"):
        read_scored_rows(path)


def test_controls_never_give_a_row_its_own_text():
    rows = {f"r{k}": scored(k, story_id="ab"[k > 2], synopsis=f"s{k}") for k in range(5)}
    book = {row["gold"]: row["story_id"] for row in rows.values()}
    drawn = set()
    for seed in range(30):
        made = control(rows, "other", seed)
        assert [i for i, _ in made] == list(rows) and all(book[t] != rows[i]["story_id"] for i, t in made)
        drawn |= {t for _, t in made}
    assert drawn == set(book)  # every text is drawn at some time
    assert {kind: len(control(rows, kind)) for kind in CONTROLS} == dict.fromkeys(CONTROLS, 5)
    with pytest.raises(DataError, match="control 'other' needs two rows."):
        control({"r0": rows["r0"]}, "other")
    assert plans_of([]) == ([], None)


def test_summaries_of_few_plans():
    rows = {"a": {"information": "one two three four"}}
    made = lambda *values: [{"id": "a", "plan": "one two three", "improvement": v} for v in values]
    assert summary(made(None, None), rows) == {"plans": 2, "invalid": 2}
    about = summary(made(2.0, 4.0, 9.0), rows)
    assert about["length_correlation"] is None and about["copied"] == 1.0 and about["plan_words"] == 3.0
    assert about["percentiles"]["25"] == 3.0 and about["improvement"]["value"] == pytest.approx(5.0)
    for draw in range(5):  # the correlation is that of numpy, and the order of the plans does not matter
        rng = random.Random(draw)
        some = [{"id": "a", "plan": "x " * rng.randint(1, 9), "improvement": rng.random()} for _ in range(6)]
        want = np.corrcoef([len(s["plan"].split()) for s in some], [s["improvement"] for s in some])[0, 1]
        assert summary(some, rows)["length_correlation"] == pytest.approx(want)
        assert summary(some[::-1], rows)["helps"] == 1.0 == summary(some, rows)["helps"]
    assert copied_share("ONE two, three. five six", "one two three four") == pytest.approx(1 / 3)


def test_the_mistakes_of_improvement(tmp_path):
    rows = dump(tmp_path / "rows.jsonl", [scored(0), scored(1)])
    late = dump(tmp_path / "late.jsonl", [{"id": "r1", "text": "x"}])
    ask = lambda *words: call("improvement", rows, *words, "--model", "tiny", code=2)
    assert "has no answer to the first 1 rows of" in ask(f"late={late}", "--n", 1)
    assert "control 'best' is not known: empty, gold, synopsis, other." in ask("--control", "best")
    assert "control 'synopsis': row 'r0' has none." in ask("--control", "synopsis")
    assert "'late' is not NAME=FILE" in ask("late")
    assert "two arms are called 'gold'" in ask("--control", "gold", "--reader", "gold=tiny")
    both = ["--model", "tiny", "--reader", "twin=tiny", "--json"]
    found = json.loads(CliRunner().invoke(app, ["improvement", str(rows), *both]).stdout)["arms"]["twin"]
    assert found["improvement"]["value"] == 0.0 and found["plans"] == 2 and found["reader"] == "tiny"


# --- models -----------------------------------------------------------------------------------------------------------


def test_the_table_of_families(monkeypatch):
    """Two of the families, one of them unknown to transformers."""
    some = {"Llama": families.Family("LlamaConfig", {}), "New": families.Family("NewestConfig", {})}
    monkeypatch.setattr(families, "FAMILIES", some)
    said = call("models")
    assert "checking Llama checking New" in said and "Distance from transformers" in said
    row = next(line for line in said.split("│ Llama")[1:])
    assert row.split("│")[1].strip() == "tree" and "refused" in said and "NewestConfig" in said
    page = CliRunner().invoke(app, ["models", "--markdown"]).stdout
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert lines[0] == "| family | layout | gradient | log-probs | decoding |"
    assert lines[1].startswith("| Llama | tree | ") and lines[1].endswith(" | equal |")
    assert lines[2].startswith("| New | refused | – | – | transformers ")
    assert lines[2].endswith(" has no NewestConfig |")


def test_a_page_by_hand():
    good = families.Checked("F", "tree", 1.23e-9, 3e-13, "equal")
    page = families.markdown([good, families.Checked("G", "", refused="it has sinks")])
    rows = page[page.index("|---") :].splitlines()
    assert rows[1:3] == ["| F | tree | 1.2e-09 | 3.0e-13 | equal |", "| G | refused | – | – | it has sinks |"]
    starts = families.rows()
    shared = [sum(1 for _ in iter_shared(a, b)) for a, b in pairwise(starts)]
    assert shared == [19, 12, 0] and [len(r) for r in starts] == [24, 28, 15, 8]


def iter_shared(a, b):
    for x, y in zip(a, b):
        if x != y:
            return
        yield x
