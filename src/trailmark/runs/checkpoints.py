"""The checkpoint folders of a run: which are complete, and which may be deleted. `learn/checkpoint.py` writes and reads
them."""

from __future__ import annotations

import shutil
from pathlib import Path

from trailmark.fault_points import point


def numbered(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("[0-9]*") if p.name.isdecimal() and p.is_dir()), key=lambda p: int(p.name))


def listed(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return [p for p in numbered(folder) if is_checkpoint(p)]


def is_checkpoint(folder: Path) -> bool:
    return (folder / "state.json").is_file()


def is_run(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file() or (folder / "checkpoints").is_dir()


def prune(folder: Path, keep_last: int, best: list[int]) -> None:
    """Delete all checkpoints but the newest and the best ones. Each is renamed first, so that a half-deleted one is not
    listed. Of one that is a link, only the link is deleted."""
    for path in listed(folder)[:-keep_last]:
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
