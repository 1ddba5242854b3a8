"""Exact values of states: the probability that a policy which goes on from a state ends with success, summed over all
that it may write. And how Monte-Carlo values compare with them.

Every text that the policy may write behind a state is followed, token by token, as long as its probability is at least
`floor`. What was not followed is summed, too: the exact value lies between `low` and `low + unseen`. This is possible
for short answers over few likely tokens, such as those of order puzzles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trailmark.errors import TrailmarkError
from trailmark.stats.intervals import mean_of
from trailmark.terminal.pictures import BLUE, GREY, picture
from trailmark.types import Tokens

ROWS = 256  # texts in one pass of the model


@dataclass(frozen=True, slots=True)
class Exact:
    low: float  # of what was followed to its end, the probability of success
    unseen: float  # the probability of what was not followed

    @property
    def value(self) -> float:
        """The share of successes in what was seen: between `low` and `low + unseen`."""
        return self.low / (1 - self.unseen) if self.unseen < 1 else 0.0


def exact_value(
    lm: Any, begun: Tokens, stops: Sequence[int], most: int, right: Callable[[Tokens], float], floor: float = 0.003,
    temperature: float = 1.0,
) -> Exact:  # fmt: skip
    """The value of the state `begun` (the prompt and what was written). At most `most` more tokens are written; `right`
    gets them, without a stop token, and returns 1 or 0."""
    low = unseen = 0.0
    live: list[tuple[Tokens, float]] = [((), 1.0)]
    for n in range(most + 1):
        if n == most:
            low += sum(p * right(tokens) for tokens, p in live)  # cut off
            break
        found = next_tokens(lm, [begun + tokens for tokens, _ in live], temperature)
        ahead: list[tuple[Tokens, float]] = []
        for (tokens, p), row in zip(live, found):
            each = p * row
            likely = np.flatnonzero(each >= floor)
            unseen += float(p - each[likely].sum())
            for token in likely.tolist():
                if token in stops:
                    low += float(each[token]) * right(tokens)
                else:
                    ahead.append(((*tokens, token), float(each[token])))
        live = ahead
        if not live:
            break
    return Exact(low, max(0.0, unseen))


def next_tokens(lm: Any, rows: Sequence[Tokens], temperature: float = 1.0) -> np.ndarray:
    """The probabilities of the token behind each row; all rows have the same length."""
    import torch

    lm.train(False)
    base = lm.base
    before = base.config._attn_implementation
    base.set_attn_implementation("sdpa")  # plain causal attention over rows of one length
    try:
        with torch.no_grad():
            parts = [
                base(input_ids=torch.tensor(rows[i : i + ROWS], device=lm.device)).logits[:, -1].double()
                for i in range(0, len(rows), ROWS)
            ]
    finally:
        base.set_attn_implementation(before)
    return (torch.cat(parts) / temperature).softmax(-1).cpu().numpy()


def calibration(exact: Sequence[float], counted: Sequence[float], bins: int = 5) -> list[dict[str, Any]]:
    """States grouped by their exact value: the mean exact value and the mean Monte-Carlo value of each group, with its
    interval."""
    x, y = np.asarray(exact, float), np.asarray(counted, float)
    place = np.minimum((x * bins).astype(int), bins - 1)
    out = []
    for b in range(bins):
        if (mine := place == b).any():
            found = mean_of(y[mine]) if len(set(y[mine])) > 1 else None
            out.append({
                "from": b / bins, "to": (b + 1) / bins, "states": int(mine.sum()), "exact": float(x[mine].mean()),
                "counted": float(y[mine].mean()),
                "low": found.low if found else None, "high": found.high if found else None,
            })  # fmt: skip
    return out


def draw_calibration(
    exact: Sequence[float], counted: Sequence[float], rows: Sequence[Mapping[str, Any]], out: Path, title: str
) -> None:
    """Draw OUT.png and OUT.svg: every state (grey), the groups with intervals, and the line where they should lie."""
    if out.suffix:
        raise TrailmarkError(f"{out}: name the picture without an ending; .png and .svg are written.")
    with picture(out, (4.6, 4.4)) as figure:
        ax = figure.subplots()
        ax.plot([0, 1], [0, 1], "-", color="black", lw=0.8)
        shift = np.random.default_rng(0).uniform(-0.02, 0.02, len(counted))  # so that equal counts can be told apart
        ax.plot(exact, np.asarray(counted) + shift, "o", color=GREY, ms=2.5, alpha=0.6, label="a state")
        for r in rows:
            if r["low"] is not None:
                ax.plot([r["exact"]] * 2, [r["low"], r["high"]], "-", color=BLUE, lw=2)
        means = ([r["exact"] for r in rows], [r["counted"] for r in rows])
        ax.plot(*means, "D", color=BLUE, ms=6, label="mean, 95 % interval")
        ax.set_xlabel("exact value")
        ax.set_ylabel("Monte-Carlo value")
        ax.legend(frameon=False, loc="upper left")
        ax.set_title(title, fontsize=9)
