"""A person's play: what was typed, what the world answered, and the episode that becomes of it.

What is typed is an action: a label of the menu, the text behind it, or, where nothing is listed, any text. A few words are for
the table and not for the world: history, undo, help, quit (with a colon in front where the world has such a word itself).

The episode is written as those of models are: the same prompts in tokens, the person's answers as what was written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trailmark.errors import TaskError
from trailmark.tasks.base import Observation, Step, TaskSource, World, draw_tasks
from trailmark.texts import encode
from trailmark.types import Episode, Invalid, Outcome, Scored, Task

HELP = """\
Type an action: a label of the menu, or its text. Words for the table (with ':' in front where the world knows them too):
  history   the actions so far and what they paid
  undo      take back the last action
  help      this text
  quit      end here; what was played is saved (as do Ctrl-D and Ctrl-C)
"""
STOPPED = "the player stopped before the world did"


@dataclass
class Sitting:
    """A play in progress: what was typed and what the world answered."""

    source: TaskSource
    task: Task
    world: World = field(init=False)
    first: Observation = field(init=False)
    played: list[tuple[str, Step]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = self.source.make()
        self.first = self.world.reset(self.task)

    @property
    def seen(self) -> Observation:
        return self.played[-1][1].observation if self.played else self.first

    @property
    def over(self) -> bool:
        return bool(self.played) and self.played[-1][1].over

    def act(self, typed: str) -> Step:
        """A typed label, or the text behind one, or whatever was typed."""
        seen = self.seen
        action = typed
        if typed not in seen.labels and typed in seen.actions:
            action = seen.labels[seen.actions.index(typed)]
        step = self.world.step(action)
        self.played.append((action, step))
        return step

    def undo(self) -> None:
        """Play all but the last action again. Worlds are deterministic; one that is not is found out."""
        kept = self.played[:-1]
        world = self.source.make()
        again = [world.reset(self.task)] + [world.step(a) for a, _ in kept]
        if again != [self.first] + [s for _, s in kept]:
            raise TaskError(
                f"'{self.source.name}' answers differently when it is played again: nothing was taken back."
            )
        self.world, self.played = world, kept

    def name_of(self, index: int) -> str:
        """The action at `index` in words."""
        action = self.played[index][0]
        before = self.played[index - 1][1].observation if index else self.first
        told = dict(zip(before.labels, before.actions)).get(action)
        return f"{action} ({told})" if told else action


class _Tape:
    """A world that answers as it did: the person's play, told again to the one that writes episodes."""

    def __init__(self, sitting: Sitting):
        self.first, self.steps = sitting.first, iter([s for _, s in sitting.played])

    def reset(self, task: Task) -> Observation:
        return self.first

    def step(self, action: str) -> Step:
        return next(self.steps)


def episode_of(sitting: Sitting, tokenizer: Any) -> Episode:
    """The play as an episode with exact tokens."""
    from trailmark.engines.scripted import ScriptedEngine
    from trailmark.rollout.play import Desk, Seat, Start

    answers = iter([a for a, _ in sitting.played])
    seat = Seat("policy", ScriptedEngine(lambda prompt, draw: next(answers), tokenizer, "person"), kind="person")
    task, markov = sitting.task, sitting.source.markov
    desk = Desk(Start(task, task.id, f"{task.id}/0", task.seed), _Tape(sitting), {"policy": seat}, sitting.first)
    opening = [] if markov else list(getattr(sitting.source, "first_messages", []))

    async def tell() -> None:
        for k, (action, _) in enumerate(sitting.played):
            seen = desk.observation
            length = len(encode(tokenizer, action))
            most = max(1, length) if seen.labels else length + 1  # a label is written without an end behind it
            if markov:
                await desk.ask("policy", text=seen.text, max_tokens=most)
            else:
                said = [*(opening if k == 0 else []), {"role": "user", "content": seen.text}]
                await desk.ask("policy", messages=said, max_tokens=most)
            await desk.act(action)

    asyncio.run(tell())
    last = sitting.played[-1][1]
    return desk.episode(last.outcome if last.over and last.outcome is not None else Invalid(STOPPED), "self")


# --- the table -----------------------------------------------------------------------------------------------------


def sit(sitting: Sitting, ask: Callable[[], str | None], say: Callable[[str], None]) -> None:
    """Play until the world or the person ends it. `ask` gives a typed line, None at the end of the input."""
    show(sitting.seen, say)
    while not sitting.over:
        line = ask()
        if line is None:
            return
        typed = line.strip()
        word = typed.removeprefix(":")
        ours = typed.startswith(":") or typed not in (*sitting.seen.labels, *sitting.seen.actions)
        if not typed:
            continue
        if ours and word in ("quit", "exit"):
            return
        if ours and word in ("help", "history", "undo"):
            _table_word(word, sitting, say)
            continue
        try:
            step = sitting.act(typed)
        except TaskError as why:
            say(f"That is not taken: {why}\n")
            continue
        say(f"(reward {paid(step)})\n")
        show(step.observation, say)


def _table_word(word: str, sitting: Sitting, say: Callable[[str], None]) -> None:
    if word == "help":
        say(HELP)
    elif word == "history":
        lines = [f"{i + 1}. {sitting.name_of(i)}: {paid(step)}" for i, (_, step) in enumerate(sitting.played)]
        say("\n".join(lines or ["nothing yet"]) + "\n")
    elif not sitting.played:
        say("There is nothing to take back.\n")
    else:
        try:
            sitting.undo()
        except TaskError as why:
            say(f"{why}\n")
            return
        say("Taken back.\n")
        show(sitting.seen, say)


def show(seen: Observation, say: Callable[[str], None]) -> None:
    """What an actor sees, without letters that would steer the terminal."""
    text = seen.text
    if not seen.menu and seen.labels:
        text += "".join(f"{label}. {action}\n" for label, action in zip(seen.labels, seen.actions or seen.labels))
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    say(text if text.endswith("\n") else text + "\n")


def paid(step: Step) -> str:
    """What a step paid; by side where there are several."""
    if not isinstance(step.reward, Mapping):
        return f"{step.reward:g}"
    return ", ".join(f"{side} {reward:g}" for side, reward in step.reward.items())


def ending(outcome: Outcome) -> str:
    if isinstance(outcome, Scored):
        won = {True: "won", False: "lost", None: "over"}[outcome.success]
        return f"{won}, return {outcome.reward:g}"
    return outcome.reason if isinstance(outcome, Invalid) else outcome.error


def pick(source: TaskSource, split: str, start: int, seed: int) -> Task:
    """Number `start` of a split, from 1."""
    tasks = draw_tasks(source, split, start, seed)
    if len(tasks) < start:
        raise TaskError(f"split '{split}' of '{source.name}' has {len(tasks)} starts, so there is no number {start}.")
    return tasks[start - 1]
