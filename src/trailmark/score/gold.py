"""A gold text in a sequence, and how likely it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trailmark.types import Tokens


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The log-probability of a text, summed over its scored tokens."""

    logp: float
    tokens: int

    @property
    def mean(self) -> float:
        """Log-prob per token."""
        return self.logp / self.tokens

    @property
    def nll(self) -> float:
        return -self.mean

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll) if self.nll < 700 else math.inf


@dataclass(frozen=True, slots=True)
class Gold:
    """A sequence in which the tokens [start, end) are the gold text. `name` is for errors."""

    tokens: Tokens
    start: int
    end: int
    name: str = field(default="", compare=False)
