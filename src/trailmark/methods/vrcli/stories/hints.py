"""Talks with a planted hint, and lessons that make a tiny model able to use it: VR-CLI at a size for laptops.

    Guests as they came: owl, hen, cat, fox. Tell of one of them.        The fox sleeps.

The gold text is always about the guest who came last. Nobody is told so. The lessons teach a tiny model to write such a
text about any guest, to follow a plan that names one (most of the time), and to name any guest when it is asked to
reason. It then reads the gold texts, frozen, and is the start of the policy. A plan that names the right guest makes
the gold text likelier. One that names another guest of the same list, which is as long and as much of a copy, makes it
less likely. So what is paid is the choice.

    DIR/talks.jsonl      the rows: conversations whose last message is the gold text. `last` is the guest who came last,
                         `some` is any guest, for plans to compare with
    DIR/train.jsonl, …   the same as files to train on (`setup.py`)
    DIR/lessons.jsonl    conversations for `method: sft`, which make the reader
    DIR/tokenizer/       whole words and the fixed sentences of the prompts are tokens, so that a prompt is short
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.data.stages import Counts
from trailmark.methods.vrcli.stories.setup import NO_FILTERS, SPLITS, Setup, make, write_lines
from trailmark.tasks.stories.prompts import MARKER, baseline, pieces, reasoning, with_plan
from trailmark.tasks.stories.rows import TalkRow

ANIMALS = ("ant", "bee", "cat", "cow", "crab", "deer", "dog", "fox", "hen", "lion", "owl", "pig")
GUESTS = 4
FILES = ("talks.jsonl", *(f"{kind}{split}.jsonl" for kind in ("", "sft_") for split in SPLITS), "statistics.json",
         "lessons.jsonl", "tokenizer/tokenizer.json")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hints:
    """How many rows and lessons are made. `trust` is the share of lessons in which the plan is right."""

    train: int = 512
    val: int = 64
    test: int = 64
    lessons: int = 9000
    trust: float = 0.9
    seed: int = 0


def question(guests: Sequence[str]) -> str:
    return f"Guests as they came: {', '.join(guests)}. Tell of one of them."


def tale(animal: str) -> str:
    return f"The {animal} sleeps."


def write(out: Path, plan: Hints) -> Counts:
    """Write all files into `out`. The same seed gives the same bytes, and no list of guests is in two splits."""
    draw = random.Random(f"hints {plan.seed}")
    sizes = {"train": plan.train, "val": plan.val, "test": plan.test}
    seen: set[tuple[str, ...]] = set()
    talks = []
    for split, size in sizes.items():
        for k in range(size):
            while (guests := tuple(draw.sample(ANIMALS, GUESTS))) in seen:
                pass
            seen.add(guests)
            gold = {"role": "assistant", "content": tale(guests[-1])}
            messages = [{"role": "user", "content": question(guests)}, gold]
            some = random.Random(f"some guest {plan.seed} {split} {k}").choice(guests)
            talks.append({"id": f"{split}-{k}", "messages": messages, "split": split, "last": guests[-1], "some": some})
    write_lines(out / "talks.jsonl", talks)
    counts = make(out / "talks.jsonl", out, Setup(filters=NO_FILTERS, by="given", seed=plan.seed))
    lessons = [lesson(draw, k, plan.trust) for k in range(plan.lessons)]
    write_lines(out / "lessons.jsonl", lessons)
    counts.kept["lessons"] = len(lessons)
    tokenizer().save_pretrained(out / "tokenizer")
    return counts


def lesson(draw: random.Random, k: int, trust: float) -> dict[str, Any]:
    """In turn: a text about any guest, a text after a plan, an answer that names any guest."""
    guests = draw.sample(ANIMALS, GUESTS)
    row = TalkRow("", ({"role": "user", "content": question(guests)},), tale(draw.choice(guests)))
    parts, plan = pieces(row), draw.choice(guests)
    if k % 3 == 0:
        asked, answer = baseline(parts), row.gold
    elif k % 3 == 1:
        guest = plan if draw.random() < trust else draw.choice([g for g in guests if g != plan])
        asked, answer = with_plan(parts, plan), tale(guest)
    else:
        asked, answer = reasoning(parts), f"{MARKER} {plan}"
    return {"messages": [*asked, {"role": "assistant", "content": answer}]}


def tokenizer() -> Any:
    """A byte tokenizer with further tokens: the words, and the sentences that are the same in every prompt."""
    from trailmark.models.tiny import tiny_tokenizer

    some = pieces(TalkRow("", ({"role": "user", "content": ""},), ""))
    asked = ["Guests as they came: ", ", ", ". Tell of one of them.", some.reason, some.plan_heading]
    answers = ["user", "assistant", "The ", " sleeps.", f"{MARKER} "]
    return tiny_tokenizer([*asked, *answers, *ANIMALS])
