"""The errors a person can cause. The command line prints their one sentence and exits with their code: 2, or 1 where
the work itself failed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar


class TrailmarkError(Exception):
    """A user's mistake: the message says where it is and what to do. It is never used for bugs of ours."""

    code: ClassVar[int] = 2  # the exit code of the command


class RecipeError(TrailmarkError):
    """A recipe that cannot be run: unknown key, wrong type, missing value."""


class DataError(TrailmarkError):
    """A file that cannot be read, or has the wrong content."""

    def __init__(self, message: str, file: str | Path | None = None, line: int | None = None, key: str | None = None):
        where = "" if file is None else f"{file}{'' if line is None else f':{line}'}: "
        super().__init__(where + (f"key '{key}': " if key else "") + message)
        self.text, self.file, self.line, self.key = message, file, line, key


class ModelError(TrailmarkError):
    """A model that cannot be loaded, or does not fit the recipe."""


class TaskError(TrailmarkError):
    """A task that breaks the protocol of `tasks/base.py`, or whose options are wrong."""


class JudgeError(TrailmarkError):
    """A reward function or a judge that gives no usable verdict."""


class JudgeGone(JudgeError):
    """A judge behind a server that cannot be reached or refuses. `made` is what it answered, None where it did not."""

    code = 1

    def __init__(self, message: str, made: Sequence[Any] = ()):
        super().__init__(message)
        self.made = made


class RunError(TrailmarkError):
    """A run directory that exists, is incomplete, or belongs to another recipe."""


class DiskFull(RunError):
    """There is no room for a file."""

    code = 1


class RunBusy(RunError):
    """A run directory that another process is using."""


class LearnError(TrailmarkError):
    """Training cannot go on: loss is not a number, a batch trains nothing."""


class Unfinished(TrailmarkError):
    """Work that could not be finished: a server, a judge or a world failed. The input may be right."""

    code = 1


def shorten(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3] + "…"


def first_line(problem: BaseException) -> str:
    """What an error of another library says in its first line, or its kind."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0][:200].rstrip(".")


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for the closest known name, or the list of known names when nothing is close."""
    names = sorted(known)
    if not names:
        return ""
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else f" Known: {', '.join(names)}."
