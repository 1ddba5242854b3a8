"""Recorded visits of people (the original's logs) as actions. The pages that they saw are not in the logs, and the
products that they bought may be in another catalogue: a visit holds its goal, its actions, and what was paid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.formats.rows import Row
from trailmark.tasks.row_files import file_rows
from trailmark.tasks.webshop import pages

SUB_PAGE = "item_sub_page"


@dataclass(frozen=True, slots=True)
class Visit:
    id: str
    goal: Mapping[str, Any]  # a row of goals, as `goals.py` reads it
    actions: tuple[str, ...]
    bought: Mapping[str, Any]  # asin, options and price; empty if nothing was bought
    reward: float | None  # None: nothing was bought
    parts: Mapping[str, Any]  # of the reward, as the original logged them


def read_visits(path: str | Path) -> list[Visit]:
    """The visits of a file, one in each row: {"session", "events": [{"page", "goal", "content", …}]}."""
    found = [_visit(row) for row in file_rows(Path(path))]
    if not found:
        raise DataError("holds no visits.", path)
    return found


def _visit(row: Row) -> Visit:
    value = row.fields(row.value, "", ("session", "events"))
    actions: list[str] = []
    before: dict[str, Any] = {}
    last: dict[str, Any] = {}
    goal: dict[str, Any] = {}
    for i, event in enumerate(row.listed(value["events"], "events")):
        last = row.fields(event, f"events.{i}", ("page", "goal"), ("content", "reward", "reward_info", "url"))
        goal = goal or row.fields(last["goal"], f"events.{i}.goal", ("instruction_text",))
        if last["page"] not in ("index", "search_results", "item_page", SUB_PAGE, "done"):
            raise row.bad(f"must be a page of the shop, not {last['page']!r}.", f"events.{i}.page")
        actions += _between(before, last)
        before = last
    bought = last["page"] == "done"
    reward = row.number(last.get("reward"), "reward") if bought else None
    if bought and reward is None:
        raise row.bad("is missing, though something was bought.", "reward")
    return Visit(
        row.text(value["session"], "session"), goal, tuple(actions), dict(last.get("content", {})) if bought else {},
        reward, dict(last.get("reward_info", {})),
    )  # fmt: skip


def _between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The actions that lead from one page to the next."""
    page, was = after["page"], before.get("page")
    new, old = after.get("content", {}), before.get("content", {})
    if page == "index":
        return [_click(pages.BACK)] if was not in (None, page) else []
    if page == "done":
        return [_click(pages.BUY)]
    if page == "search_results":
        if was in ("item_page", SUB_PAGE) and str(new.get("keywords")) == str(old.get("keywords")):
            return [_click(pages.PREVIOUS)]
        if was == page and new.get("keywords") == old.get("keywords") and new.get("page") != old.get("page"):
            return [_click(pages.NEXT if _number(new) > _number(old) else pages.PREVIOUS)]
        return [f"search[{' '.join(map(str, new.get('keywords', [])))}]"]
    if page == SUB_PAGE:
        return [_click(next((p for p in pages.SUB_PAGES if f"/{p}/" in str(after.get("url"))), pages.SUB_PAGES[0]))]
    if was == SUB_PAGE:
        return [_click(pages.PREVIOUS)]
    if was == page and new.get("asin") == old.get("asin"):
        had = old.get("options", {})
        return [_click(v) for name, v in new.get("options", {}).items() if had.get(name) != v]
    return [_click(str(new.get("asin")))]


def _number(content: Mapping[str, Any]) -> int:
    return int(content.get("page", 1))


def _click(text: str) -> str:
    return f"click[{text}]"
