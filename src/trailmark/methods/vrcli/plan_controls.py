"""Is a plan about its row? What other texts in its place would earn, by name, and how the two compare:

    other_plan      the plan of another row: as long, as well written, about something else
    random_words    as many words, drawn from the row's own prompt: length and copying
    empty           no plan at all: the instruction

If the plan of another row does as well, a policy has learnt what a plan looks like to the reader, and not what is in
the row. That happens on few rows, or with a reader that cannot use plans.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from trailmark.methods.vrcli.words import words_of
from trailmark.plain_files import read_json


def plans_of_others(rows: Sequence[str], plans: Sequence[str], seed: int) -> list[str]:
    """For each plan that of the next row, in an order drawn by seed. `rows` are the rows' names."""
    order = list(range(len(plans)))
    random.Random(f"other plan {seed}").shuffle(order)
    out = [""] * len(plans)
    for at, k in enumerate(order):
        after = order[at + 1 :] + order[:at]
        out[k] = plans[next((j for j in after if rows[j] != rows[k]), k)]
    return out


def words_at_random(prompt: str, n: int, seed: int, row: str) -> str:
    """`n` words of what the row shows; "" if it shows none."""
    draw, words = random.Random(f"random words {seed} {row}"), words_of(prompt)
    return " ".join(draw.choice(words) for _ in range(n)) if words else ""


def own_gain(own: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """By how much a row's own plan improves more than that of another row: the mean over rows, and the ends of its 95 %
    interval (Student's t), if there are two rows."""
    gaps = [a - b for a, b in zip(own, other, strict=True) if math.isfinite(a - b)]
    if not gaps:
        return {}
    n, mean = len(gaps), math.fsum(gaps) / len(gaps)
    if n < 2:
        return {"own_plan_gain": mean}
    half = t_975(n - 1) * math.sqrt(math.fsum((g - mean) ** 2 for g in gaps) / (n - 1) / n)
    return {"own_plan_gain": mean, "own_plan_gain_low": mean - half, "own_plan_gain_high": mean + half}


def t_975(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: exact for one and two, else Cornish and Fisher's expansion (to 0.01)."""
    if freedom < 3:
        return (12.7062047, 4.3026527)[freedom - 1]
    z, v = 1.959963985, float(freedom)
    return (z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3))  # fmt: skip


def not_about_the_row(found: Mapping[str, float]) -> str:
    """A sentence if plans improve, and plans of other rows, random words or no plan at all do it as well; else "".
    `found` has the means in percent: `improvement`, `other_plan_improvement`, `random_words_improvement`,
    `empty_improvement` (the last two if known) and those of `own_gain`."""
    low, own = found.get("own_plan_gain_low"), found.get("improvement", 0.0)
    if low is None or own <= 0:
        return ""
    names = {"random_words": "random words of the prompt", "empty": "no plan at all"}
    means = {what: found[f"{k}_improvement"] for k, what in names.items() if f"{k}_improvement" in found}
    if low > 0 and all(mean < own for mean in means.values()):
        return ""
    return (
        f"the plan of another row improves the gold texts by {found['other_plan_improvement']:.1f} %, the row's own by "
        f"{own:.1f} % (difference {found['own_plan_gain']:.1f} [{low:.1f}, {found['own_plan_gain_high']:.1f}])"
        + "".join(f"; {what} by {mean:.1f} %" for what, mean in means.items())
        + ". So plans are not shown to be about their rows: use more rows, or a reader that follows plans "
        "(docs/vrcli.md, Rows of your own)"
    )


def at_the_end(run: Path) -> str:
    """The sentence of `not_about_the_row` on what the comparison at the end of a run found (results.json)."""
    arms = {"trained": "", "other-plan": "other_plan_", "random-words": "random_words_", "no-plan": "empty_"}
    try:
        rows = read_json(run / "results.json")
        named = {(r["arm"], r["metric"]): float(r["value"]) for r in rows if r.get("arm") in arms}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return ""
    out = {f"{arms[arm]}improvement": v for (arm, metric), v in named.items() if metric == "improvement"}
    own = {m: v for (arm, m), v in named.items() if arm == "trained" and m.startswith("own_plan_gain")}
    whole = {"improvement", "other_plan_improvement"} <= set(out) and len(own) == 3
    return not_about_the_row({**out, **own}) if whole else ""
