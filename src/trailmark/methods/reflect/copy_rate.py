"""How often an actor does what the advice in its prompt names.

A reflector whose words end with "Next: go to shelf 1" makes the policy's task a lookup: find that command in the menu
and say its label. A comparison with a policy without advice then measures the lookup. So the share is printed wherever
words of another seat reach the actor. It is computed from the stored tokens: a prompt holds the words and, after them,
the menu. Where a world lists no menu (the taxi with `menu=false`), the task says what its labels mean (`commands`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trailmark.stats.intervals import proportion
from trailmark.types import Episode

_LINE = re.compile(r"^(?:Action )?(\w{1,3})[.:)] (.+)$", re.MULTILINE)


def advised(
    e: Episode, tokenizer: Any, commands: Mapping[str, str] | None = None
) -> Iterator[tuple[str | None, str | None]]:
    """(command that the words name, command that was chosen) of every decision with words of another seat. None if the
    words name no command of the menu, or the choice is not in it."""
    for before, turn in zip(e.turns, e.turns[1:]):
        words = before.text.strip()
        if before.action is not None or before.seat == turn.seat or turn.action is None or not words:
            continue
        prompt = tokenizer.decode(turn.prompt)
        at = prompt.rfind(words)
        if at >= 0:  # else the words were replaced by others
            menu = dict(_LINE.findall(prompt[at + len(words) :])) or dict(commands or {})
            yield named(words, list(menu.values())), menu.get(turn.text.strip())


def named(words: str, commands: Sequence[str]) -> str | None:
    """The command of the menu that the words name: the one after their last "Next:", or else the one mentioned last
    (the longer one if two begin at the same place)."""
    _, said, last = words.rpartition("Next:")
    if said:
        return next((c for c in commands if c == last.strip()), None)
    found = [
        (at.start(), len(command), command)
        for command in commands
        for at in re.finditer(rf"(?<![\w./-]){re.escape(command)}(?![\w/-])(?!\.\w)", words)
    ]
    inside = [f for f in found if not any(g[0] < f[0] and f[0] + f[1] <= g[0] + g[1] for g in found)]
    return max(inside)[2] if inside else None


def copy_rate(
    episodes: Sequence[Episode], tokenizer: Any, commands: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """The share of decisions that follow the words, among those whose words name a command of the menu, or one of
    `commands` (by label) where a prompt has no menu. `decisions` counts all decisions with words, `naming` those whose
    words name a command."""
    every = [(e.task.id, name, chosen) for e in episodes for name, chosen in advised(e, tokenizer, commands)]
    rows = [row for row in every if row[1] is not None]
    if not every:
        return None
    if not rows:
        return {"value": None, "low": None, "high": None, "n": 0, "method": "", "decisions": len(every), "naming": 0}
    share = proportion([float(name == chosen) for _, name, chosen in rows], [start for start, _, _ in rows])
    return {**share.plain(), "decisions": len(every), "naming": len(rows)}
