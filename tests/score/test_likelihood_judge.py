"""VR-CLI's reward as a judge: the numbers of its definition, the baseline once, and groups of rewards as credit."""

import asyncio
import json
import math
from dataclasses import replace

import pytest
import torch

from trailmark.credit.groups import group_relative
from trailmark.errors import JudgeError
from trailmark.methods.vrcli.config import LikelihoodJudgeConfig
from trailmark.methods.vrcli.judge import LikelihoodJudge, Scores
from trailmark.score.base import Play
from trailmark.score.likelihood import Likelihood, after_markers, improvement
from trailmark.types import Episode, Invalid, Scored, Task


@pytest.fixture
def lm(make_lm):
    return make_lm("gpt2", dtype=torch.float64)


def plays():
    made = []
    for k, answer in enumerate(
        ["", "a plan. ", "Reasons. In summary: a plan. ", "In summary: x. In summary: go home. "]
    ):
        e = Episode(f"e{k}", Task(f"t{k // 2}"), "g", (), {"self": Invalid("")})
        made.append(Play(e, f"Story {k // 2}. ", answer, {"gold": "They went home.", "title": "T"}))
    return made


def perplexity(lm, context, gold, end=True):
    """By the model's own forward pass, token by token."""
    ids = lm.tokenizer.encode(context) + (tail := lm.tokenizer.encode(gold) + [lm.tokenizer.eos_token_id] * end)
    lm.base.set_attn_implementation("eager")
    with torch.no_grad():
        logp = lm.base(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    lm.base.set_attn_implementation("trailmark")
    return math.exp(-sum(float(logp[t - 1, ids[t]]) for t in range(len(ids) - len(tail), len(ids))) / len(tail))


def test_the_numbers_of_the_definition(lm, tmp_path):
    settings = LikelihoodJudgeConfig(markers=["In summary:"], plan="{prompt}Plan of {title}: {answer}", reward="linear")
    judge = LikelihoodJudge(settings, lm, tmp_path / "likelihoods.jsonl")
    verdicts = asyncio.run(judge.judge(plays()))
    for play, verdict in zip(plays(), verdicts):
        plan = play.answer.split("In summary:")[-1].strip()
        base = perplexity(lm, play.prompt, "They went home.")
        now = perplexity(lm, f"{play.prompt}Plan of T: {plan}", "They went home.")
        notes = {n.name: n.values[0] for n in verdict.notes}
        assert notes["improvement"] == pytest.approx(100 * (1 - now / base), abs=1e-9)
        assert verdict.outcome.reward == notes["improvement"] / 100
        assert math.exp(notes["baseline_nll"]) == pytest.approx(base, abs=1e-9 * base)
        assert math.exp(notes["nll"]) == pytest.approx(now, abs=1e-9 * now)
        assert {n.episode for n in verdict.notes} == {play.episode.id} and verdict.notes[0].source == judge.stamp
    assert judge.scorer.baselines.computed == 4  # two stories, four plays: two baselines, and two without a plan
    lines = (tmp_path / "likelihoods.jsonl").read_text().splitlines()
    count = len(lm.tokenizer.encode("They went home.")) + 1
    assert len(lines) == 4 and {json.loads(x)["tokens"] for x in lines} == {count}
    again = LikelihoodJudge(settings, lm, tmp_path / "likelihoods.jsonl")
    assert asyncio.run(again.judge(plays())) == verdicts and again.scorer.baselines.computed == 0


def test_stepped_rewards_become_group_credit(lm):
    """Section 3.2 of the specification: R = [0, 0.5, 0.9, 1] gives A = [-1.3198, -0.2200, 0.6599, 0.8799]."""
    judge = LikelihoodJudge(LikelihoodJudgeConfig(), lm)
    percents = iter([-4.0, 0.05, 1.5, 2.0])
    base = Likelihood(-math.log(10.0), 1)
    found = [Scores(base, Likelihood(-math.log(10.0 * (1 - next(percents) / 100)), 1), 0.0) for _ in plays()]
    verdicts = judge._verdicts(plays(), plays(), found)
    rewards = [v.outcome.reward for v in verdicts]
    assert rewards == [0.0, 0.5, 0.9, 1.0] and all(isinstance(v.outcome, Scored) for v in verdicts)
    assert group_relative(rewards, ["g"] * 4) == pytest.approx([-1.3198, -0.2200, 0.6599, 0.8799], abs=1e-4)


def test_markers():
    text = "In summary: a In summary, b Detailed Plan: c "
    assert after_markers(text, ["In summary:", "In summary,", "Detailed Plan:"]) == "c"
    assert after_markers(" no marker ", ["In summary:"]) == "no marker" and after_markers(" x ", []) == " x "


def test_a_row_without_gold(lm):
    play = Play(plays()[0].episode, "p", "a", {"gold": ""})
    with pytest.raises(JudgeError, match=r"row 't0' has no text 'gold' \(reward.gold\)"):
        asyncio.run(LikelihoodJudge(None, lm).judge([play]))


def test_a_conversation_is_the_context_as_it_was_shown(lm):
    """The template stands in the place of the last message; the system's words before it are read too."""
    talk = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Story."})
    shown = Play(plays()[0].episode, "Story.", "a plan", {"gold": "home"}, talk)
    settings = LikelihoodJudgeConfig(plan="{prompt} Plan: {answer}", tokens="text", reward="linear")
    (verdict,) = asyncio.run(LikelihoodJudge(settings, lm).judge([shown]))
    chatml = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    base, now = (perplexity(lm, chatml.format(said), "home", end=False) for said in ("Story.", "Story. Plan: a plan"))
    assert verdict.outcome.reward == pytest.approx(1 - now / base, abs=1e-11)


def test_a_likelihood_that_is_no_number_is_no_reward(lm):
    """A model that has become infinite somewhere gives no reward: neither a zero nor minus infinity."""
    with torch.no_grad():
        lm.base.get_output_embeddings().weight[lm.tokenizer.encode("h")[0]] = torch.nan
    verdicts = asyncio.run(LikelihoodJudge(LikelihoodJudgeConfig(reward="linear"), lm).judge(plays()[:1]))
    assert isinstance(verdicts[0].outcome, Invalid)
    assert "likelihood of 'gold' is no number" in verdicts[0].outcome.reason
    assert improvement(Likelihood(-1.0, 1), Likelihood(-900.0, 1)) == -math.inf


def test_a_text_that_was_almost_impossible():
    from trailmark.score.likelihood import Likelihood, gain_reward, improvement

    base, now = Likelihood(-40.0, 1), Likelihood(-0.5, 1)
    assert gain_reward(improvement(base, now), "stepped") == 1.0
    assert Likelihood(-800.0, 1).perplexity == float("inf")


@pytest.mark.parametrize("with_file", [False, True])
def test_contexts_are_encoded_once_per_row(lm, tmp_path, monkeypatch, with_file):
    """Sixteen plays of each of two rows: each row's own context and its context without a plan are rendered, encoded
    and hashed once, and not again for the next plays; verdicts and stored bytes are those of one play at a time."""
    from trailmark.score import likelihood

    encoded, hashed = [], []
    gold_row, key = likelihood.gold_row, likelihood.Baselines._key
    monkeypatch.setattr(likelihood, "gold_row", lambda t, *a: encoded.append(a[0]) or gold_row(t, *a))
    monkeypatch.setattr(likelihood.Baselines, "_key", lambda self, row: hashed.append(row.name) or key(self, row))
    files = {"baselines": str(tmp_path / "rows.jsonl")} if with_file else {}
    settings = LikelihoodJudgeConfig(plan="{prompt}Plan: {answer}", reward="linear", **files)
    judge = LikelihoodJudge(settings, lm, tmp_path / "together.jsonl")
    some = [Play(replace(p.episode, id=f"{p.episode.id}/{n}"), p.prompt, f"plan {n}", p.row)
            for p in plays()[::2] for n in range(16)]  # fmt: skip
    verdicts = asyncio.run(judge.judge(some))
    own = [c for c in encoded if "plan" not in c]
    assert sorted(own) == ["Story 0. ", "Story 0. Plan: ", "Story 1. ", "Story 1. Plan: "]
    assert len(encoded) == 4 + 32, "and each context with a plan once"
    assert len(hashed) == (2 if with_file else 4)
    assert asyncio.run(judge.judge(some)) == verdicts
    assert len(encoded) == 4 + 2 * 32, "the next plays of a row find its contexts"
    apart = LikelihoodJudge(settings, lm, tmp_path / "apart.jsonl")
    for play, verdict in zip(some[::16], verdicts[::16]):
        (alone,) = asyncio.run(apart.judge([play]))
        assert alone.outcome.reward == pytest.approx(verdict.outcome.reward, abs=1e-12)
    lines = lambda name: {json.loads(line)["key"]: json.loads(line)["tokens"]
                          for line in (tmp_path / name).read_text().splitlines()}  # fmt: skip
    assert lines("together.jsonl") == lines("apart.jsonl")


def test_the_contexts_that_are_kept_are_bounded(lm, monkeypatch):
    from trailmark.score import likelihood

    monkeypatch.setattr(likelihood, "KEPT", 100)
    scorer = likelihood.TextScorer(lm)
    rows = [(f"A story of number {k}. ", "They went home.") for k in range(40)]
    made = scorer._rows(rows, "turn", (), again=True)
    assert made == [likelihood.gold_row(lm.tokenizer, c, g, "turn") for c, g in rows]
    assert sum(len(g.tokens) for g in scorer._kept.values()) == scorer._tokens <= 100 and len(scorer._kept) > 1
    assert list(scorer._kept.values()) == made[-len(scorer._kept) :], "the last ones"


def test_texts_that_only_look_alike_are_encoded_apart(lm):
    """A marked text is a control token, its characters are not; and what cannot be compared is not kept."""
    from trailmark.score import likelihood
    from trailmark.texts import mark

    scorer, end = likelihood.TextScorer(lm), lm.tokenizer.eos_token
    pairs = [(end, "home"), (mark(end), "home"), ([{"role": "user", "content": end}], "home")]
    pairs += [([{"role": "user", "content": "a", "tags": {1}}], "home")] * 2
    for _ in range(2):
        made = scorer._rows(pairs, "turn", (), again=True)
        assert made == [likelihood.gold_row(lm.tokenizer, c, g, "turn") for c, g in pairs]
    assert made[0] != made[1] and len(scorer._kept) == 3
