"""An invented conversation with turns of different lengths: free text, and a label in the last turn."""

from trailmark.tasks.base import Observation, Step
from trailmark.types import Scored, Task


class Talk:
    name, markov = "talk", False

    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"talk-{seed}-{k}", k) for k in range(n or 4)]

    def make(self):
        return TalkWorld()


class TalkWorld:
    def reset(self, task):
        self.left, self.total = 2 + task.seed % 2, 0.0
        return Observation(f"Question {task.seed}?")

    def step(self, action):
        self.left -= 1
        reward = (len(action) % 4) / 4
        self.total += reward
        over = self.left == 0
        labels = ("1", "2", "3") if self.left == 1 else ()
        seen = Observation(f"You said {len(action)} letters.", labels=labels)
        return Step(seen, reward, over, False, Scored(self.total) if over else None)
