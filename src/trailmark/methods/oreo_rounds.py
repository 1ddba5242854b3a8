"""OREO in rounds: play, learn from what was played, play with what was learnt.

A round collects episodes with the policy as it stands (`episodes/00000k.jsonl`) and trains on them in a run of its own
(`round-k/`, method oreo, any of its objectives). Three choices are left open by the paper, and are made here in words:

    anchor  the reference of a round: the `previous` policy (the default: beta is then spent anew each round, so after k
            rounds of enough data the policy is where one round with beta / k would be), or the one at the `start`
    critic_from  the value starts as the `previous` round's (default), or `fresh`
    learn_from   a round learns from `new` episodes (default), or from `all` so far

`steps` is the number of rounds; `training` the optimiser steps of one (0: only collect, for others to learn from). A killed run goes on with --resume: rounds that are
done stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trailmark.engines.local import local_engine
from trailmark.errors import RecipeError, RunError
from trailmark.memory import need_rows
from trailmark.methods import oreo, oreo_data
from trailmark.methods.configs import RoundsRecipe as Config
from trailmark.methods.online import bound_task, summary
from trailmark.models.load import load_model
from trailmark.runs.checkpoints import listed
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_metrics, read_segment, truncate_metrics
from trailmark.samples import scored
from trailmark.tasks import get_task
from trailmark.tasks.base import draw_tasks


def check(config: Config) -> list[str]:
    each = config.collect.starts * config.collect.n
    return [f"rounds: {config.steps}, each of up to {each} episodes and {config.training} optimiser steps"]


def run(config: Config, run: Run, resume: bool = False) -> dict[str, float]:
    if config.format != "episodes" or config.files != [""]:
        raise RecipeError("data and format: rounds collect their own episodes; leave both out")
    done = max([row["step"] for row in read_metrics(run.path)], default=0) if resume else 0
    if resume:
        truncate_metrics(run, done)
    last: dict[str, float] = {}
    for k in range(done + 1, config.steps + 1):
        last = {f"collect/{n}": v for n, v in gather(config, run, k).items()}
        if config.training:
            inner = round_config(config, run.path, k)
            launch(oreo, inner, resume=True)
            last |= {n: v for n, v in read_metrics(Path(inner.out))[-1].items() if n != "step"}
        run.log(k, last)
        run.sync()
    return last


def gather(config: Config, run: Run, k: int) -> dict[str, float]:
    """The episodes of round k, played unless they are there already; what they are like."""
    path, c = run.episodes_dir / f"{k:06d}.jsonl", config.collect
    if not path.exists():
        need_rows(c.starts * c.n, "collect.starts * collect.n")
        source = get_task(config.task.name, **config.task.options)
        lm = load_model(config.model.model_copy(update={"name": policy_of(config, run.path, k)}))
        if policy_of(config, run.path, k) != config.model.name:
            lm.name = str(Path(lm.name).relative_to(run.path))  # episodes say who played them, wherever the run lies
        engine = local_engine(lm, config.engine)
        engine.publish(k - 1, lm)
        bound_task(source, lm.tokenizer)
        seats = [oreo.player(engine, config.seat, c.sampling)]
        tasks = draw_tasks(source, c.split, c.starts, config.seed * 1_000_003 + k)
        if c.balanced is None:
            oreo_data.collect(path, source, tasks, seats, c.n, config.seed, f"{k}:")
        else:
            oreo_data.collect_balanced(path, source, tasks, seats, c.n, c.balanced, config.seed, f"{k}:")
    good, dropped = scored(read_segment(path))
    return {**summary(good), **dropped}


def round_config(config: Config, out: Path, k: int) -> oreo.Config:
    """The recipe of round k."""
    given: dict[str, Any] = {n: getattr(config, n) for n in oreo.Config.model_fields}
    files = range(1 if config.learn_from == "all" else k, k + 1)
    start = config.ref or config.model.name
    critic = config.critic
    if k > 1 and config.critic_from == "previous" and config.objective == "oreo":
        critic = critic.model_copy(update={"name": str(last_checkpoint(out, k - 1) / "critic")})
    given |= {
        "method": "oreo",
        "name": f"{config.name} round {k}",
        "out": str(out / f"round-{k}"),
        "data": [str(out / "episodes" / f"{i:06d}.jsonl") for i in files],
        "steps": config.training,
        "model": config.model.model_copy(update={"name": policy_of(config, out, k)}),
        "critic": critic,
        "ref": (start if k > 1 else config.ref) if config.anchor == "start" else (config.ref if k == 1 else None),
    }
    return oreo.Config(**given)


def policy_of(config: Config, out: Path, k: int) -> str:
    """The policy that round k starts from."""
    return config.model.name if k == 1 or not config.training else str(last_checkpoint(out, k - 1) / "policy")


def last_checkpoint(out: Path, k: int) -> Path:
    found = listed(out / f"round-{k}" / "checkpoints")
    if not found:
        raise RunError(f"{out}/round-{k} has no checkpoint: it is not finished")
    return found[-1]
