"""Two wordings of the same games: "move" (games since 2.1.3) and "put" (before; the published expert trajectories).

                    move                                        put
    a command       move apple 1 to fridge 1                    put apple 1 in/on fridge 1
    its answer      You move the apple 1 to the fridge 1.       You put the apple 1 in/on the fridge 1.
    after going     You arrive at desk 2. On the desk 2, …      On the desk 2, …

Older games themselves answer "You arrive at loc 12. On the desk 2, …". All published results with them cut that
sentence off, and so does "put" here. Everything else is the same in both, word for word.

Commands and answers translate exactly, both ways. Only the way from "put" to "move" needs the command, because the
answer to `go to desk 2` reads like the answer to `examine desk 2`.
"""

from __future__ import annotations

import re
from typing import Literal

Dialect = Literal["move", "put"]
DIALECTS: tuple[Dialect, ...] = ("move", "put")
NOTHING = "Nothing happens."

_NAME = r"[a-z]+ \d+"
_PUT_COMMAND = re.compile(rf"put ({_NAME}) in/on ({_NAME})")
_MOVE_COMMAND = re.compile(rf"move ({_NAME}) to ({_NAME})")
_PUT_ANSWER = re.compile(rf"You put the ({_NAME}) in/on the ({_NAME})\.")
_MOVE_ANSWER = re.compile(rf"You move the ({_NAME}) to the ({_NAME})\.")
_ARRIVED = re.compile(rf"You arrive at ({_NAME})\. ")
_GOING = re.compile(rf"go to ({_NAME})")
_MOVE_HELP = "  move (object) to (receptacle):  place"
_PUT_HELP = "  put (object) in/on (receptacle):  place"


def of_grammar(grammar: str) -> Dialect:
    """The dialect that a game with this grammar speaks."""
    return "put" if "put {o} in/on {r}" in grammar else "move"


def command_in(dialect: Dialect, command: str) -> str:
    """The command as `dialect` writes it. Only commands that put something down differ."""
    if dialect == "move":
        return f"move {m[1]} to {m[2]}" if (m := _PUT_COMMAND.fullmatch(command)) else command
    return f"put {m[1]} in/on {m[2]}" if (m := _MOVE_COMMAND.fullmatch(command)) else command


def observation_in(dialect: Dialect, observation: str, command: str = "") -> str:
    """The observation after `command` as `dialect` writes it, from either dialect and from older games."""
    arrived = _ARRIVED.match(observation)
    seen = observation[arrived.end() :] if arrived else observation
    if dialect == "put":
        if m := _MOVE_ANSWER.fullmatch(seen):
            return f"You put the {m[1]} in/on the {m[2]}."
        return seen.replace(_MOVE_HELP, _PUT_HELP)
    if m := _PUT_ANSWER.fullmatch(seen):
        return f"You move the {m[1]} to the {m[2]}."
    going = _GOING.fullmatch(command)
    if going and seen != NOTHING:
        return f"You arrive at {going[1]}. {seen}"
    if arrived and not arrived[1].startswith("loc "):
        return observation
    return seen.replace(_PUT_HELP, _MOVE_HELP)
