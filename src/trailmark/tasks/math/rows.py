r"""Read problems from files and from the hub: the rows of each data set, in one form.

    gsm8k   {"question", "answer"}                               the answer ends in a line "#### 72"
    math    {"problem", "solution", …}                           the solution has the answer in a box
    svamp   {"Body", "Question", "Answer", "Equation", …}
    asdiv   {"body", "question", "answer", "formula", …}         an answer looks like "9 (apples)"

Files are JSON lines, a JSON list, one JSON object a file in folders (as MATH was published), or parquet; .gz is
allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trailmark.errors import DataError, TaskError, nearest
from trailmark.formats.rows import Row
from trailmark.tasks.math.extract import Marker, boxed
from trailmark.tasks.row_files import file_rows, files_here, hub_rows, one_of, words_of

HUB = {
    "gsm8k": ("openai/gsm8k", ("main",)),
    "math": ("EleutherAI/hendrycks_math", ("algebra", "counting_and_probability", "geometry", "intermediate_algebra",
                                           "number_theory", "prealgebra", "precalculus")),
    "svamp": ("ChilleD/SVAMP", ()),
    "asdiv": ("EleutherAI/asdiv", ()),
}  # fmt: skip
DATASETS = tuple(HUB)
MARKS = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator notes


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    answer: str
    solution: str  # the worked solution, with the answer after the data set's marker
    about: dict[str, str]  # level and type, if the row has them


def asks(dataset: str) -> Marker:
    return "boxed" if dataset == "math" else "hash"


def _gsm8k(row: Row) -> Problem | None:
    value = row.fields(row.value, "", ("question", "answer"))
    question, solution = row.text(value["question"], "question"), row.text(value["answer"], "answer")
    steps, found, answer = solution.rpartition("####")
    if not found or not answer.strip():
        raise row.bad("has no line '#### number'.", "answer")
    return Problem(question.strip(), answer.strip(), f"{MARKS.sub('', steps).rstrip()}\n#### {answer.strip()}", {})


def _math(row: Row) -> Problem | None:
    """None if the solution's box is empty and the row has no answer of its own: then no answer could be right."""
    value = row.fields(row.value, "", ("problem", "solution"), ("answer", "level", "type", "subject"))
    question, solution = row.text(value["problem"], "problem"), row.text(value["solution"], "solution")
    answer = (boxed(solution) or "").strip() or str(value.get("answer") or "").strip()
    about = {k: str(value[k]) for k in ("level", "type", "subject") if k in value}
    return Problem(question.strip(), answer, solution, about) if answer else None


def _svamp(row: Row) -> Problem | None:
    value = row.fields(row.value, "", ("Body", "Question", "Answer"), ("Equation", "Type", "ID"))
    body, question = row.text(value["Body"], "Body").strip(), row.text(value["Question"], "Question").strip()
    number = row.number(value["Answer"], "Answer")
    if number is None:
        raise row.bad("must be a number.", "Answer")
    body = body if body[-1:] in ".!?" else f"{body}."
    answer = str(int(number)) if number.is_integer() else str(number)
    equation = str(value.get("Equation") or "").strip()
    return Problem(f"{body} {question}", answer, _worked(equation, answer), {"type": str(value.get("Type", ""))})


def _asdiv(row: Row) -> Problem | None:
    value = row.fields(row.value, "", ("body", "question", "answer"), ("formula", "solution_type"))
    body, question = row.text(value["body"], "body").strip(), row.text(value["question"], "question").strip()
    answer = row.text(value["answer"], "answer").strip()
    if not answer:
        raise row.bad("must not be empty.", "answer")
    formula = str(value.get("formula") or "").strip()
    about = {"type": str(value.get("solution_type", ""))}
    return Problem(f"{body} {question}".strip(), answer, _worked(formula, answer), about)


def _worked(formula: str, answer: str) -> str:
    return f"{formula}\n#### {answer}" if formula else f"#### {answer}"


READ: dict[str, Callable[[Row], Problem | None]] = {"gsm8k": _gsm8k, "math": _math, "svamp": _svamp, "asdiv": _asdiv}


def read_files(dataset: str, files: list[Path]) -> list[Problem | None]:
    """All rows of the files, in order; None for a row without an answer."""
    made = [READ[dataset](row) for file in files for row in file_rows(file)]
    if not any(made):
        raise DataError(f"holds no problem of {dataset}.", files[0] if files else None)
    return made


def find_files(dataset: str, path: Path, split: str) -> list[Path]:
    """The files of a split. `path` is a file or a folder. In a folder the names say data set and split
    (gsm8k_train.jsonl.gz) or only the split (train.jsonl, train-00000-of-00001.parquet), or the files lie in a folder
    with the split's name (train/algebra/1.json)."""
    known = {"train", "test", "val", "valid", "validation", "dev"}
    here = files_here(path, dataset, split, {split}, known)
    if here is None:
        return [path]
    named = [p for p in here if p.name.lower().startswith(dataset) and split in words_of(p)]
    plain = [p for p in here if re.split(r"[-_.]", p.name.lower())[0] == split]
    if found := one_of((named, plain), path, dataset, split):
        return found
    if deep := sorted((path / split).rglob("*.json"), key=lambda p: (str(p.parent), len(p.stem), p.stem)):
        return deep
    there = {w for p in here if p.name.lower().startswith(dataset) for w in words_of(p)} - {dataset}
    raise TaskError(f"{path} has no split '{split}' of {dataset}.{nearest(split, there) if there else ''}")


def read_hub(dataset: str, split: str, name: str | None, revision: str | None) -> list[Problem | None]:
    """The same rows from the hub or its cache, through the datasets library. `name`: another copy, or "name:config"."""
    known, configs = HUB[dataset]
    if name:
        known, _, config = name.partition(":")
        configs = (config,) if config else ()
    made: list[Problem | None] = []
    for config in configs or (None,):
        made += [READ[dataset](row) for row in hub_rows(dataset, known, config, split, revision)]
    return made
