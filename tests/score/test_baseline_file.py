"""A file of baselines: by id, resumable, and refused where it does not belong."""

import asyncio
import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig
from trailmark.errors import DataError
from trailmark.methods.vrcli.baselines import BaselineFile, BaselineRow
from trailmark.methods.vrcli.config import LikelihoodJudgeConfig
from trailmark.methods.vrcli.judge import LikelihoodJudge
from trailmark.models.load import load_model
from trailmark.score.likelihood import TextScorer
from trailmark.tasks import with_judge
from trailmark.tasks.prompts import Prompts

SHAPE = {"layers": 1, "width": 32, "heads": 2, "context": 1024}
SYSTEM = {"role": "system", "content": "Be brief."}
RECIPE = str(Path(__file__).parents[2] / "recipes/vrcli-laptop.yaml")


def model(**more):
    return load_model(ModelConfig.model_validate({"name": "tiny", "shape": SHAPE, **more})).freeze()


@pytest.fixture(scope="module")
def lm():
    return model()


def rows(system=True, gold="They went home."):
    said = [SYSTEM] if system else []
    return [BaselineRow(f"r{k}", [*said, {"role": "user", "content": f"Story {k}."}], gold) for k in range(4)]


def test_it_is_keyed_by_id_and_goes_on(tmp_path, lm):
    path, scorer = tmp_path / "b.jsonl", TextScorer(lm)
    first = BaselineFile(path, scorer)
    first.get(rows()[:2])
    assert first.computed == 2
    with path.open("a") as file:
        file.write('{"id": "r2", "baseline_n')  # the process was killed here
    second = BaselineFile(path, TextScorer(lm))
    found = second.get(list(reversed(rows())))
    assert second.computed == 2 and BaselineFile(path, TextScorer(lm)).get(rows()) == found[::-1]
    want = scorer.likelihoods([(r.context, r.gold) for r in rows()])
    assert [f.logp for f in found[::-1]] == pytest.approx([w.logp for w in want], abs=1e-5)
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert head["id"] is None and [x["id"] for x in lines] == ["r0", "r1", "r3", "r2"]
    for line in lines:
        k = int(line["id"][1:])
        assert line["baseline_nll"] == pytest.approx(want[k].nll, abs=1e-6)
        assert line["baseline_ppl"] == pytest.approx(want[k].perplexity, rel=1e-6)
        assert line["n_scored_tokens"] == want[k].tokens


def test_another_model_or_rule_is_named(tmp_path, lm):
    path = tmp_path / "b.jsonl"
    BaselineFile(path, TextScorer(lm)).get(rows())
    before = path.read_bytes()
    template = model()
    template.tokenizer.chat_template = template.tokenizer.chat_template.replace("\n", "\n\n")
    longer = model()
    longer.tokenizer.add_tokens(["home"])
    for scorer, rule, said in (
        (model(seed=1), "turn", r"another model \(\w+, now \w+\)"),
        (model(dtype="float64"), "turn", "another model|another dtype"),
        (longer, "turn", "another tokenizer"),
        (template, "turn", "another chat template"),
        (lm, "text", r"another rule of scored tokens \(turn, now text\)"),
    ):
        with pytest.raises(DataError, match=rf"b.jsonl: these baselines are of {said}.*name another file of baselines"):
            BaselineFile(path, TextScorer(scorer), rule)
    assert path.read_bytes() == before


def test_another_row_is_named(tmp_path, lm):
    path = tmp_path / "b.jsonl"
    file = BaselineFile(path, TextScorer(lm))
    file.get(rows())
    before = path.read_bytes()
    moved = [BaselineRow("r0", rows()[1].context, rows()[1].gold)]
    for now, said in (
        (rows(gold="Nobody went."), r"row 'r0' has another gold text .*: the data set is another one"),
        (rows(system=False), r"row 'r0' is without a system message, and its baseline was computed with one"),
        (moved, r"row 'r0' has another prompt than when its baseline was computed"),
    ):
        with pytest.raises(DataError, match=f"b.jsonl: {said}"):
            file.get(now)
    assert path.read_bytes() == before
    BaselineFile(tmp_path / "c.jsonl", TextScorer(lm)).get(rows(system=False))
    with pytest.raises(DataError, match="row 'r0' is with a system message, and its baseline was computed without one"):
        BaselineFile(tmp_path / "c.jsonl", TextScorer(lm)).get(rows())


def test_a_baseline_over_other_tokens_is_refused(tmp_path, lm):
    """Such as one that was computed when the gold text was encoded in another way."""
    data = [{"id": f"r{k}", "prompt": [{"role": "user", "content": f"Story {k}."}], "gold": "Home."} for k in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in data))
    judge = LikelihoodJudge(LikelihoodJudgeConfig(baselines=str(tmp_path / "b.jsonl")), lm)
    with_judge(source := Prompts(str(tmp_path / "rows.jsonl"), test=0), judge)
    judge.keep(tmp_path)
    plays = [judge._as_play(None, t) for t in source.rows]
    assert all(v.outcome.reward == 0.0 for v in asyncio.run(judge.judge(plays)))
    lines = [json.loads(x) for x in (tmp_path / "b.jsonl").read_text().splitlines()]
    n = lines[2]["n_scored_tokens"] - 1
    nll = -lines[2]["logp"] / n
    lines[2] |= {"n_scored_tokens": n, "baseline_nll": nll, "baseline_ppl": math.exp(nll)}
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    again = LikelihoodJudge(LikelihoodJudgeConfig(baselines=str(tmp_path / "b.jsonl")), lm)
    again.bind(source)
    said = r"b.jsonl: the baseline of row 'r1' is over 5 tokens, and its gold text now has 6: use the one"
    with pytest.raises(DataError, match=said):
        asyncio.run(again.judge(plays))


def test_a_file_of_something_else(tmp_path, lm):
    (tmp_path / "b.jsonl").write_text('{"id": "r0", "text": "an answer"}\n')
    with pytest.raises(DataError, match="b.jsonl: is no file of baselines"):
        BaselineFile(tmp_path / "b.jsonl", TextScorer(lm))
    (tmp_path / "c.jsonl").write_text('{"key": 1}\n')
    with pytest.raises(DataError, match="c.jsonl:1: is no line of this file"):
        BaselineFile(tmp_path / "c.jsonl", TextScorer(lm))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"logp": math.nan}, "'logp' must be a number, not nan"),
        ({"logp": "low"}, "'logp' must be a number, not 'low'"),
        ({"logp": None}, "'logp' must be a number, not None"),
        ({"logp": True}, "'logp' must be a number, not True"),
        ({"logp": 3.0}, "'logp' is 3.0: the log-probability of a text is finite and not above 0"),
        ({"logp": -math.inf}, "'logp' is -inf"),
        ({"baseline_nll": 0.5}, "'baseline_nll' is 0.5, and -logp / n_scored_tokens is"),
        ({"baseline_ppl": 1.5}, "'baseline_ppl' is 1.5, and the perplexity of 'baseline_nll' is"),
        ({"baseline_ppl": "10.1"}, "'baseline_ppl' must be a number, not '10.1'"),
        ({"n_scored_tokens": 0}, "'n_scored_tokens' must be a whole number from 1 on, not 0"),
        ({"n_scored_tokens": 5.5}, "'n_scored_tokens' must be a whole number from 1 on, not 5.5"),
        ({"id": 7}, "its id must be a text"),
    ],
)
def test_a_baseline_that_cannot_be_is_refused_with_its_line(tmp_path, lm, stored, change, why):
    path = tmp_path / "b.jsonl"
    lines = [json.loads(x) for x in stored.splitlines()]
    lines[2] |= change
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    with pytest.raises(DataError) as found:
        BaselineFile(path, TextScorer(lm))
    said = str(found.value)
    assert said.startswith(f"{path}:3: row '") and why in said and "Remove the line, and it is computed again." in said


def test_two_baselines_of_one_row_are_refused(tmp_path, lm, stored):
    path = tmp_path / "b.jsonl"
    first = stored.splitlines()[1]
    path.write_text(stored + first + "\n")  # the same once more: two commands computed it at once
    BaselineFile(path, TextScorer(lm))
    row = json.loads(first)
    n, logp = row["n_scored_tokens"], row["logp"] / 2
    more = {"logp": logp, "baseline_nll": -logp / n, "baseline_ppl": math.exp(-logp / n)}
    path.write_text(stored + json.dumps({**row, **more}) + "\n")
    with pytest.raises(DataError, match="b.jsonl:6: says something else of row 'r0' than an earlier line"):
        BaselineFile(path, TextScorer(lm))


@pytest.mark.parametrize("change", [
    {"logp": "low"}, {"logp": None}, {"logp": True}, {"logp": math.nan}, {"logp": 3.0}, {"tokens": 0}, {"tokens": "5"},
    {"tokens": 5.5},
])  # fmt: skip
def test_so_is_a_stored_likelihood(tmp_path, lm, change):
    """A file of `reward.cache` or `--cache`."""
    path, asked = tmp_path / "c.jsonl", [(r.context, r.gold) for r in rows()]
    told = TextScorer(lm, path).likelihoods(asked)
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    lines[1] |= change
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    with pytest.raises(DataError) as found:
        TextScorer(lm, path).likelihoods(asked)
    said = str(found.value)
    assert said.startswith(f"{path}:2: logp is ") and "remove the line, and it is computed again" in said
    path.write_text("".join(json.dumps(x) + "\n" for x in (lines[0], *lines[2:])))
    again = TextScorer(lm, path).likelihoods(asked)
    assert [x.logp for x in again] == pytest.approx([x.logp for x in told], abs=1e-4)


@pytest.fixture(scope="module")
def stored(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "b.jsonl"
    BaselineFile(path, TextScorer(lm)).get(rows())
    return path.read_text()


def test_the_judge_reads_it_before_anything_is_played(tmp_path, lm):
    data = [{"id": r.id, "prompt": list(r.context), "gold": r.gold} for r in rows()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in data))
    settings = LikelihoodJudgeConfig(baselines=str(tmp_path / "b.jsonl"), reward="linear")
    BaselineFile(tmp_path / "b.jsonl", TextScorer(lm)).get(rows())
    judge = LikelihoodJudge(settings, lm)
    source = with_judge(Prompts(str(tmp_path / "rows.jsonl")), judge)
    judge.keep(tmp_path / "judge")
    plays = [judge._as_play(None, t) for t in source.tasks("all")]
    asyncio.run(judge.judge(plays))
    assert judge._file.computed == 0
    edited = [{**r, "gold": "Another end."} for r in data]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in edited))
    changed = LikelihoodJudge(settings, lm)
    with_judge(Prompts(str(tmp_path / "rows.jsonl")), changed)
    with pytest.raises(DataError, match="row 'r0' has another gold text"):
        changed.keep(tmp_path / "other")


def test_one_file_for_the_command_and_for_training(tmp_path, monkeypatch):
    """`trailmark improvement --baselines` makes it, a run uses it, and the wrong rows or switches are refused."""
    monkeypatch.chdir(tmp_path)

    def shell(*words, code=0):
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code and "Traceback" not in done.output, done.output
        return " ".join(done.output.split())

    talks = [{"id": f"t{k}", "messages": [SYSTEM, {"role": "user", "content": f"Why {k}?"},
              {"role": "assistant", "content": f"Because of the rain, {k}."}]} for k in range(5)]  # fmt: skip
    Path("talks.jsonl").write_text("".join(json.dumps(t) + "\n" for t in talks))
    shell("data", "stories", "talks.jsonl", "--out", "stories")
    lm = model(name="tiny")
    lm.base.save_pretrained("scorer")
    lm.tokenizer.save_pretrained("scorer")
    make = ["improvement", "stories/train.jsonl", "--model", "scorer", "--baselines", "b.jsonl"]
    assert "b.jsonl: baselines of 3 rows, 3 of them computed now" in shell(*make)
    assert json.loads(shell(*make, "--json"))["baselines"] == {"file": "b.jsonl", "rows": 3, "computed": 0}
    stored = Path("b.jsonl").read_bytes()
    train = lambda out, *more, code=0: shell(
        "train", RECIPE, f"out={out}", "steps=1", "prompts_per_step=2", "n=2", "sampling.max_tokens=4", "eval.every=0",
        "checkpoint.every=0", "reward.model={name: scorer}", "reward.baselines=b.jsonl", *more, code=code,
    )  # fmt: skip
    train("run")
    assert Path("b.jsonl").read_bytes() == stored  # nothing was computed again
    shell("data", "stories", "talks.jsonl", "--out", "bare", "--no-system-role")
    said = train("none", "data=bare/train.jsonl", "task.options.val=bare/val.jsonl", code=2)
    assert "b.jsonl: row 't" in said and "is without a system message, and its baseline was computed with one" in said
    said = train("none", "reward.tokens=text", code=2)
    assert "b.jsonl: these baselines are of another rule of scored tokens (turn, now text)" in said
    said = train("none", "reward.model={name: tiny, seed: 4}", code=2)
    assert "b.jsonl: these baselines are of another model" in said
    assert not Path("none/recipe.yaml").exists() and Path("b.jsonl").read_bytes() == stored
