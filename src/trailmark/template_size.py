"""How much work a chat template can be, read from its text alone.

A template is a program that comes with a model. Most only walk through the messages once and join texts. For these a
bound on work and memory follows from their form: `bound` gives it as factors of the size S of all that goes in. For
every other template (nested loops, namespaces, macros, multiplication, unusual filters) it gives None, and
`templates.py` renders it in a process with limits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST = 1 << 14  # letters of a template that is read here
# What comes out of a filter or a method is at most this many times as long as what goes in.
FILTERS = {"trim": 1, "length": 1, "count": 1, "lower": 3, "upper": 3, "capitalize": 3, "title": 3, "first": 1,
           "last": 1, "string": 1, "tojson": 6}  # fmt: skip
METHODS = {"strip": 1, "lstrip": 1, "rstrip": 1, "startswith": 1, "endswith": 1, "lower": 3, "upper": 3, "title": 3,
           "capitalize": 3, "split": 5}  # fmt: skip
TESTS = {"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean", "true",
         "false", "eq", "equalto", "ne", "in", "odd", "even"}  # fmt: skip
KEPT = {"loop", "raise_exception"}  # names that a template may not set


class _Unbounded(Exception):
    """The template has something of which no bound is known."""


@dataclass
class _Scope:
    """The names that the template has set: how long their values are at most, and which are lists of messages."""

    sizes: dict[str, int] = field(default_factory=dict)
    lists: frozenset[str] = frozenset({"messages"})

    def copy(self) -> _Scope:
        return _Scope(dict(self.sizes), self.lists)


@lru_cache(64)
def bound(template: str) -> tuple[int, int] | None:
    """(once, each): the work is at most once * S + each * S * (number of messages)."""
    if len(template) > LONGEST:
        return None
    try:
        tree = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).parse(template)
        reading = _Reading()
        reading.body(tree.body, _Scope())
    except (_Unbounded, TemplateError, RecursionError, ValueError, OverflowError):
        return None
    return reading.once, reading.each


class _Reading:
    def __init__(self) -> None:
        self.once = self.each = 0
        self.inside = False  # in a loop

    def body(self, part: list[nodes.Node], scope: _Scope) -> None:
        for node in part:
            self.statement(node, scope)

    def statement(self, node: nodes.Node, scope: _Scope) -> None:
        if isinstance(node, nodes.Output):
            for one in node.nodes:
                self.size(one, scope)
        elif isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name) and node.target.name not in KEPT:
            size, name = self.size(node.node, scope), node.target.name
            scope.lists = scope.lists | {name} if self.is_list(node.node, scope) else scope.lists - {name}
            scope.sizes[name] = size
        elif isinstance(node, nodes.If):
            self.choice(node, scope)
        elif isinstance(node, nodes.For) and not self.inside and not node.recursive:
            self.loop(node, scope)
        else:
            raise _Unbounded

    def choice(self, node: nodes.If, scope: _Scope) -> None:
        """What any of the branches may have set."""
        ends = []
        for test, part in [(node.test, node.body), *((e.test, e.body) for e in node.elif_), (None, node.else_)]:
            if test is not None:
                self.size(test, scope)
            self.body(part, inner := scope.copy())
            ends.append(inner)
        for end in ends:
            for name, size in end.sizes.items():
                scope.sizes[name] = max(scope.sizes.get(name, 1), size)
        scope.lists = frozenset.intersection(*(end.lists for end in ends))

    def loop(self, node: nodes.For, scope: _Scope) -> None:
        """A loop over messages. What it sets is forgotten after each turn."""
        targets = [n.name for n in node.target.find_all(nodes.Name)] or [getattr(node.target, "name", "")]
        if not self.is_list(node.iter, scope) or KEPT & set(targets):
            raise _Unbounded
        self.size(node.iter, scope)
        inner = scope.copy()
        inner.sizes.update(dict.fromkeys(targets, 1))
        inner.lists -= set(targets)
        self.inside = True
        if node.test is not None:
            self.size(node.test, inner)
        self.body(node.body, inner)
        self.inside = False
        self.body(node.else_, scope.copy())

    def is_list(self, node: nodes.Node, scope: _Scope) -> bool:
        """Whether this is the messages, or a slice of them."""
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node = node.node
        return isinstance(node, nodes.Name) and node.name in scope.lists

    def size(self, node: nodes.Node, scope: _Scope) -> int:
        """How long a value is at most, in units of S. It is counted as work, too."""
        found = self.value(node, scope)
        if self.inside:
            self.each += 1 + found
        else:
            self.once += 1 + found
        return found

    def value(self, node: nodes.Node, scope: _Scope) -> int:
        size = lambda n: self.size(n, scope)
        match node:
            case nodes.TemplateData() | nodes.Const():
                return 1
            case nodes.Name():
                return scope.sizes.get(node.name, 1)
            case nodes.Concat():
                return sum(map(size, node.nodes))
            case nodes.Add() | nodes.And() | nodes.Or():
                return size(node.left) + size(node.right)
            case nodes.Sub():
                return max(size(node.left), size(node.right))
            case nodes.Mod(left=nodes.Getattr(node=nodes.Name(name="loop")), right=nodes.Const()):
                return 1  # of numbers; of a text it would be a format
            case nodes.Not() | nodes.Neg():
                return size(node.node)
            case nodes.Compare():
                return size(node.expr) + sum(size(op.expr) for op in node.ops)
            case nodes.CondExpr():
                return size(node.test) + size(node.expr1) + (size(node.expr2) if node.expr2 else 0)
            case nodes.Getattr():
                return size(node.node)
            case nodes.Getitem(arg=nodes.Slice()):
                parts = (node.arg.start, node.arg.stop, node.arg.step)
                return size(node.node) + sum(size(p) for p in parts if p is not None)
            case nodes.Getitem():
                return size(node.node) + size(node.arg)
            case nodes.List() | nodes.Tuple():
                return 12 * (1 + sum(map(size, node.items)))
            case nodes.Filter() | nodes.Test() | nodes.Call():
                return self.called(node, scope)
        raise _Unbounded

    def called(self, node: nodes.Filter | nodes.Test | nodes.Call, scope: _Scope) -> int:
        if node.kwargs or node.dyn_args or node.dyn_kwargs or (node.node is None):
            raise _Unbounded
        given = sum(self.size(a, scope) for a in node.args)
        if isinstance(node, nodes.Test):
            if node.name in TESTS:
                return self.size(node.node, scope) + given
        elif isinstance(node, nodes.Filter):
            if node.name in ("default", "d"):
                return self.size(node.node, scope) + given
            if node.name in FILTERS and not node.args:
                return FILTERS[node.name] * self.size(node.node, scope)
        elif isinstance(node.node, nodes.Name):
            if node.node.name == "raise_exception":
                return given
        elif isinstance(node.node, nodes.Getattr) and node.node.attr in METHODS:
            name = node.node.attr
            short = all(isinstance(a, nodes.Const) and len(str(a.value)) < 99 for a in node.args)
            if short or name in ("startswith", "endswith"):  # the others may look for each letter in each argument
                return METHODS[name] * self.size(node.node.node, scope)
        raise _Unbounded
