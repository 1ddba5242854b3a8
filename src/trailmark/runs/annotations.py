"""The files that annotate a file of episodes: where they are, and whether they fit the episodes.

    RUN/episodes/000012.jsonl    RUN/annotations/NAME/000012.jsonl, one file per name
    any other FILE.jsonl         FILE.annotations.jsonl in the same folder (evaluations, collections, `eval --out`)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from trailmark.errors import DataError
from trailmark.runs.atomic_files import lines_of
from trailmark.runs.episode_json import from_json
from trailmark.runs.store import beside, segments, write_rows
from trailmark.types import Annotation, Episode, Scored


def annotation_files(file: Path) -> list[Path]:
    """The files that annotate a file of episodes."""
    root = file.parent.parent / "annotations"
    of_run = file.parent.name == "episodes" and root.is_dir()
    folders = sorted(p for p in root.iterdir() if p.is_dir()) if of_run else []
    return [p for p in (*(folder / file.name for folder in folders), beside(file)) if p.is_file()]


def write_notes(path: Path, notes: Iterable[Annotation]) -> None:
    """Write annotations into a file, all or none."""
    write_rows(path, notes, "annotation")


def read_beside(file: Path) -> list[Annotation]:
    """The notes that `write_beside` wrote."""
    path = beside(file)
    return [from_json(line, path, i, Annotation) for i, line in enumerate(lines_of(path, True)[:-1], 1)]


def named_episodes(folder: Path) -> list[Path]:
    """The episode files in a folder that have a name instead of a number, sorted."""
    numbered = segments(folder)
    found = (p for p in folder.glob("*.jsonl") if p not in numbered and not p.name.startswith("."))
    return sorted(p for p in found if not p.name.endswith((".annotations.jsonl", ".partial.jsonl")))


def misfits(file: Path, episodes: Sequence[Episode]) -> list[str]:
    """A sentence for each annotation that is damaged or does not fit the episodes of `file`, with its file and line."""
    known, out = {e.id: e for e in episodes}, []
    for path in annotation_files(file):
        name = path.parent.name if path != beside(file) else ""
        try:
            *lines, tail = lines_of(path)
        except DataError as problem:
            out.append(str(problem))
            continue
        seen: dict[tuple[str, str, int | None], int] = {}
        for i, line in enumerate(lines, 1):
            try:
                a = from_json(line, path, i, Annotation)
            except DataError as problem:
                out.append(str(problem))
                continue
            first = seen.setdefault((a.episode, a.name, a.turn), i)
            again = "" if first == i else f"says again what line {first} says"
            if why := _why_not(a, known.get(a.episode), name, file.name) or again:
                out.append(f"{path}:{i}: {why}.")
        if tail:
            out.append(f"{path}:{len(lines) + 1}: the line is cut off: it does not end with a newline.")
    return out


def _why_not(a: Annotation, e: Episode | None, name: str, file: str) -> str:
    if name and a.name != name:
        return f"is called '{a.name}' in a folder of '{name}'"
    if e is None:
        return f"is about episode '{a.episode}', which {file} does not hold"
    if a.level == "episode":
        wanted, what = 1, f"episode '{a.episode}' needs"
    elif a.turn is None or not 0 <= a.turn < len(e.turns):
        return f"is about turn {a.turn} of episode '{a.episode}', which has {len(e.turns)}"
    else:
        turn = e.turns[a.turn]
        wanted = {"turn": 1, "token": len(turn.tokens), "step": len(turn.steps) or 1}[a.level]
        part = "" if a.level == "turn" else f"the {a.level}s of "
        what = f"{part}turn {a.turn} of episode '{a.episode}' {'need' if part else 'needs'}"
    if len(a.values) != wanted:
        return f"has {len(a.values)} numbers where {what} {wanted}"
    return ""


def without_credit(file: Path, episodes: Sequence[Episode]) -> str:
    """A sentence if some scored episodes of a file have no advantage, as when the end of the file of advantages is
    missing. "" if all have one."""
    path = file.parent.parent / "annotations" / "advantage" / file.name
    if file.parent.name != "episodes" or not path.is_file():
        return ""
    held = {a.episode for a in _readable(path)}
    scored = (e for e in episodes if isinstance(e.outcome, Scored))
    trained = [e for e in scored if any(_learns(e, t.seat) and t.tokens for t in e.turns)]
    bare = [e.id for e in trained if e.id not in held]
    if not bare:
        return ""
    return f"{path}: {len(bare)} of {len(trained)} scored episodes have no advantage, such as '{bare[0]}'"


def _learns(e: Episode, seat: str) -> bool:
    return seat in e.players and e.players[seat].kind == "trained"


def _readable(path: Path) -> Iterable[Annotation]:
    for i, line in enumerate(lines_of(path)[:-1], 1):
        try:
            yield from_json(line, path, i, Annotation)
        except DataError:
            continue
