"""The findings of a check, and the report of all checks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """`what` says what failed, why it was skipped, or what was checked. `notes` are worth reading but not failures."""

    name: str
    status: Status
    what: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Findings:
    """Collects the defects and numbers of one check."""

    def __init__(self, name: str):
        self.name, self.numbers = name, dict[str, Any]()
        self.notes: list[str] = []
        self._defects: dict[str, list[str]] = {}

    def defect(self, kind: str, where: str = "") -> None:
        """Add a case of a defect. Cases of one kind are counted, and the first is quoted."""
        self._defects.setdefault(kind, []).append(where)

    def result(self, looked_at: str) -> Check:
        if not self._defects:
            return Check(self.name, "pass", looked_at, self.numbers, tuple(self.notes))
        parts = []
        for kind, places in self._defects.items():
            more = f", {len(places)} in all" if len(places) > 1 else ""
            parts.append(f"{kind} ({places[0]}{more})" if places[0] else kind)
        numbers = {**self.numbers, "defects": {kind: len(places) for kind, places in self._defects.items()}}
        return Check(self.name, "fail", "; ".join(parts), numbers, tuple(self.notes))

    def skip(self, why: str) -> Check:
        return Check(self.name, "skip", why, self.numbers, tuple(self.notes))


@dataclass(frozen=True, slots=True)
class Report:
    run: str
    method: str
    checks: tuple[Check, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(c.status != "fail" for c in self.checks)

    def __getitem__(self, name: str) -> Check:
        return next(c for c in self.checks if c.name == name)

    def to_json(self) -> str:
        counts = {s: sum(c.status == s for c in self.checks) for s in ("pass", "fail", "skip")}
        whole = {"run": self.run, "method": self.method, "ok": self.ok, **counts, "versions": dict(self.versions),
                 "checks": [_plain(asdict(c)) for c in self.checks]}  # fmt: skip
        return json.dumps(whole, allow_nan=False)


def _plain(value: Any) -> Any:
    """A value as JSON; NaN and infinities become their names."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
