"""A person plays a world in the terminal, and the play becomes an episode.

The person types an action: a label of the menu, its text, or any text if the world lists no actions. A few words are
commands to Trailmark: history, undo, help, quit. If the world has such a word itself, the command needs a colon in
front.

The episode is stored like a model's: the same prompts as tokens, with the person's answers as the written tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trailmark.errors import TaskError
from trailmark.tasks.base import Observation, Step, TaskSource, World, declared, draw_tasks
from trailmark.texts import encode
from trailmark.types import Episode, Invalid, Outcome, Scored, Task

HELP = """\
Type an action: a label of the menu, or its text. Commands (put ':' in front if the world has the same word):
  history   the actions so far and their rewards
  undo      undo the last action
  help      this text
  quit      stop and save the play (Ctrl-D and Ctrl-C do the same)
"""
STOPPED = "the player stopped before the world did"


@dataclass
class PersonPlay:
    """A play in progress: the typed actions and the world's answers."""

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
        """Take a step. `typed` is a label, the text of a label, or any text."""
        seen = self.seen
        action = typed
        if typed not in seen.labels and typed in seen.actions:
            action = seen.labels[seen.actions.index(typed)]
        step = self.world.step(action)
        self.played.append((action, step))
        return step

    def undo(self) -> None:
        """Start again and replay all actions but the last. A world that then answers differently is an error."""
        kept = self.played[:-1]
        world = self.source.make()
        again = [world.reset(self.task)] + [world.step(a) for a, _ in kept]
        if again != [self.first] + [s for _, s in kept]:
            raise TaskError(f"'{self.source.name}' answers differently when it is played again: nothing was undone.")
        self.world, self.played = world, kept

    def name_of(self, index: int) -> str:
        """The action at `index`, with its text from the menu."""
        action = self.played[index][0]
        before = self.played[index - 1][1].observation if index else self.first
        told = dict(zip(before.labels, before.actions)).get(action)
        return f"{action} ({told})" if told else action


class _Replay(World):
    """A world that repeats the recorded answers, so that `Desk` can write the episode."""

    def __init__(self, person_play: PersonPlay):
        self.first, self.steps = person_play.first, iter([s for _, s in person_play.played])

    def reset(self, task: Task) -> Observation:
        return self.first

    def step(self, action: str) -> Step:
        return next(self.steps)


def episode_of(person_play: PersonPlay, tokenizer: Any) -> Episode:
    """The play as an episode with exact tokens."""
    from trailmark.rollout.judging import give_verdicts, judge_of
    from trailmark.rollout.play import Desk, Seat, Start
    from trailmark.seats.open import open_script

    answers = iter([a for a, _ in person_play.played])
    seat = Seat("policy", open_script(lambda prompt, draw: next(answers), tokenizer, "person"), kind="person")
    task, markov = person_play.task, person_play.source.markov
    start = Start(task, task.id, f"{task.id}/0", task.seed)
    desk = Desk(start, _Replay(person_play), {"policy": seat}, person_play.first)
    opening = [] if markov else list(declared(person_play.source).first_messages)

    async def tell() -> None:
        for k, (action, _) in enumerate(person_play.played):
            seen = desk.observation
            length = len(encode(tokenizer, action))
            most = max(1, length) if seen.labels else length + 1  # a label is written without an end token
            if markov and not seen.messages:
                await desk.ask("policy", text=seen.text, max_tokens=most)
            else:
                said = [*(opening if k == 0 else []), *(seen.messages or [{"role": "user", "content": seen.text}])]
                await desk.ask("policy", messages=said, max_tokens=most)
            await desk.act(action)

    asyncio.run(tell())
    last = person_play.played[-1][1]
    episode = desk.episode(last.outcome if last.over and last.outcome is not None else Invalid(STOPPED), "self")
    judge = judge_of(person_play.source, None)
    if judge is None or not last.over or last.outcome is not None:
        return episode
    judged = {0: episode}
    asyncio.run(give_verdicts(judged, {0: person_play.first}, judge, declared(person_play.source).judge_notes))
    return judged[0]


# --- the terminal --------------------------------------------------------------------------------------------------


def play_in_terminal(person_play: PersonPlay, ask: Callable[[], str | None], say: Callable[[str], None]) -> None:
    """Play until the world ends or the person stops. `ask` returns a typed line, or None at the end of the input."""
    show(person_play.seen, say)
    while not person_play.over:
        line = ask()
        if line is None:
            return
        typed = line.strip()
        word = typed.removeprefix(":")
        ours = typed.startswith(":") or typed not in (*person_play.seen.labels, *person_play.seen.actions)
        if not typed:
            continue
        if ours and word in ("quit", "exit"):
            return
        if ours and word in ("help", "history", "undo"):
            _run_command(word, person_play, say)
            continue
        try:
            step = person_play.act(typed)
        except TaskError as why:
            say(f"The world refuses this: {why}\n")
            continue
        say(f"(reward {reward_text(step)})\n")
        show(step.observation, say)


def _run_command(word: str, person_play: PersonPlay, say: Callable[[str], None]) -> None:
    if word == "help":
        say(HELP)
    elif word == "history":
        steps = [step for _, step in person_play.played]
        lines = [f"{i + 1}. {person_play.name_of(i)}: {reward_text(step)}" for i, step in enumerate(steps)]
        say("\n".join(lines or ["nothing yet"]) + "\n")
    elif not person_play.played:
        say("There is nothing to undo.\n")
    else:
        try:
            person_play.undo()
        except TaskError as why:
            say(f"{why}\n")
            return
        say("Undone.\n")
        show(person_play.seen, say)


def show(seen: Observation, say: Callable[[str], None]) -> None:
    """Print an observation, without characters that would control the terminal."""
    text = seen.text
    if not seen.menu and seen.labels:
        text += "".join(f"{label}. {action}\n" for label, action in zip(seen.labels, seen.actions or seen.labels))
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    say(text if text.endswith("\n") else text + "\n")


def reward_text(step: Step) -> str:
    """The reward of a step; by side where there are several."""
    if not isinstance(step.reward, Mapping):
        return f"{step.reward:g}"
    return ", ".join(f"{side} {reward:g}" for side, reward in step.reward.items())


def describe_outcome(outcome: Outcome) -> str:
    if isinstance(outcome, Scored):
        won = {True: "won", False: "lost", None: "over"}[outcome.success]
        return f"{won}, return {outcome.reward:g}"
    return outcome.reason if isinstance(outcome, Invalid) else outcome.error


def pick_start(source: TaskSource, split: str, start: int, seed: int) -> Task:
    """Start number `start` of a split, counted from 1."""
    tasks = draw_tasks(source, split, start, seed)
    if len(tasks) < start:
        raise TaskError(f"split '{split}' of '{source.name}' has {len(tasks)} starts, so there is no number {start}.")
    return tasks[start - 1]
