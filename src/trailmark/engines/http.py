"""Any OpenAI-compatible server as an engine: our own (`trailmark serve`), vLLM, SGLang, llama.cpp, a hosted API.

What the server returns decides whether its answers can be trained on:

    server                     tokens          logp       logq
    trailmark serve            as drawn        yes        yes
    vLLM                       as drawn        yes        under a plain law (then it is logp) or at temperature 0
    others                     text, encoded   none       none

Text that is encoded again may differ from the tokens that were drawn. So such a completion has no log-probs and must
not be trained on; with `exact=True` it is an `EngineError`. Every failure is an `EngineError`, never an empty answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trailmark.engines.base import Completion, Engine, EngineError, Request, SchemaError, draw_key
from trailmark.engines.http_client import EngineGarbage, EngineRefused, EngineStatus, EngineTimeout, Wire, address
from trailmark.engines.stops import cut_text
from trailmark.texts import encode
from trailmark.types import ENDED, SamplingLaw, Stop, Tokens

__all__ = ["About", "EngineGarbage", "EngineRefused", "EngineStatus", "EngineTimeout", "HttpEngine"]

OWNER = "trailmark"  # the owner that our own server gives in /v1/models
CONTINUES = (OWNER, "vllm", "sglang")  # servers that can continue a message that has begun
TOO_LONG = re.compile(r"maximum context length|context_length_exceeded", re.IGNORECASE)  # what servers then say

# `finish_reason` of OpenAI's protocol, and the words of TGI and of Mistral
FINISHED: dict[Any, Stop] = {
    "stop": "stopped", "eos_token": "stopped", "stop_sequence": "stop_string", "length": "length",
    "model_length": "context_full",
}  # fmt: skip
SCHEMA = re.compile(r"schema|response_format", re.IGNORECASE)  # servers that refuse a schema say so


@dataclass(frozen=True)
class About:
    """What a server says in /v1/models: whose software it is, the names of its models, and the most tokens that each
    reads (`max_model_len`). Empty if it does not say."""

    owner: str = ""
    models: tuple[str, ...] = ()
    lengths: Mapping[str, int] = field(default_factory=dict)


class HttpEngine(Engine):
    """`base_url` ends before /v1, or names the one endpoint to use (Azure's, see `http_client.address`). `tokenizer` is
    a loaded tokenizer or its name; only `chat` works without one. `api_key` is sent as a bearer token, to Azure as
    `api-key`.

    An endpoint accepts messages only: a prompt is then sent as the text of one user message. `exact` refuses answers
    that could not be trained on. Our own server gets the `key` of a request unchanged, so its draws
    equal those of the local engine. Other servers get a seed made from it."""

    version = 0

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: Any = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        api_key: str | None = None,
        concurrency: int = 32,
        deadline: float = 120.0,
        retries: int = 5,
        backoff: float = 0.5,
        exact: bool = False,
        seed: int = 0,
    ):
        if isinstance(tokenizer, str):
            from trailmark.models.load import load_tokenizer

            tokenizer = load_tokenizer(tokenizer)
        at = address(base_url)
        self.name, self.tokenizer, self.exact, self.chat_path = model, tokenizer, exact, at.chat
        self.by_chat = at.named
        azure = "api-version" in (query or {})
        self.wire = Wire(
            at.base,
            {**at.key(api_key, azure), **(headers or {})},
            {**at.query, **(query or {})},
            concurrency,
            deadline,
            retries,
            backoff,
            seed,
        )
        self._about: About | None = About() if at.named else None
        self._asking: asyncio.Task[About] | None = None
        self._plain = False  # True once the server has refused a field that is not OpenAI's

    # -- the protocol -------------------------------------------------------------------------------------------

    async def sample(self, request: Request) -> list[Completion]:
        self._needs_tokenizer()
        if self.by_chat:
            said = [{"role": "user", "content": self.tokenizer.decode(request.prompt)}]
            return await self._chat(said, request)
        ours = await self.ours()
        body = {"prompt": list(request.prompt), "logprobs": 0, "return_token_ids": True, **self._fields(request)}
        if ours:  # the server of a run has its own stop texts: send ours even if there are none
            body |= {"seed": request.seed, "key": request.key, "stop": list(request.stop_strings)}
        answer = await self._post("/v1/completions", body, request.key)
        with self._reading():
            return [self._completion(c, request, "text") for c in _choices(answer, request.n)]

    async def score(self, tokens: Sequence[int], start: int = 1) -> list[float]:
        first, ids = max(start, 1), list(tokens)
        if await self.ours():
            row = await self.wire.post("/v1/score", {"model": self.name, "tokens": ids, "start": first})
            found = _numbers(_at(row, "data", 0, "token_logprobs"))
        else:
            ask = {"model": self.name, "prompt": ids, "max_tokens": 1, "temperature": 0}
            answer = await self.wire.post("/v1/completions", {**ask, "prompt_logprobs": 1})
            listed = _choices(answer, 1)[0].get("prompt_logprobs")
            if isinstance(listed, list):
                found = _numbers([_at(e, str(t), "logprob") for e, t in zip(listed[first:], ids[first:])])
            else:  # the older form of the request
                answer = await self.wire.post("/v1/completions", {**ask, "echo": True, "logprobs": 1})
                listed = _at(_choices(answer, 1)[0], "logprobs", "token_logprobs")
                found = _numbers(listed[first : len(ids)] if isinstance(listed, list) else None)
        if len(found) != max(0, len(ids) - first):
            raise EngineGarbage(f"'{self.name}' scored {len(found)} tokens where {len(ids) - first} were asked for")
        return [0.0] * (start == 0) + found

    async def token_ids(self, text: str) -> list[int] | None:
        """The tokens of a text by the server's own tokenizer, without special tokens. None if it does not say."""
        ask = {"model": self.name, "prompt": text, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        try:
            answer = await self.wire.post("/v1/completions", {**ask, "add_special_tokens": False})
        except EngineStatus as problem:
            if problem.status in (400, 404, 422):  # it does not know these fields
                return None
            raise
        found = _choices(answer, 1)[0].get("prompt_token_ids")
        return found if isinstance(found, list) and all(type(t) is int for t in found) else None

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        law: SamplingLaw = SamplingLaw(),
        max_tokens: int = 64,
        stop_strings: Sequence[str] = (),
        seed: int = 0,
        key: str = "",
        n: int = 1,
        prefix: str = "",
        search: Mapping[str, Any] | None = None,
        schema: str = "",
        text_only: bool = False,
    ) -> list[Completion]:
        """The server's `n` answers to messages. The server applies its own template. Without a tokenizer here, or token
        ids from the server, a completion is only text. With a `prefix` the answer has begun already, and the
        completions are what follows. With `search`, such as {"best_of": 5}, our own server chooses its answer by its
        value model. `text_only`: neither token ids nor log-probs are asked for. `schema`: the answer is such JSON."""
        request = Request((), law, n, max_tokens, (), tuple(stop_strings), seed, key, schema)
        more: dict[str, Any] = {} if search is None else {"search": dict(search)}
        if prefix:
            if (await self.about()).owner not in CONTINUES:
                raise EngineError(
                    f"'{self.name}' at {self.wire.base_url} cannot continue a given beginning ({prefix[:40]!r}): "
                    "`trailmark serve`, vLLM and SGLang can (continue_final_message)"
                )
            messages = [*messages, {"role": "assistant", "content": prefix}]
            more |= {"continue_final_message": True, "add_generation_prompt": False}
        return await self._chat(messages, request, more, text_only)

    # -- asking -------------------------------------------------------------------------------------------------

    async def about(self) -> About:
        """What the server says of itself. It is asked once, also when several callers want to know."""
        if self._about is None:
            asking = self._asking
            if asking is None or asking.done() or asking.get_loop() is not asyncio.get_running_loop():
                asking = self._asking = asyncio.create_task(self._ask_about())
            self._about = await asyncio.shield(asking)
        return self._about

    async def ours(self) -> bool:
        """Whether the server is `trailmark serve`."""
        return (await self.about()).owner == OWNER

    async def must_serve(self) -> None:
        """Refuse a server that lists its models without this one: it would answer with another model, or not at all."""
        served = (await self.about()).models
        if served and self.name not in served:
            raise EngineError(
                f"{self.wire.base_url} serves {', '.join(map(repr, served[:8]))}, but no model '{self.name}'"
            )

    async def _ask_about(self) -> About:
        try:
            listed = await self.wire.get("/v1/models")
        except (EngineStatus, EngineGarbage):
            return About()  # a server need not have this route
        found = listed.get("data") if isinstance(listed, dict) else None
        rows = [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []
        owners = [str(m.get("owned_by", "")) for m in rows]
        owner = OWNER if OWNER in owners else next(iter(owners), "")
        named = {m["id"]: m.get("max_model_len") for m in rows if isinstance(m.get("id"), str)}
        return About(owner, tuple(named), {name: n for name, n in named.items() if type(n) is int})

    def _fields(self, request: Request, chat: bool = False) -> dict[str, Any]:
        """Only fields that differ from the default are sent, because a server may know only the required ones."""
        law = request.law
        seed = draw_key(request.seed, request.key, 0)[0] & 0x7FFFFFFF
        out: dict[str, Any] = {
            "model": self.name, "n": request.n, "max_tokens": request.max_tokens, "temperature": law.temperature,
            "top_p": law.top_p, "seed": seed,
        }  # fmt: skip
        out |= {"stop": list(request.stop_strings)} if request.stop_strings else {}
        out |= {"top_k": law.top_k} if law.top_k else {}
        out |= {"min_tokens": law.min_tokens} if law.min_tokens else {}
        out |= {"allowed_token_ids": list(law.allowed)} if law.allowed is not None else {}
        if request.schema:
            schema = {"name": "answer", "schema": json.loads(request.schema), "strict": True}
            out |= {"response_format": {"type": "json_schema", "json_schema": schema}}
        eos = getattr(self.tokenizer, "eos_token_id", None)
        if not chat:  # in a conversation the server's template decides where an answer ends
            out |= {"stop_token_ids": list(request.stop_ids)} if set(request.stop_ids) - {eos} else {}
            out |= {"ignore_eos": True} if eos not in request.stop_ids else {}
        return out

    async def _chat(
        self, messages: Sequence[Mapping[str, Any]], request: Request, more: Mapping[str, Any] | None = None,
        text_only: bool = False,
    ) -> list[Completion]:  # fmt: skip
        body = {**self._fields(request, chat=True), "messages": [dict(m) for m in messages], **(more or {})}
        if not self.by_chat:
            body |= {} if text_only else {"logprobs": True, "return_token_ids": True}
            if await self.ours():
                body |= {"seed": request.seed, "key": request.key}
        try:
            answer = await self._post(self.chat_path, body, request.key)
        except EngineStatus as problem:
            if request.schema and SCHEMA.search(str(problem)):
                raise SchemaError(f"'{self.name}' does not write JSON by this schema: {problem}") from problem
            raise
        with self._reading():
            done = [self._completion(c, request, "message", text_only) for c in _choices(answer, request.n)]
        return [replace(c, usage=_usage(answer)) for c in done] if len(done) == 1 else done

    async def _post(self, path: str, body: dict[str, Any], key: str) -> Any:
        """Post a request. If a server says that prompt and answer together are too long for its model, it is asked for
        fewer tokens, ten times at most."""
        for _ in range(10):
            try:
                return await self._post_plain(path, body, key)
            except EngineStatus as problem:
                short = body.get("max_tokens", 0) - 100
                ours = self._about is not None and self._about.owner == OWNER  # it says how long its sequences may be
                if problem.status not in (400, 413, 422) or not TOO_LONG.search(str(problem)) or short < 1 or ours:
                    raise
                body = {**body, "max_tokens": short}
        return await self._post_plain(path, body, key)

    async def _post_plain(self, path: str, body: dict[str, Any], key: str) -> Any:
        """Post a request. Some servers refuse `return_token_ids`, or `seed`: then the request is repeated without it,
        and it is not sent again."""
        optional = "return_token_ids" if "return_token_ids" in body else "seed"
        if self._plain:
            body.pop(optional, None)
        try:
            return await self.wire.post(path, body, key)
        except EngineStatus as problem:
            ours = self._about is not None and self._about.owner == OWNER
            too_long = TOO_LONG.search(str(problem))
            if problem.status not in (400, 422) or optional not in body or ours or too_long:
                raise
            if optional == "seed" and "seed" not in str(problem):
                raise
            body.pop(optional)
            answer = await self.wire.post(path, body, key)
            self._plain = True
            return answer

    # -- reading ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """An answer that cannot be used is named by its server, as one that never came: both are failed requests."""
        try:
            yield
        except EngineGarbage as problem:
            raise EngineGarbage(f"{self.wire.base_url}: {problem}") from problem

    def _completion(
        self, choice: dict[str, Any], request: Request, way: Literal["text", "message"], text_only: bool = False
    ) -> Completion:
        reason = choice.get("finish_reason")
        stop = FINISHED.get(reason if isinstance(reason, str) else None)
        if stop is None and not text_only:
            raise EngineGarbage(f"'{self.name}' did not finish its answer: it stopped with {reason!r}")
        stop = stop or ""
        if stop == "stopped" and isinstance(choice.get("stop_reason"), str):  # vLLM names the text
            stop = "stop_string"
        text = choice.get("text") if way == "text" else _at(choice, "message", "content")
        if not isinstance(text, str):
            raise EngineGarbage(f"'{self.name}' answered without text")
        if choice.get("token_ids") is None:
            return self._encoded(text, stop, request)
        ids = choice["token_ids"]
        if not isinstance(ids, list) or not ids or not all(type(t) is int and t >= 0 for t in ids):
            raise EngineGarbage(f"'{self.name}' gave invalid token ids: {str(ids)[:80]}")
        tokens: Tokens = tuple(ids)
        self._allowed(tokens, text, request.law)
        if stop == "length" and len(tokens) < request.max_tokens:
            stop = "context_full"
        elif stop == "stopped" and request.stop_ids and request.stop_strings and tokens[-1] not in request.stop_ids:
            stop = "stop_string"
        listed: Any = ()
        if choice.get("logprobs"):
            inside = choice["logprobs"]
            listed = (
                _at(inside, "token_logprobs") if way == "text" else [_at(e, "logprob") for e in _at(inside, "content")]
            )
        logp = tuple(_numbers(listed))
        logq = tuple(_numbers(choice.get("law_logprobs") or ()))
        if not logq and logp and (request.law.plain or request.law.temperature == 0):
            logq = logp if request.law.plain else (0.0,) * len(logp)
        if any(x and len(x) != len(tokens) for x in (logp, logq)):
            raise EngineGarbage(f"'{self.name}' gave {len(tokens)} tokens and {len(logp)} log-probs")
        if self.exact and not (logp and logq):
            raise EngineError(
                f"'{self.name}' does not return log-probs under this sampling law: use temperature 1 without top-k, "
                "top-p and labels, or `trailmark serve`"
            )
        return Completion(tokens, logp, logq, text if way == "message" else self._said(tokens, stop, request), stop)

    def _said(self, tokens: Tokens, stop: Stop, request: Request) -> str:
        """The text of exact tokens as the local engine decodes it. Servers drop special tokens and partial
        characters."""
        if stop in ENDED and tokens[-1] in request.stop_ids:
            return self.tokenizer.decode(tokens[:-1])
        if stop in ENDED and request.stop_strings:
            return cut_text(self.tokenizer, tokens, request.stop_strings, request.law.min_tokens)
        return self.tokenizer.decode(tokens)

    def _encoded(self, text: str, stop: Stop, request: Request) -> Completion:
        if self.exact:
            raise EngineError(f"'{self.name}' does not return token ids, so its answers cannot be trained on")
        tokens: Tokens = ()
        if self.tokenizer is not None:
            tokens = tuple(encode(self.tokenizer, text))
            if stop in ENDED and not request.stop_strings:
                tokens += request.stop_ids[:1]
            self._allowed(tokens, text, request.law)
        return Completion(tokens, (), (), text, stop)

    def _allowed(self, tokens: Tokens, text: str, law: SamplingLaw) -> None:
        if law.allowed is not None and not (tokens and set(tokens) <= set(law.allowed)):
            raise EngineGarbage(f"'{self.name}' answered {text[:80]!r}, which is not one of the labels it was given")

    def _needs_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise EngineError(f"engine '{self.name}' has no tokenizer: name one, or use `chat`")


def _at(value: Any, *path: str | int) -> Any:
    """The value at a path inside an answer."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            raise EngineGarbage(f"the answer has no {'.'.join(map(str, path))}") from None
    return value


def _usage(answer: Any) -> tuple[int, int] | None:
    """The tokens of the prompt and of the answer; None if the server does not say."""
    said = answer.get("usage") or {}
    counts = (said.get("prompt_tokens"), said.get("completion_tokens")) if isinstance(said, dict) else ()
    return counts if counts and all(type(n) is int for n in counts) else None  # type: ignore[return-value]


def _choices(answer: Any, n: int) -> list[dict[str, Any]]:
    found = _at(answer, "choices")
    if not isinstance(found, list) or len(found) != n or not all(isinstance(c, dict) for c in found):
        raise EngineGarbage(f"the answer does not have the {n} choices that were asked for")
    return sorted(found, key=lambda c: c["index"] if isinstance(c.get("index"), int) else 0)


def _numbers(values: Any) -> list[float]:
    if not isinstance(values, list | tuple) or not all(type(v) in (int, float) and v <= 0.01 for v in values):
        raise EngineGarbage(f"expected log-probs, found {str(values)[:80]}")
    return [float(v) for v in values]
