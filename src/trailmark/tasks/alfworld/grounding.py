"""Grounding: from actions with variables to actions with things.

A `Plan` says how to find the variables of a condition. First comes a changing fact (where the agent is, what it holds),
then unchanging facts that follow from it (what stands there), then further changing facts (what lies in it). What
depends only on unchanging facts is computed once per game and cached, so a condition costs a few look-ups in play.

    root     a changing fact to begin with; None if a condition has none
    prefix   unchanging facts; root and prefix make a row of things
    joins    changing facts that bring in more things
    late     unchanging facts about those
    early    formulas about the things of a row alone, decided before the joins

A `Case` is what is left of a condition for given things: facts that must be true, facts that must not, other formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import Protocol

from trailmark.errors import DataError
from trailmark.tasks.alfworld.pddl import (
    ROOT,
    Action,
    All,
    Atom,
    Domain,
    Effect,
    Every,
    Exists,
    Fact,
    Formula,
    Not,
    Some,
)

Names = tuple[tuple[str, str], ...]  # variables and their types
Values = tuple[str, ...]  # things, one for each variable found so far
Slot = int | str  # an index into values, or a constant
Shape = tuple[str, tuple[Slot, ...]]  # a fact with slots as arguments
Pair = tuple[Fact, Fact]  # a fact, and the fact that says it was removed
WIDEST = 50_000  # most combinations of things that a condition may be tried on
DENIED = "not_"


class Stage(Protocol):
    """The unchanging facts of a game."""

    @property
    def changing(self) -> frozenset[str]: ...

    def static(self, fact: Fact) -> bool: ...

    def static_rows(self, predicate: str, at: int | None, thing: str | None) -> Sequence[Fact]: ...

    def members(self, kind: str) -> Sequence[str]: ...

    def is_a(self, thing: str, kind: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One fact to find: look it up by argument `at` (None: try all), compare `same`, and add `new`."""

    predicate: str
    at: int | None
    by: Slot
    same: tuple[tuple[int, Slot], ...]
    new: tuple[int, ...]

    def extend(self, values: Values, facts: Sequence[Fact]) -> list[Values]:
        out = [values + tuple([fact[p] for p in self.new]) for fact in facts]
        for p, x in self.same:
            if isinstance(x, str):
                out = [v for v, fact in zip(out, facts) if fact[p] == x]
            else:
                out = [v for v, fact in zip(out, facts) if fact[p] == v[x]]
        return out

    def key(self, values: Values) -> str:
        return self.by if isinstance(self.by, str) else values[self.by]


@dataclass(frozen=True, slots=True)
class Plan:
    root: Step | None
    prefix: tuple[Step, ...]
    joins: tuple[Step, ...]
    late: tuple[Step, ...]
    names: tuple[str, ...]  # the variables in the order in which they are found, then those in no fact
    pools: tuple[str, ...]  # the types of the variables in no fact: every thing of the type is tried
    kinds: tuple[tuple[int, str], ...]  # types to check
    found: tuple[Shape, ...]  # changing facts that root and joins find
    asked: tuple[Shape, ...]  # other changing facts
    early: tuple[Formula, ...]
    filters: tuple[Formula, ...]  # other formulas

    def begins(self, fact: Fact) -> bool:
        """Whether the plan may begin with this fact; the empty fact if it needs none."""
        root = self.root
        if root is None or not fact:
            return root is None and not fact
        return fact[0] == root.predicate and (root.at is None or fact[root.at] == root.by)


@dataclass(frozen=True, slots=True)
class Case:
    """What is left of a condition once its variables are things."""

    need: frozenset[Fact]
    never: frozenset[Fact]
    rest: tuple[Formula, ...]

    def holds(self, facts: set[Fact] | frozenset[Fact]) -> bool:
        return (
            self.need <= facts
            and (not self.never or self.never.isdisjoint(facts))
            and (not self.rest or all(true(f, facts) for f in self.rest))
        )

    def __and__(self, other: Case) -> Case:
        if other is ALWAYS:
            return self
        return Case(self.need | other.need, self.never | other.never, self.rest + other.rest)


ALWAYS = Case(frozenset(), frozenset(), ())


@dataclass(frozen=True, slots=True)
class Outline:
    """A plan with its action: what it changes, with slots for things. `more` are effects with conditions or
    variables."""

    action: Action
    plan: Plan
    adds: tuple[Shape, ...]
    deletes: tuple[Shape, ...]
    more: tuple[Effect, ...]
    keys: tuple[str, ...]  # the parameters as texts name them: by name, then by name and type


@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """An action on things. `args` are its parameters' values, `case` is its condition, `adds` and `deletes` are its
    changes (with their denials), `when` its conditional changes. `rest` is the part of `case` that is not yet known
    when the action is found."""

    name: str
    args: Values
    command: str
    case: Case
    rest: Case
    adds: tuple[Pair, ...]
    deletes: tuple[Pair, ...]
    when: tuple[tuple[Formula, Pair, bool], ...]
    decides: bool  # whether it changes a fact in the goal
    keys: tuple[str, ...]

    @property
    def env(self) -> dict[str, str]:
        """The parameters' values under the names that texts use."""
        return dict(zip(self.keys, self.args + self.args))


def outlines(domain: Domain, changing: frozenset[str]) -> tuple[Outline, ...]:
    """Every action of a domain, once for each alternative at the top of its condition."""
    out = []
    for action in domain.actions:
        for more, atoms, filters in branches(action.condition):
            variables = action.parameters + more
            if all(kind in domain.types for _, kind in variables):
                out.append(_outline(action, make_plan(variables, atoms, filters, changing)))
    return tuple(out)


def _outline(action: Action, plan: Plan) -> Outline:
    plain = [e for e in action.effects if not e.variables and e.when == All()]
    shapes = [(e.value, _shape(e.atom, plan.names)) for e in plain]
    names = tuple(name[1:] for name, _ in action.parameters)
    return Outline(
        action, plan, tuple(s for value, s in shapes if value), tuple(s for value, s in shapes if not value),
        tuple(e for e in action.effects if e not in plain),
        names + tuple(f"{name[1:]}:{kind}" for name, kind in action.parameters),
    )  # fmt: skip


def branches(condition: Formula) -> list[tuple[Names, list[Atom], list[Formula]]]:
    """A condition as alternatives of (further variables, facts, other formulas). Only alternatives at the top are
    separated. Inner ones stay formulas, which are checked when their variables are known."""
    if isinstance(condition, Some):
        return [b for part in condition.parts for b in branches(part)]
    if isinstance(condition, All) and len(condition.parts) == 1:
        return branches(condition.parts[0])
    variables: list[tuple[str, str]] = []
    atoms: list[Atom] = []
    filters: list[Formula] = []

    def gather(f: Formula, renamed: Mapping[str, str]) -> None:
        if isinstance(f, All):
            for part in f.parts:
                gather(part, renamed)
        elif isinstance(f, Exists):
            own = {name: f"{name}#{len(variables) + k}" for k, (name, _) in enumerate(f.variables)}
            variables.extend((own[name], kind) for name, kind in f.variables)  # two quantifiers may use the same name
            gather(f.body, {**renamed, **own})
        elif isinstance(f, Atom) and f.predicate != "=":
            atoms.append(Atom(f.predicate, tuple(renamed.get(x, x) for x in f.args)))
        else:
            filters.append(_rename(f, renamed))

    gather(condition, {})
    return [(tuple(variables), atoms, filters)]


def _rename(f: Formula, renamed: Mapping[str, str]) -> Formula:
    if isinstance(f, Atom):
        return Atom(f.predicate, tuple(renamed.get(x, x) for x in f.args))
    if isinstance(f, Not):
        return Not(_rename(f.part, renamed))
    if isinstance(f, All | Some):
        return type(f)(tuple(_rename(p, renamed) for p in f.parts))
    own = dict(f.variables)
    return type(f)(f.variables, _rename(f.body, {k: v for k, v in renamed.items() if k not in own}))


def make_plan(
    variables: Names, atoms: list[Atom], filters: list[Formula], changing: frozenset[str], search: bool = True
) -> Plan:
    """Order the facts of a condition. Without `search` (for goals), changing facts find no values and are only
    checked."""
    found: dict[str, int] = {}
    moving = [a for a in atoms if a.predicate in changing] if search else []
    still = [a for a in atoms if a.predicate not in changing]
    finders: list[Atom] = []

    def known(a: Atom) -> int:
        return sum(not x.startswith("?") or x in found for x in a.args)

    def take(pool: list[Atom], a: Atom) -> Step:
        pool.remove(a)
        if pool is not still:
            finders.append(a)
        return _step(a, found)

    root = take(moving, moving[0]) if moving else None
    prefix, joins, late = [], [], []
    while still:
        best = max(still, key=known)
        if known(best) == 0 and any(0 < known(a) < len(a.args) for a in moving):
            break
        prefix.append(take(still, best))
    row = frozenset(found)
    while open_ := [a for a in moving if known(a) < len(a.args)]:
        joins.append(take(moving, max(open_, key=known)))
    while still:
        late.append(take(still, max(still, key=known)))
    free = [(name, kind) for name, kind in variables if name not in found]
    names = (*found, *(name for name, _ in free))
    early = [f for f in filters if _variables(f) <= row] if joins else []
    return Plan(
        root, tuple(prefix), tuple(joins), tuple(late), names, tuple(kind for _, kind in free),
        tuple((found[name], kind) for name, kind in variables if kind != ROOT and name in found),
        tuple(_shape(a, names) for a in finders),
        tuple(_shape(a, names) for a in atoms if a.predicate in changing and a not in finders),
        tuple(early), tuple(f for f in filters if f not in early),
    )  # fmt: skip


def _variables(f: Formula) -> frozenset[str]:
    """The free variables of a formula."""
    if isinstance(f, Atom):
        return frozenset(x for x in f.args if x.startswith("?"))
    if isinstance(f, Not):
        return _variables(f.part)
    if isinstance(f, All | Some):
        return frozenset().union(*map(_variables, f.parts))
    return _variables(f.body) - {name for name, _ in f.variables}


def _step(a: Atom, found: dict[str, int]) -> Step:
    """How to find the facts of an atom. Its new variables get the next indices in `found`."""
    at, by = None, ""
    same: list[tuple[int, Slot]] = []
    new: list[int] = []
    fresh: set[str] = set()
    for place, x in enumerate(a.args, 1):
        if x.startswith("?") and x not in found:
            found[x] = len(found)
            new.append(place)
            fresh.add(x)
        elif at is None and x not in fresh:
            at, by = place, found.get(x, x)
        else:
            same.append((place, found.get(x, x)))
    return Step(a.predicate, at, by, tuple(same), tuple(new))


def _shape(a: Atom, names: tuple[str, ...]) -> Shape:
    return a.predicate, tuple(names.index(x) if x in names else x for x in a.args)


def _fact(shape: Shape, values: Values) -> Fact:
    return (shape[0], *[x if isinstance(x, str) else values[x] for x in shape[1]])


def static_values(steps: tuple[Step, ...], start: list[Values], stage: Stage) -> list[Values]:
    """The values found so far, extended by unchanging facts."""
    values = start
    for step in steps:
        p, at = step.predicate, step.at
        if at is None:
            facts = stage.static_rows(p, None, None)
            values = [w for v in values for w in step.extend(v, facts)]
        else:
            values = [w for v in values for w in step.extend(v, stage.static_rows(p, at, step.key(v)))]
    return values


def completed(plan: Plan, rows: list[Values], stage: Stage, where: str) -> Iterator[Values]:
    """All values: extended by the late facts and by every thing for variables in no fact, with types checked."""
    pools = [stage.members(kind) for kind in plan.pools]
    found = [v for v in static_values(plan.late, rows, stage) if all(stage.is_a(v[k], kind) for k, kind in plan.kinds)]
    if len(found) * prod(map(len, pools)) > WIDEST:
        raise DataError(f"a condition must be tried on more than {WIDEST} combinations of things.", where)
    for v in found:
        for rest in product(*pools):
            yield v + rest


def case_of(
    filters: Iterable[Formula], need: Iterable[Fact], names: Values, values: Values, stage: Stage
) -> Case | None:
    """What is left of formulas and facts for these things; None if it never holds."""
    needed = set(need)
    never: set[Fact] = set()
    rest: list[Formula] = []
    for f in filters:
        g = simplify(f, dict(zip(names, values)), stage)
        if g is False:
            return None
        if isinstance(g, Atom):
            needed.add((g.predicate, *g.args))
        elif isinstance(g, Not) and isinstance(g.part, Atom):
            never.add((g.part.predicate, *g.part.args))
        elif g is not True:
            rest.append(g)
    return Case(frozenset(needed), frozenset(never), tuple(rest)) if needed or never or rest else ALWAYS


def cases(goal: Formula, stage: Stage, where: str) -> Iterator[Case]:
    """A goal as cases; one of them must hold."""
    for variables, atoms, filters in branches(goal):
        if all(stage.members(kind) for _, kind in variables):
            plan = make_plan(variables, atoms, filters, stage.changing, search=False)
            for v in completed(plan, static_values(plan.prefix, [()], stage), stage, where):
                case = case_of(plan.filters, (_fact(s, v) for s in plan.asked), plan.names, v, stage)
                if case is not None:
                    yield case


def simplify(f: Formula, b: Mapping[str, str], stage: Stage) -> Formula | bool:
    """A formula over things, with its unchanging facts already evaluated."""
    if isinstance(f, Atom):
        args = tuple([b.get(x, x) for x in f.args])
        if f.predicate == "=":
            return args[0] == args[1]
        return Atom(f.predicate, args) if f.predicate in stage.changing else stage.static((f.predicate, *args))
    if isinstance(f, Not):
        g = simplify(f.part, b, stage)
        return not g if isinstance(g, bool) else Not(g)
    if isinstance(f, Exists | Every):
        names = [name for name, _ in f.variables]
        pools = [stage.members(kind) for _, kind in f.variables]
        parts = [simplify(f.body, {**b, **dict(zip(names, x))}, stage) for x in product(*pools)]
        return _joined(isinstance(f, Every), parts)
    return _joined(isinstance(f, All), [simplify(p, b, stage) for p in f.parts])


def _joined(every: bool, parts: list[Formula | bool]) -> Formula | bool:
    if (not every) in parts:
        return not every
    left = tuple([p for p in parts if not isinstance(p, bool)])
    if not left:
        return every
    return left[0] if len(left) == 1 else All(left) if every else Some(left)


def true(f: Formula, facts: set[Fact] | frozenset[Fact]) -> bool:
    """Whether a simplified formula holds."""
    if isinstance(f, Atom):
        return (f.predicate, *f.args) in facts
    if isinstance(f, Not):
        return not true(f.part, facts)
    if isinstance(f, All):
        return all(true(p, facts) for p in f.parts)
    return isinstance(f, Some) and any(true(p, facts) for p in f.parts)


def gate(plan: Plan, row: Values, stage: Stage) -> Case | None:
    """What must hold for a row before its joins are tried."""
    return case_of(plan.early, (), plan.names, row, stage)


def changes(
    outline: Outline, values: Values, stage: Stage
) -> tuple[list[Fact], list[Fact], list[tuple[Formula, Pair, bool]]]:
    """What an action on these things adds, deletes (without what it also adds), and changes conditionally."""
    adds = [_fact(s, values) for s in outline.adds]
    deletes = [_fact(s, values) for s in outline.deletes]
    when: list[tuple[Formula, Pair, bool]] = []
    for effect in outline.more:
        b = dict(zip(outline.plan.names, values))
        names = [name for name, _ in effect.variables]
        for things in product(*(stage.members(kind) for _, kind in effect.variables)):
            own = {**b, **dict(zip(names, things))}
            condition = simplify(effect.when, own, stage)
            fact = (effect.atom.predicate, *[own.get(x, x) for x in effect.atom.args])
            if condition is True:
                (adds if effect.value else deletes).append(fact)
            elif condition is not False:
                when.append((condition, pair(fact), effect.value))
    return adds, [f for f in deletes if f not in adds], when


def conditions(outline: Outline, values: Values, stage: Stage) -> tuple[Case, Case] | None:
    """The whole condition, and the part of it that is not yet known when the values have been found."""
    plan = outline.plan
    rest = case_of(plan.filters, [_fact(s, values) for s in plan.asked], plan.names, values, stage)
    if rest is None:
        return None
    known = case_of(plan.early, [_fact(s, values) for s in plan.found], plan.names, values, stage)
    return None if known is None else (known & rest, rest)


def pair(fact: Fact) -> Pair:
    return fact, (_denied(fact[0]), *fact[1:])


@cache
def _denied(predicate: str) -> str:
    return DENIED + predicate


def changing_predicates(domain: Domain) -> frozenset[str]:
    """The predicates that some action changes."""
    return frozenset(e.atom.predicate for a in domain.actions for e in a.effects)
