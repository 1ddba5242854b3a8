"""Learning from a file of scored trajectories: what `oreo` and `preference` share.

Trajectories that cannot be learnt from are left out and counted. The policy can be evaluated on a task during training,
and once as it was before training (`final.start`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trailmark import formats
from trailmark.engines.local import LocalEngine, local_engine
from trailmark.errors import DataError, RecipeError
from trailmark.formats.rows import each
from trailmark.learn.learner import Learner
from trailmark.learn.loop import Evaluation
from trailmark.learn.watch import summary
from trailmark.memory import need_rows
from trailmark.methods.base import Method, trained_seat
from trailmark.methods.configs import OfflineRecipe
from trailmark.models.lm import LM
from trailmark.models.load import load_model, load_reference
from trailmark.objectives import Objective
from trailmark.rollout.play import play
from trailmark.runs.data_files import must_be_file
from trailmark.runs.store import Run
from trailmark.samples import chains, scored
from trailmark.seats.config import AnyKind, LocalSeat, filled
from trailmark.tasks import get_task, keep_judge
from trailmark.tasks.base import draw_tasks
from trailmark.types import Episode, Scored

NOTHING = ("nothing would be trained", "nothing to learn from")  # how readers report a row without an action


class OfflineMethod(Method):
    """Reads the file, loads the policy and the reference, and plays evaluations. A subclass defines what the rows are
    and how they are learnt: `make_rows`, `make_learner`, `make_objective` and `updates`."""

    Config = OfflineRecipe

    def __init__(self, config: Any, run: Run):
        if not config.files or not all(config.files):
            raise RecipeError("data: name a file of scored trajectories")
        need_rows(config.batch, "batch")
        policy = load_model(config.model)
        self.max_len = min(policy.context, config.max_len or policy.context)
        found = read_scored(config.files, config.format, policy.tokenizer, config.seat, self.max_len)
        self.rows, skipped = self.make_rows(config, found.episodes, policy.tokenizer)
        self.counts = {"rows": len(self.rows)} | {f"skipped_{k}": n for k, n in {**found.skipped, **skipped}.items()}
        if config.epochs is not None:
            config = config.model_copy(update={"steps": math.ceil(config.epochs * len(self.rows) / config.batch)})
        super().__init__(config, run)
        self.models: dict[str, LM] = {"policy": policy}
        self.ref = self.make_reference()
        self.learner = self.make_learner()
        self.objective = self.make_objective()
        self.source = get_task(config.task.name, **config.task.options) if config.task else None
        self.engine = local_engine(policy, config.engine) if config.task else None
        if self.source is not None:
            keep_judge(self.source, run.path)
            self.source.bind(policy.tokenizer)

    def make_rows(self, config: Any, episodes: Sequence[Episode], tokenizer: Any) -> tuple[list[Any], dict[str, int]]:
        """The rows that batches are drawn from, and how many trajectories could not be used, by reason."""
        raise NotImplementedError(
            f"{type(self).__name__} must define make_rows(config, episodes, tokenizer), which returns the rows that a "
            "batch is drawn from and how many trajectories it left out, by reason"
        )

    def make_reference(self) -> str:
        """The name of the reference in the learner. A LoRA run needs no second copy: its base model is the
        reference."""
        if (ref := load_reference(self.config.model, self.config.ref)) is None:
            return "policy/base"
        self.models["ref"] = ref
        return "ref"

    def make_learner(self) -> Learner:
        return Learner(self.models, self.config.learner, total=self.config.steps)

    def make_objective(self) -> Objective:
        """The objective that is trained on the rows."""
        raise NotImplementedError(f"{type(self).__name__} must define make_objective(), which returns an Objective")

    def metrics(self) -> Mapping[str, float]:
        return self.counts

    def evaluate(self, step: int) -> Mapping[str, float]:
        if self.source is None or self.engine is None:
            return {}
        engine = self.engine
        engine.publish(step, self.models["policy"])
        episodes = self.keep_plays(step, lambda: self.play(engine))
        good, dropped = scored(episodes)
        return {**summary(good), **dropped}

    def play(self, engine: LocalEngine) -> list[Episode]:
        """Play the starts of an evaluation, with the random draws of evaluations."""
        c = self.config
        assert self.source is not None
        tasks = draw_tasks(self.source, c.eval.split, c.eval.n, c.seed)
        return play(self.source, tasks, [trained_seat(engine, c.seat, c.sampling)], seed=c.seed + 1, prefix="eval:")

    def evaluations(self, step: int, last: bool) -> Sequence[Evaluation]:
        """At the end: an evaluation of the policy as it was before training."""
        if not last or not self.config.final.start:
            return ()
        first = lambda: self.play(local_engine(load_model(self.config.model), self.config.engine))
        return (Evaluation("start", first, moves=False),)

    @classmethod
    def seats_of(cls, config: Any) -> dict[str, AnyKind]:
        return filled({config.seat: LocalSeat(trained=True)}, config.sampling, config.engine)

    @classmethod
    def check(cls, config: Any) -> list[str]:
        """The data file may not exist yet."""

        def rows_of(path: str) -> str:
            must_be_file(Path(path), "data")
            return f"{len(each(path, lambda row: row)[0])} rows" if Path(path).exists() else "which is not here yet"

        return [f"data: {path}, {rows_of(path)}" for path in config.files if path]


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """The episodes that can be learnt from, and how many were left out, by reason."""

    episodes: list[Episode]
    skipped: Mapping[str, int] = field(default_factory=dict)


def read_scored(paths: Sequence[str], format: str, tokenizer: Any, seat: str, max_len: int) -> Data:
    """Read the trajectories of some files. Left out and counted: no action, an empty response, more than `max_len`
    tokens (a trajectory that is cut would be credited as if it had ended), no reward. Any other fault of a row is an
    error."""
    episodes: list[Episode] = []
    skipped: dict[str, int] = {}
    for number, path in enumerate(paths):
        more = {"prefix": f"{number}:"} if len(paths) > 1 else {}
        found = formats.read(format, path, tokenizer, seat=seat, skip_bad=True, **more)
        for why in found.skipped:
            if not any(words in why for words in NOTHING):
                raise DataError(why)
        _count(skipped, "no_action", len(found.skipped))
        episodes += found.episodes
    if format != "pairs":
        episodes, dropped = scored(episodes)
        _count(skipped, "no_reward", dropped["invalid"])
        _count(skipped, "failed", dropped["failed"])
    kept = []
    for e in episodes:
        if why := _useless(e, seat, max_len):
            _count(skipped, why, 1)
        else:
            kept.append(e)
    if not kept and set(skipped) == {"several_sequences"}:
        raise DataError(
            "every episode is several sequences (each turn was shown a prompt of its own): values are summed along "
            "one sequence, so the world must be played as one growing conversation.",
            paths[0],
        )
    if not kept:
        why = ", ".join(f"{n} {name}" for name, n in skipped.items()) or "it is empty"
        raise DataError(f"holds no trajectory of seat '{seat}' that can be learnt from ({why}).", paths[0])
    if len({e.id for e in kept}) < len(kept):
        raise DataError("two episodes have the same id: give each file's episodes ids of their own.", paths[-1])
    return Data(kept, skipped)


def _count(counts: dict[str, int], name: str, more: int) -> None:
    if more:
        counts[name] = counts.get(name, 0) + more


def _useless(e: Episode, seat: str, max_len: int) -> str:
    """The reason why a trajectory cannot be learnt from; empty if it can."""
    mine = [t for t in e.turns if t.seat == seat and t.tokens]
    if not mine:
        return "no_action"
    # rows that came as text; an episode that was played may have empty turns
    if "format" in e.info and not any(t.text.strip() for t in mine):
        return "empty"
    found = [c for c in chains(e, seat) if any(e.turns[i].tokens for i in c)]
    if len(found) > 1:
        return "several_sequences"  # a turn has its own prompt
    return "too_long" if len(e.sequence(found[0][-1])) > max_len else ""


def won(e: Episode) -> bool:
    """Whether a trajectory is a success: as its world says, or else if its reward is positive."""
    outcome = e.outcome
    if not isinstance(outcome, Scored):
        return False
    return outcome.reward > 0 if outcome.success is None else outcome.success


def successes(episodes: Sequence[Episode]) -> list[Episode]:
    return [e for e in episodes if won(e)]
