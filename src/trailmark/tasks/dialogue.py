"""What a world of people who talk can tell a protocol: who sees what, and who has said what.

A world that defines `view(seat)` can be played with advice: a protocol then writes the prompts of advisers and actors
from the parts (`View`), and need not search the text of an observation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """Something that was said. `seat` is whose actor said it."""

    seat: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(frozen=True, slots=True)
class View:
    """What one side may see: the scene with its own goal, the rules of what may be said, and the talk so far."""

    seat: str
    name: str
    other: str
    scene: str
    rules: str
    lines: tuple[Line, ...] = ()

    @property
    def text(self) -> str:
        """The whole view as one text."""
        said = "".join(f"{line}\n" for line in self.lines)
        return f"{self.scene}\n{self.rules}\n{said}"
