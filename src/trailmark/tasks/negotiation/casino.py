"""Human dialogues: CaSiNo (JSON lines, .gz allowed) and DealOrNoDeal (its own text lines). Each becomes a scene, the
moves of both sides and what was paid."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.formats.rows import Row
from trailmark.tasks.negotiation.deals import Move, Scene, Share, State, after, points
from trailmark.tasks.row_files import file_rows, file_text

ITEMS, WORTH = ("firewood", "food", "water"), {"High": 5, "Medium": 4, "Low": 3}
SPEAKERS = ("mturk_agent_1", "mturk_agent_2")
DEAL_ITEMS = ("book", "hat", "ball")


@dataclass(frozen=True)
class Dialogue:
    """A dialogue between people. `said` is (side, text, move); `recorded` are the points that the file says they got;
    None: it says none."""

    name: str
    scene: Scene
    said: tuple[tuple[int, str, Move], ...]
    recorded: tuple[int, int] | None

    def paid(self) -> tuple[int, int]:
        """The points by rule: the last offer that was submitted, not rejected, and accepted by the other side."""
        state = State()
        for side, _, move in self.said:
            state = after(state, side, move, self.scene)
        return points(state, self.scene)


def read_casino(path: Path) -> Iterator[Dialogue]:
    for row in file_rows(path):
        yield casino_dialogue(row)


def casino_dialogue(row: Row) -> Dialogue:
    v = row.fields(row.value, "", ["chat_logs", "participant_info"], ["dialogue_id", "annotations"])
    who = [_person(row, v["participant_info"], name) for name in SPEAKERS]
    scene = Scene("casino", ITEMS, (3, 3, 3), (who[0][0], who[1][0]), (who[0][1], who[1][1]))
    said = []
    for k, m in enumerate(row.listed(v["chat_logs"], "chat_logs")):
        m = row.fields(m, f"chat_logs[{k}]", ["text", "id"], ["task_data"])
        if m["id"] not in SPEAKERS:
            raise row.bad(f"is '{m['id']}', and the people are {' and '.join(SPEAKERS)}.", f"chat_logs[{k}].id")
        said.append((SPEAKERS.index(m["id"]), row.text(m["text"], f"chat_logs[{k}].text"), _move(row, m, k)))
    recorded = (who[0][2], who[1][2]) if who[0][2] is not None and who[1][2] is not None else None
    return Dialogue(str(v.get("dialogue_id", row.line)), scene, tuple(said), recorded)


def _person(row: Row, info: Any, name: str) -> tuple[Share, tuple[str, ...], int | None]:
    """What each item is worth to a person, his reasons, and the points that he got."""
    key = f"participant_info.{name}"
    if not isinstance(info, Mapping) or name not in info:
        raise row.bad("is missing.", key)
    p = row.fields(info[name], key, ["value2issue"], ["value2reason", "outcomes"])
    worth: dict[str, int] = {}
    reasons = dict.fromkeys(ITEMS, "")
    for level, points_each in WORTH.items():
        item = str(p["value2issue"].get(level, "")).lower()
        if item not in ITEMS or item in worth:
            raise row.bad(f"must name each of {', '.join(ITEMS)} once.", f"{key}.value2issue.{level}")
        worth[item], reasons[item] = points_each, str((p.get("value2reason") or {}).get(level, ""))
    got = (p.get("outcomes") or {}).get("points_scored")
    return tuple(worth[i] for i in ITEMS), tuple(reasons[i] for i in ITEMS), None if got is None else int(got)


def _move(row: Row, m: Mapping[str, Any], k: int) -> Move:
    kind = {"Submit-Deal": "offer", "Accept-Deal": "accept", "Reject-Deal": "reject", "Walk-Away": "walk"}.get(
        m["text"]
    )
    if kind != "offer":
        return Move(kind or "talk")  # type: ignore[arg-type]
    halves = []
    for half in ("issue2youget", "issue2theyget"):
        given = (m.get("task_data") or {}).get(half)
        if not isinstance(given, Mapping):
            raise row.bad("is missing.", f"chat_logs[{k}].task_data.{half}")
        each = {str(i).lower(): row.number(n, f"chat_logs[{k}].task_data.{half}.{i}") for i, n in given.items()}
        halves.append(tuple(int(each.get(i) or 0) for i in ITEMS))
    if any(a + b != 3 for a, b in zip(*halves)):
        raise row.bad("does not divide 3 of each item.", f"chat_logs[{k}].task_data")
    return Move("offer", halves[0])


# --- DealOrNoDeal ----------------------------------------------------------------------------------------------------


def read_deals(path: Path) -> Iterator[Dialogue]:
    for number, line in enumerate(file_text(path).splitlines(), 1):
        if line.strip():
            yield deal_dialogue(line, path, number)


def deal_dialogue(line: str, path: Path, number: int) -> Dialogue:
    """One line. Side 0 is YOU. Both choose at the end: a deal is one only if both halves are the same division."""
    parts = {k: found[1].split() for k in ("input", "dialogue", "output", "partner_input")
             if (found := re.search(rf"<{k}>(.*?)</{k}>", line))}  # fmt: skip
    if missing := next((k for k in ("input", "dialogue", "output", "partner_input") if k not in parts), None):
        raise DataError(f"has no <{missing}>.", path, number)
    try:
        mine, theirs = ([int(n) for n in parts[k]] for k in ("input", "partner_input"))
        if len(mine) != 6 or len(theirs) != 6 or mine[::2] != theirs[::2]:
            raise ValueError("both inputs must give the same three counts, each with a value")
        scene = Scene("deal", DEAL_ITEMS, tuple(mine[::2]), (tuple(mine[1::2]), tuple(theirs[1::2])))
        chosen = [int(found[1]) for w in parts["output"] if (found := re.fullmatch(r"item\d=(\d+)", w))]
    except ValueError as problem:
        raise DataError(f"cannot be read: {problem}.", path, number) from None
    said: list[tuple[int, str, Move]] = []
    for text in " ".join(parts["dialogue"]).split("<eos>"):
        speaker, _, words = text.strip().partition(":")
        if words.strip() and words.strip() != "<selection>":
            said.append((0 if speaker == "YOU" else 1, words.strip(), Move("talk")))
    if len(chosen) == 6 and all(a + b == n for a, b, n in zip(chosen[:3], chosen[3:], scene.counts)):
        said += [(0, "<selection>", Move("offer", tuple(chosen[:3]))), (1, "<selection>", Move("accept"))]
    return Dialogue(str(number), scene, tuple(said), None)
