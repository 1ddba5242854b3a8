"""`trailmark quickstart --method oreo`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from trailmark.methods.quickstart import Results, file, trained

SUMS = 4000  # worked ones that OREO's first model imitates
# The numbers are those of docs/studies/oreo-arith.md.
OREO_NOTE = (
    "What this shows: OREO and rejection sampling learn much from answers of SFT. It does not show which is better: "
    "over three seeds they cannot be told apart (-0.033 [-0.085, +0.018]). Nor is a beam by OREO's value better than "
    "OREO's greedy answer, because after training little is left to choose (-0.013 [-0.077, +0.050]). A value is for "
    "policies that still waver: drawn answers of SFT are right in 0.687, and in 0.793 with a beam of 3."
)


def quickstart(out: Path, seed: int, resume: bool, say: Callable[[str], None]) -> Results:
    """OREO on sums: a model imitates a teacher who forgets carries, its answers are kept, right or wrong, and a policy
    and a value learn from them. Rejection sampling learns from the same answers."""
    from trailmark.data import gold
    from trailmark.runs.store import segments
    from trailmark.seats.model_names import newest_checkpoint

    lessons, run_of = out / "arith.jsonl", partial(trained, out, seed, resume)
    if not lessons.exists():
        out.mkdir(parents=True, exist_ok=True)
        gold.make("arith", lessons, {"level": 2, "careless": 0.7}, SUMS, "train", seed)
    say("a tiny model imitates a teacher who forgets seven of ten carries")
    sft = run_of("arith-sft", "sft", file("data", lessons), "steps=700")
    start = file("model.name", newest_checkpoint(sft) / "policy")
    say("it answers 1,000 questions eight times; all answers are kept, right or wrong")
    answers = file("data", segments(run_of("oreo-arith-data", "data", start) / "episodes")[-1])
    say("rejection sampling: it imitates the right ones")
    imitates = ("objective=rejection", "beta=null", "learner.optim.lr=3e-4", "final.start=true")
    other = run_of("preference-arith", "rejection", start, answers, *imitates)
    say("OREO: a policy and a value learn from all of them")
    run = run_of("oreo-arith", "oreo", start, answers, "final.search=[beam:3]")
    files = {
        "SFT": other / "evaluation/start.jsonl",
        "rejection sampling": segments(other / "evaluation")[-1],
        "OREO": segments(run / "evaluation")[-1],
        "OREO, beam of 3 at temperature 1": run / "evaluation/beam-3.jsonl",
    }
    return Results(
        files,
        run,
        title="200 sums such as 7-2+9, 95 % intervals",
        main="OREO",
        metrics=("success",),
        read_next="docs/oreo.md, docs/studies/oreo-arith.md",
        note=OREO_NOTE,
    )
