"""Who names the turns that decided a play: a rule of the world, or a language model that reads the whole play.

The model sees the strategist's conversation with a number before each strategy, and the outcome. It answers with the
numbers of those that were critically important. An answer that cannot be read, or names any other number, is asked for
again; a play without an answer in the end was not judged, which is not the same as a play without critical turns.
Nothing that was judged is changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trailmark.ask.client import Unreadable, ask_each
from trailmark.errors import RecipeError
from trailmark.failures import Tries
from trailmark.score.base import digest
from trailmark.score.config import ModelJudgeConfig
from trailmark.score.judge import ModelJudge, object_schema, objects
from trailmark.tasks.base import TaskSource
from trailmark.types import Episode, Failed

SOURCE_RULE = "rule"
RUBRIC = (
    "Below is a finished play. The first message holds the context and the goal. After it stand strategies (or "
    "thoughts) of an adviser, each with a number, and what happened then. The outcome says how far the goal was "
    "reached. Pick the strategies that were critically important for reaching the goal. There may be none."
)


@dataclass(frozen=True)
class Told:
    """A play as the judge is shown it: the strategist's conversation without a system message, and the outcome."""

    name: str
    messages: tuple[Mapping[str, Any], ...]
    outcome: float
    scale: float = 1.0  # the largest outcome

    @property
    def strategies(self) -> list[int]:
        """The places of the strategies in the conversation, from 0."""
        return [k for k, m in enumerate(self.messages) if m["role"] == "assistant"]


def told(name: str, messages: Sequence[Mapping[str, Any]], outcome: float, scale: float = 1.0) -> Told:
    first = 1 if messages and messages[0]["role"] == "system" else 0
    return Told(name, tuple(messages[first:]), outcome, scale)


def shown(t: Told) -> str:
    """The play as text. A line of a message cannot look like a number of ours: it is indented."""
    parts = []
    for k, m in enumerate(t.messages):
        head = f"[{k}] strategy:" if m["role"] == "assistant" else "what the adviser saw:"
        parts.append(head + "".join(f"\n    {line}" for line in str(m["content"]).splitlines()))
    parts.append(f"Outcome: {t.outcome:g} (the best is {t.scale:g})")
    return "\n".join(parts)


def form(name: str, places: Sequence[int]) -> str:
    return (
        f"The strategies have the numbers {', '.join(map(str, places))}. Reply with one JSON object and nothing else:\n"
        f'{{"id": "{name}", "indexes": [the numbers of the critical strategies], "reasoning": "one sentence"}}'
    )


def schema(name: str, places: Sequence[int]) -> dict[str, Any]:
    numbers = {"type": "array", "items": {"enum": list(places)}}
    return object_schema({"id": {"const": name}, "indexes": numbers, "reasoning": {"type": "string"}})


def read_indexes(text: str, name: str, places: Sequence[int]) -> list[int]:
    """The places that an answer names. Anything else in the list spoils the whole answer."""
    text = re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.S)
    found = [o for o in objects(text) if "indexes" in o]
    if not found:
        raise Unreadable("Your answer holds no JSON object with 'indexes'")
    named = [o for o in found if str(o.get("id", name)) == name]
    if not named:
        raise Unreadable(f"Your answer is for '{str(found[-1]['id'])[:40]}', not for '{name}'")
    answers = {tuple(sorted(set(_numbers(o["indexes"], places)))) for o in named}
    if len(answers) > 1:
        raise Unreadable("Your answer holds two different lists of indexes")
    return list(answers.pop())


def _numbers(value: Any, places: Sequence[int]) -> list[int]:
    if not isinstance(value, list):
        raise Unreadable("Your indexes are no list of numbers")
    out = []
    for v in value:
        if isinstance(v, str) and v.strip().isdecimal():
            v = int(v)
        if isinstance(v, bool) or not isinstance(v, int | float) or not float(v).is_integer():
            raise Unreadable(f"{json.dumps(v)[:40]} is no index of a strategy")
        if int(v) not in places:
            raise Unreadable(f"{int(v)} is no index of a strategy: these are {', '.join(map(str, places))}")
        out.append(int(v))
    return out


class CriticalTurns:
    """A language model that is asked about each play. What it answers is stored by its question."""

    def __init__(self, config: ModelJudgeConfig, engine: Any = None, answers: Any = None):
        if config.rubric == ModelJudgeConfig.model_fields["rubric"].default:
            config = config.model_copy(update={"rubric": RUBRIC})
        self.config, self.asker = config, ModelJudge(config, engine, answers)

    @property
    def source(self) -> str:
        return self.asker.source

    async def ask(self, t: Told) -> list[int] | Failed:
        """The places of the critical strategies."""
        question = f"{self.config.rubric}\n\n{shown(t)}"
        name, places = digest(question), t.strategies
        read = lambda text: read_indexes(text, name, places)
        return await self.asker.ask_for(question, form(name, places), read, schema(name, places))

    def ask_all(self, plays: Sequence[Told], failures: float = 0.0, key: str = "failures") -> list[list[int] | None]:
        """The critical places of every play, in order; None for one that was not judged, of which there may be a share
        `failures`."""
        tries = Tries("plays at the judge", failures, len(plays), key)

        async def one(t: Told) -> list[int] | None:
            found = await self.ask(t)
            if isinstance(found, Failed):
                tries.failed(found.error)
                return None
            tries.passed()
            return found

        made = ask_each("judging", plays, one, self.config.at_once)
        tries.settle(next((t.name for t, m in zip(plays, made) if m is None), ""))
        return made


def by_rule(source: TaskSource, e: Episode, side: str) -> list[int]:
    """The numbers (from 0) of a side's strategies that a rule of the world calls critical. Each strategy led to one
    action."""
    rule = getattr(source, "critical", None)
    if rule is None:
        raise RecipeError(
            f"judge.kind: task '{source.name}' has no rule that names critical turns: choose model or none."
        )
    return rule(e, side)
