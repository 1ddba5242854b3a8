"""Iterative self-play: K rounds of collect, judge, shape and train.

    lessons, policy  with `teach`: plays of a function in the strategists' seats, and their imitation
    start          before round 1: the agent alone, and with the untrained strategist
    collect-K      plays of the newest strategist: RUN/collect-K/all.jsonl, with every view as it was seen
    judge-K        which strategies decided: annotations `critical`
    shape-K        the weights of the turns: annotations `score` (`trailmark convert --to sharegpt` writes EPO's files)
    train-K        an ordinary run of method `epo`; its checkpoint is the strategist of round K + 1

`steps` is the number of rounds. Line K of RUN/metrics.jsonl has the numbers of round K. A killed run goes on where it
was, and what was judged is never asked again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trailmark import formats
from trailmark.credit.turns import outcome_of, side_of
from trailmark.errors import DataError, RecipeError
from trailmark.formats.turns import Writer, messages_of
from trailmark.functions import load_function
from trailmark.learn.watch import summary
from trailmark.memory import need_rows
from trailmark.methods.base import Method, name_in_run
from trailmark.methods.batches import Walk
from trailmark.methods.collect import collect_starts
from trailmark.methods.epo.config import EpoRecipe, EpoRoundsRecipe
from trailmark.methods.epo.data import score_notes
from trailmark.methods.epo.judge import SOURCE_RULE, CriticalTurns, by_rule, told
from trailmark.methods.epo.method import EpoMethod, opened_seats, plays_of
from trailmark.methods.epo.play import protocol_of
from trailmark.methods.epo.shape import Marked, shaped
from trailmark.methods.pipeline import Pipeline, numbers, recipe_stage, training_stage
from trailmark.models.load import load_model
from trailmark.rollout.play import start_all
from trailmark.runs.stages import Stage
from trailmark.runs.store import Run, read_segment, write_rows
from trailmark.samples import scored
from trailmark.seats.config import AnyKind, trained_seats
from trailmark.seats.model_names import load_tokenizer, locate
from trailmark.seats.open import open_script
from trailmark.seats.open_seats import check_servers
from trailmark.tasks import keep_judge
from trailmark.tasks.base import TaskSource, draw_tasks
from trailmark.types import Annotation, Episode, Scored

MARK = "critical"
PLAYED = ["task", "seats", "strategy", "prompts", "sampling", "engine", "seed", "model", "-model.name"]


class EpoRoundsMethod(Pipeline):
    Config, self_play = EpoRoundsRecipe, True
    staged = tuple(EpoRoundsRecipe.model_fields)

    @classmethod
    def stages(cls, config: EpoRoundsRecipe, run: Run) -> list[Stage]:
        root, found = run.path, list[Stage]()
        make = lambda what, k: partial(what, config, run, k)
        taught = ["policy"] if config.teach else []
        first = PLAYED if taught else PLAYED[:-1]
        if config.teach:
            keys = [*PLAYED[:-1], "teach.function", "teach.prompts", "learn", "collect.split"]
            found += [
                recipe_stage("lessons", partial(teach, config, run), config, root, keys),
                training_stage("policy", lesson_config(config, root), root, metrics=numbers),
            ]
        if config.eval.every:
            keys = [*first, "eval"]
            found.append(recipe_stage("start", partial(before, config, run), config, root, keys, taught))
        for k in range(1, config.steps + 1):
            played, judged, weighted = f"collect-{k}", f"judge-{k}", f"shape-{k}"
            plays = PLAYED if k > 1 else first
            newest = [f"train-{k - 1}"] if k > 1 else taught
            found += [
                recipe_stage(played, make(gather, k), config, root, [*plays, "collect"], newest),
                recipe_stage(judged, make(judge, k), config, root, ["judge", "task", "learn"], [played]),
                recipe_stage(weighted, make(weigh, k), config, root, ["shape", "learn"], [played, judged]),
                training_stage(f"train-{k}", round_config(config, root, k), root, metrics=numbers),
            ]
        return found

    @classmethod
    def seats_of(cls, config: Any) -> dict[str, AnyKind]:
        return EpoMethod.seats_of(config)

    @classmethod
    def protocol(cls, config: Any, source: TaskSource) -> Any:
        return EpoMethod.protocol(config, source)

    @classmethod
    def check_asked(cls, config: Any, source: TaskSource) -> None:
        EpoMethod.check_asked(config, source)

    @classmethod
    def learns_from(cls, config: Any) -> str:
        return config.collect.split

    @classmethod
    def ready(cls, config: EpoRoundsRecipe) -> None:
        seats = cls.seats_of(config)
        check_servers(seats)
        if config.strategy == "none":
            raise RecipeError("strategy: none asks no strategist, so there is nothing to train: dialogue or thought.")
        if missing := next((n for n in config.learn if n not in trained_seats(seats)), None):
            raise RecipeError(f"learn: '{missing}' is no trained seat (seats: {', '.join(seats)}).")
        source = cls.open_source(config)
        cls.check_asked(config, source)
        if config.judge.kind == "rule" and not hasattr(source, "critical"):
            raise RecipeError(f"judge.kind: task '{source.name}' has no rule that names critical turns.")
        cls.protocol(config, source)  # refuses a strategy that the world has no place for

    @classmethod
    def check(cls, config: EpoRoundsRecipe) -> list[str]:
        each = config.collect.prompts * config.collect.n
        marks = {"none": "the outcome alone", "rule": "a rule", "model": "a language model"}[config.judge.kind]
        return [
            f"rounds: {config.steps}, each of {each} plays, marked by {marks}, and {config.training} optimiser steps"
        ]

    @classmethod
    def trainings(cls, config: EpoRoundsRecipe) -> list[tuple[str, type[Method], Any]]:
        raise RecipeError("a plan needs the plays, which rounds collect themselves: plan one round as method epo")


# --- the parts of a round --------------------------------------------------------------------------------------------


def strategist_of(config: EpoRoundsRecipe, root: Path, k: int) -> str:
    """The strategist that plays in round k."""
    return str(root / f"train-{k - 1}") if k > 1 else base_of(config, root)


def base_of(config: EpoRoundsRecipe, root: Path) -> str:
    """The strategist before round 1."""
    return str(root / "policy") if config.teach else config.model.name


def _load(config: EpoRoundsRecipe, run: Run, k: int) -> Any:
    lm = load_model(config.model.model_copy(update={"name": locate(strategist_of(config, run.path, k)).folder}))
    lm.name = name_in_run(lm.name, run)
    return lm


def before(config: EpoRoundsRecipe, run: Run, folder: Path) -> dict[str, float]:
    """The evaluations before round 1: the agent alone, and with the strategist as it starts."""
    source = EpoMethod.open_source(config)
    opened = opened_seats(config, source, _load(config, run, 1))
    opened.publish(0)
    out: dict[str, float] = {}
    for name, strategy in (("alone", "none"), ("untrained", config.strategy)):
        episodes = plays_of(config, source, opened, strategy, folder / f"{name}.jsonl")
        good, dropped = scored(episodes)
        found = {**summary(good), **dropped}
        out |= {f"{name}/{key}": value for key, value in found.items()}
    return out


def teach(config: EpoRoundsRecipe, run: Run, folder: Path) -> dict[str, float]:
    """Plays of the teacher in the seats that are learnt from. Every strategy has the weight 1."""
    assert config.teach is not None
    need_rows(config.teach.prompts, "teach.prompts")
    source = EpoMethod.open_source(config)
    lm = load_model(config.model)
    function = load_function(config.teach.function, "teach.function")[0]
    opened = opened_seats(config, source, lm)
    script = open_script(function, lm.tokenizer, config.teach.function)
    seats = [replace(s, engine=script, kind="scripted") if s.name in config.learn else s for s in opened.seats]
    tasks = draw_tasks(source, config.collect.split, config.teach.prompts, config.seed)
    starts = start_all(tasks, 1, config.seed, "0:")
    protocol = protocol_of(config.strategy, config.prompts, source)
    made = collect_starts(folder / "plays.jsonl", source, starts, seats, protocol, failures=config.failures)
    good, dropped = scored(made)
    notes = [a for e in good for seat, mine in learnt(e, config.learn)
             for a in score_notes(e, seat, [1.0] * len(mine), "taught")]  # fmt: skip
    formats.write("episodes", folder / "all.jsonl", good, None, annotations=notes)
    return {**summary(good), **dropped}


def lesson_config(config: EpoRoundsRecipe, root: Path) -> EpoRecipe:
    assert config.teach is not None
    given = round_config(config, root, 1).model_dump(mode="json")
    quiet = config.eval.model_copy(update={"every": 0}).model_dump(mode="json")
    given |= {"name": f"{config.name} imitation", "out": str(root / "policy"), "eval": quiet, "objective": "epo"}
    given |= {"data": [str(root / "lessons" / "all.jsonl")], "steps": config.teach.steps, "epochs": None}
    given["batch"] = config.teach.batch
    given["learner"] = config.teach.learner.model_dump(mode="json")
    given["model"] = config.model.model_dump(mode="json")
    return EpoRecipe.model_validate(given)


def gather(config: EpoRoundsRecipe, run: Run, k: int, folder: Path) -> dict[str, float]:
    c = config.collect
    need_rows(c.prompts * c.n, "collect.prompts * collect.n")
    source = EpoMethod.open_source(config)
    keep_judge(source, run.path)
    opened = opened_seats(config, source, _load(config, run, k))
    opened.publish(k - 1)
    starts = start_all(Walk(source, c.prompts, config.seed, c.split).take(k), c.n, config.seed, f"{k}:")
    protocol = protocol_of(config.strategy, config.prompts, source)
    made = collect_starts(folder / "all.jsonl", source, starts, opened.seats, protocol, failures=config.failures)
    good, dropped = scored(made)
    return {**summary(good), **dropped}


def learnt(e: Episode, seats: Sequence[str]) -> list[tuple[str, list[int]]]:
    """The seats that are learnt from in a play, if their side was scored, and the turns of each."""
    found = []
    for seat in seats:
        mine = [i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens]
        if mine and isinstance(outcome_of(e, seat), Scored):
            found.append((seat, mine))
    return found


def judge(config: EpoRoundsRecipe, run: Run, k: int, folder: Path) -> dict[str, float]:
    """Annotations `critical` (1 or 0) of every strategy of a play that was judged."""
    episodes = read_segment(run.path / f"collect-{k}" / "all.jsonl")
    plays = [(e, seat, mine) for e in episodes for seat, mine in learnt(e, config.learn)]
    critical, source = _critical(config, run, k, folder, plays)
    notes, missing = list[Annotation](), 0
    for (e, _, mine), found in zip(plays, critical, strict=True):
        missing += found is None
        for n, i in enumerate(mine) if found is not None else ():
            notes.append(Annotation(e.id, MARK, "turn", (float(n in found),), i, source))
    write_rows(folder / "critical.jsonl", notes)
    return {"plays": len(plays), "unjudged": missing, "critical": sum(a.values[0] for a in notes) / max(1, len(notes))}


Plays = Sequence[tuple[Episode, str, list[int]]]


def _critical(config: EpoRoundsRecipe, run: Run, k: int, folder: Path, plays: Plays) -> tuple[list[Any], str]:
    """For each play the numbers (from 0) of the seat's critical turns, or None; and who says so."""
    if config.judge.model is None:
        source = EpoMethod.open_source(config)
        rule: Callable[[Episode, str], list[int]] = lambda e, seat: by_rule(source, e, side_of(e, seat))
        if config.judge.kind == "none":
            return [[] for _ in plays], "nobody"
        return [rule(e, seat) for e, seat, _ in plays], SOURCE_RULE
    tokenizer = load_tokenizer(strategist_of(config, run.path, k))
    asker = CriticalTurns(config.judge.model, answers=folder / "answers.jsonl")
    shown = []
    for e, seat, _ in plays:
        outcome = outcome_of(e, seat)
        assert isinstance(outcome, Scored)
        shown.append(told(f"{e.id} {seat}", messages_of(Writer(tokenizer, seat), e), outcome.reward))
    places = asker.ask_all(shown, config.failures)
    numbered = [None if p is None else [_turn(t.strategies, mine, x) for x in p]
                for p, t, (_, _, mine) in zip(places, shown, plays, strict=True)]  # fmt: skip
    return numbered, asker.source


def _turn(places: Sequence[int], mine: Sequence[int], place: int) -> int:
    """The number of the turn at a place of the conversation. A canned first answer is no turn."""
    return max(0, places.index(place) - (len(places) - len(mine)))


def weigh(config: EpoRoundsRecipe, run: Run, k: int, folder: Path) -> dict[str, float]:
    """The plays of a round that were judged, with the weight of every strategy."""
    episodes = read_segment(run.path / f"collect-{k}" / "all.jsonl")
    notes = read_segment(run.path / f"judge-{k}" / "critical.jsonl", Annotation)
    marks = {(a.episode, a.turn): a.values[0] for a in notes}
    rows, of = list[Marked](), list[tuple[Episode, str]]()
    for e in episodes:
        for seat, mine in learnt(e, config.learn):
            if (e.id, mine[0]) not in marks:  # it was not judged, which is not "nothing decided"
                continue
            outcome = outcome_of(e, seat)
            assert isinstance(outcome, Scored)
            critical = [n for n, i in enumerate(mine) if marks[e.id, i]]
            rows.append(Marked(f"episode '{e.id}'", f"{e.group} {seat}", len(mine), critical, outcome.reward))
            of.append((e, seat))
    if config.shape.normalise in ("group", "turns"):  # a play that is left alone in its group has none to compare with
        size = Counter(r.group for r in rows)
        pairs = [(r, o) for r, o in zip(rows, of) if size[r.group] > 1]
        rows, of = [r for r, _ in pairs], [o for _, o in pairs]
    if not rows:
        raise DataError("no play was scored and judged: there is nothing to learn from.", run.path / f"collect-{k}")
    made = shaped(rows, config.shape)
    scores = [a for (e, seat), w in zip(of, made.weights, strict=True)
              for a in score_notes(e, seat, w.tolist(), f"epo {config.shape.normalise}")]  # fmt: skip
    kept = {e.id for e, _ in of}
    formats.write("episodes", folder / "all.jsonl", [e for e in episodes if e.id in kept], None, annotations=scores)
    return made.numbers()


def round_config(config: EpoRoundsRecipe, root: Path, k: int) -> EpoRecipe:
    """The recipe of the training of round k."""
    given: dict[str, Any] = {n: getattr(config, n) for n in EpoRecipe.model_fields}
    first = 1 if config.learn_from == "all" else k
    start = base_of(config, root) if config.init == "base" else strategist_of(config, root, k)
    given |= {
        "method": "epo",
        "name": f"{config.name} round {k}",
        "out": str(root / f"train-{k}"),
        "data": [str(root / f"shape-{i}" / "all.jsonl") for i in range(first, k + 1)],
        "format": "episodes",
        "steps": config.training,
        "model": config.model.model_copy(update={"name": start}),
        "eval": config.eval.model_copy(update={"every": config.training if config.eval.every else 0}),
    }
    return EpoRecipe(**given)
