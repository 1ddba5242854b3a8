"""One stored decision, and the files that are made of many.

    steps.jsonl           every decision with its parts apart: state, menu, reflection, the label taken and the best one
    oracle/*.jsonl        the five files of Reflect-RL (methods/reflect/formats.py) with the best label
    behaviour/*.jsonl     the same with the label that was taken

The user chooses which one is imitated. The behaviour is what the teacher (or its random perturbation) did. The oracle
is the first action of the shortest path from there. If a teacher makes no mistakes, the two are the same.

A row of the five files is {"text", "task", "trajectory", "step", "behaviour", "oracle"}: the last two are labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from trailmark.errors import DataError
from trailmark.formats.rows import Row, each, json_lines
from trailmark.methods.reflect.formats import ACTION, ANALYZE, SftStep
from trailmark.runs.atomic_files import atomic_write

Wanted = Literal["oracle", "behaviour"]
STEPS = "steps.jsonl"
KINDS = ("sft", "sft_policy", "sft_reflection")
FIVE = (*KINDS, "sft_policy_positive", "sft_reflection_positive")


@dataclass(frozen=True, slots=True)
class Decision:
    """`action` and `oracle` are labels in `labels`; `actions` holds their texts at the same positions. `positive` is
    false if the step before was a mistake. `perturbed` is true if `action` was random and not the teacher's choice."""

    task: str
    trajectory: str
    step: int
    state: str
    menu: str
    labels: tuple[str, ...]
    actions: tuple[str, ...]
    reflection: str
    action: str
    oracle: str
    model: str
    positive: bool = True
    perturbed: bool = False

    def command(self, wanted: Wanted = "behaviour") -> str:
        """The text of the label that was taken, or of the best one."""
        return self.actions[self.labels.index(self.oracle if wanted == "oracle" else self.action)]

    def texts(self, wanted: Wanted) -> dict[str, str]:
        label = self.oracle if wanted == "oracle" else self.action
        return SftStep(self.state, self.reflection, self.menu, label, self.positive).texts()


def fits(reflection: str) -> bool:
    """Whether a reflection can be written between the markers and read back."""
    return bool(reflection.strip()) and ANALYZE not in reflection and ACTION.strip() not in reflection


def write_decisions(folder: Path, decisions: Sequence[Decision]) -> Counter[str]:
    """Write steps.jsonl and both sets of five files. Returns the number of rows in each. The list of decisions is
    written last."""
    if not any(d.positive for d in decisions):
        raise DataError("there is no positive step to write: two of the five files would be empty.", folder)
    counts: Counter[str] = Counter()
    wishes: tuple[Wanted, ...] = ("oracle", "behaviour")
    for wanted in wishes:
        (folder / wanted).mkdir(parents=True, exist_ok=True)
        files: dict[str, list[dict[str, Any]]] = {name: [] for name in FIVE}
        for d in decisions:
            place = {"task": d.task, "trajectory": d.trajectory, "step": d.step}
            for kind, text in d.texts(wanted).items():
                row = {"text": text, **place, "behaviour": d.action, "oracle": d.oracle}
                files[kind].append(row)
                if d.positive and kind != "sft":
                    files[f"{kind}_positive"].append(row)
        for name, rows in files.items():
            atomic_write(folder / wanted / f"{name}.jsonl", json_lines(rows), "five")
            counts[name] = len(rows)
    atomic_write(folder / STEPS, json_lines(asdict(d) for d in decisions), "steps")
    return counts


def read_decisions(path: str | Path) -> list[Decision]:
    """All decisions of a steps.jsonl, of the one in a folder, or of the one under sft/ in a folder made in stages."""
    path = Path(path)
    if path.is_dir():
        path = path / STEPS if (path / STEPS).exists() or not (path / "sft").is_dir() else path / "sft" / STEPS
    return each(path, from_row)[0]


_TEXTS = ("task", "trajectory", "state", "menu", "reflection", "action", "oracle", "model")
_NAMES = [f.name for f in fields(Decision)]


def from_row(row: Row) -> Decision:
    """One line of steps.jsonl."""
    v = row.fields(row.value, "", _NAMES[:-2], _NAMES[-2:])
    values: dict[str, Any] = {key: row.text(v[key], key) for key in _TEXTS}
    for key in ("labels", "actions"):
        values[key] = tuple(row.text(x, key) for x in row.listed(v[key], key))
    for key in ("positive", "perturbed"):
        if not isinstance(v.get(key, True), bool):
            raise row.bad(f"must be true or false, not {repr(v[key])[:60]}.", key)
    if type(v["step"]) is not int:
        raise row.bad(f"must be a whole number, not {repr(v['step'])[:60]}.", "step")
    if len(values["labels"]) != len(values["actions"]):
        raise row.bad(f"are {len(values['labels'])} for {len(values['actions'])} actions.", "labels")
    for key in ("action", "oracle"):
        if values[key] not in values["labels"]:
            raise row.bad(f"'{values[key]}' is none of the listed labels.", key)
    return Decision(
        **values, step=v["step"], positive=v.get("positive", True), perturbed=v.get("perturbed", False)
    )  # fmt: skip
