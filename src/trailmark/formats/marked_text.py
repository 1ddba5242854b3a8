"""Rows of {"text": prompt + response}, where a marker ends the prompt. The markers and whether an end token follows the
response are declared (`PROVIDES["markers"]`): Reflect-RL's files are of this kind."""

from __future__ import annotations

from pathlib import Path

from trailmark import registry
from trailmark.errors import DataError
from trailmark.formats.rows import Row, RowFile

Text = tuple[int, str, str, bool]  # line, prompt, response, whether an end follows


def holds_texts(first: Row) -> bool:
    """Whether a file whose first row is `first` has such rows."""
    others = {"messages", "prompt", "response"}
    return isinstance(first.value, dict) and "text" in first.value and not first.value.keys() & others


def text_of(row: Row) -> Text:
    """A row as prompt and response. The last marker of a text says where the response begins."""
    text = row.text(row.fields(row.value, "", ["text"])["text"], "text")
    known = registry.ours("markers")
    marker = max(known, key=text.rfind)
    prompt, found, response = text.rpartition(marker)
    if not found or not response:
        listed = " nor ".join(map(repr, known))
        raise row.bad(f"has neither {listed} with text after it: what should be learnt?", "text")
    return row.line if row.line is not None else row.item or 0, prompt + found, response, known[marker]


def one_kind(thoughts: int, actions: int, path: str | Path) -> None:
    if thoughts and actions:
        raise DataError(f"holds {thoughts} reflections and {actions} actions: a file must hold only one kind.", path)


def read_texts(path: str | Path) -> list[Text] | None:
    """Every row of such a file; None if its rows are of another kind."""
    rows = RowFile(path)
    if not len(rows) or not holds_texts(rows[0]):
        return None
    out: list[Text] = []
    rows.visit(lambda _, row: out.append(text_of(row)))
    thoughts = sum(ends for _, _, _, ends in out)
    one_kind(thoughts, len(out) - thoughts, path)
    return out
