"""The exploring expert: it plays only by what it has read so far.

    expert = Exploring(seed=0)
    command = expert.action(play)            # reads play.observation; a plain text works too
    command = expert.action(text, did)       # `did`: the command that was done, if it was not the expert's

It must see every observation of a play in turn, beginning with the first. It keeps a memory (what stands where, what is
shut, what it carries) and decides anew at each step, so it can continue a play that others have led. It looks for
things where they are likely, weighed against the steps to look there (see `usual_places`); the seed breaks ties. It
understands both dialects; its commands are those of the "move" dialect.
"""

from __future__ import annotations

import random
import re
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal, Protocol

from trailmark.errors import TaskError
from trailmark.tasks.alfworld.dialect import NOTHING, command_in
from trailmark.tasks.alfworld.usual_places import chance

Kind = Literal["place", "two", "clean", "heat", "cool", "light"]
OPENABLE = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})
TREATMENT = {"clean": ("sinkbasin", "sink"), "heat": ("microwave",), "cool": ("fridge",)}
WAIT = "look"  # used if nothing is left to do

_N = r"([a-z]+ \d+)"
_STATES: dict[str, Kind] = {"clean": "clean", "hot": "heat", "heat": "heat", "cool": "cool"}
_TREATED = (
    r"put (?:a|some) (clean|hot|cool) (\w+) (?:in|on) (\w+)",
    r"(clean|heat|cool) some (\w+) and put it (?:in|on) (\w+)",
)
_ERRANDS: tuple[tuple[str, Kind], ...] = (
    (r"(?:find|put) two (\w+) (?:and put them )?(?:in|on) (\w+)", "two"),
    (r"put (?:a|some) (\w+) (?:in|on) (\w+)", "place"),
    (r"(?:look at|examine the) (\w+) (?:under|with) the (\w+)", "light"),
)
_TASK = re.compile(r"Your task is to: (.*?)\.?\s*$")
_ROOM = re.compile(r"Looking quickly around you, you see (.*)\.")
_SEEN = re.compile(rf"(?:On the {_N}, you see|The {_N} is open\. In it, you see) (.*?)\.$")


class Seen(Protocol):
    @property
    def observation(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Errand:
    """What a task's sentence asks for. `place` is a kind of receptacle, or a kind of lamp if the thing must be lit."""

    kind: Kind
    thing: str
    place: str


def read_errand(text: str) -> Errand:
    """Read the sentence "Your task is to: …", in any of its forms."""
    found = _TASK.search(text)
    said = found[1] if found else text[:80]
    for pattern in _TREATED:
        if m := re.fullmatch(pattern, said):
            return Errand(_STATES[m[1]], m[2], m[3])
    for pattern, kind in _ERRANDS:
        if m := re.fullmatch(pattern, said):
            return Errand(kind, m[1], m[2])
    raise TaskError(f"the exploring expert does not understand the task {said!r}.")


def kind_of(name: str) -> str:
    """apple 1 -> apple."""
    return name.rsplit(" ", 1)[0]


def _listed(text: str) -> list[str]:
    return re.findall(r"\ban? ([a-z]+ \d+)", text)


@dataclass
class Memory:
    """What the observations have said so far."""

    errand: Errand
    receptacles: list[str]
    at: str | None = None
    held: str | None = None
    origin: str | None = None  # where the held thing was taken from
    contents: dict[str, list[str]] = field(default_factory=dict)  # the contents of receptacles looked into
    shut: dict[str, bool] = field(default_factory=dict)
    treated: set[str] = field(default_factory=set)
    useless: set[str] = field(default_factory=set)  # things that the world does not let us use
    unfit: set[tuple[str, str]] = field(
        default_factory=set
    )  # (kind of thing, kind of receptacle) that do not go together
    beside: dict[str, set[str]] = field(default_factory=dict)  # receptacles that are reached from one spot

    def see(self, text: str) -> None:
        if m := re.match(rf"You arrive at {_N}\. ", text):
            self.at = m[1] if m[1] in self.receptacles else self.at
            text = text[m.end() :]
        if m := re.match(rf"You pick up the {_N} from the {_N}\.", text):
            self.held, self.origin = m[1], m[2]
            if m[1] in self.contents.get(m[2], ()):
                self.contents[m[2]].remove(m[1])
        elif m := re.match(rf"You (?:move|put) the {_N} (?:to|in/on) the {_N}\.", text):
            self.held = None
            self.contents.setdefault(m[2], []).append(m[1])
        elif m := re.match(rf"You (clean|heat|cool) the {_N} using", text):
            self._treat(m[1], m[2])
        elif m := re.match(rf"You close the {_N}\.", text):
            self.shut[m[1]] = True
        elif text.startswith("You are carrying:"):
            self.held = next(iter(_listed(text)), None)
        elif m := re.match(r"You are facing the (.*?)\. Next to it", text):
            self._stand_at(re.findall(_N, m[1]))
        else:
            self._look(text)

    def _look(self, text: str) -> None:
        if m := re.match(rf"You open the {_N}\. ", text):
            text = text[m.end() :]
        if m := _SEEN.match(text):
            self.at = m[1] or m[2]
            self.contents[self.at], self.shut[self.at] = _listed(m[3]), False
        elif m := re.match(rf"The {_N} is closed\.", text):
            self.at = m[1]
            self.shut[self.at] = True

    def _treat(self, how: str, thing: str) -> None:
        if how == self.errand.kind:
            self.treated.add(thing)
        elif {how, self.errand.kind} == {"heat", "cool"}:
            self.treated.discard(thing)

    def refused(self, did: str) -> None:
        """Learn from a sensible command that did nothing."""
        if m := re.fullmatch(rf"(?:move|put) {_N} (?:to|in/on) {_N}", did):
            self.unfit.add((kind_of(m[1]), kind_of(m[2])))
        elif m := re.fullmatch(rf"(?:take|use|clean|heat|cool) {_N}(?: .*)?", did):
            self.useless.add(m[1])
        elif m := re.fullmatch(rf"open {_N}", did):
            self.shut[m[1]] = False
            self.contents.setdefault(m[1], [])
        elif m := re.fullmatch(rf"go to {_N}", did):  # it is here: one cannot go where one already is
            self._stand_at([m[1], *([self.at] if self.at else [])])
        elif (m := re.fullmatch(rf"examine {_N}", did)) and m[1] in self.receptacles:
            self.receptacles.remove(m[1])

    def _stand_at(self, names: list[str]) -> None:
        self.at = names[0]
        spot = set(names).union(*(self.beside.get(n, ()) for n in names))
        self.beside.update(dict.fromkeys(spot, spot))

    def near(self, receptacle: str) -> bool:
        return receptacle == self.at or (self.at is not None and receptacle in self.beside.get(self.at, ()))

    def where(self, kind: str) -> list[tuple[str, str]]:
        """(thing, receptacle) of all usable things of a kind that have been seen."""
        return [
            (t, r)
            for r, inside in self.contents.items()
            for t in inside
            if kind_of(t) == kind and t not in self.useless
        ]

    def steps(self, receptacle: str) -> int:
        """The number of commands to look into it, as far as is known."""
        shut = self.shut.get(receptacle, kind_of(receptacle) in OPENABLE)
        return (not self.near(receptacle)) + shut


class Exploring:
    """The expert that knows only what it has observed."""

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.memory: Memory | None = None
        self._rank: dict[str, float] = {}
        self._said = ""

    def action(self, seen: str | Seen, did: str | None = None) -> str:
        """Read an observation and return the next command. `did`: the command that led here (None: the last
        returned)."""
        self.see(seen, did)
        return self.decide()

    def decide(self) -> str:
        """The next command by everything seen so far. Asking twice gives the same command."""
        if self.memory is None:
            raise TaskError("the exploring expert must be shown a play from its first observation on.")
        self._said = self._decide(self.memory.held)
        return self._said

    def copy(self) -> Exploring:
        """A copy with the same memory."""
        return deepcopy(self)

    def see(self, seen: str | Seen, did: str | None = None) -> None:
        """Read an observation without deciding. The expert learns what is impossible only from its own failed commands,
        because others may have tried nonsense."""
        text = seen if isinstance(seen, str) else seen.observation
        if "Your task is to:" in text:
            self._begin(text)
        elif self.memory is None:
            raise TaskError("the exploring expert must be shown a play from its first observation on.")
        elif text != NOTHING:
            self.memory.see(text)
        elif did is None or command_in("move", did) == self._said:
            self.memory.refused(self._said)

    def _begin(self, text: str) -> None:
        errand, room = read_errand(text), _ROOM.search(text)
        names = _listed(room[1]) if room else []
        draw = random.Random(f"exploring {self.seed}")
        self._rank = {name: draw.random() for name in sorted(names)}
        self.memory = Memory(errand, names)

    @property
    def _m(self) -> Memory:
        assert self.memory is not None
        return self.memory

    def _decide(self, held: str | None) -> str:
        m, errand = self._m, self._m.errand
        if held is None:
            return self._fetch()
        if kind_of(held) != errand.thing or held in m.useless:
            return self._put_down(held)
        if errand.kind == "light":
            return self._light()
        if errand.kind in TREATMENT and held not in m.treated:
            return self._treat(held)
        return self._put(held, self._fit(errand.thing)) or self._put_down(held)

    def _fetch(self) -> str:
        m, thing = self._m, self._m.errand.thing
        goal = self._goal() if m.errand.kind == "two" else None
        done = set(m.contents.get(goal, ())) if goal else set()
        found = [(t, r) for t, r in m.where(thing) if r != goal and t not in done]
        if not found:
            return self._search(thing)
        best, place = min(found, key=lambda x: (x[0] not in m.treated, m.steps(x[1]), self._rank.get(x[1], 0), x))
        return self._approach(place) or f"take {best} from {place}"

    def _goal(self) -> str | None:
        """The receptacle where the first of two things already lies."""
        m = self._m
        count = {r: sum(kind_of(t) == m.errand.thing for t in m.contents.get(r, ())) for r in self._fit(m.errand.thing)}
        best = max(count, key=lambda r: count[r], default=None)
        return best if best is not None and count[best] else None

    def _fit(self, thing: str) -> list[str]:
        m = self._m
        return [r for r in m.receptacles if kind_of(r) == m.errand.place and (thing, kind_of(r)) not in m.unfit]

    def _search(self, thing: str) -> str:
        m = self._m
        left = [r for r in m.receptacles if r not in m.contents]
        if not left:
            return WAIT

        def worth(r: str) -> tuple[float, float]:
            return -chance(thing, kind_of(r)) / max(1, m.steps(r)), self._rank[r]

        place = m.at if m.at in left and m.shut.get(m.at) else min(left, key=worth)
        return self._approach(place) or f"examine {place}"

    def _approach(self, place: str) -> str | None:
        if not self._m.near(place):
            return f"go to {place}"
        return f"open {place}" if self._m.shut.get(place) else None

    def _light(self) -> str:
        m = self._m
        lamps = m.where(m.errand.place)
        if not lamps:
            return self._search(m.errand.place)
        lamp, place = min(lamps, key=lambda x: (not m.near(x[1]), self._rank.get(x[1], 0), x))
        return f"use {lamp}" if m.near(place) else f"go to {place}"

    def _treat(self, thing: str) -> str:
        m, how = self._m, self._m.errand.kind
        places = [r for word in TREATMENT[how] for r in m.receptacles if kind_of(r) == word]
        if not places:
            return WAIT
        place = next(filter(m.near, places), places[0])
        return f"{how} {thing} with {place}" if m.near(place) else f"go to {place}"

    def _put(self, thing: str, places: list[str]) -> str | None:
        m = self._m
        kind, fit = kind_of(thing), [r for r in places if (kind_of(thing), kind_of(r)) not in m.unfit]
        if not fit:
            return None
        goal = self._goal() if m.errand.kind == "two" and kind == m.errand.thing else None
        place = goal if goal in fit else min(fit, key=lambda r: (m.steps(r), self._rank[r]))
        return self._approach(place) or f"move {thing} to {place}"

    def _put_down(self, thing: str) -> str:
        """Put a thing that is not needed back where it was, or into the nearest receptacle that accepts it."""
        m = self._m
        origin = [m.origin] if m.origin in m.receptacles else []
        return self._put(thing, origin) or self._put(thing, m.receptacles) or WAIT
