"""Token ids as pieces of text, one per token, so that a number of a token can be shown on its letters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trailmark.report.read import checkpoints
from trailmark.runs.store import Run
from trailmark.types import Turn

_WINDOW = 6  # tokens decoded together: enough for a character of several tokens, and for the space before a piece


class Pieces:
    """Decodes with the tokenizer of each seat. If there is none, or it is not the one that wrote, `of` is None."""

    def __init__(self, tokenizers: dict[str, Any] | None = None, default: Any = None):
        self.tokenizers, self.default = tokenizers or {}, default
        self._right: dict[str, bool] = {}

    def text(self, seat: str, ids: Sequence[int]) -> str | None:
        words = self.tokenizers.get(seat, self.default)
        if words is None or self._right.get(seat) is False:
            return None
        try:
            return words.decode(list(ids), skip_special_tokens=False)
        except Exception:  # unknown ids: every library raises its own error
            self._right[seat] = False
            return None

    def fits(self, turn: Turn) -> bool:
        """Whether the tokenizer decodes the turn's tokens to its text. This is checked at a seat's first turn."""
        known = self._right.get(turn.seat)
        if known is not None or not (turn.text and turn.tokens):
            return known is not False
        words = self.tokenizers.get(turn.seat, self.default)
        if words is None:
            return False
        whole = self.text(turn.seat, (*turn.forced, *turn.tokens)) or ""
        self._right[turn.seat] = bool(whole) and (turn.text.strip() in whole or whole.strip() in turn.text)
        return self._right[turn.seat]

    def of(self, seat: str, ids: Sequence[int], before: Sequence[int] = ()) -> list[str] | None:
        """One piece per id. A character of several tokens belongs to the last of them; the others are ''."""
        out: list[str] = []
        pending = 0
        context = list(before[-_WINDOW:])
        for i, _ in enumerate(ids):
            start = max(0, i - pending - _WINDOW)
            head = (context if start == 0 else []) + list(ids[start : i - pending])
            old, new = self.text(seat, head), self.text(seat, head + list(ids[i - pending : i + 1]))
            if old is None or new is None:
                return None
            last = i == len(ids) - 1
            if new.endswith("\ufffd") and pending < 4 and not last:
                out.append("")
                pending += 1
            else:
                out.append(new[len(old) :] if new.startswith(old) else new)
                pending = 0
        return out


def run_pieces(run: Run, tokenizer: str | None = None) -> Pieces:
    """The tokenizers of a run: the named one, or those of its newest checkpoint that has any."""
    if tokenizer is not None:
        return Pieces(default=named(tokenizer))
    for folder in reversed(checkpoints(run)):
        found = {p.name: words for p in folder.iterdir() if (words := _light(p)) is not None}
        if found:
            return Pieces(found, found.get("policy"))
    return Pieces()


def named(name: str) -> Any:
    """The tokenizer of whatever a name means: tiny, smollm2, a folder, a run, a name on the hub."""
    from trailmark.seats.model_names import load_tokenizer, locate

    return _light(Path(locate(name).folder)) or load_tokenizer(name)


def _light(folder: Path) -> Any:
    """The tokenizer of a model folder without loading transformers, or None."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises bare Exception for a file it cannot read
        return None
