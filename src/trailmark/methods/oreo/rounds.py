"""OREO in rounds: collect episodes with the policy, train on them, and repeat with the new policy.

Round k collects episodes (`episodes/00000k.jsonl`) and trains on them in a run of its own (`round-k/`, method oreo, or
method preference if `objective` names one of its objectives). The paper leaves three choices open; the recipe makes
them:

    anchor  the reference of a round: the `previous` policy (default: each round then spends beta anew, so after k
            rounds of enough data the policy is where one round with beta / k would be), or the policy at the `start`
    critic_from  the value starts from the `previous` round's (default), or `fresh`
    learn_from   a round learns from `new` episodes (default), or from `all` so far

`steps` is the number of rounds. `training` is the number of optimiser steps in a round (0: only collect, for other runs
to learn from). Each round is two stages (`runs/stages.py`; their records are in RUN/stages). A killed run resumes with
--resume: finished rounds stay, and with a changed recipe only the rounds that it affects are made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trailmark.errors import RecipeError
from trailmark.learn.watch import summary
from trailmark.memory import need_rows
from trailmark.methods.base import Method, name_in_run
from trailmark.methods.batches import Walk
from trailmark.methods.configs import OfflineFinal, OfflineRecipe, PreferenceRecipe
from trailmark.methods.offline import OfflineMethod
from trailmark.methods.oreo import data as oreo_data
from trailmark.methods.oreo.config import OreoRecipe, RoundsRecipe
from trailmark.methods.oreo.method import OreoMethod
from trailmark.methods.preference import PreferenceMethod
from trailmark.methods.unread import of_training
from trailmark.models.load import load_model
from trailmark.runs.data_files import named_files
from trailmark.runs.launch import training_stage, without_place
from trailmark.runs.stages import Layout, Stage, run_stages
from trailmark.runs.store import Run, beside, read_metrics, read_segment, truncate_metrics
from trailmark.samples import scored
from trailmark.seats.config import AnyKind, LocalSeat, filled
from trailmark.seats.locate import locate
from trailmark.seats.names import fix_names
from trailmark.seats.table import Table
from trailmark.tasks import get_task, keep_judge

LAYOUT = Layout(record="stages/{name}.json", begun="stages/{name}.begun.json", locks=False)
EPISODES = replace(LAYOUT, home="episodes")


class OreoRoundsMethod(Method):
    """Each round is a run of its own. So this class has no updates, and its `train` does everything."""

    Config = RoundsRecipe
    staged = tuple(RoundsRecipe.model_fields)

    @classmethod
    def learns_from(cls, config: RoundsRecipe) -> str:
        return config.collect.split

    @classmethod
    def check(cls, config: RoundsRecipe) -> list[str]:
        each = config.collect.starts * config.collect.n
        return [f"rounds: {config.steps}, each of up to {each} episodes and {config.training} optimiser steps"]

    @classmethod
    def trainings(cls, config: RoundsRecipe) -> list[tuple[str, type[Method], Any]]:
        raise RecipeError(
            "a plan needs the data, which rounds collect themselves: plan one round as method oreo, with its data"
        )

    @classmethod
    def seats_of(cls, config: RoundsRecipe) -> dict[str, AnyKind]:
        return filled({config.seat: LocalSeat(trained=True)}, config.sampling, config.engine)

    @classmethod
    def train(cls, config: RoundsRecipe, run: Run, resume: bool = False) -> dict[str, float]:
        if config.format != "episodes" or config.files != [""]:
            raise RecipeError("data and format: rounds collect their own episodes; leave both out")
        config = fix_names(config, run)
        logged = {row["step"]: row for row in read_metrics(run.path)}
        last: dict[str, float] = {}
        for k in range(1, config.steps + 1):
            made = run_stages(run.path, [collection(config, run, k)], layout=EPISODES)[f"collect-{k}"]
            last = {f"collect/{n}": v for n, v in made.items()}
            if config.training:
                made = run_stages(run.path, [round_stage(config, run, k)], layout=LAYOUT)[f"round-{k}"]
                last |= {n: v for n, v in made.items() if n != "step"}
            if logged.get(k) != {"step": k, **last}:  # not logged yet, or a stage was made again
                truncate_metrics(run, k - 1)
                logged = {step: row for step, row in logged.items() if step < k}
                run.log(k, last)
                run.sync()
        return last


def learner_of(config: RoundsRecipe) -> type[OfflineMethod]:
    """The method that trains a round."""
    return OreoMethod if config.objective == "oreo" else PreferenceMethod


def collection(config: RoundsRecipe, run: Run, k: int) -> Stage:
    """The stage that plays the episodes of round k. Its summary holds their statistics."""
    path = run.episodes_dir / f"{k:06d}.jsonl"

    def make(_: Path) -> dict[str, float]:
        gather(config, run, k, path)
        good, dropped = scored(read_segment(path))
        return {**summary(good), **dropped}

    model = config.model.model_copy(update={"name": policy_of(config, run.path, k)})
    said = {"collect": config.collect, "task": config.task, "model": model, "engine": config.engine}
    settings = {n: v.model_dump(mode="json", exclude_defaults=True) for n, v in said.items()} | {
        "seat": config.seat,
        "seed": config.seed,
    }
    read = {key: path for key, path in named_files(config).items() if key.startswith("task.")}
    return Stage(
        f"collect-{k}", make, without_place(settings, str(run.path)), _paths({"policy": model.name}),
        (path.name, f"{path.stem}.partial.jsonl", beside(path).name, f"{path.stem}.partial.annotations.jsonl"),
        files=read,
    )  # fmt: skip


def round_stage(config: RoundsRecipe, run: Run, k: int) -> Stage:
    """The stage that trains round k, as a run of its own."""
    inner = round_config(config, run.path, k)
    reads = {
        "policy": inner.model.name,
        "ref": inner.ref,
        "critic": getattr(inner, "critic", None) and inner.critic.name,
    }
    inputs = _paths({**reads, **{Path(file).name: file for file in inner.files}})
    return training_stage(f"round-{k}", learner_of(config), inner, run.path, inputs, unread=of_training(inner))


def _paths(named: Mapping[str, str | None]) -> dict[str, str]:
    """The names that are files or folders on this machine. Others are names on the hub, which the settings hold."""
    return {name: path for name, path in named.items() if path and Path(path).exists()}


def gather(config: RoundsRecipe, run: Run, k: int, path: Path) -> None:
    """Play the episodes of round k."""
    c = config.collect
    need_rows(c.starts * c.n, "collect.starts * collect.n")
    source = get_task(config.task.name, **config.task.options)
    keep_judge(source, run.path)
    lm = load_model(config.model.model_copy(update={"name": policy_of(config, run.path, k)}))
    lm.name = name_in_run(lm.name, run)
    table = Table(OreoRoundsMethod.seats_of(config), {config.seat: lm})
    table.publish(k - 1)
    source.bind(lm.tokenizer)
    seats = [table.seat(config.seat, c.sampling)]
    tasks = Walk(source, c.starts, config.seed, c.split).take(k)
    if c.balanced is None:
        oreo_data.collect(path, source, tasks, seats, c.n, config.seed, f"{k}:", failures=config.failures)
    else:
        oreo_data.collect_balanced(
            path, source, tasks, seats, c.n, c.balanced, config.seed, f"{k}:", failures=config.failures
        )


def round_config(config: RoundsRecipe, out: Path, k: int) -> OfflineRecipe:
    """The recipe of round k."""
    config_of = OreoRecipe if config.objective == "oreo" else PreferenceRecipe
    given: dict[str, Any] = {n: getattr(config, n) for n in config_of.model_fields if hasattr(config, n)}
    files = range(1 if config.learn_from == "all" else k, k + 1)
    start = config.ref or config.model.name
    given |= {
        "method": "oreo" if config.objective == "oreo" else "preference",
        "name": f"{config.name} round {k}",
        "out": str(out / f"round-{k}"),
        "data": [str(out / "episodes" / f"{i:06d}.jsonl") for i in files],
        "steps": config.training,
        "model": config.model.model_copy(update={"name": policy_of(config, out, k)}),
        "ref": (start if k > 1 else config.ref) if config.anchor == "start" else (config.ref if k == 1 else None),
    }
    if config.objective != "oreo":
        given["final"] = OfflineFinal(start=config.final.start)
    elif k > 1 and config.critic_from == "previous":
        before = locate(str(out / f"round-{k - 1}"), "critic").folder
        given["critic"] = config.critic.model_copy(update={"name": before})
    return config_of(**given)


def policy_of(config: RoundsRecipe, out: Path, k: int) -> str:
    """The policy that round k starts from."""
    return config.model.name if k == 1 or not config.training else locate(str(out / f"round-{k - 1}")).folder
