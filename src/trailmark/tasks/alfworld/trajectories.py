"""Published expert plays: read, checked by playing them again, and made into episodes.

    told = read_trajectories("expert_trajs_train.jsonl.xz")
    print(check(told.trajectories, Games("data/alfworld")))    # how many win again, how many differ, and where
    found = as_episodes(told.trajectories, Alfworld("data/alfworld", mode="text", dialect="put"), tokenizer)

A file is a list or lines, plain or .xz, of {conversations: [{from: human|gpt, value}] or [{role, content}], …}; its
game is named by `task` and `trial`, or by a `game_file` (or `id`) with `…/task/trial_…` in it. The play begins at the
last message of the user that says a task; instructions and examples before it are not part of it. What the expert
says is a bare command, or "Thought: …" and "Action: <command>".

An episode is the same play in the task's own mode and dialect: the world is asked again, so its prompts, rewards and
end are those of a policy that had said the same, token by token. A log-probability is not known and not made up.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trailmark.errors import DataError, TaskError
from trailmark.formats.rows import Row
from trailmark.run_async import wait
from trailmark.tasks.alfworld.dialect import Dialect, command_in, observation_in
from trailmark.tasks.alfworld.games import Games
from trailmark.tasks.alfworld.source import WELCOME, Alfworld, AlfworldWorld, parse_action
from trailmark.types import Episode, Failed, Invalid, Player, Scored

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SHOWN = 5  # differences that a report prints

_TRIAL = re.compile(r"([^/\\]+)[/\\](trial_[^/\\]+)")
_PREFIX = re.compile(r"^Observation: ?")


@dataclass(frozen=True, slots=True)
class Move:
    """What the expert said, the command in it, and what was seen then (None: not told)."""

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
        """By what is said in it: only the older games never say that one arrives."""
        texts = [m.command for m in self.moves] + [m.seen or "" for m in self.moves]
        older = any(re.match(r"put .* in/on |You put ", t) for t in texts)
        newer = any(re.match(r"move .* to |You move |You arrive at (?!loc )", t) for t in texts)
        return "move" if newer and not older else "put"


@dataclass(frozen=True, slots=True)
class Told:
    """What a file held; `skipped` says what was wrong with the rows left out."""

    trajectories: list[Trajectory]
    skipped: tuple[str, ...] = ()


# --- reading -----------------------------------------------------------------------------------------------------


def read_trajectories(path: str | Path, skip_bad: bool = False) -> Told:
    """All that a file holds; a DataError for the first row that cannot be read, unless `skip_bad` leaves it out."""
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
    try:
        raw = path.read_bytes()
        text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8-sig")
    except OSError as problem:
        raise DataError(f"cannot be read ({problem.strerror}).", path) from None
    except (lzma.LZMAError, UnicodeDecodeError) as problem:
        raise DataError(f"cannot be read: {problem}.", path) from None
    if text.lstrip()[:1] == "[":
        for i, value in enumerate(_parse(text, path, None)):
            yield Row(value, path, None, i)
    else:
        for n, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield Row(line, path, n)


def _parse(text: str, path: Path, line: int | None) -> Any:
    try:
        return json.loads(text)
    except ValueError as problem:
        raise DataError(f"is not JSON: {problem}.", path, line) from None


def _trajectory(row: Row) -> Trajectory:
    value = row.value if row.item is not None else _parse(row.value, row.file, row.line)
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
    """One trajectory, played again. `at` is the first move (from 1; 0: the first observation) after which something
    else is seen than was `told`."""

    trajectory: Trajectory
    known: bool  # whether its game is there
    won: bool = False
    at: int | None = None
    told: str = ""
    seen: str = ""


@dataclass
class Check:
    """`str(check)` is for people."""

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
    """Play every one again, and compare word for word."""
    names = game_names(games)
    return Check([replay(t, games, names) for t in trajectories])


def game_names(games: Games) -> dict[str, str]:
    """The id of each game by task/trial, as trajectories name them."""
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


# --- as episodes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Made:
    """`skipped` says which trajectories could not be played, and why."""

    episodes: list[Episode]
    skipped: tuple[str, ...] = ()


def as_episodes(
    trajectories: Iterable[Trajectory],
    source: Alfworld,
    tokenizer: Any,
    *,
    seat: str = "policy",
    suffix: str = "",
    prefix: str = "",
) -> Made:
    """The same plays in the mode and dialect of `source`. With labels, `suffix` stands behind each prompt as in
    `solo`. A play that the horizon cuts off is `truncated`, as it would be for a policy; so is one that ends before
    it is won."""
    names, numbers = game_names(source.games), dict[str, int]()
    episodes, skipped = [], []
    for t in trajectories:
        id = names.get(t.game)
        if id is None:
            skipped.append(f"{t.where}: there is no game '{t.game}' in {source.games.path}.")
            continue
        number = numbers[id] = numbers.get(id, -1) + 1
        made = _episode(t, id, source, tokenizer, seat, suffix, (prefix, number))
        if isinstance(made.outcome, Failed):
            raise TaskError(f"{t.where}: {made.outcome.error}")
        episodes.append(made)
    return Made(episodes, tuple(skipped))


def _episode(
    t: Trajectory, id: str, source: Alfworld, tokenizer: Any, seat: str, suffix: str, name: tuple[str, int]
) -> Episode:
    from trailmark.engines.scripted import ScriptedEngine
    from trailmark.rollout.play import Desk, Seat, Start, play_all

    voice: list[str] = []
    total = [0.0]
    actor = Seat(seat, ScriptedEngine(lambda prompt, draw: voice.pop(), tokenizer), max_tokens=1 << 20, kind="scripted")

    async def act(desk: Desk, said: str) -> None:
        voice.append(said)
        if source.mode == "labels":
            turn = await desk.ask(seat, text=desk.observation.text + suffix, allowed=desk.observation.labels)
        else:
            opening = source.first_messages if not desk.turns else []
            turn = await desk.ask(seat, messages=[*opening, {"role": "user", "content": desk.observation.text}])
        total[0] += (await desk.act(turn.text)).paid()[0]

    async def tell(desk: Desk) -> None:
        for move in t.moves:
            for said in replies(move, source, desk.world):
                if desk.over:
                    return
                await act(desk, said)

    task = source.task(id)
    start = Start(task, f"{name[0]}{task.id}", f"{name[0]}{task.id}/{name[1]}")
    (made,) = wait(play_all(source, [start], [actor], tell))
    turns = tuple(replace(turn, logp=(), logq=()) for turn in made.turns)
    made = replace(made, turns=turns, players={seat: Player("scripted", "expert trajectory")}, info={"from": t.where})
    if isinstance(made.outcome, Invalid):  # it stopped before the world did
        return replace(made, outcomes={"self": Scored(total[0], False)}, truncated=True)
    return made


def replies(move: Move, source: Alfworld, world: Any) -> Iterator[str]:
    """What a policy of this source would have had to say: a text, or labels (turning pages comes first)."""
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
