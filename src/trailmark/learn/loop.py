"""The training loop of every method: step, evaluate, log, checkpoint, stop early, and resume exactly.

A `Training` defines `updates(step)`, which collects or reads data and yields `Update`s. State that it must keep goes
through `state()` and `load()`. The loop knows nothing else about it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trailmark import stopping
from trailmark.config import CheckpointConfig, RunConfig
from trailmark.errors import RecipeError, RunError, nearest
from trailmark.learn import checkpoint
from trailmark.learn.learner import Learner, Update
from trailmark.learn.watch import Watch
from trailmark.progress import Phases, Progress
from trailmark.runs import checkpoints
from trailmark.runs.store import Run, read_metrics, read_segment, truncate_run
from trailmark.trackers import open_trackers
from trailmark.types import Annotation, Episode, Failed

clock = time.monotonic


class Due:
    """Says when a checkpoint is due by the clock: so many minutes after the last one (0: never), and later if writing
    would take more than a tenth of the time."""

    def __init__(self, minutes: float, clock: Callable[[], float]):
        self.clock, self.wait, self.every, self.since = clock, 60 * minutes, 60 * minutes, clock()

    def now(self) -> bool:
        return self.every > 0 and self.clock() - self.since >= self.wait

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        began = self.clock()
        yield
        self.since = self.clock()
        self.wait = max(self.every, 10 * (self.since - began))


@dataclass(frozen=True)
class Evaluation:
    """A named evaluation, stored as RUN/evaluation/NAME.jsonl. At the end of a run an existing file is kept, unless the
    run has trained further since. `moves` is False if the trained policy does not take part (the initial policy, a
    random player)."""

    name: str
    play: Callable[[], Sequence[Episode]]
    moves: bool = True


class Training:
    """What the loop trains: a learner, and the updates of each step. All other methods have defaults."""

    learner: Learner

    def updates(self, step: int) -> Iterator[Update]:
        """Collect or read the data of a step (from 1), and yield the updates to make with it."""
        raise NotImplementedError(f"{type(self).__name__} must define updates(step)")

    def metrics(self) -> Mapping[str, float]:
        """Further metrics of the last step, next to the losses."""
        return {}

    def evaluate(self, step: int) -> Mapping[str, float]:
        """The metrics of an evaluation during training."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """The state that a checkpoint must hold, next to the learner's."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        return None

    def collect_notes(self) -> contextlib.AbstractContextManager[list[Annotation]]:
        """A `with` block that collects the judge's notes on plays, to be stored next to their episodes. Default: there
        is no judge."""
        return contextlib.nullcontext([])

    def evaluations(self, step: int, last: bool) -> Sequence[Evaluation]:
        """The named evaluations that are due: after step `step` (0: before the first step), or at the end (`last`)."""
        return ()


def train(method: Training, config: RunConfig, run: Run, resume: bool = False) -> dict[str, float]:
    """Run `config.steps` steps, or resume from the newest checkpoint. Then run the final evaluations that are
    missing."""
    last, step = run_steps(method, config, run, resume)
    for e in method.evaluations(step, True):
        if not is_made(run, e, step):
            keep_evaluation(method, run, e)
    return last


def keep_evaluation(method: Training, run: Run, e: Evaluation) -> None:
    """Play an evaluation, and store its episodes and the judge's notes on them."""
    with method.collect_notes() as notes:
        episodes = e.play()
    run.keep_evaluation(e.name, episodes, notes)


def is_made(run: Run, e: Evaluation, step: int) -> bool:
    """Whether a final evaluation exists and was made with the policy of step `step`."""
    path = run.path / "evaluation" / f"{e.name}.jsonl"
    if not path.exists() or not e.moves:
        return path.exists()
    played = {p.version for episode in read_segment(path) for p in episode.players.values() if p.kind == "trained"}
    return played == {step}


def run_steps(method: Training, config: RunConfig, run: Run, resume: bool) -> tuple[dict[str, float], int]:
    """Run the steps. Returns the metrics of the last one, and the step that the run has reached."""
    start, bad, stopped = 0, 0, False
    best: list[list[float]] = []  # [metric, step] of the kept checkpoints, best first
    checkpoints.sweep(run.checkpoints_dir)
    checkpoint.seed_all(config.seed)
    if resume and (found := checkpoint.go_back(run.checkpoints_dir, method.learner, method.load)):
        start, best, bad, stopped = found["step"], found["best"], found["without_better"], found["stopped"]
        keep(run, config, best)
    elif resume:
        print(f"{run.path} has no checkpoint yet: it starts again at step 1", file=sys.stderr)
    if resume:
        truncate_run(run, start)
        if start >= config.steps or stopped:
            print(f"{run.path} is complete: it ended at step {start}", file=sys.stderr)
            return {}, start
    last: dict[str, float] = {}
    metrics: dict[str, float] = {}
    step = start
    for e in method.evaluations(0, False) if start == 0 else ():  # with the initial models
        if not is_made(run, e, 0):
            keep_evaluation(method, run, e)
    if config.steps == 0:  # nothing to train: the checkpoint holds the initial models
        state = {"best": best, "without_better": bad, "method": dict(method.state()), "stopped": False}
        checkpoint.save(run.checkpoints_dir, 0, method.learner, state)
        return last, 0
    watch = Watch()
    trackers = open_trackers(config.trackers, run, config, resumed_at=start)
    by_time = Due(config.checkpoint.minutes, clock)
    with (
        stopping.after_step() as signal,
        contextlib.closing(trackers),
        Progress(config.steps, start, config.name) as progress,
    ):
        if start == 0 and config.eval.every and config.eval.first and not read_metrics(run.path):
            metrics = {f"eval/{k}": v for k, v in method.evaluate(0).items()}
            run.log(0, metrics)
            trackers.log(0, metrics)
        for step in range(start + 1, config.steps + 1):
            began = time.perf_counter()
            metrics = {}
            phases = Phases()
            for update in phases.through("collect", method.updates(step)):
                with phases.phase("learn", tokens=update.passes * sum(len(s.tokens) for s in update.samples)):
                    metrics |= method.learner.update(update)
            metrics |= method.metrics()
            phases.add("collect", 0, tokens=int(metrics.get("written_tokens", 0)))
            trained = time.perf_counter() - began
            for e in method.evaluations(step, False):
                keep_evaluation(method, run, e)
            stop = False
            if config.eval.every and (step % config.eval.every == 0 or step == config.steps):
                metrics |= {f"eval/{k}": v for k, v in method.evaluate(step).items()}
                _check_evaluation(config, run, step, metrics)
            value = metrics.get(config.checkpoint.metric)
            if value is not None:
                best, better = _ranked(best, value, step, config.checkpoint)
                bad = 0 if better else bad + 1
                stop = config.eval.patience is not None and bad >= config.eval.patience
            last = metrics
            timings = {"seconds": time.perf_counter() - began, "train_seconds": trained, **phases.numbers}
            run.log(step, metrics, timings)
            trackers.log(step, metrics)
            progress.update(step, metrics, timings)
            for sign in watch.look(metrics):
                progress.warn(f"step {step}: {sign}")
            due = config.checkpoint.every and step % config.checkpoint.every == 0
            kept = config.checkpoint.keep_best and any(b[1] == step for b in best)
            planned = due or stop or step == config.steps or kept
            if planned or signal.number is not None or by_time.now():
                with by_time.saving():
                    run.sync()
                    state = {"best": best, "without_better": bad, "method": dict(method.state()), "stopped": stop}
                    checkpoint.save(run.checkpoints_dir, step, method.learner, state, extra=not planned)
                    keep(run, config, best)
            if signal.number is not None:
                signal.note = f"step {step} is done and its checkpoint is written"
            if stop or signal.number is not None:
                break
    return last, step


def keep(run: Run, config: RunConfig, best: list[list[float]]) -> None:
    """Delete all checkpoints but the newest and the best ones, and an extra one if it is the newest of all."""
    named = [int(step) for _, step in best] if config.checkpoint.keep_best else []
    checkpoints.prune(run.checkpoints_dir, config.checkpoint.keep_last, named, extra=True)


def _check_evaluation(config: RunConfig, run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """Raise an error if every episode of an evaluation failed, or if it does not report `checkpoint.metric`."""
    if metrics.get("eval/failed") and "eval/reward" not in metrics:
        raise RunError(f"step {step}: every episode of the evaluation failed{_first_failure(run, step)}")
    if metrics.get("eval/invalid") and "eval/reward" not in metrics:
        return  # the policy wrote nothing that could be scored: this step has no metric, and training goes on
    wanted = config.checkpoint.metric
    if wanted not in metrics:
        known = [k for k in metrics if k.startswith("eval/")]
        hint = nearest(wanted, known) if known else " There is nothing to evaluate on."
        raise RecipeError(f"checkpoint.metric is '{wanted}', which the evaluation does not report.{hint}")


def _ranked(
    best: list[list[float]], value: float, step: int, config: CheckpointConfig
) -> tuple[list[list[float]], bool]:
    """The best steps with this one added, best first, cut to the number to keep; and whether this one is the best."""
    sign = 1 if config.mode == "max" else -1
    better = not best or sign * value > sign * best[0][0]
    ranked = sorted([*best, [value, step]], key=lambda b: (-sign * b[0], b[1]))
    return ranked[: max(1, config.keep_best)], better


def _first_failure(run: Run, step: int) -> str:
    """Why the first episode of an evaluation failed, if its episodes are stored."""
    path = run.path / "evaluation" / f"{step:06d}.jsonl"
    found = (e.outcome for e in read_segment(path)) if path.exists() else iter(())
    why = next((o.error for o in found if isinstance(o, Failed)), "")
    return f"; the first: {why}" if why else ""
