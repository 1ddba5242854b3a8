"""Published expert plays: read, and checked by playing them again. `data/expert_episodes.py` makes episodes of them.

    told = read_trajectories("expert_trajs_train.jsonl.xz")
    print(check(told.trajectories, Games("data/alfworld")))    # how many win again, how many differ, and where

A file is a list or lines, plain or .xz, of {conversations: [{from: human|gpt, value}] or [{role, content}], …}. `task`
and `trial`, or a `game_file` (or `id`) with `…/task/trial_…` in it, name the game. The play begins at the last user
message that states a task; instructions and examples before it are left out. The expert's messages are a bare command,
or "Thought: …" and "Action: <command>".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.formats.rows import Row
from trailmark.tasks.alfworld.dialect import Dialect, command_in, observation_in
from trailmark.tasks.alfworld.games import Games
from trailmark.tasks.alfworld.source import WELCOME, Alfworld, AlfworldWorld, parse_action
from trailmark.tasks.row_files import file_text, read_value

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SHOWN = 5  # differences that a report prints

_TRIAL = re.compile(r"([^/\\]+)[/\\](trial_[^/\\]+)")
_PREFIX = re.compile(r"^Observation: ?")


@dataclass(frozen=True, slots=True)
class Move:
    """The expert's message, the command in it, and the observation after it (None: not recorded)."""

    said: str
    command: str
    seen: str | None


@dataclass(frozen=True, slots=True)
class Trajectory:
    game: str  # task/trial
    first: str  # the first observation, without the welcome
    moves: tuple[Move, ...]
    where: str

    @property
    def dialect(self) -> Dialect:
        """The dialect, by the words that occur. Only the older games never write "You arrive at"."""
        texts = [m.command for m in self.moves] + [m.seen or "" for m in self.moves]
        older = any(re.match(r"put .* in/on |You put ", t) for t in texts)
        newer = any(re.match(r"move .* to |You move |You arrive at (?!loc )", t) for t in texts)
        return "move" if newer and not older else "put"


@dataclass(frozen=True, slots=True)
class Told:
    """The contents of a file; `skipped` says what was wrong with the rows left out."""

    trajectories: list[Trajectory]
    skipped: tuple[str, ...] = ()


# --- reading -----------------------------------------------------------------------------------------------------


def read_trajectories(path: str | Path, skip_bad: bool = False) -> Told:
    """Read a file. The first row that cannot be read is a DataError, unless `skip_bad` leaves it out."""
    path, made, wrong = Path(path), [], []
    for row in _rows(path):
        try:
            made.append(_trajectory(row))
        except DataError as problem:
            if not skip_bad:
                raise
            wrong.append(str(problem))
    if not made:
        raise DataError(f"no row can be used; the first: {wrong[0]}" if wrong else "holds no rows.", path)
    return Told(made, tuple(wrong))


def _rows(path: Path) -> Iterator[Row]:
    """The rows; lines are not parsed yet, so that a bad one can be left out."""
    text = file_text(path)
    if text.lstrip()[:1] == "[":
        yield from (Row(value, path, None, i) for i, value in enumerate(read_value(text, path, None)))
    else:
        yield from (Row(line, path, n) for n, line in enumerate(text.split("\n"), 1) if line.strip())


def _trajectory(row: Row) -> Trajectory:
    value = row.value if row.item is not None else read_value(row.value, row.file, row.line)
    item = row.fields(value, "", ["conversations"])
    listed = row.listed(item["conversations"], "conversations")
    talk = [_message(row, m, f"conversations[{k}]") for k, m in enumerate(listed)]
    starts = [k for k, (role, text) in enumerate(talk) if role == "user" and "Your task is to:" in text]
    if not starts:
        raise row.bad("has no message of the user that says 'Your task is to: …'.", "conversations")
    first = _PREFIX.sub("", talk[starts[-1]][1]).removeprefix(WELCOME)
    where = f"{row.file}:{row.line}" if row.line else f"{row.file}[{row.item}]"
    return Trajectory(_game(row, item), first, tuple(_moves(row, talk, starts[-1] + 1)), where)


def _message(row: Row, value: Any, key: str) -> tuple[str, str]:
    roles = isinstance(value, dict) and "role" in value
    who, what = ("role", "content") if roles else ("from", "value")
    m = row.fields(value, key, [who, what])
    role, text = row.text(m[who], f"{key}.{who}"), row.text(m[what], f"{key}.{what}")
    if role not in ROLES:
        raise row.bad(f"is '{role}', which is neither human nor gpt.", f"{key}.{who}")
    return ROLES[role], text


def _moves(row: Row, talk: Sequence[tuple[str, str]], start: int) -> Iterator[Move]:
    worded = any("Action:" in text for role, text in talk[start:] if role == "assistant")
    for k in range(start, len(talk), 2):
        role, said = talk[k]
        if role != "assistant":
            raise row.bad("is not from the expert, though it is the expert's turn.", f"conversations[{k}]")
        command = parse_action(said) if worded else said.strip()
        if not command:
            raise row.bad("has no 'Action: …'.", f"conversations[{k}]")
        seen = _PREFIX.sub("", talk[k + 1][1]) if k + 1 < len(talk) else None
        yield Move(said, command, seen)


def _game(row: Row, item: dict[str, Any]) -> str:
    if "task" in item and "trial" in item:
        return f"{row.text(item['task'], 'task')}/{row.text(item['trial'], 'trial')}"
    for key in ("game_file", "gamefile", "id"):
        if isinstance(item.get(key), str) and (found := _TRIAL.search(item[key])):
            return f"{found[1]}/{found[2]}"
    raise row.bad("needs 'task' and 'trial', or a 'game_file' with …/task/trial_… in it, to say which game was played.")


# --- playing again -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replay:
    """One trajectory, played again. `at` is the first move (from 1; 0: the first observation) after which the
    observation differs from `told`."""

    trajectory: Trajectory
    known: bool  # whether its game was found
    won: bool = False
    at: int | None = None
    told: str = ""
    seen: str = ""


@dataclass
class Check:
    """The result for all trajectories; `str(check)` is a text for people."""

    replays: list[Replay] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        known = [r for r in self.replays if r.known]
        return {
            "trajectories": len(self.replays),
            "without a game": len(self.replays) - len(known),
            "won": sum(r.won for r in known),
            "same in every word": sum(r.at is None for r in known),
            "different": sum(r.at is not None for r in known),
        }

    def __str__(self) -> str:
        lines = [f"{n} {what}" for what, n in self.counts.items()]
        for r in [r for r in self.replays if r.at is not None][:SHOWN]:
            lines += [f"{r.trajectory.where}: move {r.at}", f"  told {r.told!r}", f"  seen {r.seen!r}"]
        return "\n".join(lines)


def check(trajectories: Iterable[Trajectory], games: Games) -> Check:
    """Play every trajectory again, and compare word for word."""
    names = game_names(games)
    return Check([replay(t, games, names) for t in trajectories])


def game_names(games: Games) -> dict[str, str]:
    """task/trial, as trajectories name a game -> its id."""
    return {id.partition("/")[2]: id for split in reversed(games.splits) for id in games.cards(split)}


def replay(t: Trajectory, games: Games, names: dict[str, str] | None = None) -> Replay:
    id = (game_names(games) if names is None else names).get(t.game)
    if id is None:
        return Replay(t, False)
    play, native, dialect = games.game(id).start(), games.dialect(id), t.dialect
    at, told, found = _compare(0, t.first, play.observation.removeprefix(WELCOME))
    for k, move in enumerate(t.moves, 1):
        command = command_in(native, move.command)
        seen = observation_in(dialect, play.step(command), command)
        if at is None and move.seen is not None:
            at, told, found = _compare(k, move.seen, seen)
    return Replay(t, True, play.won, at, told, found)


def _compare(at: int, told: str, seen: str) -> tuple[int | None, str, str]:
    return (None, "", "") if told == seen else (at, told, seen)


# --- in the words of a policy -----------------------------------------------------------------------------------


def replies(move: Move, source: Alfworld, world: Any) -> Iterator[str]:
    """The answers that a policy of this source would give for a move: a text, or labels (page turns come first)."""
    command = command_in(source.dialect, move.command)
    if source.mode == "text":
        thought, worded, rest = move.said.partition("Action:")
        after = "".join(rest.partition("\n")[1:])
        yield f"{thought}Action: {command}{after}" if worded else f"Action: {command}"
        return
    assert isinstance(world, AlfworldWorld)
    while True:
        label, found = world.way_to(command)
        yield label
        if found:
            return
