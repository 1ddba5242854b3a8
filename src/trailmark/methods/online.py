"""Methods that learn from what they play: what `policy_gradient` and `step_rl` share.

Each step plays `n` episodes for each of `prompts_per_step` starts with the policy as it is, stores them, and learns
from those that were scored. A subclass defines what they are worth and how they are learnt (`updates`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trailmark.errors import TaskError
from trailmark.learn.watch import spread, summary
from trailmark.memory import need_rows
from trailmark.methods.base import Method, ModelInMemory
from trailmark.methods.batches import Walk
from trailmark.models.load import load_model
from trailmark.rollout.play import play
from trailmark.runs.checkpoints import listed
from trailmark.runs.store import Run, write_segment
from trailmark.samples import scored
from trailmark.seats.config import LocalSeat, trained_seats
from trailmark.seats.open_seats import OpenSeats
from trailmark.tasks import keep_judge
from trailmark.tasks.base import TaskSource, draw_tasks
from trailmark.types import Annotation, Episode, Scored, Task


class OnlineMethod(Method):
    """Opens the task and the seats, loads the policy, plays and evaluates. A subclass makes `self.learner` and defines
    `updates`."""

    def __init__(self, config: Any, run: Run, apart: bool = False):
        """`apart`: the engine plays with a copy of the weights, which only `publish` changes."""
        need_rows(config.prompts_per_step * config.n, "prompts_per_step * n")
        self.source = self.open_source(config)
        self.check_asked(config, self.source)
        self.rows = self.walk(config, self.source)
        config = config.model_copy(update={"steps": self.rows.steps(config.steps)})
        super().__init__(config, run)
        keep_judge(self.source, run.path)
        self.policy = load_model(config.model)
        seats = self.seats_of(config)
        self.seat, *_ = self.trained = trained_seats(seats)
        self.opened = OpenSeats(seats, dict.fromkeys(self.trained, self.policy), config.seed, apart=apart)
        self.opened.bind(self.source)
        if not listed(run.checkpoints_dir):  # before a run, not amid it
            self.check_rows()
        self._metrics: dict[str, float] = {}

    @classmethod
    def walk(cls, config: Any, source: TaskSource) -> Walk:
        return Walk(source, config.prompts_per_step, config.seed, epochs=config.epochs)

    def check_rows(self) -> None:
        """Refuse rows that the policy or the judge cannot read, if the task has rows (`tasks/prompts.py`)."""
        source: Any = self.source
        if not hasattr(source, "must_fit"):
            return
        rows = self.played_rows(self.config, source)
        source.must_render(self.policy.tokenizer, rows)
        source.must_fit(self.policy.tokenizer, self.opened.engines[self.seat].max_len, rows)
        if source.judge is not None:
            source.judge.must_read(rows, self.opened.seats[0].max_tokens)

    @classmethod
    def played_rows(cls, config: Any, source: TaskSource) -> list[Task]:
        """The rows that a run will play, in training and in evaluations."""
        e = config.eval
        return [*source.tasks("train"), *(draw_tasks(source, e.split, e.n, config.seed) if e.every else ())]

    @classmethod
    def players(cls, config: Any) -> list[ModelInMemory]:
        """Every model at the table: the trained one first, which all trained seats share."""
        seats = cls.seats_of(config)
        trained, found = trained_seats(seats), list[ModelInMemory]()
        for name, seat in seats.items():
            if name == trained[0] and isinstance(seat, LocalSeat):
                found += cls.player(config, name, seat)
            elif name not in trained and isinstance(seat, LocalSeat) and seat.model is not None:
                found.append(ModelInMemory(name, seat.model, None, seat.engine))
        return found

    @classmethod
    def player(cls, config: Any, name: str, seat: LocalSeat) -> list[ModelInMemory]:
        """The trained model, and the one that it is sampled from."""
        return [ModelInMemory(name, config.model, config.learner.optim, seat.engine)]

    # -- a step -------------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> list[Episode]:
        """Play the episodes of a step and store them. Returns those that can be learnt from, if any."""
        played, notes = self.batch(step)
        episodes = [self.stored(e) for e in played]
        self.run.annotate(step, notes)
        write_segment(self.run.episodes_dir, step, episodes)
        good, dropped = scored(episodes)
        self._metrics = {**summary(good), **spread(good), **dropped, **self.judge_metrics(notes)}
        if not good and not dropped["invalid"]:  # invalid ones are counted, and the step has nothing to learn from
            why = next((e.outcome for e in episodes if not isinstance(e.outcome, Scored)), None)
            raise TaskError(
                f"step {step}: every one of the {len(episodes)} episodes failed, so there is nothing to learn from; "
                f"the first: {why}"
            )
        return good

    def batch(self, step: int) -> tuple[list[Episode], list[Annotation]]:
        """The episodes of a step, played with the policy as it is, and a judge's notes."""
        c, notes = self.config, list[Annotation]()
        return self.play(self.rows.take(step), c.n, c.seed, f"{step}:", step - 1, notes), notes

    def stored(self, e: Episode) -> Episode:
        """An episode as it is stored."""
        return e

    def play(
        self, tasks: Sequence[Task], n: int, seed: int, prefix: str, version: int, notes: list[Annotation] | None = None
    ) -> list[Episode]:
        """Play episodes with the current policy. A judge's annotations go into `notes`."""
        self.opened.publish(version)
        return self.play_now(tasks, n, seed, prefix, notes)

    def play_now(
        self, tasks: Sequence[Task], n: int, seed: int, prefix: str, notes: list[Annotation] | None
    ) -> list[Episode]:
        """Play episodes with the weights that the engine has."""
        c, protocol = self.config, self.protocol(self.config, self.source)
        return play(self.source, tasks, self.opened.seats, protocol, n, seed, prefix, notes=notes, failures=c.failures)

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> Mapping[str, float]:
        c, judge = self.config, self.source.judge
        tasks = draw_tasks(self.source, c.eval.split, c.eval.n, c.seed)
        measure = lambda found: [*(judge.compare(found) if judge is not None else ()), *self.own_notes(found)]
        episodes = self.keep_plays(step, lambda: self.play(tasks, 1, c.seed + 1, "eval:", step), measure)
        good, dropped = scored(episodes)
        return {**summary(good), **dropped, **self.judge_metrics(self.noted)}

    def own_notes(self, episodes: list[Episode]) -> list[Annotation]:
        """Further notes on an evaluation, which are stored with it."""
        return []
