"""Data sets by name, as LLaMA-Factory's `dataset_info.json` lists them:

    {"sotopia_pi_rl": {"file_name": "sotopia_pi_rl.json", "formatting": "sharegpt",
                       "columns": {"messages": "conversations"}, "tags": {"user_tag": "human"}}}

A file is looked for in the folder of dataset_info.json. `hf_hub_url` is a folder, or a data set of the hub; HF_ENDPOINT
names a mirror. Only ShareGPT is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trailmark.errors import DataError, nearest
from trailmark.fetching import may_fetch
from trailmark.formats.speakers import Tags
from trailmark.plain_files import read_json

LIST = "dataset_info.json"
NAMES = {  # of a key or a speaker in dataset_info.json -> in `Tags`
    "columns": {"messages": "messages"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
             "system_tag": "system", "observation_tag": "observation", "function_tag": "function"},
}  # fmt: skip
COLUMNS = ("prompt", "query", "response", "history", "system", "tools", "images", "chosen", "rejected", "kto_tag")
LOST = ("subset", "split", "folder", "num_samples", "ranking", "script_url", "ms_hub_url")


@dataclass(frozen=True)
class DataSet:
    """A data set by its name: its files, and what they call their keys and speakers."""

    name: str
    files: tuple[Path, ...]
    tags: Tags


def names_in(listed: str, key: str = "dataset") -> list[str]:
    """The names in a comma list. An empty one is a mistake."""
    names = [n.strip() for n in listed.split(",")]
    if not all(names):
        raise DataError(f"is '{listed}', and a name is missing at a comma: write NAME or NAME,NAME.", key=key)
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise DataError(f"names '{twice}' twice.", key=key)
    return names


def find_sets(listed: str, folder: str | Path, key: str = "dataset") -> list[DataSet]:
    """The data sets that a comma list names."""
    info = Path(folder) / LIST
    known = read_info(info)
    found = []
    for name in names_in(listed, key):
        if name not in known:
            raise DataError(f"there is no data set '{name}'.{nearest(name, known)}", info)
        try:
            found.append(_set(name, known[name], info))
        except OSError as problem:  # a name that no file can have, or a device
            raise DataError(f"its files cannot be read: {problem.strerror}.", info, key=name) from None
    return found


def read_info(path: Path) -> dict[str, Any]:
    """The entries of a dataset_info.json. An error names its line."""
    try:
        if not path.is_file():
            raise DataError("there is no such file: it lists the data sets, and dataset_dir names its folder.", path)
        found = read_json(path)
    except json.JSONDecodeError as problem:
        comma = " Is there a comma behind the last entry?" if "property name" in problem.msg else ""
        raise DataError(f"is not JSON: {problem.msg}.{comma}", path, problem.lineno) from None
    except (OSError, ValueError) as problem:
        raise DataError(f"cannot be read: {problem}.", path) from None
    if not isinstance(found, dict):
        raise DataError("must hold one JSON object: the data sets by name.", path)
    return found


def _set(name: str, entry: Any, info: Path) -> DataSet:
    if not isinstance(entry, dict):
        raise DataError(f"must be an object, not {repr(entry)[:60]}.", info, key=name)
    if entry.get("formatting", "alpaca") != "sharegpt":
        kind = entry.get("formatting", "alpaca")
        raise DataError(f"is '{kind}', and only sharegpt is read.", info, key=f"{name}.formatting")
    if lost := next((k for k in LOST if entry.get(k)), None):
        raise DataError("is not read here: leave it out, and name the file itself.", info, key=f"{name}.{lost}")
    tags = _tags(name, entry, info)
    if url := entry.get("hf_hub_url"):
        return DataSet(name, _of_hub(str(url), info, f"{name}.hf_hub_url"), tags)
    if not isinstance(file := entry.get("file_name"), str) or not file:
        why = "is missing: name a file, or a data set of the hub (hf_hub_url)."
        raise DataError(why, info, key=f"{name}.file_name")
    path = info.parent / file
    if not path.exists():
        raise DataError(f"there is no file {path}.", info, key=f"{name}.file_name")
    return DataSet(name, _files(path, info, f"{name}.file_name"), tags)


def _tags(name: str, entry: Mapping[str, Any], info: Path) -> Tags:
    given: dict[str, str] = {}
    for part, known in NAMES.items():
        section = entry.get(part) or {}
        if not isinstance(section, dict):
            raise DataError("must be an object.", info, key=f"{name}.{part}")
        for k, v in section.items():
            key = f"{name}.{part}.{k}"
            aside = COLUMNS if part == "columns" else ()
            if k in aside and v:
                raise DataError("is not read here: only the messages of a row are.", info, key=key)
            if k not in known and k not in aside:
                raise DataError(f"is not known.{nearest(k, known)}", info, key=key)
            if k in known:
                if not isinstance(v, str) or not v:
                    raise DataError(f"must be a text, not {v!r}.", info, key=key)
                given[known[k]] = v
    tags = Tags(**given)
    speakers = [getattr(tags, f.name) for f in fields(Tags)][3:]
    if twice := next((s for s in speakers if speakers.count(s) > 1), None):
        raise DataError(f"two speakers are called '{twice}'.", info, key=f"{name}.tags")
    return tags


def _files(path: Path, info: Path, key: str) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    found = sorted(p for p in path.iterdir() if p.suffix in (".json", ".jsonl") and p.name != LIST)
    if not found:
        raise DataError(f"{path} holds no file .json or .jsonl.", info, key=key)
    return tuple(found)


def _of_hub(name: str, info: Path, key: str) -> tuple[Path, ...]:
    """The files of a folder, or of a data set of the hub, or of its mirror."""
    here: Sequence[Path] = (info.parent / name, Path(name))
    if folder := next((p for p in here if p.exists()), None):
        return _files(folder, info, key)
    may_fetch(f"data set '{name}' of the hub")
    from huggingface_hub import snapshot_download

    try:
        got = snapshot_download(name, repo_type="dataset", allow_patterns=["*.json", "*.jsonl"])
    except Exception as problem:  # its library raises many kinds
        first = str(problem).strip().split("\n")[0][:200]
        raise DataError(f"'{name}' cannot be loaded from the hub: {first}", info, key=key) from problem
    return _files(Path(got), info, key)
