"""The task source: the repositories, the questions, and the options of play."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from trailmark.errors import TaskError, nearest
from trailmark.tasks.auto_explore.contents import TOKENS, limits
from trailmark.tasks.auto_explore.packages import Sdist, find_repository, read_trees
from trailmark.tasks.auto_explore.records import Question, load_records, task_folder
from trailmark.tasks.auto_explore.repo import snapshot
from trailmark.tasks.auto_explore.world import ExploreWorld, Library
from trailmark.tasks.base import TaskSource
from trailmark.tasks.labels import CHOICES, alphabet, check_labels, pages
from trailmark.types import Task

FREE = "Look around; identify a file to end."


@dataclass(frozen=True)
class Start:
    """What a world needs to begin."""

    library: Library
    query: str
    targets: frozenset[str]
    leaveout: float


class AutoExplore(TaskSource):
    """Find the file of a repository that answers a question.

    tasks       a task file (JSONL, or the reference's JSON), a folder of them, or several
    repos       the folder with their repositories (NAME-VERSION or NAME); default: the folder `repos` beside the tasks,
                else the source distributions in the file_trees.json there, downloaded into `cache`
    repo        instead of `tasks`: one repository, with `query` and `target` (a path or several); without a target
                it is explored freely
    packages    only tasks of these repositories (one or a list, like the next two)
    only        only tasks with a target that has one of these texts in its path
    depth       only tasks with a target this deep (0 is the root): the stage of a curriculum
    horizon     a play is cut off after so many steps
    leaveout    share of entries missing from an episode; None: 0.5 in split "train", 0 in every other split
    shuffle_labels  draw the labels anew at every step, from the whole alphabet
    easy        the question names the file
    first_step  one step only: was it the first of a best path?
    error_cost, warning_cost  the extra cost of an answer "Error …" or "Warning …" (published: 2 and 1; the published
                code charges nothing)
    max_lines, max_tokens     how much of a file is shown, by kind (see contents.py); max_tokens may be one number
    labels      the alphabet; default, once bound to a tokenizer: those of the 252 choices that are its single tokens

    The tasks name their splits. "test" also means "visible_test", and "all" is every task in its order. Tasks of other
    splits are drawn in shuffled passes, by seed.
    """

    name = "auto-explore"
    markov = True
    finite = True

    def __init__(
        self,
        tasks: str | Sequence[str] | None = None,
        repos: str | None = None,
        repo: str | None = None,
        query: str = "",
        target: str | Sequence[str] | None = None,
        packages: str | Sequence[str] | None = None,
        only: str | Sequence[str] | None = None,
        depth: int | Sequence[int] | None = None,
        horizon: int = 15,
        leaveout: float | None = None,
        shuffle_labels: bool = False,
        easy: bool = False,
        first_step: bool = False,
        error_cost: float = 0.0,
        warning_cost: float = 0.0,
        max_lines: Mapping[str, int] | None = None,
        max_tokens: Mapping[str, int] | int = TOKENS,
        labels: Sequence[str] | None = None,
        cache: str | None = None,
    ):
        if (tasks is None) == (repo is None):
            raise TaskError("auto-explore needs either tasks (a file or folder of tasks) or repo (one repository).")
        if repo is None and (query or target):
            raise TaskError("auto-explore: query and target go with repo; tasks bring their own.")
        if horizon < 1:
            raise TaskError(f"auto-explore needs a horizon of at least 1, not {horizon}.")
        if leaveout is not None and not 0 <= leaveout < 1:
            raise TaskError(f"auto-explore: leaveout is a share of at least 0 and below 1, not {leaveout}.")
        if min(error_cost, warning_cost) < 0:
            raise TaskError("auto-explore: error_cost and warning_cost must not be negative.")
        self.limits = limits(max_lines, max_tokens)
        self.own_labels = None if labels is None else check_labels(labels)
        self.labels = self.own_labels or CHOICES
        self.horizon, self.leaveout, self.shuffle_labels = horizon, leaveout, shuffle_labels
        self.easy, self.first_step = easy, first_step
        self.error_cost, self.warning_cost = float(error_cost), float(warning_cost)
        self.repos, self.cache = repos, cache
        self._libraries: dict[tuple[str, str], Library] = {}
        self._checked: dict[str, Question | None] = {}
        self.trees: dict[str, Sdist] = {}
        self.dropped: Counter[str] = Counter()
        self.records = self._one(repo, query, target) if repo is not None else self._many(tasks, packages, only, depth)

    def _one(self, repo: str, query: str, target: str | Sequence[str] | None) -> list[Question]:
        library = Library(snapshot(repo))
        name = library.files.root.name or "repository"
        self._libraries[name, ""] = library
        targets = tuple([target] if isinstance(target, str) else target or ())
        for t in targets:
            if not library.readable(t):
                close = get_close_matches(t, library.files.files[:2000], 1)
                hint = f" Did you mean '{close[0]}'?" if close else ""
                raise TaskError(f"target '{t}' is not a readable file of {repo}.{hint}")
        words = query or (f"Find the file {targets[0]}." if targets else FREE)
        return [Question(f"{name}-0", name, words, targets)]

    def _many(self, tasks: Any, packages: Any, only: Any, depth: Any) -> list[Question]:
        records, self.dropped = load_records(tasks)
        if (beside := task_folder(tasks) / "file_trees.json").is_file():
            self.trees = read_trees(beside)
        if self.repos is None and (task_folder(tasks) / "repos").is_dir():
            self.repos = str(task_folder(tasks) / "repos")
        packages, only = _several("packages", packages, str), _several("only", only, str)
        depth = _several("depth", depth, int)
        names = {r.repo for r in records}
        for name in packages:
            if name not in names:
                raise TaskError(f"auto-explore: no task is about the package '{name}'.{nearest(str(name), names)}")
        kept = [
            r for r in records
            if (not packages or r.repo in packages)
            and (not only or any(part in t for part in only for t in r.targets))
            and (not depth or r.depths & set(depth))
        ]  # fmt: skip
        if not kept:
            depths = sorted(set().union(*(r.depths for r in records)))
            raise TaskError(
                f"auto-explore: packages, only and depth leave none of {len(records)} tasks (depths: {depths})."
            )
        return kept

    def bind(self, tokenizer: Any) -> None:
        """Take the labels from a policy's tokenizer, and count the tokens of files with it."""
        self.labels = alphabet(tokenizer, self.own_labels or CHOICES)
        if self.own_labels and (missing := [x for x in self.own_labels if x not in self.labels]):
            raise TaskError(
                f"label '{missing[0]}' is not a single token of this model: choose labels that are, or add it."
            )
        self.limits = dataclasses.replace(self.limits, tokenizer=tokenizer)
        for library in self._libraries.values():
            library.forget()

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> list[Task]:
        records = [found for r in self._split(split) if (found := self._playable(r))]
        if not records:
            raise TaskError(f"auto-explore: no task of split '{split}' has its target in its repository.")
        if split == "all":
            return [self._task(r, 0.0 if self.leaveout is None else self.leaveout, r.key, seed) for r in records[:n]]
        share = self.leaveout if self.leaveout is not None else 0.5 if split == "train" else 0.0
        if not any(r.targets for r in records) and self.leaveout is None:
            share = 0.0
        made: list[Task] = []
        for turn in range(1 if n is None else -(-n // len(records))):
            order = random.Random(f"auto-explore {split} {seed} {turn}").sample(records, len(records))
            made += [self._task(r, share, f"{r.key}@{seed}.{turn}", seed) for r in order]
        return made[:n]

    def _split(self, split: str) -> list[Question]:
        known = dict.fromkeys(r.split for r in self.records)
        if split == "test" and "test" not in known and "visible_test" in known:
            split = "visible_test"
        if split != "all" and split not in known:
            raise TaskError(f"auto-explore has no split '{split}'.{nearest(split, ['all', *known])}")
        return [r for r in self.records if split in ("all", r.split)]

    def _task(self, r: Question, leaveout: float, name: str, seed: int) -> Task:
        data = {
            "repo": r.repo,
            "version": r.version,
            "query": r.query,
            "targets": list(r.targets),
            "leaveout": leaveout,
        }
        return Task(name, seed, data, dict(r.meta))

    def _playable(self, r: Question) -> Question | None:
        """The record with its readable targets; None if it names targets and none is readable."""
        if r.key not in self._checked:
            targets = self.readable(r.repo, r.version, r.targets)
            if r.targets and not targets:
                self.dropped["targets that cannot be read in their repository"] += 1
            self._checked[r.key] = dataclasses.replace(r, targets=targets) if targets or not r.targets else None
        return self._checked[r.key]

    def menus(self) -> Iterator[tuple[str, str]]:
        """(where, menu) of every folder of every repository: the longest list of commands that a play can show."""
        labels = sorted(self.labels, key=len, reverse=True) if self.shuffle_labels else self.labels
        for repo, version in dict.fromkeys((r.repo, r.version) for r in self.records):
            library = self._library(repo, version)
            for folder in library.files.folders:
                cut = pages([o.text for o in library.whole(folder).offers], labels)
                for page in cut:
                    lines = "".join(f"{label}. {text}\n" for label, text in zip(page.labels, page.actions))
                    yield f"folder '{folder or '.'}' of {repo}", f"# Commands\n{lines}"

    def readable(self, repo: str, version: str, targets: Sequence[str]) -> tuple[str, ...]:
        """The targets that exist in the repository and are text."""
        library = self._library(repo, version)
        return tuple(t for t in targets if library.readable(t))

    def _library(self, repo: str, version: str) -> Library:
        made = self._libraries.get((repo, version))
        if made is None:
            made = Library(snapshot(find_repository(repo, version, self.repos, self.trees, self.cache)))
            self._libraries[repo, version] = made
        return made

    def start(self, task: Task) -> Start:
        """A task's data, checked."""
        data = task.data
        try:
            repo, version, query = str(data["repo"]), str(data.get("version", "")), str(data["query"])
            targets, leaveout = frozenset(map(str, data["targets"])), float(data.get("leaveout", 0.0))
        except (KeyError, TypeError, ValueError):
            raise TaskError(f"task '{task.id}' needs data repo, query and targets (a list of paths).") from None
        library = self._library(repo, version)
        if missing := [t for t in targets if t not in library.files.stamps]:
            raise TaskError(f"task '{task.id}': target '{min(missing)}' is not a readable file of repository '{repo}'.")
        return Start(library, query, targets, leaveout)

    def make(self) -> ExploreWorld:
        return ExploreWorld(self)


def _several(key: str, value: Any, kind: type) -> tuple[Any, ...]:
    """An option that is one value or a list of them; None gives an empty tuple."""
    if value is None:
        return ()
    found = (value,) if isinstance(value, str | int) else tuple(value)
    if not found or any(type(x) is not kind for x in found):
        what = "whole numbers" if kind is int else "texts"
        raise TaskError(f"auto-explore: {key} must be a list of {what}, not {value!r}.")
    return found
