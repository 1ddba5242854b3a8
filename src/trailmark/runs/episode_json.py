"""Episodes and annotations as lines of JSON.

A line is compact, its keys are in the order of the dataclass, and defaults are left out. So a line that is read and
written again has the same bytes. Reading and writing check every value against the types of types.py. An error names
the path to the wrong value.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from trailmark.errors import DataError, nearest
from trailmark.types import Annotation, Episode, Failed, Invalid, Scored

Row = TypeVar("Row", Episode, Annotation)
_OUTCOMES: dict[str, type] = {"scored": Scored, "invalid": Invalid, "failed": Failed}
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]|[\ud800-\udfff]")


class _Bad(Exception):
    """What is wrong, and the path to it. The path is filled in from the inside to the outside."""

    def __init__(self, message: str, *path: str | int):
        self.message, self.path = message, list(path)


def _at(key: str | int, f: Callable[[Any], Any], v: Any) -> Any:
    try:
        return f(v)
    except _Bad as bad:
        bad.path.insert(0, key)
        raise


def _fail(message: str) -> Any:
    raise _Bad(message)


def _scalar(kind: type, name: str) -> Callable[[Any], Any]:
    def check(v: Any) -> Any:
        if isinstance(v, np.generic):
            v = v.item()
        if kind is float and type(v) is int and abs(v) < 2**1023:
            v = float(v)
        if isinstance(v, kind) and not (kind is int and isinstance(v, bool)):
            if isinstance(v, float) and not math.isfinite(v):
                raise _Bad(f"is {v}; only finite numbers are stored")
            return kind(v)
        raise _Bad(f"must be {name}, not {repr(v)[:60]}")

    return check


_CHECKS = {int: _scalar(int, "a whole number"), float: _scalar(float, "a number"), str: _scalar(str, "text"),
           bool: _scalar(bool, "true or false")}  # fmt: skip


def _json(v: Any) -> Any:
    """Any JSON value, with tuples as lists."""
    if isinstance(v, Mapping):
        out = {}
        for k, x in v.items():
            if not isinstance(k, str):
                raise _Bad(f"has the key {k!r}; keys must be text")
            out[k] = _at(k, _json, x)
        return out
    if isinstance(v, list | tuple):
        return [_json(x) for x in v]
    if isinstance(v, np.generic):
        v = v.item()
    if v is None or isinstance(v, bool | int | str):
        return v
    return _CHECKS[float](v) if isinstance(v, float) else _fail(f"is a {type(v).__name__}, which JSON cannot hold")


@functools.cache
def _codec(tp: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """(value -> JSON, JSON -> value) for a type of types.py."""
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if tp in _CHECKS:
        return _CHECKS[tp], _CHECKS[tp]
    if dataclasses.is_dataclass(tp):
        return _record(tp)
    if origin is Literal:
        check = lambda v: v if v in args else _fail(f"is {v!r}.{nearest(str(v), args)}")
        return check, check
    if origin in (typing.Union, types.UnionType) and type(None) not in args:  # the outcomes, tagged by `kind`
        tags = {c: (kind, _codec(c)[0]) for kind, c in _OUTCOMES.items()}

        def read_tagged(v: Any) -> Any:
            if not isinstance(v, dict) or v.get("kind") not in _OUTCOMES:
                found = v.get("kind") if isinstance(v, dict) else v
                raise _Bad(f"is no outcome.{nearest(str(found), _OUTCOMES)}", "kind")
            return _codec(_OUTCOMES[v["kind"]])[1]({k: x for k, x in v.items() if k != "kind"})

        def write_tagged(v: Any) -> Any:
            kind, write = tags[type(v)] if type(v) in tags else _fail(f"is {v!r}, which is no outcome")
            return {"kind": kind} | write(v)

        return write_tagged, read_tagged
    if origin in (typing.Union, types.UnionType):
        w, r = _codec(next(a for a in args if a is not type(None)))
        return (lambda v: None if v is None else w(v)), (lambda v: None if v is None else r(v))
    if origin is tuple:
        w, r = _codec(args[0])
        size = None if args[-1] is Ellipsis else len(args)

        def items(v: Any, each: Callable[[Any], Any]) -> list[Any]:
            if not isinstance(v, list | tuple) or (size is not None and len(v) != size):
                raise _Bad(f"must be a list{'' if size is None else f' of {size}'}, not {repr(v)[:60]}")
            plain = args[0] in (int, float) and set(map(type, v)) <= {args[0]}  # a fast path for plain numbers
            if plain and (args[0] is int or all(map(math.isfinite, v))):
                return list(v)
            return [_at(i, each, x) for i, x in enumerate(v)]

        return (lambda v: items(v, w)), (lambda v: tuple(items(v, r)))
    if tp is Any or args[-1] is Any:
        plain = lambda v: _json(v) if isinstance(v, Mapping) else _fail(f"must be an object, not {repr(v)[:60]}")
        return plain, plain
    w, r = _codec(args[1])  # Mapping[str, T]

    def entries(v: Any, each: Callable[[Any], Any]) -> dict[str, Any]:
        if not isinstance(v, Mapping):
            raise _Bad(f"must be an object, not {repr(v)[:60]}")
        return {_CHECKS[str](k): _at(k, each, x) for k, x in v.items()}

    return (lambda v: entries(v, w)), (lambda v: entries(v, r))


def _record(cls: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    hints, missing, codecs = typing.get_type_hints(cls), object(), {}
    for f in dataclasses.fields(cls):
        w, r = _codec(hints[f.name])
        made = f.default_factory() if callable(f.default_factory) else f.default
        codecs[f.name] = (w, r, missing if made is dataclasses.MISSING else w(made))

    def write(v: Any) -> Any:
        if not isinstance(v, cls):
            raise _Bad(f"must be a {cls.__name__}, not {repr(v)[:60]}")
        out = {}
        for name, (w, _, default) in codecs.items():
            x = _at(name, w, getattr(v, name))
            if x != default or repr(x) != repr(default):  # repr: -0.0 is not 0.0
                out[name] = x
        return out

    def read(v: Any) -> Any:
        if not isinstance(v, dict):
            raise _Bad(f"must be an object, not {repr(v)[:60]}")
        for k in v.keys() - codecs.keys():
            raise _Bad(f"is not known.{nearest(k, codecs)}", k)
        values = {}
        for name, (_, r, default) in codecs.items():
            if name in v:
                values[name] = _at(name, r, v[name])
            elif default is missing:
                close = nearest(name, v) if v else ""
                raise _Bad("is missing." + (close if "Did" in close else ""), name)
        try:
            return cls(**values)
        except ValueError as e:  # raised by a type that checks its own values
            raise _Bad(f"holds what cannot be: {e}") from None

    return write, read


def _check_turns(row: Any) -> None:
    """Checks that types cannot express: a turn only continues an earlier one, there is one log-prob per token, and
    spans are inside the tokens."""
    for i, t in enumerate(getattr(row, "turns", ())):
        if t.continues is not None and not 0 <= t.continues < i:
            raise _Bad(f"is {t.continues}; turn {i} can only continue an earlier one", "turns", i, "continues")
        for name in ("logp", "logq"):
            if len(getattr(t, name)) not in (0, len(t.tokens)):
                raise _Bad(f"has {len(getattr(t, name))} numbers for {len(t.tokens)} tokens", "turns", i, name)
        for a, b in t.steps:
            if not 0 <= a <= b <= len(t.tokens):
                raise _Bad(f"has the span [{a}, {b}] outside {len(t.tokens)} tokens", "turns", i, "steps")


def _dumps(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if text.isascii():
        return text
    # A lone surrogate has no UTF-8 and is escaped; two that form a pair are one character.
    join = lambda m: m.encode("utf-16", "surrogatepass").decode("utf-16") if len(m) == 2 else f"\\u{ord(m):04x}"
    return _SURROGATES.sub(lambda m: join(m[0]), text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        raise _Bad("stands twice", next(k for k, _ in pairs if k in seen or seen.add(k)))
    return out


def _loads(line: str | bytes) -> Any:
    return json.loads(line, object_pairs_hook=_unique, parse_constant=lambda c: _fail(f"holds {c}, which is no number"))


def _decode(line: str | bytes, read: Callable[[Any], Any], file: str | Path | None, line_no: int | None) -> Any:
    try:
        return read(_loads(line))
    except _Bad as bad:
        raise DataError(bad.message, file, line_no, ".".join(map(str, bad.path))) from None
    except (ValueError, RecursionError) as e:  # errors of JSON and of UTF-8 are ValueErrors
        why = "nested too deeply" if isinstance(e, RecursionError) else f"not valid JSON ({e})"
        raise DataError(f"the line is {why}.", file, line_no) from None


def _encode(write: Callable[[Any], Any], value: Any, what: str) -> str:
    try:
        return _dumps(write(value))
    except _Bad as bad:
        key = ".".join(map(str, bad.path))
        raise DataError(f"{bad.message} ({what} was not written).", key=key) from None
    except (RecursionError, ValueError) as e:  # a whole number of thousands of digits is a ValueError
        raise DataError(f"{what} cannot be written: {e}.") from None


def to_json(row: Episode | Annotation) -> str:
    """One line, without its newline."""
    what = f"episode '{row.id}'" if isinstance(row, Episode) else f"annotation '{row.name}' of '{row.episode}'"

    def write(v: Episode | Annotation) -> Any:
        _check_turns(v)
        return _codec(type(v))[0](v)

    return _encode(write, row, what)


@typing.overload
def from_json(line: str | bytes, file: str | Path | None = None, line_no: int | None = None) -> Episode: ...
@typing.overload
def from_json(line: str | bytes, file: str | Path | None, line_no: int | None, kind: type[Row]) -> Row: ...
def from_json(line: Any, file: Any = None, line_no: Any = None, kind: Any = Episode) -> Any:
    """The inverse of `to_json`; `file` and `line_no` are for the error."""

    def read(v: Any) -> Any:
        row = _codec(kind)[1](v)
        _check_turns(row)
        return row

    return _decode(line, read, file, line_no)


def object_to_json(row: Mapping[str, Any], what: str) -> str:
    """A line of any JSON object, such as the metrics of a step."""
    return _encode(_json, row, what)


def object_from_json(line: str | bytes, file: str | Path | None = None, line_no: int | None = None) -> dict[str, Any]:
    return _decode(line, _codec(Mapping[str, Any])[1], file, line_no)
