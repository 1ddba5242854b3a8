"""What the model names of a run's recipe stood for when the run began."""

from __future__ import annotations

from pathlib import Path

from trailmark.errors import DataError
from trailmark.plain_files import read_json

MODELS = "models.json"  # file in a run: the folders that the model names of its recipe stood for


def read_models(run: Path) -> dict[str, dict[str, str]]:
    """What the model names of a run's recipe stood for when the run began (`seats/pinned_models.py` writes this file).
    Empty if no name had to be pinned."""
    file = run / MODELS
    if not file.is_file():
        return {}
    try:
        found = read_json(file)
    except (OSError, ValueError) as problem:
        raise DataError(f"cannot be read ({problem}).", file) from None
    if not isinstance(found, dict) or not all(
        isinstance(v, dict) and {"name", "folder"} <= v.keys() for v in found.values()
    ):
        raise DataError("must hold a name and a folder for each key of the recipe.", file)
    return found
