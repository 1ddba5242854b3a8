"""Where games come from: a folder of them, packed files, or a user's own ALFWorld download.

    games = Games("data/alfworld")          # or a folder with game.tw-pddl files at any depth, or one such file
    games.ids("seen")                       # in a fixed order; nothing is parsed yet
    games.game("valid_seen/pick_…/trial_…") # parsed when first needed, then cached

There are three layouts. The contents of the folder decide:

    packed     games_<split>.jsonl[.xz], beside one *.pddl (the domain) and one *.twl2 (the grammar) for all of them
    download   [json_2.1.1/]<split>/<task>/<trial>/game.tw-pddl, as $ALFWORLD_DATA holds it
    loose      game.tw-pddl files anywhere below, all in the one split "train"

A `game.tw-pddl` is JSON with `pddl_domain`, `grammar`, `pddl_problem`, `walkthrough` and `solvable`. Splits have
several names: train, valid_train, seen (valid_seen, dev), unseen (valid_unseen, test).

If a game that is asked for by name cannot be read, the error names its file. `usable`, which checks many games, leaves
such games out and notes them in `skipped`, together with games that cannot be won.
"""

from __future__ import annotations

import json
import lzma
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trailmark.errors import DataError, TaskError, nearest
from trailmark.plain_files import open_plain, read_json, read_plain
from trailmark.tasks.alfworld.dialect import Dialect, of_grammar
from trailmark.tasks.alfworld.engine import Game, parse_game

FILE = "game.tw-pddl"
KEPT = 256  # parsed games in memory, about 1 MB each once they have been played
TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
SPLITS = ("train", "valid_train", "valid_seen", "valid_unseen")
ALIASES = {
    "seen": "valid_seen",
    "dev": "valid_seen",
    "eval_in_distribution": "valid_seen",
    "unseen": "valid_unseen",
    "test": "valid_unseen",
    "eval_out_of_distribution": "valid_unseen",
}
LEFT_OUT = ("movable", "Sliced")  # not text games, though downloads hold some of their files
DOWNLOAD = "json_2.1.1"


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts that make a game."""

    domain: str
    grammar: str
    problem: str
    walkthrough: tuple[str, ...]
    solvable: bool | None


@dataclass(frozen=True, slots=True)
class Card:
    """What is known about a game before it is parsed. `where` is its file (and line), for messages."""

    id: str
    split: str
    task_type: str
    where: str
    read: Callable[[], Texts] = field(repr=False, compare=False)
    winnable: bool = False  # whether it is known to be winnable without reading it


class Games:
    """All games below a path (None: $ALFWORLD_DATA)."""

    def __init__(self, path: str | Path | None = None):
        self.path = _place(path)
        self.skipped: dict[str, str] = {}  # id or place -> why it was left out
        self._winnable: set[str] = set()  # ids that were looked at and kept
        self._cards: dict[str, dict[str, Card]] = {}
        self._files = _layout(self.path)
        self._parsed: OrderedDict[str, tuple[Game, Dialect]] = OrderedDict()

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._files)

    def split(self, name: str) -> str:
        """The split's own name, for any of its names."""
        found = ALIASES.get(name, name)
        if found in self._files:
            return found
        if found in SPLITS:
            raise TaskError(f"split '{name}' is not in {self.path}, which has {', '.join(self.splits)}.")
        raise TaskError(f"there is no split '{name}'.{nearest(name, (*self.splits, *ALIASES))}")

    def cards(self, split: str) -> dict[str, Card]:
        """The games of a split by id, in a fixed order."""
        name = self.split(split)
        if name not in self._cards:
            self._cards[name] = self._list(name)
        return self._cards[name]

    def ids(self, split: str, only: Sequence[str] = (), task_types: Sequence[str] = ()) -> tuple[str, ...]:
        """Games of these types whose id holds one of the texts `only` (empty: all). Split `valid` is every split whose
        name begins with it."""
        check_types(task_types)
        every = split == "valid" and split not in self.splits
        parts = [name for name in self.splits if every and name.startswith("valid")] or [split]
        return tuple(
            c.id
            for part in parts
            for c in self.cards(part).values()
            if (not only or any(word in c.id for word in only)) and (not task_types or c.task_type in task_types)
        )

    def card(self, id: str) -> Card:
        split = id.split("/", 1)[0]
        found = self.cards(split).get(id) if split in self._files else None
        if found is None:
            raise TaskError(f"there is no game '{id}' in {self.path}; a game is named split/task/trial.")
        return found

    def find(self, word: str) -> str:
        """The id that equals `word`, or the only one that contains it: people do not type whole ids."""
        ids = [i for split in self.splits for i in self.cards(split)]
        hits = [word] if word in ids else [i for i in ids if word in i]
        if len(hits) == 1:
            return hits[0]
        if hits:
            raise TaskError(
                f"'{word}' is in {len(hits)} games' names, such as {hits[0]} and {hits[1]}: write more of it."
            )
        raise TaskError(f"no game in {self.path} has '{word}' in its name.")

    def game(self, id: str) -> Game:
        """The parsed game. If it is broken, a DataError names file, line and token."""
        return self._parse(id)[0]

    def dialect(self, id: str) -> Dialect:
        """The dialect that the game itself speaks."""
        return self._parse(id)[1]

    def _parse(self, id: str) -> tuple[Game, Dialect]:
        if id in self._parsed:
            self._parsed.move_to_end(id)
            return self._parsed[id]
        card = self.card(id)
        texts = card.read()
        game = parse_game(
            texts.domain,
            texts.problem,
            texts.grammar,
            id=id,
            walkthrough=texts.walkthrough,
            task_type=card.task_type,
            where=card.where,
        )
        self._parsed[id] = game, of_grammar(texts.grammar)
        if len(self._parsed) > KEPT:
            self._parsed.popitem(last=False)
        return self._parsed[id]

    def usable(self, ids: Sequence[str], parse: bool = False) -> Iterator[str]:
        """Those that can be read and won, one by one, so taking ten reads ten. `parse` also reads their PDDL."""
        for id in ids:
            if id in self.skipped:
                continue
            try:
                why = "" if id in self._winnable else self._unwinnable(id)
                if parse and not why:
                    self.game(id)
            except DataError as problem:
                why = str(problem)
            if why:
                self.skipped[id] = why
            else:
                self._winnable.add(id)
                yield id

    def _unwinnable(self, id: str) -> str:
        card = self.card(id)
        if card.winnable:
            return ""
        texts = card.read()
        if texts.solvable is False:
            return "marked as unsolvable"
        if texts.walkthrough:
            return ""
        from trailmark.tasks.alfworld.experts import plan

        return "" if plan(self.game(id).start()) is not None else "no walkthrough, and no plan was found"

    def _list(self, split: str) -> dict[str, Card]:
        source = self._files[split]
        if isinstance(source, list):
            cards = [_card_of_file(path, root, split) for path, root in source]
        else:
            cards = list(_packed_cards(source, split, self.skipped))
            if not cards:
                raise DataError("holds no game that can be read.", source)
        return {c.id: c for c in sorted(cards, key=lambda c: c.id)}


def check_types(task_types: Sequence[str]) -> None:
    for name in task_types:
        if name not in TYPES:
            raise TaskError(f"there is no task type '{name}'.{nearest(name, TYPES)}")


# --- layouts -----------------------------------------------------------------------------------------------------

Files = Path | list[tuple[Path, Path]]  # a packed file, or game files with the folder that their ids begin in


def _place(path: str | Path | None) -> Path:
    if path is None:
        found = os.environ.get("ALFWORLD_DATA")
        if not found:
            raise TaskError(
                "alfworld needs games: set the option 'games' to a folder that holds them, or $ALFWORLD_DATA to your "
                "download."
            )
        path = found
    place = Path(path).expanduser()
    if not place.exists():
        raise TaskError(f"games: {place} does not exist.")
    return place


def _layout(path: Path) -> dict[str, Files]:
    """The splits and the files that hold them."""
    if path.is_file():
        return _single(path)
    packed = {_split_of(f): f for f in sorted([*path.glob("games_*.jsonl"), *path.glob("games_*.jsonl.xz")])}
    if packed:
        return {name: packed[name] for name in _ordered(packed)}
    root = path / DOWNLOAD if (path / DOWNLOAD).is_dir() else path
    splits: dict[str, Files] = {}
    for name in SPLITS:
        if (root / name).is_dir() and (found := _game_files(root / name)):
            splits[name] = [(f, root / name) for f in found]
    if not splits and (found := _game_files(path)):
        splits["train"] = [(f, path) for f in found]
    if not splits:
        raise TaskError(f"games: {path} has neither {FILE} files nor games_<split>.jsonl.xz.")
    return splits


def _single(path: Path) -> dict[str, Files]:
    if path.name.startswith("games_") and path.name.endswith((".jsonl", ".jsonl.xz")):
        return {_split_of(path): path}
    if path.suffix == ".tw-pddl":
        path = path.resolve()
        return {"train": [(path, path.parent.parent.parent)]}
    raise TaskError(f"games: {path} is neither a *.tw-pddl file nor games_<split>.jsonl.xz.")


def _split_of(file: Path) -> str:
    name = file.name.removeprefix("games_").split(".")[0]
    return ALIASES.get(name, name)


def _ordered(names: dict[str, Any]) -> list[str]:
    return [s for s in SPLITS if s in names] + sorted(set(names) - set(SPLITS))


def _game_files(root: Path) -> list[Path]:
    found = []
    for folder, below, files in os.walk(root):
        below[:] = sorted(d for d in below if not any(word in d for word in LEFT_OUT))
        found += [Path(folder, f) for f in files if f.endswith(".tw-pddl")]
    return sorted(found)


# --- one game in one file ----------------------------------------------------------------------------------------


def _card_of_file(path: Path, root: Path, split: str) -> Card:
    at = path.parent if path.name == FILE else path.with_suffix("")
    name = at.relative_to(root).as_posix()
    return Card(f"{split}/{name}", split, _type_of_file(path, name), str(path), lambda: _read_file(path))


def _type_of_file(path: Path, name: str) -> str:
    """The task type from the folder's name, as ALFRED writes it, or from the traj_data.json beside it."""
    for part in name.split("/"):
        if (kind := part.split("-", 1)[0]) in TYPES:
            return kind
    try:
        said = read_json(path.parent / "traj_data.json").get("task_type")
    except (OSError, ValueError, AttributeError):
        return ""
    return said if isinstance(said, str) else ""


def _read_file(path: Path) -> Texts:
    try:
        value = read_json(path)
    except OSError as problem:
        raise DataError(f"cannot be read ({problem.strerror}).", path) from None
    except ValueError as problem:
        raise DataError(f"is not JSON: {problem}.", path, getattr(problem, "lineno", None)) from None
    if not isinstance(value, dict):
        raise DataError("must be an object with pddl_domain, grammar and pddl_problem.", path)
    domain, grammar, problem = (_text(value, k, path) for k in ("pddl_domain", "grammar", "pddl_problem"))
    return Texts(domain, grammar, problem, _walkthrough(value, path), _solvable(value, path))


def _text(value: dict[str, Any], key: str, path: Path, line: int | None = None) -> str:
    found = value.get(key)
    if not isinstance(found, str) or not found:
        raise DataError(
            "is missing." if key not in value else f"must be text, not {repr(found)[:40]}.", path, line, key
        )
    return found


def _walkthrough(value: dict[str, Any], path: Path, line: int | None = None) -> tuple[str, ...]:
    found = value.get("walkthrough") or []
    if not isinstance(found, list) or not all(isinstance(w, str) for w in found):
        raise DataError(f"must be a list of commands, not {repr(found)[:40]}.", path, line, "walkthrough")
    return tuple(found)


def _solvable(value: dict[str, Any], path: Path, line: int | None = None) -> bool | None:
    found = value.get("solvable")
    if found is not None and not isinstance(found, bool):
        raise DataError(f"must be true or false, not {repr(found)[:40]}.", path, line, "solvable")
    return found


# --- many games in one file --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Packed:
    """A row, kept small: its problem is compressed. `shared` holds the domain and the grammar of all rows."""

    shared: tuple[str, str]
    goal: str
    problem: bytes
    walkthrough: tuple[str, ...]
    solvable: bool | None

    def read(self) -> Texts:
        domain, grammar = self.shared
        problem = zlib.decompress(self.problem).decode()
        return Texts(domain, grammar.replace(UNKNOWN, self.goal), problem, self.walkthrough, self.solvable)


LONGEST, MOST_SKIPPED = 64 << 20, 100_000  # bytes of a line, and lines that hold no game
UNKNOWN = "UNKNOWN GOAL"  # the placeholder for the task's sentence in the shared grammar


def _packed_cards(path: Path, split: str, skipped: dict[str, str]) -> Iterator[Card]:
    shared = _beside(path, ".pddl"), _beside(path, ".twl2")
    try:
        with open_plain(path) as file, lzma.open(file) if path.suffix == ".xz" else file as lines:
            for n, line in enumerate(iter(lambda: lines.readline(LONGEST + 1), b""), 1):
                try:
                    yield _packed_card(line, path, n, split, shared)
                except DataError as problem:
                    skipped[f"{path}:{n}"] = str(problem)
                if len(line) > LONGEST or len(skipped) > MOST_SKIPPED:
                    raise DataError("is no file of games: a line has no end, or most lines hold no game.", path, n)
    except (OSError, EOFError, lzma.LZMAError) as problem:
        raise DataError(f"cannot be read: {getattr(problem, 'strerror', None) or problem}.", path) from None


def _packed_card(line: bytes, path: Path, n: int, split: str, shared: tuple[str, str]) -> Card:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"is not JSON: {problem}.", path, n) from None
    if not isinstance(row, dict):
        raise DataError("must be an object.", path, n)
    task, trial, goal, problem = (_text(row, k, path, n) for k in ("task", "trial", "task_desc", "pddl_problem"))
    packed = zlib.compress(problem.encode(), 1)
    kept = _Packed(shared, goal, packed, _walkthrough(row, path, n), _solvable(row, path, n))
    kind, sure = row.get("task_type"), kept.solvable is not False and bool(kept.walkthrough)
    kind = kind if isinstance(kind, str) else ""
    return Card(f"{split}/{task}/{trial}", split, kind, f"{path}:{n}", kept.read, sure)


def _beside(path: Path, suffix: str) -> str:
    found = sorted(path.parent.glob(f"*{suffix}"))
    if len(found) != 1:
        what = {".pddl": "domain", ".twl2": "grammar"}[suffix]
        raise DataError(f"needs one *{suffix} file beside it, the {what} of its games; there are {len(found)}.", path)
    try:
        return str(read_plain(found[0]), "utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"cannot be read: {problem}.", found[0]) from None
