"""The probability of a gold text, given a context and an answer: VR-CLI's reward, which needs no verifier.

    nll(y | c)  = -1/|y| sum_t log p(y_t | c, y_<t)         natural log, mean over the scored tokens of y
    ppl(y | c)  = exp(nll)
    I           = 100 * (1 - ppl(y | x, a) / ppl(y | x))     percent: how much the answer a lowers the perplexity

The baseline ppl(y | x) does not depend on the answer. It is computed once per row and stored in a file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trailmark.chat import render
from trailmark.errors import DataError, JudgeError, ModelError, RecipeError
from trailmark.score.base import Judge, Play, Verdict, digest, filled, scored
from trailmark.score.cache import Cache
from trailmark.score.config import LikelihoodJudgeConfig
from trailmark.types import Annotation, Invalid, Tokens

if TYPE_CHECKING:
    from trailmark.config import ModelConfig
    from trailmark.models.layout import Shape
    from trailmark.models.lm import LM

Rule = Literal["text", "turn", "template"]
Context = str | Sequence[Mapping[str, Any]]
Gain = Literal["stepped", "clipped", "binary", "linear", "nll"]
STEPS = ((0.05, 0.5), (1.0, 0.9), (2.0, 1.0))  # VR-CLI: smallest improvement in percent, and its reward


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The log-probability of a text, summed over its scored tokens."""

    logp: float
    tokens: int

    @property
    def mean(self) -> float:
        """Log-prob per token."""
        return self.logp / self.tokens

    @property
    def nll(self) -> float:
        return -self.mean

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll) if self.nll < 700 else math.inf


@dataclass(frozen=True, slots=True)
class Gold:
    """A sequence in which the tokens [start, end) are the gold text."""

    tokens: Tokens
    start: int
    end: int


def gold_row(tokenizer: Any, context: Context, gold: str, rule: Rule = "turn") -> Gold:
    """The context as the model sees it, followed by the gold text as its answer. A context is plain text, or messages
    that go through the chat template. What is scored: "text" is the gold text only; "turn" adds the token that ends it
    (a sampler writes it); "template" adds what the template writes after that (the reference implementation of VR-CLI
    scores it)."""
    talk = [{"role": "user", "content": context}] if isinstance(context, str) else list(context)
    template = None if isinstance(context, str) else "own"
    made = render(tokenizer, [*talk, {"role": "assistant", "content": gold}], template=template)
    if not made.spans or made.spans[-1].message != len(talk):
        raise DataError("the chat template does not show the gold text as an answer: it cannot be scored")
    span = made.spans[-1]
    end = {"text": span.end - 1, "turn": span.end, "template": len(made.tokens)}[rule]
    if end <= span.start:
        raise DataError("the gold text has no tokens: there is nothing to score")
    return Gold(made.tokens, span.start, end)


def likelihoods(lm: LM, rows: Sequence[Gold], shape: Shape = "auto", amp: bool = False) -> list[Likelihood]:
    """The likelihood of each row's gold text under the model. Shared prefixes are computed once."""
    import numpy as np

    from trailmark.models.forward import fill, pack
    from trailmark.models.readout import Readout
    from trailmark.types import Sample

    if not rows:
        return []
    samples = []
    for row in rows:
        if not 1 <= row.start < row.end <= len(row.tokens):
            raise DataError(
                f"[{row.start}, {row.end}) of {len(row.tokens)} tokens cannot be scored: something must precede it"
            )
        at = np.arange(row.end)
        samples.append(Sample(np.array(row.tokens[: row.end], np.int64), {"weight": at >= row.start}))
    models = {"judge": lm}
    lm.train(False)
    wanted = Readout("logp", model="judge", law=False)
    filled = fill(models, samples, pack(models, samples, shape), [wanted], amp)
    return [
        Likelihood(float(s.streams["logp"][row.start :].astype(np.float64).sum()), row.end - row.start)
        for row, s in zip(rows, filled)
    ]


def improvement(baseline: Likelihood, now: Likelihood) -> float:
    """The improvement in percent: 100 * (1 - ppl now / ppl before). Minus infinity if the text has become
    impossible."""
    gap = now.nll - baseline.nll
    return -100.0 * math.expm1(gap) if gap < 700 else -math.inf if gap == gap else math.nan


def gain_reward(percent: float, kind: Gain = "stepped", steps: Sequence[tuple[float, float]] = STEPS) -> float:
    """The reward of an improvement. `nll` is the difference of the two losses, which follows from the percentage."""
    if kind == "stepped":
        return max((reward for least, reward in steps if percent >= least), default=0.0)
    if kind == "clipped":
        return max(percent, 0.0)
    if kind == "binary":
        return float(percent > 0)  # an empty answer is no improvement
    if kind == "nll":
        return -math.log1p(-percent / 100.0) if percent < 100 else math.inf
    if kind == "linear":
        return percent / 100.0
    raise RecipeError(f"unknown kind of reward '{kind}': stepped, clipped, binary, linear or nll.")


class Baselines:
    """Likelihoods of gold texts, stored in a file by the model, the tokens and the scored part. A second run over the
    same rows computes nothing. Another model or template has other keys."""

    def __init__(self, lm: LM, path: str | Path | None = None, shape: Shape = "auto", amp: bool = False):
        self.lm, self.shape, self.amp = lm, shape, amp
        self.cache = Cache(path)
        self.fingerprint = lm.fingerprint()[:16] + f" {str(lm.dtype).removeprefix('torch.')}" + " amp" * amp
        self.computed = 0

    def get(self, rows: Sequence[Gold]) -> list[Likelihood]:
        keys = [self._key(row) for row in rows]
        new = {key: row for key, row in zip(keys, rows) if key not in self.cache}
        for key, found in zip(new, likelihoods(self.lm, list(new.values()), self.shape, self.amp)):
            self.cache.add(key, {"logp": found.logp, "tokens": found.tokens, "ppl": found.perplexity})
            self.computed += 1
        return [Likelihood(float(self.cache[k]["logp"]), int(self.cache[k]["tokens"])) for k in keys]

    def _key(self, row: Gold) -> str:
        what = json.dumps([self.fingerprint, row.start, row.end, list(row.tokens)])
        return hashlib.sha256(what.encode()).hexdigest()[:32]


class TextScorer:
    """The `scorer` of a reward function: likelihoods of texts under a model that is loaded on first use. Results are
    stored, so the baseline of a row is computed once."""

    def __init__(self, model: ModelConfig | LM, cache: str | Path | None = None):
        self.model, self.path = model, cache

    @cached_property
    def baselines(self) -> Baselines:
        from trailmark.config import ModelConfig

        lm: Any = self.model
        if isinstance(lm, ModelConfig):
            from trailmark.models.load import load_model

            try:
                lm = load_model(lm).freeze()
            except ModelError as problem:
                raise ModelError(f"reward.model: {problem}") from problem
        return Baselines(lm, self.path)

    def keep(self, path: Path) -> None:
        """Store results in this file from now on."""
        self.path = path
        if "baselines" in self.__dict__:
            self.baselines.cache = Cache(path)

    @property
    def lm(self) -> LM:
        return self.baselines.lm

    def likelihoods(self, rows: Sequence[tuple[Context, str]], rule: Rule = "turn") -> list[Likelihood]:
        """The likelihood of each gold text given its context: plain text, or messages."""
        return self.baselines.get([gold_row(self.lm.tokenizer, context, gold, rule) for context, gold in rows])

    def likelihood(self, context: Context, gold: str, rule: Rule = "turn") -> Likelihood:
        return self.likelihoods([(context, gold)], rule)[0]

    def improvement(self, before: Context, after: Context, gold: str, rule: Rule = "turn") -> float:
        """By how many percent the perplexity of a text falls from one context to another."""
        base, now = self.likelihoods([(before, gold), (after, gold)], rule)
        return improvement(base, now)


class LikelihoodJudge(Judge):
    """VR-CLI's reward: by how much the answer improves the perplexity of a gold text, in steps. The baseline of each
    row is stored in a file. `model` is a loaded model, or one to load when the first play is judged."""

    def __init__(
        self,
        config: LikelihoodJudgeConfig | None = None,
        model: ModelConfig | LM | None = None,
        cache: str | Path | None = None,
    ):
        self.config = c = config or LikelihoodJudgeConfig()
        reader = c.model or model
        if reader is None:
            raise RecipeError("reward of kind likelihood: no model reads the gold text; set reward.model.")
        self.name = f"likelihood of {c.gold} under {reader.name}"
        self.source = f"likelihood {reader.name}"
        self._shared = cache or c.cache
        self.scorer = TextScorer(reader, self._shared)
        settings = c.model_dump(mode="json", exclude={"success", "model", "cache"})
        if c.empty is None:
            del settings["empty"]  # judges of runs from before this key keep their fingerprint
        self.earlier = (digest(json.dumps([reader.name, settings])),)
        self.fingerprint = digest(json.dumps([_weights_of(reader), settings]))  # the path of the weights does not count

    def keep(self, folder: str | Path) -> None:
        super().keep(folder)
        if self._shared is None:
            self.scorer.keep(Path(folder) / "likelihoods.jsonl")

    async def judge(self, plays: Sequence[Play]) -> list[Verdict]:
        c = self.config
        before, after = [], []
        for play in plays:
            gold = play.row.get(c.gold)
            if not isinstance(gold, str) or not gold:
                raise JudgeError(
                    f"{play.where} has no text '{c.gold}' (reward.gold) whose likelihood could be computed."
                )
            plan = replace(play, answer=after_markers(play.answer, c.markers))
            before.append((self._context(c.context, play), gold))
            template = c.plan if c.empty is None or plan.answer.strip() else c.empty
            after.append((self._context(template, plan), gold))
        base = self.scorer.likelihoods(before, c.tokens)
        rows = [gold_row(self.scorer.lm.tokenizer, context, gold, c.tokens) for context, gold in after]
        now = likelihoods(self.scorer.lm, rows)
        return [self._verdict(play, a, b) for play, a, b in zip(plays, base, now)]

    def _context(self, template: str, play: Play) -> Context:
        """The template replaces the user's last message. Earlier messages stay as they are."""
        text = filled(template, play)
        if not (self.config.chat or play.messages):
            return text
        return [*play.messages[:-1], {"role": "user", "content": text}]

    def _verdict(self, play: Play, base: Likelihood, now: Likelihood) -> Verdict:
        percent = improvement(base, now)
        if not math.isfinite(percent):
            return Verdict(
                Invalid(f"the likelihood of '{self.config.gold}' is no number: {base.logp:g} before, {now.logp:g} now")
            )
        steps = [(least, reward) for least, reward in self.config.steps]
        found = {"improvement": percent, "baseline_nll": base.nll, "nll": now.nll}
        notes = tuple(Annotation(play.episode.id, k, "episode", (v,), None, self.stamp) for k, v in found.items())
        exact = base.nll - now.nll  # not taken back out of the percentage, which rounds to 100
        reward = exact if self.config.reward == "nll" else gain_reward(percent, self.config.reward, steps)
        return Verdict(scored(reward, self.config.success), notes)


def _weights_of(reader: ModelConfig | LM) -> str:
    from trailmark.config import ModelConfig
    from trailmark.models.adapters import weights_print

    return weights_print(reader) if isinstance(reader, ModelConfig) else reader.fingerprint()


def after_markers(answer: str, markers: Sequence[str]) -> str:
    """The text after the last occurrence of each marker, one marker after the other. Without a marker: the whole
    answer."""
    text = answer.strip() if markers else answer
    for marker in markers:
        text = text.rpartition(marker)[2].strip() if marker in text else text
    return text
