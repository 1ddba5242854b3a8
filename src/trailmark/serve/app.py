"""The application: routes, the key, and errors in one form.

The engine runs in its own event loop (`threads`). So requests that arrive together are decoded together, and /health is
answered whatever the model computes.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from trailmark.engines.local import LocalEngine
from trailmark.errors import TrailmarkError
from trailmark.score.values import HeadValues
from trailmark.serve.errors import ApiError, api_error
from trailmark.serve.prompt_format import PromptFormat
from trailmark.serve.senders import Senders
from trailmark.serve.service import Service

OWNER = "trailmark"  # the owner in /v1/models, by which our own http engine recognises us


def build_app(
    engine: LocalEngine,
    name: str | None = None,
    api_key: str | None = None,
    queue: int = 512,
    values: HeadValues | None = None,
    prompt_format: PromptFormat | None = None,
    stop: Sequence[str] = (),
    hosts: Sequence[str] = (),
) -> FastAPI:
    """`prompt_format` says how conversations become prompts. The texts `stop` end an answer unless a request names its
    own. Clients may ask under the names `hosts`, beside those of this machine."""
    senders = Senders(hosts)
    service = Service(engine, name or engine.name, queue, values, prompt_format, stop)
    app = FastAPI(title="trailmark", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service

    def guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            if api_key and not hmac.compare_digest(given, f"Bearer {api_key}".encode()):
                raise ApiError(401, "the API key is wrong or missing.", code="invalid_api_key")
            senders.check(request)
            return await handler(request)

        return route

    def the_model() -> dict[str, Any]:
        prompts = {"prompts": service.prompt_format.kind, "prompts_end": service.prompt_format.ending}
        one = {"id": service.name, "object": "model", "created": service.started, "owned_by": OWNER}
        return {**one, "max_model_len": engine.max_len, **prompts}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [the_model()]})

    async def one_model(request: Request) -> Response:
        service.check_model_name(request.path_params["name"])
        return JSONResponse(the_model())

    async def values_of(request: Request) -> Response:
        found = await service.value(request)
        return answered(found, {"object": "values", "model": service.name, "values": found})

    async def bare_values(request: Request) -> Response:
        """The values as a bare list, which clients of the published value server read."""
        found = await service.value(request)
        return answered(found, found)

    def answered(found: list[float] | None, content: Any) -> Response:
        return Response(status_code=499) if found is None else JSONResponse(content)  # 499: the client has left

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "sequences": service.capacity.taken, "limit": service.capacity.limit})

    async def failed(request: Request, problem: Exception) -> Response:
        error = api_error(problem)
        return JSONResponse(error.body(), error.status, error.headers)

    app.add_route("/health", health, ["GET"])
    app.add_route("/v1/models", guarded(models), ["GET"])
    app.add_route("/v1/models/{name:path}", guarded(one_model), ["GET"])
    app.add_route("/v1/completions", guarded(service.complete), ["POST"])
    app.add_route("/v1/chat/completions", guarded(service.chat), ["POST"])
    app.add_route("/v1/score", guarded(service.score), ["POST"])
    app.add_route("/v1/values", guarded(values_of), ["POST"])
    app.add_route("/get_values", guarded(bare_values), ["POST"])
    for kind in (ApiError, HTTPException, TrailmarkError, Exception):
        app.add_exception_handler(kind, failed)
    return app
