"""Failed requests: work of which too many parts failed is not done. Recipes have a key `failures` and commands an
option `--failures`: the share of failures with which the work is done all the same."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from trailmark.errors import Unfinished
from trailmark.types import Episode, Failed

PATIENCE = 10  # failures in a row after which a server counts as gone


def too_many(failed: int, total: int, share: float) -> bool:
    return failed > share * total + 1e-9


def must_be_few(
    what: str, reasons: Sequence[str], total: int, share: float, key: str = "failures", first: str = "", then: str = "",
) -> None:  # fmt: skip
    """Raise an error if more than a share of the work failed. `what` is asked for, `reasons` has one text for each
    failure, `first` names the first one, `key` is how the user states the share, and `then` how to ask again."""
    failed = len(reasons)
    if too_many(failed, total, share):
        enough = math.ceil(100 * failed / total) / 100
        where = f" (the first: {first})" if first else ""
        raise Unfinished(
            f"{failed} of {total} {what} failed{where}: {listed(reasons)}. {then or again(key)} To go on without them: "
            f"{stated(key, enough)}."
        )


def gone(what: str, reasons: Sequence[str], key: str = "failures") -> Unfinished:
    """The error for a server that has failed so often in a row that asking on is of no use."""
    return Unfinished(
        f"{what}: {len(reasons)} requests in a row failed: {listed(reasons)}. {again(key)} To ask on in spite of "
        f"failures, state the share that may fail, such as {stated(key, 0.1)}."
    )


def unanswered(plays: Sequence[Episode]) -> dict[str, str]:
    """By id: why a server (a seat, a judge) did not answer in a play. A play may fail in other ways: a world crashes,
    a prompt does not fit."""
    failed = {e.id: e.outcome.error for e in plays if isinstance(e.outcome, Failed)}
    server = re.compile(r"(reward '.*?': )?(engine|judge '.*?'): https?://")  # one of several rewards is named first
    return {name: why for name, why in failed.items() if server.match(why)}


def must_be_answered(plays: Sequence[Episode], share: float) -> None:
    """Raise an error if servers did not answer in more than a share of the plays of a training."""
    lost = unanswered(plays)
    then = "What a judge answered is kept: train --resume goes on from the last checkpoint."
    must_be_few("plays", list(lost.values()), len(plays), share, first=next(iter(lost), ""), then=then)


@dataclass
class Tries:
    """Counts how often work was tried and failed. `total`: how often it will be tried; None: not known before."""

    what: str
    share: float = 0.0
    total: int | None = None
    key: str = "--failures"
    tried: int = 0
    reasons: list[str] = field(default_factory=list)
    in_a_row: list[str] = field(default_factory=list)

    def passed(self, new: bool = True) -> None:
        """`new`: it was done just now, so the server is there."""
        self.tried += 1
        if new:
            self.in_a_row.clear()

    def failed(self, why: str) -> None:
        """Raise an error if a server seems gone, and going on is of no use."""
        self.tried += 1
        self.reasons.append(why)
        self.in_a_row.append(why)
        vain = not self.share if self.total is None else too_many(len(self.reasons), self.total, self.share)
        if len(self.in_a_row) >= PATIENCE and vain:
            raise gone(self.what, self.in_a_row, self.key)

    def settle(self, first: str = "") -> None:
        """Raise an error if too much has failed since the last call."""
        tried, reasons, self.tried, self.reasons = self.total or self.tried, self.reasons, 0, []
        must_be_few(self.what, reasons, tried, self.share, self.key, first)


def again(key: str) -> str:
    how = "the same command asks" if key.startswith("-") else "train --resume (or stages --only) asks"
    return f"What was answered is kept: {how} only for what failed."


def stated(key: str, share: float) -> str:
    return f"{key} {share:g}" if key.startswith("-") else f"{key}={share:g}"


def listed(reasons: Sequence[str], most: int = 3) -> str:
    """The commonest reasons, each with its number."""
    counts = Counter(reason.rstrip(".") for reason in reasons).most_common()
    said = [why if n == len(reasons) else f"{n} x {why}" for why, n in counts[:most]]
    rest = sum(n for _, n in counts[most:])
    return "; ".join([*said, *([f"{rest} for other reasons"] if rest else [])])
