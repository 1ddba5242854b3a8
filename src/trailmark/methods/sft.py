"""Supervised fine-tuning on conversations: the first stage of most methods, and the simplest method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trailmark import chat
from trailmark.errors import DataError
from trailmark.formats import turns
from trailmark.formats.messages import read_rows
from trailmark.formats.reflect import read_texts
from trailmark.learn.learner import Learner, Update
from trailmark.memory import need_rows
from trailmark.methods.base import Method
from trailmark.methods.configs import SftRecipe
from trailmark.models.load import load_model
from trailmark.models.readout import Readout
from trailmark.objectives import Sft
from trailmark.runs.store import Run
from trailmark.tasks.labels import CHOICES
from trailmark.types import Sample, Tokens


class SftMethod(Method):
    """Trains on the assistant's messages, including their end-of-turn token. Everything else is context."""

    Config, imitates = SftRecipe, True

    def __init__(self, config: SftRecipe, run: Run):
        super().__init__(config, run)
        need_rows(config.batch, "batch")
        lm = load_model(config.model, labels_of(config.data))
        self.learner = Learner({"policy": lm}, config.learner, total=config.steps)
        self.samples = conversation_samples(lm.tokenizer, config.data, config.chat, lm.context)
        self.held_out = (
            conversation_samples(lm.tokenizer, config.eval_data, config.chat, lm.context) if config.eval_data else []
        )

    def updates(self, step: int) -> Iterator[Update]:
        rows = batch_rows(len(self.samples), self.config.batch, step, self.config.seed)
        yield Update([s for r in rows for s in self.samples[r]], Sft())

    def evaluate(self, step: int) -> Mapping[str, float]:
        flat = [s for row in self.held_out for s in row]
        if not flat:
            return {}
        scored = self.learner.fill(flat, logp=Readout("", law=False))
        total = sum(float((s.streams["logp"] * s.streams["weight"]).sum()) for s in scored)
        return {"nll": -total / sum(s.mass["weight"] for s in flat)}

    @classmethod
    def imitated(cls, config: SftRecipe, tokenizer: Any, context: int) -> list[list[Sample]]:
        return conversation_samples(tokenizer, config.data, config.chat, context)


def conversation_samples(tokenizer: Any, path: str, use_chat: bool, context: int) -> list[list[Sample]]:
    """One list of samples per row of the file (a chat template that rewrites history needs several). An error if a row
    does not fit the model's context."""
    out, long = [], []
    for number, row in _laid(tokenizer, path, use_chat):
        made = []
        for tokens, spans in row:
            weight = np.zeros(len(tokens))
            for start, end in spans:
                weight[start:end] = 1.0
            mass = {"weight": float(weight.sum())}
            made.append(Sample(np.array(tokens), {"weight": weight}, mass, episode=f"{path}:{number}"))
        out.append(made)
        if (size := max(len(s.tokens) for s in made)) > context:
            long.append((number, size))
    if long:
        (first, size), most = long[0], max(n for _, n in long)
        raise DataError(
            f"has {size} tokens, and the model's context is {context}. {len(long)} of {len(out)} rows are too long, "
            f"and rows are never cut: set model.shape.context={most}, choose a model with such a context, or leave "
            "these rows out.",
            path,
            first,
        )
    return out


def _laid(
    tokenizer: Any, path: str, use_chat: bool
) -> Iterator[tuple[int, list[tuple[Tokens, list[tuple[int, int]]]]]]:
    """For each row: its line, and its token sequences with the spans that are trained."""
    if (texts := read_texts(path)) is not None:
        reader = turns.Reader(tokenizer, "policy", turns.Starts())
        for line, prompt, response, ends in texts:
            turn = turns.plain(reader, prompt, response, end=ends)
            tokens = (*turn.prompt, *turn.tokens)
            yield line, [(tokens, [(len(turn.prompt), len(tokens))])]
        return
    for number, messages in read_rows(path):
        try:
            told = messages if use_chat else as_written(tokenizer, messages)
            laid = chat.sequences(tokenizer, told, template="own" if use_chat else None)  # type: ignore[arg-type]
        except DataError as problem:
            raise DataError(str(problem), path, number) from problem
        yield number, [(seq.tokens, [(span.start, span.end) for span in seq.spans]) for seq in laid]


def labels_of(path: str) -> tuple[str, ...]:
    """The labels of several digits in Reflect-RL's texts. A tiny model has each as one token, as in play."""
    texts = read_texts(path) or []
    return tuple(sorted({response for _, _, response, ends in texts if not ends and response in CHOICES[10:200]}))


def as_written(tokenizer: Any, messages: chat.Messages) -> chat.Messages:
    """Plain text as the model sees it. The first message may contain a template's headers, and a response its own end
    token."""
    eos = tokenizer.eos_token or ""
    told = [{**m, "content": m["content"].removesuffix(eos)} if m["role"] == "assistant" else m for m in messages]
    if messages[0]["role"] != "assistant":
        told[0] = {**messages[0], "content": chat.as_written(tokenizer, messages[0]["content"])}
    return told


def batch_rows(rows: int, batch: int, step: int, seed: int) -> list[int]:
    """The rows of step `step` (from 1). Epochs are seeded permutations, one after the other. So the step number alone
    gives the position in the data, and a resumed run continues where it stopped."""
    wanted = range((step - 1) * batch, step * batch)
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(rows) for epoch in {i // rows for i in wanted}}
    return [int(orders[i // rows][i % rows]) for i in wanted]
