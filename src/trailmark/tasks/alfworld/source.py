"""ALFWorld as a task: find, fetch, clean, heat, cool and place things in a home that is described in words.

Two modes:

    labels   every admissible command has a one-token label. An observation is the room and the task, the path so far,
             and (as `menu`) the commands. It holds the whole state, so each decision starts a new sequence (Markov). A
             label that is not listed only costs a step. If there are more commands than labels the menu has pages, and
             turning a page is a step like any other.
    text     a conversation. The actor writes "Thought: …" and "Action: <command>". The command is the text after the
             first "Action:" up to the end of its line. A command that is not admissible does nothing.

The reward is 1 when the task is done, minus `step_cost` for every step. Done is `terminated`, the horizon `truncated`.

In a conversation the instruction stands either before the first observation (`opening="joined"`, which any protocol can
play) or, as in OREO and EPO, in a message of its own that is answered with "OK" (`opening="apart"`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from trailmark.errors import DataError, TaskError, nearest
from trailmark.tasks.alfworld.dialect import DIALECTS, NOTHING, Dialect, command_in, observation_in
from trailmark.tasks.alfworld.engine import Play
from trailmark.tasks.alfworld.experts import Exploring, plan
from trailmark.tasks.alfworld.games import Games, check_types
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.tasks.labels import CHOICES, NEXT_PAGE, PREVIOUS_PAGE, Page, alphabet, check_labels, pages
from trailmark.types import Invalid, Outcome, Scored, Task

Mode = Literal["labels", "text"]
Malformed = Literal["retry", "stop"]
Opening = Literal["joined", "apart", "none"]
Expert = Literal["seeing", "exploring"]

HORIZON: dict[Mode, int] = {"labels": 15, "text": 40}
WELCOME = "-= Welcome to TextWorld, ALFRED! =-\n\n"
HEAD = "Choose one action:\n"
ASK_AGAIN = "That was not an action. Write a line that begins with 'Action: ' and names one command."
UNKNOWN = "nothing"  # a command that exists in no game
INSTRUCTION = """\
You are an agent in a household and do chores there. You are told what you can see and what your task is; in each turn \
you do one thing and are told what happened.

Every turn has to look like this:

Thought: what you make of the situation, and what you want to do
Action: one command

These are the commands, with a thing or a place instead of the words in brackets:
go to (place)
open (place)
close (place)
take (thing) from (place)
{put}
use (thing)
clean (thing) with (place)
heat (thing) with (place)
cool (thing) with (place)

Things and places have numbers, such as "apple 1" and "cabinet 4". If the answer is "Nothing happens.", the command \
was not possible; try another one."""
PUT_FORM: dict[Dialect, str] = {"move": "move (thing) to (place)", "put": "put (thing) in/on (place)"}

_ACTION = re.compile(r"Action: ?(.*)")


class AlfworldWorld(World):
    """One play. Teachers may read `play` (the engine's), `steps` and `command` (the last one carried out)."""

    def __init__(self, source: Alfworld):
        self.source = source
        self.over = True

    def reset(self, task: Task) -> Observation:
        id = task.data.get("game")
        if not isinstance(id, str):
            raise TaskError(f"task '{task.id}' needs data 'game', the name of a game.")
        try:
            game = self.source.games.game(id)
        except DataError as problem:
            raise TaskError(f"task '{task.id}' cannot be played: {problem}") from problem
        self.play: Play = game.start()
        self.task, self.native = task, self.source.games.dialect(id)
        self.steps, self.page, self.total, self.over = 0, 0, 0.0, False
        self.shown = Page((), ())  # the menu, if there is one
        self.command = ""
        self.first = self.play.observation.removeprefix(WELCOME)
        self.path: tuple[tuple[str, str], ...] = ()  # commands and the observation after each, in our dialect
        self._explorer = Exploring(task.seed) if self.source.expert == "exploring" else None
        if self._explorer is not None:
            self._explorer.see(self.play.observation)
        if self.source.mode == "labels":
            return self._listed()
        return Observation(self.source.introduced(self.first))

    def step(self, action: str) -> Step:
        if self.over:
            raise TaskError("this alfworld play is over; call reset before the next step.")
        self.steps += 1
        return self._choose(action) if self.source.mode == "labels" else self._say(action)

    def copy(self) -> AlfworldWorld:
        """An independent world in the same state."""
        twin = AlfworldWorld(self.source)
        vars(twin).update(vars(self))
        if not hasattr(self, "play"):
            return twin
        twin.play = self.play.copy()
        if self._explorer is not None:
            twin._explorer = self._explorer.copy()
        return twin

    def oracle(self) -> str | None:
        """The expert's answer here: a label, or a text with an "Action:" line. None if the game cannot be won any more
        (something was picked up that no place accepts)."""
        command = self.oracle_command()
        if command is None:
            return None
        ours = command_in(self.source.dialect, command)
        return self.way_to(ours)[0] if self.source.mode == "labels" else f"Action: {ours}"

    def oracle_command(self) -> str | None:
        """The expert's next command, in the game's own words. If commands are listed, the exploring expert reads the
        list too."""
        if self._explorer is None:
            return next(iter(plan(self.play) or ()), None)
        command = command_in(self.native, self._explorer.decide())
        while self.source.mode == "labels" and command not in self.play.commands():
            self._explorer.see(NOTHING, command)
            again = command_in(self.native, self._explorer.decide())
            if again == command:
                return None
            command = again
        return command

    def way_to(self, command: str) -> tuple[str, bool]:
        """The label of a command, and True. If it is on another page: the label that turns the page, and False."""
        commands = self._commands()
        if command not in commands:
            raise TaskError(f"'{command}' cannot be done at step {self.steps + 1} of task '{self.task.id}'.")
        made = pages(commands, self.source.labels)
        there = next(k for k, page in enumerate(made) if command in page.actions)
        here = made[self.page]
        if there == self.page:
            return here.labels[here.actions.index(command)], True
        return here.labels[here.actions.index(NEXT_PAGE if there > self.page else PREVIOUS_PAGE)], False

    def example_actions(self) -> list[str]:
        """Possible answers in a conversation here, sensible and not."""
        commands = [command_in(self.source.dialect, c) for c in self.play.commands()]
        return [f"Thought: let me see.\nAction: {c}" for c in commands] + ["Action: fly to the moon", "no idea"]

    # --- labels

    def _choose(self, label: str) -> Step:
        page = self.shown
        action = page.actions[page.labels.index(label)] if label in page.labels else None
        if action in (NEXT_PAGE, PREVIOUS_PAGE):
            self.page += 1 if action == NEXT_PAGE else -1
        elif action is not None:
            self.page = 0
            self._do(action)
        return self._answer(self._listed(), {"known": action is not None})

    def _commands(self) -> list[str]:
        commands = list(self.play.commands())
        if self.source.dialect != self.native:
            commands = sorted(command_in(self.source.dialect, c) for c in commands)
        if self.source.shuffle_labels:
            random.Random(f"alfworld {self.task.id} {self.task.seed} {len(self.path)}").shuffle(commands)
        return commands

    def _listed(self) -> Observation:
        path = "".join(f"Step {i}: {c}\n{o}\n" for i, (c, o) in enumerate(self.path, 1)) or "none\n"
        page = self.shown = pages(self._commands(), self.source.labels)[self.page]
        menu = HEAD + "".join(f"Action {x}: {c}\n" for x, c in zip(page.labels, page.actions))
        return Observation(f"{self.first}\n\nPrevious path:\n{path}\n", menu, page.labels, page.actions)

    # --- text

    def _say(self, text: str) -> Step:
        command = parse_action(text)
        if command is not None:
            seen = self._do(command)
            return self._answer(Observation(f"Observation: {seen}"), {"known": True})
        if self.source.malformed == "stop":
            self.over = True
            info = {"known": False, "won": False, "steps": self.steps}
            reward = self._pay(0.0)
            return Step(Observation(""), reward, True, False, Invalid("no 'Action:' in the answer"), info)
        return self._answer(Observation(f"Observation: {ASK_AGAIN}"), {"known": False})

    # --- both

    def _do(self, command: str) -> str:
        """Carry out a command of our dialect. A command of the other dialect is unknown."""
        ours = command_in(self.source.dialect, command) == command
        self.command = command_in(self.native, command) if ours else UNKNOWN
        raw = self.play.step(self.command)
        if self._explorer is not None:
            self._explorer.see(raw, self.command)
        seen = observation_in(self.source.dialect, raw, self.command)
        self.path += ((command, seen),)
        return seen

    def _pay(self, reward: float) -> float:
        paid = reward - self.source.step_cost
        self.total += paid
        return paid

    def _answer(self, seen: Observation, info: dict[str, Any]) -> Step:
        won = bool(self.play.won)
        reward = self._pay(float(won))
        truncated = not won and self.steps >= self.source.horizon
        self.over = won or truncated
        outcome: Outcome | None = Scored(self.total, won) if self.over else None
        return Step(seen, reward, won, truncated, outcome, info | {"won": won, "steps": self.steps})


def parse_action(text: str) -> str | None:
    """The command after the first "Action:" of an answer, up to the end of its line; None if there is none."""
    found = _ACTION.search(text)
    return (found[1].strip() or None) if found else None


class Alfworld(TaskSource):
    """The task source.

    games           a folder or file of games (see `games`); default $ALFWORLD_DATA
    mode            "labels" or "text"
    task_types      only these of the six types, such as ["pick_and_place_simple"]
    only            only games with one of these texts in their name, such as
                    ["pick_and_place_simple-Tomato-None-Microwave"]
    game            only the one game with this text in its name, in any split
    horizon         steps before a play is cut off; 15 with labels, 40 with text
    step_cost       subtracted from the reward at every step
    dialect         "move" or "put": the wording of commands and observations
    labels          the labels to use, in order; `bind` replaces them by the single tokens of a tokenizer
    shuffle_labels  list the commands in a new order at every step, drawn by the task's seed
    malformed       what happens after a text without "Action:": "retry" (it is asked again, and the step counts) or
                    "stop" (the play ends and is `Invalid`)
    opening         where the instruction stands in a conversation: "joined", "apart" or "none"
    expert          the expert of a world's `oracle()`: "seeing" or "exploring"

    Splits are those of the games; "seen" and "unseen" are also called "valid_seen" and "valid_unseen". Without `n`: all
    games in order. With `n`: drawn by seed, none twice before all were drawn once. Games that cannot be read or won are
    left out and noted in `games.skipped`.
    """

    name = "alfworld"
    finite = True

    def __init__(
        self,
        games: str | Path | None = None,
        mode: Mode = "labels",
        task_types: Sequence[str] = (),
        only: Sequence[str] = (),
        game: str | None = None,
        horizon: int | None = None,
        step_cost: float = 0.0,
        dialect: Dialect = "move",
        labels: Sequence[str] | None = None,
        shuffle_labels: bool = False,
        malformed: Malformed = "retry",
        opening: Opening = "joined",
        expert: Expert = "seeing",
    ):
        for key, value, known in (
            ("mode", mode, get_args(Mode)),
            ("dialect", dialect, DIALECTS),
            ("malformed", malformed, get_args(Malformed)),
            ("opening", opening, get_args(Opening)),
            ("expert", expert, get_args(Expert)),
        ):
            if value not in known:
                raise TaskError(f"alfworld has no {key} '{value}'.{nearest(str(value), known)}")
        task_types, only = _words("task_types", task_types), _words("only", only)
        check_types(task_types)
        if horizon is not None and horizon < 1:
            raise TaskError(f"alfworld needs a horizon of at least 1, not {horizon}.")
        self.mode: Mode = mode
        self.dialect: Dialect = dialect
        self.malformed: Malformed = malformed
        self.opening: Opening = opening
        self.expert: Expert = expert
        self.markov = mode == "labels"
        self.task_types, self.only = task_types, only
        self.horizon = HORIZON[mode] if horizon is None else horizon
        self.step_cost, self.shuffle_labels = step_cost, shuffle_labels
        self.labels = CHOICES if labels is None else check_labels(labels)
        self._choices = self.labels
        self.games = Games(games)
        self.game = None if game is None else self.games.find(game)

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> list[Task]:
        ids = (self.game,) if self.game else self.games.ids(split, self.only, self.task_types)
        if not ids:
            wanted = ", ".join((*self.task_types, *self.only)) or "anything"
            raise TaskError(f"no game of split '{split}' in {self.games.path} is {wanted}.")
        picks = list(self.games.usable(ids)) if n is None else list(islice(self._draw(ids, split, seed), n))
        if not picks:
            raise TaskError(f"no game of split '{split}' can be played: {next(iter(self.games.skipped.values()))}")
        numbers: dict[str, int] = {}
        out = []
        for id in picks:
            numbers[id] = numbers.get(id, 0) + 1
            out.append(self.task(id, seed, numbers[id]))
        return out

    def task(self, id: str, seed: int = 0, number: int = 1) -> Task:
        """A start of one game; `number` distinguishes several starts of the same game."""
        again = "" if number == 1 else f"~{number}"
        return Task(f"alfworld/{id}{again}", seed, {"game": id}, {"task_type": self.games.card(id).task_type})

    def make(self) -> AlfworldWorld:
        return AlfworldWorld(self)

    def bind(self, tokenizer: Any) -> None:
        """Use the labels that are single tokens of this tokenizer. A conversation needs none."""
        if self.mode == "labels":
            self.labels = alphabet(tokenizer, self._choices)

    @property
    def instruction(self) -> str:
        return INSTRUCTION.format(put=PUT_FORM[self.dialect])

    @property
    def first_messages(self) -> list[dict[str, str]]:  # type: ignore[override]
        """The messages before the first observation, if there are any."""
        if self.mode == "labels" or self.opening != "apart":
            return []
        return [{"role": "user", "content": self.instruction}, {"role": "assistant", "content": "OK"}]

    def introduced(self, first: str) -> str:
        return f"{self.instruction}\n\n{first}" if self.opening == "joined" else first

    def _draw(self, ids: Sequence[str], split: str, seed: int) -> Iterator[str]:
        draw = random.Random(f"alfworld {split} {seed}")
        found = True
        while found:
            found = False
            for id in self.games.usable(draw.sample(ids, len(ids))):
                found = True
                yield id


def _words(key: str, value: Any) -> tuple[str, ...]:
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(w, str) for w in words):
        raise TaskError(f"alfworld: option '{key}' must be a list of texts, not {value!r}.")
    return tuple(words)
