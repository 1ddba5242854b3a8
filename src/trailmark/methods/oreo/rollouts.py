"""Merge folders of agent rollouts, one JSON file per play, into one file to learn from.

    {"meta": {"reward": true, "invalid": false}, "conversations": [{"role", "content"}, …]}   3_0.json, play 0 of task 3

become lines of {"conversations", "reward": 0 or 1}, format `agent`. A user message at the end is dropped, because it
has no answer. An invalid play has reward 0. Plays of one task stay together, in the order of their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trailmark.data.output_paths import new_file
from trailmark.errors import DataError
from trailmark.formats.conversations import checked_messages
from trailmark.formats.rows import Row, json_lines
from trailmark.plain_files import read_json
from trailmark.runs.atomic_files import atomic_write


def merge(folders: Sequence[Path], out: Path, failures: bool = False) -> tuple[int, int]:
    """Write the plays of all folders (with `failures`, only lost ones). Returns how many were won, and how many there
    were."""
    new_file(out)
    plays: list[dict[str, Any]] = []
    for folder in folders:
        if not folder.is_dir():
            raise DataError("there is no such folder of rollouts.", folder)
        files = sorted(
            folder.glob("*.json"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.stem)] + [p.stem.count("_")]
        )
        if not files:
            raise DataError("holds no rollouts (files that end in .json).", folder)
        plays += [_play(_read(file)) for file in files]
    won = sum(p["reward"] for p in plays)
    kept = [p for p in plays if not (failures and p["reward"])]
    if not kept:
        raise DataError("holds no lost play.", folders[0])
    atomic_write(out, json_lines(kept))
    return won, len(plays)


def _read(path: Path) -> Row:
    try:
        return Row(read_json(path), path)
    except OSError as problem:
        raise DataError(f"cannot be read ({problem.strerror}).", path) from None
    except ValueError as problem:
        raise DataError(f"is not JSON: {problem}.", path) from None


def _play(row: Row) -> dict[str, Any]:
    v = row.fields(row.value, "", ["meta", "conversations"])
    meta = row.fields(v["meta"], "meta", ["reward"], ["invalid"])
    messages = checked_messages(row, v, "conversations")
    if messages and messages[-1]["role"] == "user":
        messages = messages[:-1]
    return {"conversations": messages, "reward": int(bool(meta["reward"]) and not meta.get("invalid"))}
