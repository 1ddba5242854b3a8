"""The words of a game: a grammar (`.twl2`) that turns facts into sentences.

For every action, a grammar says what is typed (`template`) and what is answered (`feedback`). It holds rules in JSON:

    "symbol": [{"condition": "openable(r:receptacle)", "rhs": "The {r.name} is closed."}, {"rhs": "…"}]

The first rule of a symbol whose condition holds is used. In a right-hand side

    #symbol#                    another symbol
    {r.name}                    a value: name, id, type, definite or indefinite of a thing; texts; joined by +; a or b
    [{o.name | holds(a:agent, o:object)}]   one value for every way in which the condition holds, as a list with
                                            the symbols list_empty, list_separator and list_last_separator

A condition is facts joined by `&`. Its variables are those of the action; other variables are found in the order of the
sorted facts, each thing taken by one variable only. `not_p(…)` holds if an action has removed p(…): the original stores
denied facts as facts of their own, and a fact that never was true is not denied.

As in the original, a text is read up to the first character that is not allowed (a ';' in a goal cuts it off), and
blanks before that are dropped. Other syntax than the above is refused with an error that names it; nothing is
evaluated.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NoReturn, Protocol

from trailmark.errors import DataError, nearest
from trailmark.tasks.alfworld.pddl import Fact

Env = Mapping[str, str]  # values of variables, by name ("r") and by name and type ("r:receptacle")
LISTS = ("list_empty", "list_separator", "list_last_separator")
VALUES = ("name", "id", "type", "definite", "indefinite")


class World(Protocol):
    """The facts that a text describes."""

    def true(self, fact: Fact) -> bool: ...

    def rows(self, predicate: str, at: int | None, thing: str | None) -> Sequence[Fact]:
        """The sorted facts of a predicate: those whose argument `at` (from 1) is `thing`, or all."""
        ...

    def value(self, thing: str, what: str) -> str:
        """One of VALUES."""
        ...

    def is_a(self, thing: str, kind: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Pattern:
    """One fact of a condition, with variables."""

    predicate: str
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    keys: tuple[str, ...]  # "name:kind"


@dataclass(frozen=True, slots=True)
class Symbol:
    name: str


@dataclass(frozen=True, slots=True)
class Value:
    """Alternatives, each a sum of texts (str) and values of variables (name, what). The first non-empty one is used."""

    either: tuple[tuple[str | tuple[str, str], ...], ...]


@dataclass(frozen=True, slots=True)
class Each:
    """`what` for every way in which `given` holds (None: once); `listed` with separators."""

    what: Symbol | Value
    given: tuple[Pattern, ...] | None
    listed: bool


Node = str | Symbol | Each
Nodes = tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    given: tuple[Pattern, ...]
    nodes: Nodes


@dataclass(frozen=True, slots=True)
class Wording:
    """What is typed for an action, and what is answered."""

    template: Nodes
    feedback: Nodes


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    rules: Mapping[str, tuple[Rule, ...]]
    actions: Mapping[str, Wording]
    where: str = "<grammar>"
    predicates: frozenset[str] = field(default_factory=frozenset)  # the predicates in conditions

    def write(self, nodes: Nodes, env: Env, world: World) -> str:
        out: list[str] = []
        for node in nodes:
            if isinstance(node, str):
                out.append(node)
            elif isinstance(node, Symbol):
                out.append(self._symbol(node.name, env, world))
            else:
                out.append(self._each(node, env, world))
        return "".join(out)

    def _symbol(self, name: str, env: Env, world: World) -> str:
        for rule in self.rules[name]:
            if not rule.given or next(matches(rule.given, env, world), None) is not None:
                return self.write(rule.nodes, env, world)
        raise DataError(f"no rule of '#{name}#' applies here; add one without a condition.", self.where)

    def _each(self, node: Each, env: Env, world: World) -> str:
        envs: Iterable[Env] = (env,) if node.given is None else matches(node.given, env, world)
        what = node.what
        if isinstance(what, Symbol):
            items = [self._symbol(what.name, e, world) for e in envs]
        else:
            items = [self._value(what, e, world) for e in envs]
        if not node.listed:
            return "".join(items)
        if not items:
            return self._symbol("list_empty", env, world)
        if len(items) == 1:
            return items[0]
        last = self._symbol("list_last_separator", env, world) + items[-1]
        return self._symbol("list_separator", env, world).join(items[:-1]) + last

    def _value(self, value: Value, env: Env, world: World) -> str:
        text = ""
        for parts in value.either:
            try:
                text = "".join([p if isinstance(p, str) else world.value(env[p[0]], p[1]) for p in parts])
            except KeyError as e:
                raise DataError(f"a text uses {e}, but no variable has this name.", self.where) from None
            if text:
                break
        return text


def matches(given: tuple[Pattern, ...], env: Env, world: World) -> Iterator[Env]:
    """Every way in which all facts of a condition are true, in the original's order."""
    return _match(given, 0, env, world)


def _match(given: tuple[Pattern, ...], depth: int, env: Env, world: World) -> Iterator[Env]:
    if depth == len(given):
        yield env
        return
    pattern = given[depth]
    bound = [env.get(key) for key in pattern.keys]
    if None not in bound:
        if world.true((pattern.predicate, *bound)):  # type: ignore[misc]
            yield from _match(given, depth + 1, env, world)
        return
    at = next((i for i, x in enumerate(bound, 1) if x is not None), None)
    taken = set(env.values())
    for fact in world.rows(pattern.predicate, at, None if at is None else bound[at - 1]):
        more = _extend(pattern, bound, fact, taken, world)
        if more is not None:
            yield from _match(given, depth + 1, {**env, **more}, world)


def _extend(
    pattern: Pattern, bound: list[str | None], fact: Fact, taken: set[str], world: World
) -> dict[str, str] | None:
    """The values of a pattern's free variables if it matches this fact; None if it does not match."""
    more: dict[str, str] = {}
    for name, kind, key, old, thing in zip(pattern.names, pattern.kinds, pattern.keys, bound, fact[1:]):
        known = more.get(key) if old is None else old
        if known is None:
            if thing in taken or thing in more.values() or not world.is_a(thing, kind):
                return None
            more[key] = more[name] = thing
        elif known != thing:
            return None
    return more


# Reading.


class _Bad(Exception):
    """A text that cannot be read. The caller, who knows the file, adds the place."""


_SPACE = re.compile(r"(?:\s+|#[^\n]*)*")
_NAME = re.compile(r"[\w/-]+")
_STRING = re.compile(r'"[^"]*"')
_BLOCK = re.compile(r'"""(?:.|\n)*?"""')
_LEAD = re.compile(r"(?:[ \t\r\f\v\n]+|//[^\n]*\n?)*")
_LITERAL = re.compile(r'[^;|"<>\[\]#{}]+')
_QUOTED = re.compile(r'"([^;|"<>\[\]#{}]*)"')
_SYMBOL = re.compile(r"#([\w()/!<>\-\s,.]+)#")
_EACH = re.compile(r"\{(?:#([\w()/!<>\-\s,.]+)#|([^|\[\]{}\n<>]+))(?:\s*\|\s*([^;|{}\n\[\]#]+))?\}")
_TERM = re.compile(r"\s*(?:'([^']*)'|\"([^\"]*)\"|([A-Za-z_]\w*)(?:\.(\w+))?)\s*")
_PATTERN = re.compile(r"\s*([\w/\-]+)\s*\(\s*([^()]*?)\s*\)\s*")


@lru_cache(4096)
def parse_nodes(text: str) -> Nodes:
    """The parts of a right-hand side, a template or a feedback."""
    out: list[Node] = []
    at = _end(_LEAD, text, 0)
    while at < len(text):
        if text[at] == "\t":
            at += 1
        elif m := _LITERAL.match(text, at):
            out.append(m.group())
            at = m.end()
        elif m := _QUOTED.match(text, at):
            out.append(m.group(1))
            at = m.end()
        elif m := _SYMBOL.match(text, at):
            out.append(Symbol(m.group(1)))
            at = m.end()
        elif m := _EACH.match(text, at + (text[at] == "[")):
            listed = text[at] == "["
            if listed and text[m.end() : m.end() + 1] != "]":
                break
            out.append(_each(m, listed))
            at = m.end() + listed
        else:
            break
    return tuple(out)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    m = pattern.match(text, at)
    return at if m is None else m.end()


def _each(m: re.Match[str], listed: bool) -> Each:
    symbol, value, given = m.groups()
    return Each(Symbol(symbol) if symbol else _value(value), parse_condition(given) if given else None, listed)


def _value(text: str) -> Value:
    either: list[tuple[str | tuple[str, str], ...]] = []
    for part in re.split(r"\sor\s", text):
        terms: list[str | tuple[str, str]] = []
        at = 0
        while True:
            m = _TERM.match(part, at)
            if m is None or (m.group(4) or "name") not in VALUES:
                raise _Bad(f"'{{{text}}}' is not a value such as {{r.name}} or {{o.indefinite + ' ' + o.name}}")
            one, two, name, what = m.groups()
            terms.append((name, what or "name") if name else one if one is not None else two)
            at = m.end()
            if at == len(part):
                break
            if part[at] != "+":
                raise _Bad(f"'{part[at]}' in '{{{text}}}' is not understood")
            at += 1
        either.append(tuple(terms))
    return Value(tuple(either))


@lru_cache(4096)
def parse_condition(text: str) -> tuple[Pattern, ...]:
    out = []
    for part in text.split("&") if text.strip() else ():
        m = _PATTERN.fullmatch(part)
        if m is None:
            raise _Bad(f"'{part.strip()}' is not a condition such as openable(r:receptacle)")
        variables = [v.partition(":") for v in m.group(2).split(",")] if m.group(2) else []
        names = tuple(name.strip() for name, _, _ in variables)
        kinds = tuple(kind.strip() or name.strip().rstrip("'") for name, _, kind in variables)
        out.append(Pattern(m.group(1), names, kinds, tuple(f"{n}:{k}" for n, k in zip(names, kinds))))
    return tuple(out)


@lru_cache(512)
def parse_grammar(text: str, where: str = "<grammar>") -> Grammar:
    """A `.twl2` text: actions and rules. Every symbol must be known, and no symbol may lead back to itself."""
    reader = _Reader(text, where)
    reader.document()
    return reader.grammar()


class _Reader:
    def __init__(self, text: str, where: str):
        self.text, self.where, self.at = text, where, 0
        self.rules: dict[str, tuple[Rule, ...]] = {}
        self.actions: dict[str, Wording] = {}
        self.lines: dict[str, int] = {}  # the line of each symbol's definition

    def refuse(self, message: str, line: int | None = None) -> NoReturn:
        raise DataError(message, self.where, self.text.count("\n", 0, self.at) + 1 if line is None else line)

    def take(self, pattern: re.Pattern[str], what: str) -> str:
        """The next word, which must be `what`."""
        self.at = _end(_SPACE, self.text, self.at)
        m = pattern.match(self.text, self.at)
        if m is None:
            found = (self.text[self.at : self.at + 40].split() or ["the end"])[0]
            self.refuse(f"'{found}' should be {what}.")
        self.at = m.end()
        return m.group()

    def sign(self, sign: str) -> None:
        self.take(re.compile(re.escape(sign)), f"'{sign}'")

    def document(self) -> None:
        while (at := _end(_SPACE, self.text, self.at)) < len(self.text):
            self.at = at
            word = self.take(_NAME, "'action' or 'grammar'")
            if word == "grammar":
                self.sign("::")
                self.block()
                self.sign(";")
            elif word == "action":
                self.action()
            else:
                self.refuse(f"'{word}' should be 'action' or 'grammar'.")

    def action(self) -> None:
        name = self.take(_NAME, "the name of an action").lower()
        self.sign("{")
        parts: dict[str, Nodes] = {}
        while not self.text.startswith("}", (at := _end(_SPACE, self.text, self.at))):
            self.at = at
            key = self.take(_NAME, "'template', 'feedback' or 'grammar'")
            self.sign("::")
            if key in ("template", "feedback"):
                parts[key] = self.nodes(self.take(_STRING, "a text in quotes")[1:-1])
            elif key == "grammar":
                self.block(comments=True)
            elif key == "pddl":
                self.take(_BLOCK, 'a block in """')
            else:
                self.refuse(f"action '{name}' has the unknown part '{key}'.")
            self.sign(";")
        self.sign("}")
        if len(parts) < 2:
            self.refuse(f"action '{name}' needs a template and a feedback.")
        self.actions[name] = Wording(parts["template"], parts["feedback"])

    def nodes(self, text: str, line: int | None = None) -> Nodes:
        try:
            return parse_nodes(text)
        except _Bad as e:
            self.refuse(f"{e}.", line)

    def block(self, comments: bool = False) -> None:
        """Rules in JSON; a later definition of a symbol replaces an earlier one."""
        raw = self.take(_BLOCK, 'a block in """')[3:-3]
        began = self.text.count("\n", 0, self.at) - raw.count("\n") + 1
        if comments:
            raw = "\n".join("" if line.lstrip().startswith("#") else line for line in raw.split("\n"))
        try:
            data = json.loads(raw)
        except json.JSONDecodeError as e:
            self.refuse(f"these rules are not JSON: {e.msg}.", began + e.lineno - 1)
        if not isinstance(data, dict):
            self.refuse("rules are a JSON object, {symbol: [rule, …]}.", began)
        for symbol, rules in data.items():
            line = began + raw.count("\n", 0, max(0, raw.find(json.dumps(symbol))))
            self.lines[symbol] = line
            self.rules[symbol] = tuple(self.rule(symbol, rule, line) for rule in self.listed(symbol, rules, line))

    def listed(self, symbol: str, rules: object, line: int) -> list[object]:
        if not isinstance(rules, list) or not rules:
            self.refuse(f"symbol '#{symbol}#' needs a list of rules.", line)
        return rules

    def rule(self, symbol: str, rule: object, line: int) -> Rule:
        if not isinstance(rule, dict) or not isinstance(rule.get("rhs"), str):
            self.refuse(f"a rule of '#{symbol}#' has no text 'rhs'.", line)
        try:
            return Rule(parse_condition(rule.get("condition") or ""), parse_nodes(rule["rhs"]))
        except _Bad as e:
            self.refuse(f"{e} (symbol '#{symbol}#').", line)

    def grammar(self) -> Grammar:
        for symbol, rules in self.rules.items():
            for rule in rules:
                self.known(rule.nodes, self.lines[symbol])
        for wording in self.actions.values():
            self.known(wording.template, None)
            self.known(wording.feedback, None)
        self.no_cycle()
        asked = {p.predicate for rs in self.rules.values() for r in rs for p in _patterns(r)}
        asked |= {p.predicate for w in self.actions.values() for p in _patterns(Rule((), w.template + w.feedback))}
        return Grammar(self.rules, self.actions, self.where, frozenset(asked))

    def known(self, nodes: Nodes, line: int | None) -> None:
        for name in _symbols(nodes):
            if name not in self.rules:
                at = self.text.find(name if name in LISTS else f"#{name}#")
                found = self.text.count("\n", 0, max(0, at)) + 1
                self.refuse(f"unknown symbol '#{name}#'.{nearest(name, self.rules)}", line or found)

    def no_cycle(self) -> None:
        done: set[str] = set()

        def visit(symbol: str, above: tuple[str, ...]) -> None:
            if symbol in above:
                way = " -> ".join((*above[above.index(symbol) :], symbol))
                self.refuse(f"symbol '#{symbol}#' leads back to itself: {way}.", self.lines[symbol])
            if symbol not in done:
                for rule in self.rules[symbol]:
                    for name in _symbols(rule.nodes):
                        visit(name, (*above, symbol))
                done.add(symbol)

        for symbol in self.rules:
            visit(symbol, ())


def _symbols(nodes: Nodes) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Symbol):
            yield node.name
        elif isinstance(node, Each):
            if isinstance(node.what, Symbol):
                yield node.what.name
            if node.listed:
                yield from LISTS


def _patterns(rule: Rule) -> Iterator[Pattern]:
    yield from rule.given
    for node in rule.nodes:
        if isinstance(node, Each):
            yield from node.given or ()


def thing_names(ids: Iterable[str]) -> dict[str, str]:
    """The names of things: `apple_bar__plus_00…` is `apple 2`. Things of one kind are numbered from the last in sorted
    order to the first, as in the original. A thing in a basin is named after the basin. A thing without a place has no
    number."""
    ordered = sorted(ids)
    kinds = {x: _kind(x) for x in ordered if "_bar_" in x}
    left = Counter(kinds.values())
    out = {}
    for x in ordered:
        if x in kinds:
            out[x] = f"{kinds[x]} {left[kinds[x]]}"
            left[kinds[x]] -= 1
        else:
            out[x] = _plain(x) + " "
    return out


def _kind(x: str) -> str:
    return _plain(x.split("_bar_", 1)[0]) + ("basin" if "basin" in x else "")


def _plain(x: str) -> str:
    for word, sign in (("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ",")):
        x = x.replace(word, sign)
    return x
