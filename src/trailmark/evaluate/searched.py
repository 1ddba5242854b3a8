"""Evaluate with search: the same starts and draws as a plain evaluation, with a value that chooses.

`beam` and `actions` search every decision. `best_of:N` plays N whole episodes of each start and keeps the one whose last state has the
highest value; what the N are worth without a value (pass@k, maj@k) stands beside it. For the other two, `--samples N` plays N plain
episodes for the same purpose.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.errors import ModelError, TrailmarkError
from trailmark.evaluate.run import evaluate, summarise
from trailmark.rollout.play import Seat
from trailmark.rollout.search import Plan, parse_plan
from trailmark.rollout.search_episodes import search_episodes
from trailmark.score.values import HeadValues, HttpValues, LogProb, Scorer
from trailmark.tasks.base import TaskSource, draw_tasks
from trailmark.types import Episode

if TYPE_CHECKING:
    from trailmark.evaluate.players import Wish


def play_searched(
    source: TaskSource, seat: Seat, wish: Wish, about: dict[str, Any]
) -> tuple[list[Episode], dict[str, Any]]:
    """The chosen episodes, and a record in which `beside` has the rows of plain ones."""
    ends = tuple(getattr(source, "step_ends", ("\n",)))
    plan = parse_plan(wish.search or "", step_ends=ends, budget=wish.budget, tree=wish.tree)
    if wish.chat or seat.kind == "remote":
        raise TrailmarkError("eval --search needs a model here, and no --chat: a server searches with serve --value.")
    if plan.kind == "best_of" and (wish.budget or wish.tree):
        raise TrailmarkError(
            "eval --search best_of plays whole episodes: --budget and --tree belong to beam and actions."
        )
    if plan.width > 1 and seat.law.temperature == 0:
        raise TrailmarkError(f"eval --search {wish.search} needs a temperature above 0: at 0 all candidates are one.")
    scorer = pick_scorer(wish.value, plan, seat, wish.device)
    tasks, seed = draw_tasks(source, about["split"], about["n"], about["seed"]), about["seed"]
    chosen, plain, spent = search_episodes(source, seat, plan, scorer, tasks, seed + 1)
    if plan.kind != "best_of" and wish.samples > 1:
        plain = evaluate(source, [seat], tasks=tasks, samples=wish.samples, seed=seed).episodes
    starts = max(1, len({e.task.id for e in chosen}))
    record = {
        **about,
        "search": wish.search,
        "value": wish.value,
        "budget": wish.budget,
        "searched_tokens": spent / starts,
    }
    if plain and (plan.width > 1 or plan.kind != "best_of"):
        size = plan.width if plan.kind == "best_of" else wish.samples
        record["beside"] = [summarise(plain, f"{size} plain samples")]
    return chosen, record


def pick_scorer(value: str | None, plan: Plan, seat: Seat, device: str = "auto") -> Scorer:
    if value is None:
        if plan.width > 1:
            raise TrailmarkError(
                "eval --search: by what is it chosen? --value RUN, or --value logp for the policy's own."
            )
        return LogProb()
    if value == "logp":
        return LogProb()
    if value.startswith(("http://", "https://")):
        return HttpValues(value)
    return load_values(value, seat.engine.tokenizer, device)


def value_folder(name: str) -> Path:
    """The folder of a value model: of a run, the critic of its last checkpoint (or its policy, where that has the head)."""
    folder = Path(name)
    if not folder.is_dir():
        raise ModelError(f"--value {name}: there is no such run or folder.")
    if (folder / "checkpoints").is_dir():
        from trailmark.runs.checkpoints import listed

        found = listed(folder / "checkpoints")
        if not found:
            raise ModelError(f"{folder}: this run has no checkpoint yet.")
        folder = found[-1]
    if (folder / "heads.safetensors").is_file():
        return folder
    for part in ("critic", "value", "policy"):
        if (folder / part / "heads.safetensors").is_file():
            return folder / part
    raise ModelError(f"{folder} holds no value model: no heads.safetensors there or in critic/.")


def load_values(name: str, tokenizer: Any = None, device: str = "auto", dtype: str = "float32") -> HeadValues:
    """The value model of a run or folder, frozen. `tokenizer` is the policy's, whose tokens it will be shown."""
    from trailmark.config import ModelConfig
    from trailmark.models.load import load_model

    lm = load_model(
        ModelConfig.model_validate({"name": str(value_folder(name)), "device": device, "dtype": dtype})
    ).freeze()
    if tokenizer is not None and lm.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"the value model {name} has another tokenizer than the policy: it would not read what that writes."
        )
    return HeadValues(lm)
