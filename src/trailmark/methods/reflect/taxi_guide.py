"""The guide for DangerousTaxi: the shortest path, and what a teacher is told.

Random actions come from all six (`fatal`: one that changes nothing ends the play), or from those that change something,
so that the play goes on and shows how to recover. A teacher behind a server is told the best action, and whether the
last one was good, as a spoiler. The stored state is what the world shows, without the spoiler. Action 0 is south, an
action like the others.
"""

from __future__ import annotations

from trailmark.methods.reflect.lessons import Bfs
from trailmark.methods.reflect.plays import Last
from trailmark.methods.reflect.teacher import Moment
from trailmark.tasks import taxi
from trailmark.tasks.base import Observation

ABOUT = (
    "You watch a taxi on a 5x5 map that is to fetch a passenger and bring them to the destination. D is the "
    "destination, P the passenger, T the empty taxi, O the taxi at the passenger's place, X the taxi with the "
    "passenger; | and - are walls. An action that changes nothing ends the game. You may be told a spoiler; use it, "
    "and never mention that there is one."
)
FIRST = "\nSay in one sentence what the situation is and what to do next.\n"
LATER = "\nSay in two sentences, at most 50 words: was the last action good, and what should be done next?\n"


class TaxiGuide:
    def __init__(self, source: taxi.Taxi, fatal: bool = False):
        self.world, self.fatal = source.make(), fatal

    def best(self, seen: Observation) -> str | None:
        found = taxi.optimal_action(self.world.state, self.world.mode)
        return None if found is None else str(found)

    def choices(self, seen: Observation) -> list[str]:
        table = taxi.dynamics()[self.world.state]
        return [str(a) for a in range(6) if self.fatal or table[a][0] != self.world.state]

    def good(self, label: str, best: str) -> bool:
        return int(label) in taxi.optimal_actions(self.world.state, self.world.mode)

    def moment(self, seen: Observation, best: str, last: Last | None) -> Moment:
        request = FIRST if last is None else LATER
        return Moment(ABOUT, request, seen, best, self.rule(best, last), spoiler=spoiler(best, last))

    def rule(self, best: str, last: Last | None) -> str:
        """The reflection by rule. If past actions are shown, it also says that the last one was a detour."""
        words = Bfs().reflect(self.world, int(best))
        if last is None or last.good or self.world.source.history == "none":
            return words
        return f"{last.action} was a detour; {words}"


def spoiler(best: str, last: Last | None) -> str:
    """What a teacher may know and must not tell."""
    words = f"the best next action is {taxi.ACTIONS[int(best)]}."
    if last is None:
        return words
    return f"{words} The last action, {last.action}, was {'a best one' if last.good else 'not a best one'}."
