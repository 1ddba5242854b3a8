"""A world of chores for the protocol of thoughts, and its rules."""

from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.tasks.check import check_task
from trailmark.types import Scored, Task


class Doing(World):
    def reset(self, task):
        self.done = 0
        return Observation("saw 0")

    def step(self, action):
        from trailmark.errors import TaskError

        if self.done == 2:
            raise TaskError("over")
        self.done += 1
        over = self.done == 2
        return Step(Observation(f"saw {self.done}"), float(over), over, False, Scored(1.0) if over else None)


class Chores(TaskSource):
    name, markov, finite = "chores", False, True

    def tasks(self, split="train", n=None, seed=0):
        return [Task("c")]

    def make(self):
        return Doing()


def test_it_is_a_world():
    assert check_task(Chores(), 1).ok
