"""Checks of where a command may write, made before any work is done."""

from __future__ import annotations

import os
from pathlib import Path

from trailmark.errors import RunError


def new_file(path: Path, overwrite: bool = False) -> None:
    """Refuse a file that could not be written: it exists, it is a folder, or it lies below a file."""
    if path.is_dir():
        raise RunError(f"{path} is a folder: name a file to write.")
    if path.exists() and not overwrite:
        raise RunError(f"{path} exists: choose another file.")
    writable(path.parent)


def new_folder(path: Path) -> None:
    """Refuse a folder that exists and holds something, or that could not be made."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunError(f"{path} exists: choose another folder.")
    writable(path)


def writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to."""
    above = folder
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise RunError(f"{folder} cannot be made: {above} is not a folder.")
    if not os.access(above, os.W_OK):
        raise RunError(f"{folder} cannot be written to: {above} does not allow it.")
