"""Every engine of the library is opened here: to train, collect, evaluate, judge, teach, serve and plan.

    open_engine(lm, settings)                  a model in this process
    open_server(seat, key)                     a model behind a server that answers
    connect(server, key)                       a model behind a server that is not asked yet
    open_script(function, tokenizer, name)     a Python function
    open_person(tokenizer, ask, say)           a person at the terminal
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trailmark.config import EngineConfig, ServerConfig
from trailmark.engines.base import EngineError
from trailmark.engines.http import HttpEngine
from trailmark.engines.http_client import EngineRefused, EngineTimeout
from trailmark.engines.person import PersonEngine
from trailmark.engines.scripted import ScriptedEngine
from trailmark.run_async import wait
from trailmark.seats.config import HttpSeat
from trailmark.seats.model_names import load_tokenizer

if TYPE_CHECKING:
    from trailmark.engines.local import LocalEngine
    from trailmark.models.lm import LM

UNNAMED = "default"  # stands for the only model of a server, if no model is named
_watchers: list[Callable[[LocalEngine], None]] = []


def open_engine(lm: LM, settings: EngineConfig, apart: bool = False, plays: bool = True) -> LocalEngine:
    """The engine of a model in this process. It uses the model's own weights, or a copy (`apart`, or in the dtype of
    `engine.dtype`), which only `publish` changes. `plays`: it has a seat in plays, and is not only asked."""
    import torch

    from trailmark.engines.local import LocalEngine
    from trailmark.engines.weights import engine_copy
    from trailmark.models.hardware import check_bf16

    wanted = lm.dtype if settings.dtype is None else getattr(torch, settings.dtype)
    if settings.dtype == "bfloat16":
        check_bf16(lm.device, "engine.dtype", "float32 or float16")
    held = engine_copy(lm, wanted) if apart or wanted != lm.dtype else lm
    engine = LocalEngine(held, settings.max_num_seqs, settings.max_len, settings.batch_invariant)
    for watch in _watchers if plays else ():
        watch(engine)
    return engine


@contextlib.contextmanager
def watching(watch: Callable[[LocalEngine], None]) -> Iterator[None]:
    """`watch` gets every engine that `open_engine` opens meanwhile for plays."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


def open_script(function: Callable[..., Any], tokenizer: Any, name: str) -> ScriptedEngine:
    return ScriptedEngine(function, tokenizer, name)


def open_person(tokenizer: Any, ask: Callable[[], str | None], say: Callable[[str], None]) -> PersonEngine:
    return PersonEngine(tokenizer, ask, say)


def connect(
    server: ServerConfig, key: str = "server", tokenizer: Any = None, exact: bool = False, seed: int = 0,
    api_key: str | None = None,
) -> HttpEngine:  # fmt: skip
    """The engine of a model behind a server. Errors begin with `key`."""
    if server.api_key_env:
        api_key = _variable(server.api_key_env, f"{key}.api_key_env")
    headers = {
        k: _variable(v[4:], f"{key}.headers.{k}") if v.startswith("env:") else v for k, v in server.headers.items()
    }
    return HttpEngine(server.address, server.model, tokenizer, headers, server.query, api_key, server.concurrency,
                      server.deadline, server.retries, server.backoff, exact, seed)  # fmt: skip


def _variable(name: str, key: str) -> str:
    found = os.environ.get(name)
    if not found:
        raise EngineError(f"{key}: the environment variable {name} is not set.")
    return found


class NoServer(EngineError):
    """No server answers at an address."""

    code = 1


def open_server(seat: HttpSeat, key: str, seed: int = 0) -> HttpEngine:
    """The engine of a seat behind a server. The server must answer and serve the model that the seat names; else
    hundreds of episodes would fail one by one. A seat without a model name (`UNNAMED`) takes the server's only model.
    Errors begin with `key`; it is empty if the seat comes from a command line."""
    tokenizer = None if seat.tokenizer is None else load_tokenizer(seat.tokenizer, f"{key}.tokenizer")
    engine = connect(seat, key or "server", tokenizer, seat.exact, seed)
    says = f"{key}: " if key else ""
    wire = engine.wire
    if "api-version" in wire.query:  # an Azure address has no other paths, such as a list of models
        return engine
    engine.wire = dataclasses.replace(wire, retries=min(1, wire.retries), deadline=min(10.0, wire.deadline))
    try:
        about = wait(engine.about())
    except EngineTimeout as problem:
        if "cannot be reached" in str(problem):
            raise NoServer(f"{says}{problem}. Is the server running?") from None
        return engine  # the server is there, but slow
    except EngineError as problem:
        hint = ". Is the server running?" if isinstance(problem, EngineRefused) else ""
        raise NoServer(f"{says}{problem}{hint}") from None
    finally:
        engine.wire = wire
    if seat.model == UNNAMED and len(about.models) == 1:
        engine.name = about.models[0]
    elif seat.model != UNNAMED:
        try:
            wait(engine.must_serve())
        except EngineError as problem:
            hint = f"Set {key}.model, or another {key}.address." if key else "Name one of them with --served."
            raise EngineError(f"{says}{problem}. {hint}") from None
    return engine
