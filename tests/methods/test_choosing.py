"""What a policy answers before training: single answers, the commonest one, and the best by a reward model; and exact
values of states against plain sums."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from trailmark.answers import read_answer
from trailmark.commands.app import app
from trailmark.config import load_recipe
from trailmark.episodes import won
from trailmark.errors import RecipeError
from trailmark.evaluate.choices import best_of, steps_of
from trailmark.methods import resolve_recipe
from trailmark.methods.lpr.exact import calibration, exact_value
from trailmark.methods.preference import PreferenceMethod
from trailmark.methods.quickstart import packaged
from trailmark.models.lm import LM
from trailmark.models.tiny import build, tiny_config, tiny_tokenizer
from trailmark.runs.launch import launch
from trailmark.runs.store import read_segment
from trailmark.score.classes import step_scores
from trailmark.score.value_models import load_values
from trailmark.steps import mark_steps, without_end
from trailmark.tasks.puzzle.source import soundness

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ["teacher.prompts=300", "sft.steps=150", "sample.prompts=20", "sample.n=4", "prm.steps=2", "prm.batch=4",
         "preference.steps=1", "eval.n=4", "states.shards=2", "model.shape.width=32"]  # fmt: skip


def small(out, seed):
    words = [*SMALL, f"out={out}", "preference.final.choose=3", f"preference.final.value={out}/prm-1"]
    return load_recipe(packaged("lpr-puzzle"), words).raw


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    """The folder of a quickstart, with fewer questions and steps."""
    folder = tmp_path_factory.mktemp("choosing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trailmark.methods.lpr.quickstart.recipe", small)
        patch.setattr("trailmark.report.plots._save", lambda figure, path: path)  # drawing takes a second
        done = CliRunner().invoke(app, ["quickstart", "--method", "lpr", "--out", str(folder / "q")])
    assert done.exit_code == 0, done.output
    assert "pDPO, one answer" in done.output and "Read next: docs/lpr.md" in done.output
    return folder / "q" / "lpr"


def test_the_quickstart_of_lpr(road):
    result = json.loads((road.parent / "quickstart.json").read_text())
    rows = {r["name"]: r for r in result["rows"]}
    assert [r["episodes"] for r in rows.values()] == [12, 4, 4, 4, 4]
    for name, file in result["files"].items():
        found = read_segment(Path(file))
        assert rows[name]["metrics"]["success"]["value"] == np.mean([e.outcome.success for e in found])
        assert rows[name]["metrics"]["sound"]["value"] == pytest.approx(np.mean([soundness(e) for e in found]))
    assert Path(result["report"]).read_text().startswith("<!")


def test_votes_and_the_best_by_a_reward_model(road, tmp_path):
    words = [f"out={tmp_path}/run", f"model.name={road}/sft", f"data={road}/cleaned-1/all.jsonl", "objective=rejection",
             "beta=null", "steps=1", "eval.n=12", "final.choose=5", f"final.value={road}/prm-1"]  # fmt: skip
    config = resolve_recipe(load_recipe(RECIPES / "preference-puzzle.yaml", words))
    launch(PreferenceMethod, config)
    single, vote, best = (read_segment(tmp_path / f"run/evaluation/{n}.jsonl") for n in ("single", "vote", "best"))
    groups = {}
    for e in single:
        groups.setdefault(e.group, []).append(e)
    assert len(groups) == 12 and {len(g) for g in groups.values()} == {5}
    assert [e.group for e in vote] == [e.group for e in best] == list(groups)
    for e in vote:
        said = [read_answer(x.turns[0].text, 4).letter for x in groups[e.group]]
        counts = Counter(x for x in said if x)
        most = max(counts.values(), default=0)
        assert counts[read_answer(e.turns[0].text, 4).letter] == most  # a blank counts 0
        assert e == next((x for x, a in zip(groups[e.group], said) if counts[a] == most), groups[e.group][0])
    values = load_values(road / "prm-1")  # the same by the other way: scores of steps, then a product of them
    marked = [mark_steps(e, "policy", values.lm.tokenizer, "newline") for e in single]
    marked = [without_end(e, "policy", values.lm.tokenizer) for e in marked]
    scores = steps_of(marked, step_scores(values.lm, marked, classes=[2, 3]), "step_score")
    chosen, _ = best_of(marked, scores, "product")
    assert [e.id for e in best] == [c.id for c in chosen.values()]
    ceiling = read_segment(tmp_path / "run/evaluation/any.jsonl")  # no choice among the five can do better
    assert [e.group for e in ceiling] == list(groups) and all(e in groups[e.group] for e in ceiling)
    assert [won(e) for e in ceiling] == [any(map(won, g)) for g in groups.values()]
    with pytest.raises(RecipeError, match="choose and value belong together"):
        resolve_recipe(load_recipe(RECIPES / "preference-puzzle.yaml", ["final.choose=5"]))


def test_an_exact_value_is_a_sum_over_all_texts():
    tokenizer = tiny_tokenizer()
    lm = LM(build(tiny_config("llama", vocab=len(tokenizer), layers=1, width=16, heads=2), 3), tokenizer, "small")
    begun, stop = (70, 80, 90), 65
    right = lambda said: float(sum(said) % 3 == 0)
    with torch.no_grad():
        first = torch.tensor([begun])
        p = lm.base(input_ids=first).logits[0, -1].double().softmax(-1)
        rows = torch.tensor([[*begun, t] for t in range(len(p))])
        q = lm.base(input_ids=rows).logits[:, -1].double().softmax(-1)
    total = 0.0
    for a in range(len(p)):
        if a == stop:
            total += float(p[a]) * right(())
            continue
        for b in range(len(p)):
            total += float(p[a] * q[a, b]) * right((a,) if b == stop else (a, b))
    found = exact_value(lm, begun, (stop,), 2, right, floor=0.0)
    assert found.low == pytest.approx(total, abs=1e-5) and found.unseen == pytest.approx(0, abs=1e-9)
    some = exact_value(lm, begun, (stop,), 2, right, floor=float(p.max()) * 0.9)
    assert some.low <= total + 1e-5 and total <= some.low + some.unseen + 1e-5 and some.unseen > 0.5


def test_groups_of_a_calibration():
    rows = calibration([0.1, 0.15, 0.9, 1.0], [0.0, 1 / 3, 1.0, 1.0], bins=2)
    assert [(r["states"], r["exact"], r["low"] is None) for r in rows] == [(2, 0.125, False), (2, 0.95, True)]
    assert [r["counted"] for r in rows] == pytest.approx([1 / 6, 1.0])


def test_values_of_a_scripted_player_against_the_exact_ones(tmp_path):
    """The command of the page. Over 100 states the mean difference is within four standard errors."""
    words = [f"out={tmp_path}/run", "seats.policy.kind=scripted",
             "seats.policy.function=trailmark.tasks.puzzle.policies:careless",
             "teacher.gold=false", "sft=null", "sample.prompts=40", "states.shards=2"]  # fmt: skip
    recipe, shell = str(RECIPES / "lpr-puzzle.yaml"), CliRunner()
    for stage in ("solutions", "cleaned", "states", "completions", "values"):
        done = shell.invoke(app, ["stages", recipe, *words, "--only", f"{stage}-1"])
        assert done.exit_code == 0, done.output
    done = shell.invoke(app, ["lpr", "calibration", recipe, *words, "--states", "100", "--out", f"{tmp_path}/picture"])
    assert done.exit_code == 0 and "mean Monte-Carlo" in done.output, done.output
    found = json.loads((tmp_path / "picture.json").read_text())
    exact = np.array([r["exact"] for r in found["states"]])
    assert len(exact) == 100 and found["unseen"] == 0 and exact.min() < 0.1 and exact.max() > 0.8
    error = np.sqrt((exact * (1 - exact) / 3).sum()) / len(exact)
    assert abs(found["bias"]) < 4 * error
    assert (tmp_path / "picture.png").exists() and b"<svg" in (tmp_path / "picture.svg").read_bytes()


def test_exact_values_of_a_model_lie_between_their_ends(road):
    done = CliRunner().invoke(app, ["lpr", "calibration", str(RECIPES / "lpr-puzzle.yaml"), *SMALL, f"out={road}",
                                    "--states", "3", "--floor", "0.02"])  # fmt: skip
    assert done.exit_code == 0, done.output
    for row in json.loads((road / "calibration-1.json").read_text())["states"]:
        assert 0 <= row["low"] <= row["exact"] <= row["low"] + row["unseen"] + 1e-9 <= 1 + 1e-6
