"""Questions about a repository.

Files are drawn without repetition, by seed. They are of a known kind, at most two folders deep, not `__init__.py`, not
under a part named out or test(s), and not too short. A teacher is shown a whole file or, if that is too long, a window
of whole lines; of data files only the beginning. Its questions are then filtered. Left out and counted are empty or
repeated questions, missing targets, and (offline) sentences that occur in another file of the repository too.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trailmark.ask.client import Unusable, run_limited
from trailmark.data.stages import Counts
from trailmark.errors import DataError
from trailmark.methods.reflect.explore.records import Record, Walk
from trailmark.methods.reflect.queries import Excerpt, FileKind, plain_text
from trailmark.methods.reflect.teacher import Offline, Teacher
from trailmark.run_async import wait
from trailmark.tasks.auto_explore.contents import MOST_BYTES, NotText, decode, kind_of
from trailmark.tasks.auto_explore.repo import Refused, Snapshot, snapshot

DEEPEST, FEWEST_TOKENS, MOST_TOKENS, DATA_LINES = 2, 50, 2000, 20
SKIPPED_PARTS = {"out", "test", "tests"}
Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the data set; `root` holds its filtered files."""

    name: str
    version: str
    root: Path


def texts_of(listed: Snapshot) -> Iterator[tuple[str, str]]:
    """(path, text) of the files that can be read as text."""
    for path in listed.files:
        try:
            data, more = listed.read(path, MOST_BYTES)
            yield path, decode(data, more)
        except (Refused, NotText):
            continue


def asked_about(path: str) -> bool:
    """Whether a file may be the target of a question."""
    *folders, name = path.split("/")
    parts = {p for part in path.split("/") for p in re.split(r"[^A-Za-z0-9]+", part)}
    return len(folders) <= DEEPEST and name != "__init__.py" and not parts & SKIPPED_PARTS


def excerpt(repo: str, path: str, text: str, count: Count, draw: random.Random) -> Excerpt | None:
    """A file as a teacher sees it; None if it is too short."""
    kind: FileKind = kind_of(path.rsplit("/", 1)[-1])  # type: ignore[assignment]
    visible = "".join(text.splitlines(keepends=True)[:DATA_LINES]) if kind == "data" else text
    if count(visible) < FEWEST_TOKENS:
        return None
    return Excerpt(repo, path, kind, text, _window(visible, count, draw))


def _window(text: str, count: Count, draw: random.Random) -> str:
    """The whole text if it fits, else as many whole lines as fit, from a random line on."""
    lines = text.splitlines(keepends=True)
    sizes = [count(line) + 1 for line in lines]
    if count(text) <= MOST_TOKENS:
        return text
    room, latest = 0, len(lines)
    while latest > 0 and room + sizes[latest - 1] <= MOST_TOKENS:
        latest -= 1
        room += sizes[latest]
    start = draw.randint(0, min(latest, len(lines) - 1))
    end, room = start + 1, sizes[start]
    while end < len(lines) and room + sizes[end] <= MOST_TOKENS:
        room += sizes[end]
        end += 1
    return "".join(lines[start:end])[: 8 * MOST_TOKENS]


def generate(
    repositories: Sequence[Repository], teacher: Teacher, seed: int, files: int, per_file: int, count: Count
) -> tuple[list[Record], Counts]:
    """Questions on at most `files` files of each repository, at most `per_file` on each."""
    records: list[Record] = []
    counts = Counts()
    for repo in repositories:
        texts = dict(texts_of(snapshot(repo.root)))
        chosen = sorted(filter(asked_about, texts))
        draw = random.Random(f"files {seed} {repo.name}")
        picked = sorted(draw.sample(chosen, min(files, len(chosen))))
        made = [excerpt(repo.name, p, texts[p], count, random.Random(f"window {seed} {repo.name} {p}")) for p in picked]
        counts.left_out["file too short"] += made.count(None)
        records += wait(_ask(repo, teacher, [e for e in made if e], texts, seed, per_file, counts))
        counts.kept["files asked about"] += len(picked) - made.count(None)
    teacher.settle()
    counts.kept["questions"] = len(records)
    counts.left_out = +counts.left_out
    if not records:
        why = "; ".join(f"{n} {what}" for what, n in sorted(counts.left_out.items())) or "nothing was left out"
        asked = counts.kept["files asked about"]
        raise DataError(f"the teacher '{teacher.name}' made no question at all on {asked} files ({why}).")
    return records, counts


async def _ask(
    repo: Repository, teacher: Teacher, excerpts: Sequence[Excerpt], texts: Mapping[str, str], seed: int, per_file: int,
    counts: Counts,
) -> list[Record]:  # fmt: skip
    async def one(e: Excerpt) -> list[tuple[str, str]]:
        try:
            return await teacher.tasks(e)
        except Unusable as problem:
            counts.left_out[f"file: {problem.reason}"] += 1
            return []

    found = await run_limited(excerpts, one, teacher.at_once)
    offline = isinstance(teacher, Offline)
    if offline:
        found = unique([[(q, a) for q, a in pairs] for pairs in found], excerpts, texts, counts)
    records = []
    for e, pairs in zip(excerpts, found):
        draw = random.Random(f"questions {seed} {repo.name} {e.path}")
        picked = [pairs[i] for i in sorted(draw.sample(range(len(pairs)), min(per_file, len(pairs))))]
        kind = ("docstring" if e.path.endswith(".py") else "doc") if offline else e.kind
        records += [
            Record(repo.name, q, e.path, a, repo.version, kind, len(texts), teacher.name) for q, a in picked
        ]  # fmt: skip
    return records


def unique(
    found: Sequence[list[tuple[str, str]]], excerpts: Sequence[Excerpt], texts: Mapping[str, str], counts: Counts
) -> list[list[tuple[str, str]]]:
    """Only queries that occur in no other file of the repository, and only once in the same file."""
    plain = {path: plain_text(text).lower() for path, text in texts.items()}
    often = Counter(q.lower() for pairs in found for q, _ in pairs)
    kept = []
    for e, pairs in zip(excerpts, found):
        here = [(q, a) for q, a in pairs if often[q.lower()] == 1]
        alone = [(q, a) for q, a in here if not any(q.lower() in t for path, t in plain.items() if path != e.path)]
        counts.left_out["question that fits several files"] += len(pairs) - len(alone)
        kept.append(alone)
    return kept


def filter_records(records: Sequence[Record], repositories: Sequence[Repository]) -> tuple[list[Record], Counts]:
    """Records that can be played, each question about a file once. Walks of equal records are combined."""
    roots = {r.name: {path for path, _ in texts_of(snapshot(r.root))} for r in repositories}
    counts, merged = Counts(), {}
    for r in records:
        if why := _unusable(r, roots):
            counts.left_out[why] += 1
            continue
        key = (r.repo, r.target, r.query)
        if key in merged:
            counts.left_out["question asked twice"] += 1
            merged[key] = replace(merged[key], walks=renumbered([*merged[key].walks, *r.walks]))
        else:
            also = tuple(t for t in r.also if t in roots[r.repo])
            merged[key] = replace(r, walks=renumbered(r.walks), also=also)
    counts.kept["records"] = len(merged)
    if not merged:
        raise DataError(f"no record is left ({counts.line('filter')}).")
    return list(merged.values()), counts


def _unusable(r: Record, roots: Mapping[str, set[str]]) -> str:
    if not r.query.strip():
        return "empty question"
    if r.repo not in roots:
        return "repository that is missing"
    if any(part.startswith(".") for part in r.target.split("/")):
        return "target under a hidden name"
    if not kind_of(r.target.rsplit("/", 1)[-1]):
        return "target of an unsupported suffix"
    return "" if r.target in roots[r.repo] else "target that is missing or not text"


def renumbered(walks: Sequence[Walk]) -> tuple[Walk, ...]:
    """The walks named positive0, positive1, …, negative0, negative1, … in their order."""
    seen: Counter[str] = Counter()
    out = []
    for w in walks:
        kind = "positive" if w.positive else "negative"
        out.append(replace(w, info=f"{kind}{seen[kind]}"))
        seen[kind] += 1
    return tuple(out)
