"""The engines of models that are only asked or read: from a section of a recipe, or from the options of a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trailmark.ask.client import Client
from trailmark.ask.store import Store
from trailmark.config import EngineConfig, ModelConfig, ServerConfig
from trailmark.engines.http import HttpEngine, http_engine
from trailmark.errors import ModelError, TrailmarkError
from trailmark.failures import Tries
from trailmark.types import SamplingLaw


def open_engine(server: ServerConfig | None, model: ModelConfig | None, key: str) -> Any:
    """A server, or a model that is loaded in this process. Errors begin with `key`."""
    if server is not None:
        return open_server(server, f"{key}.server")
    from trailmark.models.load import load_model

    assert model is not None
    try:
        return open_model(load_model(model).freeze())
    except ModelError as problem:
        raise ModelError(f"{key}.model: {problem}") from problem


def open_server(server: ServerConfig, key: str, tokenizer: Any = None) -> HttpEngine:
    return http_engine(server, tokenizer, key=key)


def open_model(lm: Any, **settings: Any) -> Any:
    from trailmark.engines.local import local_engine

    return local_engine(lm, EngineConfig(**settings))


def open_teacher(
    url: str, model: str, answers: Path | None = None, *, api_key: str | None = None, api_version: str | None = None,
    temperature: float = 0.7, top_p: float = 0.9, at_once: int = 8, deadline: float = 120.0, retries: int = 5,
    backoff: float = 0.5, failures: float = 0.0,
) -> Client:  # fmt: skip
    """A model behind `url`, which ends before /v1, or is Azure's .../deployments/NAME (see `http_client.address`)."""
    if not url.startswith(("http://", "https://")):
        raise TrailmarkError(f"teacher '{url}' is neither 'offline' nor an address: it must begin with http.")
    query = {"api-version": api_version} if api_version else {}
    engine = HttpEngine(url, model, None, {}, query, api_key, at_once, deadline, retries, backoff)
    tries = Tries(f"questions to '{model}'", failures)
    law = SamplingLaw(temperature, top_p)
    return Client(engine, Store(answers, text="text"), law=law, at_once=at_once, tries=tries, empty=False)
