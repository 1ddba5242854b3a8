"""From books to rows of stories, in stages:

    DIR/chapters.jsonl     chapters     the chapters of each book, and its three main characters
    DIR/synopses.jsonl     synopses     what happens in each chapter
    DIR/summaries.jsonl    summaries    for each k, a summary of the chapters before k; the last one is of all chapters
    DIR/facts.jsonl        facts        sentences about each character in each chapter
    DIR/verified.jsonl     verify       those that the chapter supports
    DIR/sheets.jsonl       sheets       for each character and k, what is known before chapter k
    DIR/rows.jsonl         rows         the nine fields for each chapter that is a target

Summaries and sheets before chapter k use only chapters before k. The plan of the whole story uses all chapters, the end
included: that is VR-CLI's design, and the leak rule of `trailmark data stories` looks at it like at every other part.

A book is one JSON line for each chapter: {"book", "chapter" (from 1), "heading", "text"}, and `split` if there is one.
The file may be compressed (.gz, .xz).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trailmark.ask.client import Unusable, ask_each
from trailmark.data.stages import Counts, DataFolder, data_folder
from trailmark.errors import DataError
from trailmark.formats.rows import Row, parse_line
from trailmark.methods.vrcli.stories.sentences import common_run, main_names
from trailmark.methods.vrcli.stories.setup import write_lines
from trailmark.methods.vrcli.stories.writer import QUESTIONS, Writer
from trailmark.runs.stages import Stage
from trailmark.tasks.row_files import file_text
from trailmark.tasks.stories.rows import StoryRow, content_id

STAGES = ("chapters", "synopses", "summaries", "facts", "verify", "sheets", "rows")
VERBATIM, SHARE = 200, 0.8  # shorter sources are kept as they are; a summary has at most this share of its source
MOST_SUMMARY, MOST_SHEET = 4096, 2048  # tokens
OVERLAP = 0.8  # of a split sentence that must stand in the original one
KEPT = 5  # the rating of a fact that is kept

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Plan:
    """How rows are made. `characters` is the number of main characters of a book. `last` is how many previous chapters
    a row holds. The first `skip` chapters and the last ones are no targets."""

    characters: int = 3
    last: int = 1
    skip: int = 2
    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class Book:
    """The headers and texts of a book's chapters, from the first."""

    name: str
    split: str
    characters: tuple[str, ...]
    chapters: tuple[tuple[str, str], ...]

    def targets(self, skip: int) -> range:
        return range(skip, len(self.chapters) - skip)


def read_books(paths: Sequence[Path], characters: int, given: Mapping[str, Sequence[str]] | None = None) -> list[Book]:
    """Books in the order of the files. `given` names the characters of a book; otherwise they are its most frequent
    names."""
    found: dict[str, dict[int, tuple[str, str]]] = {}
    splits: dict[str, str] = {}
    files: dict[str, Path] = {}
    for path in paths:
        for number, line in enumerate(file_text(path).split("\n"), 1):
            if not line.strip():
                continue
            row = Row(parse_line(line, path, number), path, number)
            value = row.fields(row.value, "", ["book", "chapter", "text"], ["heading", "split"])
            book, text = (row.text(value[k], k) for k in ("book", "text"))
            heading, split = (row.text(value.get(k) or "", k) for k in ("heading", "split"))
            k = value["chapter"]
            if isinstance(k, bool) or not isinstance(k, int) or k < 1:
                raise row.bad(f"must be a whole number from 1, not {repr(k)[:60]}.", "chapter")
            if not text.strip():
                raise row.bad("the chapter is empty.", "text")
            if k in found.setdefault(book, {}):
                raise row.bad(f"book '{book}' has a second chapter {k}.", "chapter")
            if splits.setdefault(book, split) != split:
                raise row.bad(f"book '{book}' is in split '{splits[book]}' and in '{split}'.", "split")
            found[book][k] = heading.strip(), text.strip()
            files[book] = path
        if not found:
            raise DataError("holds no chapters.", path)
    books = []
    for name, chapters in found.items():
        if missing := next((k for k in range(1, max(chapters)) if k not in chapters), None):
            raise DataError(f"book '{name}' has no chapter {missing}.", files[name])
        listed = tuple(chapters[k] for k in sorted(chapters))
        people = (given or {}).get(name) or main_names([text for _, text in listed], characters)
        books.append(Book(name, splits[name], tuple(people), listed))
    return books


def make(
    out: Path, paths: Sequence[Path], plan: Plan, open_writer: Callable[[Path], Writer], count: Callable[[str], int],
    settings: dict[str, Any], characters: Path | None = None, wanted: Sequence[str] = STAGES,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Counts]:  # fmt: skip
    """Run the wanted stages in `out`, continuing where an earlier run was stopped. `open_writer` gets the file that
    stores answers. `characters` is a JSON file of names by book."""
    with data_folder(out, settings, wanted, STAGES) as place:
        work = _Work(out, plan, open_writer(out / "answers.jsonl"), count)
        return place.make(_stages(place, work, paths, characters), wanted, say)


def _stages(place: DataFolder, work: _Work, paths: Sequence[Path], characters: Path | None) -> list[Stage]:
    says = ("teacher", "temperature", "top_p", "tokenizer")
    files: dict[str, str | Path] = {f"book {k}": path for k, path in enumerate(paths, 1)}
    if characters is not None:
        files["characters"] = characters
    chapters = partial(work.chapters, paths, characters)
    return [
        place.stage("chapters", chapters, ["chapters.jsonl"], [], ["characters", "skip"], files),
        place.stage("synopses", work.synopses, ["synopses.jsonl"], ["chapters.jsonl"], says),
        place.stage("summaries", work.summaries, ["summaries.jsonl"], ["chapters.jsonl", "synopses.jsonl"], says),
        place.stage("facts", work.facts, ["facts.jsonl"], ["chapters.jsonl"], says),
        place.stage("verify", work.verify, ["verified.jsonl"], ["chapters.jsonl", "facts.jsonl"], says),
        place.stage("sheets", work.sheets, ["sheets.jsonl"], ["chapters.jsonl", "verified.jsonl"], (*says, "skip")),
        place.stage("rows", work.rows, ["rows.jsonl"],
                    ["chapters.jsonl", "synopses.jsonl", "summaries.jsonl", "sheets.jsonl"], ["last", "skip"]),
    ]  # fmt: skip


class _Work:
    def __init__(self, out: Path, plan: Plan, writer: Writer, count: Callable[[str], int]):
        self.out, self.plan, self.writer, self.count = out, plan, writer, count

    def read(self, name: str) -> list[dict[str, Any]]:
        path = self.out / f"{name}.jsonl"
        return [parse_line(line, path, n) for n, line in enumerate(path.read_text("utf-8").split("\n"), 1) if line]

    def write(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        write_lines(self.out / f"{name}.jsonl", rows)

    def books(self) -> list[Book]:
        return [
            Book(r["book"], r["split"], tuple(r["characters"]), tuple((h, t) for h, t in r["chapters"]))
            for r in self.read("chapters")
        ]

    def asked(self, name: str, items: Sequence[T], work: Callable[[T], Awaitable[R]], counts: Counts) -> list[R | None]:
        """The results of `work` for each item. None where the writer gave no usable answer: it is counted."""

        async def tried(item: T) -> R | None:
            try:
                return await work(item)
            except Unusable as failed:
                counts.left_out[failed.reason] += 1
                return None

        made = ask_each(name, items, tried, self.writer.at_once)
        self.writer.settle()
        return made

    def chapters(self, paths: Sequence[Path], characters: Path | None) -> Counts:
        counts, kept = Counts(), []
        for book in read_books(paths, self.plan.characters, read_characters(characters)):
            if not book.targets(self.plan.skip):
                counts.left_out[f"books with fewer than {2 * self.plan.skip + 1} chapters"] += 1
                continue
            kept.append(asdict(book))
            counts.kept["books"] += 1
            counts.kept["chapters"] += len(book.chapters)
        if not kept:
            raise DataError(f"no book has {2 * self.plan.skip + 1} chapters: there is no target.", paths[0])
        self.write("chapters", [{"book": b.pop("name"), **b} for b in kept])
        return counts

    def synopses(self) -> Counts:
        counts = Counts()
        items = [(b.name, k, *chapter) for b in self.books() for k, chapter in enumerate(b.chapters)]
        made = self.asked("synopses", items, lambda i: self.writer.synopsis(i[2], i[3]), counts)
        rows = [{"book": i[0], "chapter": i[1], "text": text} for i, text in zip(items, made) if text]
        self.write("synopses", rows)
        counts.kept["synopses"] = len(rows)
        return counts

    def summaries(self) -> Counts:
        """For k = 0 ... the number of chapters: the joined synopses of the chapters before k, or a summary of them."""
        counts = Counts()
        known = {(r["book"], r["chapter"]): r["text"] for r in self.read("synopses")}
        items = [
            (b.name, k, "\n".join(f"Chapter {j + 1}: {known[b.name, j]}" for j in range(k) if (b.name, j) in known))
            for b in self.books() for k in range(len(b.chapters) + 1)
        ]  # fmt: skip

        async def shorter(item: tuple[str, int, str]) -> str:
            return await self.condensed(item[2], MOST_SUMMARY, self.writer.summary)

        made = self.asked("summaries", items, shorter, counts)
        rows = [{"book": i[0], "upto": i[1], "text": text} for i, text in zip(items, made) if text is not None]
        self.write("summaries", rows)
        counts.kept["summaries"] = len(rows)
        return counts

    async def condensed(self, source: str, most: int, write: Callable[[str, int], Awaitable[str]]) -> str:
        size = self.count(source)
        if size < VERBATIM:
            return source
        return await write(source, min(int(SHARE * size), most))

    def facts(self) -> Counts:
        counts = Counts()
        items = [
            (b.name, name, k, question, text)
            for b in self.books() for name in b.characters for k, (_, text) in enumerate(b.chapters)
            for question in QUESTIONS
        ]  # fmt: skip
        made = self.asked("facts", items, lambda i: self.about(i[1], i[3], i[4]), counts)
        rows = [
            {"book": i[0], "character": i[1], "chapter": i[2], "question": i[3], "question_set": QUESTIONS[i[3]][0],
             "sentence": sentence, "from_answer": at, "from_split": part}
            for i, found in zip(items, made) for at, part, sentence in found or ()
        ]  # fmt: skip
        self.write("facts", rows)
        counts.kept["facts"] = len(rows)
        return counts

    async def about(self, name: str, question: str, text: str) -> list[tuple[int, int, str]]:
        """Simple sentences, with the number of the answer's sentence and of the part."""
        found = []
        for at, whole in enumerate(await self.writer.facts(name, question, text)):
            parts = await self.writer.simpler(whole)
            close = parts and all(common_run(p, whole) > OVERLAP * len(p) for p in parts)
            found += [(at, k, p) for k, p in enumerate(parts if close else [whole])]
        return found

    def verify(self) -> Counts:
        counts, texts = Counts(), {(b.name, k): t for b in self.books() for k, (_, t) in enumerate(b.chapters)}
        facts = self.read("facts")
        rate = lambda f: self.writer.rate(f["sentence"], texts[f["book"], f["chapter"]])
        rated = self.asked("verify", facts, rate, counts)
        kept = [f for f, rating in zip(facts, rated) if rating == KEPT]
        self.write("verified", kept)
        counts.kept["facts"] = len(kept)
        if dropped := sum(rating is not None and rating != KEPT for rating in rated):
            counts.left_out[f"facts rated below {KEPT}"] += dropped
        return counts

    def sheets(self) -> Counts:
        """What is known of a character before chapter k, from facts of earlier chapters, each sentence once."""
        counts, facts = Counts(), self.read("verified")
        items = []
        for b in self.books():
            for name in b.characters:
                mine = [f for f in facts if f["book"] == b.name and f["character"] == name]
                mine.sort(key=lambda f: f["chapter"])  # stable: the order of questions stays
                for k in b.targets(self.plan.skip):
                    known = dict.fromkeys(f["sentence"] for f in mine if f["chapter"] < k)
                    if known:
                        items.append((b.name, name, k, "\n".join(known)))

        async def shorter(item: tuple[str, str, int, str]) -> str:
            return await self.condensed(item[3], MOST_SHEET, partial(self.writer.sheet, item[1]))

        made = self.asked("sheets", items, shorter, counts)
        rows = [
            {"book": i[0], "character": i[1], "upto": i[2], "text": text} for i, text in zip(items, made) if text
        ]  # fmt: skip
        self.write("sheets", rows)
        counts.kept["sheets"] = len(rows)
        return counts

    def rows(self) -> Counts:
        counts, rows = Counts(), []
        synopses = {(r["book"], r["chapter"]): r["text"] for r in self.read("synopses")}
        summaries = {(r["book"], r["upto"]): r["text"] for r in self.read("summaries")}
        sheets = {(r["book"], r["character"], r["upto"]): r["text"] for r in self.read("sheets")}
        for b in self.books():
            for k in b.targets(self.plan.skip):
                known = {name: sheets.get((b.name, name, k), "") for name in b.characters}
                synopsis, so_far, whole = (
                    synopses.get((b.name, k)), summaries.get((b.name, k)), summaries.get((b.name, len(b.chapters)))
                )  # fmt: skip
                if not synopsis or not so_far or not whole:
                    counts.left_out["rows without a synopsis or summary"] += 1
                    continue
                if not all(known.values()):
                    counts.left_out["rows without a sheet of each character"] += 1
                    continue
                header, text = b.chapters[k]
                before = b.chapters[max(0, k - self.plan.last) : k]
                row = StoryRow(
                    content_id([b.name, k, text]), f"{header}\n\n{text}" if header else text,
                    "\n".join(f"{h}\n\n{t}" if h else t for h, t in before), len(before), so_far, whole, known,
                    synopsis, header, k, b.name, b.split,
                )  # fmt: skip
                rows.append(row.plain())
        if not rows:
            why = "; ".join(f"{n} {reason}" for reason, n in sorted(counts.left_out.items()))
            raise DataError(f"no row can be made (left out: {why}).", self.out / "chapters.jsonl")
        self.write("rows", rows)
        counts.kept["rows"] = len(rows)
        return counts


def read_characters(path: Path | None) -> dict[str, list[str]]:
    """Names by book, from a JSON file."""
    if path is None:
        return {}
    try:
        found = json.loads(file_text(path))
    except ValueError as problem:
        raise DataError(f"is not JSON: {problem}.", path) from None
    ok = isinstance(found, dict) and all(
        isinstance(v, list) and v and all(isinstance(x, str) and x for x in v) for v in found.values()
    )
    if not ok:
        raise DataError('must be an object of books and their characters, such as {"emma": ["Emma", "Harriet"]}.', path)
    return found
