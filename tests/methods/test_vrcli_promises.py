"""What a VR-CLI run promises: the scorer never changes, no KL is needed, no prompt holds the gold text, test rows are
not touched, copying and length are metrics, and a user's own number stands beside them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig, resolve
from trailmark.learn import checkpoint
from trailmark.methods.online_configs import PolicyGradientRecipe
from trailmark.methods.policy_gradient import PolicyGradientMethod
from trailmark.models.load import load_model
from trailmark.runs.annotations import read_beside
from trailmark.runs.launch import launch
from trailmark.runs.store import read_annotations, read_episodes, read_metrics, read_segment, write_segment
from trailmark.score.likelihood import TextScorer, after_markers
from trailmark.tasks.stories import prompts as p
from trailmark.types import Scored
from trailmark.verify import verify

SHAPE = {"layers": 1, "width": 32, "heads": 2, "context": 1024}
WHY = ["rain", "wind", "snow", "fog", "hail", "sun", "ice"]
FUNCTION = """
def brevity(prompt, answer, row):
    return 1 / (1 + len(answer))

def reward(answer):
    return 0

class Judge: pass
"""


class Watched(PolicyGradientMethod):
    """Keeps the last method that was trained, to look into it."""

    last: "Watched"

    def __init__(self, config, run):
        super().__init__(config, run)
        Watched.last = self


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    talks = [{"id": w, "messages": [{"role": "user", "content": f"Why the {w}?"},
                                    {"role": "assistant", "content": f"The {w} came over the hill."}]}
             for w in WHY]  # fmt: skip
    Path("talks.jsonl").write_text("".join(json.dumps(t) + "\n" for t in talks))
    done = CliRunner().invoke(app, ["data", "stories", "talks.jsonl", "--out", "stories", "--val", "0.3"])
    assert done.exit_code == 0, done.output
    lines = lambda split: Path(f"stories/{split}.jsonl").read_text().splitlines()
    rows = {split: [json.loads(x) for x in lines(split)] for split in ("train", "val", "test")}
    lm = load_model(ModelConfig.model_validate({"name": "tiny", "shape": SHAPE}))
    lm.base.save_pretrained("start")
    lm.tokenizer.save_pretrained("start")
    Path("mine.py").write_text(FUNCTION)
    return rows


def recipe(**more):
    return resolve(
        {
            "method": "policy_gradient", "data": "stories/train.jsonl", "out": "run", "steps": 2,
            "prompts_per_step": 2, "n": 3,
            "task": {"options": {"val": "stories/val.jsonl"}}, "model": {"name": "start"},
            "sampling": {"max_tokens": 12}, "engine": {"max_num_seqs": 6, "max_len": 1024}, "credit": "group",
            "objective": {"kind": "clipped", "beta": 0.0}, "learner": {"optim": {"lr": 1e-2}},
            "eval": {"every": 1, "split": "val", "n": None}, "checkpoint": {"every": 1},
            "reward": {"kind": "likelihood", "context": p.CONTEXT, "plan": p.PLAN, "empty": p.EMPTY,
                       "markers": [*"etaoinshrdlu"], "reward": "linear"},
            **more,
        },
        PolicyGradientRecipe,
    )  # fmt: skip


def test_a_run_keeps_its_promises(data):
    files = lambda: {f.name: f.read_bytes() for f in Path("start").iterdir()}
    before, start = files(), load_model(ModelConfig(name="start")).fingerprint()
    Path("stories/test.jsonl").unlink()  # training does not need it
    launch(Watched, recipe(eval_fn="mine.py:brevity"))
    # the scorer is the model that training started from, and stays it; the policy does not
    judge, policy = Watched.last.source.judge, Watched.last.learner.models["policy"]
    assert judge.scorer.lm.fingerprint() == start == load_model(ModelConfig(name="start")).fingerprint()
    assert policy.fingerprint() != start and files() == before
    assert judge.scorer.lm is not policy
    # no KL: no reference is loaded, and the reward works
    assert set(Watched.last.learner.models) == {"policy"} and "kl" not in read_metrics("run")[0]
    episodes = list(read_episodes("run/episodes"))
    assert len({e.outcome.reward for e in episodes}) > 6
    # every row of val is evaluated at each step, and no other
    val, train = ({r["id"] for r in data[s]} for s in ("val", "train"))
    assert len(val) == 2 and {e.task.id for e in episodes} <= train
    for step in (1, 2):
        assert sorted(e.task.id for e in read_segment(f"run/evaluation/{step:06d}.jsonl")) == sorted(val)
    # the gold text is in no prompt that the policy saw
    tokenizer, gold = policy.tokenizer, {r["id"]: r["gold"] for s in ("val", "train") for r in data[s]}
    for e in [*episodes, *read_segment("run/evaluation/000002.jsonl")]:
        shown = tokenizer.decode(e.turns[0].prompt)
        assert gold[e.task.id] not in shown and f"Why the {e.task.id}?" in shown
    # what could explain an improvement is a metric of each step, and of each evaluation
    noted = {}
    names = ("improvement", "plan_words", "empty_improvement", "marker", "copied")
    for name in names:
        for a in read_annotations(f"run/annotations/{name}"):
            noted.setdefault(a.episode.split(":")[0], {}).setdefault(name, []).append(a.values[0])
    for row in read_metrics("run"):
        mine = noted[str(row["step"])]
        for name in ("improvement", "plan_words", "empty_improvement"):
            assert row[name] == pytest.approx(np.mean(mine[name]), abs=1e-9)
        assert row["marker_rate"] == np.mean(mine["marker"]) and row["empty_improvement"] == 0.0  # equal instruction
        assert row["length_correlation"] == pytest.approx(np.corrcoef(mine["plan_words"], mine["improvement"])[0, 1])
        assert {"eval/improvement", "eval/marker_rate", "eval/empty_improvement", "eval/plan_words"} <= set(row)
        # the user's own number: a mean over the evaluation, stored with it
        played = read_segment(f"run/evaluation/{row['step']:06d}.jsonl")
        want = [1 / (1 + len(e.turns[0].text)) for e in played]
        assert row["eval/brevity"] == pytest.approx(np.mean(want), abs=1e-12) and "brevity" not in row
        notes = [a for a in read_beside(Path(f"run/evaluation/{row['step']:06d}.jsonl")) if a.name == "brevity"]
        assert [a.values[0] for a in notes] == want


def test_an_evaluation_before_the_first_step(data, monkeypatch):
    """It is step 0, of the model that training starts from, on every row of the split; a resumed run keeps it."""
    config = lambda **more: recipe(eval={"every": 2, "split": "val", "n": None, "first": True}, **more)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "save", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        launch(PolicyGradientMethod, config())
    first = read_metrics("run")[0]
    launch(PolicyGradientMethod, config(), resume=True)
    launch(PolicyGradientMethod, config(out="whole"))
    assert Path("run/metrics.jsonl").read_bytes() == Path("whole/metrics.jsonl").read_bytes()
    rows = read_metrics("run")
    assert [r["step"] for r in rows] == [0, 1, 2] and rows[0] == first
    played = read_segment("run/evaluation/000000.jsonl")
    assert sorted(e.task.id for e in played) == sorted(r["id"] for r in data["val"])
    assert rows[0]["eval/reward"] == pytest.approx(np.mean([e.outcome.reward for e in played]), abs=1e-12)
    assert "eval/reward" in rows[2] and "reward" not in rows[0] and "eval/reward" not in rows[1]
    lm = load_model(ModelConfig(name="start"))
    e, row = played[0], next(r for r in data["val"] if r["id"] == played[0].task.id)
    plan = after_markers(e.turns[0].text, [*"etaoinshrdlu"])
    talk = lambda text: [*row["prompt"][:-1], {"role": "user", "content": text}]
    said = row["information"] + (row["plan_heading"] + plan if plan else "") + row["write_from_plan"]
    want = TextScorer(lm).improvement(talk(row["information"] + row["write"]), talk(said), row["gold"])
    assert e.outcome.reward == pytest.approx(want / 100, abs=1e-5)
    for command in (["verify", "run"], ["report", "run", "--no-plots"], ["inspect", "run"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    # the likelihoods are computed again, so a false reward is found even if all that is stored agrees with it
    numbers = verify("run")["replay"].numbers
    assert numbers["judged_again"] == numbers["judged"] > 0
    (false, *_) = read_segment("run/episodes/000001.jsonl")
    paid = false.outcome.reward + 0.3

    def lie(e):
        outcomes = dict.fromkeys(e.outcomes, Scored(paid, e.outcome.success))
        return replace(e, turns=(*e.turns[:-1], replace(e.turns[-1], reward=paid)), outcomes=outcomes)

    played = read_segment("run/episodes/000001.jsonl")
    write_segment(Path("run/episodes"), 1, [lie(e) if e.id == false.id else e for e in played])
    for file in Path("run/annotations/reward").glob("*.jsonl"):
        rows = [json.loads(x) for x in file.read_text().splitlines()]
        rows = [{**r, "values": [paid]} if r["episode"] == false.id else r for r in rows]
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = verify("run")["replay"]
    assert found.status == "fail" and "the judge now gives another reward than is stored" in found.what
    assert false.id in found.what


def test_verify_believes_no_stored_likelihood(data):
    """A file that says another baseline of every row would give other rewards."""
    told = recipe().task.options["reward"].model_dump()
    launch(PolicyGradientMethod, recipe(steps=1, eval={"every": 0}, reward={**told, "cache": "likelihoods.jsonl"}))
    lines = [json.loads(x) for x in Path("likelihoods.jsonl").read_text().splitlines()]
    Path("likelihoods.jsonl").write_text("".join(json.dumps({**x, "logp": x["logp"] / 2}) + "\n" for x in lines))
    found = verify("run")["replay"]
    assert lines and found.status == "pass" and found.numbers["judged_again"] == 6, found


def test_a_contrastive_run_that_stopped_goes_on_as_if_it_had_not(data):
    config = lambda out, steps: recipe(out=out, steps=steps, eval={"every": 0}, reward={
        **recipe().task.options["reward"].model_dump(), "reward": "contrastive", "no_marker": "invalid"})  # fmt: skip
    launch(PolicyGradientMethod, config("whole", 2))
    launch(PolicyGradientMethod, config("part", 1))
    launch(PolicyGradientMethod, config("part", 2), resume=True)
    done = CliRunner().invoke(app, ["diff", "whole", "part"])
    assert done.exit_code == 0 and "identical" in done.output, done.output
    notes = lambda name: {a.episode: a.values[0] for a in read_annotations(f"whole/annotations/{name}")}
    own, other, marker = notes("improvement"), notes("other_improvement"), notes("marker")
    episodes = list(read_episodes("whole/episodes"))
    rewards = {e.id: own[e.id] - 0.5 * other[e.id] for e in episodes}
    for e in episodes:
        step = e.id.split(":")[0]
        mates = [f for f in episodes if f.task.id == e.task.id and f.id.split(":")[0] == step]
        least = min([0.0, *(rewards[f.id] for f in mates if marker[f.id])])
        assert e.outcome.reward == pytest.approx(rewards[e.id] if marker[e.id] else least, abs=1e-9)
    assert 0 < sum(marker.values()) < len(episodes)  # both kinds were played


def test_mistakes_in_the_function_of_an_evaluation(data):
    def train(*words, code=2):
        Path("recipe.yaml").write_text(json.dumps(recipe().model_dump(mode="json")))
        done = CliRunner().invoke(app, ["train", "recipe.yaml", *words])
        assert done.exit_code == code and "Traceback" not in done.output, done.output
        return " ".join(done.output.split())

    assert "eval_fn: mine.py has no function 'brevty'. Did you mean 'brevity'?" in train("eval_fn=mine.py:brevty")
    assert "eval_fn: there is a metric eval/reward already" in train("eval_fn=mine.py:reward")
    assert "eval_fn 'mine.py:Judge': a class must derive" in train("eval_fn=mine.py:Judge")
    assert not Path("run/recipe.yaml").exists()
    train("eval_fn=mine.py:brevity", "steps=1", code=0)
    Path("mine.py").write_text(FUNCTION.replace("1 + len", "2 + len"))
    assert "has changed" in train("eval_fn=mine.py:brevity", "--resume")


def test_a_gold_text_in_its_prompt_stops_the_build(data):
    said = [{"role": "user", "content": "It is known: the rain came over the hill. Why?"},
            {"role": "assistant", "content": "The rain came over the hill."}]  # fmt: skip
    with Path("talks.jsonl").open("a") as file:
        file.write(json.dumps({"id": "leak", "messages": said}) + "\n")
    done = CliRunner().invoke(app, ["data", "stories", "talks.jsonl", "--out", "more"])
    assert done.exit_code == 2 and "talks.jsonl: line 8 (id 'leak'): 100.0 % of the gold text" in done.output
    assert not Path("more/train.jsonl").exists()
