"""Two experts: one sees everything and takes a shortest plan, one knows only what it has observed (`exploring`).

    Seeing().action(play)      the first command of a shortest plan from here, whatever was done before
    Exploring().action(play)   reads play.observation and nothing else
    plan(play)                 a shortest plan as commands; () if the play is won, None if it cannot be won

Why the plan has the fewest commands. A play advances by acts: take, put down, clean, heat, cool, switch on. Going and
opening only make acts possible, and closing never helps. Delaying going and opening until right before the act that
needs them makes no plan longer. So every shortest plan can be written as a row of acts. An act costs one command, one
more if it happens elsewhere, and one more if its receptacle is shut. Things of a kind that the task does not name only
ever have to be put down. The search covers exactly these rows, cheapest first (A*; the estimate counts only acts that
must still come), and tries every receptacle.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from trailmark.errors import TaskError
from trailmark.tasks.alfworld.dialect import Dialect
from trailmark.tasks.alfworld.engine import Game, Play
from trailmark.tasks.alfworld.exploring import Exploring
from trailmark.tasks.alfworld.pddl import Atom, Every, Exists, Fact, Formula, Not

__all__ = ["Exploring", "Seeing", "Wish", "plan", "wish_of"]

TREATMENTS = {  # the wanted property: which things can have it, where, and by which command
    "isclean": ("cleanable", ("sinkbasintype", "sinktype"), "clean"),
    "ishot": ("heatable", ("microwavetype",), "heat"),
    "iscool": ("coolable", ("fridgetype",), "cool"),
}
Pairs = frozenset[tuple[str, str]]


class Seeing:
    """Knows all facts. It plans anew at every step, so it can continue any play."""

    def action(self, play: Play) -> str:
        found = plan(play)
        if not found:
            why = "is won" if found is not None else "cannot be won from here"
            raise TaskError(f"the seeing expert has nothing to do: game '{play.game.id}' {why}.")
        return found[0]


# --- what is wanted ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wish:
    """A goal of one of the six types: `number` things of kind `thing`, in state `state` (isclean, …), in one receptacle
    of kind `place`. With a `lamp`: one thing in the hand beside a lamp that was switched on."""

    thing: str
    place: str = ""
    number: int = 1
    state: str = ""
    lamp: str = ""


def wish_of(game: Game) -> Wish:
    """Read the goal's facts. A goal of another kind is a TaskError."""
    atoms = list(_atoms(game.goal))
    by = {p: [a.args for a in atoms if a.predicate == p] for p in {a.predicate for a in atoms}}
    kinds = dict(a for a in by.get("objecttype", []) if len(a) == 2)
    unknown = by.keys() - _KNOWN - {"objecttype"}
    states = [p for p in TREATMENTS if p in by]
    places = {t for _, t in by.get("receptacletype", [])}
    lamps = {kinds.get(a[0], "") for a in by.get("istoggled", [])}
    held = {kinds.get(a[1], "") for a in by.get("holds", [])}
    put = {kinds.get(a[0], "") for a in by.get("inreceptacle", [])} - lamps
    if not unknown and len(lamps) == 1 and len(held) == 1 and not put and not places and not states:
        return Wish(held.pop(), lamp=lamps.pop())
    if not unknown and len(put) == 1 and len(places) == 1 and not lamps and not held and len(states) <= 1:
        number = len(by["inreceptacle"])
        if number == 1 or (number == 2 and "=" in by and not states):
            return Wish(put.pop(), places.pop(), number, states[0] if states else "")
    raise TaskError(f"game '{game.id}' has a goal of none of the six types: no plan can be made for it.")


_KNOWN = {
    "inreceptacle", "receptacletype", "receptacleatlocation", "atlocation", "holds", "istoggled", "toggleable", "=",
    *TREATMENTS, *(able for able, _, _ in TREATMENTS.values()),
}  # fmt: skip


def _atoms(f: Formula) -> Iterator[Atom]:
    if isinstance(f, Atom):
        yield f
    elif isinstance(f, Not):
        yield from _atoms(f.part)
    elif isinstance(f, Exists | Every):
        yield from _atoms(f.body)
    else:
        for part in f.parts:
            yield from _atoms(part)


# --- what never changes ------------------------------------------------------------------------------------------


class Home:
    """The unchanging facts of a game, in the form that the search needs."""

    def __init__(self, game: Game):
        self.names = game.names
        self.wish = wish_of(game)
        self.at = {r: place for _, r, place in sorted(game.still.get("receptacleatlocation", ()), reverse=True)}
        self.rtype = _map(game, "receptacletype")
        self.otype = _map(game, "objecttype")
        self.openable, self.movable = _set(game, "openable"), _set(game, "pickupable")
        contain = {(rt, ot) for _, rt, ot in game.still.get("cancontain", ())}
        self.fit: dict[str, list[str]] = {}  # kind of thing -> receptacles that accept it, in order of their names
        order = sorted(self.at, key=lambda r: _natural(game.names.get(r, r)))
        for kind in sorted(set(self.otype.values())):
            self.fit[kind] = [r for r in order if (self.rtype.get(r, ""), kind) in contain]
        w = self.wish
        able, does, self.verb = TREATMENTS[w.state] if w.state else ("", (), "")
        able_things = _set(game, able) if able else frozenset(self.otype)
        self.things = frozenset(o for o, t in self.otype.items() if t == w.thing and o in able_things)
        lights = _set(game, "toggleable")
        self.lamps = frozenset(o for o, t in self.otype.items() if w.lamp and t == w.lamp and o in lights)
        self.appliances = [r for r in order if self.rtype.get(r) in does]
        self.put: Dialect = "move"
        words = game.grammar.actions.get("putobject")
        if words is not None and "in/on" in repr(words.template):
            self.put = "put"

    def placing(self, thing: str, receptacle: str) -> str:
        verb, word = ("put", "in/on") if self.put == "put" else ("move", "to")
        return f"{verb} {self.names[thing]} {word} {self.names[receptacle]}"


_HOMES: weakref.WeakKeyDictionary[Game, Home] = weakref.WeakKeyDictionary()


def _home(game: Game) -> Home:
    found = _HOMES.get(game)
    if found is None:
        found = _HOMES[game] = Home(game)
    return found


def _map(game: Game, predicate: str) -> dict[str, str]:
    return {a: b for _, a, b in game.still.get(predicate, ())}


def _set(game: Game, predicate: str) -> frozenset[str]:
    return frozenset(f[1] for f in game.still.get(predicate, ()))


def _natural(name: str) -> tuple[str, int]:
    word, _, number = name.rpartition(" ")
    return (word, int(number)) if number.isdigit() else (name, 0)


# --- the search --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class State:
    """The part of a state that matters: `places` of the task's things and lamps, which of them are `ready` (clean, hot,
    cool, or switched on), and what is `open`."""

    here: str
    held: str
    places: Pairs
    ready: frozenset[str]
    open: frozenset[str]


def plan(play: Play) -> tuple[str, ...] | None:
    """A shortest plan from this moment on. Among equal plans it is the same one each time."""
    home = _home(play.game)
    start = _state(play, home)
    ticket = count()
    queue: list[tuple[int, int, State, tuple[str, ...]]] = [(_must(start, home), next(ticket), start, ())]
    best = {start: 0}
    while queue:
        _, _, state, done = heapq.heappop(queue)
        if _met(state, home):
            return done
        if len(done) > best[state]:
            continue
        for commands, after in _acts(state, home):
            cost = len(done) + len(commands)
            if cost < best.get(after, cost + 1):
                best[after] = cost
                heapq.heappush(queue, (cost + _must(after, home), next(ticket), after, done + commands))
    return None


def _state(play: Play, home: Home) -> State:
    by: dict[str, list[Fact]] = {}
    for fact in play.state:
        by.setdefault(fact[0], []).append(fact)
    about = home.things | home.lamps
    ready = {f[1] for f in by.get(home.wish.state or "istoggled", ())} & about
    return State(
        next((f[2] for f in by.get("atlocation", ())), ""),
        next((f[2] for f in by.get("holds", ())), ""),
        frozenset((o, r) for _, o, r in by.get("inreceptacle", ()) if o in about and r in home.at),
        frozenset(ready),
        frozenset(f[1] for f in by.get("opened", ())),
    )


def _met(s: State, home: Home) -> bool:
    wish = home.wish
    if wish.lamp:
        return s.held in home.things and any(
            o in s.ready and home.at[r] == s.here for o, r in s.places if o in home.lamps
        )
    return _placed(s, home) >= wish.number


def _placed(s: State, home: Home) -> int:
    """The largest number of things, in the wanted state, that one receptacle of the right kind holds."""
    counts: dict[str, int] = {}
    for o, r in s.places:
        if o in home.things and home.rtype.get(r) == home.wish.place and (not home.wish.state or o in s.ready):
            counts[r] = counts.get(r, 0) + 1
    return max(counts.values(), default=0)


def _must(s: State, home: Home) -> int:
    """The number of acts that cannot be avoided: never more than will be needed."""
    wish, holding = home.wish, s.held in home.things
    drop = 0 if holding or not s.held else 1
    if wish.lamp:
        return (0 if holding else drop + 1) + (0 if s.ready & home.lamps else 1)
    missing = wish.number - _placed(s, home)
    if missing <= 0:
        return 0
    if not wish.state:
        return 2 * missing - 1 if holding else drop + 2 * missing
    other = (0 if not s.held else 1) + 2 + (0 if s.ready - {s.held} else 1)
    return min(other, 1 + (s.held not in s.ready)) if holding else other


def _acts(s: State, home: Home) -> Iterator[tuple[tuple[str, ...], State]]:
    name = home.names
    if not s.held:
        for o, r in sorted(s.places, key=lambda p: (_natural(name[p[0]]), _natural(name[p[1]]))):
            if o in home.movable and o in home.things:
                way, there = _reach(s, home, r)
                yield (*way, f"take {name[o]} from {name[r]}"), replace(there, held=o, places=s.places - {(o, r)})
    else:
        tracked = s.held in home.things or s.held in home.lamps
        for r in home.fit.get(home.otype.get(s.held, ""), ()):
            way, there = _reach(s, home, r)
            places = s.places | {(s.held, r)} if tracked else s.places
            yield (*way, home.placing(s.held, r)), replace(there, held="", places=places)
    if home.verb and s.held in home.things and s.held not in s.ready:
        for r in home.appliances:
            way, there = _go(s, home, r)
            command = f"{home.verb} {name[s.held]} with {name[r]}"
            yield (*way, command), replace(there, ready=s.ready | {s.held})
    for o, r in sorted(s.places):
        if o in home.lamps:
            way, there = _go(s, home, r)
            if o not in s.ready:
                yield (*way, f"use {name[o]}"), replace(there, ready=s.ready | {o})
            elif way:
                yield way, there


def _go(s: State, home: Home, r: str) -> tuple[tuple[str, ...], State]:
    place = home.at[r]
    return ((), s) if s.here == place else ((f"go to {home.names[r]}",), replace(s, here=place))


def _reach(s: State, home: Home, r: str) -> tuple[tuple[str, ...], State]:
    way, there = _go(s, home, r)
    if r in home.openable and r not in s.open:
        return (*way, f"open {home.names[r]}"), replace(there, open=s.open | {r})
    return way, there
