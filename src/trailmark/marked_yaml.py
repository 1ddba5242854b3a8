"""YAML that remembers the place of every key. It is safe: no objects, no exploding anchors, no key twice."""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import dataclass
from typing import Any

import yaml

from trailmark.errors import RecipeError

Keys = tuple[str | int, ...]
MAX_NODES, MAX_DEPTH = 50_000, 40
_KINDS = ("null", "bool", "int", "float", "str")
_INT = r"[-+]?(?:0|[1-9][0-9_]*)"
_FLOAT = r"[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"


@dataclass(frozen=True)
class Mark:
    """The place of a key (`file:line` or `override '…'`) and how its value is spelled there."""

    where: str
    spelled: str = ""


def dotted(path: Keys) -> str:
    return ".".join(map(str, path))


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without its traps: `1e-5` is a number, `010` and `1:30` are not."""


class Dumper(yaml.SafeDumper):
    """A dumper without anchors that quotes every text which would otherwise be read back as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        odd = re.search("[\x85\u2028\u2029]", data)  # YAML takes these for line breaks and folds them
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if odd else None)


Dumper.add_representer(str, Dumper.represent_str)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag.rpartition(":")[2] in ("null", "bool", "timestamp", "merge")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _cls in (_Loader, Dumper):  # the dumper keeps the old rules too, because other programs read YAML 1.1
    _cls.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"(?:{_INT})$"), list("-+0123456789"))
    _cls.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT}|[-+]?\.(?:inf|nan))$", re.I), list("-+.0123456789")
    )


_UNUSABLE = re.compile("[\0\ud800-\udfff]")  # NUL, and lone surrogates (from bytes that are not UTF-8)


def plain(text: str, name: str) -> Any:
    """The value of a YAML text. One text is parsed once: a run reads its recipe again and again."""
    return copy.deepcopy(_parsed(text, name))


@functools.lru_cache(16)
def _parsed(text: str, name: str) -> Any:
    return parse(text, name)[0]


def parse(text: str, name: str, line: bool = True) -> tuple[Any, dict[Keys, Mark]]:
    """The value of a YAML text and a mark for each of its keys. One error lists all problems."""
    marks: dict[Keys, Mark] = {}
    problems: list[str] = []
    count = 0
    spelled = lambda node: node.value if isinstance(node, yaml.ScalarNode) else ""
    where = lambda mark: f"{name}:{mark.line + 1}" if line and mark is not None else name

    def build(node: yaml.Node, path: Keys) -> Any:
        nonlocal count
        count += 1
        at, key = where(node.start_mark), f": key '{dotted(path)}'" if path else ""
        if count > MAX_NODES or len(path) > MAX_DEPTH:
            raise RecipeError(f"{at}: the recipe is too large, or too deep, once its anchors are filled in.")
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return entries(node, path)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            for i, item in enumerate(node.value):
                marks[(*path, i)] = Mark(where(item.start_mark), spelled(item))
            return [build(item, (*path, i)) for i, item in enumerate(node.value)]
        if kind == "timestamp":
            problems.append(f"{at}{key}: found the date {node.value}; put it in quotes if text is meant.")
        elif isinstance(node, yaml.ScalarNode) and kind in _KINDS:
            if kind == "str" and (bad := _UNUSABLE.search(node.value)):
                problems.append(
                    f"{at}{key}: the text has the character {bad.group()!r}, which no file or path can hold."
                )
                return None
            try:
                return loader.construct_object(node)
            except (ValueError, KeyError, yaml.YAMLError):  # an explicit tag, such as !!int x
                problems.append(f"{at}{key}: '{node.value}' is not a valid {kind}.")
        else:
            problems.append(f"{at}{key}: the YAML tag {node.tag} is not allowed here.")
        return None

    def entries(node: yaml.MappingNode, path: Keys) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            at, key = where(key_node.start_mark), key_node.value
            if key_node.tag == "tag:yaml.org,2002:merge":
                problems.append(f"{at}: merge keys ('<<') are not supported; use 'extends' or write the keys out.")
            elif key_node.tag != "tag:yaml.org,2002:str":
                shown = f"'{dotted((*path, key))}'" if isinstance(key, str) else "that is a list or mapping"
                problems.append(f"{at}: a key {shown} is not text; put it in quotes.")
            elif _UNUSABLE.search(key):
                problems.append(f"{at}: the key {key!r} has a character that no file can hold.")
            elif key in out:
                first = marks[(*path, key)].where
                problems.append(f"{at}: key '{dotted((*path, key))}' appears twice (first at {first}).")
            else:
                marks[(*path, key)] = Mark(at, spelled(value_node))
                out[key] = build(value_node, (*path, key))
        return out

    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        value = None if root is None else build(root, ())
    except RecursionError:
        raise RecipeError(f"{name}: nested too deeply.") from None
    except yaml.YAMLError as e:
        mark, problem = getattr(e, "problem_mark", None), getattr(e, "problem", None) or getattr(e, "reason", str(e))
        tab = " (indent with spaces, not tabs)" if "\\t" in problem else ""
        raise RecipeError(f"{where(mark)}: not valid YAML: {problem}{tab}.") from None
    if problems:
        raise RecipeError("\n".join(problems))
    return value, marks
