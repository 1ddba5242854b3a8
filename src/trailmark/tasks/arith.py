"""Arithmetic in several steps: unlimited, seeded, short enough for a tiny model, each with a worked solution.

    7+5-3=?                    a question (level 2)
    7+5=12                     its worked solution: one operation a line,
    12-3=9                     a line is a step of reasoning,
    #### 9                     and the last line is the answer

All numbers, also those between steps, are natural numbers. Levels (operations, digits of the numbers):

    1  one + or -, one digit            4  four operations with brackets, two digits
    2  two of + and -, one digit        5  five variables, each from the one before, two digits
    3  three of + - *, two digits       (one factor of * is always 2 to 9; * binds first)
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from trailmark.errors import TaskError, nearest
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.tasks.splits import SPLITS, split_of
from trailmark.types import Episode, Invalid, Scored, Task

Expr = int | tuple[str, "Expr", "Expr"]
DIGITS = {1: 1, 2: 1, 3: 2, 4: 2, 5: 2}
ANSWER = re.compile(r"#### ([+-]?(?:[0-9]{1,30}|[0-9]{1,3}(?:,[0-9]{3}){1,9}))[ \t\r]*")


def parse_answer(text: str) -> int | None:
    """The number of the last line that begins with `####`, or None.

    That line must be `#### `, an optional sign, and digits, with commas only between groups of three; only blanks may
    follow. If the last such line is malformed there is no answer, even if an earlier one is good. Lines after it do not
    matter.
    """
    lines = [line for line in text.split("\n") if line.startswith("####")]
    match = ANSWER.fullmatch(lines[-1]) if lines else None
    return int(match[1].replace(",", "")) if match else None


def answer_of(e: Episode) -> str | None:
    """The answer of an episode that ends with such a line, for votes."""
    number = parse_answer(e.turns[-1].text) if e.turns else None
    return None if number is None else str(number)


def step_spans(text: str) -> list[tuple[int, int]]:
    """The steps of a solution as [start, end) spans of characters that cover `text` without gaps. A step is a line with
    its newline. Blank lines belong to the step before them, or at the very top to the first step."""
    spans: list[tuple[int, int]] = []
    at = 0
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        end = at + len(line)
        if spans and (not line.strip() or not text[slice(*spans[-1])].strip()):
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((at, end))
        at = end
    return spans


def _value(e: Expr) -> int:
    if isinstance(e, int):
        return e
    a, b = _value(e[1]), _value(e[2])
    return a + b if e[0] == "+" else a - b if e[0] == "-" else a * b


def _show(e: Expr, brackets: bool, inner: bool = False) -> str:
    """Write an expression with brackets around every inner operation, or with none (which is right for a chain)."""
    if isinstance(e, int):
        return str(e)
    text = _show(e[1], brackets, True) + e[0] + _show(e[2], brackets, True)
    return f"({text})" if brackets and inner else text


def _work(e: Expr, lines: list[str]) -> int:
    """Reduce the innermost operations first, left before right, writing each as a line."""
    if isinstance(e, int):
        return e
    a, b = _work(e[1], lines), _work(e[2], lines)
    lines.append(f"{a}{e[0]}{b}={_value((e[0], a, b))}")
    return _value((e[0], a, b))


def careless_lines(e: Expr, rng: random.Random, share: float) -> tuple[list[str], int]:
    """A worked solution that forgets the carry of a sum (7+8=5) with probability `share` and goes on from there. A
    mistake that would lead below zero is not made."""
    lines: list[str] = []

    def work(x: Expr) -> int:
        if isinstance(x, int):
            return x
        a, b = work(x[1]), work(x[2])
        value = _value((x[0], a, b))
        if x[0] == "+" and a % 10 + b % 10 > 9 and rng.random() < share:
            value -= 10
        lines.append(f"{a}{x[0]}{b}={value}")
        return value

    answer = work(e)
    if any("=-" in line for line in lines):
        lines.clear()
        answer = _work(e, lines)
    return lines, answer


def _chain(rng: random.Random, ops: int, digits: int, times: bool) -> Expr:
    """Terms added and subtracted from left to right, some of them products."""

    def term() -> tuple[Expr, int]:
        n = _number(rng, digits)
        return (("*", n, _factor(rng)), 1) if times and left and rng.random() < 0.5 else (n, 0)

    left = ops
    e, used = term()
    left -= used
    while left:
        left -= 1
        t, used = term()
        left -= used
        e = ("-" if rng.random() < 0.5 and _value(e) >= _value(t) else "+", e, t)
    return e


def _tree(rng: random.Random, ops: int, digits: int) -> Expr:
    if not ops:
        return _number(rng, digits)
    op = rng.choice("+-*")
    if op == "*":
        a, b = _tree(rng, ops - 1, digits), _factor(rng)
        return (op, a, b) if rng.random() < 0.5 else (op, b, a)
    k = rng.randrange(ops)
    a, b = _tree(rng, k, digits), _tree(rng, ops - 1 - k, digits)
    return (op, b, a) if op == "-" and _value(a) < _value(b) else (op, a, b)


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _factor(rng: random.Random) -> int:
    return rng.randrange(2, 10)


def _variables(rng: random.Random, count: int, digits: int) -> tuple[str, list[str], int]:
    """Assignments a=.., b=.., each one operation on the variable before and a number or an earlier variable."""
    names, values, lines = "abcdefgh", [_number(rng, digits)], []
    question = [f"a={values[0]}"]
    for i in range(1, count + 1):
        other = rng.randrange(i) if i > 1 and rng.random() < 0.4 else None
        b = _number(rng, digits) if other is None else values[other]
        op = rng.choice("+-*")
        if op == "*":
            other, b = None, _factor(rng)
        a, x, y = values[-1], names[i - 1], str(b) if other is None else names[other]
        if op == "-" and a < b:
            a, b, x, y = b, a, y, x
        values.append(_value((op, a, b)))
        question.append(f"{names[i]}={x}{op}{y}")
        lines.append(f"{names[i]}={a}{op}{b}={values[-1]}")
    return ",".join(question) + f",{names[count]}=?", lines, values[-1]


def make_expr(rng: random.Random, level: int, digits: int | None = None) -> Expr:
    size = digits or DIGITS[level]
    return _tree(rng, 4, size) if level == 4 else _chain(rng, level, size, times=level == 3)


def make_question(rng: random.Random, level: int, digits: int | None = None) -> tuple[str, list[str], int]:
    """One problem: question, worked lines, answer."""
    if level == 5:
        return _variables(rng, 5, digits or DIGITS[level])
    e = make_expr(rng, level, digits)
    lines: list[str] = []
    answer = _work(e, lines)
    return _show(e, brackets=level == 4) + "=?", lines, answer


def careless_solver(prompt: str, draw: random.Random) -> str:
    """A player for a scripted seat (levels 1 and 2): goes on with a solution, and is off by one in a fifth of its
    steps, up or down. Two mistakes may cancel, so that a right answer can have wrong steps."""
    question, *done = prompt.split("\n")
    numbers = re.fullmatch(r"(\d+)((?:[+-]\d+)+)=\?", question)
    if numbers is None:
        raise TaskError(f"the careless solver adds and subtracts (levels 1 and 2), and this is {question!r}.")
    operations, lines = re.findall(r"[+-]\d+", numbers[2]), [line for line in done if line]
    value, new = int(lines[-1].split("=")[1]) if lines else int(numbers[1]), []
    for operation in operations[len(lines) :]:
        now = value + int(operation) + (draw.choice((-1, 1)) if draw.random() < 0.2 else 0)
        new.append(f"{value}{operation}={now}")
        value = now
    return "\n".join([*new, f"#### {value}"])


class ArithWorld(World):
    """A world of one turn: the action is the whole text of the answer."""

    def __init__(self, invalid_unparsed: bool = False):
        self.invalid_unparsed = invalid_unparsed
        self.answer: int | None = None

    def reset(self, task: Task) -> Observation:
        try:
            question, self.answer = str(task.data["question"]), int(task.data["answer"])
        except (KeyError, TypeError, ValueError):
            raise TaskError(f"task '{task.id}' needs data 'question' and a whole number 'answer'.") from None
        return Observation(question + "\n")

    def step(self, action: str) -> Step:
        if self.answer is None:
            raise TaskError("this question is answered; call reset before the next step.")
        parsed, right = parse_answer(action), self.answer
        self.answer = None
        reward = float(parsed == right)
        outcome = Scored(reward, parsed == right)
        if parsed is None and self.invalid_unparsed:
            outcome = Invalid("no line '#### number' to read the answer from")
        return Step(Observation(""), reward, True, False, outcome, {"parsed": parsed})


class Arith(TaskSource):
    """The task source.

    level             1 to 5, or several of them to mix evenly
    digits            digits of the numbers, instead of the level's own
    invalid_unparsed  an answer that cannot be read is Invalid (left out of averages) instead of a zero
    careless          the probability that a worked solution forgets a carry and goes on with the wrong number: a
                      teacher with a bad habit (not at level 5). Rewards do not change: only the right answer earns 1

    `tasks` can draw any number; `n=None` gives 1000. The questions of one call differ if there are enough (one-digit
    level 1 has 155 in all). The worked solution is in meta["gold"], with the last line `#### N`.
    """

    name = "arith"
    markov = True

    def __init__(
        self,
        level: int | Sequence[int] = 1,
        digits: int | None = None,
        invalid_unparsed: bool = False,
        careless: float = 0.0,
    ):
        self.levels = (level,) if isinstance(level, int) else tuple(level)
        if not self.levels or any(k not in DIGITS for k in self.levels):
            raise TaskError(f"arith has the levels 1 to 5, not {level!r}.")
        if digits is not None and not 1 <= digits <= 9:
            raise TaskError(f"arith makes numbers of 1 to 9 digits, not {digits}.")
        if not 0 <= careless <= 1 or (careless and 5 in self.levels):
            raise TaskError(f"arith needs careless between 0 and 1 (0 at level 5), not {careless}.")
        self.digits, self.invalid_unparsed, self.careless = digits, invalid_unparsed, careless

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> list[Task]:
        if split not in SPLITS:
            raise TaskError(f"arith has no split '{split}'.{nearest(split, SPLITS)}")
        rng, seen = random.Random(f"arith {split} {seed}"), set()
        return [self._task(rng, split, seed, i, seen) for i in range(1000 if n is None else n)]

    def _task(self, rng: random.Random, split: str, seed: int, i: int, seen: set[str]) -> Task:
        level, tries = self.levels[i % len(self.levels)], 0
        while True:
            before = rng.getstate() if self.careless else ()
            question, lines, answer = make_question(rng, level, self.digits)
            tries += 1
            if split_of(question) == split and (question not in seen or tries > 300):
                break
        seen.add(question)
        data: dict[str, Any] = {"question": question, "answer": answer, "level": level}
        said = answer
        if self.careless:
            again = random.Random()
            again.setstate(before)
            habit = random.Random(f"careless {seed} {i} {question}")
            lines, said = careless_lines(make_expr(again, level, self.digits), habit, self.careless)
        gold = "\n".join([*lines, f"#### {said}"])
        return Task(f"arith-{'+'.join(map(str, self.levels))}-{split}-{seed}-{i}", seed, data, {"gold": gold})

    def make(self) -> ArithWorld:
        return ArithWorld(self.invalid_unparsed)

    def example_actions(self, task: Task) -> list[str]:
        """A right answer, a wrong one, and one that cannot be read."""
        return [task.meta["gold"], f"#### {task.data['answer'] + 1}", "I do not know"]
