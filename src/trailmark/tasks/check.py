"""A checker for any task: it plays a few episodes and writes one sentence for each broken rule.

report = check_task(get_task("my_package.my_task:Make"))
assert report.ok, report
"""

from __future__ import annotations

import json
import math
import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trailmark.errors import TaskError
from trailmark.tasks.base import Observation, Step, TaskSource, World, declared
from trailmark.types import Failed, Invalid, Scored, Task

STRANGE = "\x00 no such action"  # an action that is not listed, as a model may write one
SOME_TEXT = ("", "0", "a", "yes", "#### 1", "look around\nthen stop")
FEW = 4  # menus of at most so many labels have each of them tried alone; of longer ones the first and the last
FROM_DATA = 8  # most values of a task's data that are tried as actions


@dataclass
class Report:
    """`problems`: one sentence each, empty if there are none. `counts`: how much was checked; `ended` are the tasks
    of which a play ended. `notes`: what the plays did not reach, so that it is not checked."""

    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"tasks": 0, "episodes": 0, "steps": 0, "ended": 0})
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        seen = ", ".join(f"{n} {what}" for what, n in self.counts.items())
        verdict = "ok" if self.ok else f"{len(self.problems)} problems"
        return "\n".join([f"{verdict} ({seen})", *self.problems, *self.notes])


class _Crash(Exception):
    """A world raised an exception that it must not raise; it is already reported."""


@dataclass(frozen=True)
class _Play:
    actions: list[str]
    seen: list[Any]  # the first observation, then all steps
    over: bool


def check_task(
    source: TaskSource,
    episodes: int = 5,
    seed: int = 0,
    split: str = "train",
    max_steps: int = 200,
    actions: Sequence[str] = (),
) -> Report:
    """Play `episodes` starts of `split` and check the rules of `tasks/base.py`. Each start is played with random legal
    actions, and then with one action again and again up to the end, for each of a few actions. Then plays of different
    starts are repeated at the same time, which must change nothing.

    Actions are the listed labels. Without labels they come from `source.example_actions(task)` or the world's own
    `example_actions()`, else they are a few strings and the values of the task's data. `actions` are tried as well: in
    their order, and each alone. Each kind of problem is reported once, for the first task that shows it. A play longer
    than `max_steps` is stopped; that is not a problem.
    """
    return _Checker(source, seed, max_steps, actions).run(episodes, split)


class _Checker:
    def __init__(self, source: TaskSource, seed: int, max_steps: int, actions: Sequence[str] = ()):
        self.source, self.seed, self.max_steps, self.given = source, seed, max_steps, tuple(actions)
        self.report = Report()
        self.kinds: set[str] = set()
        self.paid: set[Any] = set()  # rewards and outcomes that were seen
        self.listed: set[str] = set()  # labels that were seen

    def problem(self, kind: str, sentence: str) -> None:
        if kind not in self.kinds:
            self.kinds.add(kind)
            self.report.problems.append(sentence)

    def guard(self, what: str, call: Callable[[], Any], allowed: type[Exception] | tuple[()] = ()) -> Any:
        """The call's result, or the exception that it raised if that is `allowed`. Watches the global random states.

        Both generators are first set to a state that nobody would seed them with, so that seeding is noticed too.
        Afterwards their old states are restored.
        """
        kept = random.getstate(), np.random.get_state()
        random.seed("a state that no task asks for")
        np.random.seed(2**32 - 5)
        before = random.getstate(), _numpy_state()
        try:
            return call()
        except Exception as e:
            if isinstance(e, allowed):
                return e
            self.problem(what.split(" of task")[0].rstrip("0123456789"), f"{what} raised {type(e).__name__}: {e}.")
            raise _Crash from e
        finally:
            for module, was, now in zip(("random", "numpy.random"), before, (random.getstate(), _numpy_state())):
                if was != now:
                    self.problem(module, f"{what} used the global generator of '{module}'; seed one by the task.")
            random.setstate(kept[0])
            np.random.set_state(kept[1])

    def run(self, episodes: int, split: str) -> Report:
        name, markov = getattr(self.source, "name", None), getattr(self.source, "markov", None)
        if not isinstance(name, str) or not name:
            self.problem("name", f"The source's 'name' must be a non-empty string, not {name!r}.")
        if not isinstance(markov, bool):
            self.problem("markov", f"The source's 'markov' must be True or False, not {markov!r}.")
        try:
            tasks = self.tasks(split, episodes)
        except _Crash:
            return self.report
        repeated: dict[int, list[tuple[Task, _Play]]] = {}  # plays of all tasks by the way in which they were played
        for task in tasks:
            try:
                for k, played in enumerate(self.task(task)):
                    repeated.setdefault(k, []).append((task, played))
            except _Crash:
                continue
        for plays in repeated.values():
            try:
                self.together(plays)
            except _Crash:
                continue
        self.note()
        return self.report

    def note(self) -> None:
        """Say what was not reached."""
        notes, hint = self.report.notes, "name an action with --action TEXT"
        if self.report.counts["episodes"] and not self.report.counts["ended"]:
            notes.append(f"Not checked: an end, which no play reached in {self.max_steps} steps; {hint}, "
                         "or allow more with --max-steps.")  # fmt: skip
        elif len(self.paid) == 1:
            notes.append(f"Not checked: a play that is paid otherwise than the others; {hint}, such as a right answer.")
        if self.listed and (unknown := [a for a in self.given if a not in self.listed]):
            notes.append(f"Not checked: action {unknown[0]!r}, which was never among the labels.")

    def tasks(self, split: str, n: int) -> list[Task]:
        tasks, again = (
            list(self.guard(f"tasks({split!r}, n={n}, seed={self.seed})",
                            lambda: self.source.tasks(split, n=n, seed=self.seed))) for _ in range(2)
        )  # fmt: skip
        self.report.counts["tasks"] = len(tasks)
        if not tasks or not all(isinstance(t, Task) for t in tasks):
            self.problem("no tasks", f"tasks({split!r}, n={n}) must give at least one Task, and only Tasks.")
            raise _Crash
        if len(tasks) > n:
            self.problem("too many", f"tasks({split!r}, n={n}) gave {len(tasks)} tasks, more than asked for.")
        if tasks != again:
            self.problem("tasks differ", f"tasks({split!r}) gave different tasks for the same seed {self.seed}.")
        if len({t.id for t in tasks}) < len(tasks):
            self.problem("ids", "Two tasks have the same id.")
        if not getattr(self.source, "finite", False):
            what = f"tasks({split!r}, n={n}, seed={self.seed + 1})"
            other = self.guard(what, lambda: self.source.tasks(split, n=n, seed=self.seed + 1))
            if [(t.id, t.data) for t in other] == [(t.id, t.data) for t in tasks]:
                self.report.notes.append(
                    f"tasks({split!r}, n={n}) gives the same tasks for every seed, so each step of training plays "
                    "these alone. If they are the first of a list, set finite = True: training then walks all of it."
                )
        for t in tasks:
            for part, value in (("data", t.data), ("meta", t.meta)):
                if not _json_safe(value):
                    self.problem(part, f"'{part}' of task '{t.id}' does not come back the same through JSON.")
        return tasks

    def world(self) -> World:
        return self.guard("make()", self.source.make)

    def task(self, task: Task) -> Iterator[_Play]:
        """Check one task; its plays, one for each way of playing."""
        first, of = self.world(), f"of task '{task.id}'"
        played = self.play(first, task)
        if played.over:
            after = self.guard(f"step after the end {of}", lambda: first.step(played.actions[-1]), TaskError)
            if not isinstance(after, TaskError):
                self.problem("after", f"A step after the end {of} must raise TaskError, but was answered.")
        for name, world in (("a fresh", self.world()), ("the same", first)):
            again = self.play(world, task, played.actions)
            if again.seen != played.seen:
                at = next((i for i, (a, b) in enumerate(zip(again.seen, played.seen)) if a != b), "the end")
                self.problem(f"replay {name}", f"The same actions on {name} world gave other steps {of}, from {at} on.")
        strange = self.world()
        self.see(self.guard(f"reset {of}", lambda: strange.reset(task)), of)
        answer = self.guard(f"step on an unknown action {of}", lambda: strange.step(STRANGE), TaskError)
        if not isinstance(answer, TaskError):
            self.step(answer, of)
        ended = played.over
        yield played
        if tried := played.seen[0].labels:
            tried = tried if len(tried) <= FEW else (tried[0], tried[-1])
        else:
            fresh = self.world()
            self.guard(f"reset {of}", lambda: fresh.reset(task))
            tried = self.texts(fresh, task)
        alone = [(a,) for a in dict.fromkeys((*self.given, *tried))]
        for way in [self.given, *alone] if len(self.given) > 1 else alone:
            played = self.play(self.world(), task, way=way)
            ended |= played.over
            yield played
        self.report.counts["ended"] += ended

    def play(
        self, world: World, task: Task, actions: Sequence[str] | None = None, way: Sequence[str] = ()
    ) -> _Play:
        """Play `actions` again, or new actions: those of `way` in turn where they are possible, else random ones."""
        of, rng = f"of task '{task.id}'", random.Random(f"{self.seed} {task.id}")
        observation = self.guard(f"reset {of}", lambda: world.reset(task))
        self.see(observation, of)
        self.report.counts["episodes"] += 1
        seen, done, over = [observation], [], False
        while not over and len(done) < (self.max_steps if actions is None else len(actions)):
            if actions is not None:
                act = actions[len(done)]
            elif way and (not observation.labels or way[len(done) % len(way)] in observation.labels):
                act = way[len(done) % len(way)]
            else:
                act = self.choose(world, task, observation, rng)
            step = self.guard(f"step {len(done) + 1} {of} on action {act!r}", lambda a=act: world.step(a))
            self.step(step, of)
            self.report.counts["steps"] += 1
            seen.append(step)
            done.append(act)
            observation, over = step.observation, step.over
        return _Play(done, seen, over)

    def choose(self, world: World, task: Task, observation: Observation, rng: random.Random) -> str:
        return rng.choice(observation.labels or self.texts(world, task))

    def texts(self, world: World, task: Task) -> list[str]:
        """Actions for a start that lists none."""
        of_source, of_world = (getattr(x, "example_actions", None) for x in (self.source, world))
        if of_source is not None:
            return list(self.guard("example_actions", lambda: of_source(task)))
        if of_world is not None:
            return list(self.guard("example_actions", of_world))
        rng = random.Random(f"texts {self.seed}")
        drawn = ("".join(rng.choices(kind, k=n)) for kind, n in (
            (string.ascii_letters + " ", 12), (string.digits, 4), (string.printable + "é中🙂", 40)))  # fmt: skip
        return list(dict.fromkeys((*SOME_TEXT, *drawn, *list(_values(task.data))[:FROM_DATA])))

    def together(self, plays: Sequence[tuple[Task, _Play]]) -> None:
        """Repeat plays of different starts at the same time: another one begins before each step."""
        if not plays or {"replay a fresh", "replay the same"} & self.kinds:
            return
        plays = [*plays, plays[0]] if len(plays) == 1 else plays
        worlds: list[World] = []
        seen: list[list[Any]] = []
        for turn in range(len(plays) + max(len(p.actions) for _, p in plays)):
            started = len(worlds)
            if turn < len(plays):
                worlds.append(self.world())
                if any(worlds[-1] is w for w in worlds[:-1]):
                    self.problem("interleave", "make() gave the same world twice: each play needs one of its own.")
                    return
                task = plays[turn][0]
                seen.append([self.guard(f"reset of task '{task.id}'", lambda t=task: worlds[-1].reset(t), Exception)])
            for world, (_, played), steps in zip(worlds[:started], plays, seen):
                if len(steps) <= len(played.actions):
                    act = played.actions[len(steps) - 1]
                    # an exception is a difference, too
                    steps.append(self.guard("step", lambda w=world, a=act: w.step(a), Exception))
        for (task, played), steps in zip(plays, seen):
            if steps != played.seen:
                what = f"Other worlds played at the same time changed the steps of task '{task.id}'"
                self.problem("interleave", f"{what}: they share state.")

    def see(self, o: Any, of: str) -> None:
        if not isinstance(o, Observation):
            self.problem("observation", f"An observation {of} is {type(o).__name__}, not Observation.")
            raise _Crash
        self.listed.update(o.labels)
        if not all(isinstance(x, str) for x in (o.state, o.menu, o.seat, *o.labels, *o.actions)):
            self.problem("text", f"State, menu, seat, labels and actions {of} must be strings.")
        elif len(set(o.labels)) < len(o.labels) or "" in o.labels:
            self.problem("labels", f"The labels {o.labels} {of} must be different and not empty.")
        elif o.actions and len(o.actions) != len(o.labels):
            self.problem("actions", f"There are {len(o.labels)} labels but {len(o.actions)} actions {of}.")
        elif o.menu and (missing := [x for x in o.labels if x not in o.menu]):
            self.problem("menu", f"Label {missing[0]!r} {of} does not occur in the menu.")

    def step(self, s: Any, of: str) -> None:
        if not isinstance(s, Step):
            self.problem("step", f"A step {of} is {type(s).__name__}, not Step.")
            raise _Crash
        self.see(s.observation, of)
        self.paid.add(repr((s.reward, s.outcome)))
        if not all(map(_finite, s.reward.values() if isinstance(s.reward, Mapping) else [s.reward])):
            self.problem("reward", f"The reward {s.reward!r} {of} is not a finite float, or one for each side.")
        if not (isinstance(s.terminated, bool) and isinstance(s.truncated, bool)):
            self.problem("flags", f"'terminated' and 'truncated' {of} must be True or False.")
        left_open = s.outcome is None and declared(self.source).judged  # the judge gives the outcome
        outcomes = list(s.outcome.values()) if isinstance(s.outcome, Mapping) else [s.outcome]
        if (
            s.over
            and not left_open
            and not (outcomes and all(isinstance(o, (Scored, Invalid, Failed)) for o in outcomes))
        ):
            self.problem("outcome", f"The last step {of} has no outcome: it needs Scored, Invalid or Failed.")
        if not s.over and s.outcome is not None:
            self.problem("early outcome", f"A step {of} has an outcome although the episode is not over.")
        for o in outcomes:
            for what, x in {"reward": o.reward, **o.parts}.items() if isinstance(o, Scored) else ():
                if not _finite(x):
                    self.problem("score", f"The outcome's {what} {x!r} {of} is not a finite float.")


def _values(data: Any) -> Iterator[str]:
    """Texts and numbers in a task's data, any of which may be the right answer."""
    if isinstance(data, Mapping | list | tuple):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from _values(value)
    elif data is not None and len(text := str(data)) <= 200:
        yield text


def _finite(x: Any) -> bool:
    return isinstance(x, (float, int)) and not isinstance(x, bool) and math.isfinite(x)


def _json_safe(value: Mapping[str, Any]) -> bool:
    try:
        return json.loads(json.dumps(dict(value), allow_nan=False)) == dict(value)
    except (TypeError, ValueError):
        return False


def _numpy_state() -> tuple[bytes, int]:
    state: Any = np.random.get_state()
    return state[1].tobytes(), state[2]
