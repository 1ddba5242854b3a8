"""Replies: choices, chunks of a stream and log-probs, in the form of /v1/completions or of /v1/chat/completions.

Every drawn token is reported, also the one that ended the text, so `token_ids` and log-probs are what a learner needs.
`logprobs` are the model's own; `law_logprobs`, beside `token_ids`, are those under the sampling law (temperature,
top-p, allowed ids).

A thread of its own writes answers that are sent whole. The name of each token is looked up once.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from trailmark.engines.running import Written
from trailmark.serve.body import ChatBody, Sampling
from trailmark.serve.growing_text import BROKEN, Growing
from trailmark.types import Tokens

ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
PART = 1 << 16  # bytes of an answer that are sent at once
SLICE = 16  # entries of a list that are written in one call


def json_parts(content: Any, depth: int = 5) -> Iterator[str]:
    """JSON, as the framework writes it, in many short calls: no other thread runs during one. The deepest of an
    answer's long lists (log-probs, a tree) are cut in slices."""
    if isinstance(content, dict) and depth:
        for k, (key, value) in enumerate(content.items()):
            yield f"{',' if k else '{'}{ENCODER.encode(key)}:"
            yield from json_parts(value, depth - 1)
        yield "}" if content else "{}"
    elif isinstance(content, list) and depth:
        step = 1 if depth > 2 else SLICE
        for at in range(0, len(content), step):
            yield "," if at else "["
            part = content[at : at + step]
            yield from json_parts(part[0], depth - 1) if step == 1 else (ENCODER.encode(part)[1:-1],)
        yield "]" if content else "[]"
    else:
        yield ENCODER.encode(content)


def json_response(content: Any) -> Response:
    return Response("".join(json_parts(content)), media_type="application/json")


class Whole(Response):
    """An answer that is sent in parts, each when the client has read the one before. Its share of the limits is
    returned when it is sent."""

    def __init__(self, made: Response, held: contextlib.ExitStack):
        super().__init__(made.body, made.status_code, dict(made.headers))
        self.held = held

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for at in range(0, len(self.body), PART):
                part = bytes(self.body[at : at + PART])
                await send({"type": "http.response.body", "body": part, "more_body": at + PART < len(self.body)})
        finally:
            self.held.close()


@dataclass(frozen=True, slots=True)
class Mark:
    """A token with its log-prob; the first token of a prompt has none."""

    token: int
    logp: float | None
    logq: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(eq=False)
class Choice:
    """One sample while it is sent: what was not sent yet, and how far its text is."""

    index: int
    growing: Growing
    prompt: Tokens
    text: str = ""  # not sent yet
    marks: list[Mark] = field(default_factory=list)  # not sent yet
    offset: int = 0  # position of the next token in the text, for its log-probs
    finish: str | None = None

    def hear(self, w: Written, grow: bool = True) -> None:
        """Add a drawn token. Unless the text should `grow` with it, the whole text comes with the last token."""
        self.marks.append(Mark(w.token, w.logp, w.logq, w.top))
        if w.done is not None:
            self.text += self.growing.finish(w.done.text)
            self.finish = "length" if w.done.cut_off else "stop"
        elif grow:
            self.text += self.growing.add(w.token)


class Reply:
    """The fields of one request's answer, whole or in chunks."""

    def __init__(self, body: Sampling, names: Names, model: str, prompts: Sequence[Tokens], stops: Sequence[str] = ()):
        self.body, self.names, self.prompts = body, names, prompts
        self.chat = isinstance(body, ChatBody)
        self.head = {
            "id": ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        logprobs = getattr(body, "logprobs", None)
        self.wants_logprobs = logprobs is not None and logprobs is not False
        self.top = body.top
        self.choices = [
            Choice(i * body.n + k, Growing(names.tokenizer, stops, body.min_tokens), p)
            for i, p in enumerate(prompts)
            for k in range(body.n)
        ]
        self.written = 0

    def hear(self, index: int, written: Written, grow: bool = True) -> Choice:
        self.written += 1
        self.choices[index].hear(written, grow)
        return self.choices[index]

    def usage(self) -> dict[str, int]:
        given = sum(map(len, self.prompts))
        return {"prompt_tokens": given, "completion_tokens": self.written, "total_tokens": given + self.written}

    def whole(self, prompt_marks: Sequence[Sequence[Mark]]) -> dict[str, Any]:
        out: dict[str, Any] = {**self.head, "choices": [self._choice(c) for c in self.choices], "usage": self.usage()}
        if self.body.prompt_logprobs is not None:
            listed = [prompt_logprobs(self.names, marks, self.body.prompt_logprobs) for marks in prompt_marks]
            if self.chat:
                out["prompt_logprobs"] = listed[0]
            else:
                for c in out["choices"]:
                    c["prompt_logprobs"] = listed[c["index"] // self.body.n]
        if self.chat and self.body.return_token_ids:
            out["prompt_token_ids"] = self.prompts[0]
        return out

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The first chunk of a sample: a chat's role, a completion's prompt."""
        if self.chat:
            out = self._chunk({"index": choice.index, "delta": {"role": "assistant", "content": ""}})
            return {**out, "prompt_token_ids": choice.prompt} if self.body.return_token_ids else out
        if choice.text or choice.marks or self.body.return_token_ids:
            return self._chunk(self._choice(choice))
        return None

    def chunk(self, choice: Choice) -> dict[str, Any] | None:
        """What has settled since the last chunk; None if nothing has."""
        if not choice.text and choice.finish is None:
            return None
        return self._chunk(self._choice(choice, chunk=True))

    def closing(self) -> dict[str, Any]:
        return {**self._chunk(), "usage": self.usage()}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        named = {"object": "chat.completion.chunk"} if self.chat else {}
        return {**self.head, **named, "choices": [{"logprobs": None, "finish_reason": None, **c} for c in choices]}

    def _choice(self, c: Choice, chunk: bool = False) -> dict[str, Any]:
        text, marks = c.text, c.marks
        c.text, c.marks = "", []
        out: dict[str, Any] = {"index": c.index, "finish_reason": c.finish, "logprobs": None}
        if not self.chat:
            out["text"] = text
        elif chunk:
            out["delta"] = {"content": text} if text else {}
        else:
            out["message"] = {"role": "assistant", "content": text}
        if self.wants_logprobs:
            out["logprobs"] = self._chat_logprobs(marks) if self.chat else self._logprobs(c, marks)
        if self.body.return_token_ids:
            own = [m for m in marks if m.logq is not None]
            out["token_ids"], out["law_logprobs"] = [m.token for m in own], [m.logq for m in own]
            if not self.chat and not chunk:
                out["prompt_token_ids"] = c.prompt
        return out

    def _logprobs(self, choice: Choice, marks: Sequence[Mark]) -> dict[str, Any]:
        name = self.names.name
        words = [name(m.token) for m in marks]
        offsets = []
        for m in marks:
            offsets.append(choice.offset)
            choice.offset += len(self.names.text(m.token))
        tops = [
            None if m.logp is None else {**{name(t): p for t, p in m.top}, word: m.logp}
            for m, word in zip(marks, words)
        ]
        return {
            "tokens": words,
            "token_logprobs": [m.logp for m in marks],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _chat_logprobs(self, marks: Sequence[Mark]) -> dict[str, Any]:
        def word(token: int, logp: float | None) -> dict[str, Any]:
            return {"token": self.names.text(token), "logprob": logp, "bytes": self.names.bytes(token)}

        return {
            "content": [{**word(m.token, m.logp), "top_logprobs": [word(t, p) for t, p in m.top]} for m in marks],
            "refusal": None,
        }


def prompt_logprobs(names: Names, marks: Sequence[Mark], top: int) -> list[dict[str, Any] | None]:
    """One entry per token, by id. The token itself is always among them."""
    out: list[dict[str, Any] | None] = []
    for m in marks:
        ranked = {t: (p, rank) for rank, (t, p) in enumerate(m.top[:top], 1)}
        ranked.setdefault(m.token, (m.logp or 0.0, m.rank))
        entry = {
            str(t): {"logprob": p, "rank": rank, "decoded_token": names.text(t)} for t, (p, rank) in ranked.items()
        }
        out.append(None if m.logp is None else entry)
    return out


class Names:
    """The texts of a tokenizer's tokens, each looked up once."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._bytes: dict[int, list[int] | None] = {}

    def text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self.tokenizer.decode([token])
        return self._texts[token]

    def name(self, token: int) -> str:
        if token not in self._names:
            self._names[token] = token_name(self.tokenizer, token)
        return self._names[token]

    def bytes(self, token: int) -> list[int] | None:
        if token not in self._bytes:
            raw = token_bytes(self.tokenizer, token)
            self._bytes[token] = None if raw is None else [*raw]
        return self._bytes[token]


def token_name(tokenizer: Any, token: int) -> str:
    """The text of a token, or its bytes in hexadecimal: partial characters would all have the same text."""
    text = tokenizer.decode([token])
    raw = token_bytes(tokenizer, token) if BROKEN in text else None
    return text if raw is None else "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """The bytes of a token, which may be part of a character; None if the tokenizer does not say."""
    text = tokenizer.decode([token])
    if BROKEN not in text:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
        return bytes([int(byte[1], 16)])
    table = _byte_letters()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else None


def _byte_letters() -> dict[str, int]:
    """The letters with which byte-level vocabularies write bytes: printable bytes are their own letters, the others
    follow in order from 256 on."""
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    rest = [b for b in range(256) if b not in plain]
    return {**{chr(b): b for b in plain}, **{chr(256 + k): b for k, b in enumerate(rest)}}
