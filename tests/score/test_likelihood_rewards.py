"""The rewards of an improvement: contrastive, answers without a marker, and what is noted beside them."""

import asyncio
import json
import math

import numpy as np
import pytest

from trailmark.config import ModelConfig
from trailmark.errors import DataError, JudgeError, RecipeError
from trailmark.methods.vrcli.config import LikelihoodJudgeConfig
from trailmark.methods.vrcli.judge import LikelihoodJudge, Scores
from trailmark.models.load import load_model
from trailmark.score.base import Play
from trailmark.score.likelihood import Likelihood, TextScorer, gain_reward, smallest_reward
from trailmark.score.open_judge import open_judge
from trailmark.tasks import with_judge
from trailmark.tasks.prompts import Prompts
from trailmark.types import Annotation, Episode, Invalid, Scored

SCORER = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 256}, "dtype": "float64"}
STORIES = {"a1": ("a", "The fox sleeps.", "A hen comes."), "a2": ("a", "The hen comes.", "The fox wakes."),
           "b1": ("b", "Rain falls.", "The river rises."), "c1": ("c", "A door.", "Open!"),
           "v1": ("d", "A bell.", "It rings.")}  # fmt: skip
MARKERS = ["In summary:"]


@pytest.fixture(scope="module")
def lm():
    return load_model(ModelConfig.model_validate(SCORER)).freeze()


@pytest.fixture
def source(tmp_path):
    rows = [{"id": i, "prompt": [{"role": "user", "content": x}], "gold": y, "story_id": s,
             "split": "val" if i == "v1" else "train"} for i, (s, x, y) in STORIES.items()]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return Prompts(str(path))


def plays_of(source, answers):
    """One play for each (row, answer)."""
    named = {t.id: t for t in source.tasks("all")}
    made = []
    for k, (i, answer) in enumerate(answers):
        first = source.make().reset(named[i])
        e = Episode(f"e{k}", named[i], i, (), {"self": Invalid("")})
        made.append(Play(e, first.text, answer, named[i].data, first.messages))
    return made


def notes_of(verdict):
    return {n.name: n.values[0] for n in verdict.notes}


def test_contrastive_is_the_improvement_minus_half_of_that_of_another_story(source, lm):
    judge = LikelihoodJudge(LikelihoodJudgeConfig(reward="contrastive", plan="{prompt} Plan: {answer}"), lm)
    with_judge(source, judge)
    asked = [(i, a) for i in STORIES for a in ("Go on.", "The fox, the hen.", "It rains and rains.")]
    verdicts = asyncio.run(judge.judge(plays_of(source, asked)))
    plain = TextScorer(lm)
    talk = lambda text: [{"role": "user", "content": text}]
    gain = lambda x, y, a: plain.improvement(talk(x), talk(f"{x} Plan: {a}"), y)
    others = {}
    for (i, a), verdict in zip(asked, verdicts):
        story, x, y = STORIES[i]
        own = gain(x, y, a)
        found = notes_of(verdict)
        assert found["improvement"] == pytest.approx(own, abs=1e-9)
        away = found["other_improvement"]
        (other,) = [j for j, (_, x2, y2) in STORIES.items() if abs(away - gain(x2, y2, a)) < 1e-9]  # one explains it
        assert STORIES[other][0] != story and other != "v1"  # of another story, and a row to train on
        others.setdefault(i, set()).add(other)
        assert verdict.outcome.reward == pytest.approx(own - 0.5 * away, abs=1e-9)
    assert all(len(found) == 1 for found in others.values())  # the same one for a whole group
    (alone,) = asyncio.run(judge.judge(plays_of(source, asked)[4:5]))
    assert alone.outcome.reward == pytest.approx(verdicts[4].outcome.reward, abs=1e-9)  # whatever the batch
    again = {s: {judge_with(source, lm, s)._other(t).id for t in source.tasks("train")} for s in range(4)}
    assert len({frozenset(x) for x in again.values()}) > 1  # the seed chooses


def judge_with(source, lm, seed):
    judge = LikelihoodJudge(LikelihoodJudgeConfig(reward="contrastive", seed=seed), lm)
    judge.bind(source)
    return judge


def test_contrastive_needs_other_stories(source, lm):
    judge = LikelihoodJudge(LikelihoodJudgeConfig(reward="contrastive"), lm)
    with pytest.raises(JudgeError, match=r"call bind\(source\) first"):
        asyncio.run(judge.judge(plays_of(source, [("a1", "x")])))
    source.rows = [t for t in source.rows if t.data["story_id"] == "a"]
    judge.bind(source)
    with pytest.raises(JudgeError, match="row 'a1' has no row of another story beside it"):
        asyncio.run(judge.judge(plays_of(source, [("a1", "x")])))


def test_all_kinds_are_monotone_and_the_smallest_is_smallest():
    edges = [-300.0, -1, 0, 0.0499, 0.05, 0.999, 1, 1.999, 2, 50]
    for kind in ("stepped", "clipped", "binary", "linear", "nll", "contrastive"):
        found = [gain_reward(i, kind, other=3.0) for i in edges]
        assert found == sorted(found) and smallest_reward(kind, others=found) <= found[0]
    assert gain_reward(4.0, "contrastive", other=3.0) == 2.5
    assert gain_reward(4.0, "contrastive", other=3.0, weight=1) == 1.0
    assert smallest_reward("stepped", [(0.0, -1.0), (1.0, 1.0)]) == -1.0 and smallest_reward("stepped") == 0.0
    assert smallest_reward("linear", others=[0.2, 0.1]) == 0.0 and smallest_reward("linear") == 0.0
    assert smallest_reward("clipped", others=[-5.0]) == 0.0
    with pytest.raises(RecipeError, match="linear, nll or contrastive"):
        gain_reward(1.0, "best")


@pytest.mark.parametrize(
    "kind, want", [("stepped", 0.0), ("clipped", 0.0), ("binary", 0.0), ("linear", -0.2), ("nll", -math.log(1.2))]
)
def test_an_answer_without_a_marker_earns_the_smallest_reward(source, lm, kind, want):
    """A valid plan of the same row made the text 20 % less likely: an answer without a plan does not beat it."""
    judge = LikelihoodJudge(LikelihoodJudgeConfig(reward=kind, markers=MARKERS, no_marker="invalid"), lm)
    said = [("a1", "In summary: bad"), ("a1", "long thoughts"), ("b1", "none"), ("a1", "In summary: good")]
    percents = [-20.0, 30.0, 30.0, 10.0]
    base = Likelihood(-math.log(10.0), 1)
    found = [Scores(base, Likelihood(-math.log(10.0 * (1 - p / 100)), 1), 0.0) for p in percents]
    plays = plays_of(source, said)
    rewards = [v.outcome.reward for v in judge._verdicts(plays, plays, found)]
    assert rewards[1] == pytest.approx(want, abs=1e-12) and rewards[1] <= rewards[0] < rewards[3]
    assert rewards[2] == 0.0  # no valid answer to its row
    whole = LikelihoodJudge(LikelihoodJudgeConfig(reward=kind, markers=MARKERS), lm)
    rest = [v.outcome.reward for v in whole._verdicts(plays, plays, found)]
    assert rest[1] == rest[2] > 0 and [rest[0], rest[3]] == [rewards[0], rewards[3]]


def test_what_is_noted_beside_a_reward_by_hand(source, lm):
    """Copying, length, the empty plan, the marker: of each play, and over a step."""
    settings = LikelihoodJudgeConfig(markers=MARKERS, reward="linear", plan="{prompt} Plan: {answer}")
    judge = LikelihoodJudge(settings, lm)
    asked = [("a1", "Hm. In summary: the fox sleeps well"), ("a1", "In summary: one"), ("b1", "so it goes on"),
             ("b1", "In summary:")]  # fmt: skip
    verdicts = asyncio.run(judge.judge(plays_of(source, asked)))
    notes = [notes_of(v) for v in verdicts]
    assert [n["plan_words"] for n in notes] == [4, 1, 4, 0] and [n["marker"] for n in notes] == [1, 1, 0, 1]
    assert notes[0]["copied"] == 0.5  # "the fox sleeps" of two trigrams stands in the prompt
    assert notes[2]["copied"] == 0.0 and "copied" not in notes[1] and "copied" not in notes[3]  # no trigrams
    plain, talk = TextScorer(lm), lambda text: [{"role": "user", "content": text}]
    for n, (i, _) in zip(notes, asked):
        _, x, y = STORIES[i]
        assert n["empty_improvement"] == pytest.approx(plain.improvement(talk(x), talk(f"{x} Plan: "), y), abs=1e-9)
    assert notes[3]["improvement"] == pytest.approx(notes[3]["empty_improvement"], abs=1e-9)  # it has no plan
    found = judge.metrics([a for v in verdicts for a in v.notes])
    gains = [n["improvement"] for n in notes]
    assert found["marker_rate"] == 0.75 and found["copied"] == 0.25 and found["plan_words"] == 2.25
    assert found["improvement"] == pytest.approx(np.mean(gains), abs=1e-12)
    assert found["empty_improvement"] == pytest.approx(np.mean([n["empty_improvement"] for n in notes]), abs=1e-12)
    assert found["length_correlation"] == pytest.approx(np.corrcoef([4, 1, 4, 0], gains)[0, 1], abs=1e-12)
    assert judge.metrics([]) == {} and "length_correlation" not in judge.metrics(list(verdicts[0].notes))
    other = Annotation("e0", "reward", "episode", (1.0,), None, "x")
    assert judge.metrics([other]) == {}


def test_an_equal_instruction_earns_nothing_for_an_empty_plan(source, lm):
    judge = LikelihoodJudge(LikelihoodJudgeConfig(markers=MARKERS), lm)  # "{prompt}{answer}"
    verdicts = asyncio.run(judge.judge(plays_of(source, [("a1", "In summary:"), ("b1", "In summary: x")])))
    assert [notes_of(v)["empty_improvement"] for v in verdicts] == [0.0, 0.0]
    assert verdicts[0].outcome == Scored(0.0) and judge.scorer.baselines.computed == 2


def test_mistakes_in_the_settings():
    for more, said in (
        ({"no_marker": "invalid"}, "no_marker: invalid needs markers"),
        ({"steps": [[5, 0.5], [10, 0.9], [2, 1]]}, "the bounds of steps must rise, and they are 5, 10, 2"),
        ({"reward": "best"}, "contrastive"),
    ):
        with pytest.raises(RecipeError, match=said):
            open_judge({"kind": "likelihood", "model": {"name": "tiny"}, **more})


@pytest.mark.parametrize("reward", ["stepped", "nll", "contrastive"])
def test_a_plan_that_the_reader_cannot_hold_is_invalid_and_the_others_count(source, lm, reward):
    """257 tokens and more do not fit a context of 256. The judge does not stop: it may come after hours of training."""
    judge = LikelihoodJudge(LikelihoodJudgeConfig(reward=reward, plan="{prompt} Plan: {answer}"), lm)
    with_judge(source, judge)
    answers = [("a1", "hens"), ("a1", "\ufffd" * 100), ("b1", "rain")]
    found = asyncio.run(judge.judge(plays_of(source, answers)))
    alone = asyncio.run(judge.judge(plays_of(source, [answers[0], answers[2]])))
    assert found[1].outcome == Invalid("the plan is too long for the model that reads 'gold'") and not found[1].notes
    assert [found[k].outcome.reward for k in (0, 2)] == pytest.approx([v.outcome.reward for v in alone], abs=1e-12)


def test_a_row_that_does_not_fit_names_its_file(source, lm):
    judge = LikelihoodJudge(LikelihoodJudgeConfig(context="{prompt}" * 30), lm)
    with_judge(source, judge)
    with pytest.raises(DataError, match=r"rows\.jsonl: row 'a1' has \d+ tokens with its plan and gold text"):
        asyncio.run(judge.judge(plays_of(source, [("a1", "hens")])))
