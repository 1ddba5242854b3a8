"""Teachers: rules that need no model, or a model behind a server.

A teacher does three things, the same in every world:

    tasks(excerpt)            questions that one file answers, with the answers
    reflect(moment)           some sentences on a moment of play: where we are, was the last step any good, what next
    choose(moment, thought)   one of the listed labels, after a reflection

`Offline` answers from what the caller knows: a moment carries the reflection by rule (`rule`) and the best label
(`best`). `Server` asks any server with OpenAI's protocol, also Azure's (`api-key` and `api-version`). It may be told
the best action as a spoiler, and is asked not to mention it. A reflection that mentions it is refused. States never
hold it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from trailmark.ask.client import Client, Unusable
from trailmark.methods.reflect.decisions import fits
from trailmark.methods.reflect.formats import ACTION
from trailmark.methods.reflect.queries import Excerpt, queries
from trailmark.tasks.base import Observation

LONGEST_THOUGHT = 300  # most tokens of a reflection


@dataclass(frozen=True, slots=True)
class Exchange:
    """An earlier decision of the same play: what was seen, thought and done."""

    state: str
    thought: str
    command: str


@dataclass(frozen=True, slots=True)
class Moment:
    """One decision to make. `about` describes the world in a few sentences; `request` is what is asked for."""

    about: str
    request: str
    seen: Observation
    best: str
    rule: str
    past: tuple[Exchange, ...] = ()
    spoiler: str = ""


class Teacher(Protocol):
    name: str
    at_once: int

    async def tasks(self, excerpt: Excerpt) -> list[tuple[str, str]]: ...

    async def reflect(self, moment: Moment) -> str: ...

    async def choose(self, moment: Moment, thought: str) -> str: ...

    def settle(self) -> None:
        """Called at the end of a stage. Raises an error if too many of its questions were not answered."""


class Offline:
    """Rules: questions from docstrings and documentation, the rule's words, the best label."""

    name = "offline"
    at_once = 1

    async def tasks(self, excerpt: Excerpt) -> list[tuple[str, str]]:
        return queries(excerpt)

    async def reflect(self, moment: Moment) -> str:
        return moment.rule

    async def choose(self, moment: Moment, thought: str) -> str:
        return moment.best

    def settle(self) -> None:
        pass


CHOOSE = "Which of these do you do? Answer with its label and nothing else."
SECRET = "This is a spoiler for you alone, and must not be mentioned: "
ASK_TASKS = {
    "code": "a source file",
    "shell": "a shell script",
    "text": "a page of its documentation",
    "data": "the beginning of a data file",
}


class Server:
    """A model behind a server as a teacher."""

    def __init__(self, client: Client):
        self.client, self.name, self.at_once, self.settle = client, client.name, client.at_once, client.settle

    async def say(self, messages: str | list[dict[str, str]], tokens: int) -> str:
        return (await self.client.ask(messages, tokens)).text

    async def tasks(self, excerpt: Excerpt) -> list[tuple[str, str]]:
        reply = await self.say(_task_prompt(excerpt), 1000)
        found = read_tasks(reply)
        if not found:
            raise Unusable("answer without a question", f"'{self.name}' gave no QUERY and ANSWER: {reply[:80]!r}")
        return found

    async def reflect(self, moment: Moment) -> str:
        reply = (await self.say(_dialogue(moment), LONGEST_THOUGHT)).split(ACTION.strip())[0].strip()
        if not fits(reply):
            raise Unusable("reflection that is empty or holds a marker")
        if moment.spoiler and ("spoiler" in reply.lower() or moment.spoiler in reply):
            raise Unusable("reflection that mentions the spoiler")
        return reply

    async def choose(self, moment: Moment, thought: str) -> str:
        asked = [{"role": "assistant", "content": thought}, {"role": "user", "content": moment.seen.menu + CHOOSE}]
        reply = await self.say([*_dialogue(moment), *asked], 16)
        label = read_choice(reply, moment.seen)
        if label is None:
            raise Unusable("choice that is not listed", f"'{self.name}' chose {reply[:80]!r}, which is not listed")
        return label


def _dialogue(moment: Moment) -> list[dict[str, str]]:
    """A system message, then what was seen, thought and done so far (without old lists of actions), then the present
    state."""
    messages = [{"role": "system", "content": moment.about}]
    for old in moment.past:
        messages += [
            {"role": "user", "content": old.state + moment.request},
            {"role": "assistant", "content": old.thought},
            {"role": "user", "content": "What do you do?"},
            {"role": "assistant", "content": old.command},
        ]
    secret = f"\n{SECRET}{moment.spoiler}" if moment.spoiler else ""
    return [*messages, {"role": "user", "content": moment.seen.state + moment.request + secret}]


def read_choice(reply: str, seen: Observation) -> str | None:
    """The label that an answer means: the label itself, the whole command, the first number after "action", or the
    first word that is a label."""
    text = reply.strip()
    if text in seen.actions:
        return seen.labels[seen.actions.index(text)]
    if text.strip(".").split(".")[0].strip() in seen.labels:
        return text.strip(".").split(".")[0].strip()
    after = re.search(r"action\W*(\w+)", text, re.IGNORECASE)
    words = ([after[1]] if after else []) + [w for w in re.findall(r"\w+", text) if w.isdigit()]
    return next((w for w in words if w in seen.labels), None)


def _task_prompt(excerpt: Excerpt) -> str:
    what = ASK_TASKS[excerpt.kind]
    return (
        f"The repository '{excerpt.repo}' runs as a service that people use. Below is {what}, '{excerpt.path}'.\n\n"
        f"{excerpt.window}\n\n"
        "First say in a few sentences what it holds. Then write questions that a user of the service could ask and "
        "that this file answers, without naming the file, each with its answer, in exactly this form:\n"
        "QUERY1: ...\nANSWER1: ...\nQUERY2: ...\nANSWER2: ...\n"
    )


_MARK = re.compile(r"^.{0,10}?(QUERY|ANSWER)\s*\d*\W*")


def read_tasks(reply: str) -> list[tuple[str, str]]:
    """Questions and answers of a QUERYk / ANSWERk list. The word stands within a line's first ten characters. Lines
    without one continue the part before, and a question without an answer is left out."""
    pairs: list[list[str]] = []
    slot = None
    for line in reply.splitlines():
        mark = _MARK.match(line)
        if mark and mark[1] == "QUERY":
            pairs.append([line[mark.end() :].strip(), ""])
            slot = 0
        elif mark and pairs:
            pairs[-1][1], slot = line[mark.end() :].strip(), 1
        elif slot is not None and line.strip():
            pairs[-1][slot] = f"{pairs[-1][slot]} {line.strip()}".strip()
    return [(_plain(q), _plain(a)) for q, a in pairs if _plain(q) and _plain(a)]


def _plain(text: str) -> str:
    return text.strip().strip("*").strip()
