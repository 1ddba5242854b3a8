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

import dataclasses
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from trailmark.episodes import won
from trailmark.errors import DataError, ModelError
from trailmark.formats.episode_file import StoredFile
from trailmark.formats.on_demand import OnDemand
from trailmark.formats.turns import Imported
from trailmark.learn.learner import Learner, Update
from trailmark.memory import need_rows
from trailmark.methods.base import Method, ModelInMemory
from trailmark.methods.batches import Batches
from trailmark.methods.offline import Trajectories, count, rows_of, sequence_length
from trailmark.methods.offline_configs import RewardModelRecipe
from trailmark.methods.preference import listed_pairs, places_of_pairs, places_of_stored
from trailmark.models.lm import LM
from trailmark.models.load import load_model
from trailmark.models.readout import Readout
from trailmark.objectives.base import Objective
from trailmark.objectives.classify import Classify
from trailmark.objectives.ranking import Ranking
from trailmark.objectives.value import Value
from trailmark.runs.store import Run
from trailmark.samples import class_sample, pair
from trailmark.seats.config import AnyKind
from trailmark.seats.model_names import stored_model
from trailmark.types import Annotation, Episode, Failed, Sample, Scored

HEAD = "step"


class RewardModelMethod(Method):
    Config = RewardModelRecipe
    reread = True

    @classmethod
    def unread(cls, config: Any) -> tuple[str, ...]:
        """How it is read later, and what is played, which is nothing."""
        asked = () if config.eval_data else ("eval",)
        labels = () if config.kind in ("classes", "scalar") else ("outputs", "label")
        return ("read", "eval.split", "eval.n", *asked, *labels)

    @classmethod
    def check(cls, config: RewardModelRecipe) -> list[str]:
        return [f"data: {path}, {rows_of(path)}" for path in config.files]

    def __init__(self, config: RewardModelRecipe, run: Run):
        need_rows(config.batch, "batch")
        self.lm = load_head(config)
        limit = min(self.lm.context, config.max_len or self.lm.context)
        self.rows, skipped = read_answers(config, config.files, self.lm.tokenizer, limit)
        self.counts = {"rows": len(self.rows)} | {f"skipped_{k}": n for k, n in skipped.items()}
        self.batches = Batches(self.rows, config.batch, config.seed, config.steps, config.epochs)
        config = config.model_copy(update={"steps": self.batches.steps})
        super().__init__(config, run)
        self.held_out = (
            read_answers(config, [config.eval_data], self.lm.tokenizer, limit)[0] if config.eval_data else []
        )
        self.objective = make_objective(config)
        self.learner = Learner({"value": self.lm}, config.learner, {"value": config.learner.optim}, config.steps)

    def updates(self, step: int) -> Iterator[Update]:
        yield Update(self.unscored_samples(step), self.objective, "value")

    def unscored_samples(self, step: int) -> list[Sample]:
        return tied(self.batches.take(step))

    def metrics(self) -> Mapping[str, float]:
        return self.counts

    def evaluate(self, step: int) -> Mapping[str, float]:
        return judged(self.learner, tied(self.held_out), self.config.kind) if self.held_out else {}

    @classmethod
    def models_in_memory(cls, config: Any) -> list[ModelInMemory]:
        """The model; only its head is read."""
        model = config.model if config.begin is None else stored_model(config.model, config.begin)
        return [ModelInMemory("value", model, config.learner.optim, output=False)]

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
NEEDS = {"pairwise": "two answers to compare", "outcome": "a scored answer"}


def read_answers(
    config: RewardModelRecipe, files: Sequence[str], tokenizer: Any, limit: int
) -> tuple[Sequence[Row], dict[str, int]]:
    """The rows of some files, and how many answers were left out and why. Each file is gone over once, and every
    mistake in it is found then; a row is made when it is asked for."""
    parts: list[Sequence[Row]] = []
    skipped: dict[str, int] = {}
    for number, file in enumerate(files):
        found = _Answers(config, file, tokenizer, limit, f"{number}:" if number else "")
        made = {"pairwise": found.pairs, "outcome": found.outcomes}.get(config.kind, found.labelled)()
        for why, n in found.skipped.items():
            count(skipped, why, n)
        if not len(made):
            what = NEEDS.get(config.kind, f"a step with an annotation '{config.label}'")
            raise DataError(f"holds no row to learn from: kind {config.kind} needs {what}.", file)
        parts.append(made)
    if len(parts) == 1:
        return parts[0], skipped
    ends = list(accumulate(len(p) for p in parts))

    def row(i: int) -> Row:
        part = bisect_right(ends, i)
        return parts[part][i - ends[part]]  # counted from the end of the part

    return OnDemand(ends[-1], row), skipped


class _Answers:
    """The answers of one file that fit."""

    def __init__(self, config: RewardModelRecipe, file: str, tokenizer: Any, limit: int, prefix: str):
        self.config, self.tokenizer, self.limit = config, tokenizer, limit
        self.skipped: dict[str, int] = {}
        self.answers = Trajectories()
        self.answers.files.append(StoredFile(config.format, file, tokenizer, config.seat, prefix))

    def _survey(self, look: Callable[[Episode, Sequence[Annotation]], str | None], measured: bool = True) -> None:
        """Keep the answers that fit, unless `look` says why one is left out."""
        fits = lambda e: _long(e, self.config.seat) <= self.limit

        def use(row: int, found: Imported) -> None:
            for index, e in enumerate(found.episodes):
                why = look(e, found.annotations) if fits(e) else "too_long"
                if why is None:
                    self.answers.add(row, index, e)
                else:
                    count(self.skipped, why, 1)

        self.answers.files[0].survey(fits if measured else None, use, skip_bad=False)

    def labelled(self) -> Sequence[Row]:
        """Answers with a label at some step."""

        def look(e: Episode, notes: Sequence[Annotation]) -> str | None:
            return None if self._labels(e, notes) else "unlabelled"

        self._survey(look, measured=False)
        return self._rows(lambda i: self._labels(*self.answers.annotated(i)))

    def _labels(self, e: Episode, notes: Sequence[Annotation]) -> Row:
        mine = [a for a in notes if a.episode == e.id and a.name == self.config.label and a.level == "step"]
        return [s for s in (_labelled(self.config, e, a) for a in mine) if s is not None]

    def outcomes(self) -> Sequence[Row]:
        """Answers that were scored."""
        seat = self.config.seat

        def look(e: Episode, _: Sequence[Annotation]) -> str | None:
            if not isinstance(e.outcome, Scored):
                return "no_reward_failed" if isinstance(e.outcome, Failed) else "no_reward_invalid"
            last_turn(e, seat)
            return None

        def row(i: int) -> Row:
            e = self.answers[i]
            tokens, at = _whole(e, seat, self.tokenizer)
            return [class_sample(tokens, {at: int(won(e))}, e.id, e.group)]

        self._survey(look)
        return self._rows(row)

    def pairs(self) -> Sequence[Row]:
        """Two answers of one prompt, as a file says, or as a success and a failure."""
        c, good, silent = self.config, array("q"), set[int]()

        def look(e: Episode, _: Sequence[Annotation]) -> str | None:
            number = len(self.answers)
            if isinstance(e.outcome, Scored):
                good.append(number)
            if not any(t.seat == c.seat and t.tokens for t in e.turns):
                silent.add(number)
            return None

        self._survey(look)
        if c.pair_file:
            given, lost = listed_pairs(self.answers, c.pair_file, c.seat)
            for why, n in lost.items():
                count(self.skipped, why, n)
        else:
            stored = c.format == "pairs" or (len(self.answers) > 0 and min(self.answers.pair) >= 0)
            places = places_of_stored(self.answers) if stored else places_of_pairs(self.answers, None, c.seed, good)
            for i in silent & {*places.flat}:
                last_turn(self.answers[i], c.seat)  # says that there is none
            given = OnDemand(len(places), lambda n: (self.answers[places[n][0]], self.answers[places[n][1]]))

        def row(n: int) -> Row:
            a, b = (_weighed(*_whole(e, c.seat, self.tokenizer)) for e in given[n])
            return pair(a, b, unit=f"pair {n}")

        return OnDemand(len(given), row, _weight)

    def _rows(self, make: Callable[[int], Row]) -> Sequence[Row]:
        return OnDemand(len(self.answers), make, _weight)


def _weight(row: Row) -> int:
    """About how many bytes a row takes in memory."""
    return sum(600 + 8 * len(s.tokens) * (1 + len(s.streams)) for s in row)


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


def last_turn(e: Episode, seat: str) -> int:
    """The last turn in which the seat wrote something."""
    at = max((i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens), default=None)
    if at is None:
        raise DataError(f"episode '{e.id}' has no turn of seat '{seat}'.")
    return at


def _whole(e: Episode, seat: str, tokenizer: Any) -> tuple[Sequence[int], int]:
    """The tokens of an answer, and the place behind which it is judged: the last one that says something."""
    at = last_turn(e, seat)
    row, t = e.sequence(at), e.turns[at]
    ended = len(t.tokens) > 1 and t.ended and t.tokens[-1] in tokenizer.all_special_ids
    return row, len(row) - 1 - ended


def _weighed(row: Sequence[int], at: int) -> Sample:
    weight = np.zeros(len(row))
    weight[at] = 1.0
    return Sample(np.array(row, np.int64), {"weight": weight}, {"weight": 1.0})


def _long(e: Episode, seat: str) -> int:
    return max((sequence_length(e, i) for i, t in enumerate(e.turns) if t.seat == seat), default=0)


def tied(rows: Sequence[Row]) -> list[Sample]:
    """The samples of some rows; a pair that is drawn twice in one step is two pairs."""
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
    outputs = np.concatenate([out[m] for out, m in zip(outs, on)])
    if kind == "scalar":
        goal = np.concatenate([s.streams["returns"][m] for s, m in zip(read, on)])
        right = (outputs >= 0.5) == (goal >= 0.5)
        return {"accuracy": float(right.mean()), "value": float(((outputs - goal) ** 2).mean())}
    label = np.concatenate([s.streams["label"][m] for s, m in zip(read, on)])
    high = outputs.max(-1, keepdims=True)
    logp = outputs - high - np.log(np.exp(outputs - high).sum(-1, keepdims=True))
    return {
        "accuracy": float((outputs.argmax(-1) == label).mean()),
        "cross_entropy": float(-logp[np.arange(len(label)), label].mean()),
    }
