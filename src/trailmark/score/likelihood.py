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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trailmark.ask.store import Store
from trailmark.chat import answered
from trailmark.errors import DataError, JudgeError, JudgeGone, ModelError, RecipeError
from trailmark.score.gold import Gold, Likelihood

if TYPE_CHECKING:
    from trailmark.config import ModelConfig, ServerConfig
    from trailmark.models.layout import Shape
    from trailmark.models.lm import LM
    from trailmark.score.model_server import ServedModel

Rule = Literal["text", "turn", "template"]
Context = str | Sequence[Mapping[str, Any]]
Gain = Literal["stepped", "clipped", "binary", "linear", "nll", "contrastive"]
NEAR = 1e-6  # relative: numbers of one stored line follow from each other
KEPT = 1 << 20  # tokens of rows that a scorer keeps: the paper's step has 64 rows of up to 12,000
STEPS = ((0.05, 0.5), (1.0, 0.9), (2.0, 1.0))  # VR-CLI: smallest improvement in percent, and its reward


def gold_row(tokenizer: Any, context: Context, gold: str, rule: Rule = "turn") -> Gold:
    """The context as the model sees it, followed by the gold text as its answer, which no template trims. A context is
    plain text, or messages that go through the chat template. What is scored: "text" is the gold text only; "turn" adds
    the token that ends it (a sampler writes it); "template" adds what the template writes after that (the reference
    implementation of VR-CLI scores it)."""
    talk = [{"role": "user", "content": context}] if isinstance(context, str) else list(context)
    made = answered(tokenizer, talk, gold, template=None if isinstance(context, str) else "own")
    start, over = made.answer
    if over <= start:
        raise DataError("the gold text has no tokens: there is nothing to score")
    return Gold(made.tokens, start, {"text": over, "turn": made.end, "template": len(made.tokens)}[rule])


def likelihoods(
    lm: LM | ServedModel, rows: Sequence[Gold], shape: Shape = "auto", amp: bool = False
) -> list[Likelihood]:
    """The likelihood of each row's gold text under the model. Shared prefixes are computed once. Baselines and rewards
    both come from here."""
    import numpy as np

    from trailmark.models.forward import fill, pack
    from trailmark.models.lm import LM
    from trailmark.models.readout import Readout
    from trailmark.types import Sample

    if not rows:
        return []
    if not isinstance(lm, LM):
        return lm.likelihoods(rows)
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


def gain_reward(
    percent: float,
    kind: Gain = "stepped",
    steps: Sequence[tuple[float, float]] = STEPS,
    other: float = 0.0,
    weight: float = 0.5,
) -> float:
    """The reward of an improvement. `nll` is the difference of the two losses, which follows from the percentage.
    `contrastive` subtracts a part of `other`, by how much the same answer improves the gold text of another story: a
    plan that would help any text is worth less."""
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
    if kind == "contrastive":
        return percent - weight * other
    raise RecipeError(f"unknown kind of reward '{kind}': stepped, clipped, binary, linear, nll or contrastive.")


def smallest_reward(kind: Gain, steps: Sequence[tuple[float, float]] = STEPS, others: Sequence[float] = ()) -> float:
    """The reward of an answer without a plan. No valid answer earns less: neither by the definition of its kind, nor
    (the last three kinds have no bound below) among `others`, the rewards of the valid answers to the same row."""
    if kind == "stepped":
        return min((0.0, *(reward for _, reward in steps)))
    return 0.0 if kind in ("clipped", "binary") else min((0.0, *others))


class Baselines:
    """Likelihoods of gold texts, stored in a file by the model, the tokens and the scored part. A second run over the
    same rows computes nothing. Another model or template has other keys."""

    def __init__(self, lm: LM | ServedModel, path: str | Path | None = None, shape: Shape = "auto", amp: bool = False):
        self.lm, self.shape, self.amp = lm, shape, amp
        self.cache = Store(path)
        dtype = str(getattr(lm, "dtype", "")).removeprefix("torch.")
        self.fingerprint = f"{lm.fingerprint()[:16]} {dtype}" + " amp" * amp if dtype else lm.fingerprint()
        self.computed = 0
        self.failed: dict[str, str] | None = None  # None: a failed request is an error; else why, by key
        self.asked = set[str]()

    def get(self, rows: Sequence[Gold]) -> list[Likelihood]:
        """If requests may fail (`failed` is not None), the likelihood of such a row is not a number."""
        self._must_be_the_same_server()
        same: dict[tuple[int, int, int], str] = {}  # several plays of a row share its tokens, and have one key
        for row in rows:
            if (at := (id(row.tokens), row.start, row.end)) not in same:
                same[at] = self._key(row)
        keys = [same[id(row.tokens), row.start, row.end] for row in rows]
        self.asked |= set(keys)
        given_up = self.failed or {}
        new = {key: row for key, row in zip(keys, rows) if key not in self.cache and key not in given_up}
        for some in self._portions(list(new)):
            try:
                made: Sequence[Likelihood | None] = self.read([new[key] for key in some])
            except JudgeGone as problem:
                made = problem.made
                if self.failed is None or not made:
                    self._store(some, made)
                    raise
                self.failed |= {key: str(problem) for key, found in zip(some, made) if found is None}
            self._store(some, made)
        return [self._stored(key) for key in keys]

    def _store(self, keys: Sequence[str], made: Sequence[Likelihood | None]) -> None:
        for key, found in zip(keys, made):
            if found is not None:
                self.cache.add(key, {"logp": found.logp, "tokens": found.tokens, "ppl": found.perplexity})
                self.computed += 1

    def _stored(self, key: str) -> Likelihood:
        if key not in self.cache:
            return Likelihood(math.nan, 1)
        row: dict[str, Any] = self.cache[key]
        logp, n = row.get("logp", ""), row.get("tokens", "")
        may = type(logp) in (float, int) and type(n) is int and n > 0 and logp <= NEAR * n
        if key in self.cache.lines and not may:  # somebody else wrote it, or changed it
            raise DataError(
                f"logp is {logp!r} over {n!r} tokens, and the log-probability of a text is a number not above 0: "
                "remove the line, and it is computed again.",
                self.cache.path, self.cache.lines[key],
            )  # fmt: skip
        return Likelihood(float(logp), int(n))

    def read(self, rows: Sequence[Gold]) -> list[Likelihood]:
        """The likelihoods of rows; nothing is stored."""
        return likelihoods(self.lm, rows, self.shape, self.amp)

    def _key(self, row: Gold) -> str:
        what = json.dumps([self.fingerprint, row.start, row.end, list(row.tokens)])
        return hashlib.sha256(what.encode()).hexdigest()[:32]

    def _portions(self, keys: list[str]) -> Iterator[list[str]]:
        """All at once: shared prefixes are computed once. From a server in portions: if it dies, the last is lost."""
        size = len(keys) if (server := getattr(self.lm, "config", None)) is None else server.concurrency
        return (keys[k : k + size] for k in range(0, len(keys), max(1, size)))

    def _must_be_the_same_server(self) -> None:
        """A server may have another model under the same name than the one that filled this file."""
        if (probe := getattr(self.lm, "probe", None)) is None:
            return
        from trailmark.score.model_server import same_model

        key = f"probe of {self.fingerprint}"
        if key not in self.cache:
            self.cache.add(key, {"logps": list(probe)})
        elif not same_model(self.cache[key].get("logps"), probe):
            raise JudgeError(
                f"{self.cache.path} holds likelihoods of another model that was served as '{self.lm.name}': start that "
                "one again, or move the file away."
            )


class TextScorer:
    """The `scorer` of a reward function: likelihoods of texts under a model that is loaded on first use. Results are
    stored, so the baseline of a row is computed once. With a `server` the model is behind it, and only the tokenizer of
    `model` is loaded here. `key` is the recipe key of the server."""

    def __init__(
        self,
        model: ModelConfig | LM,
        cache: str | Path | None = None,
        server: ServerConfig | None = None,
        key: str = "reward.server",
    ):
        self.model, self.path, self.server, self.key = model, cache, server, key
        self.files: Mapping[str, Path] = {}  # where a row stands, by its id; for errors
        self._kept: dict[Any, Gold] = {}  # of texts that may come again, the last `KEPT` tokens
        self._tokens = 0

    @cached_property
    def baselines(self) -> Baselines:
        return Baselines(self.lm, self.path)

    @cached_property
    def lm(self) -> LM | ServedModel:
        """The model that reads the texts."""
        from trailmark.config import ModelConfig

        given: Any = self.model
        try:
            if self.server is not None:
                from trailmark.models.load import load_tokenizer, tokenizer_by_name
                from trailmark.score.model_server import ServedModel

                if not isinstance(given, ModelConfig):
                    return ServedModel(self.server, given.tokenizer, self.key)
                name, known = given.tokenizer or given.name, ("tiny", "smollm2")
                tokenizer = tokenizer_by_name(name) if name in known else load_tokenizer(name, given.revision)
                return ServedModel(self.server, tokenizer, self.key)
            if isinstance(given, ModelConfig):
                from trailmark.models.load import load_model

                given = load_model(given).freeze()
        except ModelError as problem:
            raise ModelError(f"reward.model: {problem}") from problem
        return given

    @property
    def tokenizer(self) -> Any:
        return self.lm.tokenizer

    @property
    def context(self) -> int | None:
        """The most tokens that the model reads. None: the server knows."""
        return self.lm.context

    def keep(self, path: Path) -> None:
        """Store results in this file from now on."""
        self.path = path
        if "baselines" in self.__dict__:
            self.baselines.cache = Store(path)

    def check(self) -> None:
        """Refuse a server that cannot be used, before anything is played."""
        if self.server is not None:
            self.lm.check()  # type: ignore[union-attr]

    def likelihoods(
        self, rows: Sequence[tuple[Context, str]], rule: Rule = "turn", names: Sequence[str] = ()
    ) -> list[Likelihood]:
        """The likelihood of each gold text given its context: plain text, or messages. `names` are for errors."""
        return self.baselines.get(self._rows(rows, rule, names, again=True))

    def fresh(
        self, rows: Sequence[tuple[Context, str]], rule: Rule = "turn", names: Sequence[str] = ()
    ) -> list[Likelihood]:
        """The same, but nothing is looked up or stored: for texts that come once."""
        return self.baselines.read(self._rows(rows, rule, names))

    def fresh_where_fits(
        self, rows: Sequence[tuple[Context, str]], rule: Rule = "turn", names: Sequence[str] = ()
    ) -> list[Likelihood | None]:
        """The same; None for a row that is longer than the model reads."""
        made = self._made(rows, rule, names)
        read = iter(self.baselines.read([row for row in made if self._fits(row)]))
        return [next(read) if self._fits(row) else None for row in made]

    def _rows(
        self, rows: Sequence[tuple[Context, str]], rule: Rule, names: Sequence[str], again: bool = False
    ) -> list[Gold]:
        made = self._made(rows, rule, names, again)
        for k, row in enumerate(made):
            if not self._fits(row):
                name = f"row '{names[k]}'" if names else "a row"
                raise DataError(
                    f"{name} has {row.end} tokens with its plan and gold text, and the model reads {self.context}: "
                    "choose a model with a longer context, or shorter rows.",
                    self.files.get(names[k]) if names else None,
                )
        return made

    def _made(
        self, rows: Sequence[tuple[Context, str]], rule: Rule, names: Sequence[str], again: bool = False
    ) -> list[Gold]:
        """`again`: the texts may come again, as those of a row do with each of its plays."""
        called = [self._called(name) for name in names] or [""] * len(rows)
        make = self._kept_row if again else partial(gold_row, self.tokenizer)
        made = (make(context, gold, rule) for context, gold in rows)
        return [replace(row, name=name) for row, name in zip(made, called, strict=True)]

    def _kept_row(self, context: Context, gold: str, rule: Rule) -> Gold:
        """`gold_row`, rendered and encoded once for texts that are the same."""
        tokenizer = self.tokenizer
        try:
            key = (_exact(context), _exact(gold), rule, len(tokenizer), str(tokenizer.chat_template))
            row = self._kept.pop(key, None)
        except TypeError:  # a message has a field that cannot be compared
            return gold_row(tokenizer, context, gold, rule)
        if row is None:
            row = gold_row(tokenizer, context, gold, rule)
            self._tokens += len(row.tokens)
        self._kept[key] = row  # the last one that was used
        while self._tokens > KEPT and len(self._kept) > 1:
            self._tokens -= len(self._kept.pop(next(iter(self._kept))).tokens)
        return row

    def _called(self, name: str) -> str:
        return f"{self.files[name]}: row '{name}'" if name in self.files else f"row '{name}'"

    def fits(self, context: Context, gold: str, rule: Rule = "turn") -> bool:
        """Whether the model can read a gold text in its context."""
        return self._fits(gold_row(self.tokenizer, context, gold, rule))

    def _fits(self, row: Gold) -> bool:
        return self.context is None or row.end <= self.context

    def likelihood(self, context: Context, gold: str, rule: Rule = "turn") -> Likelihood:
        return self.likelihoods([(context, gold)], rule)[0]

    def improvement(self, before: Context, after: Context, gold: str, rule: Rule = "turn") -> float:
        """By how many percent the perplexity of a text falls from one context to another."""
        base, now = self.likelihoods([(before, gold), (after, gold)], rule)
        return improvement(base, now)


def _exact(value: Any) -> Any:
    """Something that is equal only for texts that are encoded alike: marks count, too."""
    if isinstance(value, Mapping):
        return tuple((k, _exact(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(_exact(v) for v in value)
    return type(value).__name__, getattr(value, "spans", ()), value


def after_markers(answer: str, markers: Sequence[str]) -> str:
    """The text after the last occurrence of each marker, one marker after the other. Without a marker: the whole
    answer."""
    text = answer.strip() if markers else answer
    for marker in markers:
        text = text.rpartition(marker)[2].strip() if marker in text else text
    return text
