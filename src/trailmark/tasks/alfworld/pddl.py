"""PDDL as the ALFWorld games write it: a domain (types, predicates, actions) and a problem (objects, facts, goal).

    text --read--> nested lists --domain / problem--> typed, checked, immutable

It reads the part of ADL in use: `and or not exists forall when =`, typed variables, empty conditions `()`, costs
(`increase`, read and ignored). Anything else is refused, and the error names file, line and word.

Words are compared in lower case. A comma is part of the word it touches: in `(exists (?l - location, ?r - receptacle)
…)` the first type is `location,`, and nothing has that type, so the condition never holds. The published domain has
such a comma, and the original planner reads it this way (an object can be examined only while it is held). So do we.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

from trailmark.errors import DataError, nearest

Fact = tuple[str, ...]  # (predicate, argument, …)
ROOT = "object"  # the type of everything
REQUIREMENTS = {
    ":adl", ":strips", ":typing", ":equality", ":action-costs", ":conditional-effects", ":negative-preconditions",
    ":disjunctive-preconditions", ":existential-preconditions", ":universal-preconditions", ":quantified-preconditions",
}  # fmt: skip

_COMMENT = re.compile(r";[^\n]*")
_TOKEN = re.compile(r"\([^()]*\)|[()]|[^\s()]+")  # a list without inner lists is one token, for speed


@dataclass(frozen=True, slots=True)
class Atom:
    """A predicate over terms; a term is an object or, with a leading '?', a variable. Equality is the predicate '='."""

    predicate: str
    args: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Not:
    part: Formula


@dataclass(frozen=True, slots=True)
class All:
    parts: tuple[Formula, ...] = ()  # none: true


@dataclass(frozen=True, slots=True)
class Some:
    parts: tuple[Formula, ...] = ()  # none: false


@dataclass(frozen=True, slots=True)
class Exists:
    variables: tuple[tuple[str, str], ...]  # (name, type)
    body: Formula


@dataclass(frozen=True, slots=True)
class Every:
    variables: tuple[tuple[str, str], ...]
    body: Formula


Formula = Atom | Not | All | Some | Exists | Every


@dataclass(frozen=True, slots=True)
class Effect:
    """For all `variables` for which `when` holds: `atom` becomes `value`."""

    variables: tuple[tuple[str, str], ...]
    when: Formula
    atom: Atom
    value: bool


@dataclass(frozen=True, slots=True)
class Action:
    name: str
    parameters: tuple[tuple[str, str], ...]
    condition: Formula
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    types: Mapping[str, str]  # type -> parent type; ROOT has none
    predicates: Mapping[str, int]  # predicate -> number of arguments
    constants: Mapping[str, str]
    actions: tuple[Action, ...]

    def kinds(self, name: str) -> Iterator[str]:
        """A type and all its ancestors."""
        while name != ROOT:
            yield name
            name = self.types[name]
        yield ROOT


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    objects: Mapping[str, str]  # object -> type
    init: tuple[Fact, ...]
    goal: Formula


class Form(list[Any]):
    """A bracketed list. `at` is the number of its first token, from which its line is found."""

    __slots__ = ("at",)

    def __init__(self, at: int = 0, words: Iterable[str] = ()):
        super().__init__(words)
        self.at = at


@dataclass(frozen=True, slots=True)
class Source:
    """A text that is being read. It knows the places of errors."""

    text: str
    where: str

    def refuse(self, message: str, form: Form | None = None, word: str | None = None) -> NoReturn:
        """Raise an error about `form`, at the line of `word` in it or at its first line."""
        raise DataError(message, self.where, self.line(form.at if form is not None else 0, word))

    def line(self, token: int, word: str | None = None) -> int:
        """The line, from 1, of token number `token`, or of the first `word` from there on."""
        plain = _plain(self.text)
        start = next((m.start() for m in islice(_TOKEN.finditer(plain), token, None)), len(plain.rstrip()))
        if word is not None:
            m = re.compile(rf"(?<![^\s()?]){re.escape(word)}(?![^\s()?])").search(plain, start)
            start = m.start() if m else start
        return plain.count("\n", 0, start) + 1


def _plain(text: str) -> str:
    return _COMMENT.sub("", text).lower()


def read(source: Source) -> Form:
    """The one bracketed list of a text."""
    outer: list[Form] = []
    top = form = Form()
    for at, token in enumerate(_TOKEN.findall(_plain(source.text))):
        if token == "(":
            outer.append(form)
            form = Form(at)
            outer[-1].append(form)
        elif token == ")":
            if not outer:
                _unexpected(source, at, token)
            form = outer.pop()
        elif token[0] == "(":
            form.append(Form(at, _words(token[1:-1])))
        else:
            form.extend(_words(token))
            if not outer:
                _unexpected(source, at, token)
    if outer:
        source.refuse("'(' is never closed.", form)
    if not top:
        source.refuse("there is nothing here; '(define …)' should begin.")
    if len(top) > 1:
        _unexpected(source, top[1].at, "(")
    if top[0][:1] != ["define"]:
        source.refuse(f"'{_word(top[0][0]) if top[0] else '()'}' should be 'define'.", top[0])
    return top[0]


def _words(text: str) -> list[str]:
    return text.replace("?", " ?").split() if "?" in text else text.split()


def _unexpected(source: Source, at: int, token: str) -> NoReturn:
    raise DataError(f"'{token}' is outside of '(define …)'.", source.where, source.line(at))


def _word(x: Any) -> str:
    return x if isinstance(x, str) else "(" + " ".join(map(_word, x)) + ")"


def parse_domain(text: str, where: str = "<domain>") -> Domain:
    """A domain. Its constants are usually declared by the problems, so they are not checked here."""
    source = Source(text, where)
    types, predicates, constants = {ROOT: ROOT}, {"=": 2}, {}
    actions: list[Form] = []
    for form in _sections(source, read(source)):
        key = form[0]
        if key == ":requirements":
            for word in form[1:]:
                if word not in REQUIREMENTS:
                    source.refuse(f"requirement '{_word(word)}' is not supported.", form, _word(word))
        elif key == ":types":
            types |= {name: kind for name, kind in _typed(source, form, form[1:]) if name != ROOT}
        elif key == ":constants":
            constants |= dict(_typed(source, form, form[1:]))
        elif key == ":predicates":
            predicates |= dict(_predicate(source, form, p) for p in form[1:])
        elif key == ":action":
            actions.append(form)
        elif key not in ("domain", ":functions"):
            source.refuse(f"section '{key}' is not supported in a domain.", form)
    for name, parent in types.items():
        if parent not in types:
            source.refuse(f"type '{name}' is of the unknown type '{parent}'.{nearest(parent, types)}", None, parent)
    bare = Domain(types, predicates, constants, ())
    for name, kind in constants.items():
        if kind not in types:
            source.refuse(f"constant '{name}' is of the unknown type '{kind}'.{nearest(kind, types)}", None, kind)
    return Domain(types, predicates, constants, tuple(_Reader(source, bare).action(form) for form in actions))


def parse_problem(text: str, domain: Domain, where: str = "<problem>") -> Problem:
    source = Source(text, where)
    objects, init, goal = dict(domain.constants), None, None
    for form in _sections(source, read(source)):
        key = form[0]
        if key == ":objects":
            for name, kind in _typed(source, form, form[1:]):
                if kind not in domain.types:
                    source.refuse(f"object '{name}' is of the unknown type '{kind}'.", form, kind)
                objects[name] = kind
        elif key == ":init":
            init = _facts(source, form, domain, objects)
        elif key == ":goal":
            if len(form) != 2:
                source.refuse("':goal' needs one condition.", form)
            goal = _Reader(source, domain, objects).formula(form[1], form, frozenset())
        elif key not in ("problem", ":domain", ":metric", ":requirements"):
            source.refuse(f"section '{key}' is not supported in a problem.", form)
    if init is None or goal is None:
        source.refuse(f"the problem has no '{':init' if init is None else ':goal'}'.")
    return Problem(objects, init, goal)


def _sections(source: Source, define: Form) -> Iterator[Form]:
    for form in define[1:]:
        if not isinstance(form, Form) or not form or not isinstance(form[0], str):
            source.refuse(f"'{_word(form)}' is not a section such as '(:init …)'.", define, form if form else None)
        yield form


def _predicate(source: Source, section: Form, form: Any) -> tuple[str, int]:
    if not isinstance(form, Form) or not form:
        source.refuse(f"'{_word(form)}' is not a predicate such as '(opened ?r - receptacle)'.", section)
    return form[0], len(_typed(source, form, form[1:]))


def _typed(source: Source, form: Form, words: list[Any]) -> tuple[tuple[str, str], ...]:
    """`a b - kind c` as ((a, kind), (b, kind), (c, object))."""
    out: list[tuple[str, str]] = []
    names: list[str] = []
    rest = iter(words)
    for word in rest:
        if not isinstance(word, str):
            source.refuse(f"'{_word(word)}' is not a name.", word)
        if word != "-":
            names.append(word)
            continue
        kind = next(rest, None)
        if not isinstance(kind, str) or kind == "-":
            source.refuse("'-' must be followed by the name of one type.", form, "-")
        out += [(name, kind) for name in names]
        names = []
    return (*out, *((name, ROOT) for name in names))


def _facts(source: Source, section: Form, domain: Domain, objects: Mapping[str, str]) -> tuple[Fact, ...]:
    """The facts of ':init', in order, each once. Costs (`(= (distance a b) 1)`) are left out."""
    arity = domain.predicates
    one = {x: x for x in (*arity, *objects)}  # one object per word: saves memory and makes comparing fast
    facts: list[Fact] = []
    try:
        for form in section[1:]:
            if arity[form[0]] == len(form) - 1:
                facts.append(tuple([one[x] for x in form]))
            else:
                raise KeyError
        return tuple(dict.fromkeys(facts))
    except (KeyError, TypeError, IndexError):
        return _other_facts(source, section, domain, objects)


def _other_facts(source: Source, section: Form, domain: Domain, objects: Mapping[str, str]) -> tuple[Fact, ...]:
    """The slow path, which finds costs to leave out, and mistakes."""
    facts: list[Fact] = []
    for form in section[1:]:
        if not isinstance(form, Form) or not form:
            source.refuse(f"'{_word(form)}' is not a fact.", form if isinstance(form, Form) else section)
        if form[0] == "=" and len(form) == 3 and isinstance(form[1], Form):
            continue
        _refuse_atom(source, form, domain, objects, frozenset())
        facts.append(tuple(form))
    return tuple(dict.fromkeys(facts))


def _refuse_atom(
    source: Source, form: Form, domain: Domain, objects: Mapping[str, str] | None, scope: frozenset[str]
) -> None:
    """Raise an error if something is wrong with an atom."""
    name = form[0]
    if not isinstance(name, str) or name not in domain.predicates:
        hint = nearest(_word(name), domain.predicates)
        source.refuse(f"unknown predicate '{_word(name)}'.{hint}", form)
    if len(form) - 1 != domain.predicates[name]:
        source.refuse(f"'{name}' has {domain.predicates[name]} arguments, not {len(form) - 1}: {_word(form)}.", form)
    for x in form[1:]:
        if not isinstance(x, str):
            source.refuse(f"'{_word(x)}' is not the name of an object.", x)
        if x.startswith("?") and x not in scope:
            source.refuse(f"variable '{x}' is not declared.", form, x)
        if not x.startswith("?") and objects is not None and x not in objects:
            source.refuse(f"unknown object '{x}'.", form, x)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns bracketed lists into formulas. If `objects` is None, constants are not checked."""

    source: Source
    domain: Domain
    objects: Mapping[str, str] | None = None

    def action(self, form: Form) -> Action:
        parts = dict(zip(form[2::2], form[3::2])) if all(isinstance(x, str) for x in form[2::2]) else {}
        if len(form) < 2 or not isinstance(form[1], str) or len(form) % 2 or not parts.keys() >= {":effect"}:
            self.source.refuse("an action is '(:action name :parameters (…) :precondition (…) :effect (…))'.", form)
        for key in parts:
            if key not in (":parameters", ":precondition", ":effect"):
                self.source.refuse(f"'{key}' is not supported in an action.", form, key)
        parameters = self.variables(parts.get(":parameters", Form(form.at)), form)
        scope = frozenset(name for name, _ in parameters)
        condition = self.formula(parts.get(":precondition", Form(form.at)), form, scope)
        return Action(form[1], parameters, condition, tuple(self.effects(parts[":effect"], form, scope, (), All())))

    def variables(self, form: Any, around: Form) -> tuple[tuple[str, str], ...]:
        if not isinstance(form, Form):
            self.source.refuse(f"'{form}' is not a list of variables.", around, form)
        out = _typed(self.source, form, form)
        for name, kind in out:
            if not name.startswith("?"):
                self.source.refuse(f"'{name}' should be a variable, '?{name}'.", form, name)
            if kind not in self.domain.types and not kind.endswith(","):
                self.source.refuse(f"unknown type '{kind}'.{nearest(kind, self.domain.types)}", form, kind)
        return out

    def formula(self, form: Any, around: Form, scope: frozenset[str]) -> Formula:
        if not isinstance(form, Form):
            self.source.refuse(f"'{form}' is not a condition.", around, form)
        if not form:
            return All()
        head = form[0]
        if head == "and":
            return All(tuple(self.formula(x, form, scope) for x in form[1:]))
        if head == "or":
            return Some(tuple(self.formula(x, form, scope) for x in form[1:]))
        if head == "not":
            self._parts(form, 2)
            return Not(self.formula(form[1], form, scope))
        if head in ("exists", "forall"):
            self._parts(form, 3)
            variables = self.variables(form[1], form)
            body = self.formula(form[2], form, scope | {name for name, _ in variables})
            return Exists(variables, body) if head == "exists" else Every(variables, body)
        return self.atom(form, scope)

    def atom(self, form: Form, scope: frozenset[str]) -> Atom:
        _refuse_atom(self.source, form, self.domain, self.objects, scope)
        return Atom(form[0], tuple(form[1:]))

    def effects(
        self, form: Any, around: Form, scope: frozenset[str], variables: tuple[tuple[str, str], ...], when: Formula
    ) -> Iterator[Effect]:
        if not isinstance(form, Form):
            self.source.refuse(f"'{form}' is not an effect.", around, form)
        head = form[0] if form else "and"
        if head == "and":
            for x in form[1:]:
                yield from self.effects(x, form, scope, variables, when)
        elif head == "forall":
            self._parts(form, 3)
            more = self.variables(form[1], form)
            yield from self.effects(form[2], form, scope | {name for name, _ in more}, variables + more, when)
        elif head == "when":
            self._parts(form, 3)
            condition = self.formula(form[1], form, scope)
            yield from self.effects(
                form[2], form, scope, variables, condition if when == All() else All((when, condition))
            )
        elif head == "not":
            self._parts(form, 2)
            inner = form[1] if isinstance(form[1], Form) else form
            yield Effect(variables, when, self.atom(inner, scope), False)
        elif head != "increase":
            yield Effect(variables, when, self.atom(form, scope), True)

    def _parts(self, form: Form, n: int) -> None:
        if len(form) != n:
            self.source.refuse(f"'{form[0]}' takes {n - 1} part{'s' if n > 2 else ''}, not {len(form) - 1}.", form)
