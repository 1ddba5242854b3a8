"""What imported records say of an answer, against what the world of its question says. The world decides, and what
differs is counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trailmark.answers import LETTERS
from trailmark.errors import TaskError
from trailmark.types import Episode, Scored, Task

Reading = tuple[Scored, str | None]  # what a world says of a text, and the answer that it read, if it tells
Reads = Callable[[Task, str], Reading | None]

DIFFERS = "another pred than the text says (the text counts)"


def believes(task: Task, text: str) -> Reading | None:
    """No world reads: a record is believed."""
    return None


def world_reads(source: Any) -> Reads:
    """What the worlds of a task say of a text. None where the task does not know the question, where an answer takes
    several turns, or where a judge would have to be asked."""

    def read(task: Task, text: str) -> Reading | None:
        if source.judged or source.judge is not None:
            return None
        world = source.make()
        try:
            if world.reset(task).labels:  # one of the listed actions is asked for, not an answer
                return None
            step = world.step(text)
        except TaskError:
            return None
        if not step.terminated or not isinstance(step.outcome, Scored):
            return None
        return step.outcome, step.info.get("answer")

    return read


def judged(e: Episode, reads: Reads, out: Counter[str]) -> Episode:
    """An answer with the outcome that its question's world gives it. `out` counts what its record says otherwise."""
    if not isinstance(e.outcome, Scored) or len(e.turns) != 1:
        return e
    answer = e.turns[0].text if e.turns[0].action is None else e.turns[0].action
    if (found := reads(e.task, answer)) is None:
        if "text_says" in e.info:
            out[DIFFERS] += 1
        return e
    outcome, answer = found
    info = {k: v for k, v in e.info.items() if k != "text_says"}
    pred, letter = str(info.get("pred") or "").strip(), "[A-Z]?"
    letters = answer is not None and "pred" in info and re.fullmatch(letter, pred) and re.fullmatch(letter, answer)
    if pred != answer if letters else outcome.success != e.outcome.success:
        out[DIFFERS] += 1
        info.pop("pred", None)
        info |= {"pred": answer} if letters else {}
    turn = replace(e.turns[0], reward=outcome.reward)
    return replace(e, turns=(turn,), outcomes={"self": outcome}, info=info)


def other_label(given: Any, task: Task) -> bool:
    """Whether a record's label is not that of its question. A hidden one says nothing."""
    own = task.meta.get("label", task.data.get("answer"))
    if given in (None, -1, "") or own in (None, -1, ""):
        return False
    letter = lambda x: LETTERS[x] if isinstance(x, int) and 0 <= x < len(LETTERS) else None
    a, b = str(given).strip(), str(own).strip()
    return a not in (b, letter(own)) and b != letter(given)


def turned_pairs(sides: Sequence[Episode], tasks: Mapping[str, Task], reads: Reads) -> int:
    """Of pairs (chosen, rejected, chosen, …): how many have a wrong answer as chosen and a right one as rejected."""
    readings = [reads(tasks[str(e.task.meta["id"])], e.turns[0].text) for e in sides]
    won = [None if found is None else getattr(found[0], "success", None) for found in readings]
    return sum(a is False and b is True for a, b in zip(won[::2], won[1::2]))
