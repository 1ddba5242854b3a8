"""JSON over HTTP with limits on concurrency, time and retries. Every failure has an exception type."""

from __future__ import annotations

import asyncio
import json
import random
import weakref
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import httpx

from trailmark.engines.base import EngineError

AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # status codes that are retried
LONGEST_WAIT = 30.0


class EngineTimeout(EngineError):
    """There was no answer within the deadline."""


class EngineRefused(EngineError):
    """The server cannot be reached, or the connection broke."""


class EngineStatus(EngineError):
    """The server answered with an error status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class EngineGarbage(EngineError):
    """The server's answer cannot be understood."""


CHAT = "/chat/completions"


@dataclass(frozen=True)
class Address:
    """The parts of a server's address. `named`: it names the one endpoint to use, which accepts messages only."""

    base: str
    chat: str = f"/v1{CHAT}"
    named: bool = False
    query: Mapping[str, str] = field(default_factory=dict)
    azure: bool = False

    def key(self, key: str | None, azure: bool = False) -> dict[str, str]:
        """The header that carries a key: Azure's `api-key`, else a bearer token."""
        return {} if not key else {"api-key": key} if azure or self.azure else {"Authorization": f"Bearer {key}"}


def address(url: str) -> Address:
    """`http://host` and `http://host/v1` are servers with all of OpenAI's routes. `…/chat/completions?…`, or Azure's
    `…/openai/deployments/NAME`, is an endpoint and used as it is. What follows "?" is sent with every request. An
    address is Azure's if it has such a path, an `api-version`, or Azure's host."""
    path, _, asked = url.partition("#")[0].partition("?")
    path, query = path.rstrip("/"), dict(parse_qsl(asked, keep_blank_values=True))
    host = path.partition("://")[2].partition("/")[0].partition(":")[0]
    azure = "/deployments/" in path or "api-version" in query or host.endswith((".azure.com", ".azure.us", ".azure.cn"))
    if path.endswith(CHAT):
        base = path.removesuffix(CHAT)
        versioned = base.endswith("/v1")
        return Address(base.removesuffix("/v1"), f"/v1{CHAT}" if versioned else CHAT, True, query, azure)
    if "/deployments/" in path:
        return Address(path, CHAT, True, query, azure)
    return Address(path.removesuffix("/v1"), query=query, azure=azure)


@dataclass(frozen=True, eq=False)
class _Open:
    """The client of one event loop."""

    client: httpx.AsyncClient
    gate: asyncio.Semaphore
    closing: AsyncGenerator[None, None]


@dataclass
class Wire:
    base_url: str
    headers: Mapping[str, str]
    query: Mapping[str, str]
    concurrency: int = 32
    deadline: float = 120.0  # seconds for one call, retries included; waiting for a free place does not count
    retries: int = 5
    backoff: float = 0.5
    seed: int = 0  # seed of the random backoff
    _open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Open] = field(
        default_factory=weakref.WeakKeyDictionary, repr=False
    )

    def __post_init__(self) -> None:
        path, _, asked = self.base_url.partition("?")  # the query belongs after the path of every request
        self.base_url = path.rstrip("/").removesuffix("/v1")
        self.query = {**dict(parse_qsl(asked, keep_blank_values=True)), **self.query}

    async def get(self, path: str) -> Any:
        return await self._call("GET", path, None, path)

    async def post(self, path: str, body: Mapping[str, Any], key: str = "") -> Any:
        return await self._call("POST", path, json.dumps(body).encode(), key)

    async def _call(self, method: str, path: str, body: bytes | None, key: str) -> Any:
        here = await self._here()
        jitter = random.Random(f"{self.seed}\0{key}")
        async with here.gate:
            tried: EngineError | None = None
            try:
                async with asyncio.timeout(self.deadline):
                    for attempt in range(self.retries + 1):
                        try:
                            response = await self._once(here.client, method, path, body)
                        except EngineRefused as problem:
                            tried, asked = problem, 0.0
                        else:
                            if response.status_code < 300:
                                return self._read(response)
                            tried, asked = self._refusal(response), _retry_after(response)
                            if response.status_code not in AGAIN:
                                break
                        if attempt < self.retries:
                            wait = self.backoff * 2**attempt * (0.5 + jitter.random())
                            await asyncio.sleep(min(max(wait, asked), LONGEST_WAIT))
            except TimeoutError:
                last = f"; the last try: {tried}" if tried else ""
                raise EngineTimeout(f"{self.base_url} gave no answer within {self.deadline:g} s{last}") from None
            assert tried is not None
            raise tried

    async def _once(self, client: httpx.AsyncClient, method: str, path: str, body: bytes | None) -> httpx.Response:
        head = {"Content-Type": "application/json"} if body is not None else {}
        try:
            return await client.request(method, self.base_url + path, content=body, headers=head)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as problem:
            raise EngineError(f"base_url '{self.base_url}' is not a valid address: {problem}") from None
        except httpx.TransportError as problem:
            why = str(problem) or type(problem).__name__
            raise EngineRefused(f"{self.base_url} cannot be reached: {why}") from problem

    def _refusal(self, response: httpx.Response) -> EngineStatus:
        said = response.text[:300].strip()
        try:
            error = response.json()["error"]
            said = str(error["message"] if isinstance(error, dict) else error)[:300]
        except (ValueError, KeyError, TypeError):
            pass
        return EngineStatus(f"{self.base_url} answered {response.status_code}: {said}", response.status_code)

    def _read(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            raise EngineGarbage(
                f"{self.base_url} answered with something other than JSON: {response.text[:80]!r}"
            ) from None

    async def _here(self) -> _Open:
        """The client of the running event loop. Each `play` runs its own loop, and its connections end with it. A loop
        closes its asynchronous generators before it ends, and one of them holds the client."""
        loop = asyncio.get_running_loop()
        if loop not in self._open:
            for gone in [other for other in self._open if other.is_closed()]:
                del self._open[gone]
            limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
            client = httpx.AsyncClient(headers=self.headers, params=self.query, timeout=None, limits=limits)
            closing = _closing(client)
            self._open[loop] = _Open(client, asyncio.Semaphore(self.concurrency), closing)
            await anext(closing)
        return self._open[loop]


async def _closing(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.aclose()


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", 0)))
    except ValueError:  # a date
        return 0.0
