"""Errors of a request, in the form that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from trailmark.engines.base import EngineError
from trailmark.errors import TrailmarkError

LONGEST = 500  # most characters of an error message: it may quote the request
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = str(self)
        message = message if len(message) <= LONGEST else message[: LONGEST - 1] + "…"
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def refused(problem: ValidationError) -> ApiError:
    """The first problem with a request's fields, as one sentence."""
    errors = problem.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    if not first["loc"]:
        return ApiError(400, first["msg"].removeprefix("Value error, "))
    name = str(first["loc"][0])
    same = [e for e in errors if e["loc"][:1] == first["loc"][:1]]
    if first["type"] == "missing":
        return ApiError(400, f"'{name}' is missing.", name, "missing_required_parameter")
    messages = dict.fromkeys(
        e["msg"].removeprefix("Value error, ") for e in same
    )  # several, if the field allows several forms
    why = "; or: ".join(list(messages)[:4])
    return ApiError(400, f"'{name}': {why}{'' if why.endswith(('.', '?')) else '.'}", name, "invalid_type")


def api_error(problem: Exception) -> ApiError:
    if isinstance(problem, ApiError):
        return problem
    if isinstance(problem, HTTPException):
        return ApiError(problem.status_code, f"{problem.detail}.", headers=problem.headers)
    if isinstance(problem, TrailmarkError) and not isinstance(problem, EngineError):
        return ApiError(400, str(problem))  # for example, the chat template refuses a conversation
    if isinstance(problem, EngineError):
        return ApiError(500, f"{type(problem).__name__}: {problem}")
    return ApiError(500, "an error inside the server: its log says which.")
