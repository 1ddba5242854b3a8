"""The best next command for a player who knows the targets: go to the nearest, look at it, identify it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trailmark.tasks.auto_explore.commands import quote
from trailmark.tasks.labels import NEXT_PAGE, PREVIOUS_PAGE

if TYPE_CHECKING:
    from trailmark.tasks.auto_explore.world import ExploreWorld
    from trailmark.tasks.base import Observation


def steps_to(cwd: str, target: str, catted: bool) -> int:
    """The number of commands from folder `cwd` to identify `target`, looking at it first."""
    here, there = cwd.split("/") if cwd else [], target.split("/")[:-1]
    same = next((i for i, (a, b) in enumerate(zip(here, there)) if a != b), min(len(here), len(there)))
    return len(here) - same + len(there) - same + 1 + (not catted)


def best_command(world: ExploreWorld) -> str:
    """The first command of a shortest path that looks at the nearest target and then identifies it. Among equally near
    targets the first in order is used. A world without targets raises ValueError."""
    if not world.targets:
        raise ValueError("this play has no target")
    target = min(sorted(world.targets), key=lambda t: steps_to(world.cwd, t, t in world.catted))
    inside = f"{world.cwd}/" if world.cwd else ""
    if not target.startswith(inside):
        return "cd .."
    first, deeper, _ = target[len(inside) :].partition("/")
    if deeper:
        return f"cd {quote(first)}"
    return f"{'id' if target in world.catted else 'cat'} {quote(first)}"


def label_of(observation: Observation, command: str, commands: tuple[str, ...]) -> str:
    """The label to answer with for `command`. If the command stands on another page, it is the label of the page turn
    towards it. `commands` is the whole list that the pages were cut from."""
    at = dict(zip(observation.actions, observation.labels))
    if command in at:
        return at[command]
    shown = [commands.index(a) for a in observation.actions if a in commands]
    return at[NEXT_PAGE if commands.index(command) > max(shown) else PREVIOUS_PAGE]
