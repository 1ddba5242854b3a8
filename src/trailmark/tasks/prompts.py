"""A file of prompts with one decision each, and a judge of your own. One line of JSON is one row:

    {"prompt": "What is 2 + 3?", "gold": "5"}
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}], "id": "why"}

A prompt is a text, given to the model unchanged, or the messages of a conversation. The judge gets the whole row as
`row`, with all its other keys.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trailmark.chat import must_render, render
from trailmark.errors import DataError, TaskError
from trailmark.formats.rows import parse_line
from trailmark.runs.data_files import must_be_file
from trailmark.score.base import Judge
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.tasks.row_files import file_text
from trailmark.texts import encode
from trailmark.types import Task

FRAME = 64  # more bytes than a chat template writes around a message


class Prompts(TaskSource):
    """path   a file of JSON lines
    test   share of the prompts in split "test", at least one. The prompts themselves decide, so the order of the lines
           does not matter. If rows have a `split`, it is used instead: "train", "val" or "test".
    val    a second file, whose rows are split "val"; empty: none
    chat   whether a prompt that is a text becomes a message of the user
    system whether system messages are shown; false: they are left out, for chat templates that refuse them
    and, as for every task that cannot judge itself, `reward`: the judge, for example `my_file.py:score`

    Splits are "train", "val", "test" and "all". `n=None` gives a split in the order of the file. Otherwise `n` rows of
    it are drawn by seed, each once (all of them, if there are fewer)."""

    name = "prompts"
    markov = True
    finite = True
    judged = True

    def __init__(self, path: str, test: float = 0.1, chat: bool = False, val: str = "", system: bool = True):
        if not 0 <= test < 1:
            raise TaskError(f"task 'prompts' needs 0 <= test < 1, not {test}.")
        self.path, self.test, self.chat, self.system = Path(path), test, chat, system
        self.judge: Judge | None = None
        self.rows = read_prompts(self.path)
        self.splits = self._split()
        self.files = dict.fromkeys(self.splits, self.path)  # where each row stands
        for t in read_prompts(Path(val)) if val else ():
            if t.id in self.splits:
                raise DataError(f"row '{t.id}' is in {self.path} too.", val)
            self.rows.append(t)
            self.splits[t.id], self.files[t.id] = "val", Path(val)
        for t in self.rows if not system else ():
            if not isinstance(t.data["prompt"], str) and all(m["role"] == "system" for m in t.data["prompt"]):
                raise DataError(f"row '{t.id}' has system messages alone, and system=false leaves them out.",
                                self.files[t.id])  # fmt: skip

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> list[Task]:
        if split not in ("train", "val", "test", "all"):
            raise TaskError(f"task 'prompts' has the splits train, val, test and all, not '{split}'.")
        found = [t for t in self.rows if split in ("all", self.splits[t.id])]
        if not found:
            key = "val" if split == "val" else "test"
            raise TaskError(
                f"{self.path} has no row for split '{split}': give it more rows, or change task.options.{key}."
            )
        if n is None:
            return found
        return random.Random(f"prompts {split} {seed}").sample(found, min(n, len(found)))

    def make(self) -> PromptWorld:
        return PromptWorld(self.chat, self.system)

    def must_render(self, tokenizer: Any, tasks: Sequence[Task]) -> None:
        """Refuse a row whose messages the chat template of a model refuses: its plays would fail one by one."""
        told = ((t, self.make().reset(t).messages) for t in tasks)
        must_render(tokenizer, ((f"row '{t.id}'", self.files.get(t.id, self.path), m) for t, m in told if m))

    def must_fit(self, tokenizer: Any, longest: int, tasks: Sequence[Task] | None = None) -> None:
        """Refuse a prompt that leaves no room for an answer in sequences of `longest` tokens. A text has at most as
        many tokens as bytes, so most prompts need not be encoded to know that they fit."""
        for t in self.tasks("train") if tasks is None else tasks:
            shown = self.make().reset(t)
            texts = [m["content"] for m in shown.messages] or [shown.text]
            if sum(len(text.encode()) + FRAME for text in texts) < longest:
                continue
            if shown.messages:
                own = "own" if tokenizer.chat_template else None
                size = len(render(tokenizer, shown.messages, generation_prompt=True, template=own).tokens)
            else:
                size = len(encode(tokenizer, shown.text))
            if size >= longest:
                raise DataError(
                    f"row '{t.id}': the prompt has {size} tokens, and the engine holds {longest} with the answer: "
                    "shorten it, leave it out, or raise engine.max_len.",
                    self.files.get(t.id, self.path),
                )

    def _split(self) -> dict[str, str]:
        if any("split" in t.data for t in self.rows):
            said = {t.id: t.data.get("split", "train") for t in self.rows}
            if wrong := next((i for i, s in said.items() if s not in ("train", "val", "test")), None):
                raise DataError(
                    f"row '{wrong}' has split {said[wrong]!r}: it must be 'train', 'val' or 'test'.", self.path
                )
            return said
        keys = {
            t.id: hashlib.sha256(json.dumps(t.data["prompt"], sort_keys=True).encode()).hexdigest() for t in self.rows
        }
        distinct = sorted(set(keys.values()))
        held = max(1, round(self.test * len(distinct))) if self.test and len(distinct) > 1 else 0
        apart = set(distinct[:held])  # rows with the same prompt stay together
        return {i: "test" if key in apart else "train" for i, key in keys.items()}


class PromptWorld(World):
    """Shows the prompt and takes the answer; the judge gives the outcome."""

    def __init__(self, chat: bool = False, system: bool = True):
        self.chat, self.system, self.over = chat, system, True

    def reset(self, task: Task) -> Observation:
        prompt, self.over = task.data["prompt"], False
        if isinstance(prompt, str):
            said = ({"role": "user", "content": prompt},) if self.chat else ()
            return Observation(prompt, messages=said)
        told = tuple(prompt) if self.system else tuple(m for m in prompt if m["role"] != "system")
        return Observation(str(told[-1]["content"]), messages=told)

    def step(self, action: str) -> Step:
        if self.over:
            raise TaskError("a prompt is answered once: reset the world before the next one.")
        self.over = True
        return Step(Observation(""), 0.0, True, False)


def read_prompts(path: Path) -> list[Task]:
    """The rows of a file as tasks, named by their `id` or by the number of their line."""
    must_be_file(path)
    out: dict[str, Task] = {}
    for i, line in enumerate(file_text(path).split("\n"), 1):
        if not line.strip():
            continue
        row = parse_line(line, path, i)
        if not isinstance(row, dict) or "prompt" not in row:
            raise DataError("must be a JSON object with a key 'prompt'.", path, i)
        _check(row["prompt"], path, i)
        name = str(row.get("id", i))
        if name in out:
            raise DataError(f"a second row has the id '{name}'.", path, i, "id")
        out[name] = Task(name, data=row)
    if not out:
        raise DataError("holds no prompts.", path)
    return list(out.values())


def _check(prompt: Any, path: Path, line: int) -> None:
    if isinstance(prompt, str) and prompt:
        return
    ok = isinstance(prompt, list) and prompt and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
    )  # fmt: skip
    if not ok:
        raise DataError("must be a text, or a list of messages with role and content.", path, line, "prompt")
    if prompt[-1]["role"] == "assistant":
        raise DataError("ends with a message of the assistant, so there is nothing to answer.", path, line, "prompt")
