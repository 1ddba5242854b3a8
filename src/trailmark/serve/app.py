"""The application: routes, the key, and errors in one shape.

The engine runs in the server's own event loop, so requests that arrive together are decoded together. A step of the model
blocks the loop; between two steps everything else gets its turn.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from trailmark.engines.local import LocalEngine
from trailmark.errors import TrailmarkError
from trailmark.rollout.values import HeadValues
from trailmark.serve.errors import ApiError, api_error
from trailmark.serve.service import Service

OWNER = "trailmark"  # in /v1/models: how our own http engine knows us


def build_app(
    engine: LocalEngine,
    name: str | None = None,
    api_key: str | None = None,
    queue: int = 512,
    values: HeadValues | None = None,
) -> FastAPI:
    service = Service(engine, name or engine.name, queue, values)
    app = FastAPI(title="trailmark", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service

    def guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            if api_key and not hmac.compare_digest(given, f"Bearer {api_key}".encode()):
                raise ApiError(401, "the API key is wrong or missing.", code="invalid_api_key")
            return await handler(request)

        return route

    async def models(request: Request) -> Response:
        one = {"id": service.name, "object": "model", "created": service.started, "owned_by": OWNER}
        return JSONResponse({"object": "list", "data": [{**one, "max_model_len": engine.max_len}]})

    async def values_of(request: Request) -> Response:
        return JSONResponse({"object": "values", "model": service.name, "values": await service.value(request)})

    async def bare_values(request: Request) -> Response:
        """The same as a bare list, which is what clients of the published value server read."""
        return JSONResponse(await service.value(request))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "sequences": service.room.taken, "limit": service.room.limit})

    async def failed(request: Request, problem: Exception) -> Response:
        error = api_error(problem)
        return JSONResponse(error.body(), error.status, error.headers)

    app.add_route("/health", health, ["GET"])
    app.add_route("/v1/models", guarded(models), ["GET"])
    app.add_route("/v1/completions", guarded(service.complete), ["POST"])
    app.add_route("/v1/chat/completions", guarded(service.chat), ["POST"])
    app.add_route("/v1/score", guarded(service.score), ["POST"])
    app.add_route("/v1/values", guarded(values_of), ["POST"])
    app.add_route("/get_values", guarded(bare_values), ["POST"])
    for kind in (ApiError, HTTPException, TrailmarkError, Exception):
        app.add_exception_handler(kind, failed)
    return app
