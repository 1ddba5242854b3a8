"""Failed requests: work of which too many parts failed is not done. Recipes have a key `failures` and commands an
option `--failures`: the share of failures with which the work is done all the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

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


def again(key: str, kept: bool = True) -> str:
    if not kept:
        return "With --out FILE the others are kept, and the same command asks only for what failed."
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
