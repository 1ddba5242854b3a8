"""Scores of plans against a plain forward pass, controls, and the summary by hand."""

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig
from trailmark.errors import DataError
from trailmark.methods.vrcli.plans import (
    beside,
    context,
    control,
    copied_share,
    plans_of,
    read_scored_rows,
    score_plans,
    score_reader,
    summary,
)
from trailmark.models.load import load_model
from trailmark.score.likelihood import TextScorer
from trailmark.stats.intervals import mean_of

TALKS = [("Why?", "Because of the rain."), ("Who?", "It was the old hen."), ("When?", "Long before the dawn."),
         ("Where?", "Under the stone bridge.")]  # fmt: skip


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def rows(tmp_path):
    said = [{"id": f"r{k}", "messages": [{"role": "user", "content": x}, {"role": "assistant", "content": y}]}
            for k, (x, y) in enumerate(TALKS)]  # fmt: skip
    words = ["data", "stories", str(write(tmp_path / "talks.jsonl", said)), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    parts = [tmp_path / f"out/{s}.jsonl" for s in ("train", "val", "test")]
    return write(tmp_path / "rows.jsonl", [json.loads(x) for part in parts for x in part.read_text().splitlines()])


@pytest.fixture(scope="module")
def scorer():
    shape = {"layers": 1, "width": 16, "heads": 2, "context": 128}
    return TextScorer(
        load_model(ModelConfig.model_validate({"name": "tiny", "shape": shape, "dtype": "float64"})).freeze()
    )


def perplexity(lm, user, gold):
    """The gold text and the end of its turn, by a plain forward pass."""
    head = lm.tokenizer.encode(f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n")
    tail = lm.tokenizer.encode(f"{gold}<|im_end|>")
    with torch.no_grad():
        logp = lm.base(input_ids=torch.tensor([head + tail])).logits[0].log_softmax(-1)
    return math.exp(-np.mean([float(logp[len(head) + k - 1, t]) for k, t in enumerate(tail)]))


def test_scores_equal_a_plain_loop(rows, scorer):
    found = read_scored_rows(rows)
    made = score_plans(scorer, found, [(i, "It {rains}.") for i in found])
    asked = {row["gold"]: row["information"] for row in found.values()}
    assert asked == {y: x for x, y in TALKS} and [m["id"] for m in made] == list(found)
    for m in made:
        gold = found[m["id"]]["gold"]
        base = perplexity(scorer.lm, asked[gold], gold)
        now = perplexity(scorer.lm, f"{asked[gold]}\n\n### Detailed Plan ###\nIt {{rains}}.", gold)
        assert m["baseline_ppl"] == pytest.approx(base, abs=1e-9) and m["ppl"] == pytest.approx(now, abs=1e-9)
        assert m["improvement"] == pytest.approx(100 * (base - now) / base, abs=1e-9) and m["improvement"] != 0
        assert m["tokens"] == len(scorer.lm.tokenizer.encode(gold)) + 1


def test_another_reader_against_a_plain_loop(rows, scorer):
    """A model that reads without a plan is compared with the scorer's own reading; itself improves by nothing."""
    found = read_scored_rows(rows)
    shape = {"layers": 1, "width": 16, "heads": 2, "context": 128}
    settings = {"name": "tiny", "shape": shape, "dtype": "float64", "seed": 5}
    reader = TextScorer(load_model(ModelConfig.model_validate(settings)).freeze())
    made = score_reader(scorer, reader, found)
    assert [m["id"] for m in made] == list(found)
    for m in made:
        row = found[m["id"]]
        base, now = (perplexity(x.lm, row["information"], row["gold"]) for x in (scorer, reader))
        assert m["improvement"] == pytest.approx(100 * (base - now) / base, abs=1e-9) and m["improvement"] != 0
    assert [m["improvement"] for m in score_reader(scorer, scorer, found)] == [0.0] * 4
    reader.lm.tokenizer.chat_template = reader.lm.tokenizer.chat_template.replace("<|im_end|>", "<|im_end|> ")
    with pytest.raises(DataError, match=f"tiny reads row '{next(iter(found))}' in other tokens than tiny"):
        score_reader(scorer, reader, found)


def test_an_empty_plan_improves_by_exactly_nothing(rows, scorer):
    found = read_scored_rows(rows)
    made = score_plans(scorer, found, control(found, "empty"))
    assert [m["improvement"] for m in made] == [0.0] * 4
    assert summary(made, found)["improvement"]["value"] == 0.0 and summary(made, found)["helps"] == 0.0


def test_controls(rows):
    found = read_scored_rows(rows)
    assert control(found, "gold") == [(i, found[i]["gold"]) for i in found]
    other = control(found, "other", seed=3)
    assert [i for i, _ in other] == list(found) and all(plan != found[i]["gold"] for i, plan in other)
    assert other == control(found, "other", seed=3)
    books = {k: {**row, "story_id": "ab"[n % 2], "synopsis": f"s{n}"} for n, (k, row) in enumerate(found.items())}
    names = {row["gold"]: row["story_id"] for row in books.values()}
    assert all(names[plan] != books[i]["story_id"] for i, plan in control(books, "other"))
    assert [plan for _, plan in control(books, "synopsis")] == ["s0", "s1", "s2", "s3"]
    for kind, says in (("synopsis", "has none"), ("best", "is not known: empty, gold")):
        with pytest.raises(DataError, match=says):
            control(found, kind)


def test_the_summary_by_hand():
    rows = {"a": {"information": "the hen flies over the hill"}, "b": {"information": "rain falls"}}
    made = [{"id": "a", "plan": "the hen flies", "improvement": 1.0},
            {"id": "a", "plan": "the hen flies away now", "improvement": 3.0},
            {"id": "b", "plan": "", "improvement": -2.0},
            {"id": "b", "plan": "x", "improvement": None}]  # fmt: skip
    about = summary(made, rows)
    assert about["plans"] == 4 and about["invalid"] == 1 and about["helps"] == pytest.approx(2 / 3)
    assert about["improvement"] == mean_of([1.0, 3.0, -2.0], ["a", "a", "b"]).plain()
    assert about["percentiles"]["50"] == 1.0 and about["plan_words"] == pytest.approx(8 / 3)
    # words 3, 5, 0 and improvements 1, 3, -2: both are 8/3 and 2/3 plus (1, 7, -8)/3
    assert about["length_correlation"] == pytest.approx(1.0)
    assert about["copied"] == pytest.approx((1 + 1 / 3) / 2)  # the empty plan has no trigram
    assert copied_share("Rain, falls", "rain falls") is None
    assert plans_of([("a", "x In summary: y"), ("b", "z")]) == ([("a", "y"), ("b", "z")], 0.5)


def test_the_command(rows, tmp_path):
    found = read_scored_rows(rows)
    answers = write(
        tmp_path / "rl.jsonl", [{"id": i, "text": f"Thoughts. In summary: {found[i]['gold']}"} for i in found]
    )
    words = ["improvement", str(rows), f"rl={answers}", "--model", "tiny", "--control", "gold", "--control", "empty"]
    cache = tmp_path / "likelihoods.jsonl"
    run = lambda *more: CliRunner().invoke(app, [*words, "--cache", str(cache), *more])
    done = run("--json", "--out", str(tmp_path / "scores.jsonl"))
    assert done.exit_code == 0, done.output
    arms = json.loads(done.output)["arms"]
    assert arms["rl"]["improvement"] == arms["gold"]["improvement"] and arms["rl"]["markers"] == 1.0
    assert arms["gold"]["markers"] is None and arms["empty"]["improvement"]["value"] == 0.0
    scores = [json.loads(x) for x in (tmp_path / "scores.jsonl").read_text().splitlines()]
    others = [f"rl/{name}" for name in ("other_plan", "random_words", "empty")]
    assert [s["arm"] for s in scores] == [arm for arm in ("rl", *others, "gold", "empty") for _ in range(4)]
    stored = cache.read_text()
    assert len(stored.splitlines()) == 16  # baselines; as plan the gold text, another row's, random words
    assert "95 % interval, low" in run().output and cache.read_text() == stored
    for more, says in (
        (["--control", "rl"], "two arms are called 'rl'"), (["--tokens", "all"], "--tokens 'all' is not known"),
        (["--out", str(answers)], "exists: choose another file"),
    ):  # fmt: skip
        bad = run(*more)
        assert bad.exit_code == 2 and says in bad.output
    none = CliRunner().invoke(app, ["improvement", str(rows), "--model", "tiny"])
    assert none.exit_code == 2 and "name a file of answers" in none.output


def test_rows_that_cannot_be_scored(rows, scorer, tmp_path):
    bare = write(tmp_path / "bare.jsonl", [{"id": "q", "prompt": "x", "gold": "y"}])
    with pytest.raises(DataError, match=r"bare.jsonl: row 'q' has no 'information'"):
        read_scored_rows(bare)
    found = read_scored_rows(rows)
    first = next(iter(found))
    with pytest.raises(
        DataError, match=rf"row '{first}' has \d+ tokens with its plan and gold text, and the model reads 128"
    ):
        score_plans(scorer, found, [(first, "x " * 200)])
    assert context(found[first], None) == context(found[first], "")


def test_every_arm_stands_beside_other_rows_plans_random_words_and_no_plan(rows, scorer, tmp_path):
    """Each number again from the scores of the texts themselves."""
    found = read_scored_rows(rows)
    twice = [{"id": i, "text": f"In summary: {word} {found[i]['gold']}"} for i in found for word in ("Once", "Twice")]
    answers, scores = write(tmp_path / "rl.jsonl", twice), tmp_path / "scores.jsonl"
    call = lambda *more: CliRunner().invoke(app, ["improvement", str(rows), f"rl={answers}", "--model", "tiny", *more])
    done = call("--json", "--control", "gold", "--out", str(scores))
    assert done.exit_code == 0, done.output
    arms = json.loads(done.output)["arms"]
    made: dict[str, list[dict]] = {}
    for line in map(json.loads, scores.read_text().splitlines()):
        made.setdefault(line["arm"], []).append(line)
    assert set(made) == {"rl", "rl/other_plan", "rl/random_words", "rl/empty", "gold"}
    mean = lambda arm, row=None: np.mean([s["improvement"] for s in made[arm] if row in (None, s["id"])])
    for name in ("other_plan", "random_words", "empty"):
        assert arms["rl"][f"{name}_improvement"] == pytest.approx(mean(f"rl/{name}"), abs=1e-12)
        assert f"{name}_improvement" not in arms["gold"] and len(made[f"rl/{name}"]) == 8
    gaps = [mean("rl", i) - mean("rl/other_plan", i) for i in found]  # one gap a row, however many plans it has
    assert arms["rl"]["own_plan_gain"] == pytest.approx(np.mean(gaps), abs=1e-12)
    half = 3.182 * np.std(gaps, ddof=1) / 2
    assert arms["rl"]["own_plan_gain_high"] - np.mean(gaps) == pytest.approx(half, rel=0.02)
    for own, other in zip(made["rl"], made["rl/other_plan"]):
        assert own["id"] == other["id"] and own["plan"].split()[1:] != other["plan"].split()[1:]
    for own, words in zip(made["rl"], made["rl/random_words"]):
        assert set(words["plan"].split()) <= set(found[own["id"]]["information"].lower().strip("?").split())
    said = call()
    for line in ("mean, plan of another row", "random words of the prompt", "own above another row's"):
        assert line in said.output, said.output
    one = json.loads(call("--n", "1", "--json").output)["arms"]["rl"]
    assert "own_plan_gain" not in one  # one row has no other


def test_a_plan_that_is_too_long_for_another_row_is_left_out_there(rows, scorer):
    found = read_scored_rows(rows)
    long = next(iter(found))
    found[long] |= {"information": "x" * 60}
    plans = [(i, "y" if i == long else "z" * 50) for i in found]
    told, made = beside(scorer, found, score_plans(scorer, found, plans))
    assert len(made["other_plan"]) == 3 and long not in {s["id"] for s in made["other_plan"]}
    assert {"other_plan_improvement", "own_plan_gain_low"} <= set(told)


def test_the_command_warns_where_another_rows_plan_does_as_well(rows, tmp_path, monkeypatch):
    """A reader whom any text helps, whatever it says."""
    from trailmark.score.likelihood import Likelihood

    read = lambda self, pairs, *_: [Likelihood(-2.0 if "###" in said[-1]["content"] else -4.0, 4) for said, _ in pairs]
    monkeypatch.setattr(TextScorer, "likelihoods", read)
    found = read_scored_rows(rows)
    answers = write(tmp_path / "rl.jsonl", [{"id": i, "text": f"In summary: {i}"} for i in found])
    done = CliRunner().invoke(app, ["improvement", str(rows), f"rl={answers}", "--model", "tiny"])
    assert done.exit_code == 0, done.output
    said = "warning: rl: the plan of another row improves the gold texts by 39.3 %, the row's own by 39.3 %"
    assert said in done.output
