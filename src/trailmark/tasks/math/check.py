r"""The answer checker: find the answer in a text, compare it with the gold answer, say why.

    checker = Checker()
    checker.check(r"… so it is \boxed{\frac12}.", gold="0.5")     Verdict(right=True, answer="\\frac12", reason="equal")

`rules="strict"` requires the same answer (`strict.py`). `rules="lenient"` judges like the published reference
(`lenient.py`), with its false positives, so that our numbers can be compared with the published ones. Plain numbers are
compared in this process, formulas in guarded processes (`pool.py`). An answer that cannot be judged in time is wrong,
and the verdict says so.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, get_args

from trailmark.errors import TaskError, nearest
from trailmark.tasks.math import lenient
from trailmark.tasks.math.extract import Marker, final_answer
from trailmark.tasks.math.normalise import clean
from trailmark.tasks.math.numbers import canonical, read_number
from trailmark.tasks.math.pool import Pool
from trailmark.tasks.math.strict import TooMany, same
from trailmark.types import Episode

Rules = Literal["strict", "lenient"]
REMEMBERED = 20_000  # cached verdicts: a policy often gives the same answer
FORMULAS = 40  # formula comparisons that one answer may cause
LOST = 2  # how many of them may fail
UNKNOWN = {
    "time": "unknown: it took too long to compare",
    "crash": "unknown: the comparison crashed",
    "many": "unknown: too many parts to compare",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`answer` is the answer found in the text. `reason`: "equal", "different", "no answer", or "unknown: …", which
    counts as wrong."""

    right: bool
    answer: str | None
    reason: str


class Checker:
    """May be used from many threads. The pool starts its processes for the first formula."""

    def __init__(self, rules: Rules = "strict", pool: Pool | None = None):
        if rules not in get_args(Rules):
            raise TaskError(f"the answer checker has no rules '{rules}'.{nearest(str(rules), get_args(Rules))}")
        self.rules, self.pool = rules, pool or Pool()
        self._known: OrderedDict[tuple[str, ...], Verdict] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, text: str, gold: str, question: str = "", marker: Marker = "boxed") -> Verdict:
        """Judge a whole response. Only the lenient rules use `question` (does it ask for a list?)."""
        if self.rules == "strict":
            answer = final_answer(text, marker)
            return Verdict(False, None, "no answer") if answer is None else self.same(gold, answer)
        found = lenient.extract(text, question, single=marker == "hash")
        right, why = self._judged(lambda ask: lenient.equal(lenient.gold_items(gold, question), found, ask), "close")
        return Verdict(right, ", ".join(found) if found else None, why)

    def same(self, gold: str, answer: str) -> Verdict:
        """Judge a single answer by the strict rules."""
        key = (gold, answer)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        right, why = self._judged(lambda ask: same(gold, answer, ask), "equal")
        verdict = Verdict(right, answer, why)
        with self._lock:
            self._known[key] = verdict
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return verdict

    def _judged(self, compare: lenient.Compare, how: str) -> tuple[bool, str]:
        lost: list[str] = []
        asked = 0

        def ask(gold: str, answer: str) -> bool:
            nonlocal asked
            asked += 1
            if asked > FORMULAS or len(lost) >= LOST:
                raise TooMany
            said = self.pool.ask({"gold": gold, "answer": answer, "how": how})
            if "error" in said:
                lost.append(UNKNOWN.get(said["error"], UNKNOWN["crash"]))
            return said.get("equal") is True

        try:
            right = compare(ask)
        except (TooMany, RecursionError):
            return False, lost[0] if lost else UNKNOWN["many"]
        return right, "equal" if right else lost[0] if lost else "different"


def answer_of(e: Episode) -> str | None:
    """The answer that an episode marks as one of maths, for votes."""
    text = e.turns[-1].text if e.turns else ""
    if not any(mark in text for mark in ("####", "\\boxed", "he answer is")):
        return None
    return vote(text, "hash" if "####" in text else "boxed")


def vote(text: str, marker: Marker = "boxed") -> str | None:
    """The answer of a response in one spelling, for voting: equal numbers and equal texts are the same vote."""
    answer = final_answer(text, marker)
    if answer is None:
        return None
    plain = clean(answer)
    number = read_number(plain)
    return (canonical(number) if number else plain.replace(" ", "")) or None
