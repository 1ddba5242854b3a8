"""Render chat templates, with a limit on time and size.

A template is a program in Jinja that comes with a model, and may come from anywhere. A template whose work is bounded
by its form (`template_size.py`) is rendered here, as transformers does it. Any other is rendered by transformers in a
process of its own (`template_worker.py`), which cannot compute long or take much memory. Both give the same text.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trailmark.errors import ModelError, TrailmarkError
from trailmark.template_size import bound
from trailmark.template_worker import MEMORY, SECONDS

WORK = 1 << 25  # most work of a rendering in this process: some tens of milliseconds, and as many megabytes
LETTERS, TIMES = 1 << 20, 16  # a text has at most so many letters, and as many times the letters that went in


NONE: Mapping[str, Any] = {}
TOO_LONG = "the chat template writes far more than its messages hold."


class TemplateLimit(ModelError):
    """A chat template takes too long or makes too much."""


class TemplateProblem(TrailmarkError):
    """A chat template fails, or refuses the messages."""


def apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    prompt: bool = False,
    template: str | None = None,
    more: Mapping[str, Any] = NONE,
) -> str:
    """The text of a conversation by the tokenizer's chat template, or another `template`; with `prompt`, up to where
    the assistant begins. `more` are variables of the template."""
    try:
        return _applied(tokenizer, messages, prompt, template, more)
    except TrailmarkError:
        raise
    except RecursionError:
        raise TemplateLimit("the chat template, or a message, is nested too deep.") from None
    except Exception as problem:  # templates may fail in any way
        raise TemplateProblem(str(problem) or type(problem).__name__) from problem


def _applied(tokenizer: Any, messages: Any, prompt: bool, template: str | None, more: Mapping[str, Any]) -> str:
    asked = {"tokenize": False, "add_generation_prompt": prompt, **more}
    if template is not None:
        asked["chat_template"] = template
    if not _by_jinja(tokenizer):  # its own code, not a text in a file
        return tokenizer.apply_chat_template(messages, **asked)
    text = tokenizer.get_chat_template(template, more.get("tools"))
    if not isinstance(text, str):
        raise TypeError("it is not a text")
    words = tokenizer.special_tokens_map
    size = len(repr((messages, more, words))) + len(text)
    longest, known = LETTERS + TIMES * size, bound(text)
    if known is not None and (known[0] + known[1] * len(messages)) * size <= WORK:
        made = tokenizer.apply_chat_template(messages, **asked)
        if len(made) <= longest:
            return made
        raise TemplateLimit(TOO_LONG)
    return WORKER.render(text, messages, prompt, {**words, **more}, longest)


def _by_jinja(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    own = getattr(type(tokenizer), "apply_chat_template", None)
    return own is PreTrainedTokenizerBase.apply_chat_template


class _Worker:
    """The process, started when it is first needed and again after it was ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0

    def render(self, template: str, messages: Any, prompt: bool, more: Mapping[str, Any], longest: int) -> str:
        asked = {"template": template, "messages": messages, "prompt": prompt, "more": more, "longest": longest}
        line = json.dumps(asked, default=lambda value: f"<{type(value).__name__}>").encode() + b"\n"
        with self.lock:
            said = self.ask(line)
            if "unfit" in said:  # it failed before the template ran: a new process is asked once more
                self.end()
                said = self.ask(line)
        if "text" in said:
            return said["text"]
        if "large" in said:
            size = f"more than {MEMORY >> 20} MB of memory"
            raise TemplateLimit(TOO_LONG if said["large"] == "text" else f"the chat template takes {size}.")
        raise TemplateProblem(said["problem"])

    def ask(self, line: bytes) -> dict[str, str]:
        process = self.started()
        assert process.stdin is not None and process.stdout is not None
        answer, code = b"", None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
            answer = process.stdout.readline()
        finally:
            if not answer.endswith(b"\n"):  # it has ended, or this one was interrupted
                code = self.end()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        if code == -signal.SIGPROF:
            raise TemplateLimit(f"the chat template computes for more than {SECONDS:g} s.")
        raise TemplateLimit(f"the process that renders the chat template ended with code {code}.")

    def started(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            here = str(Path(__file__).parents[1])
            path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
            # -P: the working directory is no place to import from
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trailmark.template_worker", str(SECONDS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
            self.owner = os.getpid()
        return self.process

    def end(self) -> int | None:
        process, self.process = self.process, None
        if process is None or self.owner != os.getpid():
            return None
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            return process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            process.stdout.close()  # type: ignore[union-attr]


WORKER = _Worker()
atexit.register(WORKER.end)
