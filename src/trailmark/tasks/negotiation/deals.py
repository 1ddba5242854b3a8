"""A negotiation about items as plain data: what there is, what it is worth to each side, what was said and offered.

A turn is a text. Its last line may be a move; the text before it is talk.

    Offer: 2 firewood, 1 food     what the speaker wants to get; the other side gets the rest
    Accept                        the standing offer of the other side becomes the deal
    Reject                        the standing offer is gone
    Walk away                     there is no deal

An offer stands until it is rejected or another one takes its place. Only the other side's offer can be accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

CASINO_WALK, CASINO_FULL = 5, 36
DEAL_FULL = 10
Kind = Literal["casino", "deal"]
Share = tuple[int, ...]  # how many of each item


@dataclass(frozen=True, slots=True)
class Scene:
    """What is negotiated. `values[side][k]` are the points of one item k; `walk` is what each side gets without a
    deal, and `full` the points that count as 1."""

    kind: Kind
    items: tuple[str, ...]
    counts: Share
    values: tuple[Share, Share]
    reasons: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @property
    def walk(self) -> int:
        return CASINO_WALK if self.kind == "casino" else 0

    @property
    def full(self) -> int:
        return CASINO_FULL if self.kind == "casino" else DEAL_FULL

    def rest(self, share: Share) -> Share:
        return tuple(n - k for n, k in zip(self.counts, share, strict=True))

    def points(self, side: int, share: Share) -> int:
        """What a share is worth to a side."""
        return sum(v * k for v, k in zip(self.values[side], share, strict=True))

    def data(self) -> dict[str, Any]:
        """The scene as JSON."""
        return {"kind": self.kind, "items": list(self.items), "counts": list(self.counts),
                "values": [list(v) for v in self.values], "reasons": [list(r) for r in self.reasons]}  # fmt: skip


def scene_of(data: Mapping[str, Any]) -> Scene:
    a, b = data["values"]
    reasons = data.get("reasons") or ((), ())
    return Scene(data["kind"], tuple(data["items"]), tuple(data["counts"]), (tuple(a), tuple(b)),
                 (tuple(reasons[0]), tuple(reasons[1])))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Move:
    """What a turn does. `wrong` says why a move could not be read: then the turn is talk."""

    kind: Literal["talk", "offer", "accept", "reject", "walk"]
    share: Share = ()
    wrong: str = ""


def read_move(text: str, scene: Scene) -> Move:
    """The move in the last line of a text."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    last = lines[-1].rstrip(".!").lower() if lines else ""
    if last in ("accept", "reject"):
        return Move(last)  # type: ignore[arg-type]
    if last in ("walk away", "walk-away"):
        return Move("walk")
    if not last.startswith("offer:"):
        return Move("talk")
    share, wrong = read_share(last.removeprefix("offer:"), scene)
    return Move("talk", wrong=wrong) if share is None else Move("offer", share)


def read_share(text: str, scene: Scene) -> tuple[Share | None, str]:
    """How many of each item a text names ("2 food, 1 water"), or why it cannot be read. Items that are not named
    count 0."""
    asked = dict.fromkeys(scene.items, 0)
    parts = [p.strip() for p in re.split(r",|\band\b", text) if p.strip()]
    if not parts:
        return None, "the offer names no item"
    for part in parts:
        found = re.fullmatch(r"(\d{1,3})\s+([a-z]+)", part)
        name = next((i for i in scene.items if found and found[2] in (i, f"{i}s")), None)
        if found is None or name is None:
            return None, f"'{part[:40]}' is no number of {', '.join(scene.items)}"
        asked[name] += int(found[1])
    for name, count in zip(scene.items, scene.counts):
        if asked[name] > count:
            return None, f"there are only {count} {name}"
    return tuple(asked[i] for i in scene.items), ""


def written(share: Share, scene: Scene) -> str:
    """An offer as a line that `read_move` reads."""
    return "Offer: " + (", ".join(f"{n} {i}" for n, i in zip(share, scene.items) if n) or f"0 {scene.items[0]}")


@dataclass(frozen=True, slots=True)
class State:
    """Where a negotiation stands: the offer that can be accepted (whose, and what he gets), and how it ended."""

    offer: tuple[int, Share] | None = None
    deal: tuple[Share, Share] | None = None
    walked: int | None = None

    @property
    def over(self) -> bool:
        return self.deal is not None or self.walked is not None


def after(state: State, side: int, move: Move, scene: Scene) -> State:
    """The state after a move of a side. A move that is not possible (nothing to accept) changes nothing."""
    if move.kind == "offer":
        return replace(state, offer=(side, move.share))
    theirs = state.offer is not None and state.offer[0] != side
    if move.kind == "reject" and theirs:
        return replace(state, offer=None)
    if move.kind == "walk":
        return replace(state, walked=side)
    if move.kind == "accept" and theirs and state.offer is not None:
        given = state.offer[1]
        return replace(state, deal=(given, scene.rest(given)) if side == 1 else (scene.rest(given), given))
    return state


def standing(state: State, side: int, scene: Scene) -> int | None:
    """What the standing offer is worth to a side; None if there is none."""
    if state.offer is None:
        return None
    whose, share = state.offer
    return scene.points(side, share if whose == side else scene.rest(share))


def points(state: State, scene: Scene) -> tuple[int, int]:
    """The points of both sides at the end. Without a deal each gets `walk`, which may be a true 0."""
    if state.deal is None:
        return scene.walk, scene.walk
    return scene.points(0, state.deal[0]), scene.points(1, state.deal[1])


def risen(scene: Scene, moves: Sequence[tuple[int, Move]], side: int) -> list[int]:
    """The numbers of a side's turns (from 0, its own only) that raised what the standing offer is worth to it. Before
    the first offer it is worth what it gets without a deal."""
    state, before, found, mine = State(), scene.walk, list[int](), -1
    for who, move in moves:
        mine += who == side
        state = after(state, who, move, scene)
        now = standing(state, side, scene)
        worth = scene.walk if now is None else now
        if who == side and worth > before:
            found.append(mine)
        before = worth
    return found
