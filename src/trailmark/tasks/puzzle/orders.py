"""Order puzzles: clues such as m<q ("m comes before q"), and the question which option must come after the start.

    m<q k<m d<q m<u q<t e<m f<q      the clues, in any order
    k<? A.d B.t C.e D.f              the start is k; exactly one option, t, is known to come after it
    k<m                              a solution: a line is a step, a relation that is claimed to follow
    k<q
    k<t
    Finish[B]                        the last line is the answer

A relation is *sound* if it follows from the clues (by any number of inferences). It is *direct* if it is a clue, or one
inference from clues and sound lines before it. An answer claims that its option comes after the start.

How a puzzle is built: a chain from the start to the right option; *ups* (m<u) branch off it and lead nowhere, so a step
there is sound and of no use; *downs* (d<q) come before some item of the chain, so a step there, a clue read backwards,
is not sound. The wrong options are downs. From a down that is no option the way leads back to the chain, so a solution
with such a wrong step may still end with the right answer.
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
ITEMS = "abcdefghijklmnopqrstuvwxyz"
LEVELS = {1: (2, 0, 1), 2: (3, 1, 3), 3: (4, 1, 4), 4: (5, 2, 5), 5: (7, 3, 5)}  # chain, ups, downs that are no option
OPTIONS = 4
SPLITS = {"test": range(0, 10), "val": range(10, 20), "train": range(20, 100)}
OPENING = "Thought 1:"  # the end of a prompt in the form react
RELATION = re.compile(r"\s*([a-z])<([a-z])\s*")
TEXT = re.compile(r"((?:[a-z]<[a-z] )*[a-z]<[a-z])\n([a-z])<\? ((?:[A-Z]\.[a-z] )*[A-Z]\.[a-z])\n")
Pair = tuple[str, str]


@dataclass(frozen=True)
class Puzzle:
    start: str
    clues: tuple[Pair, ...]
    options: tuple[str, ...]

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
        clues = " ".join(f"{a}<{b}" for a, b in self.clues)
        options = " ".join(f"{letter}.{x}" for letter, x in zip(LETTERS, self.options))
        return f"{clues}\n{self.start}<? {options}\n"


class Truth(NamedTuple):
    """For each step of a text, 1 if it is sound, else 0; and their mean (None: there is no step)."""

    steps: tuple[float, ...]
    mean: float | None


def make_puzzle(rng: random.Random, level: int) -> Puzzle:
    length, ups, downs = LEVELS[level]
    items = rng.sample(ITEMS, length + 1 + ups + downs + OPTIONS - 1)
    chain, rest = items[: length + 1], items[length + 1 :]
    clues = list(pairwise(chain))
    clues += [(chain[rng.randrange(length)], u) for u in rest[:ups]]
    clues += [(d, chain[rng.randrange(1, length)]) for d in rest[ups:]]
    options = [chain[-1], *rest[ups + downs :]]
    rng.shuffle(clues)
    rng.shuffle(options)
    return Puzzle(chain[0], tuple(clues), tuple(options))


def split_of(text: str) -> str:
    """The split of a puzzle by its hash: 80 % train, 10 % val, 10 % test."""
    bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def read_puzzle(text: str) -> tuple[Puzzle, str]:
    """The puzzle that a text begins with, and what stands behind it."""
    found = TEXT.match(text)
    if found is None:
        raise TaskError(f"this is no order puzzle: {text[:60]!r}")
    clues = tuple((c[0], c[2]) for c in found[1].split(" "))
    return Puzzle(found[2], clues, tuple(o[2] for o in found[3].split(" "))), text[found.end() :]


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
    lines before it, and an answer must have been shown by such a line (or be a clue). Text that is neither a relation
    nor an answer is not sound."""
    known = set(puzzle.clues)
    values: list[float] = []
    for line in read_lines(text, form):
        pair = RELATION.fullmatch(line)
        letter = re.fullmatch(r"Finish\[([A-Z])\]", line)
        ok = False
        if pair:
            a, b = pair[1], pair[2]
            ok = puzzle.entails(a, b)
            if direct and ok:
                ok = (a, b) in known or any((a, c) in known and (c, b) in known for c in ITEMS)
            if ok:
                known.add((a, b))
        elif letter and LETTERS.index(letter[1]) < len(puzzle.options):
            claim = (puzzle.start, puzzle.options[LETTERS.index(letter[1])])
            ok = claim in known if direct else puzzle.entails(*claim)
        values.append(float(ok))
    return Truth(tuple(values), sum(values) / len(values) if values else None)
