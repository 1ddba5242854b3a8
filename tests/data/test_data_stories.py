"""Files to train VR-CLI on: filters at their bounds, lengths, leaks, splits, and a run that trains on them."""

import json
import re

from data_fixtures import rows as lines
from data_fixtures import tree
from typer.testing import CliRunner

from trailmark.chat import render
from trailmark.commands.app import app
from trailmark.config import resolve
from trailmark.methods.online_configs import PolicyGradientRecipe
from trailmark.methods.policy_gradient import PolicyGradientMethod
from trailmark.methods.sft import conversation_samples
from trailmark.methods.vrcli.stories.leaks import leaked, without_header
from trailmark.methods.vrcli.stories.setup import Filters, first_words, spread
from trailmark.models.tiny import tiny_tokenizer
from trailmark.runs.launch import launch
from trailmark.runs.store import read_annotations, read_episodes
from trailmark.tasks.prompts import Prompts
from trailmark.tasks.stories import prompts as p
from trailmark.tasks.stories.rows import StoryRow


def count(n, word="w"):
    return " ".join(f"{word}{k}" for k in range(n))


def story(book, k, size=300, **more):
    return {"story_id": book, "chapter_index": k, "next_chapter_header": f"Chapter {k}", "story_text": count(50, "p"),
            "next_chapter": f"Chapter {k}\n\n" + count(size, f"{book}{k}x"), "prior_plot_summary": "They met.",
            "high_level_plot_summary": "All ends well.", "character_sheets": {"Ann": "Tall."},
            "next_chapter_synopsis": f"Something happens in {book} {k}.", **more}  # fmt: skip


def write(path, made):
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in made))
    return path


def run(rows, out, *words, code=0):
    done = CliRunner().invoke(app, ["data", "stories", str(rows), "--out", str(out), *map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


BOOKS = [story(b, k) for b in "abcdefghij" for k in (2, 3)]
TALKS = [
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Say {k}."},
                  {"role": "assistant", "content": f"It is {k}, then."}]}
    for k in range(5)
]  # fmt: skip


def test_bounds():
    """200 and 201 words, 4999 and 5000, chapters 1 and 2, prompts of 9999 and 10000 words."""
    row = lambda **more: StoryRow("i", more.pop("next_chapter", count(300)), **more)
    short = [{"role": "user", "content": "x"}]
    refuses = lambda r, shown=short: Filters().refuses(r, shown)
    assert refuses(row(next_chapter=count(200))) == "with a gold text of 200 words or fewer"
    assert refuses(row(next_chapter=count(201))) == "" == refuses(row(next_chapter=count(4999)))
    assert refuses(row(next_chapter=count(5000))) == "with a gold text of 5000 words or more"
    assert refuses(row(story_text=count(4999))) == ""
    assert refuses(row(story_text=count(5000))) == "with a previous text of 5000 words or more"
    assert refuses(row(chapter_index=1)) == "before chapter 2" and refuses(row(chapter_index=2)) == ""
    prompt = lambda n: [{"role": "system", "content": "a b"}, {"role": "user", "content": count(n - 2)}]
    assert (
        refuses(row(), prompt(9999)) == "" and refuses(row(), prompt(10000)) == "with a prompt of 10000 words or more"
    )
    assert refuses(row(next_chapter="a  b" + " x" * 198)) == ""  # two spaces: an empty word between them, 201 in all


def test_files_of_stories(tmp_path):
    made = [*BOOKS, story("a", 1), story("b", 9, size=150)]
    said = run(write(tmp_path / "rows.jsonl", made), tmp_path / "out")
    assert "setup: 16 train rows, 2 val rows, 2 test rows" in said
    assert "1 before chapter 2; 1 with a gold text of 200 words or fewer" in said
    books = {}
    for split in ("train", "val", "test"):
        for row in lines(tmp_path / f"out/{split}.jsonl"):
            assert row["split"] == split and books.setdefault(row["story_id"], split) == split
            assert [m["role"] for m in row["prompt"]] == ["system", "user"]
            body = row["gold"].split("\n\n")[1]
            assert body not in row["prompt"][1]["content"] and body.split()[0] not in row["prompt"][1]["content"]
            assert (
                row["prompt"][1]["content"].startswith(row["information"])
                and row["header"] == row["gold"].split("\n")[0]
            )
    assert sorted(books) == list("abcdefghij")
    first, tuned = lines(tmp_path / "out/train.jsonl")[0], lines(tmp_path / "out/sft_train.jsonl")[0]
    assert tuned["id"] == first["id"]
    assert tuned["messages"] == [
        first["prompt"][0], {"role": "user", "content": first["information"] + first["write"]},
        {"role": "assistant", "content": first["gold"]},
    ]  # fmt: skip
    about = json.loads((tmp_path / "out/statistics.json").read_text())
    sizes = [sum(len(m["content"].encode()) for m in r["prompt"]) // 4 for r in lines(tmp_path / "out/val.jsonl")]
    assert about["val"]["prompt"] == spread(sizes) and about["val"]["rows"] == 2 and about["val"]["books"] == 1
    assert spread([1, 3]) == {"max": 3, "min": 1, "mean": 2.0, "std": 1.0}


def test_the_same_seed_gives_the_same_bytes_and_the_order_of_rows_does_not_move_a_book(tmp_path):
    rows = write(tmp_path / "rows.jsonl", BOOKS)
    run(rows, tmp_path / "a")
    run(rows, tmp_path / "b")
    run(write(tmp_path / "turned.jsonl", BOOKS[::-1]), tmp_path / "c")
    run(rows, tmp_path / "d", "--seed", 1)
    data = lambda name: {
        k: v for k, v in tree(tmp_path / name).items() if k.endswith(".jsonl") or k == "statistics.json"
    }
    books = lambda name: [
        {r["story_id"] for r in lines(tmp_path / name / f"{s}.jsonl")} for s in ("train", "val", "test")
    ]
    assert data("a") == data("b") and len(data("a")) == 7
    assert books("a") == books("c") != books("d")
    before = tree(tmp_path / "a", (".lock",))
    assert "setup: 16 train rows" in run(rows, tmp_path / "a") and tree(tmp_path / "a", (".lock",)) == before


def test_splits_are_never_empty(tmp_path):
    five = write(tmp_path / "five.jsonl", TALKS)
    assert "setup: 3 train rows, 1 val rows, 1 test rows" in run(five, tmp_path / "five")
    two = write(tmp_path / "two.jsonl", [story(b, k) for b in "ab" for k in (2, 3)])
    said = run(two, tmp_path / "two", code=2)
    assert (
        "two.jsonl: has 2 books after the filters, and each of the three splits needs one. Split with --by row" in said
    )
    assert not list((tmp_path / "two").rglob("*.jsonl"))
    run(two, tmp_path / "two", "--by", "row")
    assert [len(lines(tmp_path / f"two/{s}.jsonl")) for s in ("train", "val", "test")] == [2, 1, 1]
    twins = write(tmp_path / "twins.jsonl", [{**TALKS[0], "id": str(k)} for k in range(4)])
    assert "has 1 different rows" in run(twins, tmp_path / "twins", code=2)


def test_given_splits(tmp_path):
    made = [story(b, k, split="visible_test" if b == "j" else "train") for b in "abcj" for k in (2, 3)]
    run(write(tmp_path / "rows.jsonl", made), tmp_path / "out", "--by", "given")
    found = [{r["story_id"] for r in lines(tmp_path / f"out/{s}.jsonl")} for s in ("train", "val", "test")]
    assert found[2] == {"j"} and len(found[0]) == 2 and len(found[1]) == 1 and found[0] | found[1] == set("abc")
    torn = [{**made[0], "split": "val"}, *made[1:]]
    said = run(write(tmp_path / "torn.jsonl", torn), tmp_path / "torn", "--by", "given", code=2)
    assert "book 'a' is in train and in val (line 1)" in said
    other = run(write(tmp_path / "odd.jsonl", [story("a", 2, split="dev")]), tmp_path / "odd", "--by", "given", code=2)
    assert "line 1" in other and "has split 'dev'" in other


def test_long_prompts_keep_the_synopsis_and_the_end_of_the_previous_chapter(tmp_path):
    """Three times too long for 400 tokens; the tokenizer counts with its chat template."""
    made = [story(b, 2, story_text=count(800, "p")) for b in "abc"]
    said = run(write(tmp_path / "rows.jsonl", made), tmp_path / "out", "--max-tokens", 2000, "--tokenizer", "tiny")
    assert "3 prompts cut" in said
    tok = tiny_tokenizer()
    for row in lines(tmp_path / "out/train.jsonl"):
        size = len(render(tok, row["prompt"], generation_prompt=True).tokens)
        user = row["prompt"][1]["content"]
        assert 2000 - 5 <= size <= 2000 and user.endswith(p.REASON)
        assert f"Something happens in {row['story_id']} 2." in user and "All ends well." in user
        before = user.split("### Most Recent Chapter ###\n")[1].split("\n\n")[0].split()
        assert before == count(800, "p").split()[-len(before) :] and 10 < len(before) < 800
    said = run(tmp_path / "rows.jsonl", tmp_path / "none", "--max-tokens", 100, code=2)
    assert "rows.jsonl: line 1: the prompt has" in said and "without the previous chapter, and at most 100 are" in said
    left = run(tmp_path / "rows.jsonl", tmp_path / "left", "--max-tokens", 100, "--drop-long", code=2)
    assert "no row is left (left out: 3 with a prompt of more than 100 tokens)" in left


def test_gold_texts_are_cut_after_the_filters(tmp_path):
    text = "\na  b\n\nc d "
    assert [first_words(text, n) for n in (1, 3, 4, 9)] == ["\na", "\na  b\n\nc", text, text]
    run(write(tmp_path / "rows.jsonl", [*BOOKS, story("k", 4, 100)]), tmp_path / "whole")
    said = run(tmp_path / "rows.jsonl", tmp_path / "out", "--gold-words", 5)
    assert "20 gold texts cut" in said and "1 with a gold text of 200 words or fewer" in said
    for split in ("train", "val", "test"):
        whole, short = (lines(tmp_path / f"{folder}/{split}.jsonl") for folder in ("whole", "out"))
        for a, b in zip(whole, short, strict=True):
            name = f"{a['story_id']}{a['chapter_index']}"
            assert b == {**a, "gold": f"Chapter {a['chapter_index']}\n\n{name}x0 {name}x1 {name}x2"}
        imitated = [r["messages"][-1]["content"] for r in lines(tmp_path / f"out/sft_{split}.jsonl")]
        assert imitated == [r["gold"] for r in short]
    assert json.loads((tmp_path / "whole/settings.json").read_text())["gold_words"] is None
    talks = write(tmp_path / "talks.jsonl", TALKS)
    run(talks, tmp_path / "talks", "--gold-words", 3)
    assert all(re.fullmatch(r"It is \d+,", r["gold"]) for r in lines(tmp_path / "talks/train.jsonl"))


def test_leaks_by_hand():
    talk = lambda text: [{"role": "user", "content": text}]
    gold = "Two\n\n" + count(17)  # ten runs of eight words
    assert without_header(gold, "Two ") == "\n\n" + count(17) and without_header("Twofold", "") == "Twofold"
    assert leaked(gold, "Two", talk("Two")) == 0.0
    assert leaked(gold, "Two", talk("so: W0, w1; w2 w3 w4 w5 w6 w7.")) == 0.1
    assert leaked(gold, "Two", talk("w0 w1 w2 w3 w4 w5 w6")) == 0.0
    assert leaked(gold, "Two", [*talk("a"), *talk(count(17))]) == 1.0
    assert (
        leaked("Hen who?", "", talk("Knock.\nhen who\n")) == 1.0
        and leaked("Hen who?", "", talk("Hen who? he said")) == 0.0
    )
    assert leaked("To the side.", "", talk("It went to the side, then?")) == 1.0
    assert leaked("To the side.", "", [*talk("It went to"), *talk("the side")]) == 0.0
    # scripts without spaces: each character is a word, so a copied sentence in a line is found
    assert leaked("他走了很久，然后回家了。", "", talk("问：他走了很久，然后回家了。为什么？")) == 1.0
    assert leaked("他走了很久，然后回家了。", "", talk("问：他走了很久，后来呢？")) == 0.0
    assert leaked("家へ帰った", "", talk("彼は家へ帰ったのだ")) == 1.0
    assert leaked("日本 Tokyo", "", talk("日本 tokyo?")) == 1.0


def test_a_leak_stops_the_build(tmp_path):
    bad = story("a", 2)
    bad["next_chapter_synopsis"] = " ".join(bad["next_chapter"].split()[2:30])
    rows = write(tmp_path / "rows.jsonl", [*BOOKS[1:], bad])
    said = run(rows, tmp_path / "out", code=2)
    assert (
        "rows.jsonl: line 20 (id '" in said and "7.2 % of the gold text's runs of 8 words stand in its prompt" in said
    )
    assert "it is in 1 of 20 rows" in said  # 28 copied words are 21 of 293 runs
    assert "left out: 1 with more than 2 % of the gold text in the prompt" in run(
        rows, tmp_path / "out", "--drop-leaks"
    )
    about = run(rows, tmp_path / "more", "--leak", 0.1)
    assert "largest leak 7.17 %" in about


def test_switches(tmp_path):
    rows = write(tmp_path / "rows.jsonl", BOOKS)
    run(rows, tmp_path / "out", "--no-system-role", "--no-sheets", "--no-synopsis", "--identical")
    for row in lines(tmp_path / "out/test.jsonl"):
        (user,) = row["prompt"]
        assert "Ann" not in user["content"] and "Something happens" not in user["content"]
        assert row["write"] == row["write_from_plan"]
    assert [m["role"] for m in lines(tmp_path / "out/sft_test.jsonl")[0]["messages"]] == ["user", "assistant"]


def test_mistakes_are_one_sentence(tmp_path):
    rows = write(tmp_path / "rows.jsonl", BOOKS)
    assert "--by 'author' is not known" in run(rows, tmp_path / "o", "--by", "author", code=2)
    talks = write(tmp_path / "talks.jsonl", TALKS)
    assert "line 1 (id '" in run(talks, tmp_path / "o", "--by", "book", code=2)
    bad = write(tmp_path / "bad.jsonl", [*TALKS, {"messages": TALKS[0]["messages"][:2]}])
    assert "bad.jsonl:6: key 'messages': the last message is from 'user'" in run(bad, tmp_path / "o", code=2)
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").glob("*.jsonl"))


def test_a_run_trains_on_the_files_as_they_lie(tmp_path):
    """Talks: two steps of GRPO, evaluated on val; test is not read. Only the gold text of the SFT file is trained."""
    run(write(tmp_path / "rows.jsonl", TALKS), tmp_path / "out")
    val = [r["id"] for r in lines(tmp_path / "out/val.jsonl")]
    shape = {"layers": 1, "width": 16, "heads": 2, "context": 1024}
    config = resolve(
        {
            "method": "policy_gradient", "data": str(tmp_path / "out/train.jsonl"), "out": str(tmp_path / "run"),
            "task": {"options": {"val": str(tmp_path / "out/val.jsonl")}}, "steps": 1, "prompts_per_step": 2, "n": 2,
            "model": {"name": "tiny", "shape": shape}, "sampling": {"max_tokens": 4},
            "engine": {"max_num_seqs": 4, "max_len": 1024}, "eval": {"every": 1, "split": "val", "n": 8},
            "checkpoint": {"every": 1},
            "reward": {"kind": "likelihood", "context": p.CONTEXT, "plan": p.PLAN, "empty": p.EMPTY,
                       "markers": ["In summary:"], "reward": "linear"},
        },
        PolicyGradientRecipe,
    )  # fmt: skip
    launch(PolicyGradientMethod, config)
    episodes = list(read_episodes(tmp_path / "run/episodes"))
    assert len(episodes) == 4 and not {e.task.id for e in episodes} & set(val)
    evaluated = {e.task.id for e in read_episodes(tmp_path / "run/evaluation")}
    assert evaluated == set(val)
    assert len(list(read_annotations(tmp_path / "run/annotations/improvement"))) == 4
    tok = tiny_tokenizer()
    for (sample,), row in zip(conversation_samples(tok, str(tmp_path / "out/sft_train.jsonl"), True, 1024),
                              lines(tmp_path / "out/train.jsonl")):  # fmt: skip
        trained = [int(t) for t, w in zip(sample.tokens, sample.streams["weight"]) if w]
        assert tok.decode(trained) == row["gold"] + "<|im_end|>"
    assert len(Prompts(str(tmp_path / "out/test.jsonl")).tasks("test")) == 1
