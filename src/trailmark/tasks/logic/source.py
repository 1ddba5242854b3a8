"""Questions with options as a task: one turn, the answer is right (1) or not (0).

source = get_task("logic", dataset="reclor", path="data/logic")            # or without path, from the hub
source = get_task("logic", dataset="choice", path="my_questions.jsonl", order="DCBA")
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from trailmark.answers import HIDDEN, LETTERS, leaf_value, read_answer
from trailmark.errors import DataError, TaskError, nearest
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.tasks.logic import prompts
from trailmark.tasks.logic.prompts import Ending, Style
from trailmark.tasks.logic.rows import DATASETS, Question, find_files, read_files, read_hub, two_ways
from trailmark.tasks.logic.teach import TAUGHT, Problem, letter_of, read_problem, solution
from trailmark.tasks.splits import SPLITS, drawn, split_of
from trailmark.types import Invalid, Outcome, Scored, Task

Dataset = Literal["reclor", "logiqa", "logiqa2", "arlsat", "folio", "proofwriter", "prontoqa", "choice"]
Repeats = Literal["leave", "keep", "refuse"]
NO_LABEL = "the label of this question is hidden"
UNREAD, OTHER = "without a solution (a sentence cannot be read)", "without a solution (the proof contradicts the label)"


class LogicWorld(World):
    """A world of one turn: the action is the whole solution. The step's `info` has the answer and the reason."""

    def __init__(self, source: Logic):
        self.source = source
        self.task: Task | None = None

    def reset(self, task: Task) -> Observation:
        options, label = task.data.get("options"), task.data.get("label", HIDDEN)
        if not isinstance(options, list | tuple) or len(options) < 2 or not isinstance(task.data.get("question"), str):
            raise TaskError(f"task '{task.id}' needs data 'question', a text, and 'options', a list of texts.")
        if not isinstance(label, int) or not HIDDEN <= label < len(options):
            raise TaskError(f"task '{task.id}' has the label {label!r}: it must be -1 to {len(options) - 1}.")
        self.task = task
        said = tuple(self.source.messages(task)) if self.source.chat else ()
        return Observation(self.source.prompt(task), messages=said)

    def step(self, action: str) -> Step:
        if self.task is None:
            raise TaskError("this question is answered; call reset before the next step.")
        data, self.task = self.task.data, None
        count = len(data["options"])
        value, why = leaf_value(action, data.get("label", HIDDEN), count)
        outcome: Outcome = Invalid(NO_LABEL) if value is None else Scored(value, value == 1.0)
        info = {"answer": read_answer(action, count).letter, "reason": why}
        return Step(Observation(""), value or 0.0, True, False, outcome, info)


class Logic(TaskSource):
    """The task source.

    dataset   "reclor", "logiqa", "logiqa2", "arlsat", "folio", "proofwriter", "prontoqa", or "choice": see rows.py
    path      a file, or a folder with the splits; none: from the hub
    hub       another copy on the hub, "owner/name" or "owner/name:config"; `revision` is its revision
    order     the order of the options: "DCBA" shows the last one first. The labels follow
    style     "react", or "plain": free text before the Finish line
    ending    "thought", "space" or "none": the end of the prompt, see prompts.py
    shots     1: an example before the question
    instruction  the words before the question, in place of ours; empty: none. Released weights know their own
    chat      ask in messages (a conversation) and not with a text; the ending is then "none"
    cut       a split of the files, such as "dev", that is cut into train, val and test by the hash of its contexts
    ways      of FOLIO: 3, or 2 as in the published evaluation, where uncertain is called false
    repeats   a question with equal options is left out ("leave"), kept ("keep"), or an error ("refuse")
    careless  the probability that a step of a worked solution is wrong (ProntoQA and ProofWriter; see teach.py)

    `n=None` gives a split in its own order. Otherwise `n` questions are drawn by seed; none repeats before all have
    occurred. A question without a label can be played and is not scored. `left_out` counts, for each split, what was
    left out and what is hidden; `named` says which questions these are. Worked solutions are meta["gold"].
    """

    name = "logic"
    markov = True
    finite = True

    def __init__(
        self,
        dataset: Dataset = "choice",
        path: str | None = None,
        hub: str | None = None,
        revision: str | None = None,
        order: str | None = None,
        style: Style = "react",
        ending: Ending = "thought",
        shots: int = 0,
        chat: bool = False,
        cut: str | None = None,
        ways: int = 3,
        repeats: Repeats = "leave",
        careless: float = 0.0,
        instruction: str | None = None,
    ):
        if dataset not in DATASETS:
            raise TaskError(f"logic has no dataset '{dataset}'.{nearest(str(dataset), DATASETS)}")
        if order is not None and (not order or sorted(order) != list(LETTERS[: len(order)])):
            raise TaskError(f"logic needs an order of the letters A, B, … such as DCBA, not '{order}'.")
        if shots not in (0, 1):
            raise TaskError(f"logic has one example: shots is 0 or 1, not {shots}.")
        if ways not in (2, 3) or (ways == 2 and dataset != "folio"):
            raise TaskError(f"ways is 3, or 2 with folio; not {ways} with {dataset}.")
        if instruction is not None and not isinstance(instruction, str):
            raise TaskError(f"instruction is a text, not {instruction!r}.")
        if repeats not in ("leave", "keep", "refuse"):
            raise TaskError(f"repeats is leave, keep or refuse, not '{repeats}'.")
        if not 0 <= careless <= 1 or (careless and dataset not in TAUGHT):
            raise TaskError(f"careless goes from 0 to 1, for {' and '.join(TAUGHT)}; not {careless} for {dataset}.")
        prompts.ending_of(ending, style)
        self.dataset, self.path, self.hub, self.revision = dataset, None if path is None else Path(path), hub, revision
        self.order, self.style, self.shots, self.chat, self.cut, self.ways = order, style, shots, chat, cut, ways
        self.ending: Ending = "none" if chat or style == "plain" else ending
        self.repeats, self.careless, self.instruction = repeats, careless, instruction
        self.left_out: dict[str, Counter[str]] = {}
        self.named: dict[str, dict[str, list[str]]] = {}
        self._read: dict[str, list[tuple[int, Question]]] = {}
        self._solved: dict[str, Problem | None] = {}
        self._sizes: dict[str, int] = {}

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> list[Task]:
        rows = self.questions(split)
        picked = rows if n is None else drawn(rows, n, random.Random(f"logic {self.dataset} {split} {seed}"))
        return [self._task(split, seed, i, q) for i, q in picked]

    def questions(self, split: str) -> list[tuple[int, Question]]:
        """The questions of a split, each with its place in the files, before the options are ordered."""
        if split not in self._read:
            if self.cut is not None and split not in SPLITS:
                raise TaskError(f"split '{self.cut}' is cut into train, val and test; there is no '{split}'.")
            of = split if self.cut is None else self.cut
            every = self._files(of) if self.path else read_hub(self.dataset, of, self.hub, self.revision)
            every = [two_ways(q) for q in every] if self.ways == 2 else every
            numbered = [(i, q) for i, q in enumerate(_with_ids(every))]
            self._sizes[split] = len(numbered)
            if self.cut is not None:
                numbered = [(i, q) for i, q in numbered if split_of(q.context or q.question) == split]
            self._read[split] = self._checked(split, numbered)
        return self._read[split]

    def left_out_of(self, split: str) -> list[str]:
        self.questions(split)
        left = {why: n for why, n in self.left_out[split].items() if why != "hidden labels"}
        what = "kept" if self.repeats == "keep" else "left out"
        named = self.named[split]
        first = {why: ", ".join(named[why][:5]) + ", …" * (n > 5) for why, n in left.items()}
        return [f"{n} questions {what} ({why}: {first[why]})." for why, n in left.items()]

    def size(self, split: str) -> int:
        """The number of questions in the files of a split, with those that were left out."""
        self.questions(split)
        return self._sizes[split]

    def _files(self, split: str) -> list[Question]:
        assert self.path is not None
        return read_files(self.dataset, find_files(self.dataset, self.path, split))

    def _checked(self, split: str, numbered: list[tuple[int, Question]]) -> list[tuple[int, Question]]:
        count = self.left_out[split] = Counter()
        named = self.named[split] = {}
        kept = []
        for i, q in numbered:
            why = "repeated options" if len({o.casefold() for o in q.options}) < len(q.options) else ""
            if why and self.repeats == "refuse":
                raise DataError(f"question '{q.id}' has the same option twice.", self.path)
            if self.order is not None and len(q.options) > len(self.order):
                raise TaskError(
                    f"order '{self.order}' is for {len(self.order)} options, and question '{q.id}' has "
                    f"{len(q.options)}: name them all."
                )
            if q.label == HIDDEN:
                count["hidden labels"] += 1
                named.setdefault("hidden labels", []).append(q.id)
            if why:
                count[why] += 1
                named.setdefault(why, []).append(q.id)
            if not why or self.repeats == "keep":
                kept.append((i, q))
        if not kept:
            raise TaskError(f"split '{split}' of {self.dataset} has no question that can be used ({dict(count)}).")
        return kept

    def _task(self, split: str, seed: int, i: int, q: Question) -> Task:
        shown, label = ordered(q, self.order)
        data: dict[str, Any] = {"context": q.context, "question": q.question, "options": list(shown), "label": label,
                                "dataset": self.dataset, "row": i}  # fmt: skip
        if self.order is not None:
            data["order"] = order_of(self.order, len(shown))
        meta: dict[str, Any] = {"id": q.id, "label": label}
        if self.dataset in TAUGHT and (gold := self._gold(split, q, shown, label, seed)) is not None:
            meta["gold"] = gold
        return Task(f"{self.dataset}-{split}-{q.id}", seed, {**data, **q.about}, meta)

    def _gold(self, split: str, q: Question, options: Sequence[str], label: int, seed: int) -> str | None:
        """The scripted teacher's solution, as it is written behind this prompt. There is none, and it is counted, where
        the prover cannot read a sentence, or proves something else than the label says."""
        if q.id not in self._solved:
            try:
                p: Problem | None = (made := read_problem(q))
                why = "" if label in (HIDDEN, LETTERS.index(letter_of(made.answer, options))) else OTHER
            except TaskError:
                p, why = None, UNREAD
            if why:
                p = None
                self.left_out[split][why] += 1
                self.named[split].setdefault(why, []).append(q.id)
            self._solved[q.id] = p
        p = self._solved[q.id]
        if p is None:
            return None
        draw = random.Random(f"teacher {self.dataset} {q.id} {seed}")
        return prompts.after(self.ending, self.style, solution(p, options, draw, self.careless).text)

    def prompt(self, task: Task) -> str:
        return self._prompt(task, self.ending)

    def messages(self, task: Task) -> list[dict[str, str]]:
        """The prompt as a conversation. Its answer begins with "Thought 1:"."""
        return [{"role": "user", "content": self._prompt(task, "none").rstrip("\n")}]

    def _prompt(self, task: Task, ending: Ending) -> str:
        d = task.data
        parts = (d["context"], d["question"], d["options"], self.style, ending, self.shots)
        return prompts.prompt(*parts, instruction=self.instruction)

    def make(self) -> LogicWorld:
        return LogicWorld(self)

    def example_actions(self, task: Task) -> list[str]:
        """A right answer, a wrong one, one that names two options, and a text without an answer."""
        count, label = len(task.data["options"]), max(0, task.data["label"])
        right, wrong = LETTERS[label], LETTERS[(label + 1) % count]
        say = lambda what: f" So it is.\nAction 1: Finish[The answer is {what}.]"
        return [say(right), say(wrong), say(f"{right} and {wrong}"), "I do not know"]


def ordered(q: Question, order: str | None) -> tuple[tuple[str, ...], int]:
    """The options in this order, and the label among them."""
    if order is None:
        return q.options, q.label
    places = [LETTERS.index(letter) for letter in order_of(order, len(q.options))]
    return tuple(q.options[k] for k in places), HIDDEN if q.label == HIDDEN else places.index(q.label)


def order_of(order: str, count: int) -> str:
    """The order of a question with fewer options: the letters that it has."""
    return "".join(letter for letter in order if letter in LETTERS[:count])


def _with_ids(rows: Sequence[Question]) -> list[Question]:
    """Every question has an id of its own: the row's, or its number; a repeated one gets the row's number behind it."""
    from dataclasses import replace

    seen: set[str] = set()
    out = []
    for i, q in enumerate(rows):
        name = q.id or str(i)
        name = f"{name}-row{i}" if name in seen else name
        seen.add(name)
        out.append(replace(q, id=name))
    return out
