"""VR-CLI as a skeleton: plans are paid by the likelihood of a gold text, with public names only, and the numbers of its
definition. The whole method is a recipe of `policy_gradient` with a judge of kind `likelihood`."""

import asyncio
import json
import math

import numpy as np
import pytest
import torch
from tabular import TabularLM

from trailmark.config import LearnerConfig, ModelConfig, resolve
from trailmark.credit.groups import group_relative
from trailmark.engines.scripted import ScriptedEngine
from trailmark.learn.learner import Learner
from trailmark.methods.online_configs import PolicyGradientRecipe
from trailmark.methods.policy_gradient import PolicyGradientMethod
from trailmark.methods.vrcli.config import LikelihoodJudgeConfig
from trailmark.methods.vrcli.judge import LikelihoodJudge
from trailmark.models.load import load_model
from trailmark.objectives.clipped import Clipped
from trailmark.rollout.play import Seat, play
from trailmark.runs.launch import launch
from trailmark.runs.store import read_annotations, read_episodes, read_metrics
from trailmark.samples import build_samples
from trailmark.score.base import Play
from trailmark.score.function import FunctionJudge
from trailmark.score.likelihood import Likelihood, TextScorer, after_markers, gain_reward, gold_row, improvement
from trailmark.seats.pinned_models import pin_models
from trailmark.tasks.prompts import Prompts
from trailmark.types import Episode, Sample, Scored, Task, Turn

SHAPE = {"layers": 1, "width": 32, "heads": 2, "context": 256}
POLICY = {"name": "tiny", "shape": SHAPE, "seed": 1}
GENERATOR = {"name": "tiny", "shape": SHAPE, "seed": 2, "dtype": "float64"}
MARKERS = ["In summary:", "In summary,", "Detailed Plan:"]
SYSTEM = "You help to write."
STORIES = {
    "a": ("The fox sleeps.", "A hen comes by."),
    "b": ("Rain falls.", "The river rises."),
    "c": ("A door.", "Open!"),
}


@pytest.fixture
def rows(tmp_path):
    """The generic flavour: messages, of which the last is the gold text; it is carried beside the prompt."""
    made = []
    for name, (x, y) in STORIES.items():
        said = {"system": SYSTEM, "user": x, "assistant": y}
        messages = [{"role": role, "content": text} for role, text in said.items()]
        made.append({"id": name, "prompt": messages[:-1], "gold": messages[-1]["content"], "split": "train"})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in made))
    return path


def recipe(rows, out, **more):
    return resolve(
        {
            "method": "policy_gradient", "data": str(rows), "out": str(out), "model": POLICY, "steps": 1,
            "prompts_per_step": 3, "n": 4,
            "credit": "group", "mean": "sequence", "objective": {"kind": "clipped", "beta": 1e-6},
            "sampling": {"max_tokens": 6}, "engine": {"max_num_seqs": 12, "max_len": 128}, "minibatches": 2,
            "learner": {"optim": {"lr": 1e-3, "betas": [0.9, 0.95], "schedule": "cosine", "final": 0.1}},
            "checkpoint": {"every": 1},
            "reward": {
                "kind": "likelihood", "model": GENERATOR, "markers": MARKERS, "tokens": "template",
                "plan": "{prompt}\n### Plan ###\n{answer}", "reward": "linear",
            },
            **more,
        },
        PolicyGradientRecipe,
    )  # fmt: skip


def perplexity(lm, user, gold):
    """The reference's rule by a plain forward pass: the gold text, the end of the turn and the newline behind it."""
    head = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    ids, tail = lm.tokenizer.encode(head), lm.tokenizer.encode(f"{gold}<|im_end|>\n")
    lm.base.set_attn_implementation("sdpa")
    with torch.no_grad():
        logp = lm.base(input_ids=torch.tensor([ids + tail])).logits[0].log_softmax(-1)
    assert len(tail) == len(lm.tokenizer.encode(gold)) + 2
    return math.exp(-np.mean([float(logp[len(ids) + k - 1, t]) for k, t in enumerate(tail)]))


def test_a_run_is_paid_by_likelihood_and_learns_from_groups(rows, tmp_path):
    config = recipe(rows, tmp_path / "run")
    launch(PolicyGradientMethod, config)
    generator = load_model(ModelConfig.model_validate(GENERATOR)).freeze()
    before = generator.fingerprint()
    episodes = list(read_episodes(tmp_path / "run/episodes"))
    assert len(episodes) == 12 and len({e.group for e in episodes}) == 3
    improved = {a.episode: a.values[0] for a in read_annotations(tmp_path / "run/annotations/improvement")}
    for e in episodes:
        x, y = STORIES[e.task.id]
        shown = generator.tokenizer.decode(e.turns[0].prompt)
        assert y not in shown and SYSTEM in shown and x in shown  # the gold text never leaks
        plan = after_markers(e.turns[0].text, MARKERS)
        base, now = perplexity(generator, x, y), perplexity(generator, f"{x}\n### Plan ###\n{plan}", y)
        assert improved[e.id] == pytest.approx(100 * (1 - now / base), abs=1e-9)
        assert e.outcome.reward == e.turns[0].reward == improved[e.id] / 100
    credit = {a.episode: a.values for a in read_annotations(tmp_path / "run/annotations/advantage")}
    want = group_relative([e.outcome.reward for e in episodes], [e.group for e in episodes])
    assert [credit[e.id][0] for e in episodes] == pytest.approx(want.tolist(), abs=1e-12) and np.abs(want).max() > 0.5
    kept = (tmp_path / "run/judge/likelihoods.jsonl").read_text().splitlines()
    assert len(kept) == 6  # a baseline and a score without a plan for each row, whatever was written
    (row,) = read_metrics(tmp_path / "run")
    assert row["kl"] >= 0 and row["grad_norm"] > 0 and abs(row["policy"]) < 1
    start, trained = load_model(config.model), load_model(pin_models(ModelConfig(name=str(tmp_path / "run"))))
    assert trained.fingerprint() != start.fingerprint() and generator.fingerprint() == before
    launch(PolicyGradientMethod, recipe(rows, tmp_path / "run", steps=2), resume=True)
    assert (tmp_path / "run/judge/likelihoods.jsonl").read_text().splitlines() == kept  # nothing was computed again


def test_uniform_logits_have_the_size_of_the_vocabulary_as_perplexity(tmp_path):
    """Whatever the context: it changes neither the number of scored tokens nor, here, their probability."""
    lm = load_model(ModelConfig.model_validate(GENERATOR))
    with torch.no_grad():
        lm.base.get_output_embeddings().weight.zero_()
    scorer = TextScorer(lm, tmp_path / "kept.jsonl")
    texts = [("", "y"), ("a context", "\nhome"), ("two\nlines", "<|im_end|> is a text here")]
    for rule, more in (("text", 0), ("turn", 1), ("template", 2)):
        talks = [([{"role": "user", "content": x}], y) for x, y in texts]
        for (x, y), found in zip(texts, scorer.likelihoods(talks, rule)):
            assert found.perplexity == pytest.approx(lm.vocab, rel=1e-12)
            assert found.tokens == len(lm.tokenizer.encode(y, split_special_tokens=True)) + more
            row = gold_row(lm.tokenizer, [{"role": "user", "content": x * 7}], y, rule)
            assert row.end - row.start == found.tokens
    computed = scorer.baselines.computed
    again = TextScorer(lm, tmp_path / "kept.jsonl")
    again.likelihoods([([{"role": "user", "content": x}], y) for x, y in texts], "text")
    assert computed == 9 and again.baselines.computed == 0
    with torch.no_grad():
        lm.base.get_output_embeddings().weight.add_(0.01)
    other = TextScorer(lm, tmp_path / "kept.jsonl")  # other weights find nothing of it
    other.likelihood("x", "y")
    assert other.baselines.computed == 1


def test_improvement_and_its_rewards():
    ppl = lambda p, n=5: Likelihood(-n * math.log(p), n)
    assert improvement(ppl(10), ppl(9)) == pytest.approx(10, abs=1e-12) and improvement(ppl(10), ppl(10)) == 0.0
    assert improvement(ppl(10), ppl(11)) == pytest.approx(-10, abs=1e-12)
    edges = [-1, 0, 0.0499, 0.05, 0.999, 1, 1.999, 2, 50]
    assert [gain_reward(i) for i in edges] == [0, 0, 0, 0.5, 0.5, 0.9, 0.9, 1, 1]
    assert [gain_reward(i, "clipped") for i in (-3.0, 0.0, 4.0)] == [0, 0, 4]
    assert [gain_reward(i, "binary") for i in (-3.0, 0.0, 4.0)] == [0, 0, 1]
    assert [gain_reward(i, "linear") for i in (-3.0, 0.0, 4.0)] == [-0.03, 0, 0.04]
    for i in (-300.0, -3.0, 0.0, 4.0):  # the difference of the two losses
        assert gain_reward(i, "nll") == pytest.approx(ppl(10).nll - ppl(10 * (1 - i / 100)).nll, abs=1e-12)
    for kind in ("stepped", "clipped", "binary", "linear", "nll"):
        found = [gain_reward(i, kind) for i in edges]
        assert found == sorted(found)
    plans = {
        "": "", "no marker": "no marker", "In summary: a In summary: b": "b", "x In summary: y In summary, z": "z",
        "In summary:": "", "in summary: q": "in summary: q",
    }  # fmt: skip
    assert {p: after_markers(p, MARKERS) for p in plans} == plans


def test_an_empty_plan_is_worth_nothing_under_the_same_instruction():
    lm = load_model(ModelConfig.model_validate(GENERATOR))
    judge = LikelihoodJudge(LikelihoodJudgeConfig(plan="{prompt}{answer}", chat=True, markers=MARKERS), lm)
    episode = Episode("e", Task("t"), "g", (), {"self": Scored(0.0)})
    shown = Play(episode, "Rain falls.", "In summary: ", {"gold": "It rises."})
    (verdict,) = asyncio.run(judge.judge([shown]))
    notes = {a.name: a.values[0] for a in verdict.notes}
    assert notes["improvement"] == 0.0 and verdict.outcome == Scored(0.0) and notes["baseline_nll"] == notes["nll"]


def test_group_credit_and_one_update():
    """R = 0, .5, .9, 1 gives A = -1.3198, -.2200, .6599, .8799; equal rewards give exactly 0. At the first step the
    ratio is 1, the loss is -mean A = 0, and its gradient is that of -A log pi / 4. A reference that is half a nat below
    the policy gives KL(k3) = 0.10653."""
    rewards = [0, 0.5, 0.9, 1.0]
    advantages = group_relative(rewards, ["g"] * 4)
    assert advantages == pytest.approx([-1.3198, -0.2200, 0.6599, 0.8799], abs=5e-5)
    assert group_relative([0.9] * 16, ["g"] * 16).tolist() == [0.0] * 16
    lm = TabularLM([(5,)], 8)
    turns = [Turn("policy", (5,), (k,), logq=(-math.log(8),)) for k in range(4)]
    outcomes = [{"self": Scored(r)} for r in rewards]
    episodes = [Episode(f"e{k}", Task("t"), "g", (turns[k],), outcomes[k]) for k in range(4)]
    credit = {e.id: [a] for e, a in zip(episodes, advantages)}
    samples = build_samples(episodes, "policy", {"advantage": credit}, mean="sequence")
    learner = Learner({"policy": lm}, LearnerConfig())
    got = learner.gradient(samples, Clipped())
    assert got["ratio"] == 1.0 and got["policy"] == pytest.approx(0.0, abs=1e-12)
    want = -sum(a * ((np.arange(8) == k) - 1 / 8) for k, a in enumerate(advantages)) / 4
    (grad,) = [p.grad for _, p in lm.parameters()]
    assert grad[0].numpy() == pytest.approx(want, abs=1e-12)
    half = [Sample(s.tokens, {**s.streams, "ref": s.streams["old"] - 0.5}, s.mass, s.laws) for s in samples]
    assert learner.gradient(half, Clipped(beta=1.0))["kl"] == pytest.approx(0.10653, abs=5e-6)


def test_the_clipped_loss_of_two_plans_by_hand():
    """Ratios 1.5 and 0.5 with clip 0.2, A = 1 and -1, three tokens each: tokens are averaged in a plan, then plans."""
    lm, logp = TabularLM([], 8), -math.log(8)
    rows = []
    for ratios, a in (((1.5, 1.0, 0.5), 1.0), ((1.5, 1.0, 0.5), -1.0)):
        old = np.array([0.0, *(logp - math.log(r) for r in ratios)])
        streams = {"weight": np.array([0, 1, 1, 1]) / 3, "advantage": np.full(4, a), "old": old}
        rows.append(Sample(np.array([5, 1, 2, 3]), streams, {"weight": 1.0}))
    got = Learner({"policy": lm}, LearnerConfig()).gradient(rows, Clipped())
    assert got["policy"] == pytest.approx(-((1.2 + 1 + 0.5) / 3 - (1.5 + 1 + 0.8) / 3) / 2, abs=1e-12)
    assert got["clip_fraction"] == pytest.approx(1 / 3, abs=1e-12)


def test_the_contrastive_reward_is_a_function_with_a_scorer(rows, tmp_path):
    """I(x, y, a) - I(x', y', a) / 2, where (x', y') is of another story: a function that asks for likelihoods."""
    lm = load_model(ModelConfig.model_validate(GENERATOR)).freeze()
    other = dict(zip(STORIES, [*list(STORIES)[1:], "a"]))

    def contrast(prompts, answers, rows, scorer):
        asked = [(STORIES[name], a) for r, a in zip(rows, answers) for name in (r["id"], other[r["id"]])]
        found = [scorer.improvement(x, f"{x} Plan: {a}", y) for (x, y), a in asked]
        return [own - 0.5 * wrong for own, wrong in zip(found[::2], found[1::2])]

    source = Prompts(str(rows))
    said = ScriptedEngine(lambda prompt, draw: draw.choice(["Go on. ", "The end. ", "Rain! "]), lm.tokenizer)
    judge = FunctionJudge(contrast, scorer=TextScorer(lm, tmp_path / "kept.jsonl"))
    episodes = play(source, source.tasks("train"), [Seat("policy", said)], n=2, judge=judge)
    plain = TextScorer(lm)
    for e in episodes:
        (x, y), (x2, y2) = STORIES[e.task.id], STORIES[other[e.task.id]]
        answer = e.turns[0].text
        one, two = plain.improvement(x, f"{x} Plan: {answer}", y), plain.improvement(x2, f"{x2} Plan: {answer}", y2)
        assert e.outcome.reward == pytest.approx(one - two / 2, abs=1e-9) and one != 0
    assert len(episodes) == 6 and len({e.outcome.reward for e in episodes}) > 3
