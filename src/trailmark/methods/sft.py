"""Supervised fine-tuning on conversations: the first stage of most methods, and the simplest method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trailmark import chat
from trailmark.errors import DataError
from trailmark.formats import turns
from trailmark.formats.conversations import conversation_of, rows_here, unread
from trailmark.formats.marked_text import holds_texts, one_kind, text_of
from trailmark.formats.on_demand import OnDemand
from trailmark.formats.rows import Row, RowFile
from trailmark.learn.learner import Learner, Update
from trailmark.memory import need_rows
from trailmark.methods.base import Method
from trailmark.methods.batches import Batches
from trailmark.methods.configs import SftRecipe
from trailmark.models.load import load_model
from trailmark.models.readout import Readout
from trailmark.objectives.sft import Sft
from trailmark.runs.data_files import must_be_file
from trailmark.runs.store import Run
from trailmark.tasks.labels import CHOICES
from trailmark.types import Sample, Tokens

Trained = Literal["answers", "last", "all"]


class SftMethod(Method):
    """Trains on the assistant's messages, including their end-of-turn token. Everything else is context. `trained` may
    narrow this to the last message, or widen it to all tokens."""

    Config, imitates = SftRecipe, True

    def __init__(self, config: SftRecipe, run: Run):
        need_rows(config.batch, "batch")
        lm = load_model(config.model, labels_of(config.data))
        read = lambda path: conversation_samples(lm.tokenizer, path, config.chat, lm.context, config.trained)
        self.samples = read(config.data)
        self.batches = Batches(self.samples, config.batch, config.seed, config.steps, config.epochs)
        super().__init__(config.model_copy(update={"steps": self.batches.steps}), run)
        self.learner = Learner({"policy": lm}, config.learner, total=self.config.steps)
        self.held_out = read(config.eval_data) if config.eval_data else []

    @classmethod
    def check(cls, config: SftRecipe) -> list[str]:
        must_be_file(Path(config.data), "data")
        return [f"data: {config.data}, {rows_here(config.data)}"]

    def updates(self, step: int) -> Iterator[Update]:
        yield Update(self.unscored_samples(step), Sft())

    def unscored_samples(self, step: int) -> list[Sample]:
        return [s for row in self.batches.take(step) for s in row]

    def evaluate(self, step: int) -> Mapping[str, float]:
        flat = [s for row in self.held_out for s in row]
        if not flat:
            return {}
        scored = self.learner.fill(flat, logp=Readout("", law=False))
        total = sum(float((s.streams["logp"] * s.streams["weight"]).sum()) for s in scored)
        return {"nll": -total / sum(s.mass["weight"] for s in flat)}

    @classmethod
    def imitated(cls, config: SftRecipe, tokenizer: Any, context: int) -> Sequence[list[Sample]]:
        return conversation_samples(tokenizer, config.data, config.chat, context, config.trained)


def conversation_samples(
    tokenizer: Any, path: str, use_chat: bool, context: int, trained: Trained = "answers"
) -> Sequence[list[Sample]]:
    """One list of samples per row of the file (a chat template that rewrites history needs several), made when it is
    asked for. Every row is checked here. An error if a row does not fit the model's context; one that surely fits is
    not encoded to know that."""
    rows = RowFile(path)
    laid = _Laid(tokenizer, path, use_chat, trained)
    if len(rows) and holds_texts(rows[0]):
        laid.texts = True
    long: list[tuple[int, int]] = []
    kinds = [0, 0]  # actions and thoughts

    def look(i: int, row: Row) -> None:
        number, content, most = laid.read(row)
        if laid.texts:
            kinds[content[3]] += 1
        if most is None or most > context:
            made = laid.samples(number, content)
            out.keep(i, made)
            if (size := max(len(s.tokens) for s in made)) > context:
                long.append((number, size))

    def make(i: int) -> list[Sample]:
        row = rows[i]
        number, content, _ = laid.read(row)
        made = laid.samples(number, content)
        if max(len(s.tokens) for s in made) > context:  # the bound was wrong: never cut a row
            raise row.bad(f"has more tokens than the model's context of {context}.")
        return made

    out = OnDemand(len(rows), make, lambda made: sum(600 + 16 * len(s.tokens) for s in made))
    rows.visit(look, refused=None if laid.texts else unread)
    one_kind(kinds[1], kinds[0], path)
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


class _Laid:
    """How the rows of a file become tokens with the spans that are trained."""

    def __init__(self, tokenizer: Any, path: str, use_chat: bool, trained: Trained):
        self.tokenizer, self.path, self.use_chat, self.texts = tokenizer, path, use_chat, False
        self.trained = trained
        self.reader = turns.Reader(tokenizer, "policy", turns.Starts())
        self.template = "own" if use_chat else None
        self.bounds = chat.ChatBounds(tokenizer, self.template)

    def read(self, row: Row) -> tuple[int, Any, int | None]:
        """The line, what a row says, and how many tokens that is at most, if it can be said."""
        if self.texts:
            texts = text_of(row)
            sizes = [self.bounds.texts.most(text) for text in texts[1:3]]
            return texts[0], texts, None if None in sizes else sum(n for n in sizes if n is not None) + 2
        messages = conversation_of(row)
        if self.trained == "last":
            _must_answer(row, messages[-1])
        return row.line or 0, messages, self.bounds.most(messages)

    def samples(self, number: int, content: Any) -> list[Sample]:
        out = []
        for tokens, spans in self.sequences(number, content):
            weight = np.zeros(len(tokens))
            for start, end in [(1, len(tokens))] if self.trained == "all" else spans:
                weight[start:end] = 1.0
            mass = {"weight": float(weight.sum())}
            out.append(Sample(np.array(tokens), {"weight": weight}, mass, episode=f"{self.path}:{number}"))
        return out

    def sequences(self, number: int, content: Any) -> list[tuple[Tokens, list[tuple[int, int]]]]:
        if self.texts:
            _, prompt, response, ends = content
            turn = turns.plain(self.reader, prompt, response, end=ends)
            tokens = (*turn.prompt, *turn.tokens)
            return [(tokens, [(len(turn.prompt), len(tokens))])]
        try:
            messages = content if self.use_chat else as_written(self.tokenizer, content)
            laid = chat.sequences(self.tokenizer, messages, template=self.template)  # type: ignore[arg-type]
        except DataError as problem:
            problem_text = str(problem)
            if self._system_alone(content):
                problem_text = f"{problem_text.rstrip('.')}{chat.NO_SYSTEM}: make {chat.NO_ROLE}."
            raise DataError(problem_text, self.path, number) from problem
        if self.trained == "last":  # the sequence that ends with the last message
            laid = [s for s in laid if s.spans[-1].message == len(content) - 1]
            return [(s.tokens, [(s.spans[-1].start, s.spans[-1].end)]) for s in laid]
        return [(seq.tokens, [(span.start, span.end) for span in seq.spans]) for seq in laid]


    def _system_alone(self, messages: chat.Messages) -> bool:
        first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        return self.use_chat and chat.Refusals(self.tokenizer).system_alone(messages[:first])


def _must_answer(row: Row, last: Mapping[str, Any]) -> None:
    """Refuse a conversation whose last message is not an answer to learn."""
    key = "messages" if isinstance(row.value, dict) and "messages" in row.value else "response"
    if last["role"] != "assistant":
        raise row.bad(
            f"the last message is from '{last['role']}', and trained: last needs one from 'assistant': remove what "
            "follows the assistant's message, or set trained: answers.",
            key,
        )
    if not last["content"].strip():
        raise row.bad("the last message, the gold text, is empty: there is nothing to learn.", key)


def labels_of(path: str) -> tuple[str, ...]:
    """The labels of several digits in Reflect-RL's texts. A tiny model has each as one token, as in play."""
    rows = RowFile(path)
    if not len(rows) or not holds_texts(rows[0]):
        return ()
    found: set[str] = set()

    def look(_: int, row: Row) -> None:
        response, ends = text_of(row)[2:]
        if not ends and response in CHOICES[10:200]:
            found.add(response)

    rows.visit(look)
    return tuple(sorted(found))


def as_written(tokenizer: Any, messages: chat.Messages) -> chat.Messages:
    """Plain text as the model sees it. The first message may contain a template's headers, and a response its own end
    token."""
    eos = tokenizer.eos_token or ""
    out = [{**m, "content": m["content"].removesuffix(eos)} if m["role"] == "assistant" else m for m in messages]
    if messages[0]["role"] != "assistant":
        out[0] = {**messages[0], "content": chat.as_written(tokenizer, messages[0]["content"])}
    return out
