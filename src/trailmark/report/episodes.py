"""Episodes as the page shows them: who wrote what, what was trained on, and who earned what."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trailmark.report.pieces import Pieces
from trailmark.types import Annotation, Episode, Failed, Invalid, Scored, Turn

LONGEST = 12_000  # most characters of one prompt; a longer one loses its middle


@dataclass
class Texts:
    """A table of texts. Prompts of a group are equal, so each text is stored once, and a turn holds its number."""

    all: list[str] = field(default_factory=list)
    size: int = 0
    _at: dict[str, int] = field(default_factory=dict)

    def put(self, text: str) -> int:
        if len(text) > LONGEST:
            cut = len(text) - LONGEST
            text = f"{text[: LONGEST // 2]}\n[… {cut} characters left out …]\n{text[-LONGEST // 2 :]}"
        if text not in self._at:
            self._at[text] = len(self.all)
            self.all.append(text)
            self.size += len(text)
        return self._at[text]


def outcome_view(outcome: Scored | Invalid | Failed) -> dict[str, Any]:
    if isinstance(outcome, Scored):
        parts = {"parts": {n: _short(x) for n, x in outcome.parts.items()}} if outcome.parts else {}
        return {"kind": "scored", "reward": _short(outcome.reward), "success": outcome.success, **parts}
    return {"kind": "invalid", "why": outcome.reason} if isinstance(outcome, Invalid) else {
        "kind": "failed", "why": outcome.error,
    }  # fmt: skip


def trained(episode: Episode, seat: str) -> bool:
    """Whether the learner sees this seat's tokens. If a file does not say who sat there, the seat counts as trained."""
    player = episode.players.get(seat)
    return isinstance(episode.outcome, Scored) and (player is None or player.kind == "trained")


def credit_source(episodes: Sequence[Episode], notes: Mapping[str, Mapping[str, Sequence[Annotation]]]) -> str | None:
    """The source of the stored credit, in the words of the method that stored it; None if none was stored. Credit is
    never computed here: only the method knows what it trained with."""
    found = {a.source or "annotated" for e in episodes for a in notes.get(e.id, {}).get("advantage", ())}
    return "; ".join(sorted(found)) or None


def on_tokens(turn: Turn, number: int, notes: Sequence[Annotation]) -> list[float | None] | None:
    """An annotation spread over the tokens of a turn; None if it has nothing for this turn."""
    out: list[float | None] = [None] * len(turn.tokens)
    hit = False
    for a in notes:
        if a.level != "episode" and a.turn != number:
            continue
        if a.level in ("episode", "turn") and len(a.values) == 1:
            out[:], hit = [a.values[0]] * len(out), True
        elif a.level == "token" and len(a.values) == len(out):
            out[:], hit = a.values, True
        elif a.level == "step":
            for (start, end), value in zip(turn.steps or ((0, len(out)),), a.values):
                out[start:end], hit = [value] * (end - start), True
    return out if hit else None


def view(
    episode: Episode,
    pieces: Pieces,
    texts: Texts,
    notes: Mapping[str, Sequence[Annotation]],
    learnt: bool = True,
) -> dict[str, Any]:
    """One episode as JSON. Keys are short because there are many: a turn's `p` prompt, `f` forced (numbers of texts),
    `w` written pieces, `lp` and `lq` log-probs, `a` stored advantage (a number, or one per token), `n` other
    annotations, `on` whether it was trained on (never in an evaluation: `learnt` is False)."""
    turns = []
    for i, t in enumerate(episode.turns):
        right = pieces.fits(t)
        before = (t.prompt + t.forced)[-8:]
        w = pieces.of(t.seat, t.tokens, before) if right else None
        v: dict[str, Any] = {"seat": t.seat, "np": len(t.prompt), "nf": len(t.forced), "nw": len(t.tokens)}
        for key, ids in (("p", t.prompt), ("f", t.forced)):
            if ids and right and (text := pieces.text(t.seat, ids)) is not None:
                v[key] = texts.put(text)
        v["w"] = [t.text] if w is None else w
        if w is not None:
            v["id"] = list(t.tokens)
            v["lp"], v["lq"] = [_short(x) for x in t.logp], [_short(x) for x in t.logq]
            if t.steps:
                v["steps"] = [list(s) for s in t.steps]
            others = {
                name: [_short(x) for x in found]
                for name, these in notes.items()
                if (found := on_tokens(t, i, these)) is not None
            }
            others.pop("advantage", None)
            if others:
                v["n"] = others
        else:
            v["whole"] = True
        credit = [_short(x) for x in on_tokens(t, i, notes.get("advantage", ())) or (None,)]
        v["a"] = credit[0] if len(set(credit)) == 1 else credit if w is not None else None
        v |= {"on": learnt and trained(episode, t.seat), "reward": _short(t.reward), "v": versions(t)}
        if t.law.allowed is None:  # the length of a label says nothing
            v["stop"] = t.stop
        if t.action is not None:
            v["action"] = t.action
        if t.continues is not None:
            v["after"] = t.continues
        if law := _law(t):
            v["law"] = law
        turns.append(v)
    out: dict[str, Any] = {
        "id": episode.id, "task": episode.task.id, "group": episode.group, "turns": turns,
        "outcomes": {side: outcome_view(o) for side, o in episode.outcomes.items()},
        "end": "terminated" if episode.terminated else "truncated" if episode.truncated else "",
        "players": {s: " ".join(filter(None, (p.kind, p.model))) for s, p in episode.players.items()},
    }  # fmt: skip
    if episode.parent is not None:
        out["parent"] = f"{episode.parent.episode}, turn {episode.parent.turn}, token {episode.parent.token}"
    return out


def versions(turn: Turn) -> int | str:
    """The version of the weights that wrote a turn, or the first and the last."""
    first, last = turn.versions
    return first if first == last else f"{first} to {last}"


def _law(turn: Turn) -> str:
    law, parts = turn.law, []
    if law.temperature != 1.0:
        parts.append(f"temperature {law.temperature:g}")
    if law.top_k:
        parts.append(f"top {law.top_k}")
    if law.top_p < 1.0:
        parts.append(f"top-p {law.top_p:g}")
    if law.allowed is not None:
        parts.append(f"{len(law.allowed)} tokens allowed")
    return ", ".join(parts)


def _short(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else float(f"{x:.4g}")


def starts(episodes: Sequence[Episode]) -> dict[str, str]:
    """Episode's task id -> the name of its start. Tasks with different names are one start if their data and the first
    prompt are equal, because a world that is drawn again in a later iteration often has another id."""
    root: dict[str, str] = {}
    same: dict[str, str] = {}

    def find(x: str) -> str:
        while root[x] != x:
            x = root[x]
        return x

    for e in episodes:
        a = find(root.setdefault(e.task.id, e.task.id))
        if e.task.data and e.turns:
            look = json.dumps([e.task.data, e.turns[0].seat, e.turns[0].prompt], sort_keys=True, default=str)
            b = find(same.setdefault(look, a))
            root[a] = b
    return {task: find(task) for task in root}
