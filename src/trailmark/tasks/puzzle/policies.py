"""Policies whose probabilities are known, and exact values under them.

A policy says how likely each next line is: `policy.next(puzzle, lines)` gives {"eb": 0.9, "Finish[A]": 0.1}. If two
beginnings have the same `policy.key`, the policy goes on in the same way behind both. So the value of a beginning, the
probability that the answer will be right, is a sum over finitely many states, and is computed without drawing anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trailmark.answers import LETTERS
from trailmark.errors import TaskError
from trailmark.tasks.puzzle.orders import OPENING, RELATION, Form, Puzzle, read_lines, read_puzzle, written

MOST = 64  # lines of a solution


class Policy(Protocol):
    def next(self, puzzle: Puzzle, lines: Sequence[str]) -> Mapping[str, float]: ...

    def key(self, puzzle: Puzzle, lines: Sequence[str]) -> Hashable: ...


@dataclass(frozen=True)
class Walker:
    """Walks from item to item and writes each step, such as "bf". It is the scripted teacher; with other rates, a
    student.

    errors   the probability of a step to the down of an item, a clue that is read in the wrong direction
    leaps    the probability of a guess among the options in the place of a step
    slips    the probability that the answer names another option than the one that was reached
    free     this many lines in, it makes no more errors and leaps, so that every solution ends
    From a down it goes where the clue leads.
    """

    errors: float = 0.0
    leaps: float = 0.0
    slips: float = 0.0
    free: int = 12

    def __post_init__(self) -> None:
        rates = (self.errors, self.leaps, self.slips)
        if not all(0 <= r <= 1 for r in rates) or self.errors + self.leaps > 1 or self.free < 0:
            raise TaskError(f"a walker needs rates from 0 to 1, errors + leaps at most 1; not {self}.")

    def key(self, puzzle: Puzzle, lines: Sequence[str]) -> Hashable:
        return item_of(puzzle, lines), min(len(lines), self.free)

    def next(self, puzzle: Puzzle, lines: Sequence[str]) -> Mapping[str, float]:
        at = item_of(puzzle, lines)
        if at in puzzle.options:
            reached, count = puzzle.options.index(at), len(puzzle.options)
            return {
                f"Finish[{LETTERS[k]}]": 1 - self.slips if k == reached else self.slips / (count - 1)
                for k in range(count)
            }
        free, down = len(lines) < self.free, puzzle.earlier.get(at)
        error = self.errors if free and down else 0.0
        leap = self.leaps if free else 0.0
        out = {f"{at}{down}": error, f"{at}{puzzle.later[at]}": 1 - error - leap}
        for k in range(len(puzzle.options)):
            out[f"Finish[{LETTERS[k]}]"] = leap / len(puzzle.options)
        return {line: p for line, p in out.items() if p > 0}

    def draw(self, puzzle: Puzzle, rng: random.Random, lines: Sequence[str] = ()) -> list[str]:
        """The lines that it writes behind `lines`, up to the answer."""
        out = list(lines)
        while not (out and out[-1].startswith("Finish[")):
            found = self.next(puzzle, out)
            out.append(rng.choices(list(found), list(found.values()))[0])
        return out[len(lines) :]


def item_of(puzzle: Puzzle, lines: Sequence[str]) -> str:
    """Where a solution stands: the item that its last relation reached. Lines that are none do not count."""
    for line in reversed(lines):
        pair = RELATION.fullmatch(line)
        if pair and (pair[2] in puzzle.later or pair[2] in puzzle.options):
            return pair[2]
    return puzzle.start


def exact_value(
    puzzle: Puzzle, lines: Sequence[str], policy: Policy, most: int = MOST, floor: float = 0.0
) -> tuple[float, float]:
    """The probability that the answer will be right if the policy goes on behind `lines`, and the probability of what
    was not looked at: continuations less likely than `floor`. The true value lies between the first and the sum. A
    solution of `most` lines without an answer is wrong."""
    right = f"Finish[{LETTERS[puzzle.label]}]"
    known: dict[Hashable, tuple[float, float]] = {}

    def value(done: tuple[str, ...], reach: float) -> tuple[float, float]:
        if done and done[-1].startswith("Finish["):
            return float(done[-1] == right), 0.0
        if len(done) >= most:
            return 0.0, 0.0
        if reach < floor:
            return 0.0, 1.0
        key = (policy.key(puzzle, done), len(done))
        if floor or key not in known:
            total = unseen = 0.0
            for line, p in policy.next(puzzle, done).items():
                v, u = value((*done, line), reach * p)
                total, unseen = total + p * v, unseen + p * u
            if floor:  # what is left out depends on the way here
                return total, unseen
            known[key] = total, unseen
        return known[key]

    return value(tuple(lines), 1.0)


def player(form: Form = "short", **rates: Any) -> Callable[[str, random.Random], str]:
    """A function for a scripted seat: it goes on with whatever was written behind a puzzle."""
    walker = Walker(**rates)

    def play(prompt: str, draw: random.Random) -> str:
        puzzle, begun = read_puzzle(prompt)
        begun = begun.removeprefix(OPENING) if form == "react" else begun
        lines = read_lines(begun, form)
        said = written(walker.draw(puzzle, draw, lines), form, len(lines))
        return f"\n{said}" if lines and not begun.endswith("\n") else said

    play.policy = walker  # type: ignore[attr-defined]  # its probabilities, for exact values
    return play


careless = player(errors=0.3, leaps=0.05, slips=0.05)
