"""Rows whose last part is a gold text that no verifier could judge. There are two kinds:

    a talk     {"messages": [..., {"role": "user", ...}, {"role": "assistant", "content": GOLD}]}
    a story    {"next_chapter": GOLD, "next_chapter_synopsis": ..., "story_text": ..., ...}: the nine fields of VR-CLI

The gold text is kept apart from what a prompt may show. A row's id is its `id`, or a hash of its content. So the order
of the rows does not matter, and two rows with the same synopsis stay two rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trailmark.formats.rows import Row, each

TEXTS = ("story_text", "prior_plot_summary", "high_level_plot_summary", "next_chapter_synopsis", "next_chapter_header")
FIELDS = (*TEXTS, "last_n_chapters", "character_sheets", "next_chapter", "chapter_index", "story_id")
ROLES = ("system", "user", "assistant")
MADE = ("id", "split", "prompt", "gold", "information", "plan_heading", "write", "write_from_plan", "header",
        "synopsis", "story_id", "chapter_index")  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoryRow:
    """What is known before a chapter, and the chapter. Texts that are missing are empty. `last_n_chapters` says how
    many chapters `story_text` holds: a number, None (it is not shown), or anything else (the whole story)."""

    id: str
    next_chapter: str
    story_text: str = ""
    last_n_chapters: Any = 1
    prior_plot_summary: str = ""
    high_level_plot_summary: str = ""
    character_sheets: Mapping[str, str] = field(default_factory=dict)
    next_chapter_synopsis: str = ""
    next_chapter_header: str = ""
    chapter_index: int | None = None
    story_id: str = ""
    split: str = ""
    where: str = ""  # file and line, for error messages
    more: Mapping[str, Any] = field(default_factory=dict)  # the row's other keys, for a reward of one's own

    @property
    def gold(self) -> str:
        return self.next_chapter

    @property
    def header(self) -> str:
        return self.next_chapter_header.strip()

    def sections(self) -> dict[str, str]:
        """The texts that a prompt may show, by name."""
        sheets = "\n\n".join(f"{name}\n{text}" for name, text in self.character_sheets.items())
        found = {"previous": self.story_text, "summary": self.prior_plot_summary, "plan": self.high_level_plot_summary,
                 "sheets": sheets, "synopsis": self.next_chapter_synopsis}  # fmt: skip
        return {name: text for name, text in found.items() if text.strip()}

    def plain(self) -> dict[str, Any]:
        """The row as JSON, with its id."""
        named = {"id": self.id, **{name: getattr(self, name) for name in FIELDS}}
        named["character_sheets"] = dict(self.character_sheets)
        return {**named, "split": self.split} if self.split else named

    def with_previous(self, text: str) -> StoryRow:
        return replace(self, story_text=text)

    def with_gold(self, text: str) -> StoryRow:
        return replace(self, next_chapter=text)

    def content(self) -> str:
        """The same for rows that say the same."""
        return _content(self)


@dataclass(frozen=True, slots=True)
class TalkRow:
    """A conversation that ends with a question, and the gold answer."""

    id: str
    context: tuple[Mapping[str, str], ...]
    gold: str
    story_id: str = ""
    split: str = ""
    where: str = ""
    header: str = ""
    chapter_index: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def sections(self) -> dict[str, str]:
        return {"context": "\n\n".join(m["content"] for m in self.context)}

    def with_gold(self, text: str) -> TalkRow:
        return replace(self, gold=text)

    def content(self) -> str:
        """The same for rows that say the same."""
        return _content(self)


AnyRow = StoryRow | TalkRow


def _content(row: AnyRow) -> str:
    return content_id({k: v for k, v in asdict(row).items() if k not in ("id", "split", "where")})


def read_rows(path: str | Path, dropped: list[AnyRow] | None = None) -> list[AnyRow]:
    """The rows of a file, of one kind. Errors name the file, the line and the key. With a list `dropped`, a row that
    repeats an earlier one, apart from its id and split, is put there."""
    rows, _ = each(path, read_row)
    seen: dict[str, AnyRow] = {}
    known: set[str] = set()
    for row in rows:
        if dropped is not None:
            if (said := row.content()) in known:
                dropped.append(row)
                continue
            known.add(said)
        if row.id in seen:
            same = row.content() == seen[row.id].content()
            raise Row(None, Path(path)).bad(
                f"{row.where} and {seen[row.id].where} have the same id '{row.id}': give each row an id of its own, or "
                f"remove one{' (--drop-duplicates keeps the first of equal rows)' if same else ''}."
            )
        if type(row) is not type(rows[0]):
            raise Row(None, Path(path)).bad(f"{row.where} is another kind of row than {rows[0].where}: use two files.")
        seen[row.id] = row
    return list(seen.values())


def read_row(row: Row) -> AnyRow:
    if isinstance(row.value, dict) and "messages" in row.value:
        return _talk(row)
    return _story(row)


def content_id(value: Any) -> str:
    """A name made of the content, the same for the same JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _place(row: Row) -> str:
    return f"line {row.line}" if row.line is not None else f"item {row.item}"


def _id(row: Row, value: Mapping[str, Any]) -> str:
    said = value.get("id")
    if said is None:
        return content_id({k: v for k, v in value.items() if k not in ("id", "split")})
    if isinstance(said, bool) or not isinstance(said, str | int) or said == "":
        raise row.bad(f"must be a text or a whole number, not {repr(said)[:60]}.", "id")
    return str(said)


def _talk(row: Row) -> TalkRow:
    value = row.fields(row.value, "", ["messages"], ["id", "story_id", "split"])
    messages = row.listed(value["messages"], "messages")
    for k, m in enumerate(messages):
        m = row.fields(m, f"messages[{k}]", ["role", "content"])
        for part in ("role", "content"):
            row.text(m[part], f"messages[{k}].{part}")
        if m["role"] not in ROLES:
            raise row.bad(f"must be system, user or assistant, not '{m['role']}'.", f"messages[{k}].role")
    *context, last = [{"role": m["role"], "content": m["content"]} for m in messages]
    if last["role"] != "assistant":
        raise row.bad(
            f"the last message is from '{last['role']}': it must be the gold text, from 'assistant'.", "messages"
        )
    if not last["content"].strip():
        raise row.bad("the gold text, the last message, is empty.", "messages")
    if not context or context[-1]["role"] != "user":
        raise row.bad("the message before the gold text must be from 'user': it is the question.", "messages")
    story, split = (row.text(value.get(k) or "", k) for k in ("story_id", "split"))
    more = _more(row, ("messages", "id", "story_id", "split"))
    return TalkRow(_id(row, value), tuple(context), last["content"], story, split, _place(row), more=more)


def _more(row: Row, known: Sequence[str]) -> dict[str, Any]:
    """The keys of a row that mean nothing here: they go with it. They must not have the name of what is made."""
    more = {k: v for k, v in row.value.items() if k not in known}
    if taken := next((k for k in more if k in MADE), None):
        raise row.bad("the files made of these rows have a key of this name: give yours another one.", taken)
    return more


def _story(row: Row) -> StoryRow:
    value = row.fields(row.value, "", ["next_chapter"], [*FIELDS, "id", "split"])
    texts = {k: row.text(value.get(k) or "", k) for k in (*TEXTS, "next_chapter", "story_id", "split")}
    if not texts["next_chapter"].strip():
        raise row.bad("the gold text is empty.", "next_chapter")
    sheets = value.get("character_sheets") or {}
    if not isinstance(sheets, dict) or not all(isinstance(x, str) for x in sheets.values()):
        raise row.bad(f"must be an object of names and texts, not {repr(sheets)[:60]}.", "character_sheets")
    index = value.get("chapter_index")
    if index is not None and (isinstance(index, bool) or not isinstance(index, int) or index < 0):
        raise row.bad(f"must be a whole number from 0, not {repr(index)[:60]}.", "chapter_index")
    return StoryRow(
        _id(row, value), **texts, last_n_chapters=value.get("last_n_chapters", 1), character_sheets=sheets,
        chapter_index=index, where=_place(row), more=_more(row, (*FIELDS, "id", "split")),
    )  # fmt: skip
