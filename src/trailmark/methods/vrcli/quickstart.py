"""`trailmark quickstart --method vrcli`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from trailmark.methods.quickstart import Results, file, trained


def quickstart(out: Path, seed: int, resume: bool, say: Callable[[str], None]) -> Results:
    """VR-CLI on rows with a planted hint: a tiny reader learns to follow plans, a policy learns to write useful ones,
    and what could explain the improvement otherwise stands beside it."""
    from trailmark.methods.vrcli.stories.hints import Hints, write
    from trailmark.seats.model_names import newest_checkpoint

    rows, run_of = out / "rows", partial(trained, out, seed, resume)
    if not (rows / "tokenizer" / "tokenizer.json").is_file():  # written last
        rows.mkdir(parents=True, exist_ok=True)
        write(rows, Hints(seed=seed))
    say("a tiny model learns to write about any guest, and to follow a plan")
    reader = run_of("vrcli-hint-scorer", "reader", file("data", rows / "lessons.jsonl"),
                     file("model.tokenizer", rows / "tokenizer"))  # fmt: skip
    start = file("model.name", newest_checkpoint(reader) / "policy")
    say("SFT: a copy of it imitates the gold texts")
    sft = run_of("vrcli-hint-sft", "sft", file("data", rows / "sft_train.jsonl"),
                  file("eval_data", rows / "sft_val.jsonl"), start)  # fmt: skip
    say("VR-CLI: a copy of it writes plans, and is paid if they make the gold texts likelier to the frozen reader")
    run = run_of("vrcli-hint", "vrcli", file("data", rows / "train.jsonl"),
                  file("task.options.val", rows / "val.jsonl"), start, file("final.readers.sft", sft))  # fmt: skip
    files = {
        "random words of the prompt": run / "evaluation/random-words.jsonl",
        "VR-CLI's plan for another row": run / "evaluation/other-plan.jsonl",
        "before training": run / "evaluation/start.jsonl",
        "VR-CLI": run / "evaluation/trained.jsonl",
        "SFT, no plan": run / "evaluation/sft.jsonl",
    }
    return Results(
        files,
        run,
        title="64 held-out rows; reward is the improvement of perplexity (0.25: 25 %), 95 % intervals",
        main="VR-CLI",
        metrics=("reward",),
        read_next="docs/vrcli.md, docs/studies/vrcli-laptop.md",
    )
