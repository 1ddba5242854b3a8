r"""Word problems and competition mathematics as a task: one turn, the answer is right (1) or not (0).

source = get_task("math", dataset="gsm8k", path="data/math")       # or without path, from the hub
source = get_task("math", dataset="math", path="data/math", style="deepseek-math", rules="lenient")
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from trailmark.errors import TaskError, nearest
from trailmark.steps import LINES, SENTENCES
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.tasks.math.check import Checker, Rules
from trailmark.tasks.math.extract import Marker
from trailmark.tasks.math.pool import Pool
from trailmark.tasks.math.prompts import Style, bos_of, marker_of, messages, prompt
from trailmark.tasks.math.rows import DATASETS, Problem, asks, find_files, read_files, read_hub
from trailmark.tasks.splits import drawn
from trailmark.types import Scored, Task

Dataset = Literal["gsm8k", "math", "svamp", "asdiv"]


class MathWorld(World):
    """A world of one turn: the action is the whole response. The step's `info` has the answer and the reason for the
    verdict."""

    def __init__(self, source: Math):
        self.source = source
        self.task: Task | None = None

    def reset(self, task: Task) -> Observation:
        if not all(isinstance(task.data.get(k), str) and task.data[k] for k in ("question", "answer")):
            raise TaskError(f"task '{task.id}' needs data 'question' and 'answer', both texts.")
        self.task = task
        return Observation(self.source.prompt(task))

    def step(self, action: str) -> Step:
        if self.task is None:
            raise TaskError("this problem is answered; call reset before the next step.")
        data, self.task = self.task.data, None
        found = self.source.checker.check(action, data["answer"], data["question"], self.source.marker)
        outcome = Scored(float(found.right), found.right)
        return Step(
            Observation(""), outcome.reward, True, False, outcome, {"answer": found.answer, "reason": found.reason}
        )


class Math(TaskSource):
    """The task source.

    dataset   "gsm8k", "math", "svamp" or "asdiv"
    path      a file, or a folder with the splits; none: from the hub
    hub       another copy on the hub, "owner/name" or "owner/name:config"; `revision` is its revision
    style     "qwen-math", "deepseek-math" or "plain": see prompts.py
    bos       the text at the start of a prompt, if the style's own is wrong for the model
    rules     "strict", or "lenient": judged like the published reference
    level     of MATH: one level such as 5, or several
    val       the last `val` problems of "train" become the split "val" and leave "train"
    seconds   computing time for the comparison of two formulas; `workers`: the number of comparing processes

    `n=None` gives a split in its own order. Otherwise `n` problems are drawn by seed; none repeats before all have
    occurred. A problem's worked solution is meta["gold"], with its answer where the style asks for it. Problems without
    an answer are left out (`skipped` counts them).
    """

    name = "math"
    markov = True
    finite = True
    slow = True  # a comparison waits for another process

    def __init__(
        self,
        dataset: Dataset = "gsm8k",
        path: str | None = None,
        hub: str | None = None,
        revision: str | None = None,
        style: Style = "qwen-math",
        bos: str | None = None,
        rules: Rules = "strict",
        level: int | Sequence[int] | None = None,
        val: int = 0,
        seconds: float = 2.0,
        workers: int = 2,
    ):
        if dataset not in DATASETS:
            raise TaskError(f"math has no dataset '{dataset}'.{nearest(str(dataset), DATASETS)}")
        if level is not None and dataset != "math":
            raise TaskError(f"only MATH has levels, not {dataset}: leave out 'level'.")
        if val < 0:
            raise TaskError(f"math needs val >= 0, not {val}.")
        messages("", style, asks(dataset))  # raises if the style is unknown
        self.dataset, self.path, self.hub, self.revision = dataset, None if path is None else Path(path), hub, revision
        self.style, self.bos, self.val = style, bos, val
        self._foreign = False  # the model has no such BOS as the style writes
        self.levels = None if level is None else {f"Level {k}" for k in ((level,) if isinstance(level, int) else level)}
        self.marker: Marker = marker_of(style, asks(dataset))
        self.checker = Checker(rules, Pool(workers, seconds))
        self.skipped: dict[str, int] = {}
        self._read: dict[str, list[tuple[int, Problem]]] = {}
        self.checker.pool.check()  # any answer may be a formula, so test the parser now and not in the middle of a run

    @property
    def step_ends(self) -> tuple[str, ...]:  # type: ignore[override]
        """The texts that end a step of a solution: newlines, and in MATH also sentence ends."""
        return SENTENCES if self.dataset == "math" else LINES

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> list[Task]:
        rows = self.problems(split)
        picked = rows if n is None else drawn(rows, n, random.Random(f"math {self.dataset} {split} {seed}"))
        return [self._task(split, seed, i, p) for i, p in picked]

    def problems(self, split: str) -> list[tuple[int, Problem]]:
        """The problems of a split, each with its number in its file."""
        if split not in self._read:
            of = "train" if split == "val" and self.val else split
            every = read_files(self.dataset, find_files(self.dataset, self.path, of)) if self.path else read_hub(
                self.dataset, of, self.hub, self.revision
            )  # fmt: skip
            numbered = list(enumerate(every))
            if self.val and of == "train":
                if self.val >= len(numbered):
                    raise TaskError(f"val={self.val} leaves nothing of the {len(numbered)} problems of split 'train'.")
                numbered = numbered[-self.val :] if split == "val" else numbered[: -self.val]
            kept = [(i, p) for i, p in numbered if p is not None]
            self.skipped[split] = len(numbered) - len(kept)
            kept = [(i, p) for i, p in kept if self.levels is None or p.about.get("level") in self.levels]
            if not kept:
                raise TaskError(f"split '{split}' of {self.dataset} has no problem of {sorted(self.levels or ())}.")
            self._read[split] = kept
        return self._read[split]

    def _task(self, split: str, seed: int, i: int, p: Problem) -> Task:
        data: dict[str, Any] = {"question": p.question, "answer": p.answer, "dataset": self.dataset}
        return Task(f"{self.dataset}-{split}-{i}", seed, {**data, **p.about}, {"gold": self._gold(p)})

    def _gold(self, p: Problem) -> str:
        """The worked solution with its answer where this style wants it."""
        steps, found, _ = p.solution.rpartition("#### ")
        if self.marker == "hash" or not found:
            return p.solution
        return f"{steps}The final answer is $\\boxed{{{p.answer}}}$."

    def bind(self, tokenizer: Any) -> None:
        """A model with another BOS gets its own (`rollout/bos.py`), and not the style's, which would be plain words."""
        bos = bos_of(self.style)
        self._foreign = bool(bos) and tokenizer is not None and bos not in tokenizer.get_vocab()

    def prompt(self, task: Task) -> str:
        bos = "" if self.bos is None and self._foreign else self.bos
        return prompt(task.data["question"], self.style, asks(self.dataset), bos)

    def messages(self, task: Task) -> list[dict[str, str]]:
        """The prompt as a conversation."""
        return messages(task.data["question"], self.style, asks(self.dataset))

    def make(self) -> MathWorld:
        return MathWorld(self)

    def example_actions(self, task: Task) -> list[str]:
        """A right answer, a wrong one, and a text without an answer."""
        return [task.meta["gold"], "#### 987654321 and \\boxed{987654321}", "I do not know"]
