"""Labels: the one-token names that a menu gives to its actions.

A policy that answers with a label makes one decision with one token, so every label must be a single token of its
model. The tokenizer decides how many there are. GPT-2 has all of the 252 `CHOICES`; SmolLM2, which splits numbers into
digits, has 62.

    alphabet(tokenizer)     the choices that are one token where they are written, right after a newline
    add_labels(lm)          make the missing ones new tokens of tokenizer and model
    pages(actions, labels)  split a list of actions that is longer than the alphabet into linked pages

A tokenizer with the new label "17" writes every separate "17" as that token from then on, also in files and maps.
"2017" keeps its tokens.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trailmark.errors import ModelError, TaskError
from trailmark.texts import encode

if TYPE_CHECKING:
    from trailmark.models.lm import LM

CHOICES: tuple[str, ...] = (*map(str, range(200)), *string.ascii_lowercase, *string.ascii_uppercase)
NEXT_PAGE, PREVIOUS_PAGE = "next page", "previous page"
FEWEST = 3  # one action, "next page" and "previous page"


def check_labels(labels: Sequence[str], fewest: int = FEWEST) -> tuple[str, ...]:
    """The labels as a tuple. Raises a TaskError if they cannot be used."""
    made = tuple(labels)
    for label in made:
        if not isinstance(label, str) or not label or label.strip(".") != label or label.split() != [label]:
            raise TaskError(f"label {label!r} cannot be used: a label is a word without spaces and outer dots.")
    if len(set(made)) < len(made):
        twice = next(x for x in made if made.count(x) > 1)
        raise TaskError(f"label '{twice}' is listed twice: each label names one action.")
    if len(made) < fewest:
        raise TaskError(
            f"{len(made)} labels are too few: at least {fewest} are needed to turn the pages of a long list."
        )
    return made


def alphabet(tokenizer: Any, choices: Sequence[str] = CHOICES, fewest: int = FEWEST) -> tuple[str, ...]:
    """The `choices` that `tokenizer` writes as one token of their own right after a newline, in their order.

    The token must be the same with and without the newline and must decode to the label. So a tokenizer with one token
    for everything unknown does not count that token.
    """
    before, found = _encode(tokenizer, "\n"), []
    for label in check_labels(choices, 0):
        alone = _encode(tokenizer, label)
        if len(alone) == 1 and _encode(tokenizer, "\n" + label) == before + alone and tokenizer.decode(alone) == label:
            found.append(label)
    if len(found) < fewest:
        raise TaskError(
            f"this tokenizer has {len(found)} of the {len(choices)} labels as single tokens, and {fewest} are needed: "
            f"add them as new tokens (trailmark.tasks.labels.add_labels) or use another model."
        )
    return tuple(found)


def add_labels(lm: LM, choices: Sequence[str] = CHOICES, seed: int = 0) -> tuple[str, ...]:
    """Add those of `choices` that are not single tokens of `lm` as new tokens, and return them. Calling it twice
    changes nothing.

    A new token starts as the mean of the pieces it was written with before, plus a little noise. Without the noise,
    "12" and "21" would be the same action, because they have the same pieces. With LoRA the new rows keep their first
    values, since only adapters are trained. The base then differs from the published one, so it is kept with the
    checkpoints.
    """
    import torch
    from tokenizers import AddedToken

    known = set(alphabet(lm.tokenizer, choices, 0))
    new = [label for label in choices if label not in known]
    if not new:
        return ()
    layers = _vocabulary_layers(lm)
    pieces = [_encode(lm.tokenizer, label) for label in new]
    sizes = [weight.float().std(dim=0).cpu() for weight in layers]
    lm.tokenizer.add_tokens([AddedToken(w, single_word=True, normalized=False) for w in new])
    still = set(new) - set(alphabet(lm.tokenizer, choices, 0))
    if still:
        raise ModelError(f"label '{min(still)}' cannot become a token of this tokenizer: choose other labels.")
    if len(lm.tokenizer) > lm.vocab:
        with torch.random.fork_rng():
            lm.base.resize_token_embeddings(len(lm.tokenizer), mean_resizing=False)
        layers = _vocabulary_layers(lm)
    if lm.adapted:
        lm.model.peft_config["default"].base_model_name_or_path = ""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight, size in zip(layers, sizes):
            for label, old in zip(new, pieces):
                start = weight[old].float().mean(dim=0).cpu()
                noise = 0.1 * size * torch.randn(weight.shape[1], generator=draw)
                weight[_encode(lm.tokenizer, label)[0]] = (start + noise).to(weight)
    return tuple(new)


def _vocabulary_layers(lm: LM) -> list[Any]:
    """The weights with a row per token: the input embedding and, if it is not tied to it, the output layer."""
    into, out = lm.base.get_input_embeddings(), lm.base.get_output_embeddings()
    if hasattr(into, "base_layer") or hasattr(out, "base_layer"):
        raise ModelError("labels cannot be added under a LoRA of the embeddings or the output layer: remove them from "
                         "model.lora.targets.")  # fmt: skip
    return [into.weight] if into.weight is out.weight else [into.weight, out.weight]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return encode(tokenizer, text)


@dataclass(frozen=True, slots=True)
class Page:
    """A label for each action. `actions` may end in NEXT_PAGE or PREVIOUS_PAGE."""

    labels: tuple[str, ...]
    actions: tuple[str, ...]


def pages(actions: Sequence[str], labels: Sequence[str]) -> tuple[Page, ...]:
    """The actions in order under the first labels. If there are more actions than labels, they are split into pages.

    Every page but the last ends with "next page" under the last label. Every page but the first has "previous page"
    under the label before that. Each page has `len(labels) - 2` places for actions. An empty list is one empty page.
    """
    actions, labels = tuple(actions), tuple(labels)
    if len(actions) <= len(labels):
        return (Page(labels[: len(actions)], actions),)
    if len(labels) < FEWEST:
        raise TaskError(f"{len(actions)} actions do not fit {len(labels)} labels: pages need at least {FEWEST} labels.")
    room, made = len(labels) - 2, []
    for start in range(0, len(actions), room):
        here = actions[start : start + room]
        ways = [(labels[-2], PREVIOUS_PAGE)] if start else []
        ways += [(labels[-1], NEXT_PAGE)] if start + room < len(actions) else []
        made.append(Page(labels[: len(here)] + tuple(w for w, _ in ways), here + tuple(a for _, a in ways)))
    return tuple(made)


def shuffled(labels: Sequence[str], count: int, draw: random.Random) -> tuple[str, ...]:
    """`count` distinct labels in random order; all labels in random order if `count` is larger."""
    return tuple(draw.sample(labels, min(count, len(labels))))


_LINE = re.compile(r"^((?:Action )?)(\w{1,3})([.:)] )", re.MULTILINE)


def menu_labels(menu: str) -> tuple[str, ...]:
    """The labels of a menu's lines, written "7. go", "7: go" or "Action 7: go"."""
    return tuple(m[2] for m in _LINE.finditer(menu))


def relabel(menu: str, new: Mapping[str, str]) -> str:
    """The menu with other labels before its actions."""
    return _LINE.sub(lambda m: m[1] + new.get(m[2], m[2]) + m[3], menu)
