"""`trailmark quickstart`: Reflect-RL on the taxi."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trailmark.methods.quickstart import Results, packaged_recipe


def quickstart(out: Path, seed: int, resume: bool, say: Callable[[str], None]) -> Results:
    """Reflect-RL on taxi `pickup`, and what it is compared with, each over all 300 starts."""
    from trailmark.config import resolve
    from trailmark.methods import get_method
    from trailmark.methods.reflect.method import ReflectRecipe, evaluate_advice
    from trailmark.models.tiny import tiny_tokenizer
    from trailmark.rollout.reference_players import random_player
    from trailmark.runs.launch import launch
    from trailmark.runs.store import Run
    from trailmark.tasks import get_task

    both: dict[str, Run] = {}
    for name, reflecting in (("plain", False), ("reflect", True)):
        say("Reflect-RL: a reflector learns a teacher's words, a policy learns to act on them" if reflecting
            else "SFT, then RL, of a policy alone")  # fmt: skip
        raw: dict[str, Any] = {**packaged_recipe("reflect-taxi", out / name, seed), "reflect": reflecting}
        config = resolve(raw, ReflectRecipe)
        launch(get_method("reflect"), config, resume)
        both[name] = Run.open(config.out)
    source = get_task(raw["task"]["name"], **raw["task"]["options"])
    both["reflect"].keep_evaluation("random", random_player(source, seed + 1, tiny_tokenizer()))
    evaluate_advice(both["reflect"], config, seed)
    files = {
        "random": both["reflect"].path / "evaluation/random.jsonl",
        "SFT only": both["plain"].path / "evaluation/plain-sft.jsonl",
        "SFT + RL, no reflection": both["plain"].path / "evaluation/plain-rl.jsonl",
        "SFT only, with reflection": both["reflect"].path / "evaluation/reflect-sft.jsonl",
        "Reflect-RL": both["reflect"].path / "evaluation/reflect-rl.jsonl",
        "Reflect-RL, advice off": both["reflect"].path / "evaluation/advice-off.jsonl",
        "Reflect-RL, advice shuffled": both["reflect"].path / "evaluation/advice-shuffled.jsonl",
    }
    return Results(
        files,
        both["reflect"].path,
        title="taxi, pickup: all 300 starts, one sampled play each, 95 % intervals",
        main="Reflect-RL",
    )
