"""The data of EPO: trajectories whose turns have a weight (`score`).

Files of ShareGPT with scores, or our episodes with annotations `score`. A trajectory that is longer than the limit is
cut as in the original; each turn that goes takes its weight along.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.formats import turns
from trailmark.formats.conversations import unread
from trailmark.formats.dataset_info import find_sets
from trailmark.formats.episode_file import StoredFile
from trailmark.formats.on_demand import OnDemand
from trailmark.formats.rows import Row, RowFile
from trailmark.formats.sharegpt import sharegpt_from_row
from trailmark.formats.speakers import TAGS, Tags, read_talk
from trailmark.samples import Mean, build_samples, chains
from trailmark.types import Annotation, Episode, Sample, Turn

SCORE = "score"


@dataclass(frozen=True)
class Trajectory:
    """The turns of one seat, each with its weight."""

    episode: Episode
    seat: str
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Source:
    """A file, what it calls its speakers, and how many of its first rows are read (None: all)."""

    path: Path
    tags: Tags = TAGS
    most: int | None = None


def sources_of(files: Sequence[str], dataset: str | None, folder: str, most: int | None) -> list[Source]:
    """The files of a recipe: `data`, or the data sets that `dataset` names. `most` counts rows of a set."""
    if dataset is None:
        return [Source(Path(f), most=most) for f in files]
    found = []
    for s in find_sets(dataset, folder):
        left = most
        for file in s.files:
            found.append(Source(file, s.tags, left))
            left = None if left is None else max(0, left - len(RowFile(file)))
    return found


# --- reading ---------------------------------------------------------------------------------------------------------


class Trajectories(OnDemand[Trajectory]):
    """The trajectories of some files. Going over the files once finds every mistake and keeps their places; each is
    read and encoded when a batch needs it. `counts` has what was left out, and how many were cut."""

    def __init__(
        self, sources: Sequence[Source], format: str, tokenizer: Any, seats: Sequence[str], max_len: int,
        skip_zero: bool = False,
    ):  # fmt: skip
        super().__init__(0, self._read, _bytes)
        self.tokenizer, self.seats, self.max_len = tokenizer, seats, max_len
        self._places = [array("q") for _ in range(3)]  # file, row, seat
        self._files: list[Any] = []
        self.counts: Counter[str] = Counter(skipped_roles=0, skipped_no_turn=0, skipped_zero=0, cut=0)
        for source in sources:
            self._files.append(source)
            look = self._look_at_episodes if format == "episodes" else self._look_at_rows
            look(len(self._files) - 1, source, skip_zero)
        if not self._length:
            why = ", ".join(f"{n} {name.removeprefix('skipped_')}" for name, n in self.counts.items() if n)
            why = f"holds no trajectory that can be learnt from ({why or 'no row is read'})."
            raise DataError(why, sources[0].path)

    def _look_at_rows(self, file: int, source: Source, skip_zero: bool) -> None:
        rows = RowFile(source.path)
        self._files[file] = (source, rows)

        def look(i: int, row: Row) -> None:
            if source.most is not None and i >= source.most:
                return
            if why := out_of_turn(row, source.tags):
                self.counts["skipped_roles"] += 1
                first_wrong.append(str(row.bad(why)))
                return
            self._add(file, i, 0, self._of_row(file, i, row), skip_zero)

        first_wrong: list[str] = []
        rows.visit(look, refused=unread)
        if first_wrong and len(first_wrong) == min(len(rows), source.most or len(rows)):
            raise DataError(f"no row can be used; the first: {first_wrong[0]}")

    def _look_at_episodes(self, file: int, source: Source, skip_zero: bool) -> None:
        stored = StoredFile("episodes", source.path, self.tokenizer, self.seats[0])
        self._files[file] = stored

        def look(i: int, found: turns.Imported) -> None:
            if source.most is None or i < source.most:
                for k, seat in enumerate(self.seats):
                    if any(t.seat == seat and t.tokens for t in found.episodes[0].turns):
                        self._add(file, i, k, _stored(found, seat, source.path, i + 1), skip_zero)

        stored.survey(None, look)

    def _add(self, file: int, row: int, seat: int, whole: Trajectory, skip_zero: bool) -> None:
        kept = shortened(whole, self.max_len)
        if kept is None:
            self.counts["skipped_no_turn"] += 1
        elif skip_zero and not any(kept.weights):
            self.counts["skipped_zero"] += 1
        else:
            self.counts["cut"] += kept is not whole
            for column, value in zip(self._places, (file, row, seat)):
                column.append(value)
            self._length += 1
            self.keep(self._length - 1, kept)

    def _of_row(self, file: int, i: int, row: Row) -> Trajectory:
        seat = self.seats[0]
        reader = turns.Reader(self.tokenizer, seat, turns.Starts(f"{file}:{i}:"))
        return row_trajectory(reader, row, self._files[file][0].tags)

    def _read(self, k: int) -> Trajectory:
        file, row, seat = (column[k] for column in self._places)
        held = self._files[file]
        if isinstance(held, StoredFile):
            whole = _stored(held.load(row), self.seats[seat], held.path, row + 1)
        else:
            whole = self._of_row(file, row, held[1][row])
        kept = shortened(whole, self.max_len)
        assert kept is not None
        return kept


def _bytes(t: Trajectory) -> int:
    return 3000 + sum(40 * (len(x.prompt) + len(x.tokens)) + 2 * len(x.text) for x in t.episode.turns)


def row_trajectory(r: turns.Reader, row: Row, tags: Tags = TAGS) -> Trajectory:
    """A row of ShareGPT. Each of its answers must have a score."""
    for k, m in enumerate(read_talk(row, tags)):
        if m["role"] == "assistant" and m.get(SCORE) is None:
            raise row.bad(
                "has no score, and method epo weights each answer by its score: shape the file first (`trailmark data "
                "shape`), or imitate it as it is (method: sft).",
                f"{tags.messages}[{k}].{SCORE}",
            )
    found = sharegpt_from_row(r, row, tags)
    return Trajectory(found.episodes[0], r.seat, tuple(a.values[0] for a in found.annotations))


def out_of_turn(row: Row, tags: Tags = TAGS) -> str:
    """Why the speakers of a row do not take turns; "" if they do. A system message may come first."""
    item = row.fields(row.value, "", [tags.messages], [SCORE, "location"])
    said = [m.get(tags.role) if isinstance(m, dict) else None for m in row.listed(item[tags.messages], tags.messages)]
    roles = [tags.roles.get(s) if isinstance(s, str) else None for s in said]
    first = int(roles[:1] == ["system"])
    for k, role in enumerate(roles[first:]):
        if role not in ((("user", "tool"), ("assistant",))[k % 2]):
            return f"message {k + first} is from '{said[k + first]}': people and the model must take turns."
    return "" if (len(roles) - first) % 2 == 0 else "the last message is not the model's."


def _stored(found: turns.Imported, seat: str, path: Path, line: int) -> Trajectory:
    """A seat's turns in one of our episodes."""
    (e,) = found.episodes
    scores = {a.turn: a.values[0] for a in found.annotations if a.name == SCORE and a.level == "turn"}
    mine = [i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens]
    if (bare := next((i for i in mine if i not in scores), None)) is not None:
        raise DataError(
            f"turn {bare} of seat '{seat}' in episode '{e.id}' has no annotation '{SCORE}': shape the file first "
            "(`trailmark data shape`).", path, line,
        )  # fmt: skip
    return Trajectory(e, seat, tuple(scores[i] for i in mine))


# --- cutting ---------------------------------------------------------------------------------------------------------


def room(source: int, target: int, left: int) -> tuple[int, int]:
    """How many tokens of a question and of its answer are kept, if `left` tokens are left:

    both, if they fit; the whole answer, if it takes less than half of the room; the whole question, if that does; else
    both in proportion. Whole numbers, rounded down."""
    if source + target <= left:
        return source, target
    if 2 * target < left:
        return left - target, target
    if 2 * source < left:
        return source, left - source
    kept = left * target // (source + target)
    return left - kept, kept


def shortened(t: Trajectory, max_len: int) -> Trajectory | None:
    """The trajectory with at most `max_len` tokens in each sequence. Turns behind the limit go with their weights, and
    so does one whose answer is cut away. None if no turn is left."""
    e, cut = t.episode, False
    weight = dict(zip([i for i, x in enumerate(e.turns) if x.seat == t.seat and x.tokens], t.weights, strict=True))
    kept: dict[int, Turn] = {}
    for chain in chains(e, t.seat):
        used, over = 0, False
        for i in chain:
            turn = e.turns[i]
            if i not in weight:
                continue
            source = turn.prompt + turn.forced
            s, n = room(len(source), len(turn.tokens), max_len - used)
            used += s + n
            if (s, n) != (len(source), len(turn.tokens)):
                cut = over = True
                if n:
                    turn = _cut(turn, s, n)
            if n:
                kept[i] = turn
            if over:
                break
    if not kept:
        return None
    if not cut:
        return t
    number = {i: k for k, i in enumerate(sorted(kept))}
    made = [replace(kept[i], continues=number.get(kept[i].continues)) for i in sorted(kept)]  # type: ignore[arg-type]
    return Trajectory(replace(e, turns=tuple(made)), t.seat, tuple(weight[i] for i in sorted(kept)))


def _cut(turn: Turn, source: int, target: int) -> Turn:
    if source < len(turn.prompt) + len(turn.forced):
        turn = replace(turn, prompt=(turn.prompt + turn.forced)[:source], forced=())
    stop = "length" if target < len(turn.tokens) else turn.stop
    return replace(
        turn, tokens=turn.tokens[:target], logp=turn.logp[:target], logq=turn.logq[:target], steps=(), stop=stop
    )


# --- samples ---------------------------------------------------------------------------------------------------------


def samples_of(chosen: Iterable[Trajectory], mean: Mean = "turn", length: int = 1) -> list[Sample]:
    """One sample for each sequence of each trajectory; its stream `advantage` has the weights of the turns."""
    out: list[Sample] = []
    for t in chosen:
        e = t.episode
        out += build_samples([e], t.seat, {"advantage": {e.id: list(t.weights)}}, mean, length)
    return out


def score_notes(e: Episode, seat: str, weights: Sequence[float], source: str) -> list[Annotation]:
    """The weights of a seat's turns as annotations `score`."""
    mine = [i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens]
    return [Annotation(e.id, SCORE, "turn", (float(w),), i, source) for i, w in zip(mine, weights, strict=True)]
