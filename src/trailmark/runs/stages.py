"""Pipelines: stages that are made in order, each once.

    FOLDER/NAME/                      the outputs of a stage; a training stage is an ordinary run
    FOLDER/stages/NAME.json           written last: settings, fingerprints of inputs and outputs, a summary
    FOLDER/stages/NAME.begun.json     settings and inputs of a stage in progress
    FOLDER/replaced/NAME-1/           old outputs, from other settings or inputs, and their record NAME-1.stage.json

`run_stages` checks each stage in order:

    done       its record exists, settings and inputs are the same: the stage is skipped
    killed     begun.json exists: `make` is called again on the folder, which may hold a part of the outputs
    changed    a setting, an input or a file that a setting names has changed: the old outputs are moved away, and the
               stage is made again
    edited     an output was changed by hand: an error names the stage and the file (if all are gone, the stage is made
               again)
    busy       another process makes this stage: RunBusy

Settings that do not change what a stage makes (`Stage.unread`) are stored and not compared.

An input is a file (compared by its content), a folder (by its files) or a run (by its recipe, metrics and newest
checkpoint). Paths are not part of a fingerprint, so a pipeline may be moved. `methods/pipeline.py` derives settings and
inputs from what a stage reads of a recipe.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trailmark import stopping
from trailmark.errors import RunError, TrailmarkError, shorten
from trailmark.fault_points import point
from trailmark.plain_files import read_json
from trailmark.runs.atomic_files import atomic_write, cannot_write, file_hash, hold
from trailmark.runs.data_files import known_files
from trailmark.runs.fingerprints import as_json, fingerprint, json_text, passing, text_hash
from trailmark.runs.store import beside

BEFORE = "recipe.before.yaml"  # the old recipe of a resumed run whose recipe has changed, until its stages are checked
# The files that a run writes itself.
TRAINED = ("checkpoints", "metrics.jsonl", "timings.jsonl", "episodes", "evaluation", "annotations")
Summary = Mapping[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """One step of a pipeline. `make(folder)` writes the outputs and returns a summary of JSON values. After a kill it
    is called again and finds what it had written. It must then continue, or write the same files again."""

    name: str
    make: Callable[[Path], Summary | None]
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str | Path] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)  # files that settings name, by key; they may not exist
    home: str = ""  # the folder that it writes into with other stages; "": one of its own, called as it is
    outputs: tuple[str, ...] | None = None  # the outputs: files and folders below its folder; None: all of them
    single: bool = False  # the output is one file, in place of the folder
    grows: tuple[str, ...] = ()  # settings that may change without making the stage again, such as a number of steps
    unread: tuple[str, ...] = ()  # settings that do not change the outputs: stored, and not compared when it is done
    # writes changed settings that are not compared into finished outputs, for those who look for them there
    refresh: Callable[[Path], None] | None = None
    # what the metrics of its round get from its summary; None: the numbers, with the name of the stage before them
    metrics: Callable[[Summary], Mapping[str, Any]] | None = None


class _Place:
    """The files of one stage."""

    def __init__(self, folder: Path, stage: Stage):
        self.folder, self.stage = folder, stage
        self.home = folder / (stage.home or stage.name)
        self.record = record_of(folder, stage.name)
        self.begun = self.record.with_name(f"{self.record.stem}.begun.json")

    @contextmanager
    def locked(self, alone: bool) -> Iterator[None]:
        try:
            self.record.parent.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise cannot_write(self.folder, problem) from problem
        if alone:
            yield
            return
        lock = self.record.with_name(f".{self.record.stem}.lock")
        fd = hold(lock, f"stage '{self.stage.name}' in {self.folder}")
        try:
            for path in (self.begun, self.record):
                for temp in path.parent.glob(f".{path.name}.*.tmp"):  # left by a process that died
                    temp.unlink(missing_ok=True)
            yield
        finally:
            os.close(fd)

    def parts(self) -> list[Path]:
        """The outputs that exist."""
        if self.stage.outputs is None:
            return [self.home] if _has_files(self.home) else []
        return [p for name in self.stage.outputs if _has_files(p := self.home / name)]

    def files(self) -> dict[str, str]:
        """The outputs by name, with their hashes."""
        if self.stage.outputs is None:
            return fingerprint(self.home, every=True)
        return {
            name if not rest else f"{name}/{rest}": value
            for name in self.stage.outputs if _has_files(self.home / name)
            for rest, value in fingerprint(self.home / name).items()
        }  # fmt: skip

    def set_aside(self, shelf: Path) -> None:
        """Move the outputs and the record to `shelf`. (A killed process may have moved some of them already.)"""
        shelf.parent.mkdir(parents=True, exist_ok=True)
        for path in self.parts() if self.stage.home else [self.home]:
            place = shelf / path.relative_to(self.home) if self.stage.home else shelf
            if path.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                path.rename(place)
                point("stage.moved")
        if self.record.exists():
            self.record.rename(shelf.with_name(f"{shelf.name}.stage.json"))

    def free_shelf(self) -> Path:
        shelf, k, title = self.folder / "replaced", 1, self.stage.name.replace("/", "-")
        while (shelf / f"{title}-{k}").exists():
            k += 1
        return shelf / f"{title}-{k}"


def record_of(folder: str | Path, name: str) -> Path:
    """The record of a finished stage."""
    return Path(folder) / "stages" / f"{name}.json"


def is_stage(folder: Path) -> bool:
    """Whether a folder is, or is becoming, the output of a stage."""
    record = record_of(folder.parent, folder.name)
    return record.exists() or record.with_name(f"{record.stem}.begun.json").exists()


def run_stages(
    folder: str | Path, stages: Sequence[Stage], say: Say | None = None, only: Collection[str] | None = None,
    each: Callable[[Stage, Summary], None] = lambda stage, summary: None, redo: Collection[str] = (),
    alone: bool = False,
) -> dict[str, Summary]:  # fmt: skip
    """Make every stage that is not done, in order. Returns the summary of each; `each` gets a summary as soon as it
    exists. `only`: make only these stages, and the ones before them must be done. `redo`: make these again in any case.
    `say` gets the reason if a stage is made again. `alone`: the caller has locked the whole folder."""
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    names = [s.name for s in stages]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise RunError(f"{folder}: two stages are called '{twice}'.")
    done: dict[str, Summary] = {}
    last = max((names.index(n) for n in only), default=-1) if only is not None else len(names) - 1
    for stage in stages[: last + 1]:
        place = _Place(Path(folder), stage)
        with place.locked(alone):
            if only is not None and stage.name not in only:
                _must_be_done(place, next(n for n in names[names.index(stage.name) :] if n in only))
                continue
            with stopping.advising(f"stage '{place.stage.name}' of {place.folder} is not finished"):
                done[stage.name] = _make(place, say, stage.name in redo)
        each(stage, done[stage.name])
    return done


def stage_state(folder: str | Path, stage: Stage) -> str:
    """For people: done, begun, to do, or what has changed since the stage was made. Nothing is written."""
    place = _Place(Path(folder), stage)
    if not place.record.exists():
        return "begun" if place.begun.exists() else "to do"
    record = _read(place.record)
    try:
        changed = _changes(*_compared(stage, record, _wanted(stage)), stage.grows)
    except RunError as problem:  # an input is not there
        return f"to do again: {problem}"
    return f"to do again: {changed[0]}" if changed else "done"


def _must_be_done(place: _Place, later: str) -> None:
    wanted = _wanted(place.stage)
    record = _record(place)
    if record is None:
        raise RunError(f"{place.folder}: stage '{later}' needs '{place.stage.name}', which is not done yet.")
    _unedited(place, record)
    if changed := _changes(*_compared(place.stage, record, wanted)):
        raise RunError(
            f"{place.folder}: stage '{later}' needs '{place.stage.name}', which was made otherwise "
            f"({changed[0]}): make it again first."
        )


def _wanted(stage: Stage) -> dict[str, Any]:
    files = {key: about["sha256"] for key, about in known_files(stage.files).items()}
    return {"stage": stage.name, "settings": _plain(stage), "inputs": _inputs(stage), "files": files}


def _make(place: _Place, say: Say, again: bool = False) -> Summary:
    stage = place.stage
    wanted = _wanted(stage)
    begun = _read(place.begun) if place.begun.exists() else None
    if begun and (shelf := begun.pop("replaces", None)):  # killed while the old outputs were moved
        place.set_aside(place.folder / shelf)
        _note(place.begun, wanted)
        begun = wanted
    record = _record(place)
    if record is not None and record["outputs"] and not place.parts():
        say(f"stage '{stage.name}' is made again: {place.home} is gone")
        place.record.unlink()
        record = None
    if again and (record is not None or place.parts()):
        _replace(place, wanted, "you want it again", say)
    elif record is not None:
        if not (begun or {}).get("refreshes"):  # else killed inside `refresh`
            _unedited(place, record)
        old, now = _compared(stage, record, wanted)
        changed = _changes(old, now, stage.grows)
        if not changed:
            if stage.refresh is not None and record["settings"] != wanted["settings"]:
                _note(place.begun, {**wanted, "refreshes": True})
                stage.refresh(place.home)
                return _finish(place, wanted, record["summary"])
            place.begun.unlink(missing_ok=True)
            return record["summary"]
        if _grows(stage, old, now):
            say(f"stage '{stage.name}' goes on: {changed[0]}")
        else:
            _replace(place, wanted, changed[0], say)
    elif begun is not None:  # what is half made goes on with the very same settings
        changed = _changes(begun, wanted, stage.grows)
        if changed and place.parts() and not _grows(stage, begun, wanted):
            _replace(place, wanted, changed[0], say)
    elif place.parts() and not stage.home:
        raise RunError(
            f"stage '{stage.name}' writes to {place.home}, which holds files that it did not make ('{_first(place)}'): "
            "move them away."
        )
    _note(place.begun, wanted)
    point("stage.begun")
    try:
        (place.home.parent if stage.single else place.home).mkdir(parents=True, exist_ok=True)
        summary = dict(stage.make(place.home) or {})
    except TrailmarkError:
        if not place.parts():  # an error before the first output leaves nothing behind
            place.begun.unlink(missing_ok=True)
            if not stage.home:
                remove_empty(place.home)
        raise
    point("stage.made")
    return _finish(place, wanted, summary)


def _finish(place: _Place, wanted: Mapping[str, Any], summary: Summary) -> Summary:
    whole = {**wanted, "outputs": place.files(), "summary": dict(summary)}
    atomic_write(place.record, as_json(whole), "stage")
    place.begun.unlink(missing_ok=True)
    return summary


def _record(place: _Place) -> dict[str, Any] | None:
    """The content of the record."""
    if not place.record.exists():
        return None
    found = _read(place.record)
    if all(k in found for k in ("settings", "inputs", "files", "outputs", "summary")):
        return found
    raise RunError(
        f"{place.record} is no record of a stage: move it away with {place.home}, and stage '{place.stage.name}' is "
        "made again."
    )


def _replace(place: _Place, wanted: Mapping[str, Any], why: str, say: Say) -> None:
    shelf = place.free_shelf()
    say(f"stage '{place.stage.name}' is made again: {why}. What was there lies in {shelf}")
    _note(place.begun, {**wanted, "replaces": shelf.relative_to(place.folder).as_posix()})
    point("stage.replaced")
    place.set_aside(shelf)
    _note(place.begun, wanted)


def begun_from(run: Path, stages: Sequence[Stage], say: Say | None = None) -> None:
    """Store which stages a run trains from. If they have changed since the run began, its results are moved to
    RUN/replaced, and the run starts again."""
    note, say = run / "stages" / "used.json", say or (lambda line: print(line, file=sys.stderr, flush=True))
    now = {s.name: text_hash(json_text(_content(_Place(run, s).home))) for s in stages}
    old = _read(note) if note.exists() else now
    shelf = old.pop("replaces", None)
    if shelf is None and old != now:
        other = next(name for name in {**old, **now} if old.get(name) != now.get(name))
        shelf = next(s for k in itertools.count(1) if not (run / (s := f"replaced/run-{k}")).exists())
        say(f"the run begins again: its stage '{other}' is another one. What was there lies in {run / shelf}")
    if shelf is not None:
        _note(note, {**now, "replaces": shelf})
        point("stage.replaced")
        (run / shelf).mkdir(parents=True, exist_ok=True)
        _keep_open(run, run / shelf)
        for name in TRAINED:
            if (run / name).exists():
                (run / name).rename(run / shelf / name)
                point("stage.moved")
        for name in ("episodes", "checkpoints"):
            (run / name).mkdir(exist_ok=True)
    (run / "stages" / BEFORE).unlink(missing_ok=True)
    _note(note, now)


def _keep_open(run: Path, shelf: Path) -> None:
    """Copy what commands need to open the old results as a run: the recipe that they were made with, and the files next
    to it."""
    before = run / "stages" / BEFORE
    recipe = before if before.exists() else run / "recipe.yaml"
    for path, name in ((recipe, "recipe.yaml"), *((run / n, n) for n in ("versions.json", "models.json", "data.json"))):
        if path.is_file() and not (shelf / name).exists():
            atomic_write(shelf / name, path.read_bytes())
    if (run / "judge").is_dir() and not (shelf / "judge").exists():
        shutil.copytree(run / "judge", shelf / "judge")
    for page in ("report.html", "verify.json"):
        if (run / page).exists():
            (run / page).rename(shelf / page)


def _unedited(place: _Place, record: Mapping[str, Any]) -> None:
    now = place.files()
    for name, value in record["outputs"].items():
        if now.get(name) != value:
            file = place.home / name if name else place.home
            what = "was changed after it was made" if name in now else "is gone"
            away = f"{file if place.stage.home else place.home} and {place.record}"
            raise RunError(
                f"{file} of stage '{place.stage.name}' {what}: put it back as it was, or move {away} away and "
                f"the stage is made again."
            )


def _compared(stage: Stage, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both records without what the stage does not read."""
    one, two = ({**r, "settings": without_keys(r["settings"], stage.unread)} for r in (old, new))
    return one, two


def without_keys(settings: Mapping[str, Any], unread: Collection[str], path: str = "") -> dict[str, Any]:
    """Settings without some keys; a section of which nothing is left goes, too."""
    out = {}
    for key, value in settings.items():
        if f"{path}{key}" in unread:
            continue
        if isinstance(value, dict) and value:
            value = without_keys(value, unread, f"{path}{key}.")
            if not value:
                continue
        out[key] = value
    return out


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], grows: Sequence[str] = ()) -> list[str]:
    """A sentence for each setting and each input file that differs. Settings with which the stage can simply go on come
    last."""
    keys = sorted(_keys(old["settings"], new["settings"]), key=lambda found: found[0] in grows)
    changes = [f"key '{key}' was {_short(a)} and is {_short(b)}" for key, a, b in keys]
    for name in dict.fromkeys([*old["inputs"], *new["inputs"]]):
        before, now = old["inputs"].get(name), new["inputs"].get(name)
        if before is None or now is None:
            changes.append(f"input '{name}' is {'new' if before is None else 'no longer used'}")
            continue
        other = sorted(f for f in {*before, *now} if before.get(f) != now.get(f))
        if other:
            changes.append(f"input '{name}' has changed" + (f" ({other[0]})" if other[0] else ""))
    return [*changes, *(f"the file of key '{key}' has changed" for key in _other_files(old, new))]


def _other_files(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys whose file has changed. (A key that is new, or names another file, is a changed setting.)"""
    before, now = old["files"], new["files"]
    return [key for key in now if before.get(key, now[key]) != now[key]]


_NOTHING = object()


def _keys(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The keys that differ. If a section exists on one side only, each of its keys is listed."""
    a, b = ({} if x is _NOTHING and isinstance(y, dict) and y else x for x, y in ((a, b), (b, a)))
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from _keys(a.get(key, _NOTHING), b.get(key, _NOTHING), f"{path}.{key}" if path else key)
    elif a is _NOTHING or b is _NOTHING or json_text(a) != json_text(b):
        yield path, a, b


def _grows(stage: Stage, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the stage can go on, because only settings differ that may change."""
    keys = {key for key, _, _ in _keys(old["settings"], new["settings"])}
    return bool(keys) and keys <= set(stage.grows) and old["inputs"] == new["inputs"] and not _other_files(old, new)


# --- inputs --------------------------------------------------------------------------------------------------------


def _inputs(stage: Stage) -> dict[str, dict[str, str]]:
    found = {}
    for name, path in stage.inputs.items():
        path = Path(path)
        if not path.exists():
            raise RunError(
                f"stage '{stage.name}' needs {path} as its input '{name}', and there is no such file or folder."
            )
        found[name] = _content(path)
    return found


def _content(path: Path) -> dict[str, str]:
    """The fingerprint of an input. Of a stage it is what its record says: files that somebody put beside its outputs do
    not count. A file of episodes is read with the annotations next to it."""
    record, notes = record_of(path.parent, path.name), beside(path)
    if path.is_dir() and not (path / "recipe.yaml").is_file() and record.is_file():
        return _read(record).get("outputs", {})
    return {**fingerprint(path), **({notes.name: file_hash(notes)} if path.is_file() and notes.is_file() else {})}


# --- JSON ----------------------------------------------------------------------------------------------------------


def _plain(stage: Stage) -> Any:
    """The settings as they would be read back from a file."""
    return json.loads(json_text(dict(stage.settings)))


def _note(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, as_json(value), "begun")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except OSError as problem:
        raise RunError(f"{path} cannot be read ({problem.strerror}).") from None
    except ValueError as problem:
        raise RunError(f"{path} is not JSON ({problem}): move it and what the stage made away.") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} is no record of a stage: move it and what the stage made away.")
    return found


def _short(value: Any) -> str:
    return "not set" if value is _NOTHING else shorten(json.dumps(value, ensure_ascii=False))


def _has_files(path: Path) -> bool:
    return path.is_file() or any(p.is_file() and not passing(p.relative_to(path)) for p in path.rglob("*"))


def _first(place: _Place) -> str:
    """One of the outputs, for a message; a hidden file only if there is no other."""
    first = place.parts()[0]
    files = [first] if first.is_file() else sorted(p for p in first.rglob("*") if p.is_file())
    return str(min(files, key=lambda p: p.name.startswith(".")).relative_to(place.home))


def remove_empty(folder: Path) -> None:
    """Delete the folder of a pipeline in which nothing was made."""
    if folder.is_dir() and not _has_files(folder):
        shutil.rmtree(folder, ignore_errors=True)
