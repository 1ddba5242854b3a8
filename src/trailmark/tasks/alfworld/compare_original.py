"""Compare the native engine with the original: both get the same commands, and all their outputs are compared.

    record    plays the original: along the walkthrough (and one unknown command), along an errand with the rarer
              commands if a game has the things for it (slice, clean, heat, cool, examine), and along seeded random
              walks
    compare   gives a recorded walk's commands to the native engine
    check     does both for games spread over all task types

A random walk draws a verb among those on offer and then one of its commands. So opening, taking and heating are as
likely as going; `help`, `look` and `inventory` count as one verb. Compared at the start and after every command: the
text, the admissible commands in order, score, won, end, number of moves. A recording can be stored (`to_json`,
`from_json`) and compared again where the original is not installed.
"""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from trailmark.errors import DataError, TaskError
from trailmark.progress import Progress
from trailmark.tasks.alfworld.engine import Game, Play, parse_game
from trailmark.tasks.alfworld.errand import errand
from trailmark.tasks.alfworld.games import Games, Texts
from trailmark.tasks.alfworld.original import OriginalGame, OriginalPlay

UNKNOWN = "sing a song"
ORDER = ("valid_seen", "valid_train", "train", "valid_unseen")


@dataclass(frozen=True, slots=True)
class Walk:
    """The original's output: `says[0]` at the start, `says[k]` after command number k."""

    game: str
    name: str
    commands: tuple[str, ...]
    says: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


def from_json(line: str) -> Walk:
    try:
        row = json.loads(line)
        return Walk(row["game"], row["name"], tuple(row["commands"]), tuple(row["says"]))
    except (ValueError, KeyError, TypeError) as e:
        raise DataError(f"this is not a recorded walk: {e}.") from None


@dataclass(frozen=True, slots=True)
class Difference:
    game: str
    walk: str
    step: int
    command: str
    native: str
    original: str

    def __str__(self) -> str:
        at = f"{self.game} {self.walk} step {self.step} after '{self.command}'"
        a, b = self.original.split("\n"), self.native.split("\n")
        return "\n".join(difflib.unified_diff(a, b, f"original {at}", f"native {at}", lineterm="", n=1))


@dataclass(slots=True)
class Report:
    games: int = 0
    types: dict[str, int] = field(default_factory=dict)
    walks: int = 0
    moments: int = 0  # starts and commands compared
    named_by: str = ""
    differences: list[Difference] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.games > 0 and not self.differences

    def __str__(self) -> str:
        types = ", ".join(f"{k} {v}" for k, v in sorted(self.types.items()))
        return "\n".join(
            [
                *(f"{d}\n" for d in self.differences),
                f"{self.games} games ({types}), {self.walks} walks, {self.moments} moments; names by {self.named_by}",
                "all equal" if self.ok else f"{len(self.differences)} differences",
            ]
        )


def check(games: Games, n: int = 60, walks: int = 3, length: int = 30, seed: int = 0) -> Report:
    """Play `n` games in both engines."""
    chosen = choose(games, n, seed)
    report = Report()
    with Progress(len(chosen), name="worlds check alfworld") as progress:
        for done, id in enumerate(chosen, 1):
            card = games.card(id)
            texts = card.read()
            ours = parse_game(texts.domain, texts.problem, texts.grammar, id=id, where=card.where)
            with OriginalGame(texts.domain, texts.problem, texts.grammar, id=id) as theirs:
                report.named_by = theirs.named_by
                for walk in record(theirs, texts, errand(ours), walks, length, seed):
                    report.walks += 1
                    report.moments += len(walk.says)
                    report.differences += compare(walk, ours)
            report.games += 1
            report.types[card.task_type] = report.types.get(card.task_type, 0) + 1
            progress.update(done, {})
    return report


def choose(games: Games, n: int, seed: int) -> list[str]:
    """`n` games, as evenly as possible over the task types, from the splits in ORDER."""
    by_type: dict[str, list[str]] = {}
    total = 0
    for split in sorted(games.splits, key=lambda s: ORDER.index(s) if s in ORDER else len(ORDER)):
        ids = list(games.ids(split))
        random.Random(f"{seed} {split}").shuffle(ids)
        for id in ids:
            by_type.setdefault(games.card(id).task_type, []).append(id)
        total += len(ids)
        if total >= n:
            break
    if not total:
        raise TaskError(f"there is no game in {games.path}.")
    turns = [pool[k] for k in range(max(map(len, by_type.values()))) for pool in by_type.values() if k < len(pool)]
    return turns[:n]


def record(game: OriginalGame, texts: Texts, rare: Sequence[str], walks: int, length: int, seed: int) -> Iterator[Walk]:
    scripts = {"walkthrough": (*texts.walkthrough, UNKNOWN), "errand": tuple(rare)}
    for name, script in scripts.items():
        if script:
            yield _played(game, name, script, len(script), random.Random())
    for k in range(1, walks + 1):
        yield _played(game, f"walk {k}", (), length, random.Random(f"{seed} {game.id} {k}"))


def _played(game: OriginalGame, name: str, script: Sequence[str], length: int, draw: random.Random) -> Walk:
    play = game.start()
    said, commands = [says(play)], []
    for step in range(length):
        commands.append(script[step] if script else pick(play.commands(), draw))
        play.step(commands[-1])
        said.append(says(play))
    return Walk(game.id, name, tuple(commands), tuple(said))


def compare(walk: Walk, game: Game) -> Iterator[Difference]:
    """Where the native engine's output differs."""
    play = game.start()
    for step, (command, original) in enumerate(zip(("", *walk.commands), walk.says)):
        if step:
            play.step(command)
        native = says(play)
        if native != original:
            yield Difference(walk.game, walk.name, step, command, native, original)


def pick(commands: Sequence[str], draw: random.Random) -> str:
    """Draw a verb, then a command that begins with it. Commands of one word count as one verb."""
    verbs: dict[str, list[str]] = {}
    for command in commands:
        first, _, more = command.partition(" ")
        verbs.setdefault(first if more else "", []).append(command)
    return draw.choice(verbs[draw.choice(sorted(verbs))])


def says(play: Play | OriginalPlay) -> str:
    """Everything a player can see, line by line."""
    state = f"score {play.score} won {play.won} done {play.done} moves {play.moves}"
    return "\n".join([play.observation, *(f"> {c}" for c in play.commands()), state])
