r"""Read questions with options from files and from the hub, in one form. Which file belongs to which set:

    reclor       context, question, answers[4], label             also LSAT logical reasoning with 5 answers
    logiqa       context, question, options[4], label             or blocks of text: letter, context, question, options
    logiqa2      text, question, options[4], answer
    arlsat       passage, questions[]: question, options[5], answer letter
    folio        premises, conclusion, label                      or context, question, options, answer
    proofwriter  theory, questions{}: question, answer            or context, question, options, answer
    prontoqa     examples{}: question, query, answer              or context, question, options, answer, explanation
    choice       any of the simple layouts

The simple layout, one JSON object a row (a list, lines, or parquet; .gz is allowed):

    {"context": "…", "question": "…", "options": ["…", "…"], "label": 1, "id": "q-7"}

`context` may be missing or be called `text` or `passage`, `question` `query`, `options` `answers`, and `label` `answer`
or `correct_option`. A label is the option's number from 0, its letter, or its text. A missing label, null or -1 is
hidden. `id` may be called `index` or `id_string`; without one it is the row's number from 0. Letters before the options
("A) …", "(A) …", "A. …") are removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trailmark.answers import HIDDEN, LETTERS
from trailmark.errors import DataError, TaskError, nearest
from trailmark.formats.rows import Row
from trailmark.tasks.row_files import ENDINGS, file_rows, file_text, files_here, hub_rows, one_of, words_of

HUB = {
    "reclor": "metaeval/reclor",
    "logiqa": "lucasmccabe/logiqa",
    "logiqa2": "baber/logiqa2",
    "arlsat": "olegbask/AR-LSAT",
    "folio": "tasksource/folio",
    "proofwriter": "renma/ProofWriter",
    "prontoqa": "renma/ProntoQA",
}
DATASETS = (*HUB, "choice")
NAMES = {"logiqa": ("logiqa", "logiqa1"), "arlsat": ("arlsat", "ar-lsat", "ar_lsat", "ar")}  # as files begin
SPLITS = {
    "train": {"train", "training", "trainingdata"},
    "val": {"val", "valid", "validation", "dev", "eval", "development", "developmentdata"},
    "test": {"test", "testdata"},
}
SPLITS["dev"] = SPLITS["eval"] = SPLITS["validation"] = SPLITS["val"]
WORDS = frozenset().union(*SPLITS.values())
TEXTS = tuple(e.replace(".jsonl", ".txt") for e in ENDINGS[:2])
LABELLED = re.compile(r"\s*\(?([A-Z])\s*[).:]\s*")


@dataclass(frozen=True, slots=True)
class Question:
    context: str
    question: str
    options: tuple[str, ...]
    label: int  # HIDDEN: not told
    id: str = ""
    proof: tuple[str, ...] = ()  # the sentences of a proof, if the row has one
    about: Mapping[str, Any] = field(default_factory=dict)


# --- one row ----------------------------------------------------------------------------------------------------------


def _first(value: Mapping[str, Any], *keys: str) -> tuple[str, Any]:
    """The first of these keys that is there and not null."""
    return next(((k, value[k]) for k in keys if value.get(k) is not None), (keys[0], None))


def _options(row: Row, found: Any, key: str) -> tuple[str, ...]:
    listed = [row.text(o, key).strip() for o in row.listed(found, key)]
    if not 2 <= len(listed) <= len(LETTERS):
        raise row.bad(f"must be a list of 2 to {len(LETTERS)} options, not {len(listed)}.", key)
    marks = [LABELLED.match(o) for o in listed]
    if all(m and m[1] == letter for m, letter in zip(marks, LETTERS)):
        listed = [o[m.end() :] for o, m in zip(listed, marks) if m]
    if "" in listed:
        raise row.bad(f"has an empty option ({LETTERS[listed.index('')]}).", key)
    return tuple(listed)


def _label(row: Row, said: Any, options: Sequence[str], key: str) -> int:
    """The number of the right option. A missing one is hidden."""
    if said is None or said == -1 or said == "":
        return HIDDEN
    if isinstance(said, str):
        word = said.strip()
        letter = word.strip("().: ").upper()
        if len(letter) == 1 and letter in LETTERS[: len(options)]:
            return LETTERS.index(letter)
        if word.isdecimal():
            said = int(word)
        elif [o.casefold() for o in options].count(word.casefold()) == 1:
            return [o.casefold() for o in options].index(word.casefold())
    if isinstance(said, bool) or not isinstance(said, int) or not 0 <= said < len(options):
        raise row.bad(
            f"is {said!r}: it must be a number from 0 to {len(options) - 1}, a letter up to "
            f"{LETTERS[len(options) - 1]} or an option's text.", key,
        )  # fmt: skip
    return said


def _identity(value: Mapping[str, Any]) -> str:
    _, name = _first(value, "id", "index", "id_string", "example_id")
    return "" if name is None else str(name)


def simple(row: Row) -> list[Question]:
    """A row of the simple layout."""
    if not isinstance(row.value, dict):
        raise row.bad(f"must be an object, not {repr(row.value)[:60]}.")
    value = row.value
    key, asked = _first(value, "question", "query")
    if asked is None:
        raise row.bad(f"is missing. Found: {', '.join(value) or 'nothing'}.", key)
    where, context = _first(value, "context", "text", "passage")
    listed, options = _first(value, "options", "answers")
    if options is None:
        raise row.bad(f"is missing. Found: {', '.join(value) or 'nothing'}.", listed)
    made = _options(row, options, listed)
    told, said = _first(value, "label", "answer", "correct_option")
    about = {k: value[k] for k in ("qtype", "question_type", "type") if isinstance(value.get(k), int | str)}
    proof = value.get("explanation") or value.get("chain_of_thought") or ()
    steps = tuple(str(s) for s in proof) if isinstance(proof, list) else ()
    text = "" if context is None else row.text(context, where).strip()
    return [Question(text, row.text(asked, key).strip(), made, _label(row, said, made, told), _identity(value), steps,
                     about)]  # fmt: skip


def _arlsat(row: Row) -> list[Question]:
    if not isinstance(row.value, dict) or "questions" not in row.value:
        return simple(row)
    value = row.fields(row.value, "", ("passage", "questions"), ("id",))
    passage = row.text(value["passage"], "passage").strip()
    made = []
    for k, q in enumerate(row.listed(value["questions"], "questions")):
        at = f"questions[{k}]"
        q = row.fields(q, at, ("question", "options"), ("answer", "id"))
        options = _options(row, q["options"], f"{at}.options")
        label = _label(row, q.get("answer"), options, f"{at}.answer")
        made.append(Question(passage, row.text(q["question"], f"{at}.question").strip(), options, label, _identity(q)))
    return made


TRUTH = {"true": 0, "false": 1, "uncertain": 2, "unknown": 2}


def _truth(row: Row, said: Any, key: str) -> int:
    if said is None:
        return HIDDEN
    found = TRUTH.get(str(said).strip().lower())
    if found is None:
        raise row.bad(f"is {said!r}: it must be True, False, or Uncertain (Unknown).", key)
    return found


def _folio(row: Row) -> list[Question]:
    if not isinstance(row.value, dict) or "conclusion" not in row.value:
        return simple(row)
    value = row.fields(row.value, "", ("conclusion", "premises"), ("label", "example_id"))
    premises = value["premises"]
    given = premises.split("\n") if isinstance(premises, str) else row.listed(premises, "premises")
    context = "\n".join(f"{k}. {row.text(p, 'premises').strip()}" for k, p in enumerate(given, 1))
    asked = f"Is the following statement true, false, or uncertain? {row.text(value['conclusion'], 'conclusion')}"
    label = _truth(row, value.get("label"), "label")
    return [Question(context, asked, ("True", "False", "Uncertain"), label, _identity(value))]


def two_ways(q: Question) -> Question:
    """A question of three truths as one of two: all that is not true is called false."""
    return replace(q, options=q.options[:2], label=min(q.label, 1))


def _proofwriter(row: Row) -> list[Question]:
    if not isinstance(row.value, dict) or "theory" not in row.value:
        return simple(row)
    value = row.fields(row.value, "", ("theory", "questions"), ("id",))
    asked, made = value["questions"], []
    if not isinstance(asked, dict) or not asked:
        raise row.bad("must be an object of questions.", "questions")
    for name, q in asked.items():
        q = row.fields(q, f"questions.{name}", ("question",), ("answer",))
        label = _truth(row, q.get("answer"), f"questions.{name}.answer")
        text = f"Is the following statement true, false, or unknown? {row.text(q['question'], name).strip()}"
        made.append(Question(row.text(value["theory"], "theory").strip(), text, ("True", "False", "Unknown"), label,
                             "_".join(filter(None, (_identity(value), name)))))  # fmt: skip
    return made


def _prontoqa(row: Row) -> list[Question]:
    if not isinstance(row.value, dict) or "question" in row.value:
        return simple(row)
    made = []
    for name, example in row.value.items():
        tested = example.get("test_example", example) if isinstance(example, dict) else example
        q = row.fields(tested, name, ("question", "query"), ("answer", "chain_of_thought"))
        said = re.sub(r"^true or false:\s*", "", row.text(q["query"], f"{name}.query").strip(), flags=re.IGNORECASE)
        label = _truth(row, q.get("answer"), f"{name}.answer")
        if label > 1:
            raise row.bad("must be True or False.", f"{name}.answer")
        proof = tuple(str(s) for s in q.get("chain_of_thought") or ())
        made.append(Question(row.text(q["question"], f"{name}.question").strip(),
                             f"Is the following statement true or false? {said}", ("True", "False"), label, name,
                             proof))  # fmt: skip
    return made


READ: dict[str, Callable[[Row], list[Question]]] = {
    "arlsat": _arlsat, "folio": _folio, "proofwriter": _proofwriter, "prontoqa": _prontoqa,
}  # fmt: skip


# --- files ------------------------------------------------------------------------------------------------------------


def read_files(dataset: str, files: Sequence[Path]) -> list[Question]:
    """All questions of the files, in order."""
    read = READ.get(dataset, simple)
    made = [q for file in files for row in _rows(file) for q in read(row)]
    if not made:
        raise DataError(f"holds no question of {dataset}.", files[0] if files else None)
    return made


def read_hub(dataset: str, split: str, name: str | None, revision: str | None) -> list[Question]:
    """The same from the hub or its cache. `name`: another copy, "owner/name" or "owner/name:config"."""
    known = name or HUB.get(dataset)
    if known is None:
        raise TaskError("logic needs path=, a file or folder of questions, or hub=owner/name.")
    place, _, config = known.partition(":")
    read = READ.get(dataset, simple)
    at = "validation" if split == "val" else split
    return [q for row in hub_rows(dataset, place, config or None, at, revision) for q in read(row)]


def _rows(path: Path) -> Iterator[Row]:
    """The rows of a file. A text file holds lines of JSON, or the blocks in which LogiQA was published."""
    if not path.name.endswith(TEXTS):
        yield from file_rows(path)
        return
    text = file_text(path)
    if text.lstrip()[:1] in ("{", "["):
        yield from file_rows(path)
        return
    lines = [(n, line.strip()) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    for k in range(0, len(lines), 7):
        block = lines[k : k + 7]
        if len(block) < 7 or not re.fullmatch(r"[a-dA-D]", block[0][1]):
            raise DataError(
                "a block must have a letter from a to d, the context, the question and four options, a line each.",
                path, block[0][0],
            )  # fmt: skip
        said, context, question, *options = (line for _, line in block)
        yield Row({"context": context, "question": question, "options": options, "answer": said}, path, block[0][0])


def find_files(dataset: str, path: Path, split: str) -> list[Path]:
    """The files of a split. `path` is a file or a folder. In a folder the names say set and split (reclor_train.jsonl,
    AR_DevelopmentData.json) or only the split (train.json, Train.txt); of FOLIO and the like, a name without a split is
    `val`. Val, dev, eval and validation mean the same."""
    wanted = SPLITS.get(split, {split})
    here = files_here(path, dataset, split, wanted, WORDS, (*ENDINGS, *TEXTS))
    if here is None:
        return [path]
    mine = [p for p in here if _set_of(p) in NAMES.get(dataset, (dataset,))]
    named = [p for p in mine if words_of(p) & wanted]
    unsaid = [p for p in mine if not words_of(p) & WORDS] if "val" in wanted else []
    plain = [p for p in here if _stem(p) in wanted]
    if found := one_of((named, unsaid, plain), path, dataset, split):
        return found
    there = {w for p in mine for w in words_of(p) & WORDS}
    raise TaskError(f"{path} has no split '{split}' of {dataset}.{nearest(split, there) if there else ''}")


def _stem(path: Path) -> str:
    return re.split(r"[-_.]", path.name.lower())[0]


def _set_of(path: Path) -> str:
    """The beginning of a file's name, up to its split."""
    words = re.split(r"([-_.])", path.name.lower())
    end = next((k for k, w in enumerate(words) if w in WORDS or w in ("json", "jsonl", "txt", "parquet")), len(words))
    return "".join(words[:end]).rstrip("-_.")
