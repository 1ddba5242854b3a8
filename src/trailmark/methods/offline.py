"""Learning from a file of scored trajectories: what `oreo` and `preference` share.

Trajectories that cannot be learnt from are left out and counted. Reading goes over the files once and keeps where each
trajectory stands; a trajectory is read and encoded when a batch needs it. The policy can be evaluated on a task during
training, and once as it was before training (`final.start`).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from trailmark.answers import most_common, read_answer
from trailmark.episodes import by_group, won
from trailmark.errors import DataError, RecipeError
from trailmark.formats.episode_file import StoredFile
from trailmark.formats.on_demand import OnDemand
from trailmark.formats.rows import RowFile
from trailmark.formats.scored import SIDES
from trailmark.formats.turns import Imported
from trailmark.learn.learner import Learner
from trailmark.learn.loop import Evaluation
from trailmark.learn.watch import summary
from trailmark.memory import need_rows
from trailmark.methods.base import Method, ModelInMemory, reference_in_memory
from trailmark.methods.batches import Batches
from trailmark.methods.offline_configs import OfflineRecipe
from trailmark.methods.value_model import load_frozen
from trailmark.models.lm import LM
from trailmark.models.load import load_model, load_reference
from trailmark.models.openrlhf_critic import in_our_layout
from trailmark.objectives.base import Objective
from trailmark.rollout.play import Seat, must_show, play
from trailmark.rollout.search_episodes import best_by_value
from trailmark.runs.data_files import must_be_file
from trailmark.runs.store import Run
from trailmark.samples import chains, scored
from trailmark.score.value_models import locate_value
from trailmark.score.values import HeadValues, read_as
from trailmark.seats.config import AnyKind, LocalSeat, filled
from trailmark.seats.model_names import locate
from trailmark.seats.open_seats import OpenSeats
from trailmark.tasks import get_task, keep_judge
from trailmark.tasks.base import draw_tasks
from trailmark.types import Annotation, Episode, Failed, Scored

CHOICES = ("single", "vote", "best", "any")  # of several answers of each start, at the end (final.choose)
NOTHING = ("nothing would be trained", "nothing to learn from")  # how readers report a row without an action


class OfflineMethod(Method):
    """Reads the file, loads the policy and the reference, and plays evaluations. A subclass defines what the rows are
    and how they are learnt: `make_rows`, `make_learner`, `make_objective` and `updates`."""

    Config = OfflineRecipe

    @classmethod
    def unread(cls, config: Any) -> tuple[str, ...]:
        """What evaluations are played with, if there are none."""
        if cls.evaluates(config):
            return ()
        return ("eval.split", "eval.n", "eval.patience", "eval.first", "engine", "sampling")

    @classmethod
    def evaluates(cls, config: Any) -> bool:
        """Whether anything is played."""
        return bool(config.eval.every or config.final.start or config.final.choose)

    def __init__(self, config: Any, run: Run):
        if not config.files or not all(config.files):
            raise RecipeError("data: name a file of scored trajectories")
        need_rows(config.batch, "batch")
        policy = load_model(config.model)
        self.max_len = min(policy.context, config.max_len or policy.context)
        found = read_scored(config.files, config.format, policy.tokenizer, config.seat, self.max_len)
        self.rows, skipped = self.make_rows(config, found.episodes, policy.tokenizer)
        self.batches = Batches(self.rows, config.batch, config.seed, config.steps, config.epochs)
        config = config.model_copy(update={"steps": self.batches.steps})
        self.counts = {"rows": len(self.rows)} | {f"skipped_{k}": n for k, n in {**found.skipped, **skipped}.items()}
        super().__init__(config, run)
        self.models: dict[str, LM] = {"policy": policy}
        self.ref = self.make_reference()
        self.learner = self.make_learner()
        self.objective = self.make_objective()
        self.source = get_task(config.task.name, **config.task.options) if config.task else None
        self.opened = self.open_seats(policy) if config.task else None
        if self.source is not None:
            keep_judge(self.source, run.path)
            self.source.bind(policy.tokenizer)
            if config.eval.every and self.opened is not None:
                asked = draw_tasks(self.source, config.eval.split, config.eval.n, config.seed)
                must_show(self.source, asked, self.opened.seats)

    def make_rows(self, config: Any, episodes: Trajectories, tokenizer: Any) -> tuple[Sequence[Any], dict[str, int]]:
        """The rows that batches are drawn from, and how many trajectories could not be used, by reason. Episodes are
        read from disk when they are asked for; what `Trajectories` says about them costs nothing."""
        raise NotImplementedError(
            f"{type(self).__name__} must define make_rows(config, episodes, tokenizer), which returns the rows that a "
            "batch is drawn from and how many trajectories it left out, by reason"
        )

    def make_reference(self) -> str:
        """The name of the reference in the learner. A LoRA run needs no second copy: its base model is the
        reference."""
        if (ref := load_reference(self.config.model, self.config.ref)) is None:
            return "policy/base"
        self.models["ref"] = ref
        return "ref"

    def make_learner(self) -> Learner:
        return Learner(self.models, self.config.learner, total=self.config.steps)

    def make_objective(self) -> Objective:
        """The objective that is trained on the rows."""
        raise NotImplementedError(f"{type(self).__name__} must define make_objective(), which returns an Objective")

    def open_seats(self, policy: LM) -> OpenSeats:
        return OpenSeats(self.seats_of(self.config), {self.config.seat: policy})

    def metrics(self) -> Mapping[str, float]:
        return self.counts

    def evaluate(self, step: int) -> Mapping[str, float]:
        if self.opened is None:
            return {}
        (seat,) = self.opened.seats
        self.opened.publish(step)
        episodes = self.keep_plays(step, lambda: self.play(seat))
        good, dropped = scored(episodes)
        return {**summary(good), **dropped}

    def play(self, seat: Seat) -> list[Episode]:
        """Play the starts of an evaluation, with the random draws of evaluations."""
        c = self.config
        assert self.source is not None
        tasks = draw_tasks(self.source, c.eval.split, c.eval.n, c.seed)
        how = {"seed": c.seed + 1, "failures": c.failures}
        return play(self.source, tasks, [seat], prefix="eval:", **how)

    def evaluations(self, step: int, last: bool) -> Sequence[Evaluation]:
        """At the end: evaluations of the policy as it was before training."""
        f, out = self.config.final, list[Evaluation]()
        if last and f.start:
            first = lambda: self.play(self.open_seats(load_model(self.config.model)).seats[0])
            out.append(Evaluation("start", first, moves=False))
        if last and f.choose:
            out += [Evaluation(how, partial(self.chosen, how), moves=False) for how in CHOICES]
        return out

    def chosen(self, how: str) -> list[Episode]:
        """Several answers of each start by the policy before training: all, or one of each start: by the votes, by the
        reward model, or a right one if there is any, which is the ceiling of every choice."""
        seat, every = self._answers
        if how == "single":
            return every
        if how == "best":
            value = str(self.config.final.value)
            folder = locate_value(value, "final.value")
            with in_our_layout(folder) as ours:
                lm = load_frozen(self.config.model, ours, seat.engine.tokenizer, value)
            scorer = HeadValues(lm, **read_as(locate(str(folder)).section("read")))
            return best_by_value(every, scorer, seat, tuple(self.source.step_ends if self.source else ()))
        groups = by_group(every)
        if how == "any":
            return [next(filter(won, group), group[0]) for group in groups.values()]
        return [voted(group) for group in groups.values()]

    @cached_property
    def _answers(self) -> tuple[Seat, list[Episode]]:
        c = self.config
        assert self.source is not None
        (seat,) = self.open_seats(load_model(c.model)).seats
        tasks = draw_tasks(self.source, c.eval.split, c.eval.n, c.seed)
        how = {"n": c.final.choose, "seed": c.seed + 1, "failures": c.failures}
        return seat, play(self.source, tasks, [seat], prefix="choose:", **how)

    @classmethod
    def models_in_memory(cls, config: Any) -> list[ModelInMemory]:
        """The policy, and the reference unless it is the policy below its adapter."""
        return [*super().models_in_memory(config), *reference_in_memory(config.model, config.ref)]

    @classmethod
    def seats_of(cls, config: Any) -> dict[str, AnyKind]:
        return filled({config.seat: LocalSeat(trained=True)}, config.sampling, config.engine)

    @classmethod
    def check(cls, config: Any) -> list[str]:
        return [f"data: {path}, {rows_of(path)}" for path in config.files if path]


def rows_of(path: str) -> str:
    """How many rows a data file has, in words. It may not exist yet."""
    must_be_file(Path(path), "data")
    if not Path(path).exists():
        return "which is not here yet"
    rows = RowFile(path)
    rows.visit(lambda *_: None)
    return f"{len(rows)} rows"


def voted(group: Sequence[Episode]) -> Episode:
    """The first episode of a start that gives the commonest answer; the first of all if no answer can be read."""
    read = lambda e: read_answer(e.turns[-1].text, len(e.task.data.get("options", ()))).letter
    answers = [read(e) if e.turns else "" for e in group]
    return group[answers.index(most_common(answers))]


# --- reading ---------------------------------------------------------------------------------------------------------


class Trajectories(OnDemand[Episode]):
    """The episodes that can be learnt from, in the order of the files, and what decides how they are used: for each
    of them whether it is a success (`won`), the number of its group (`group`; `group_names` has the names), and, if
    it is a side of a pair, the number of the pair and the side (`pair` and `side`, else -1)."""

    def __init__(self) -> None:
        super().__init__(0, self._read, _weight)
        self.files: list[StoredFile] = []
        self._places = [array("q") for _ in range(3)]  # file, row, which episode of the row
        self.won, self.group, self.pair, self.side = array("b"), array("q"), array("q"), array("b")
        self.group_names: dict[str, int] = {}
        self._pairs: dict[str, int] = {}

    def add(self, row: int, index: int, e: Episode) -> None:
        """Episode number `index` of row `row` of the last file."""
        for column, value in zip(self._places, (len(self.files) - 1, row, index)):
            column.append(value)
        self.won.append(won(e))
        self.group.append(self.group_names.setdefault(e.group, len(self.group_names)))
        name = e.info.get("pair")
        self.pair.append(-1 if name is None else self._pairs.setdefault(name, len(self._pairs)))
        self.side.append(list(SIDES).index(e.info["side"]) if e.info.get("side") in SIDES else -1)
        self._length += 1

    def _read(self, i: int) -> Episode:
        file, row, index = (column[i] for column in self._places)
        return self.files[file].read(row)[index]

    def annotated(self, i: int) -> tuple[Episode, list[Annotation]]:
        """Episode `i` and its annotations in the file."""
        file, row, index = (column[i] for column in self._places)
        found = self.files[file].load(row)
        e = found.episodes[index]
        return e, [a for a in found.annotations if a.episode == e.id]


def _weight(e: Episode) -> int:
    """About how many bytes an episode takes in memory."""
    return 3000 + sum(40 * (len(t.prompt) + len(t.tokens)) + 16 * len(t.logp) + 2 * len(t.text) for t in e.turns)


@dataclass(frozen=True)
class Data:
    """The episodes that can be learnt from, and how many were left out, by reason."""

    episodes: Trajectories
    skipped: Mapping[str, int] = field(default_factory=dict)


def read_scored(paths: Sequence[str], format: str, tokenizer: Any, seat: str, max_len: int) -> Data:
    """Read the trajectories of some files. Left out and counted: no action, an empty response, more than `max_len`
    tokens (a trajectory that is cut would be credited as if it had ended), no reward. Any other fault of a row is an
    error."""
    trajectories = Trajectories()
    skipped: dict[str, int] = {}
    unscored = {"no_reward": 0, "failed": 0}
    useless: dict[str, int] = {}
    ids: set[str] = set()  # of a file of episodes; other ids are made here and differ

    def use(row: int, found: Imported) -> None:
        for index, e in enumerate(found.episodes):
            if format != "pairs" and not isinstance(e.outcome, Scored):
                unscored["failed" if isinstance(e.outcome, Failed) else "no_reward"] += 1
            elif why := _useless(e, seat, max_len):
                count(useless, why, 1)
            else:
                trajectories.add(row, index, e)
                if format == "episodes":
                    ids.add(e.id)

    for number, path in enumerate(paths):
        trajectories.files.append(StoredFile(format, path, tokenizer, seat, f"{number}:" if len(paths) > 1 else ""))
        wrong = trajectories.files[-1].survey(lambda e: _useless(e, seat, max_len) != "too_long", use)
        for why in wrong:
            if not any(words in why for words in NOTHING):
                raise DataError(why)
        count(skipped, "no_action", len(wrong))
    for counts in (unscored, useless):
        for name, n in counts.items():
            count(skipped, name, n)
    if not trajectories and set(skipped) == {"several_sequences"}:
        raise DataError(
            "every episode is several sequences (each turn was shown a prompt of its own): values are summed along "
            "one sequence, so the world must be played as one growing conversation.",
            paths[0],
        )
    if not trajectories:
        limit = lambda name: f": more than the {max_len} tokens of the model's context" if name == "too_long" else ""
        why = ", ".join(f"{n} {name}{limit(name)}" for name, n in skipped.items()) or "it is empty"
        raise DataError(f"holds no trajectory of seat '{seat}' that can be learnt from ({why}).", paths[0])
    if format == "episodes" and len(ids) < len(trajectories):
        raise DataError("two episodes have the same id: give each file's episodes ids of their own.", paths[-1])
    return Data(trajectories, skipped)


def count(counts: dict[str, int], name: str, more: int) -> None:
    if more:
        counts[name] = counts.get(name, 0) + more


def _useless(e: Episode, seat: str, max_len: int) -> str:
    """The reason why a trajectory cannot be learnt from; empty if it can."""
    mine = [t for t in e.turns if t.seat == seat and t.tokens]
    if not mine:
        return "no_action"
    # rows that came as text; an episode that was played may have empty turns
    if "format" in e.info and not any(t.text.strip() for t in mine):
        return "empty"
    found = [c for c in chains(e, seat) if any(e.turns[i].tokens for i in c)]
    if len(found) > 1:
        return "several_sequences"  # a turn has its own prompt
    return "too_long" if sequence_length(e, found[0][-1]) > max_len else ""


def sequence_length(e: Episode, turn: int | None) -> int:
    """The number of tokens of the sequence that ends with a turn."""
    total = 0
    while turn is not None:
        t = e.turns[turn]
        total, turn = total + len(t.prompt) + len(t.forced) + len(t.tokens), t.continues
    return total
