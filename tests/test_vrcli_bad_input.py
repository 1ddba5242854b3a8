"""Mistakes in the rows of VR-CLI, on every road that reads them: one sentence with the file and the row, exit code 2,
nothing half-written, and what was there stays as it was."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app

ROOT = Path(__file__).parents[1]
ASK, GOLD = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So it was."}
SHAPE = {"family": "llama", "layers": 1, "width": 16, "heads": 2, "context": 1024}
GOOD = [{"messages": [{**ASK, "content": f"Why {k}?"}, {**GOLD, "content": f"So it was {k}."}]} for k in range(4)]
STORY = {"next_chapter": "One two.", "chapter_index": 2, "story_id": "b"}
BAD = {
    "no answer": ({"messages": [ASK, GOLD, ASK]}, "the last message is from 'user'"),
    "only a question": ({"messages": [ASK]}, "message"),
    "no messages": ({"messages": []}, "must be a list that is not empty"),
    "empty gold": ({"messages": [ASK, {**GOLD, "content": "\n "}]}, "the gold text"),
    "story without gold": ({k: v for k, v in STORY.items() if k != "next_chapter"}, "next_chapter"),
    "story with empty gold": ({**STORY, "next_chapter": "  "}, "next_chapter"),
}


def call(*words):
    done = CliRunner().invoke(app, [str(w) for w in words])
    return done.exit_code, " ".join(done.output.split())


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def snapshot(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of good rows, to which nothing may happen."""
    here = tmp_path_factory.mktemp("rows")
    code, said = call("data", "stories", write(here / "rows.jsonl", GOOD), "--out", here / "stories")
    assert code == 0, said
    return here


@pytest.mark.parametrize("name", BAD)
def test_a_row_without_a_gold_text(made, tmp_path, name):
    row, says = BAD[name]
    shutil.copytree(made, tmp_path / "here")
    here = tmp_path / "here"
    rows = write(here / "bad.jsonl", [*GOOD, row] if "messages" in row else [STORY, row])
    line = f"{rows}:{5 if 'messages' in row else 2}"
    before = snapshot(here)
    for out in ("new", "stories"):  # also over the folder that was made from good rows
        code, said = call("data", "stories", rows, "--out", here / out)
        assert code == 2 and line in said and says in said, said
    sft = ["method=sft", f"data={rows}", "trained=last", f"out={here / 'run'}", f"model.shape={json.dumps(SHAPE)}"]
    code, said = call("train", ROOT / "recipes/arith-sft.yaml", *sft[1:])
    assert code == 2 and str(rows) in said and "Traceback" not in said, said
    if "messages" in row:
        assert line in said, said
    assert snapshot(here) == before


def test_a_prompt_over_the_limit(made, tmp_path):
    shutil.copytree(made, tmp_path / "here")
    here = tmp_path / "here"
    long = {"messages": [{**ASK, "content": "word " * 400}, {**GOLD, "content": "A long one."}]}
    rows = write(here / "long.jsonl", [*GOOD, long])
    before = snapshot(here)
    code, said = call("data", "stories", rows, "--out", here / "new", "--max-tokens", 300)
    assert code == 2 and f"{rows}: line 5: the prompt has" in said and "at most 300 are allowed" in said, said
    assert not list((here / "new").glob("*.jsonl")) and before.items() <= snapshot(here).items()
    code, said = call("data", "stories", rows, "--out", here / "new", "--max-tokens", 300, "--drop-long")
    assert code == 0 and "1 with a prompt of more than 300 tokens" in said
    every = "".join((here / f"new/{s}.jsonl").read_text() for s in ("train", "val", "test"))
    assert "A long one" not in every and every.count("So it was") == 4
    test = here / "stories/test.jsonl"
    (row,) = map(json.loads, test.read_text().splitlines())
    code, said = call("improvement", test, "--model", "tiny", "--control", "gold")
    assert code == 0, said  # the prompts of scoring fit
    write(here / "grown.jsonl", [{**row, "information": "word " * 400}])
    out = here / "o.jsonl"
    code, said = call("improvement", here / "grown.jsonl", "--model", "tiny", "--control", "gold", "--out", out)
    assert code == 2 and f"{here / 'grown.jsonl'}: row '{row['id']}' has" in said and not out.exists(), said
    code, said = call("improvement", here / "grown.jsonl", "--model", "tiny", "--reader", "same=tiny")
    assert code == 2 and f"{here / 'grown.jsonl'}: row '{row['id']}' has" in said, said
    code, said = call("improvement", here / "grown.jsonl", "--model", "tiny", "--control", "synopsis")
    assert code == 2 and f"{here / 'grown.jsonl'}: control 'synopsis': row '{row['id']}' has none" in said, said
    write(here / "grown.jsonl", [{**row, "prompt": [{**ASK, "content": "word " * 400}]}])
    code, said = call("write", here / "grown.jsonl", "x=tiny,tiny", "--out", here / "written")
    assert code == 2 and f"{here / 'grown.jsonl'}: row '{row['id']}': the prompt has" in said, said
    assert not list((here / "written").glob("x*"))
    write(here / "grown.jsonl", [{**row, "split": "train", "prompt": [{**ASK, "content": "word " * 400}]}])
    words = [f"data={here / 'grown.jsonl'}", f"task.options.val={here / 'stories/val.jsonl'}", f"out={here / 'run'}"]
    code, said = call("train", ROOT / "recipes/vrcli-laptop.yaml", *words, "steps=1")
    assert code == 2 and f"{here / 'grown.jsonl'}: row '{row['id']}': the prompt has 2019 tokens" in said, said
    assert "the engine holds 1024 with the answer" in said and not list((here / "run").glob("episodes/*"))
    # the policy's prompt fits, and the reader's with a plan does not: told before anything is played
    write(here / "grown.jsonl", [{**row, "split": "train", "information": "word " * 180}])
    code, said = call("train", ROOT / "recipes/vrcli-laptop.yaml", *words, "steps=1", "sampling.max_tokens=200")
    assert code == 2 and f"{here / 'grown.jsonl'}: row '{row['id']}' has " in said, said
    assert "a plan of up to 200 tokens does not fit" in said and not (here / "run/recipe.yaml").exists()
    code, said = call(
        "train", ROOT / "recipes/vrcli-laptop.yaml", *words, "steps=1", "eval.every=0", "prompts_per_step=1", "n=2"
    )
    assert code == 0, said  # a shorter plan does
    # a row of the second file that has no gold text is named with that file
    bare = write(here / "bare.jsonl", [{k: v for k, v in row.items() if k not in ("gold", "split")}])
    words[:2] = [f"data={here / 'stories/train.jsonl'}", f"task.options.val={bare}"]
    code, said = call("train", ROOT / "recipes/vrcli-laptop.yaml", *words[:2], f"out={here / 'other'}", "steps=1")
    assert code == 2 and f"{bare}: row '{row['id']}' has no text 'gold' (reward.gold)" in said, said
    assert not (here / "other/recipe.yaml").exists()
