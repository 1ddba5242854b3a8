"""Data formats of other projects, read into episodes and written back.

    found = read("sharegpt", "rl_data.json", tokenizer)           # found.episodes, found.annotations, found.skipped
    write("sharegpt", "again.json", found.episodes, tokenizer, annotations=found.annotations)

What an environment said is the outcome of an episode; a label given later is an annotation. A row without a reward is
`Invalid("no reward in the file")`: it is in no average, but can be trained on. A file that is read and written in the
same format keeps its values.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trailmark import registry
from trailmark.errors import DataError, nearest

if TYPE_CHECKING:
    from trailmark.formats.turns import Imported
    from trailmark.types import Annotation, Episode


@dataclass(frozen=True, slots=True)
class Format:
    """`module` has NAME_from_row and NAME_to_rows; `holds` names the annotations that a file can store."""

    module: str
    about: str
    layout: Literal["list", "lines"] = "lines"
    rewards: bool = True
    holds: tuple[str, ...] = ()
    seat: str = "policy"


@functools.cache
def known() -> Mapping[str, Format]:
    return {name: Format(**settings) for name, settings in registry.ours("formats").items()}


def find(name: str) -> Format:
    if name not in known():
        raise DataError(f"there is no format '{name}'.{nearest(name, known())}")
    return known()[name]


@functools.cache
def _function(name: str, direction: str) -> Any:
    module = importlib.import_module(find(name).module)
    return getattr(module, f"{name.replace('-', '_')}_{direction}")


def row_reader(format: str) -> Any:
    """The function (Reader, Row) -> Imported of a format of rows."""
    return _function(format, "from_row")


def read(
    format: str, path: str | Path, tokenizer: Any, *, seat: str | None = None, prefix: str = "", skip_bad: bool = False
) -> Imported:
    """Everything in a file. `seat` is the speaker, and `prefix` goes before every id. `skip_bad` leaves out rows that
    cannot be read; without it such a row refuses the file."""
    kind = find(format)
    from trailmark.formats import own_episodes, turns
    from trailmark.formats.conversations import unread
    from trailmark.formats.rows import each

    if format == "episodes":
        return own_episodes.read(path)
    reader = turns.Reader(tokenizer, seat or kind.seat, turns.Starts(prefix))
    from_row = row_reader(format)
    made, skipped = each(path, lambda row: from_row(reader, row), skip_bad, unread)
    return turns.Imported([e for m in made for e in m.episodes], [a for m in made for a in m.annotations], skipped)


def write(
    format: str,
    path: str | Path,
    episodes: Iterable[Episode],
    tokenizer: Any,
    *,
    annotations: Sequence[Annotation] = (),
    seat: str | None = None,
) -> None:
    """Write all or nothing. `seat` says whose view is written, if several seats played."""
    kind = find(format)
    from trailmark.formats import own_episodes, turns
    from trailmark.formats.rows import dump

    if format == "episodes":
        return own_episodes.write(path, episodes, annotations)
    rows = _function(format, "to_rows")(turns.Writer(tokenizer, seat, annotations), list(episodes))
    dump(path, rows, kind.layout)
