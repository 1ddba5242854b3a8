"""A classification head as a score: the probability of some classes at the end of every step, and one number over all
steps.

LPR's process reward is such a head: four classes (how many of three completions were right), the classes {2, 3}, and
the product over steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from trailmark.errors import ModelError
from trailmark.types import Annotation, Episode

if TYPE_CHECKING:
    import numpy as np

    from trailmark.models.layout import Shape
    from trailmark.models.lm import LM

CLASSES = "classes"  # the head of `objectives.classify.Classify`
Over = Literal["last", "min", "mean", "product", "geomean", "sum"]
Outputs = Mapping[tuple[str, int], Any]  # (episode, turn) -> an array [steps, classes], or [steps] of one number


def over_steps(values: Sequence[float], over: Over) -> float:
    """One number for all steps. An error if there are no steps, because an empty product would be the best possible
    score."""
    if not values:
        raise ModelError(f"no step to take the {over} over: leave out what has no steps.")
    if over == "last":
        return values[-1]
    if over == "min":
        return min(values)
    if over == "product":
        return math.prod(values)
    if over == "geomean":
        if min(values) < 0:
            raise ModelError(f"a geometric mean needs numbers that are not negative, and one is {min(values):g}.")
        return math.exp(sum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0
    return sum(values) if over == "sum" else sum(values) / len(values)


def class_head(lm: LM) -> str:
    """The head to read if none is named: `classes`, which the objective `classify` trains; else `step`; else the only
    head."""
    if found := next((name for name in (CLASSES, "step") if name in lm.heads), ""):
        return found
    return next(iter(lm.heads)) if len(lm.heads) == 1 else CLASSES


def check_classes(lm: LM, head: str, classes: Sequence[int] | None) -> None:
    """Raise an error if the model lacks the head, or the head lacks a class."""
    if head not in lm.heads:
        raise ModelError(
            f"model '{lm.name}' has no head '{head or 'value'}' to read values from (heads: "
            f"{', '.join(lm.heads) or 'none'})."
        )
    made: Any = lm.heads[head]
    outputs = made.weight.shape[0]
    wrong = [c for c in classes or () if not 0 <= c < outputs]
    if wrong or classes == () or len(set(classes or ())) != len(classes or ()):
        raise ModelError(
            f"head '{head}' of '{lm.name}' has classes 0 to {outputs - 1}; {list(classes or ())} is no set of some of "
            "them."
        )


def class_numbers(out: np.ndarray, classes: Sequence[int] | None = None, raw: bool = False) -> np.ndarray:
    """From a head's output [N] or [N, C] to [N]: the single number as it is, or the probability of `classes` (None: of
    the last class). `raw`: the head's number for the last of these classes."""
    import torch

    numbers = torch.as_tensor(out).double()
    if numbers.ndim == 1:
        return numbers.numpy()
    if raw:
        return numbers[..., max(classes) if classes else -1].numpy()
    p = numbers.softmax(-1)
    return (p[..., -1] if classes is None else p[..., list(classes)].sum(-1)).numpy()


def step_outputs(
    lm: LM,
    episodes: Sequence[Episode],
    head: str | None = None,
    seat: str = "policy",
    shape: Shape = "auto",
    amp: bool = False,
) -> dict[tuple[str, int], np.ndarray]:
    """(episode, turn) -> what the head says at the end of every step of the turn, [steps, outputs]. All steps of a turn
    are read in one pass. A turn without steps is left out."""
    import numpy as np

    from trailmark.models.forward import fill, pack
    from trailmark.models.readout import Readout
    from trailmark.types import Sample

    head = head or class_head(lm)
    check_classes(lm, head, None)
    samples, ends, whose = [], [], []
    for e in episodes:
        for i, turn in enumerate(e.turns):
            if turn.seat == seat and turn.steps:
                row = np.array(e.sequence(i), np.int64)
                ends.append([len(row) - len(turn.tokens) + end - 1 for _, end in turn.steps])
                read = np.zeros(len(row), bool)
                read[ends[-1]] = True
                samples.append(Sample(row, {"read": read}))
                whose.append((e.id, i))
    if not samples:
        return {}
    models = {"judge": lm}
    lm.train(False)
    wanted = Readout("head", "head", model="judge", head=head, at="after", where="read")
    filled = fill(models, samples, pack(models, samples, shape), [wanted], amp)
    return {key: np.asarray(s.streams["head"][at]) for key, s, at in zip(whose, filled, ends)}


def step_scores(
    lm: LM,
    episodes: Sequence[Episode],
    head: str | None = None,
    classes: Sequence[int] | None = None,
    seat: str = "policy",
    name: str = "step_score",
    shape: Shape = "auto",
    amp: bool = False,
) -> list[Annotation]:
    """One annotation per turn of the seat that has steps: a number for each step, read at the step's last token. `head`
    None: the one that `classify` trains (`class_head`)."""
    from trailmark.score.tokens import source_of

    head = head or class_head(lm)
    check_classes(lm, head, classes)
    read = step_outputs(lm, episodes, head, seat, shape, amp)
    source = f"{source_of(lm)} {head}" + (f" {sorted(classes)}" if classes is not None else "") if read else ""
    return [
        Annotation(e, name, "step", tuple(class_numbers(out, classes).tolist()), i, source)
        for (e, i), out in read.items()
    ]


def must_share_tokenizer(lm: LM, tokenizer: Any, name: str) -> None:
    """Refuse a model of steps that reads other tokens than the policy writes."""
    if lm.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"the value model {name} has another tokenizer than the policy: it would not read what that writes."
        )


# --- kept --------------------------------------------------------------------------------------------------------


def output_notes(outputs: Outputs, source: str) -> list[Annotation]:
    """What a head said at the end of each step as annotations: `class_0`, `class_1`, …"""
    notes = []
    for (e, i), out in outputs.items():
        table = out[:, None] if out.ndim == 1 else out
        notes += [
            Annotation(e, f"class_{c}", "step", tuple(map(float, table[:, c])), i, source)
            for c in range(table.shape[1])
        ]
    return notes


def outputs_of(notes: Sequence[Annotation]) -> dict[tuple[str, int], np.ndarray]:
    """The way back from `output_notes`."""
    import numpy as np

    columns: dict[tuple[str, int], dict[int, tuple[float, ...]]] = {}
    for a in notes:
        if a.name.startswith("class_"):
            columns.setdefault((a.episode, a.turn or 0), {})[int(a.name.removeprefix("class_"))] = a.values
    out = {}
    for key, found in columns.items():
        table = np.array([found[c] for c in sorted(found)]).T
        out[key] = table[:, 0] if table.shape[1] == 1 else table
    return out
