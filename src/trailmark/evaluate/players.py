"""From a MODEL on the command line to played episodes, with what its run's recipe says wherever the person said nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.config import EngineConfig, ModelConfig, SamplingConfig, resolve
from trailmark.errors import ModelError, TrailmarkError
from trailmark.marked_yaml import parse
from trailmark.store import Run
from trailmark.types import Episode


@dataclass(frozen=True)
class Wish:
    """What was asked for; None: as the recipe has it."""

    task: str | None = None
    options: Sequence[str] = ()
    split: str | None = None
    n: int | None = None
    samples: int = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    device: str = "auto"


def find_model(name: str) -> tuple[str, dict[str, Any]]:
    """The folder or name to load, and the recipe of the run it lies in ({} when it lies in none). A run stands for its
    last checkpoint, a checkpoint for its policy."""
    folder = Path(name)
    if not folder.is_dir():
        return name, {}
    if (folder / "recipe.yaml").is_file():
        from trailmark.learn.checkpoint import listed

        found = listed(folder / "checkpoints")
        if not found:
            raise ModelError(f"{folder} has no checkpoint yet.")
        folder = found[-1]
    if (folder / "state.json").is_file():
        if not (folder / "policy").is_dir():
            held = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_dir()))
            raise ModelError(f"{folder} holds no policy, but: {held}. Name one of these folders.")
        folder = folder / "policy"
    home = folder.resolve().parents
    run = home[2] if len(home) > 2 else folder
    if not (run / "recipe.yaml").is_file():
        return str(folder), {}
    return str(folder), parse(Run(run).recipe, str(run / "recipe.yaml"))[0]


def play_model(name: str, wish: Wish) -> tuple[list[Episode], dict[str, Any]]:
    """The episodes, and a plain record of how they were made."""
    from trailmark.tasks import get_task, task_options

    folder, recipe = find_model(name)
    if recipe.get("method") not in (None, "online", "sft") and wish.task is None:
        raise TrailmarkError(
            f"{name} was trained by '{recipe['method']}', whose seats eval cannot fill: recompute its own evaluation with "
            "--episodes RUN, or name a --task to play alone."
        )
    own = recipe.get("task") or {}
    if wish.task is None and "name" not in own:
        raise TrailmarkError("eval: which task? Such as --task taxi mode=pickup.")
    task = wish.task or own["name"]
    options = ({} if wish.task not in (None, own.get("name")) else own.get("options") or {}) | task_options(
        wish.options
    )
    evaluated = recipe.get("eval") or {}
    split = wish.split or evaluated.get("split", "test")
    n = wish.n or evaluated.get("n")
    seed = recipe.get("seed", 0) if wish.seed is None else wish.seed
    said = {"temperature": wish.temperature, "top_p": wish.top_p, "max_tokens": wish.max_tokens}
    sampling = resolve(
        {**(recipe.get("sampling") or {}), **{k: v for k, v in said.items() if v is not None}}, SamplingConfig
    )
    source = get_task(task, **options)

    from trailmark.engines.local import LocalEngine
    from trailmark.evaluate.run import evaluate
    from trailmark.models.load import load_model
    from trailmark.rollout.play import Seat
    from trailmark.types import SamplingLaw

    e = recipe.get("engine") or {}
    engine = resolve(e if e.get("kind", "local") == "local" else {}, EngineConfig)
    model = ModelConfig(name=folder, device=wish.device, dtype=(recipe.get("model") or {}).get("dtype", "float32"))
    law = SamplingLaw(sampling.temperature, sampling.top_p, sampling.top_k, min_tokens=sampling.min_tokens)
    player = LocalEngine(load_model(model), engine.slots, engine.max_len, engine.fixed)
    seat = Seat("policy", player, law, sampling.max_tokens, tuple(sampling.stop), "frozen")
    report = evaluate(source, [seat], split=split, n=n, samples=wish.samples, seed=seed)
    about = {"model": folder, "task": task, "options": options, "split": split, "n": n, "samples": wish.samples,
             "seed": seed, "sampling": sampling.model_dump()}  # fmt: skip
    return report.episodes, about
