"""The guide for ALFWorld: what an expert would do, and what the observations so far allow to say.

The expert sees everything, or knows only what was observed (option `expert` of the task). In both cases the rules speak
only about the path so far: where we are, what is in hand, whether the last step was the expert's own choice.
"""

from __future__ import annotations

import re

from trailmark.methods.reflect.plays import Last
from trailmark.methods.reflect.teacher import Moment
from trailmark.tasks.alfworld.dialect import command_in
from trailmark.tasks.alfworld.experts import plan
from trailmark.tasks.alfworld.source import Alfworld
from trailmark.tasks.base import Observation
from trailmark.tasks.labels import NEXT_PAGE, PREVIOUS_PAGE

ABOUT = (
    "You watch someone do a chore in a household that is only told in words. Things and places have numbers, such as "
    "apple 1 and cabinet 4; a closed place has to be opened before one can look into it; one thing can be carried at a "
    "time."
)
FIRST = "\nWithout choosing an action yet, say in one or two sentences what the task is and where to begin.\n"
LATER = "\nWithout choosing an action yet, say in at most 50 words whether the last step helped, and what to do next.\n"


class AlfworldGuide:
    def __init__(self, source: Alfworld):
        self.source, self.world = source, source.make()

    def best(self, seen: Observation) -> str | None:
        return self.world.oracle()

    def choices(self, seen: Observation) -> list[str]:
        return [x for x, action in zip(seen.labels, seen.actions) if action not in (NEXT_PAGE, PREVIOUS_PAGE)]

    def good(self, label: str, best: str) -> bool:
        """For the seeing expert, a command is also good if as few commands remain after it. The exploring expert
        accepts only its own choice."""
        if label == best or self.source.expert == "exploring":
            return label == best
        twin = self.world.copy()
        twin.step(label)
        now, then = plan(self.world.play), plan(twin.play)
        return now is not None and then is not None and len(then) < len(now)

    def moment(self, seen: Observation, best: str, last: Last | None) -> Moment:
        return Moment(ABOUT, FIRST if last is None else LATER, seen, best, self.rule(last))

    def rule(self, last: Last | None) -> str:
        """The reflection by rule: two or three short sentences."""
        place, thing = situation(self.world.path)
        where = f"We are at {place}" if place else "We are in the middle of the room"
        verdict = "" if last is None else f" The last step, {last.action}, {'led on' if last.good else 'did not help'}."
        following = command_in(self.source.dialect, self.world.oracle_command() or "look")
        return f"{where} with {thing or 'nothing'} in hand.{verdict} Next: {following}"


def situation(path: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """Where we are and what is in hand after these commands and answers; "" for nowhere and nothing."""
    place = thing = ""
    for command, answer in path:
        if answer.startswith("Nothing happens"):
            continue
        if went := re.fullmatch(r"go to (.+)", command):
            place = went[1]
        elif took := re.fullmatch(r"take (.+) from .+", command):
            thing = took[1]
        elif re.match(r"(move|put) ", command):
            thing = ""
    return place, thing
