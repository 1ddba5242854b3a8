"""A question about a repository: where its answer is, and how teachers looked for it.

Our own line is {"id", "repo", "version", "kind", "query", "answer", "target", "depth", "n_files", "split", "model",
"trajectories"}. Only repo, query and target (a path, or several with the annotated one first) are required. The
reference's JSON is a list of {"question", "answer", "optimal_path", "filename", "root", "n_level", "model",
"trajectories"}. Both are read and written. A trajectory is {"model_name", "trajectory": [{"reflection", "cmd"}],
"filename", "info"} in both.

A record here has its walks and can be written again. The world that asks these questions reads the same files with
`trailmark.tasks.auto_explore.records`, and only what it needs to play.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.formats.rows import Row, each, json_lines
from trailmark.runs.atomic_files import atomic_write
from trailmark.runs.fingerprints import as_json
from trailmark.tasks.auto_explore.commands import way_to
from trailmark.tasks.auto_explore.records import plain_path, repo_name


@dataclass(frozen=True, slots=True)
class Walk:
    """One teacher's walk: a list of (reflection, command). `found` is the file it identified at the end. `info` is
    "positiveK", or "negativeK" if its last step repairs a deliberate mistake."""

    model: str
    steps: tuple[tuple[str, str], ...]
    found: str | None
    info: str

    @property
    def positive(self) -> bool:
        return not self.info.startswith("negative")

    def to_json(self) -> dict[str, Any]:
        steps = [{"reflection": r, "cmd": c} for r, c in self.steps]
        return {"model_name": self.model, "trajectory": steps, "filename": self.found, "info": self.info}


@dataclass(frozen=True, slots=True)
class Record:
    """One question with its answer and the teachers' walks: a row of a data set."""

    repo: str
    query: str
    target: str
    answer: str = ""
    version: str = ""
    kind: str = ""
    n_files: int = 0
    model: str = ""
    split: str = ""
    walks: tuple[Walk, ...] = ()
    also: tuple[str, ...] = ()  # other files that answer the question
    name: str = ""  # the id in the file it was read from

    @property
    def id(self) -> str:
        """The id within its repository. It depends only on the question and the file, not on the rest of the data
        set."""
        text = "\0".join((self.repo, self.target, self.query))
        return self.name or hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    @property
    def key(self) -> str:
        return f"{self.repo}-{self.id}"

    @property
    def depth(self) -> int:
        return self.target.count("/")

    @property
    def optimal_path(self) -> list[str]:
        """The shortest commands: cd, cd, …, cat, id."""
        return way_to(self.target)

    @property
    def targets(self) -> list[str]:
        """The file it was made from, then the files that teachers identified."""
        found = {*self.also, *(w.found for w in self.walks if w.found and w.positive)} - {self.target}
        return [self.target, *sorted(found)]

    def to_json(self) -> dict[str, Any]:
        row = {k: v for k, v in asdict(self).items() if k not in ("name", "walks", "also")}
        row["target"] = self.targets if len(self.targets) > 1 else self.target
        return {"id": self.id, **row, "depth": self.depth, "trajectories": [w.to_json() for w in self.walks]}

    def to_reference(self) -> dict[str, Any]:
        return {
            "question": self.query, "answer": self.answer, "optimal_path": self.optimal_path, "filename": self.target,
            "root": self.repo, "n_level": self.depth, "model": self.model,
            "trajectories": [w.to_json() for w in self.walks],
        }  # fmt: skip


def read_records(path: str | Path) -> list[Record]:
    """Records of either kind; each row says which kind it is."""
    return each(path, _from_row)[0]


def write_records(path: Path, records: Sequence[Record], name: str = "records") -> None:
    """Write our own lines. If the name ends in .json: the reference's list."""
    if path.suffix == ".json":
        atomic_write(path, as_json([r.to_reference() for r in records]), name)
    else:
        atomic_write(path, json_lines(r.to_json() for r in records), name)


def _from_row(row: Row) -> Record:
    value = row.value if isinstance(row.value, dict) else row.fields(row.value, "", [])
    return _reference(row, value) if "question" in value else _ours(row, value)


def _ours(row: Row, value: dict[str, Any]) -> Record:
    v = row.fields(value, "", ["repo", "query", "target"], ["answer", "version", "kind", "n_files", "model", "split"])
    name = v.get("id", "")
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise row.bad(f"must be text or a whole number, not {repr(name)[:60]}.", "id")
    texts = {k: row.text(v.get(k, ""), k) for k in ("repo", "query", "answer", "version", "kind", "model", "split")}
    n_files = v.get("n_files", 0)
    if type(n_files) is not int:
        raise row.bad(f"must be a whole number, not {repr(n_files)[:60]}.", "n_files")
    listed = v["target"] if isinstance(v["target"], list) else [v["target"]]
    target, *also = [plain_path(row.text(t, "target")) for t in row.listed(listed, "target")]
    return Record(
        **texts, target=target, n_files=n_files, walks=_walks(row, v), also=tuple(also), name=str(name)
    )  # fmt: skip


def _reference(row: Row, value: dict[str, Any]) -> Record:
    v = row.fields(value, "", ["question", "filename", "root"], ["answer", "model", "trajectories"])
    root = row.text(v["root"], "root").rstrip("/")
    return Record(
        repo_name(root),
        row.text(v["question"], "question").strip(),
        plain_path(row.text(v["filename"], "filename"), root),
        row.text(v.get("answer") or "", "answer"),
        model=row.text(v.get("model") or "", "model"),
        walks=_walks(row, v, root),
    )


def _walks(row: Row, v: dict[str, Any], root: str = "") -> tuple[Walk, ...]:
    found = v.get("trajectories") or []
    if not isinstance(found, list):
        raise row.bad(f"must be a list, not {repr(found)[:60]}.", "trajectories")
    return tuple(_walk(row, t, f"trajectories[{i}]", root) for i, t in enumerate(found))


def _walk(row: Row, value: Any, key: str, root: str) -> Walk:
    t = row.fields(value, key, ["trajectory"], ["model_name", "filename", "info"])
    if not isinstance(t["trajectory"], list):
        raise row.bad(f"must be a list, not {repr(t['trajectory'])[:60]}.", f"{key}.trajectory")
    steps = []
    for i, s in enumerate(t["trajectory"]):
        way = f"{key}.trajectory[{i}]"
        s = row.fields(s, way, ["cmd"], ["reflection"])
        steps.append((row.text(s.get("reflection") or "", f"{way}.reflection"), row.text(s["cmd"], f"{way}.cmd")))
    kept = tuple(s for s in steps if s[1].split()[:1] != ["ls"])
    found = plain_path(row.text(t.get("filename") or "", f"{key}.filename"), root) or None
    model = row.text(t.get("model_name") or "", f"{key}.model_name")
    return Walk(model, kept, found, row.text(t.get("info") or "positive", f"{key}.info"))


def check_records(records: Sequence[Record], path: Path) -> None:
    """Refuse two records of a repository with the same id."""
    seen: set[str] = set()
    for r in records:
        if r.key in seen:
            raise DataError(f"the id '{r.id}' belongs to two records of '{r.repo}'.", path)
        seen.add(r.key)
