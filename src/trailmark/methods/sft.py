"""Supervised fine-tuning on conversations: the first stage of most methods, and the simplest method there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from pydantic import Field, PositiveInt

from trailmark import chat
from trailmark.config import CheckpointConfig, RunConfig
from trailmark.errors import DataError
from trailmark.formats.messages import read_rows
from trailmark.learn.forward import Readout
from trailmark.learn.learner import Learner, Update
from trailmark.learn.loop import Plain, train
from trailmark.models.load import load_model
from trailmark.objectives import Sft
from trailmark.store import Run
from trailmark.types import Sample


class Config(RunConfig):
    data: str = Field(description="JSONL of messages, or of prompt and response")
    eval_data: str | None = Field(None, description="JSONL to evaluate on")
    batch: PositiveInt = Field(8, description="conversations in one step")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(metric="eval/nll", mode="min"), description="what is kept")
    chat: bool = Field(True, description="use the chat template; false: plain text, as it is")


class SftMethod(Plain):
    """Trains on what the assistant said, its end-of-turn token included; everything else is context."""

    def __init__(self, config: Config, run: Run):
        self.config = config
        lm = load_model(config.model)
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


def conversation_samples(tokenizer: object, path: str, use_chat: bool, context: int) -> list[list[Sample]]:
    """One list of samples per row of the file (a template that rewrites history needs several)."""
    out = []
    for number, messages in read_rows(path):
        row = []
        try:
            told = messages if use_chat else as_written(tokenizer, messages)
            laid = chat.sequences(tokenizer, told, template="own" if use_chat else None)  # type: ignore[arg-type]
        except DataError as problem:
            raise DataError(str(problem), path, number) from problem
        for seq in laid:
            weight = np.zeros(len(seq.tokens))
            for span in seq.spans:
                weight[span.start : span.end] = 1.0
            if len(seq.tokens) > context:
                raise DataError(
                    f"has {len(seq.tokens)} tokens, and the model's context is {context}: shorten it or leave it out",
                    path,
                    number,
                )
            row.append(
                Sample(
                    np.array(seq.tokens),
                    {"weight": weight},
                    {"weight": float(weight.sum())},
                    episode=f"{path}:{number}",
                )
            )
        out.append(row)
    return out


def as_written(tokenizer: Any, messages: chat.Messages) -> chat.Messages:
    """Plain text as a model sees it: its first message may bring a template's headers, a response its own eos."""
    eos = tokenizer.eos_token or ""
    told = [{**m, "content": m["content"].removesuffix(eos)} if m["role"] == "assistant" else m for m in messages]
    if messages[0]["role"] != "assistant":
        told[0] = {**messages[0], "content": chat.as_written(tokenizer, messages[0]["content"])}
    return told


def batch_rows(rows: int, batch: int, step: int, seed: int) -> list[int]:
    """The rows of step `step` (from 1): epochs are seeded permutations laid end to end, so that a position in the data is
    the step number alone and a resumed run reads on where it stopped."""
    wanted = range((step - 1) * batch, step * batch)
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(rows) for epoch in {i // rows for i in wanted}}
    return [int(orders[i // rows][i % rows]) for i in wanted]


def run(config: Config, run: Run, resume: bool = False) -> dict[str, float]:
    return train(SftMethod(config, run), config, run, resume)
