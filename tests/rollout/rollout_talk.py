"""What plays of free text are tested with: a world that answers with what it heard, a speaker, and an engine that
remembers."""

from trailmark.engines.scripted import ScriptedEngine
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat
from trailmark.tasks.base import Observation, Step
from trailmark.types import Scored, Task

TOKENIZER = tiny_tokenizer()


def encode(text):
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


class Recorder:
    """An engine that remembers what it was asked and answered."""

    def __init__(self, inner):
        self.inner, self.asked = inner, []
        self.tokenizer, self.name, self.version = inner.tokenizer, inner.name, inner.version

    async def sample(self, request):
        done = await self.inner.sample(request)
        self.asked.append((request, done))
        return done

    def of(self, episode, turn):
        """The one request of a turn, found by its key."""
        (found,) = [r for r, _ in self.asked if r.key == f"{episode.id}\0{turn}"]
        return found


class Talk:
    """A world of free text: it answers with what it heard and how often, pays a number made of the letters, and ends
    after `lines` turns. `changed_at` is the turn whose observation reads differently; `ends` cuts it short."""

    name, markov = "talk", False

    def __init__(self, changed_at=None, ends=None, breaks=()):
        self.changed_at, self.ends, self.breaks = changed_at, ends, breaks

    def tasks(self, split="train", n=3, seed=0):
        return [Task(f"talk-{i}", seed, {"lines": 2 + i, "word": "word" * (1 + i)}) for i in range(n)]

    def make(self):
        return TalkWorld(self)


class TalkWorld:
    def __init__(self, source):
        self.source = source

    def reset(self, task):
        self.task, self.heard = task, []
        if (task.id, "reset") in self.source.breaks:
            raise RuntimeError("the world does not open")
        return self.see()

    def see(self):
        mark = "!" if self.source.changed_at == len(self.heard) else "."
        return Observation(
            f"{self.task.data['word']} {len(self.heard)}: {self.heard[-1] if self.heard else 'begin'}{mark}"
        )

    def step(self, action):
        self.heard.append(action)
        if (self.task.id, len(self.heard)) in self.source.breaks:
            raise KeyError("no such room")
        reward = (sum(map(ord, action)) % 7) / 7
        over = len(self.heard) >= (self.source.ends or self.task.data["lines"])
        total = sum((sum(map(ord, h)) % 7) / 7 for h in self.heard)
        return Step(self.see(), reward, over, False, Scored(total) if over else None)


def speaker(prompt, draw):
    """Says "line k", k the number of its turns, going on from what is already in its mouth."""
    said = prompt.split("<|im_start|>assistant\n")
    return f"line {len(said) - 1}".removeprefix(said[-1])


def seat(policy, **options):
    engine = policy if hasattr(policy, "sample") else ScriptedEngine(policy, TOKENIZER)
    return Seat("policy", engine, **options)
