"""Players that are not trained, for any world with labels: the lower and the upper row of a comparison."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from trailmark.errors import TaskError
from trailmark.rollout.play import Desk, Protocol, play_starts, start_all
from trailmark.seats.open import open_script
from trailmark.seats.seat import Seat
from trailmark.tasks.base import World, has_oracle
from trailmark.types import Episode, Task


def random_player(source: Any, seed: int, tokenizer: Any, tasks: Sequence[Task] | None = None) -> list[Episode]:
    """Chooses uniformly among the listed labels: the lower reference of every comparison."""

    async def protocol(desk: Desk) -> None:
        while not desk.over:
            labels = desk.observation.labels
            turn = await desk.ask("policy", text=f"{len(labels)}:" + " ".join(labels))
            await desk.act(turn.text)

    def choose(prompt: str, draw: random.Random) -> str:
        return draw.choice(prompt.partition(":")[2].split(" "))

    return _scripted(source, seed, tokenizer, choose, protocol, "random", tasks)


def oracle_player(source: Any, seed: int, tokenizer: Any, tasks: Sequence[Task] | None = None) -> list[Episode]:
    """Plays the best move at every step, in worlds that know it: the upper reference within the horizon."""

    async def protocol(desk: Desk) -> None:
        while not desk.over:
            turn = await desk.ask("policy", text="best:" + best_label(desk.world))
            await desk.act(turn.text)

    if not has_oracle(source):
        raise TaskError(f"task '{source.name}' does not know its best action, so it has no oracle row.")
    return _scripted(source, seed, tokenizer, lambda prompt, draw: prompt.partition(":")[2], protocol, "oracle", tasks)


def best_label(world: World) -> str:
    """The label of a best action in this state; empty if there is none."""
    return str(world.oracle() or "")


def _scripted(
    source: Any, seed: int, tokenizer: Any, policy: Any, protocol: Protocol, name: str, tasks: Sequence[Task] | None
) -> list[Episode]:
    seat = Seat("policy", open_script(policy, tokenizer, name), kind="scripted")
    starts = start_all(source.tasks("all") if tasks is None else tasks, 1, seed, f"{name}:")
    return play_starts(source, starts, [seat], protocol)
