"""ALFWorld in plain Python: each game is read once and can be played by many players at once.

    game = parse_game(domain, problem, grammar, id="…")      # a Game never changes
    play = game.start()                                      # a Play is one player's facts
    play.observation; play.commands(); play.step("go to desk 1"); play.won; other = play.copy()

A fact is a tuple, ("inreceptacle", "mug_bar_…", "desk_bar_…"), all in lower case. Facts that no action changes belong
to the game. A play keeps the others in a set, with sorted lists of those that are looked up by an argument. A copy
shares both until one of the two plays changes something.

Texts, commands and their order, score and end are those of the original (textworld 1.7.0 with the names of alfworld
0.4.2); `trailmark worlds check alfworld` compares them. As in the original, a command that is not admissible gives
"Nothing happens." and is not a move. An action that cannot change anything (going where one already is) is not
admissible. A game can be continued after it is won, and `won` is about the present facts, not the past.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from sys import intern
from typing import Any, TypeVar

from trailmark.errors import DataError
from trailmark.tasks.alfworld import grounding as g
from trailmark.tasks.alfworld.grammar import Each, Grammar, Symbol, parse_grammar, thing_names
from trailmark.tasks.alfworld.grounding import ALWAYS, Case, Ground, Outline, Step, Values
from trailmark.tasks.alfworld.pddl import ROOT, All, Atom, Domain, Fact, Formula, Not, Some, parse_domain, parse_problem

NOTHING = "Nothing happens."
REMEMBERED = 1024  # cached domains and grammars
Key = tuple[str, int, str] | tuple[str]
Found = tuple[dict[str, Ground], tuple[Ground, ...]]  # actions by command: unconditional, and with facts left to check
K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """A domain prepared for grounding. All games of a collection share one."""

    domain: Domain
    changing: frozenset[str]
    outlines: tuple[Outline, ...]
    asked: frozenset[str]  # changing predicates that occur in conditions
    roots: tuple[str, ...]  # predicates that some outline begins with


@dataclass(frozen=True, slots=True)
class Bundle:
    """What follows from one fact: actions, and rows of things (with their conditions) to join further facts to."""

    free: dict[str, Ground]
    asking: tuple[Ground, ...]
    rows: tuple[tuple[int, Values, Case], ...]


@dataclass(frozen=True, eq=False, repr=False)
class Game:
    """A parsed game. `goal` is the winning condition; `types` maps a thing to its PDDL type (agent, object, …)."""

    id: str
    rules: Rules
    grammar: Grammar
    types: Mapping[str, str]
    goal: Formula
    still: Mapping[str, tuple[Fact, ...]]  # the facts that never change, by predicate
    first: frozenset[Fact]  # the changing facts at the start
    names: Mapping[str, str]  # the names of things: {"mug_bar_…": "mug 1"}
    walkthrough: tuple[str, ...] = ()
    task_type: str = ""
    where: str = "<file>"
    _bundles: dict[Fact, Bundle] = field(default_factory=dict)
    _joined: dict[tuple[int, Values], Found] = field(default_factory=dict)
    _indexes: dict[tuple[str, int | None], dict[str | None, tuple[Fact, ...]]] = field(default_factory=dict)
    _members: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _spoken: dict[str, list[Ground]] = field(default_factory=dict)
    _kept: dict[Any, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Game({self.id!r})"

    def start(self) -> Play:
        return self._start.copy()

    @cached_property
    def things(self) -> Mapping[str, str]:
        """The id of each name: {"mug 1": "mug_bar_…"}."""
        return {name: x for x, name in self.names.items()}

    @cached_property
    def goals(self) -> tuple[tuple[Case, ...], ...]:
        """The goal as parts that must all hold. A part holds if one of its cases does."""
        parts = self.goal.parts if isinstance(self.goal, All) else (self.goal,)
        return tuple(tuple(g.cases(part, self, self.where)) for part in parts)

    @cached_property
    def decisive(self) -> frozenset[str]:
        """The predicates in the goal."""
        return frozenset(_predicates(self.goal))

    @property
    def changing(self) -> frozenset[str]:
        return self.rules.changing

    @cached_property
    def facts(self) -> frozenset[Fact]:
        """The facts that never change."""
        return frozenset(f for facts in self.still.values() for f in facts)

    @cached_property
    def _start(self) -> Play:
        play = Play(self)
        play.observation = self.grammar.write((Symbol("intro"),), {}, play)
        return play

    @cached_property
    def _listed(self) -> frozenset[str]:
        """The changing predicates that are looked up by an argument."""
        return (self.rules.asked | self.grammar.predicates) & self.changing

    # What never changes (the protocol of grounding.Stage).

    def static(self, fact: Fact) -> bool:
        return fact in self.facts

    def static_rows(self, predicate: str, at: int | None, thing: str | None) -> Sequence[Fact]:
        index = self._indexes.get((predicate, at))
        if index is None:
            index = self._indexes[predicate, at] = _grouped(self.still.get(predicate, ()), at)
        return index.get(thing, ())

    def members(self, kind: str) -> Sequence[str]:
        found = self._members.get(kind)
        if found is None:
            found = self._members[kind] = tuple(sorted(x for x in self.types if self.is_a(x, kind)))
        return found

    def is_a(self, thing: str, kind: str) -> bool:
        own = self.types.get(thing)
        return own is not None and (own == kind or kind == ROOT or kind in self.rules.domain.kinds(own))

    def value(self, thing: str, what: str) -> str:
        if what == "name":
            return self.names.get(thing, thing)
        if what == "id":
            return thing
        if what == "type":
            return self.types.get(thing, "")
        return "the" if what == "definite" else "a"

    # Actions on things, computed when they are first needed.

    def bundle(self, root: Fact) -> Bundle:
        """What a fact makes possible. The empty fact is always true."""
        found = self._bundles.get(root)
        if found is None:
            found = self._bundles[root] = self._bundle(root)
        return found

    def _bundle(self, root: Fact) -> Bundle:
        free: dict[str, Ground] = {}
        asking: list[Ground] = []
        rows: list[tuple[int, Values, Case]] = []
        for number, outline in enumerate(self.rules.outlines):
            plan = outline.plan
            if not plan.begins(root):
                continue
            begun: list[Values] = [()] if plan.root is None else plan.root.extend((), (root,))
            found = g.static_values(plan.prefix, begun, self)
            if plan.joins:
                gates = ((row, g.gate(plan, row, self)) for row in found)
                rows += [(number, row, gate) for row, gate in gates if gate is not None]
            else:
                more, some = self._make(outline, found)
                free = more | free
                asking += some
        return Bundle(dict(sorted(free.items())), tuple(asking), tuple(rows))

    def joined(self, number: int, values: Values) -> Found:
        """The actions of an outline for the values that its joins found."""
        found = self._joined.get((number, values))
        if found is None:
            found = self._joined[number, values] = self._make(self.rules.outlines[number], [values])
        return found

    def _make(self, outline: Outline, rows: list[Values]) -> Found:
        free: dict[str, Ground] = {}
        asking: list[Ground] = []
        for values in g.completed(outline.plan, rows, self, self.where):
            made = self._ground(outline, values)
            if made is not None:
                self._spoken.setdefault(made.command, []).append(made)
                if made.rest is ALWAYS:
                    free.setdefault(made.command, made)
                else:
                    asking.append(made)
        return free, tuple(asking)

    def _ground(self, outline: Outline, values: Values) -> Ground | None:
        """The action on these things; None if it cannot happen or cannot change anything."""
        asked = g.conditions(outline, values, self)
        if asked is None:
            return None
        case, rest = asked
        adds, deletes, when = g.changes(outline, values, self)
        if not when and case.need.issuperset(adds) and case.never.issuperset(deletes):
            return None
        action = outline.action
        args = tuple([values[outline.plan.names.index(name)] for name, _ in action.parameters])
        env = dict(zip(outline.keys, args + args))
        command = intern(self.grammar.write(self.grammar.actions[action.name].template, env, self._start))
        decides = any(f[0] in self.decisive for f in (*adds, *deletes, *(p[0] for _, p, _ in when)))
        one = self._one
        return Ground(
            action.name, args, command, one(case), rest if rest is ALWAYS else one(rest), one(tuple(map(g.pair, adds))),
            one(tuple(map(g.pair, deletes))), tuple(when), decides, outline.keys,
        )  # fmt: skip

    def _one(self, x: T) -> T:
        """One shared object for all values equal to x, because thousands of actions have much in common."""
        return self._kept.setdefault(x, x)


class Play:
    """One play of a game. `observation` is the last text; `moves` counts admissible commands."""

    __slots__ = ("_facts", "_index", "_menu", "_shared", "game", "moves", "observation", "won")

    def __init__(self, game: Game):
        self.game = game
        self.observation = ""
        self.moves = 0
        self._facts: set[Fact] = set(game.first)
        self._shared = False  # whether another play shares the facts and the index
        self._menu: dict[str, Ground] | None = None
        lists: dict[Key, list[Fact]] = {}
        for fact in sorted(f for f in self._facts if f[0] in game._listed):
            for key in _keys(fact):
                lists.setdefault(key, []).append(fact)
        self._index: dict[Key, tuple[Fact, ...]] = {key: tuple(facts) for key, facts in lists.items()}
        self.won = self._wins()

    @property
    def score(self) -> int:
        return int(self.won)

    @property
    def done(self) -> bool:
        return self.won

    @property
    def facts(self) -> frozenset[Fact]:
        """All facts that are true now."""
        return self.game.facts | {f for f in self._facts if f[0] in self.game.changing}

    @property
    def state(self) -> frozenset[Fact]:
        """The changing facts in conditions or the goal. Two plays with the same state continue alike."""
        matter = self.game.rules.asked | self.game.decisive
        return frozenset(f for f in self._facts if f[0] in matter)

    def copy(self) -> Play:
        other = object.__new__(Play)
        other.game, other.observation, other.moves, other.won = self.game, self.observation, self.moves, self.won
        other._facts, other._index, other._menu = self._facts, self._index, self._menu
        self._shared = other._shared = True
        return other

    def commands(self) -> tuple[str, ...]:
        """The commands that can be done now, sorted."""
        return tuple(sorted(self._actions()))

    def actions(self) -> tuple[tuple[str, Ground], ...]:
        """The commands with their actions: for planners, together with `apply`."""
        return tuple(sorted(self._actions().items()))

    def step(self, command: str) -> str:
        """Do a command and return the observation."""
        action = self._find(command.strip())
        if action is None:
            self.observation = NOTHING
        else:
            self.apply(action)
            wording = self.game.grammar.actions[action.name]
            self.observation = self.game.grammar.write(wording.feedback, action.env, self)
        return self.observation

    def apply(self, action: Ground) -> None:
        """Do an action of `actions()` without a text: `observation` does not change."""
        fired = [(pair, value) for when, pair, value in action.when if g.true(when, self._facts)] if action.when else ()
        if self._shared:
            self._facts, self._index, self._shared = set(self._facts), dict(self._index), False
        gained = [pair for pair, value in fired if value]
        for pair in action.deletes:
            self._remove(*pair)
        for pair, value in fired:
            if not value and pair not in gained and pair not in action.adds:
                self._remove(*pair)
        for pair in action.adds:
            self._add(*pair)
        for pair in gained:
            self._add(*pair)
        self.moves += 1
        self._menu = None
        if action.decides:
            self.won = self._wins()

    # The facts (the protocol of grammar.World).

    def true(self, fact: Fact) -> bool:
        return fact in self._facts or fact in self.game.facts

    def rows(self, predicate: str, at: int | None, thing: str | None) -> Sequence[Fact]:
        if predicate in self.game._listed:
            return self._index.get((predicate,) if at is None else (predicate, at, thing or ""), ())
        if predicate in self.game.still:
            return self.game.static_rows(predicate, at, thing)
        return sorted(f for f in self._facts if f[0] == predicate and (at is None or f[at] == thing))

    def value(self, thing: str, what: str) -> str:
        return self.game.value(thing, what)

    def is_a(self, thing: str, kind: str) -> bool:
        return self.game.is_a(thing, kind)

    def _add(self, fact: Fact, denial: Fact) -> None:
        facts = self._facts
        facts.discard(denial)
        if fact not in facts:
            facts.add(fact)
            if fact[0] in self.game._listed:
                for key in _keys(fact):
                    others = [*self._index.get(key, ())]
                    insort(others, fact)
                    self._index[key] = tuple(others)

    def _remove(self, fact: Fact, denial: Fact) -> None:
        facts = self._facts
        facts.add(denial)
        if fact in facts:
            facts.remove(fact)
            if fact[0] in self.game._listed:
                for key in _keys(fact):
                    others = self._index[key]
                    at = bisect_left(others, fact)
                    self._index[key] = others[:at] + others[at + 1 :]

    def _wins(self) -> bool:
        facts = self._facts
        return all(any(case.holds(facts) for case in part) for part in self.game.goals)

    def _find(self, command: str) -> Ground | None:
        if self._menu is None:
            for known in self.game._spoken.get(command, ()):
                if known.case.holds(self._facts):
                    return known
        return self._actions().get(command)

    def _actions(self) -> dict[str, Ground]:
        if self._menu is None:
            self._menu = self._look()
        return self._menu

    def _look(self) -> dict[str, Ground]:
        game, facts, index = self.game, self._facts, self._index
        roots: list[Fact] = [()]
        for predicate in game.rules.roots:
            roots += index.get((predicate,), ())
        menu: dict[str, Ground] = {}
        asking: list[Ground] = []
        for root in roots:
            bundle = game.bundle(root)
            menu.update(bundle.free)
            asking += bundle.asking
            for number, row, gate in bundle.rows:
                if gate is ALWAYS or gate.holds(facts):
                    for values in self._join(game.rules.outlines[number].plan.joins, row):
                        more, some = game.joined(number, values)
                        menu.update(more)
                        asking += some
        for action in asking:
            if action.rest.holds(facts):
                menu.setdefault(action.command, action)
        return menu

    def _join(self, joins: tuple[Step, ...], row: Values) -> list[Values]:
        """A row, extended by what changing facts add to it."""
        index, rows = self._index, [row]
        for step in joins[1:]:  # stop at once if a needed fact is surely missing
            known = isinstance(step.by, str) or step.by < len(row)
            if step.at is not None and known and not index.get((step.predicate, step.at, step.key(row))):
                return []
        for step in joins:
            p, at = step.predicate, step.at
            if at is None:
                rows = [v for r in rows for v in step.extend(r, index.get((p,), ()))]
            else:
                rows = [v for r in rows for v in step.extend(r, index.get((p, at, step.key(r)), ()))]
        return rows


def parse_game(
    domain: str,
    problem: str,
    grammar: str,
    *,
    id: str,
    walkthrough: Sequence[str] = (),
    task_type: str = "",
    where: str = "<file>",
) -> Game:
    """A game from its three texts. What depends only on the domain or the grammar is cached by their text."""
    rules = _remember(_RULES, domain, lambda: _rules(domain, f"{where} (domain)"))
    words = _remember(_GRAMMARS, (domain, grammar), lambda: _words(grammar, rules, f"{where} (grammar)"))
    p = parse_problem(problem, rules.domain, f"{where} (problem)")
    still: dict[str, list[Fact]] = {}
    first: list[Fact] = []
    for fact in p.init:
        if fact[0] in rules.changing:
            first.append(fact)
        else:
            still.setdefault(fact[0], []).append(fact)
    names = thing_names({x for fact in p.init for x in fact[1:]})
    return Game(
        id, rules, words, p.objects, p.goal, {k: tuple(v) for k, v in still.items()}, frozenset(first), names,
        tuple(walkthrough), task_type, where,
    )  # fmt: skip


_RULES: dict[str, Rules] = {}
_GRAMMARS: dict[tuple[str, str], Grammar] = {}


def _remember(store: dict[K, T], text: K, make: Callable[[], T]) -> T:
    found = store.get(text)
    if found is None:
        found = make()
        if len(store) >= REMEMBERED:
            store.pop(next(iter(store)))
        store[text] = found
    return found


def _rules(text: str, where: str) -> Rules:
    domain = parse_domain(text, where)
    changing = g.changing_predicates(domain)
    asked: set[str] = set()
    for action in domain.actions:
        asked |= _predicates(action.condition)
        for effect in action.effects:
            asked |= _predicates(effect.when)
    outlines = g.outlines(domain, changing)
    roots = dict.fromkeys(o.plan.root.predicate for o in outlines if o.plan.root)
    return Rules(domain, changing, outlines, frozenset(asked) & changing, tuple(roots))


def _words(text: str, rules: Rules, where: str) -> Grammar:
    """A grammar with an intro, in which the words of every action do not depend on facts that change."""
    grammar = parse_grammar(text, where)
    if "intro" not in grammar.rules:
        raise DataError("there is no symbol '#intro#', with which a game begins.", where)
    for action in rules.domain.actions:
        wording = grammar.actions.get(action.name)
        if wording is None:
            raise DataError(f"action '{action.name}' of the domain has no words here.", where)
        for node in wording.template:
            asked = {p.predicate for p in node.given or ()} if isinstance(node, Each) else set()
            if asked & rules.changing or isinstance(node, Symbol):
                raise DataError(f"the template of action '{action.name}' depends on what can change.", where)
    return grammar


def _predicates(f: Formula) -> set[str]:
    if isinstance(f, Atom):
        return {f.predicate}
    if isinstance(f, All | Some):
        return {p for part in f.parts for p in _predicates(part)}
    return _predicates(f.part if isinstance(f, Not) else f.body)


def _grouped(facts: Sequence[Fact], at: int | None) -> dict[str | None, tuple[Fact, ...]]:
    groups: dict[str | None, list[Fact]] = {}
    for fact in sorted(facts):
        groups.setdefault(None if at is None else fact[at], []).append(fact)
    return {k: tuple(v) for k, v in groups.items()}


def _keys(fact: Fact) -> list[Key]:
    """The keys that list a fact: its predicate, and each argument if there are several."""
    if len(fact) == 2:
        return [(fact[0],)]
    return [(fact[0],), *((fact[0], at, fact[at]) for at in range(1, len(fact)))]
