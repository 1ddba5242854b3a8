"""All stages, from repositories to the five files.

DIR/repos/NAME/            repos    the kept files of each repository (U1)
DIR/tasks.jsonl            tasks    questions (U2)
DIR/tasks_filtered.jsonl   filter   those that can be played, each once (U3)
DIR/trajectories.jsonl     walks    with the walks of the teacher (U4)
DIR/train.jsonl, validate.jsonl, test.jsonl    split    7 to 2 to 1 (U5)
DIR/sft/                   sft      steps.jsonl and five files with either label, from train.jsonl (U6)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trailmark.data.stages import Counts, DataFolder, data_folder
from trailmark.errors import DataError, TrailmarkError
from trailmark.methods.reflect.decisions import write_decisions
from trailmark.methods.reflect.explore.explorer import Explorer
from trailmark.methods.reflect.explore.records import Record, check_records, read_records, write_records
from trailmark.methods.reflect.explore.replay import replay
from trailmark.methods.reflect.explore.repos import filter_repository
from trailmark.methods.reflect.explore.sources import Source
from trailmark.methods.reflect.explore.split import SHARES, By, split_records
from trailmark.methods.reflect.explore.tasks import Repository, filter_records, generate
from trailmark.methods.reflect.explore.walks import add_walks
from trailmark.methods.reflect.teacher import Teacher
from trailmark.progress import Progress
from trailmark.runs.stages import Stage
from trailmark.seats.model_names import read_tokenizer
from trailmark.texts import token_count

STAGES = ("repos", "tasks", "filter", "walks", "split", "sft")


@dataclass(frozen=True, slots=True)
class Plan:
    """How the data are made. `rules`: filter the repositories. `tasks`: a file of questions instead of the
    teacher's."""

    seed: int = 0
    files: int = 100
    per_file: int = 3
    rules: bool = True
    tasks: str = ""
    negatives: int = 2
    markov: bool = False
    horizon: int = 15
    split: By = "hash"
    shuffle: bool = False
    tokenizer: str = ""


def make(
    out: Path, sources: Sequence[Source], plan: Plan, open_teacher: Callable[[Path], Teacher], settings: dict[str, Any],
    wanted: Sequence[str] = STAGES, say: Callable[[str], None] = lambda line: None,
) -> dict[str, Counts]:  # fmt: skip
    """Run the wanted stages in `out`, continuing where an earlier run was stopped. Stages whose `settings` differ are
    made again. `open_teacher` gets the file that stores answers."""
    names = [s.name for s in sources]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise TrailmarkError(f"two repositories are called '{twice}': rename a folder.")
    with data_folder(out, settings, wanted, STAGES) as place:
        teacher = open_teacher(out / "answers.jsonl")
        repositories = [Repository(s.name, s.version, out / "repos" / s.name) for s in sources]
        return place.make(_stages(place, _Work(out, plan, teacher, repositories), sources, plan), wanted, say)


def _stages(place: DataFolder, work: _Work, sources: Sequence[Source], plan: Plan) -> list[Stage]:
    """Each with what it writes, what it reads and the settings that it depends on."""
    says = ("teacher", "temperature", "top_p", "tokenizer", "seed")
    given = {"tasks": plan.tasks} if plan.tasks else {}
    return [
        place.stage("repos", partial(work.repos, sources), ["repos"], [], ["sources", "rules"]),
        place.stage("tasks", work.tasks, ["tasks.jsonl"], ["repos"], [*says, "files", "per_file", "tasks"], given),
        place.stage("filter", work.filter, ["tasks_filtered.jsonl"], ["tasks.jsonl", "repos"], []),
        place.stage("walks", work.walks, ["trajectories.jsonl"], ["tasks_filtered.jsonl", "repos"],
                    [*says, "negatives", "markov", "horizon"]),
        place.stage("split", work.split, [f"{name}.jsonl" for name in SHARES], ["trajectories.jsonl"],
                    ["seed", "split"]),
        place.stage("sft", work.sft, ["sft"], ["train.jsonl", "repos"], ["horizon", "shuffle", "tokenizer"]),
    ]  # fmt: skip


class _Work:
    def __init__(self, out: Path, plan: Plan, teacher: Teacher, repositories: Sequence[Repository]):
        self.out, self.plan, self.teacher, self.repositories = out, plan, teacher, repositories
        self.tokenizer = read_tokenizer(plan.tokenizer)

    def repos(self, sources: Sequence[Source]) -> Counts:
        counts = Counts()
        (self.out / "repos").mkdir(exist_ok=True)
        for source in sources:
            one = filter_repository(source.folder(), self.out / "repos" / source.name, self.plan.rules)
            counts.kept["repositories"] += 1
            counts.kept += one.kept
            counts.left_out += one.left_out
        return counts

    def tasks(self) -> Counts:
        if self.plan.tasks:
            records = read_records(self.plan.tasks)
            counts = Counts()
            counts.kept["questions read"] = len(records)
        else:
            records, counts = generate(
                self.repositories, self.teacher, self.plan.seed, self.plan.files, self.plan.per_file,
                token_count(self.tokenizer),
            )  # fmt: skip
        write_records(self.out / "tasks.jsonl", records, "tasks")
        return counts

    def filter(self) -> Counts:
        records, counts = filter_records(read_records(self.out / "tasks.jsonl"), self.repositories)
        check_records(records, self.out / "tasks.jsonl")
        write_records(self.out / "tasks_filtered.jsonl", records, "filtered")
        return counts

    def explorer(self, records: Path, shuffle: bool = False) -> Explorer:
        return Explorer(self.out / "repos", records, self.plan.horizon, self.tokenizer, shuffle)

    def walks(self) -> Counts:
        path, plan = self.out / "tasks_filtered.jsonl", self.plan
        records = read_records(path)
        self.parts(records)  # fails here if the split leaves nothing to learn from, before the long part of the work
        with Progress(len(records), name="walks") as bar:
            made, counts = add_walks(
                self.explorer(path), records, self.teacher, plan.seed, plan.negatives, plan.markov,
                lambda n: bar.update(n, {}),
            )  # fmt: skip
        write_records(self.out / "trajectories.jsonl", made, "trajectories")
        return counts

    def parts(self, records: Sequence[Record]) -> dict[str, list[Record]]:
        parts = split_records(records, self.plan.seed, self.plan.split)
        if not parts["train"]:
            raise DataError(f"none of {len(records)} records falls into train: make more questions, or --split exact.")
        return parts

    def split(self) -> Counts:
        parts = self.parts(read_records(self.out / "trajectories.jsonl"))
        for name in SHARES:
            write_records(self.out / f"{name}.jsonl", parts[name], "split")
        counts = Counts()
        counts.kept.update({name: len(parts[name]) for name in SHARES})
        return counts

    def sft(self) -> Counts:
        return make_sft(self.out / "train.jsonl", self.out / "sft", partial(self.explorer, shuffle=self.plan.shuffle))


def make_sft(records: Path, out: Path, explore: Callable[[Path], Explorer]) -> Counts:
    """Write steps.jsonl and both sets of five files from the walks of a file of records."""
    decisions, counts = replay(explore(records), read_records(records))
    if not decisions:
        raise DataError("has no walk that can be played again: there is nothing to learn from.", records)
    counts.kept += write_decisions(out, decisions)
    return counts
