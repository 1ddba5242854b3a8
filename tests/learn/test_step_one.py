"""At step one the ratio is exactly 1 and the KL exactly 0; and the sampler's log-probs are the learner's."""

import dataclasses

import numpy as np
import pytest
import torch

from trailmark.config import LearnerConfig, load_recipe, resolve
from trailmark.engines.local import LocalEngine
from trailmark.learn.learner import Learner
from trailmark.methods import get_config
from trailmark.methods.online_configs import get_objective
from trailmark.methods.policy_gradient import reads_old
from trailmark.models.readout import Readout
from trailmark.objectives.clipped import Clipped
from trailmark.rollout.play import Desk, Seat, play_starts, start_all
from trailmark.samples import build_samples
from trailmark.tasks.base import Observation, Step
from trailmark.types import SamplingLaw, Scored, Task


class Talk:
    """A made-up world of ragged conversations: some turns are free, some are answered by a label."""

    name, markov = "talk", False

    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"t{k}", k) for k in range(n or 4)]

    def make(self):
        return TalkWorld()


class TalkWorld:
    def reset(self, task):
        self.left = 1 + task.seed % 3
        return Observation(f"Question {task.seed}: " + "x" * task.seed)

    def step(self, action):
        self.left -= 1
        over = self.left == 0
        labels = ("1", "2", "3") if self.left == 1 else ()
        return Step(
            Observation(f"You said {len(action)} letters.", labels=labels),
            1.0,
            over,
            False,
            Scored(1.0) if over else None,
        )


def collect(lm, law=SamplingLaw(temperature=0.9, top_p=0.95), chat=True):
    source = Talk()
    seat = Seat("policy", LocalEngine(lm, slots=8, max_len=400), law, max_tokens=9, kind="trained")

    async def talk(desk: Desk):
        while not desk.over:
            seen = desk.observation
            turn = await desk.ask(
                "policy", messages=[{"role": "user", "content": seen.text}], allowed=seen.labels or None
            )
            await desk.act(turn.text)

    starts = start_all(source.tasks(n=7), n=2)
    forced = tuple(lm.tokenizer.encode("Hm, "))
    starts = [s if k % 3 else type(s)(s.task, s.group, s.id, s.seed, forced=forced) for k, s in enumerate(starts)]
    return play_starts(source, starts, [seat], talk)


@pytest.mark.parametrize("layout", ["rows", "flat", "tree"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_ratio_is_exactly_one(make_lm, family, layout):
    lm = make_lm(family)
    episodes = collect(lm)
    assert all(isinstance(e.outcome, Scored) for e in episodes)
    values = {e.id: [1.0] * len(e.turns) for e in episodes}
    samples = build_samples(episodes, "policy", {"advantage": values})
    learner = Learner({"policy": lm}, LearnerConfig(layout=layout, micro_tokens=300))
    scored = learner.fill(samples, old=Readout(""), ref=Readout(""))
    for beta_kl in ("k3", "k1", "k3_weighted"):
        terms = learner.gradient(scored, Clipped(beta=0.1, kl=beta_kl))
        assert terms["kl"] == 0.0 and terms["kl_old"] == 0.0 and terms["clip_fraction"] == 0.0
    seen = learner.fill(scored, now=Readout(""))
    assert all((s.streams["now"] == s.streams["old"]).all() for s in seen)


@pytest.mark.parametrize(
    ("family", "dtype", "tol"),
    [
        ("gpt2", torch.float64, 1e-9),
        ("gpt2", torch.float32, 5e-5),
        ("llama", torch.float32, 5e-5),
        ("mistral", torch.float32, 5e-5),
    ],
)
def test_sampler_equals_learner(make_lm, family, dtype, tol):
    """Ragged multi-turn conversations, pad = eos, label-restricted turns, forced tokens, temperature and top-p."""
    lm = make_lm(family, dtype=dtype, pad_is_eos=True)
    assert lm.tokenizer.pad_token_id == lm.tokenizer.eos_token_id
    episodes = collect(lm)
    assert {t.law.allowed is None for e in episodes for t in e.turns} == {True, False}
    assert any(t.forced for e in episodes for t in e.turns) and any(len(e.turns) == 3 for e in episodes)
    samples = build_samples(episodes, "policy")
    assert len(samples) == len(episodes)  # one sequence per conversation: the template extends
    for layout in ("rows", "flat", "tree"):
        learner = Learner({"policy": lm}, LearnerConfig(layout=layout))
        for s in learner.fill(samples, mine=Readout(""), own=Readout("", law=False)):
            on = s.streams["weight"] != 0
            assert np.abs(s.streams["mine"] - s.streams["old"])[on].max() <= tol
            assert (s.streams["mine"][~on] == 0).all()
    by_id = {s.episode: s for s in samples}
    for e in episodes:
        written = [t for turn in e.turns for t in turn.tokens]
        s = by_id[e.id]
        assert s.tokens[s.streams["weight"] != 0].tolist() == written  # what it wrote, all of it, and nothing else
        forced = [t for turn in e.turns for t in turn.forced]
        assert len(written) + len(forced) < len(s.tokens)


@pytest.mark.parametrize("layout", ["rows", "tree"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_old_is_what_the_step_itself_reads(make_lm, family, layout):
    """One pass instead of two: gradient, terms and log-probs are those with `old` scored before, bit for bit; what the
    samples came with is not used."""
    lm = make_lm(family)
    episodes = collect(lm)
    values = {e.id: [float(k % 3) - 1.0] * len(e.turns) for k, e in enumerate(episodes)}
    drawn = build_samples(episodes, "policy", {"advantage": values})
    learner = Learner({"policy": lm}, LearnerConfig(layout=layout, micro_tokens=300))
    gradients = lambda: {n: p.grad.clone() for n, p in lm.parameters() if p.grad is not None}
    scored = learner.fill(drawn, old=Readout(""))
    terms = learner.gradient(scored, Clipped())
    want = gradients()
    lost = [dataclasses.replace(s, streams={**s.streams, "old": s.streams["old"] * np.nan}) for s in drawn]
    assert learner.gradient(lost, Clipped(), reads_old=True) == terms
    got = gradients()
    assert len(want) == len(got) > 10 and all(torch.equal(want[n], got[n]) for n in want)
    for a, b in zip(scored, learner.scored, strict=True):
        assert a.tokens is b.tokens and a.streams["old"].dtype == b.streams["old"].dtype
        assert np.array_equal(a.streams["old"], b.streams["old"])


@pytest.mark.parametrize(
    ("words", "reads"),
    [
        ([], True), (["variant=cispo"], True), (["variant=gspo"], True), (["old_logp=sampler"], False),
        (["passes=2"], False), (["minibatches=2"], False), (["overlap=true"], False), (["kl_reward=0.1"], False),
        (["model.lora={dropout: 0.1}"], False), (["objective={kind: weighted_logp}", "variant=null"], True),
    ],
)  # fmt: skip
def test_which_recipes_read_old_in_their_step(tmp_path, words, reads):
    given = [f"data={tmp_path}/rows.jsonl", f"reward={tmp_path}/reward.py:score", f"out={tmp_path}/run"]
    config = resolve(load_recipe("recipes/prompts-grpo.yaml", [*given, *words]), get_config("policy_gradient"))
    assert reads_old(config, get_objective(config.objective)) is reads
