"""The keys of a recipe that do not change what its training makes. A stage is not made again for these
(`runs/stages.py`)."""

from __future__ import annotations

from typing import Any

from trailmark.methods.configs import PAIRED

EVAL = ("eval.split", "eval.n", "eval.patience", "eval.first")  # read where there are evaluations
PAIRS, SIDES = ("beta", "smooth", "per", "pairs"), ("desirable", "undesirable")


def of_training(config: Any) -> tuple[str, ...]:
    """Of a training from data: keys of another objective, and those of evaluations if there are none."""
    objective, final = getattr(config, "objective", ""), getattr(config, "final", None)
    others = {"rejection": (*PAIRS, *SIDES), "kto": PAIRS[1:], **dict.fromkeys(PAIRED, SIDES)}
    unread: tuple[str, ...] = others.get(objective, ())
    asked = final is not None and (final.start or final.choose or getattr(final, "search", ()))
    if not (config.eval.every or asked):
        unread += (*EVAL, "engine", "sampling")
    return unread


def of_imitation(config: Any) -> tuple[str, ...]:
    """Of a training whose policy is what counts: its evaluations measure it, and do not change it."""
    unread = of_training(config)
    return unread if config.eval.patience else (*unread, "eval", "engine", "sampling", "final")


def of_reward_model(config: Any) -> tuple[str, ...]:
    """Of a reward model: how it is read later, and what is played, which is nothing."""
    asked = () if config.eval_data else ("eval",)
    labels = () if config.kind in ("classes", "scalar") else ("outputs", "label")
    return ("read", "eval.split", "eval.n", *asked, *labels)


def of_request(kind: str, own: Any, given: Any) -> tuple[str, ...]:
    """Of a seat that is asked. `own` is the sampling that its section of the recipe sets, `given` the one of the stage,
    which goes before it, as that goes before the recipe's."""
    how = ("concurrency", "deadline", "retries", "backoff", "api_key_env") if kind == "http" else ()
    hidden = ("sampling", "seat.sampling") if given is not None else ("sampling",) if own is not None else ()
    return (*(f"seat.{key}" for key in how), *hidden)
