"""Order puzzles: clues such as mq ("m comes before q"), and the question which of A, B, C and D must come after the
start.

    mq gm gC km mu qB hq hA im iD        the clues, in any order
    k?                                   the start is k; exactly one of A to D, here B, comes after it
    km                                   a solution: a line is a step, a relation that is claimed to hold
    mq
    qB
    Finish[B]                            the last line is the answer

A relation is *sound* if it follows from the clues (by any number of inferences). It is *direct* if it is a clue, or one
inference from clues and sound lines before it. An answer claims that its option comes after the start. It is sound if
that follows from the clues, and direct if it follows from the sound lines that were written.

How a puzzle is built: a chain from the start to the right option; *ups* (mu) branch off it and lead nowhere, so a step
there is sound and of no use (a detour); *downs* (gm) come before an inner item of the chain and after nothing, so a
step to one is never sound. Each wrong option comes after a down of its own. So behind a wrong step the way leads to a
wrong option or back to the chain, and a solution with wrong steps may end with the right answer:

    km                                   sound
    mg                                   not sound: no clue says so
    gm                                   sound; gC would be sound too, and would lead to the wrong answer
    mq ...
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from trailmark.errors import TaskError
from trailmark.steps import react_steps, split_steps
from trailmark.tasks.logic.answer import LETTERS, read_answer

Form = Literal["short", "react"]
ITEMS = "abcdefghijkl"
LEVELS = {1: (2, 0), 2: (3, 1), 3: (4, 1), 4: (5, 2), 5: (6, 3)}  # relations of the chain, ups
OPTIONS = "ABCD"
SPLITS = {"test": range(0, 10), "val": range(10, 20), "train": range(20, 100)}
OPENING = "Thought 1:"  # the end of a prompt in the form react
RELATION = re.compile(r"\s*([a-zA-D])([a-zA-D])\s*")
TEXT = re.compile(r"((?:[a-zA-D]{2} )*[a-zA-D]{2})\n([a-z])\?\n")
Pair = tuple[str, str]


@dataclass(frozen=True)
class Puzzle:
    start: str
    clues: tuple[Pair, ...]
    options: tuple[str, ...] = tuple(OPTIONS)

    @cached_property
    def after(self) -> dict[str, frozenset[str]]:
        """Item -> all items that must come after it."""
        found = {x: {b for a, b in self.clues if a == x} for pair in self.clues for x in pair}
        grown = True
        while grown:
            grown = False
            for x, later in found.items():
                more = set().union(later, *(found[y] for y in later))
                grown |= more != later
                found[x] = more
        return {x: frozenset(later) for x, later in found.items()}

    def entails(self, a: str, b: str) -> bool:
        return b in self.after.get(a, ())

    @cached_property
    def label(self) -> int:
        right = [k for k, x in enumerate(self.options) if self.entails(self.start, x)]
        if len(right) != 1:
            raise TaskError(f"{len(right)} options come after '{self.start}': there must be one.")
        return right[0]

    @cached_property
    def path(self) -> tuple[str, ...]:
        """The items from the start to the right option."""
        goal = self.options[self.label]
        ways = [(self.start,)]
        while ways[0][-1] != goal:  # the shortest way; there is one, as the goal comes after the start
            way = ways.pop(0)
            ways += [(*way, b) for a, b in self.clues if a == way[-1]]
        return ways[0]

    @cached_property
    def text(self) -> str:
        clues = " ".join(f"{a}{b}" for a, b in self.clues)
        return f"{clues}\n{self.start}?\n"


class Truth(NamedTuple):
    """For each step of a text, 1 if it is sound, else 0; and their mean (None: there is no step)."""

    steps: tuple[float, ...]
    mean: float | None


def make_puzzle(rng: random.Random, level: int) -> Puzzle:
    length, ups = LEVELS[level]
    goal, *others = rng.sample(OPTIONS, len(OPTIONS))
    items = rng.sample(ITEMS, length + ups + len(others))
    chain, side, downs = [*items[:length], goal], items[length : length + ups], items[length + ups :]
    clues = list(pairwise(chain))
    clues += [(chain[rng.randrange(length)], u) for u in side]
    for down, option in zip(downs, others):
        clues += [(down, chain[rng.randrange(1, length)]), (down, option)]
    rng.shuffle(clues)
    return Puzzle(chain[0], tuple(clues))


def split_of(text: str) -> str:
    """The split of a puzzle by its hash: 80 % train, 10 % val, 10 % test."""
    bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def read_puzzle(text: str) -> tuple[Puzzle, str]:
    """The puzzle that a text begins with, and what stands behind it."""
    found = TEXT.match(text)
    if found is None:
        raise TaskError(f"this is no order puzzle: {text[:60]!r}")
    clues = tuple((c[0], c[1]) for c in found[1].split(" "))
    return Puzzle(found[2], clues), text[found.end() :]


# --- solutions --------------------------------------------------------------------------------------------------------


def written(lines: Sequence[str], form: Form, done: int = 0) -> str:
    """Lines as a solution in this form, behind `done` lines that are there already. The answer is "Finish[B]"."""
    if form == "short":
        return "\n".join(lines)
    out = []
    for k, line in enumerate(lines, done + 1):
        answer = re.fullmatch(r"Finish\[([A-Z])\]", line)
        said = f"Action {k}: Finish[The answer is {answer[1]}.]" if answer else f"Thought {k}: {line}"
        out.append(said.removeprefix(OPENING) if k == 1 else said)
    return "\n".join(out)


def read_lines(text: str, form: Form) -> list[str]:
    """The steps of a solution, in the order of `steps.py`, each as the line of the short form; other text as it is."""
    if form == "short":
        pieces = [p.strip() for p in split_steps(text)]
    else:
        whole = [text[a:b] for a, b, _ in react_steps(text, f"\n{OPENING}")]
        pieces = [re.sub(r"^(Thought|Action|Observation) [0-9]+:", "", p).strip() for p in whole]
    out = []
    for piece in pieces:
        letter = read_answer(piece, len(LETTERS)).letter if "Finish[" in piece else ""
        out.append(f"Finish[{letter}]" if letter else piece)
    return [p for p in out if p] if form == "short" else out


def true_step_values(puzzle: Puzzle, text: str, form: Form = "short", direct: bool = False) -> Truth:
    """Which steps of a solution are sound. With `direct` each step must be one inference from the clues and the sound
    lines before it, and an answer must follow from the lines. Text that is neither a relation nor an answer is not
    sound."""
    known, shown = set(puzzle.clues), set[Pair]()
    values: list[float] = []
    for line in read_lines(text, form):
        pair = RELATION.fullmatch(line)
        letter = re.fullmatch(r"Finish\[([A-Z])\]", line)
        ok = False
        if pair:
            a, b = pair[1], pair[2]
            ok = puzzle.entails(a, b)
            if direct and ok:
                ok = (a, b) in known or any((a, c) in known and (c, b) in known for c in puzzle.after)
            if ok:
                known.add((a, b))
                shown.add((a, b))
        elif letter and LETTERS.index(letter[1]) < len(puzzle.options):
            claim = (puzzle.start, puzzle.options[LETTERS.index(letter[1])])
            ok = puzzle.entails(*claim) and (not direct or Puzzle(puzzle.start, tuple(shown)).entails(*claim))
        values.append(float(ok))
    return Truth(tuple(values), sum(values) / len(values) if values else None)
