"""Recipes: YAML files that extend each other, `key=value` overrides, and errors with file and line.

`load_recipe` reads and merges the files and remembers on which line every key stands; `resolve` checks the result
against a `Config` class; `dump` writes it out again. Mappings merge and everything else is replaced. A mapping whose
`kind` changes is replaced too, because its other keys belonged to the old kind; so is a task whose name changes, with
its options. `extends` names one file, or a list of which each wins over those before it; the file's own keys win over
them all. `${out}/samples.jsonl` is a text with the value of another key of the finished recipe, `${learner.optim}`
alone is that value itself, and `$${` writes `${`.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from trailmark.errors import RecipeError, nearest, shorten
from trailmark.marked_yaml import MAX_DEPTH, MAX_NODES, Dumper, Keys, Mark, dotted, parse
from trailmark.plain_files import read_plain
from trailmark.trust import named_by_person, named_by_run, of_a_run

MAX_BYTES = 1 << 20


class Config(BaseModel):
    """A section of a recipe: unknown keys are refused, values cannot be changed, defaults are checked too."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    short: ClassVar[tuple[str, ...]] = ()
    in_full: ClassVar[bool] = False  # a section of this class takes no key from the default of its holder

    @classmethod
    def spelled_out(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Replace short keys by the keys that they stand for. This runs before any check."""
        return raw


C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Loaded:
    """A merged recipe that is not yet checked against a schema."""

    file: str
    raw: dict[str, Any]
    marks: Mapping[Keys, Mark] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return self.raw["method"]


# --- files and overrides -----------------------------------------------------------------------------------------


def _read(path: Path, wanted_by: str = "") -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecipeError(f"{path}: too large for a recipe (more than {MAX_BYTES >> 20} MB).")
        return read_plain(path).decode("utf-8-sig")
    except FileNotFoundError:
        places = (path.parent, *([shipped("recipes")] if _named(path) else []))
        near = nearest(path.name, {p.name for place in places for p in place.glob("*.yaml")})
        raise RecipeError(f"{wanted_by}{path}: there is no such recipe.{near if 'Did' in near else ''}") from None
    except UnicodeDecodeError as e:
        raise RecipeError(f"{path}: not a recipe: byte {e.start} is not UTF-8 text.") from None
    except (OSError, ValueError) as e:
        raise RecipeError(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e}).") from None


def merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `top`, section by section, as a recipe is laid over the file that it extends."""
    return _merge(Loaded("", dict(base), {}), Loaded("", dict(top), {})).raw


def _another(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a section is of another kind, or is another task, so that keys of the old one do not fit it."""
    changes = lambda key: key in old and key in new and old[key] != new[key]
    return changes("kind") or ("options" in old and changes("name"))


def _merge(base: Loaded, top: Loaded) -> Loaded:
    marks = dict(base.marks)

    def merge(a: dict[str, Any], b: dict[str, Any], path: Keys) -> dict[str, Any]:
        out = dict(a)
        for key, new in b.items():
            old, here = a.get(key), (*path, key)
            if isinstance(old, dict) and isinstance(new, dict) and not _another(old, new):
                out[key] = merge(old, new, here)
            else:
                for p in [p for p in marks if p[: len(here)] == here]:
                    del marks[p]
                out[key] = new
        return out

    raw = merge(base.raw, top.raw, ())
    return Loaded(top.file, raw, marks | dict(top.marks))


def shipped(folder: str) -> Path:
    """`recipes` or `studies` as they come with this version: in the package if it was built, else in the checkout."""
    built = Path(__file__).parent / "shipped" / folder
    return built if built.is_dir() else Path(__file__).parents[2] / folder


def _named(path: Path) -> str:
    """NAME of `NAME`, `NAME.yaml`, `recipes/NAME` and `recipes/NAME.yaml`; else nothing."""
    short = path.parts[:-1] in ((), ("recipes",)) and path.suffix in ("", ".yaml")
    return path.stem if short else ""


def find_recipe(path: str | Path) -> Path:
    """The file itself, or a recipe that comes with this version, by the name that the pages give it. So their commands
    work in any folder."""
    found = shipped("recipes") / f"{_named(Path(path))}.yaml"
    return found if not Path(path).is_file() and _named(Path(path)) and found.is_file() else Path(path)


def _parent(path: Path, name: str) -> Path:
    """The file that `extends` names. It is relative to the file that names it, or a packaged recipe's name. So a folder
    of recipes can be copied anywhere."""
    if (path.parent / name).exists():
        return path.parent / name
    packaged = Path(__file__).parent / "recipes" / f"{name}.yaml"
    if name == Path(name).stem and packaged.is_file():
        return packaged
    found = find_recipe(name)
    return found if found != Path(name) else path.parent / name


def _load(
    path: Path, below: tuple[Path, ...] = (), wanted_by: str = "", read: dict[Path, Loaded] | None = None
) -> Loaded:
    """A file with all it extends. `below` are the files that lead to it; `read` are those that were read already."""
    read = {} if read is None else read
    if path.resolve() in [p.resolve() for p in below]:
        raise RecipeError(f"{wanted_by}'extends' goes in a circle: {' -> '.join(map(str, (*below, path)))}.")
    if path.resolve() not in read:  # two files of a list may extend a third one
        read[path.resolve()] = _load_new(path, below, wanted_by, read)
    return read[path.resolve()]


def _load_new(path: Path, below: tuple[Path, ...], wanted_by: str, read: dict[Path, Loaded]) -> Loaded:
    value, marks = parse(_read(path, wanted_by), str(path))
    if not isinstance(value, dict):
        found = "it is empty" if value is None else f"found {_found(value)}"
        raise RecipeError(f"{path}:1: a recipe is a mapping of keys to values; {found}.")
    if "extends" not in value:
        return Loaded(str(path), value, marks)
    given, where = value.pop("extends"), marks.pop(("extends",)).where
    lines = {p: marks.pop(p).where for p in list(marks) if p[0] == "extends"}
    parents = given if isinstance(given, list) and given else [given]
    above: Loaded | None = None
    for k, parent in enumerate(parents):  # a later file wins over an earlier one, and the file itself over all of them
        says = f"{lines.get(('extends', k), where)}: key 'extends': "
        if not isinstance(parent, str):
            raise RecipeError(f"{says}expected a file name or a list of them, found {_found(parent)}.")
        found = _load(_parent(path, parent), (*below, path), says, read)
        above = found if above is None else _merge(above, found)
    assert above is not None
    return _merge(above, Loaded(str(path), value, marks))


PATHS = ("reward",)  # keys whose text is short for {path: text}


def _override(text: str) -> Loaded:
    key, equals, value = text.partition("=")
    path, name = tuple(key.strip().split(".")), f"override '{text if len(text) <= 200 else text[:200] + '…'}'"
    if not equals or not all(path):
        raise RecipeError(f"{name}: expected key=value, such as learner.optim.lr=1e-4.")
    if len(path) > MAX_DEPTH:
        raise RecipeError(f"{name}: {len(path):,} keys below each other; no recipe is that deep.")
    if path[0] == "extends":
        raise RecipeError(f"{name}: 'extends' can only stand in a file.")
    parsed, inner = parse(value, name, line=False)
    marks = {(*path, *p): m for p, m in inner.items()} | {path[:i]: Mark(name, value) for i in range(1, len(path) + 1)}
    for part in reversed(path):
        parsed = {part: parsed}
    return Loaded(name, parsed, marks)


def _without(raw: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """A copy without the mapping at `keys`. (An override replaces any other value anyway.)"""
    inner = raw.get(keys[0])
    if not isinstance(inner, dict):
        return raw
    rest = _without(inner, keys[1:]) if keys[1:] else None
    return {k: v for k, v in raw.items() if k != keys[0]} if rest is None else {**raw, keys[0]: rest}


def load_yaml(path: str | Path, overrides: Iterable[str] = ()) -> Loaded:
    """As `load_recipe`, for a file that need not name a method."""
    files: dict[Path, Loaded] = {}
    loaded, changes = _load(Path(path), read=files), Loaded(str(path), {})
    (named_by_run if any(map(of_a_run, files)) else named_by_person)(loaded.raw)
    for text in overrides:
        change, keys = _override(text), tuple(text.partition("=")[0].strip().split("."))
        if keys[0] in PATHS and len(keys) > 1:  # reward.success=0.9 beside a reward that is a text
            short = changes.raw.get(keys[0], loaded.raw.get(keys[0]))
            if isinstance(short, str):
                change.raw[keys[0]] = {"path": short, **change.raw[keys[0]]}
        loaded, changes = (Loaded(x.file, _without(x.raw, keys), x.marks) for x in (loaded, changes))
        changes = _merge(changes, change)
    return _filled_in(_merge(loaded, Loaded(str(path), changes.raw, changes.marks)))


NAMED = re.compile(r"(\$?)\$\{([A-Za-z_][\w.]*)\}")  # ${a.b}; with another $ before it, the text itself


def _filled_in(loaded: Loaded) -> Loaded:
    """The recipe with the values of the keys that its texts name."""

    filled = grown = 0

    def bad(path: Keys, why: str) -> RecipeError:
        marks = (loaded.marks.get(path[:i]) for i in range(len(path), 0, -1))
        return RecipeError(f"{next(filter(None, marks), Mark(loaded.file)).where}: key '{dotted(path)}': {why}")

    def at(name: str, path: Keys, seen: tuple[str, ...]) -> Any:
        value: Any = loaded.raw
        for part in name.split("."):
            value = fill(value, path, seen) if isinstance(value, str) else value  # it may name a section itself
            if not isinstance(value, dict) or part not in value:
                raise bad(path, f"${{{name}}} names no key that this recipe sets. (To write ${{ as text, write $${{.)")
            value = value[part]
        return value

    def fill(value: Any, path: Keys, seen: tuple[str, ...]) -> Any:
        nonlocal filled
        filled += 1
        if filled > 2 * MAX_NODES or len(seen) > MAX_DEPTH:
            raise bad(path, "the recipe is too large, or its ${} too deep, once they are filled in.")
        if isinstance(value, dict):
            return {k: fill(v, (*path, k), seen) for k, v in value.items()}
        if isinstance(value, list):
            return [fill(v, (*path, i), seen) for i, v in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value

        def found(m: re.Match[str]) -> Any:
            if m[2] in seen:
                raise bad(path, f"goes in a circle: {' -> '.join((*seen, m[2]))}.")
            return fill(at(m[2], path, (*seen, m[2])), path, (*seen, m[2]))

        def text(m: re.Match[str]) -> str:
            if m[1]:
                return f"${{{m[2]}}}"
            if isinstance(got := found(m), dict | list):
                raise bad(path, f"${{{m[2]}}} is no text or number, so it cannot stand inside a text.")
            put = "" if got is None else str(got).lower() if isinstance(got, bool) else str(got)
            nonlocal grown
            grown += len(put)
            if grown > MAX_BYTES:
                raise bad(path, f"its ${{}} put in more than {MAX_BYTES >> 20} MB of text.")
            return put

        whole = NAMED.fullmatch(value)
        return found(whole) if whole and not whole[1] else NAMED.sub(text, value)

    return Loaded(loaded.file, fill(loaded.raw, (), ()), loaded.marks)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Loaded:
    """Read a recipe and all files that it extends, then apply each override `dotted.key=value` (a YAML value). Files
    are merged. An override replaces: `task={name: mine}` keeps nothing of the recipe's task."""
    loaded = load_yaml(find_recipe(path), overrides)
    method = loaded.raw.get("method")
    if not isinstance(method, str):
        where = loaded.marks.get(("method",), Mark(str(path))).where
        found = "is missing" if method is None else f"expected text, found {_found(method)}"
        raise RecipeError(f"{where}: key 'method': {found}; it names what is run, such as 'method: oreo'.")
    return loaded


# --- checking ----------------------------------------------------------------------------------------------------

SAME = {  # what other trainers, and earlier recipes, call a key
    "starts": ("prompts_per_step", "prompts"), "rollout_batch_size": ("prompts_per_step",),
    "num_generations": ("n",), "group_size": ("n",), "num_samples": ("n",), "k": ("n",),
    "slots": ("max_num_seqs",), "fixed": ("batch_invariant",), "max_model_len": ("max_len",),
    "max_length": ("max_len",),
    "max_new_tokens": ("max_tokens",), "max_completion_length": ("max_tokens",), "old": ("old_logp",),
    "given": ("files",), "learning_rate": ("lr",), "max_grad_norm": ("clip",), "lr_scheduler_type": ("schedule",),
    "warmup_ratio": ("warmup",), "warmup_steps": ("warmup",), "num_train_epochs": ("epochs",),
    "max_steps": ("steps",), "output_dir": ("out",), "batch_size": ("batch",), "train_batch_size": ("batch",),
    "lora_r": ("rank",), "r": ("rank",), "lora_alpha": ("alpha",), "target_modules": ("targets",),
    "model_name_or_path": ("name",), "torch_dtype": ("dtype",), "eval_steps": ("every",), "save_steps": ("every",),
}  # fmt: skip
_EXPECTED = {
    "string_type": "text", "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "list_type": "a list", "tuple_type": "a list", "dict_type": "a mapping",
    "model_type": "a mapping", "model_attributes_type": "a mapping", "none_required": "nothing",
    "finite_number": "a finite number", "string_too_short": "a text that is not empty",
}  # fmt: skip


def _found(value: Any, mark: Mark | None = None) -> str:
    if value is None or isinstance(value, list | dict):
        return "nothing" if value is None else "a list" if isinstance(value, list) else "a mapping"
    name = {bool: "the boolean", int: "the whole number", float: "the number"}.get(type(value), "the text")
    shown = shorten(mark.spelled if mark and mark.spelled and not isinstance(value, str) else str(value))
    return f"{name} '{shown}'" if isinstance(value, str) else f"{name} {shown}"


def _configs(annotation: Any) -> list[type[Config]]:
    """The Config classes that an annotation may hold, also inside unions, lists and mappings."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [annotation] if issubclass(annotation, Config) else []
    return [c for a in typing.get_args(annotation) for c in _configs(a)]


def _is_kind(cls: type[Config], tag: Any) -> bool:
    options = [f.annotation for f in cls.model_fields.values() if typing.get_origin(f.annotation) is Literal]
    return any(tag in typing.get_args(o) for o in options)


def _locate(schema: type[Config], raw: Any, loc: Keys) -> tuple[Keys, Any, list[type[Config]], list[type[Config]]]:
    """For an error location: its keys in the data, the value there, the Config classes that hold the last key, and the
    Config classes that may stand there. (An error location also names members of unions; these are no keys of the
    data.)"""
    path, value, holders, inside = (), raw, [schema], [schema]
    for i, part in enumerate(loc):
        # A kind may have the name of a key: `kind: model` next to a key `model`.
        if len(inside) > 1 and isinstance(value, dict) and value.get("kind") == part:
            inside = [c for c in inside if _is_kind(c, part)] or inside
            continue
        there = (isinstance(value, dict) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and part < len(value)
        )
        fields = [c.model_fields[part] for c in inside if isinstance(part, str) and part in c.model_fields]
        if there or (i == len(loc) - 1 and isinstance(value, dict) and fields):
            path, holders = (*path, part), inside
            value = value[part] if there else None
            inside = [c for f in fields for c in _configs(f.annotation)] if fields else inside
        else:
            inside = [c for c in inside if _is_kind(c, part)] or inside
    return path, value, holders, inside


def _of_another_kind(schema: type[Config], raw: Any, loc: Keys) -> bool:
    """Whether an error is of a member of a union that the section does not want to be: its `kind` is another member's.
    Pydantic tries all members where a union names no discriminator."""
    value, inside = raw, [schema]
    for part in loc:
        mine = [c for c in inside if c.__name__ == part]
        if mine and len(inside) > 1 and isinstance(value, dict):
            kind = value.get("kind")
            if kind in _kinds(inside) and not _is_kind(mine[0], kind):
                return True
            inside = mine
        elif isinstance(value, dict) and part in value:
            fields = [c.model_fields[part] for c in inside if isinstance(part, str) and part in c.model_fields]
            value, inside = value[part], [c for f in fields for c in _configs(f.annotation)] if fields else inside
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
    return False


def _kinds(classes: Iterable[type[Config]]) -> list[str]:
    found = [typing.get_args(c.model_fields["kind"].annotation) for c in classes if "kind" in c.model_fields]
    return sorted({str(name) for names in found for name in names})


def _explain(
    error: Any, value: Any, path: Keys, holders: list[type[Config]], inside: list[type[Config]]
) -> tuple[str, str]:
    """What was expected (a phrase, or ""), and a further hint."""
    kind, ctx = error["type"], error.get("ctx", {})
    quoted = lambda text: re.findall(r"'([^']*)'", text)
    if kind == "extra_forbidden":
        names = [n for c in holders for n in (*c.model_fields, *c.short)]
        meant = next((n for n in SAME.get(str(path[-1]), ()) if n in names), None)
        return "", f"is not known.{f' Did you mean {meant!r}?' if meant else nearest(str(path[-1]), names)}"
    if kind == "missing":
        return "", "is missing."
    if kind == "union_tag_not_found":
        name, kinds = str(ctx["discriminator"]).strip("'"), _kinds(inside)
        return "", f"needs a key '{name}' that says what it is{': ' + ', '.join(kinds) if kinds else ''}."
    if kind == "union_tag_invalid":
        close = nearest(str(ctx["tag"]), quoted(ctx["expected_tags"]))
        return "", f"has the unknown {ctx['discriminator']} '{ctx['tag']}'.{close}"
    if kind == "value_error":
        said = str(ctx["error"])
        return "", said if said.endswith((".", "?", "!")) else f"{said}."
    if kind == "literal_error":
        hint = nearest(value, quoted(ctx["expected"])) if isinstance(value, str) else ""
        if isinstance(value, dict) and value.get("kind") in quoted(ctx["expected"]):
            return f"{ctx['expected']}", f" Write {path[-1]}: {value['kind']}."
        return f"{ctx['expected']}", hint if "Did" in hint else ""
    if kind == "string_pattern_mismatch" and "https?" in ctx["pattern"]:
        return "an address that begins with http:// or https://", ""
    hint = " Put it in quotes." if kind == "string_type" and isinstance(value, bool | int | float) else ""
    return _EXPECTED.get(kind) or error["msg"].removeprefix("Input should be "), hint


def _with_own_defaults(schema: type[Config], raw: dict[str, Any]) -> dict[str, Any]:
    """A section that is given in part takes its other keys from the default that the class of its holder has for it,
    which may be another than the section's own."""
    out = dict(raw)
    for name, key in schema.model_fields.items():
        given, default = raw.get(name), key.default
        if not isinstance(given, dict):
            continue
        if isinstance(default, Config) and not default.in_full:
            own = default.model_dump(mode="json", exclude_unset=True)
            given = given if _another(own, given) else merged(own, given)
        inside = _configs(key.annotation)
        if len(inside) == 1 and typing.get_origin(key.annotation) not in (dict, list):
            given = _with_own_defaults(inside[0], given)
        out[name] = given
    return out


def resolve(recipe: Loaded | Mapping[str, Any], schema: type[C]) -> C:
    """Check a recipe against the config class of its method. One error lists all problems, one per line."""
    loaded = recipe if isinstance(recipe, Loaded) else Loaded("recipe", dict(recipe))
    try:
        loaded = replace(loaded, raw=schema.spelled_out(loaded.raw))
    except RecipeError as e:
        said = (f"{loaded.file}: {line.removeprefix('recipe: ')}" for line in str(e).splitlines())
        raise RecipeError("\n".join(said)) from None
    try:
        # Checked as strict JSON: a text is not accepted as a number, but a list is accepted as a tuple.
        return schema.model_validate_json(json.dumps(_with_own_defaults(schema, loaded.raw)), strict=True)
    except ValidationError as e:
        errors = e.errors(include_url=False)
    found: dict[Keys, tuple[Any, list[tuple[str, str]]]] = {}
    mine = [e for e in errors if not _of_another_kind(schema, loaded.raw, tuple(e["loc"]))]
    for error in mine or errors:  # a union reports one error per member
        path, value, holders, inside = _locate(schema, loaded.raw, tuple(error["loc"]))
        found.setdefault(path, (value, []))[1].append(_explain(error, value, path, holders, inside))
    lines = []
    for path, (value, said) in found.items():
        marks = (loaded.marks.get(path[:i]) for i in range(len(path), 0, -1))
        mark = next(filter(None, marks), Mark(loaded.file))
        wanted = " or ".join(dict.fromkeys(w for w, _ in said if w))
        start = f"expected {wanted}, found {_found(value, mark)}." if wanted else ""
        key = f"key '{dotted(path)}': " if path else ""
        lines.append(f"{mark.where}: {key}{start}{''.join(dict.fromkeys(s for _, s in said))}")
    raise RecipeError("\n".join(lines))


def dump(config: Config) -> str:
    """The resolved recipe as YAML, with keys in the order of the classes. It loads back to an equal config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
