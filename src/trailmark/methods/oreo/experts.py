"""Published expert plays of ALFWorld as conversations, to imitate or to learn from beside a policy's own plays.

    {"conversations": [{"role", "content"}, …], "reward": 1}      a line per play: format `agent` of `method: oreo`

Every play is repeated in the game, in the words of the task (mode text, its dialect, its opening). So the conversation
is what a policy of that task is shown. A play whose game is missing, or that is not won here, is left out and counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trailmark.data.output_paths import new_file
from trailmark.errors import DataError, TrailmarkError
from trailmark.formats.rows import json_lines
from trailmark.runs.atomic_files import atomic_write
from trailmark.tasks.alfworld.source import Alfworld
from trailmark.tasks.alfworld.trajectories import Trajectory, game_names, read_trajectories, replies


def make(path: Path, out: Path, source: Alfworld, limit: int | None = None) -> tuple[int, dict[str, int]]:
    """Write the plays. Returns their number, and why others were left out. An existing `out` is never overwritten."""
    new_file(out)
    if source.mode != "text":
        raise TrailmarkError("data experts writes conversations: leave out mode, or set mode=text.")
    names, rows, left = game_names(source.games), [], {"without a game": 0, "not won": 0}
    for t in read_trajectories(path).trajectories:
        if limit is not None and len(rows) >= limit:
            break
        id = names.get(t.game)
        if id is None:
            left["without a game"] += 1
            continue
        messages, won = conversation(t, id, source)
        if won:
            rows.append({"conversations": messages, "reward": 1})
        left["not won"] += not won
    if not rows:
        raise DataError(f"none of its plays is won in {source.games.path} ({left}).", path)
    atomic_write(out, json_lines(rows))
    return len(rows), {why: n for why, n in left.items() if n}


def conversation(t: Trajectory, id: str, source: Alfworld) -> tuple[list[dict[str, Any]], bool]:
    """The messages of one play, up to the expert's last one, and whether it is won."""
    world = source.make()
    observed = world.reset(source.task(id)).text
    messages: list[dict[str, Any]] = list(source.first_messages)
    won = False
    for move in t.moves:
        if world.over:
            break
        (reply,) = replies(move, source, world)
        messages += [{"role": "user", "content": observed}, {"role": "assistant", "content": reply}]
        step = world.step(reply)
        observed, won = step.observation.text, bool(step.info["won"])
    return messages, won
