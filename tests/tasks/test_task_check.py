"""The checker finds each planted defect, names it, and finds nothing else."""

import itertools
import random
import re

import numpy as np
import pytest

from trailmark.errors import TaskError
from trailmark.tasks.base import Observation, Step
from trailmark.tasks.check import Report, check_task
from trailmark.types import Scored, Task

COUNTER = itertools.count()


class Count:
    """A sound little world: say "a" or "b" three times."""

    def __init__(self):
        self.over = True

    def reset(self, task):
        self.said, self.over = str(task.data["k"]), False
        return self.see()

    def see(self):
        return Observation(self.said, " a b", ("a", "b"), ("say a", "say b"))

    def step(self, action):
        if self.over:
            raise TaskError("over")
        self.said += action
        self.over = len(self.said) >= 4
        return self.answer(action)

    def answer(self, action):
        return Step(self.see(), 0.5, self.over, False, Scored(1.5) if self.over else None)


class Source:
    name, markov = "count", True

    def __init__(self, world=Count):
        self.make = world

    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"{split}-{i}", seed, {"k": i % 10}) for i in range(n or 10)]


class RaisesInStep(Count):
    def answer(self, action):
        raise ZeroDivisionError("ouch")


class RaisesInReset(Count):
    def reset(self, task):
        raise KeyError("gone")


class GlobalRandom(Count):
    def answer(self, action):
        random.random()
        return super().answer(action)


class GlobalNumpy(Count):
    def reset(self, task):
        np.random.rand()
        return super().reset(task)


class NoOutcome(Count):
    def answer(self, action):
        return Step(self.see(), 0.5, self.over, False)


class EarlyOutcome(Count):
    def answer(self, action):
        return Step(self.see(), 0.5, self.over, False, Scored(1.0))


class NanReward(Count):
    def answer(self, action):
        return Step(self.see(), NAN, self.over, False, Scored(1.5) if self.over else None)


class NanMetric(Count):
    def answer(self, action):
        return Step(self.see(), 0.5, self.over, False, Scored(1.5, None, {"tries": NAN}) if self.over else None)


class TextReward(Count):
    def answer(self, action):
        return Step(self.see(), "1", self.over, False, Scored(1.5) if self.over else None)  # type: ignore


class Undetermined(Count):
    def see(self):
        return Observation(f"{self.said} {next(COUNTER)}", " a b", ("a", "b"))


class DuplicateLabels(Count):
    def see(self):
        return Observation(self.said, " a b", ("a", "a"))


class TooManyActions(Count):
    def see(self):
        return Observation(self.said, " a b", ("a", "b"), ("x", "y", "z"))


class MenuWithoutLabel(Count):
    def see(self):
        return Observation(self.said, " a", ("a", "b"))


class NotAnObservation(Count):
    def see(self):
        return self.said  # type: ignore


class StepsOn(Count):
    def step(self, action):
        self.said += action
        self.over = len(self.said) >= 4
        return self.answer(action)


class CrashesOnUnknown(Count):
    def step(self, action):
        if action not in "ab":
            raise ValueError("no such action")
        return super().step(action)


class Leftover(Count):
    """Forgets to clear on reset."""

    def __init__(self):
        super().__init__()
        self.log = ""

    def answer(self, action):
        self.log += action
        return Step(Observation(self.log), 0.5, self.over, False, Scored(1.5) if self.over else None)


class Shared(Count):
    """All worlds of the class write on one board."""

    board = ""

    def reset(self, task):
        Shared.board = str(task.data["k"])
        return super().reset(task)

    def answer(self, action):
        Shared.board += action
        return Step(Observation(Shared.board, "", ("a", "b")), 0.5, self.over, False, Scored(1) if self.over else None)


NAN = float("nan")
PLANTED = {
    RaisesInStep: "on action '.' raised ZeroDivisionError: ouch",
    RaisesInReset: "reset of task 'train-0' raised KeyError",
    GlobalRandom: "global generator of 'random'",
    GlobalNumpy: "global generator of 'numpy.random'",
    NoOutcome: "has no outcome",
    EarlyOutcome: "although the episode is not over",
    NanReward: "The reward nan",
    NanMetric: "The outcome's tries nan",
    TextReward: "The reward '1'",
    Undetermined: "gave other steps",
    DuplicateLabels: "must be different",
    TooManyActions: "2 labels but 3 actions",
    MenuWithoutLabel: "'b' of task 'train-0' does not occur in the menu",
    NotAnObservation: "is str, not Observation",
    StepsOn: "must raise TaskError",
    CrashesOnUnknown: "unknown action of task 'train-0' raised ValueError",
    Leftover: "on the same world gave other steps",
    Shared: "they share state",
}


def test_a_sound_world_passes():
    report = check_task(Source(), episodes=4)  # each task: three plays at random, and one with each of two labels
    assert report.ok and report.counts == {"tasks": 4, "episodes": 20, "steps": 60, "ended": 4}
    assert str(report).startswith("ok (4 tasks, 20 episodes")


@pytest.mark.parametrize("world", PLANTED, ids=lambda w: w.__name__)
def test_planted_defects_are_found(world):
    report = check_task(Source(world))
    assert any(re.search(PLANTED[world], p) for p in report.problems), report
    several = {Undetermined, StepsOn, NanReward, NanMetric}  # these break more than one promise
    assert len(report.problems) == 1 or world in several, report
    assert all(p.endswith(".") and "\n" not in p for p in report.problems)


class ShuffledTasks(Source):
    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"{next(COUNTER)}", seed, {"k": 0}) for _ in range(n or 10)]


class SameIds(Source):
    def tasks(self, split="train", n=None, seed=0):
        return [Task("one", seed, {"k": i}) for i in range(n or 10)]


class NotJson(Source):
    def tasks(self, split="train", n=None, seed=0):
        return [Task(str(i), seed, {"k": 1, "pair": (1, 2)}) for i in range(n or 10)]


class GlobalInTasks(Source):
    def tasks(self, split="train", n=None, seed=0):
        random.seed(seed)
        return super().tasks(split, n, seed)


class Empty(Source):
    def tasks(self, split="train", n=None, seed=0):
        return []


class Nameless(Source):
    name = ""


@pytest.mark.parametrize(
    "source, words",
    [
        (ShuffledTasks, "different tasks for the same seed"),
        (SameIds, "same id"),
        (NotJson, "'data' of task '0' does not come back"),
        (GlobalInTasks, "global generator of 'random'"),
        (Empty, "at least one Task"),
        (Nameless, "'name' must be a non-empty string"),
    ],
)
def test_defects_of_sources_are_found(source, words):
    random.seed(0)  # the state a source that seeds by 0 would leave: seeding is found all the same
    state = random.getstate()
    report = check_task(source())
    assert random.getstate() == state  # the checker leaves the generator as it was
    assert len(report.problems) == 1 and words in report.problems[0], report


def test_free_text_worlds_are_offered_examples():
    heard = []

    class Free(Count):
        def see(self):
            return Observation(self.said)

        def answer(self, action):
            heard.append(action)
            return super().answer(action)

    assert check_task(Source(Free)).ok and len(set(heard)) > 2
    heard.clear()
    source = Source(Free)
    source.example_actions = lambda task: ["q"]  # type: ignore
    assert check_task(source).ok and set(heard) == {"q", "\x00 no such action"}


def test_an_endless_world_is_left_unfinished():
    class Endless(Count):
        def step(self, action):
            return Step(self.see(), 0.0, False, False)

    report = check_task(Source(Endless), episodes=2, max_steps=7)
    assert report.ok and report.counts["ended"] == 0 and report.counts["steps"] == 2 * 5 * 7
    assert "Not checked: an end, which no play reached in 7 steps" in str(report)


class Secret:
    """One turn of free text: is it the word of the task? `said` is where a world keeps the word."""

    def __init__(self, at=None):
        self.at = self if at is None else at

    def reset(self, task):
        self.at.word, self.over = task.data["word"], False
        return Observation("Say the word: ")

    def step(self, action):
        if self.over:
            raise TaskError("over")
        right, self.over = action == self.at.word, True
        return Step(Observation(""), float(right), True, False, Scored(float(right), right))


class Words(Source):
    """Each task has its own word. The word is in the task's data, and nobody can guess it."""

    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"{split}-{i}", seed, {"word": f"word {i}"}) for i in range(n or 10)]


def test_a_word_that_all_plays_share_is_found_although_nobody_can_guess_it():
    assert check_task(Words(Secret)).ok
    board = Secret()
    (problem,) = check_task(Words(lambda: Secret(board))).problems
    assert "they share state" in problem


def test_one_world_for_all_plays_is_found():
    world = Secret()
    (problem,) = check_task(Words(lambda: world)).problems
    assert "make() gave the same world twice" in problem


def test_a_missing_outcome_at_the_turn_limit_is_found():
    """One label ends the play at once, so random play is over long before the limit."""

    class Patience(Count):
        def see(self):
            return Observation("Stay or go?", " stay go", ("stay", "go"))

        def reset(self, task):
            self.turn = 0
            return super().reset(task)

        def step(self, action):
            if self.over:
                raise TaskError("over")
            self.turn += 1
            ended, cut = action != "stay", action == "stay" and self.turn == 150
            self.over = ended or cut
            return Step(self.see(), 0.0, ended, cut, Scored(0.0, False) if ended else None)

    (problem,) = check_task(Source(Patience)).problems
    assert "has no outcome" in problem


def test_an_action_that_only_its_author_knows():
    class Sesame(Secret):
        def step(self, action):
            step = super().step(action)
            return Step(step.observation, 1.0, True, False) if action == "open sesame" else step

    class Doors(Source):
        def tasks(self, split="train", n=None, seed=0):
            return [Task(f"{split}-{i}", seed, {"word": i}) for i in range(n or 10)]

    report = check_task(Doors(Sesame))
    assert report.ok and "paid otherwise than the others; name an action with --action TEXT" in str(report)
    (problem,) = check_task(Doors(Sesame), actions=["open sesame"]).problems
    assert "has no outcome" in problem
    assert "'c', which was never among the labels" in str(check_task(Source(), actions=["c"]))


def test_actions_are_also_tried_in_their_order():
    heard = []

    class Steps(Count):
        def answer(self, action):
            heard.append(action)
            return super().answer(action)

    check_task(Source(Steps), episodes=1, actions=["a", "b"])
    assert ["a", "b", "a"] in [heard[i : i + 3] for i in range(len(heard))]
    first = list(heard)
    heard.clear()
    check_task(Source(Steps), episodes=1, actions=["a", "b"])
    assert heard == first


def test_report_reads_well():
    assert str(Report(["It broke."], {"tasks": 1})) == "1 problems (1 tasks)\nIt broke."


def test_a_list_that_training_would_only_begin_is_noted():
    """Such as rows of a file, cut to n: every step would play the first ones, and no other row is ever seen."""

    class Rows(Source):
        def tasks(self, split="train", n=None, seed=0):
            return [Task(f"row {k}", seed, {"k": k % 10}) for k in range(1000)][:n]

    class Drawn(Source):
        def tasks(self, split="train", n=None, seed=0):
            return [Task(f"{seed}-{i}", seed, {"k": i % 10}) for i in range(n or 10)]

    said = "gives the same tasks for every seed, so each step of training plays these alone"
    found = check_task(Rows(), episodes=4)
    assert found.ok and said in str(found) and "set finite = True" in str(found)
    listed = Rows()
    listed.finite = True
    assert said not in str(check_task(listed, episodes=4)) and said not in str(check_task(Drawn(), episodes=4))
