"""Order puzzles: clues such as bfa ("b comes before f and after a"), and the question which of A, B, C and D must come
after the start.

    ab. bfa cD. dC. ebc fBd   for each item one that comes after it, and one before it (a point: none is told)
    e?                        the start is e; exactly one of A to D, here B, is known to come after it
    eb                        a solution: a line is a step, a relation that is claimed to hold (e comes before b)
    bf
    fB
    Finish[B]                 the last line is the answer

A relation is *sound* if it follows from the clues (by any number of inferences). It is *direct* if it is a clue, or one
inference from clues and sound lines before it. An answer claims that its option comes after the start. It is sound if
that follows from the clues, and direct if it follows from the sound lines that were written.

How a puzzle is built: a chain leads from the start to the right option, and each of its items comes after a *down* of
its own. A step to a down, which reads a clue in the wrong direction, is never sound. Half of the downs lead back to
their item, and the others to a wrong option. So a solution with wrong steps may end with the right answer, and a slip
after right steps gives a wrong one:

    eb                        sound
    ba                        not sound: b comes after a
    ab                        sound, and back on the chain; from the down c the way leads to D, a wrong answer
    bf ...
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from trailmark.answers import LETTERS, read_answer
from trailmark.errors import TaskError
from trailmark.steps import react_steps, split_steps

Form = Literal["short", "react"]
ITEMS = "abcdefghijklmn"  # a puzzle leaves out two of its letters
LEVELS = {1: 2, 2: 3, 3: 4, 4: 5, 5: 6}  # relations of the chain; there are as many downs
OPTIONS = "ABCD"
OPENING = "Thought 1:"  # the end of a prompt in the form react
RELATION = re.compile(r"\s*([a-zA-D])([a-zA-D])\s*")
NONE = "."  # no item before this one is told
TEXT = re.compile(r"((?:[a-z][a-zA-D][a-z.] )*[a-z][a-zA-D][a-z.])\n([a-z])\?\n")
Pair = tuple[str, str]


@dataclass(frozen=True)
class Puzzle:
    start: str
    entries: tuple[str, ...]  # "bfa": b, one that comes after it, and one that comes before it
    options: tuple[str, ...] = tuple(OPTIONS)

    @cached_property
    def later(self) -> dict[str, str]:
        """Item -> the one of which its entry says that it comes after it."""
        return {e[0]: e[1] for e in self.entries}

    @cached_property
    def earlier(self) -> dict[str, str]:
        """Item -> the one of which its entry says that it comes before it, where there is one."""
        return {e[0]: e[2] for e in self.entries if e[2] != NONE}

    @cached_property
    def clues(self) -> tuple[Pair, ...]:
        """(earlier, later), in the order in which they stand; what two entries say is there once."""
        said = [pair for x, y, z in self.entries for pair in ((x, y), (z, x))]
        return tuple(dict.fromkeys(pair for pair in said if NONE not in pair))

    @cached_property
    def after(self) -> dict[str, frozenset[str]]:
        """Item -> all items that must come after it."""
        return closure(self.clues)

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
        return f"{' '.join(self.entries)}\n{self.start}?\n"


def closure(clues: Iterable[Pair]) -> dict[str, frozenset[str]]:
    """Item -> all items that come after it by these clues."""
    clues = list(clues)
    found = {x: {b for a, b in clues if a == x} for pair in clues for x in pair}
    grown = True
    while grown:
        grown = False
        for x, later in found.items():
            more = set().union(later, *(found[y] for y in later))
            grown |= more != later
            found[x] = more
    return {x: frozenset(later) for x, later in found.items()}


class Truth(NamedTuple):
    """For each step of a text, 1 if it is sound, else 0; and their mean (None: there is no step)."""

    steps: tuple[float, ...]
    mean: float | None


def make_puzzle(rng: random.Random, level: int) -> Puzzle:
    length = LEVELS[level]
    goal, *others = rng.sample(OPTIONS, len(OPTIONS))
    items = rng.sample(ITEMS[: 2 * length + 2], 2 * length)
    chain, downs = [*items[:length], goal], items[length:]
    entries = []
    for item, after, down in zip(chain, chain[1:], downs):
        leads_to = item if rng.random() < 0.5 else rng.choice(others)
        entries += [f"{item}{after}{down}", f"{down}{leads_to}{NONE}"]
    return Puzzle(chain[0], tuple(sorted(entries)))


def read_puzzle(text: str) -> tuple[Puzzle, str]:
    """The puzzle that a text begins with, and what stands behind it."""
    found = TEXT.match(text)
    if found is None:
        raise TaskError(f"this is no order puzzle: {text[:60]!r}")
    puzzle = Puzzle(found[2], tuple(found[1].split(" ")))
    for item in (puzzle.start, *puzzle.later.values(), *puzzle.earlier.values()):
        if item not in puzzle.later and item not in puzzle.options:
            raise TaskError(f"this is no order puzzle: item '{item}' has no clues of its own: {text[:60]!r}")
    return puzzle, text[found.end() :]


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
            ok = puzzle.entails(*claim) and (not direct or claim[1] in closure(shown).get(claim[0], ()))
        values.append(float(ok))
    return Truth(tuple(values), sum(values) / len(values) if values else None)
