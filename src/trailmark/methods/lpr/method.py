"""LPR: process rewards from nothing but outcomes, a model of them, and what it teaches.

    lessons, sft     the seat `teacher`, if there is one, writes solutions, and the policy imitates the right ones
    solutions-1      the policy writes n solutions of each question
    cleaned-1        those that can be used, cut into steps
    states-1         beginnings of them, drawn at random, in shards
    completions-1    k completions of each state; the state's own tokens are computed once
    values-1         how many of them are right
    examples-1       what the reward model learns: states and whole solutions, with their values as classes
    prm-1            the process reward model, a run of method `reward_model`
    scores-1         what it says of every step of every solution
    worsened-1       right solutions that the seat `worsener` made worse (where the recipe has `worsen`)
    pairs-1          right against wrong answers, and right ones ranked by their process
    policy-1         DPO on them, a run of method `preference`
    rl-1             reinforcement with what steps earn, a run of method `step_rl` (where the recipe has `rl`)
    solutions-2      the next round, from the policy of the last one

Each is a stage: done once, made again when what it depends on changes, and it goes on after a kill. Stages that
nothing needs are left out: pairs by outcome need no reward model. `given` puts a file from elsewhere in the place of a
stage.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from trailmark import formats
from trailmark.config import ModelConfig, SamplingConfig, resolve
from trailmark.data.gold import worked
from trailmark.episodes import by_group, won
from trailmark.errors import DataError, RecipeError
from trailmark.formats.rows import each, read_lines, write_lines
from trailmark.functions import load_function
from trailmark.memory import need_rows
from trailmark.methods.base import Method, name_in_run
from trailmark.methods.batches import Walk
from trailmark.methods.collect import collect_starts
from trailmark.methods.configs import PreferenceRecipe, RewardModelRecipe, StepRlRecipe
from trailmark.methods.lpr import formats as records
from trailmark.methods.lpr import pairs as lpr_pairs
from trailmark.methods.lpr import states as lpr_states
from trailmark.methods.lpr.config import LprRecipe
from trailmark.methods.lpr.judged import judged, other_label, turned_pairs, world_reads
from trailmark.methods.preference import PreferenceMethod
from trailmark.methods.reward_model import HEAD, RewardModelMethod
from trailmark.methods.step_rl import StepRlMethod
from trailmark.methods.unread import EVAL, of_imitation, of_request, of_reward_model, of_training
from trailmark.methods.value_model import load_frozen
from trailmark.models.load import load_model
from trailmark.recipe import merged
from trailmark.rollout.branch import branch_starts, must_be_shown, told_starts
from trailmark.rollout.play import Desk, Start, start_all
from trailmark.runs.annotations import write_notes
from trailmark.runs.data_files import named_files
from trailmark.runs.launch import training_stage, without_place
from trailmark.runs.stages import Layout, Stage, Summary, run_stages
from trailmark.runs.store import Run, read_metrics, read_segment, truncate_metrics
from trailmark.score.classes import check_classes, output_notes, outputs_of, step_outputs
from trailmark.score.tokens import source_of
from trailmark.seats.config import AnyKind, LocalSeat, check_seats, filled
from trailmark.seats.locate import load_tokenizer, locate, locate_value
from trailmark.seats.names import fix_names
from trailmark.seats.table import Table, check_servers
from trailmark.steps import mark_steps, without_end
from trailmark.tasks import get_task, keep_judge
from trailmark.tasks.base import draw_tasks
from trailmark.tasks.logic.clean import STRICT, Cleaning
from trailmark.tasks.logic.clean import clean as react_clean
from trailmark.types import Annotation, Episode, Failed, Task

LAYOUT = Layout(record="stages/{name}.json", begun="stages/{name}.begun.json", locks=False)
SEAT = "policy"


class LprMethod(Method):
    """Each of its trainings is a run of its own, so this class has no updates and takes the whole run in its hands."""

    Config = LprRecipe
    staged, asks = tuple(LprRecipe.model_fields), ("policy", "teacher", "worsener")
    only: ClassVar[tuple[str, ...] | None] = None  # the stages that are made; None: all

    @classmethod
    def seats_of(cls, config: LprRecipe) -> dict[str, AnyKind]:
        """A server or a script may write the solutions: what is trained is the recipe's model all the same."""
        given = {SEAT: LocalSeat(trained=True), **config.seats}
        check_seats({n: s for n, s in given.items() if n != SEAT} | {SEAT: LocalSeat(trained=True)})
        return filled(given, config.sampling, config.engine)

    @classmethod
    def learns_from(cls, config: LprRecipe) -> str:
        return config.sample.split

    @classmethod
    def learns_between_rounds(cls, config: LprRecipe) -> None:
        """A server or a model of its own is not trained, so a second round would ask the same model again."""
        seat: Any = config.seats.get(SEAT)
        if config.steps == 1 or getattr(seat, "model", None) is None:
            return
        what, advice = "a model of its own", "set seats.policy.trained=true in place of its model."
        if seat.kind == "http":
            last = f"{config.out}/{Road(config, Run(config.out)).last(1)}"
            what, advice = "a server", (
                f"make the stages one by one, and after round 1 serve {last} at its address (trailmark lpr run "
                "solutions RECIPE --round 2)."
            )
        raise RecipeError(
            f"steps is {config.steps}, and the seat policy is {what}, which learns nothing: round 2 would ask the same "
            f"model again. Set steps=1; or {advice}"
        )

    @classmethod
    def check(cls, config: LprRecipe) -> list[str]:
        cls.learns_between_rounds(config)
        names = [s.name for s in Road(config, Run(config.out)).stages()]
        return [f"stages: {', '.join(names)}"]

    @classmethod
    def trainings(cls, config: LprRecipe) -> list[tuple[str, type[Method], Any]]:
        raise RecipeError(
            "a plan needs the data, which the stages of lpr make themselves: plan its trainings as methods "
            "reward_model, preference and step_rl, with their data"
        )

    @classmethod
    def train(cls, config: LprRecipe, run: Run, resume: bool = False) -> dict[str, float]:
        config = fix_names(config, run)
        if cls.only is None:
            cls.learns_between_rounds(config)
        check_servers(cls.seats_of(config))
        road = Road(config, run)
        stages = road.stages()
        logged = {row["step"]: row for row in read_metrics(run.path)}
        told: dict[int, dict[str, float]] = {}

        def each(name: str, summary: Summary) -> None:
            part, _, number = name.partition("-")
            now = told.setdefault(int(number or 1), {})
            now |= {f"{part}/{k}": float(v) for k, v in summary.items() if _number(v) and k != "step"}
            k = int(number or 0)
            if k and name == road.last(k) and logged.get(k) != {"step": k, **now}:
                truncate_metrics(run, k - 1)
                run.log(k, now)
                run.sync()

        run_stages(run.path, stages, only=cls.only, layout=LAYOUT, each=each)
        return told.get(config.steps, {})


def part(names: Sequence[str]) -> type[LprMethod]:
    """The method that makes only these stages; what they need must be there."""
    return type("LprPart", (LprMethod,), {"only": tuple(names)})


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Road:
    """The stages of a recipe, in the folder of a run."""

    def __init__(self, config: LprRecipe, run: Run):
        self.config, self.run, self.root = config, run, run.path
        self._tokenizer: Any = None

    # -- who and what ---------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The policy's. It stays the same through all rounds."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.words, "model.name")
        return self._tokenizer

    @property
    def words(self) -> str:
        """Whose tokenizer encodes what came as text."""
        return self.config.model.tokenizer or self.config.model.name

    def at(self, name: str, k: int | None = None) -> Path:
        return self.root / (name if k is None else f"{name}-{k}")

    def ends_with(self, k: int) -> str:
        """The training that ends round k; of round 0, the one before the first round."""
        if k == 0:
            return "sft" if self.taught() else ""
        return f"rl-{k}" if self.config.rl is not None else f"policy-{k}"

    def taught(self) -> bool:
        return "teacher" in self.config.seats or self.config.teacher.gold

    def last(self, k: int) -> str:
        return self.ends_with(k)

    def policy(self, k: int, after_preference: bool = False) -> ModelConfig:
        """The model section with which round k begins, or with which its reinforcement begins."""
        name = f"policy-{k}" if after_preference and self.config.preference is not None else self.ends_with(k - 1)
        return self.config.model.model_copy(update={"name": str(self.root / name)}) if name else self.config.model

    def policy_inputs(self, k: int, after_preference: bool = False) -> dict[str, Path]:
        """The policy of a round, where it lies in a folder."""
        name = Path(self.policy(k, after_preference).name)
        return {"policy": name} if name.is_relative_to(self.root) or name.exists() else {}

    def needs_prm(self, k: int) -> bool:
        """Whether something in round k asks the reward model: its pairs, or its reinforcement."""
        p = self.config.pairs
        whole = p.process and p.values is None
        ranks = p.states is not None or (whole if p.steps is None else p.steps.by == "score")
        given = k == 1 and self.config.given.pairs is not None
        return (self.config.preference is not None and ranks and not given) or self.pays_steps()

    def pays_steps(self) -> bool:
        """Whether the reinforcement pays what the round's reward model says."""
        rewards = {} if self.config.rl is None else self.config.rl.get("rewards", {})
        return self.config.rl is not None and "model" not in rewards and rewards.get("alpha", 1.0) > 0

    def kind(self) -> str:
        return self.config.prm.get("kind", "classes")

    def needs_values(self, k: int) -> bool:
        return self.needs_prm(k) and self.kind() in ("classes", "scalar")

    def read(self) -> Any:
        """How rewards are read, with the classes that the reward model has."""
        c = self.config
        if c.read.classes is not None or self.kind() in ("pairwise", "scalar"):
            return c.read
        two = self.kind() == "outcome" or c.labels.binary
        return c.read.model_copy(
            update={"classes": [1] if two else list(range(min(2, c.complete.k), c.complete.k + 1))}
        )

    # -- the list -------------------------------------------------------------------------------------------------

    def stages(self) -> list[Stage]:
        c, out = self.config, list[Stage]()
        if self.taught():
            out += [self.lessons(), self.imitation()]
        for k in range(1, c.steps + 1):
            given = c.given if k == 1 else type(c.given)()
            if given.pairs and not given.solutions and not self.pays_steps():
                out += [self.given_pairs(), self.preference(k)]
                out += [self.reinforcement(k)] if c.rl is not None else []
                continue
            out += [self.solutions(k), self.cleaned(k)]
            learns = self.needs_prm(k) and (not given.scores or self.pays_steps())  # given scores need no model
            completed = learns and self.needs_values(k)
            by_steps, by_values = (not given.pairs and x is not None for x in (c.pairs.steps, c.pairs.values))
            if completed or by_steps or by_values:
                out += [self.states(k), self.completions(k)]
            if completed or by_values:
                out.append(self.values(k))
            if learns:
                out += [*([self.examples(k)] if completed else []), self.prm(k)]
            if self.needs_prm(k):
                out.append(self.scores(k))
            if c.preference is not None:
                out += [self.worsened(k)] if c.worsen is not None and not given.pairs else []
                out += [self.pairs(k) if not given.pairs else self.given_pairs(), self.preference(k)]
            if c.rl is not None:
                out.append(self.reinforcement(k))
        return out

    def stage(
        self,
        name: str,
        make: Any,
        settings: Mapping[str, Any],
        inputs: Mapping[str, str | Path],
        reads: Sequence[str] = (),
        unread: Sequence[str] = (),
    ) -> Stage:
        """`make(folder)` writes files and returns what it kept and left out. Models that lie in the run are inputs, and
        their places are no setting. `reads` are the sections of the recipe whose files count: rows, functions.
        `unread` are settings and inputs that do not matter here (`methods/unread.py`)."""

        def build(folder: Path) -> dict[str, Any]:
            kept, left_out = make(folder)
            return {**kept, **{f"left out: {why}": n for why, n in sorted(left_out.items()) if n}}

        dumped = lambda v: v.model_dump(mode="json", exclude_defaults=True) if hasattr(v, "model_dump") else v
        plain = {k: dumped(v) for k, v in settings.items()}
        named = named_files(self.config) if reads else {}
        files = {key: path for key, path in named.items() if key.startswith(tuple(reads))}
        told = without_place(plain, str(self.root))
        return Stage(name, build, told, dict(inputs), files=files, unread=tuple(unread))

    def unread(self, seat: str, sampling: SamplingConfig | None) -> tuple[str, ...]:
        """The settings of a stage that do not change what a seat answers."""
        kind, own = LprMethod.seats_of(self.config)[seat], self.config.seats.get(seat)
        asked = of_request(kind.kind, getattr(own, "sampling", None), sampling)
        return asked if isinstance(kind, LocalSeat) else (*asked, "model", "policy")

    # -- solutions ------------------------------------------------------------------------------------------------

    def source(self, more: Mapping[str, Any] | None = None) -> Any:
        source = get_task(self.config.task.name, **{**self.config.task.options, **(more or {})})
        keep_judge(source, self.root)
        return source

    def table(
        self, seat: str, model: ModelConfig, sampling: SamplingConfig | None, version: int
    ) -> tuple[Table, list[Any]]:
        """A seat, opened: with the policy of a round where it is the one that is trained."""
        config = LprMethod.seats_of(self.config)[seat]
        models = {}
        if config.trained:
            lm = load_model(fix_names(model))
            lm.name = name_in_run(lm.name, self.run)
            models = {seat: lm}
        table = Table({seat: config}, models, self.config.seed)
        table.publish(version)
        return table, [table.seat(seat, sampling)]

    def lessons(self) -> Stage:
        c = self.config

        def make(folder: Path) -> Any:
            source = self.source()
            tasks = draw_tasks(source, c.sample.split, c.teacher.starts, c.seed * 1_000_003)
            if c.teacher.gold:
                shown = [task for task in tasks if isinstance(task.meta.get("gold"), str)] or tasks[:1]
                made = [worked(source, task, self.tokenizer, SEAT) for task in shown]
            else:
                taught = self.source(c.teacher.options)
                table, seats = self.table("teacher", c.model, c.teacher.sampling, 0)
                table.bind(taught)
                starts = start_all(tasks, c.teacher.n, c.seed, "0:")
                made = collect_starts(folder / "written.jsonl", taught, starts, seats, failures=c.failures)
                made = [without_prompts(e) for e in made] if c.teacher.options else made
            good, out = self.usable(made, source)
            right = [e for e in good if won(e)]
            out["wrong"] += len(good) - len(right)
            out["without a worked solution"] += len(tasks) - len(made) if c.teacher.gold else 0
            if not right:
                raise DataError(f"stage 'lessons': none of {len(made)} solutions is right and clean: {_said(out)}.")
            formats.write("episodes", folder / "all.jsonl", right, None)
            return {"solutions": len(right), "written": len(made)}, out

        settings = {
            "task": c.task, "teacher": c.teacher, "clean": c.clean, "seed": c.seed, "split": c.sample.split,
            "words": self.words,
            **({} if c.teacher.gold else {"seat": c.seats["teacher"], "sampling": c.sampling}),
        }  # fmt: skip
        gold = ("teacher.n", "teacher.options", "teacher.sampling")
        unread = gold if c.teacher.gold else self.unread("teacher", c.teacher.sampling)
        reads = ("task.", "clean.", "seats.teacher.")
        return self.stage("lessons", make, settings, {}, reads, ("teacher.replay", *unread))

    def imitation(self) -> Stage:
        c = self.config
        given = {"objective": "rejection", **(c.sft or {}), "data": str(self.at("lessons") / "all.jsonl")}
        recipe = self.trained(PreferenceRecipe, "preference", "sft", c.model, given)
        inputs = {"lessons": self.at("lessons"), **_folder(c.model.name)}
        return training_stage("sft", PreferenceMethod, recipe, self.root, inputs, unread=of_imitation(recipe))

    def solutions(self, k: int) -> Stage:
        c, given = self.config, self.config.given if k == 1 else None
        if given and (given.solutions or given.states):
            files = _listed(given.solutions or given.states)
            settings = {
                "task": c.task, "split": c.sample.split, "starts": c.sample.starts, "seed": c.seed, "words": self.words,
            }  # fmt: skip
            return self.stage(
                f"solutions-{k}", partial(self._import_solutions, files), settings, _named(files), ("task.",)
            )

        def make(folder: Path) -> Any:
            source, made, failed = self.source(), 0, 0
            tasks = self.asked(source, k)
            need_rows(len(tasks) * c.sample.n, "sample.starts * sample.n")
            models = [
                self.policy(k),
                *(c.model.model_copy(update={"name": name, "lora": None}) for name in c.sample.models),
            ]
            for j, model in enumerate(models):
                path = folder / f"{j:03d}.jsonl"
                starts = [
                    replace(s, group=f"{k}:{s.task.id}")
                    for s in start_all(tasks, c.sample.n, c.seed, f"{k}:" if j == 0 else f"{k}:{j}:")
                ]
                if not path.exists():  # a model whose file is whole is not loaded again
                    table, seats = self.table(SEAT, model, c.sample.sampling, k - 1)
                    table.bind(source)
                    collect_starts(path, source, starts, seats, failures=c.failures)
                bad = sum(isinstance(e.outcome, Failed) for e in read_segment(path))
                made, failed = made + len(starts) - bad, failed + bad
            odd = getattr(source, "left_out", {}).get(c.sample.split, {})  # what the task says of its files
            return {"solutions": made, "questions": len(tasks), **dict(sorted(odd.items()))}, {"failed": failed}

        settings = {
            "task": c.task, "sample": c.sample, "model": self.policy(k), "seat": LprMethod.seats_of(c)[SEAT],
            "seed": c.seed, "sampling": c.sampling,
        }  # fmt: skip
        more = {f"model {j}": locate(m).folder for j, m in enumerate(c.sample.models) if Path(m).exists()}
        return self.stage(
            f"solutions-{k}", make, settings, {**self.policy_inputs(k), **more}, ("task.", "seats.policy."),
            self.unread(SEAT, c.sample.sampling),
        )  # fmt: skip

    def _import_solutions(self, files: Sequence[str], folder: Path) -> Any:
        episodes, odd = self._join(records.all_solutions(files, self.tokenizer, SEAT))
        formats.write("episodes", folder / "000.jsonl", episodes, None)
        told = {"solutions": len(episodes), "questions": len({e.group for e in episodes})}
        return told | {what: n for what, n in odd.items() if n}, {}

    def _join(self, episodes: Sequence[Episode]) -> tuple[list[Episode], Counter[str]]:
        """Give questions of a file the task's own start of the same id, if any: its world judges solutions, as it does
        completions. What the file says otherwise is counted."""
        known: dict[str, Task] = {}
        source, odd, joined = get_task(self.config.task.name, **self.config.task.options), Counter[str](), []
        for task in self.questions(source):
            known |= {task.id: task, str(task.meta.get("id", task.id)): task}
        for e in episodes:
            if (t := known.get(e.task.id)) is not None:
                odd["solutions with another label than the task's (the task's counts)"] += other_label(
                    e.task.meta.get("label"), t
                )
                e = replace(e, task=replace(t, meta={**e.task.meta, **t.meta}))
            joined.append(judged(e, world_reads(source), odd))
        return joined, odd

    def questions(self, source: Any) -> list[Task]:
        """What a file from elsewhere may ask: all questions that the task lists, and those of the first round."""
        return [*source.tasks(self.config.sample.split), *self.asked(source, 1)]

    def asked(self, source: Any, k: int) -> Sequence[Task]:
        """The questions of round k. Rounds walk a finite list of questions as steps do."""
        c = self.config
        if c.sample.starts is None:
            return draw_tasks(source, c.sample.split, None, c.seed * 1_000_003 + k)
        return Walk(source, c.sample.starts, c.seed, c.sample.split).take(k)

    def shown(self, source: Any, e: Episode) -> str:
        """The prompt of an answer that came as text alone."""
        if "format" in e.info and "prompt" in e.task.data:
            return e.task.data["prompt"]
        return source.make().reset(e.task).text

    def usable(self, episodes: Sequence[Episode], source: Any) -> tuple[list[Episode], Counter[str]]:
        c = self.config.clean
        cleaner = load_function(c.clean, "clean.clean")[0] if c.clean else None
        if cleaner is None and c.react != "any":
            cleaner = partial(react_clean, rules=STRICT if c.react == "strict" else Cleaning())
        return lpr_states.clean_all(episodes, c, self.tokenizer, SEAT, partial(self.shown, source), cleaner)

    def cleaned(self, k: int) -> Stage:
        c = self.config

        def make(folder: Path) -> Any:
            made = [
                e
                for file in sorted(self.at("solutions", k).glob("[0-9]*.jsonl"))
                if ".annotations" not in file.name
                for e in read_segment(file)
            ]
            good, out = self.usable(made, get_task(c.task.name, **c.task.options))
            if not good:
                raise DataError(f"stage 'cleaned-{k}': none of {len(made)} solutions can be used: {_said(out)}.")
            formats.write("episodes", folder / "all.jsonl", good, None)
            steps = sum(len(t.steps) for e in good for t in e.turns)
            told = {"solutions": len(good), "right": sum(map(won, good)), "steps": steps}
            return {**told, **lpr_states.unread_answers(good)}, out

        settings = {"clean": c.clean, "words": self.words}
        return self.stage(f"cleaned-{k}", make, settings, {"solutions": self.at("solutions", k)}, ("clean.",))

    def solved(self, k: int) -> list[Episode]:
        return read_segment(self.at("cleaned", k) / "all.jsonl")

    # -- states and values ----------------------------------------------------------------------------------------

    def states(self, k: int) -> Stage:
        c = self.config
        if k == 1 and c.given.states:
            files = _listed(c.given.states)
            return self.stage(
                "states-1", partial(self._import_states, files), {}, {**_named(files), "cleaned": self.at("cleaned", 1)}
            )

        def make(folder: Path) -> Any:
            shards = lpr_states.sample_states(self.solved(k), c.states, self.tokenizer, SEAT, c.seed)
            for i, shard in enumerate(shards):
                write_lines(folder / shard_name(i, len(shards)), shard)
            types = Counter(s["type"] or "step" for shard in shards for s in shard)
            return {"states": sum(map(len, shards)), **{f"of type {t}": n for t, n in sorted(types.items())}}, {}

        return self.stage(f"states-{k}", make, {"states": c.states, "seed": c.seed}, {"cleaned": self.at("cleaned", k)})

    def _import_states(self, files: Sequence[str], folder: Path) -> Any:
        shards, lost = records.all_states(files, self.solved(1), self.tokenizer)
        for i, shard in enumerate(shards):
            write_lines(folder / shard_name(i, len(shards)), shard)
        return {"states": sum(map(len, shards))}, lost

    def shard(self, k: int, wanted: Sequence[int] | None) -> list[dict[str, Any]]:
        """The states of some shards; None: of all."""
        files = sorted(self.at("states", k).glob("states*.jsonl"), key=_shard_number)
        if not files:
            raise DataError("holds no states.", self.at("states", k))
        return [s for i, file in enumerate(files) if wanted is None or i in wanted for s in read_lines(file)]

    def annotated(self) -> list[int] | None:
        """The shards whose states are completed."""
        c = self.config
        return None if c.complete.shards is None else sorted({*c.complete.shards, *c.labels.dev_shards})

    def completions(self, k: int) -> Stage:
        c = self.config
        if k == 1 and c.given.completions:
            file = c.given.completions
            make_given = partial(self._import_completions, file)
            return self.stage("completions-1", make_given, {}, {"completions": file, "states": self.at("states", 1)})

        def make(folder: Path) -> Any:
            source, states = self.source(), self.shard(k, self.annotated())
            points = lpr_states.points_of(states, self.solved(k))
            table, seats = self.table(SEAT, self.policy(k), c.complete.sampling, k - 1)
            table.bind(source)
            must_be_shown(points, source, self.tokenizer)
            if seats[0].hears_messages:
                starts, protocol = told_starts(points, c.complete.k, c.seed + 1, source, seats[0].name, self.tokenizer)
            else:
                starts, protocol = branch_starts(points, c.complete.k, c.seed + 1), None
            made = collect_starts(folder / "all.jsonl", source, starts, seats, protocol, failures=c.failures)
            bad = sum(isinstance(e.outcome, Failed) for e in made)
            told = {"completions": len(made) - bad, "right": sum(map(won, made)), "states": len(states)}
            return told, {"failed": bad}

        drawn = c.complete.sampling and c.complete.sampling.model_dump(mode="json")
        settings = {
            "task": c.task, "complete": {"k": c.complete.k, "sampling": drawn}, "shards": self.annotated(),
            "model": self.policy(k), "seat": LprMethod.seats_of(c)[SEAT], "sampling": c.sampling, "seed": c.seed,
        }  # fmt: skip
        inputs = {"states": self.at("states", k), "cleaned": self.at("cleaned", k), **self.policy_inputs(k)}
        reads, unread = ("task.", "seats.policy."), self.unread(SEAT, c.complete.sampling)
        return self.stage(f"completions-{k}", make, settings, inputs, reads, unread)

    def _import_completions(self, file: str, folder: Path) -> Any:
        reads = world_reads(get_task(self.config.task.name, **self.config.task.options))
        made, lost = records.read_completions(file, self.shard(1, None), self.solved(1), self.tokenizer, SEAT, reads)
        formats.write("episodes", folder / "all.jsonl", made, None)
        told = {"completions": len(made), "right": sum(map(won, made))}
        counted = {what: n for what, n in lost.items() if "counts)" in what and n}
        return told | counted, Counter({what: n for what, n in lost.items() if what not in counted})

    def completed(self, k: int) -> list[Episode]:
        return read_segment(self.at("completions", k) / "all.jsonl")

    def values(self, k: int) -> Stage:
        c = self.config

        def make(folder: Path) -> Any:
            states, episodes = self.shard(k, self.annotated()), self.solved(k)
            found, out = lpr_states.state_values(states, episodes, self.completed(k), c.complete, self.tokenizer)
            if not found:
                raise DataError(f"stage 'values-{k}': no state of {len(states)} has a value: {_said(out)}.")
            notes = lpr_states.value_notes(found, episodes, SEAT)
            write_notes(folder / "values.jsonl", notes)
            spread = Counter(found.values())
            return {"states": len(found), **{f"value {v}": spread[v] for v in range(c.complete.k + 1)}}, out

        settings = {
            "k": c.complete.k, "duplicates": c.complete.duplicates, "min_chars": c.complete.min_chars,
            "shards": self.annotated(),
        }  # fmt: skip
        inputs = {name: self.at(name, k) for name in ("completions", "states", "cleaned")}
        return self.stage(f"values-{k}", make, settings, inputs)

    def examples(self, k: int) -> Stage:
        c, before = self.config, [self.at("examples", j) / "train.jsonl" for j in range(1, k) if self.needs_values(j)]
        again = [*map(Path, c.labels.replay_data), *before] if c.labels.replay else []

        def make(folder: Path) -> Any:
            episodes = self.solved(k)
            notes = read_segment(self.at("values", k) / "values.jsonl", Annotation)
            dev = {s["episode"] for s in self.shard(k, c.labels.dev_shards)} if c.labels.dev_shards else set()
            held = {e.group for e in episodes if e.id in dev}
            out, told = Counter[str](), dict[str, Any]()
            annotated = {a.episode for a in notes}
            valued = {e.group for e in episodes if e.id in annotated}  # questions without a value are not learnt from
            for name in ("train", "dev") if c.labels.dev_shards else ("train",):
                mine = [e for e in episodes if e.group in valued and (e.group in held) == (name == "dev")]
                found, lost = lpr_states.examples(mine, notes, c.complete.k, c.labels, self.tokenizer, SEAT, c.seed)
                used, labels = lpr_states.label_notes(found, mine)
                out.update(lost)
                spread = Counter(x.label for x in found)
                told |= {f"{name} examples": len(found), **{f"{name} class {v}": n for v, n in sorted(spread.items())}}
                for j, path in enumerate(again if name == "train" else ()):
                    old = formats.read("episodes", path, None)
                    draw = random.Random(f"replay {c.seed} {k} {j}")
                    more, kept, n = lpr_states.replayed(
                        old.episodes, old.annotations, c.labels.replay, draw, f"replay {j}:"
                    )
                    used, labels, told["replayed"] = [*used, *more], [*labels, *kept], told.get("replayed", 0) + n
                if not labels:
                    where = f"in labels.dev_shards {c.labels.dev_shards}" if name == "dev" else "to learn from"
                    raise DataError(f"stage 'examples-{k}': there is no example {where}: {_said(lost)}.")
                formats.write("episodes", folder / f"{name}.jsonl", used, None, annotations=labels)
            return told, out

        inputs = {name: self.at(name, k) for name in ("values", "states", "cleaned")}
        inputs |= {f"replay {j}": path for j, path in enumerate(again)}
        settings = {"labels": c.labels, "k": c.complete.k, "seed": c.seed}
        unread = () if again else ("labels.replay", "labels.replay_data", *(() if c.labels.balance else ("seed",)))
        return self.stage(f"examples-{k}", make, settings, inputs, unread=unread)

    # -- the reward model -----------------------------------------------------------------------------------------

    def prm(self, k: int) -> Stage:
        c, kind = self.config, self.kind()
        examples = self.at("examples", k)
        told = self.read().model_dump(include={"classes", "over"})
        more = {"skip": c.read.skip, "split": c.clean.split, "offset": c.read.offset, "raw": c.read.raw}
        told |= {k: v for k, v in more.items() if v and v != "newline"}
        given: dict[str, Any] = {"read": told, **c.prm}
        if kind in ("classes", "scalar"):
            given |= {"data": str(examples / "train.jsonl"), "outputs": 2 if c.labels.binary else c.complete.k + 1}
            given |= {"eval_data": str(examples / "dev.jsonl")} if c.labels.dev_shards else {}
        else:
            given["data"] = str(self.at("cleaned", k) / "all.jsonl")
        if k > 1 and c.labels.replay and "begin" not in given and self.needs_prm(k - 1):
            given["begin"] = str(self.at("prm", k - 1))
        recipe = self.trained(RewardModelRecipe, "reward_model", f"prm-{k}", self.policy(k), given)
        inputs = {
            "examples": examples if kind in ("classes", "scalar") else self.at("cleaned", k),
            **self.policy_inputs(k),
        }
        inputs |= {"begin": Path(given["begin"])} if given.get("begin") else {}
        unread = of_reward_model(recipe)
        return training_stage(f"prm-{k}", RewardModelMethod, recipe, self.root, inputs, reread=True, unread=unread)

    def scores(self, k: int) -> Stage:
        c = self.config
        if k == 1 and c.given.scores:
            file = c.given.scores
            make_given = partial(self._import_scores, file)
            return self.stage("scores-1", make_given, {}, {"scores": file, "cleaned": self.at("cleaned", 1)})

        by_steps = c.pairs.steps is not None and c.pairs.steps.by == "score"

        def make(folder: Path) -> Any:
            place = self.at("prm", k)
            lm = load_frozen(c.model, locate_value(place), self.tokenizer, str(place))
            check_classes(lm, HEAD, self.read().classes)
            lm.name = name_in_run(lm.name, self.run)
            every = self.solved(k)
            if by_steps:
                every = [*every, *self.steps_of_completions(k)]
            notes = output_notes(step_outputs(lm, every, HEAD, SEAT), source_of(lm))
            write_notes(folder / "scores.jsonl", notes)
            return {"solutions": len(every), "steps": sum(len(t.steps) for e in every for t in e.turns)}, {}

        inputs = {"prm": self.at("prm", k), "cleaned": self.at("cleaned", k)}
        inputs |= {"completions": self.at("completions", k)} if by_steps else {}
        return self.stage(f"scores-{k}", make, {"steps": by_steps}, inputs)

    def _import_scores(self, file: str, folder: Path) -> Any:
        notes, lost = records.read_scores(file, self.solved(1))
        if not notes:
            raise DataError(f"scores no solution that is here: {_said(lost)}.", file)
        write_notes(folder / "scores.jsonl", notes)
        return {"solutions": len({a.episode for a in notes})}, lost

    def steps_of_completions(self, k: int) -> list[Episode]:
        """The completions, cut into steps of their own."""
        marked = (mark_steps(e, SEAT, self.tokenizer, self.config.clean.split) for e in self.completed(k) if e.turns)
        return [without_end(e, SEAT, self.tokenizer) for e in marked]

    # -- worse versions -------------------------------------------------------------------------------------------

    def worsened(self, k: int) -> Stage:
        """What the worsener makes of right solutions. A version that says the same is left out."""
        c, worsen = self.config, self.config.worsen
        assert worsen is not None

        def make(folder: Path) -> Any:
            source, chosen = self.source(), list[Episode]()
            for group in by_group(self.solved(k)).values():
                chosen += [e for e in group if won(e)][: worsen.most]
            told = {f"{e.id}~{j}": e for e in chosen for j in range(worsen.n)}
            table, seats = self.table("worsener", c.model, worsen.sampling, 0)
            table.bind(source)

            async def spoils(desk: Desk) -> None:
                e = told[desk.start.id]
                asked = f"{worsen.instruction}\n\n{self.shown(source, e)}{e.turns[-1].text}\n\n"
                turn = await desk.ask(seats[0].name, text=asked)
                await desk.act(turn.text)

            starts = [Start(e.task, e.group, name, c.seed) for name, e in told.items()]
            made = (
                collect_starts(folder / "written.jsonl", source, starts, seats, spoils, failures=c.failures)
                if starts
                else []
            )
            good, out = self.usable([without_prompts(e) for e in made], source)
            other = [e for e in good if e.turns[-1].text.strip() != told[e.id].turns[-1].text.strip()]
            out["the same as before"] += len(good) - len(other)
            if not other:
                raise DataError(f"stage 'worsened-{k}': none of {len(told)} worse versions can be used: {_said(out)}.")
            write_lines(folder / "versions.jsonl", [{"id": e.id, "of": told[e.id].id} for e in other])
            formats.write("episodes", folder / "all.jsonl", other, None)
            return {"versions": len(other), "of": len(chosen), "still right": sum(map(won, other))}, out

        settings = {"worsen": worsen, "seat": c.seats["worsener"], "sampling": c.sampling, "seed": c.seed,
                    "task": c.task, "clean": c.clean, "words": self.words}  # fmt: skip
        inputs = {"cleaned": self.at("cleaned", k)}
        reads, unread = ("task.", "clean.", "seats.worsener."), self.unread("worsener", worsen.sampling)
        return self.stage(f"worsened-{k}", make, settings, inputs, reads, unread)

    # -- pairs and what is learnt from them -----------------------------------------------------------------------

    def rewards(self, k: int, episodes: Sequence[Episode]) -> tuple[dict[str, float], dict[Any, Any]]:
        """The reward of each solution, and what the head said at each step."""
        if not self.needs_prm(k):
            return {}, {}
        outputs = outputs_of(read_segment(self.at("scores", k) / "scores.jsonl", Annotation))
        return lpr_pairs.solution_rewards(episodes, outputs, self.read(), self.tokenizer), outputs

    def pairs(self, k: int) -> Stage:
        c = self.config

        def make(folder: Path) -> Any:
            episodes = self.solved(k)
            rewards, outputs = self.rewards(k, episodes)
            barred = self.barred(episodes)
            ways = None if c.pairs.steps is None else self.steps_of_completions(k)
            notes = self.at("values", k) / "values.jsonl"
            values = [] if c.pairs.values is None else read_segment(notes, Annotation)
            if c.pairs.values is not None and c.pairs.values.same is not None:
                other = {"name": c.pairs.values.encoder, "lora": None, "shape": None, "tokenizer": None}
                model = self.policy(k) if c.pairs.values.encoder is None else c.model.model_copy(update=other)
                lm = load_model(fix_names(model)).freeze()
                alike = lpr_pairs.alike_steps(lm, episodes, self.tokenizer, c.pairs.values.same)
                values = lpr_pairs.shared_values(episodes, values, alike, c.complete.k)
            made, best, told = lpr_pairs.all_pairs(
                episodes, ways, values, rewards, outputs, c.pairs, self.read(), self.tokenizer, barred
            )
            if c.worsen is not None:
                known, versions = {e.id: e for e in episodes}, read_lines(self.at("worsened", k) / "versions.jsonl")
                spoilt = lpr_pairs.worse_pairs([(known[v["of"]], v["id"]) for v in versions])
                made, told = [*made, *spoilt], {**told, "pairs": len(made) + len(spoilt), "worse pairs": len(spoilt)}
            if not made:
                blind = sum(not e.turns[-1].prompt for e in ways or ())
                why = (
                    f" {blind} of {len(ways or ())} completions are of a server that answers messages, as text alone, "
                    "and pairs of steps (pairs.steps) need the tokens behind a state: complete them with the model "
                    "here, or with a server that goes on with a text (seats.policy.speaks=text)."
                )
                raise DataError(
                    f"stage 'pairs-{k}': no pair can be made of {len(episodes)} solutions, of which "
                    f"{sum(map(won, episodes))} are right.{why * bool(blind)}"
                )
            write_lines(folder / "pairs.jsonl", [p.line() for p in made])
            formats.write("episodes", folder / "chosen.jsonl", best, None)
            return told, {}

        inputs: dict[str, str | Path] = {"cleaned": self.at("cleaned", k)}
        inputs |= {"scores": self.at("scores", k)} if self.needs_prm(k) else {}
        inputs |= {"completions": self.at("completions", k)} if c.pairs.steps is not None else {}
        inputs |= {"values": self.at("values", k)} if c.pairs.values is not None else {}
        inputs |= {"worsened": self.at("worsened", k)} if c.worsen is not None else {}
        inputs |= {"exclude": c.pairs.exclude} if c.pairs.exclude else {}
        settings, unread = {"pairs": c.pairs, "read": self.read()}, () if self.needs_prm(k) else ("read",)
        if c.pairs.values is not None and c.pairs.values.same is not None:  # whose vectors say which steps are one
            encoder = c.pairs.values.encoder
            settings["model"] = self.policy(k)
            inputs |= self.policy_inputs(k) if encoder is None else _folder(encoder)
        return self.stage(f"pairs-{k}", make, settings, inputs, unread=unread)

    def barred(self, episodes: Sequence[Episode]) -> set[str]:
        """The questions of which no two right answers are compared."""
        file = self.config.pairs.exclude
        if file is None:
            return set()
        barred = set(map(str, each(file, lambda row: row.value)[0]))
        tasks = [*self.questions(self.source()), *(e.task for e in episodes)]
        known = {str(name) for t in tasks for name in (t.id, t.meta.get("id", t.id))} | {e.group for e in episodes}
        if unknown := sorted(barred - known):
            raise DataError(
                f"names {len(unknown)} questions that task '{self.config.task.name}' does not have, the first "
                f"'{unknown[0]}': the ids of questions are wanted, such as '{tasks[0].meta.get('id', tasks[0].id)}'.",
                file, key="pairs.exclude",
            )  # fmt: skip
        return barred

    def given_pairs(self) -> Stage:
        c = self.config
        file = c.given.pairs
        assert file is not None

        def make(folder: Path) -> Any:
            source = get_task(c.task.name, **c.task.options)
            tasks = {str(name): t for t in self.questions(source) for name in (t.id, t.meta.get("id", t.id))}
            shown = {name: source.make().reset(task).text for name, task in tasks.items()}
            sides, lost = records.read_pairs(file, shown, self.tokenizer, SEAT)
            formats.write("episodes", folder / "sides.jsonl", sides, None)
            told = {"pairs": len(sides) // 2}
            if n := turned_pairs(sides, tasks, world_reads(source)):
                told["pairs whose chosen answer is wrong and whose rejected one is right"] = n
            return told, lost

        settings = {"task": c.task, "split": c.sample.split, "words": self.words}
        return self.stage("pairs-1", make, settings, {"pairs": file}, ("task.",))

    def preference(self, k: int) -> Stage:
        c, pairs = self.config, self.at("pairs", k)
        given: dict[str, Any] = dict(c.preference or {})
        inputs: dict[str, str | Path] = {"pairs": pairs, **self.policy_inputs(k)}
        if given.get("objective") == "rejection":
            given["data"] = str(pairs / "chosen.jsonl")
            if c.teacher.replay:
                given["data"] = [given["data"], str(self.at("lessons") / "all.jsonl")]
                inputs["lessons"] = self.at("lessons")
        elif k == 1 and c.given.pairs:
            given["data"] = str(pairs / "sides.jsonl")
        else:
            given |= {"data": [str(self.at("cleaned", k) / "all.jsonl")], "pair_file": str(pairs / "pairs.jsonl")}
            inputs["cleaned"] = self.at("cleaned", k)
            if c.pairs.steps is not None:
                given["data"] = str(self.at("completions", k) / "all.jsonl")
            if c.worsen is not None:
                files = ("completions", "cleaned", "worsened") if c.pairs.steps is not None else ("cleaned", "worsened")
                given["data"] = [str(self.at(name, k) / "all.jsonl") for name in files]
                inputs["worsened"] = self.at("worsened", k)
        recipe = self.trained(PreferenceRecipe, "preference", f"policy-{k}", self.policy(k), given)
        return training_stage(f"policy-{k}", PreferenceMethod, recipe, self.root, inputs, unread=of_training(recipe))

    def reinforcement(self, k: int) -> Stage:
        c = self.config
        given: dict[str, Any] = dict(c.rl or {})
        rewards = dict(given.get("rewards", {}))
        inputs: dict[str, str | Path] = dict(self.policy_inputs(k, after_preference=True))
        if self.pays_steps():
            read = {"classes": self.read().classes, "skip": c.read.skip, **({"raw": True} if c.read.raw else {})}
            rewards = {**read, **rewards, "model": str(self.at("prm", k))}
            inputs["prm"] = self.at("prm", k)
        given["rewards"] = {"split": c.clean.split, **rewards}
        given = {"task": c.task.model_dump(), "sampling": c.sampling.model_dump(), **given}
        recipe = self.trained(StepRlRecipe, "step_rl", f"rl-{k}", self.policy(k, after_preference=True), given)
        return training_stage(
            f"rl-{k}", StepRlMethod, recipe, self.root, inputs, unread=() if recipe.eval.every else EVAL
        )

    def trained(self, recipe: Any, method: str, name: str, model: ModelConfig, given: Mapping[str, Any]) -> Any:
        """The recipe of a training: the recipe's own learner, checkpoint and evaluation, and over them, key by key,
        what its section says."""
        c = self.config
        base: dict[str, Any] = {
            "method": method,
            "name": f"{c.name} {name}",
            "out": str(self.at(name)),
            "seed": c.seed,
            "model": model.model_dump(),
            "learner": c.learner.model_dump(),
            "checkpoint": c.checkpoint.model_dump(),
            "failures": c.failures,
        }
        if method == "reward_model":
            base["checkpoint"]["metric"] = "eval/accuracy"
            base["format"] = "episodes"
            base["eval"] = {"every": 1_000_000} if "eval_data" in given else {}  # once, at the end
        else:
            base |= {"eval": c.eval.model_dump(), "engine": c.engine.model_dump()}
        if method == "preference":
            base |= {
                "format": "episodes",
                "task": c.task.model_dump(),
                "sampling": {**c.sampling.model_dump(), "temperature": 0.0},
            }
        try:
            return resolve(merged(base, given), recipe)
        except RecipeError as problem:
            raise RecipeError(f"stage '{name}': {str(problem).removeprefix('recipe: ')}") from None


def without_prompts(e: Episode) -> Episode:
    """The episode without the prompts that its author was shown: its answer is encoded behind the policy's."""
    return replace(e, turns=tuple(replace(t, prompt=()) for t in e.turns))


def shard_name(i: int, n: int) -> str:
    return "states.jsonl" if n == 1 else f"states.{i}-of-{n}.jsonl"


def _shard_number(path: Path) -> int:
    parts = path.name.split(".")
    return int(parts[1].split("-")[0]) if len(parts) > 2 else 0


def _listed(files: str | list[str] | None) -> list[str]:
    return [] if files is None else [files] if isinstance(files, str) else list(files)


def _named(files: Sequence[str]) -> dict[str, str]:
    return {f"file {n}": file for n, file in enumerate(files)}


def _folder(name: str) -> dict[str, str]:
    return {"model": name} if Path(name).exists() else {}


def _said(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {why}" for why, n in sorted(counts.items()) if n) or "there are none"
