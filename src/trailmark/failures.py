"""Failed requests: work of which too many parts failed is not done. Recipes have a key `failures` and commands an
option `--failures`: the share of failures with which the work is done all the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from trailmark.errors import Unfinished

PATIENCE = 10  # failures in a row after which a server counts as gone


def too_many(failed: int, total: int, share: float) -> bool:
    return failed > share * total + 1e-9


def must_be_few(
    what: str, reasons: Sequence[str], total: int, share: float, key: str = "failures", first: str = "",
    kept: bool = True,
) -> None:  # fmt: skip
    """Raise an error if more than a share of the work failed. `what` is asked for, `reasons` has one text for each
    failure, `first` names the first one, and `key` is how the user states the share."""
    failed = len(reasons)
    if too_many(failed, total, share):
        enough = math.ceil(100 * failed / total) / 100
        where = f" (the first: {first})" if first else ""
        raise Unfinished(
            f"{failed} of {total} {what} failed{where}: {listed(reasons)}. {again(key, kept)} To go on without them: "
            f"{stated(key, enough)}."
        )


def gone(what: str, reasons: Sequence[str], key: str = "failures") -> Unfinished:
    """The error for a server that has failed so often in a row that asking on is of no use."""
    return Unfinished(
        f"{what}: {len(reasons)} requests in a row failed: {listed(reasons)}. {again(key)} To ask on in spite of "
        f"failures, state the share that may fail, such as {stated(key, 0.1)}."
    )


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


def again(key: str, kept: bool = True) -> str:
    if not kept:
        return "With --out FILE the others are kept, and the same command asks only for what failed."
    how = "the same command asks" if key.startswith("-") else "train --resume (or lpr run) asks"
    return f"What was answered is kept: {how} only for what failed."


def stated(key: str, share: float) -> str:
    return f"{key} {share:g}" if key.startswith("-") else f"{key}={share:g}"


def listed(reasons: Sequence[str], most: int = 3) -> str:
    """The commonest reasons, each with its number."""
    counts = Counter(reason.rstrip(".") for reason in reasons).most_common()
    said = [why if n == len(reasons) else f"{n} x {why}" for why, n in counts[:most]]
    rest = sum(n for _, n in counts[most:])
    return "; ".join([*said, *([f"{rest} for other reasons"] if rest else [])])
