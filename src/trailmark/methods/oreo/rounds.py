"""OREO in rounds: collect episodes with the policy, train on them, and repeat with the new policy.

Round k collects episodes (`episodes/00000k.jsonl`) and trains on them in a run of its own (`round-k/`, method oreo, or
method preference if `objective` names one of its objectives). The paper leaves three choices open; the recipe makes
them:

    anchor  the reference of a round: the `previous` policy (default: each round then spends beta anew, so after k
            rounds of enough data the policy is where one round with beta / k would be), or the policy at the `start`
    critic_from  the value starts from the `previous` round's (default), or `fresh`
    learn_from   a round learns from `new` episodes (default), or from `all` so far

`steps` is the number of rounds. `training` is the number of optimiser steps in a round (0: only collect, for other runs
to learn from). Each round is two stages (`stages` below says what they read). A killed run resumes with --resume:
finished rounds stay, and with a changed recipe only the rounds that it affects are made again.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from trailmark.errors import RecipeError
from trailmark.learn.watch import summary
from trailmark.memory import need_rows
from trailmark.methods.base import Method, name_in_run
from trailmark.methods.batches import Walk
from trailmark.methods.offline_configs import OfflineFinal, OfflineRecipe, PreferenceRecipe
from trailmark.methods.oreo import data as oreo_data
from trailmark.methods.oreo.config import OreoRecipe, RoundsRecipe
from trailmark.methods.pipeline import Pipeline, numbers, recipe_stage, training_stage
from trailmark.models.load import load_model
from trailmark.runs.stages import Stage
from trailmark.runs.store import Run, beside, read_segment
from trailmark.samples import scored
from trailmark.seats.config import AnyKind, LocalSeat, filled
from trailmark.seats.model_names import locate
from trailmark.seats.open_seats import OpenSeats
from trailmark.tasks import get_task, keep_judge


class OreoRoundsMethod(Pipeline):
    Config = RoundsRecipe
    staged = tuple(RoundsRecipe.model_fields)

    @classmethod
    def stages(cls, config: RoundsRecipe, run: Run) -> list[Stage]:
        """Two stages of each round: its episodes, and its training, which is a run of its own."""
        found = []
        for k in range(1, config.steps + 1):
            begins = config.training and k > 1  # with what the round before has trained
            keys = ["collect", "task", "engine", "seat", "seed", "model", *(["-model.name"] if begins else [])]
            path = run.episodes_dir / f"{k:06d}.jsonl"
            part = path.with_name(f"{path.stem}.partial.jsonl")
            files = tuple(p.name for p in (path, part, beside(path), beside(part)))
            found += [recipe_stage(
                f"collect-{k}", partial(gather, config, run, k, path), config, run.path, keys,
                [f"round-{k - 1}"] if begins else [], home="episodes", outputs=files,
            )]  # fmt: skip
            if config.training:
                inner = round_config(config, run.path, k)
                found += [training_stage(f"round-{k}", inner, run.path, metrics=numbers)]
        return found

    @classmethod
    def learns_from(cls, config: RoundsRecipe) -> str:
        return config.collect.split

    @classmethod
    def check(cls, config: RoundsRecipe) -> list[str]:
        each = config.collect.prompts * config.collect.n
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
    def ready(cls, config: RoundsRecipe) -> None:
        if config.format != "episodes" or config.files != [""]:
            raise RecipeError("data and format: rounds collect their own episodes; leave both out")


def gather(config: RoundsRecipe, run: Run, k: int, path: Path, _: Path) -> dict[str, float]:
    """Play the episodes of round k. Returns their statistics."""
    c = config.collect
    need_rows(c.prompts * c.n, "collect.prompts * collect.n")
    source = get_task(config.task.name, **config.task.options)
    keep_judge(source, run.path)
    lm = load_model(config.model.model_copy(update={"name": locate(policy_of(config, run.path, k)).folder}))
    lm.name = name_in_run(lm.name, run)
    opened = OpenSeats(OreoRoundsMethod.seats_of(config), {config.seat: lm})
    opened.publish(k - 1)
    source.bind(lm.tokenizer)
    seats = [opened.seat(config.seat, c.sampling)]
    tasks = Walk(source, c.prompts, config.seed, c.split).take(k)
    if c.balanced is None:
        oreo_data.collect(path, source, tasks, seats, c.n, config.seed, f"{k}:", failures=config.failures)
    else:
        oreo_data.collect_balanced(
            path, source, tasks, seats, c.n, c.balanced, config.seed, f"{k}:", failures=config.failures
        )
    good, dropped = scored(read_segment(path))
    return {**summary(good), **dropped}


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
        given["critic"] = config.critic.model_copy(update={"name": str(out / f"round-{k - 1}")})
    return config_of(**given)


def policy_of(config: RoundsRecipe, out: Path, k: int) -> str:
    """The policy that round k starts from."""
    return config.model.name if k == 1 or not config.training else str(out / f"round-{k - 1}")
