"""Who sits at a table: a named player with its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trailmark.engines.base import Engine
from trailmark.types import Player, SamplingLaw


@dataclass(frozen=True)
class Seat:
    """A named player: its engine, and how its tokens are sampled."""

    name: str
    engine: Engine
    law: SamplingLaw = SamplingLaw()
    max_tokens: int = 64
    stop_strings: tuple[str, ...] = ()
    kind: Literal["trained", "frozen", "remote", "scripted", "person"] = "frozen"
    # whether its engine gets tokens or messages; None: what the engine supports
    speaks: Literal["text", "chat"] | None = None
    side: str = ""  # the side that it plays for; empty: the only side

    @property
    def hears_messages(self) -> bool:
        """Whether its engine gets messages, to which it applies its own template. Else it gets tokens."""
        return self.speaks == "chat" or (
            self.speaks is None and (getattr(self.engine, "by_chat", False) or self.engine.tokenizer is None)
        )

    def player(self) -> Player:
        revision = getattr(getattr(self.engine, "lm", None), "revision", "")
        return Player(self.kind, self.engine.name, revision, self.engine.version, self.side)
