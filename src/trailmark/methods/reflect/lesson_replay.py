"""Show recorded decisions again in the world of the recipe: lessons must be what play shows.

A play that was recorded from its first step (taxi, ALFWorld) is repeated, action by action. Every state and every list
of actions must equal the recorded one. Labels may differ, because they come from the policy's tokenizer.

AutoExplore limits the shown part of a file by the policy's tokens, so its recorded text belongs to another tokenizer.
Its walks are repeated from the records beside the lessons, and what the world shows now becomes the lesson.

If something differs, the error says how many lessons differ, the first of them, and the options to set.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trailmark.errors import RecipeError, TaskError, TrailmarkError
from trailmark.methods.reflect.decisions import Decision
from trailmark.tasks.base import Observation
from trailmark.types import Task

# Options of the three worlds that change no text (if the rules are shown, they mention most of them).
UNSEEN = {
    "horizon", "mode", "step_cost", "expert", "games", "first_bump_fatal", "malformed", "task_types", "only", "game",
    "labels",
}  # fmt: skip
TOLD_BY_RULES = {"horizon", "mode", "first_bump_fatal"}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A lesson that the world does not show, and how it differs."""

    decision: Decision
    why: str


def replay_lessons(path: Path, decisions: Sequence[Decision], source: Any) -> list[Decision]:
    """The decisions as `source` shows them. A RecipeError if it shows something else."""
    folder = path if path.is_dir() else path.parent
    if source.name == "auto-explore":
        made = _walked_again(folder, source)
        return list(decisions) if made is None else made
    plays: dict[tuple[str, str], list[Decision]] = {}
    for d in decisions:
        plays.setdefault((d.task, d.trajectory), []).append(d)
    starts = _starts(source, folder, list(dict.fromkeys(d.task for d in decisions)))
    out, odd = [], []
    for play in plays.values():
        kept, strange = _played_again(sorted(play, key=lambda d: d.step), starts.get(play[0].task), source)
        out += kept
        odd += strange
    if odd:
        raise RecipeError(mismatch_message(odd, len(decisions), path, source))
    return out


def _played_again(play: Sequence[Decision], task: Task | None, source: Any) -> tuple[list[Decision], list[Mismatch]]:
    """One play. Steps recorded after the horizon of this world are kept, because this world's states lead to them."""
    if task is None:
        return [], [Mismatch(d, "this task has no such start") for d in play]
    kept: list[Decision] = []
    odd: list[Mismatch] = []
    world = source.make()
    try:
        seen, step = world.reset(task), None
        for k, d in enumerate(play):
            if d.step != k:
                return kept, [*odd, *(Mismatch(x, f"step {k} of its play is missing") for x in play[k:])]
            if step is not None and step.over:
                if step.truncated and kept:
                    return [*kept, *play[k:]], odd
                return kept, [*odd, *(Mismatch(x, "the play is over by then") for x in play[k:])]
            if why := _difference(d, seen):
                odd.append(Mismatch(d, why))
            else:
                kept.append(_relabelled(d, seen))
            command = d.command()
            if command not in seen.actions:
                return kept, [*odd, *(Mismatch(x, f"'{command}' cannot be done before it") for x in play[k + 1 :])]
            step = world.step(seen.labels[seen.actions.index(command)])
            seen = step.observation
    except TaskError as problem:
        left = play[len(kept) + len(odd) :]
        return kept, [*odd, *(Mismatch(x, f"the world refuses it ({problem})") for x in left)]
    return kept, odd


def _difference(d: Decision, seen: Observation) -> str:
    """The first difference between a lesson and what is shown, as a sentence; "" if only labels differ."""
    from trailmark.tasks.labels import relabel

    if d.state != seen.state:
        return _parting(d.state, seen.state)
    if d.actions != seen.actions:
        return f"it lists {len(d.actions)} actions, and the task lists {len(seen.actions)}"
    menu = d.menu if d.labels == seen.labels else relabel(d.menu, dict(zip(d.labels, seen.labels)))
    return "" if menu == seen.menu else _parting(menu, seen.menu)


def _parting(lesson: str, now: str) -> str:
    a, b = lesson.splitlines(), now.splitlines()
    k = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    has, shows = (repr(lines[k][:60]) if k < len(lines) else "no more lines" for lines in (a, b))
    return f"it has {has} where the task shows {shows}"


def _relabelled(d: Decision, seen: Observation) -> Decision:
    now = dict(zip(d.labels, seen.labels))
    return replace(d, state=seen.state, menu=seen.menu, labels=seen.labels, action=now[d.action], oracle=now[d.oracle])


def mismatch_message(odd: Sequence[Mismatch], total: int, path: Path, source: Any) -> str:
    first = odd[0]
    sentence = (
        f"{len(odd)} of {total} lessons of {path} are not what task '{source.name}' shows with the options of this "
        f"recipe, so play would never ask what they teach. The first is step {first.decision.step} of "
        f"'{first.decision.task}': {first.why}."
    )
    recorded, now = other_options(path if path.is_dir() else path.parent, source)
    if not recorded:
        return sentence
    keys = " ".join(f"task.options.{k}={_word(v)}" for k, v in recorded.items())
    options = " ".join(f"{k}={_word(v)}" for k, v in now.items())
    return f"{sentence} They were made with other options: set {keys}, or make lessons with {options}."


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def other_options(folder: Path, source: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that change what is shown and that differ: the values of the lessons, and those of `source`."""
    settings = _settings(folder)
    if settings.get("kind") != source.name or not isinstance(settings.get("options"), dict):
        return {}, {}
    known = inspect.signature(type(source)).parameters
    skipped = UNSEEN - (TOLD_BY_RULES if getattr(source, "rules", False) else set())
    theirs = {k: settings["options"].get(k, p.default) for k, p in known.items() if k not in skipped}
    other = {k: v for k, v in theirs.items() if hasattr(source, k) and getattr(source, k) != v}
    return other, {k: getattr(source, k) for k in other}


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of a folder made by `trailmark data`. In a folder made in stages, the lessons lie one level
    deeper."""
    from trailmark.data.stages import read_json

    for place in (folder / "settings.json", folder.parent / "settings.json"):
        if place.is_file():
            found = read_json(place)
            return found if isinstance(found, dict) else {}
    return {}


# --- starts by their names -----------------------------------------------------------------------------------------


def _starts(source: Any, folder: Path, ids: Sequence[str]) -> Mapping[str, Task]:
    """The starts that the lessons name, as far as `source` has them."""
    if source.name == "taxi":
        return _taxi_starts(ids)
    if source.name == "alfworld":
        seed = _settings(folder).get("seed", 0)
        found = {id: _game_start(source, id, seed if type(seed) is int else 0) for id in ids}
        return {id: task for id, task in found.items() if task is not None}
    tasks: dict[str, Task] = {}
    for split in ("all", "train"):
        with contextlib.suppress(TaskError):
            tasks |= {t.id: t for t in source.tasks(split)}
    return tasks


def _taxi_starts(ids: Sequence[str]) -> dict[str, Task]:
    """The name of a start says how it was drawn, and the first draws do not depend on how many follow."""
    from trailmark.tasks.taxi import Taxi

    wanted: dict[tuple[Any, str, int], int] = {}
    for id in ids:
        if named := re.fullmatch(r"taxi-(pickup|dropoff|full)-(train|test|all)-(?:(-?\d+)-)?(\d{1,6})", id):
            draw = named[1], named[2], int(named[3] or 0)
            wanted[draw] = max(wanted.get(draw, 0), int(named[4]) + 1)
    return {t.id: t for (mode, split, seed), n in wanted.items() for t in Taxi(mode).tasks(split, n, seed)}


def _game_start(source: Any, id: str, seed: int) -> Task | None:
    game, _, number = id.removeprefix("alfworld/").partition("~")
    try:
        return source.task(game, seed, int(number or 1))
    except (TrailmarkError, KeyError, ValueError):
        return None


# --- walks in repositories -----------------------------------------------------------------------------------------


def _walked_again(folder: Path, source: Any) -> list[Decision] | None:
    """All walks of the records beside the lessons, in their whole repositories, as `source` shows them; None if there
    are no records. The horizon is never shown, so that of the records is used."""
    from trailmark.methods.reflect.explore.explorer import Explorer
    from trailmark.methods.reflect.explore.records import read_records
    from trailmark.methods.reflect.explore.replay import replay

    home = folder.parent if folder.name == "sft" and not (folder / "train.jsonl").is_file() else folder
    records, repos = home / "train.jsonl", home / "repos"
    if not records.is_file() or not repos.is_dir():
        return None
    horizon = _settings(folder).get("horizon", 15)
    explorer = Explorer(repos, records, horizon if type(horizon) is int else 15, None, source.shuffle_labels)
    explorer.source.limits, explorer.source.labels = source.limits, source.labels
    explorer.source.easy = source.easy
    made, counts = replay(explorer, read_records(records))
    if left := counts.left_out.total():
        raise RecipeError(
            f"{left} of {left + counts.kept['walks']} walks of {records} cannot be repeated in {repos}: its files have "
            "changed. Make the lessons anew with `trailmark data auto-explore`."
        )
    return made
