"""Reward models: a head on a language model that says how good an answer is, or how good each of its steps is.

    classes    a class after each labelled step, by cross-entropy: a process reward model. Labels are annotations of
               steps; a step with a label below 0 has none. All labels of an answer are learnt in one pass over it
    outcome    two classes after the whole answer, by whether it was right: an outcome reward model
    pairwise   a number after the whole answer, -log sigma(r_chosen - r_rejected)
    scalar     a number after each labelled step, by its squared error: label / (outputs - 1)

"After an answer" is behind the last token of its text, before the token that ends the turn: a search reads it there.
The model is called `value` in checkpoints, so `serve --value RUN` and `eval --search … --value RUN` find it, and read
it as `read` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trailmark import formats
from trailmark.errors import DataError, ModelError
from trailmark.learn.learner import Learner, Update
from trailmark.memory import need_rows
from trailmark.methods.base import Held, Method
from trailmark.methods.batches import batch_rows
from trailmark.methods.configs import RewardModelRecipe
from trailmark.methods.offline import won
from trailmark.methods.preference import Pair, listed_pairs, preference_pairs, stored_pairs
from trailmark.models.lm import LM
from trailmark.models.load import load_model
from trailmark.models.readout import Readout
from trailmark.objectives import Classify, Objective, Ranking, Value
from trailmark.runs.store import Run
from trailmark.samples import class_sample, pair, scored
from trailmark.seats.config import AnyKind
from trailmark.seats.locate import stored_model
from trailmark.types import Annotation, Episode, Sample

HEAD = "step"


class RewardModelMethod(Method):
    Config = RewardModelRecipe

    def __init__(self, config: RewardModelRecipe, run: Run):
        need_rows(config.batch, "batch")
        self.lm = load_head(config)
        limit = min(self.lm.context, config.max_len or self.lm.context)
        self.rows, skipped = read_answers(config, config.files, self.lm.tokenizer, limit)
        self.counts = {"rows": len(self.rows)} | {f"skipped_{k}": n for k, n in skipped.items()}
        if config.epochs is not None:
            config = config.model_copy(update={"steps": math.ceil(config.epochs * len(self.rows) / config.batch)})
        super().__init__(config, run)
        self.held_out = (
            read_answers(config, [config.eval_data], self.lm.tokenizer, limit)[0] if config.eval_data else []
        )
        self.objective = make_objective(config)
        self.learner = Learner({"value": self.lm}, config.learner, {"value": config.learner.optim}, config.steps)

    def updates(self, step: int) -> Iterator[Update]:
        yield Update(self.drawn(step), self.objective, "value")

    def drawn(self, step: int) -> list[Sample]:
        return tied([self.rows[r] for r in batch_rows(len(self.rows), self.config.batch, step, self.config.seed)])

    def metrics(self) -> Mapping[str, float]:
        return self.counts

    def evaluate(self, step: int) -> Mapping[str, float]:
        return judged(self.learner, tied(self.held_out), self.config.kind) if self.held_out else {}

    @classmethod
    def holds(cls, config: Any) -> list[Held]:
        """The model; only its head is read."""
        model = config.model if config.begin is None else stored_model(config.model, config.begin)
        return [Held("value", model, config.learner.optim, output=False)]

    @classmethod
    def seats_of(cls, config: Any) -> dict[str, AnyKind]:
        return {}


def load_head(config: RewardModelRecipe) -> LM:
    """The model with its head: a new one of zeros, or the one that it goes on from."""
    outputs = {"classes": config.outputs, "outcome": 2}.get(config.kind, 1)
    model = config.model if config.begin is None else stored_model(config.model, config.begin)
    lm = load_model(model)
    if HEAD not in lm.heads:
        lm.add_head(HEAD, outputs)
    elif (has := int(lm.heads[HEAD].weight.shape[0])) != outputs:  # type: ignore[union-attr,index,arg-type]
        raise ModelError(
            f"begin: the head of {config.begin or config.model.name} has {has} outputs, and kind {config.kind} needs "
            f"{outputs}."
        )
    return lm


def make_objective(config: RewardModelRecipe) -> Objective:
    if config.kind == "pairwise":
        return Ranking(model="value", head=HEAD)
    if config.kind == "scalar":
        return Value(model="value", head=HEAD, at="after")
    return Classify(model="value", head=HEAD)


# --- data ----------------------------------------------------------------------------------------------------------

Row = list[Sample]  # what is learnt from one answer, or the two sides of a pair


def read_answers(
    config: RewardModelRecipe, files: Sequence[str], tokenizer: Any, limit: int
) -> tuple[list[Row], dict[str, int]]:
    """The rows of some files, and how many answers were left out and why."""
    rows: list[Row] = []
    skipped: dict[str, int] = {}
    for number, file in enumerate(files):
        found = formats.read(config.format, file, tokenizer, seat=config.seat, prefix=f"{number}:" if number else "")
        fits = [e for e in found.episodes if _long(e, config.seat) <= limit]
        _count(skipped, "too_long", len(found.episodes) - len(fits))
        made, lost = _rows(config, fits, found.annotations, tokenizer)
        for why, n in lost.items():
            _count(skipped, why, n)
        if not made:
            what = {"pairwise": "two answers to compare", "outcome": "a scored answer"}.get(
                config.kind, f"a step with an annotation '{config.label}'"
            )
            raise DataError(f"holds no row to learn from: kind {config.kind} needs {what}.", file)
        rows += made
    return rows, skipped


def _rows(
    config: RewardModelRecipe, episodes: list[Episode], notes: Sequence[Annotation], tokenizer: Any
) -> tuple[list[Row], dict[str, int]]:
    if config.kind == "pairwise":
        pairs, lost = _pairs(config, episodes)
        sides = [(_whole(a, config.seat, tokenizer), _whole(b, config.seat, tokenizer)) for a, b in pairs]
        return [pair(_weighed(*a), _weighed(*b), unit=f"pair {n}") for n, (a, b) in enumerate(sides)], lost
    if config.kind == "outcome":
        good, dropped = scored(episodes)
        made = [(e, *_whole(e, config.seat, tokenizer)) for e in good]
        rows = [[class_sample(row, {at: int(won(e))}, e.id, e.group)] for e, row, at in made]
        return rows, {f"no_reward_{k}": n for k, n in dropped.items() if n}
    rows = []
    known: dict[str, list[Annotation]] = {}
    for a in notes:
        if a.name == config.label and a.level == "step":
            known.setdefault(a.episode, []).append(a)
    for e in episodes:
        mine = [_labelled(config, e, a) for a in known.get(e.id, ())]
        if made := [s for s in mine if s is not None]:
            rows.append(made)
    return rows, {"unlabelled": len(episodes) - len(rows)} if len(rows) < len(episodes) else {}


def _labelled(config: RewardModelRecipe, e: Episode, note: Annotation) -> Sample | None:
    """A turn with the labels of its steps, each at the step's last token; None: no step has one."""
    at = note.turn or 0
    turn, row = e.turns[at], e.sequence(at)
    if len(note.values) != len(turn.steps):
        raise DataError(
            f"episode '{e.id}': annotation '{config.label}' has {len(note.values)} values for {len(turn.steps)} steps."
        )
    begin = len(row) - len(turn.tokens) - 1
    labels = {begin + end: v for (_, end), v in zip(turn.steps, note.values) if v >= 0}
    if not labels:
        return None
    if wrong := [v for v in labels.values() if v > config.outputs - 1 or (config.kind == "classes" and v != int(v))]:
        raise DataError(
            f"episode '{e.id}': the label {wrong[0]:g} is no class from 0 to {config.outputs - 1}: set outputs."
        )
    if config.kind == "classes":
        return class_sample(row, {t: int(v) for t, v in labels.items()}, e.id, e.group)
    weight, target = np.zeros(len(row)), np.zeros(len(row))
    for t, v in labels.items():
        weight[t], target[t] = 1.0, v / (config.outputs - 1)
    streams = {"value_weight": weight, "returns": target}
    return Sample(np.array(row, np.int64), streams, {"value_weight": float(len(labels))}, episode=e.id, group=e.group)


def _pairs(config: RewardModelRecipe, episodes: list[Episode]) -> tuple[Sequence[Pair], dict[str, int]]:
    if config.pair_file:
        return listed_pairs(episodes, config.pair_file, config.seat)
    if config.format == "pairs" or (episodes and all("pair" in e.info for e in episodes)):
        return stored_pairs(episodes), {}
    return preference_pairs(scored(episodes)[0], None, config.seed), {}


def _whole(e: Episode, seat: str, tokenizer: Any) -> tuple[Sequence[int], int]:
    """The tokens of an answer, and the place behind which it is judged: the last one that says something."""
    at = max((i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens), default=None)
    if at is None:
        raise DataError(f"episode '{e.id}' has no turn of seat '{seat}'.")
    row, t = e.sequence(at), e.turns[at]
    ended = len(t.tokens) > 1 and t.stop == "stop" and t.tokens[-1] in tokenizer.all_special_ids
    return row, len(row) - 1 - ended


def _weighed(row: Sequence[int], at: int) -> Sample:
    weight = np.zeros(len(row))
    weight[at] = 1.0
    return Sample(np.array(row, np.int64), {"weight": weight}, {"weight": 1.0})


def _long(e: Episode, seat: str) -> int:
    return max((len(e.sequence(i)) for i, t in enumerate(e.turns) if t.seat == seat), default=0)


def _count(counts: dict[str, int], name: str, more: int) -> None:
    if more:
        counts[name] = counts.get(name, 0) + more


def tied(rows: Sequence[Row]) -> list[Sample]:
    """The samples of some rows; a pair that is drawn twice in one step is two pairs."""
    import dataclasses

    return [dataclasses.replace(s, unit=f"{n}" if s.unit else "") for n, row in enumerate(rows) for s in row]


# --- evaluation ----------------------------------------------------------------------------------------------------


def judged(learner: Learner, samples: Sequence[Sample], kind: str) -> dict[str, float]:
    """How right the model is on answers that it was not trained on: `accuracy` over labels or pairs (of a scalar: how
    often it is on the right side of one half), and the loss."""
    where = {"pairwise": "weight", "scalar": "value_weight"}.get(kind, "class_weight")
    read = learner.fill(samples, head=Readout("", "head", model="value", head=HEAD, at="after", where=where))
    outs = [np.asarray(s.streams["head"], float) for s in read]
    on = [s.streams[where] != 0 for s in read]
    if kind == "pairwise":
        worth = {(s.unit, s.role): float(out[m].sum()) for s, out, m in zip(read, outs, on)}
        gaps = np.array([worth[u, "chosen"] - worth[u, "rejected"] for u, role in worth if role == "chosen"])
        return {"accuracy": float((gaps > 0).mean()), "ranking": float(np.logaddexp(0, -gaps).mean())}
    said = np.concatenate([out[m] for out, m in zip(outs, on)])
    if kind == "scalar":
        goal = np.concatenate([s.streams["returns"][m] for s, m in zip(read, on)])
        return {"accuracy": float(((said >= 0.5) == (goal >= 0.5)).mean()), "value": float(((said - goal) ** 2).mean())}
    label = np.concatenate([s.streams["label"][m] for s, m in zip(read, on)])
    high = said.max(-1, keepdims=True)
    logp = said - high - np.log(np.exp(said - high).sum(-1, keepdims=True))
    return {
        "accuracy": float((said.argmax(-1) == label).mean()),
        "cross_entropy": float(-logp[np.arange(len(label)), label].mean()),
    }
