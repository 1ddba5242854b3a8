"""The checkpoint folders of a run: which are complete, and which may be deleted. `learn/checkpoint.py` writes and reads
them."""

from __future__ import annotations

import shutil
from pathlib import Path

from trailmark.fault_points import point
from trailmark.runs.store import Run

EXTRA = "extra"  # file in a checkpoint that the clock or a signal made


def numbered(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("[0-9]*") if p.name.isdecimal() and p.is_dir()), key=lambda p: int(p.name))


def listed(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return [p for p in numbered(folder) if is_checkpoint(p)]


def is_checkpoint(folder: Path) -> bool:
    return (folder / "state.json").is_file()


def is_run(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file() or (folder / "checkpoints").is_dir()


def prune(folder: Path, keep_last: int, best: list[int], extra: bool = False) -> None:
    """Delete all checkpoints but the newest and the best ones. With `extra`, the extra ones are not counted, and one
    stays only while it is the newest of all. Each is renamed first, so that a half-deleted one is not listed. Only the
    link is deleted of a link."""
    every = listed(folder)
    others = [p for p in every if extra and (p / EXTRA).is_file()]
    counted = [p for p in every if p not in others]
    for path in [*counted[:-keep_last], *(p for p in others if p != every[-1])]:
        if int(path.name) not in best:
            gone = path.with_name(f".{path.name}.partial")
            if path.is_symlink():  # what it leads to is not ours to delete
                path.unlink()
                continue
            path.rename(gone)
            point("checkpoint.pruned")
            shutil.rmtree(gone)


def sweep(folder: Path) -> None:
    """Delete what a killed process left unfinished."""
    for path in folder.glob(".*.partial"):
        path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)


def prune_run(run: str | Path, keep: int = 1) -> int:
    """Delete all but the newest `keep` checkpoints of a run that no process trains. Returns the number of freed bytes.
    This does not check whether another run starts from a deleted checkpoint: prune the last run of a chain first."""
    with Run.open(run, lock=True) as held:
        before = _bytes(held.checkpoints_dir)
        prune(held.checkpoints_dir, keep, [])
        return before - _bytes(held.checkpoints_dir)


def _bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
