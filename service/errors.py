"""The one form of every reply that is not a success: ``{"error": {"code": ..., ...}}``."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from confpred.errors import InvalidInput

_LONGEST = 80  # characters of a client's own text that an error repeats


@dataclass(frozen=True, slots=True)
class Error:
    """What went wrong.

    Attributes:
        code: stable name of the kind of error.
        message: one sentence for a person.
        field: path of the offending field, such as ``problems[3].c``; null where none is.
        value: what it held; text or a structure that is long is cut short.
        allowed: what would have been accepted, in words.
    """

    code: str
    message: str
    field: str | None = None
    value: Any = None
    allowed: str | None = None


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The body of every reply that is not a success."""

    error: Error


class RequestError(Exception):
    """A request that cannot be served, as the status, the error and the headers to reply with."""

    def __init__(self, status: int, error: Error, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error.message)
        self.status, self.error, self.headers = status, error, headers


def reply(status: int, error: Error, headers: Mapping[str, str] | None = None) -> Response:
    # Escaped to ASCII: a client's text may hold lone surrogates, which UTF-8 cannot carry.
    body = json.dumps(asdict(ErrorReply(error)))
    return Response(body, status, headers, media_type="application/json")


def refusal(error: RequestError | InvalidInput) -> Response:
    """The reply to a request that was refused."""
    if isinstance(error, InvalidInput):
        return reply(422, invalid(error))
    return reply(error.status, error.error, error.headers)


def shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def invalid(error: InvalidInput) -> Error:
    """`error` with its client-supplied parts cut to a length that is fit for a reply."""
    return Error("invalid_input", str(error), error.field, _shown(error.value), error.allowed)


def _shown(value: Any) -> Any:
    """`value` itself if it is short and can be written as JSON, else the start of its text."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = reprlib.repr(value)  # which does not follow deep nesting
    else:
        if len(text) <= _LONGEST:
            return value
    return shorten(text)


def install(app: FastAPI) -> None:
    """Give every error of `app` that is not a bug the one form; bugs are `access.Access`'s."""

    @app.exception_handler(RequestError)
    @app.exception_handler(InvalidInput)
    async def refused(request: Request, error: RequestError | InvalidInput) -> Response:
        return refusal(error)

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        """What routing refuses: no such path, or a method that the path does not have."""
        status = HTTPStatus(error.status_code)
        code = status.phrase.lower().replace(" ", "_")
        allowed = _methods(app, request.scope["path"], error.headers or {})
        path = shorten(request.scope["path"])
        message = f"{status.phrase}: {request.method} {path}"
        if allowed:
            found = Error(code, message, "method", request.method, allowed)
        else:
            found = Error(code, message, "path", path, "a path that /openapi.json lists")
        return reply(status, found, {"allow": allowed} if allowed else error.headers)


def _methods(app: FastAPI, path: str, headers: Mapping[str, str]) -> str:
    """What may be asked of `path`, if that is what was wrong. Routing names the methods of one of
    its routes, and the description those of all that are described."""
    if "Allow" not in headers:
        return ""
    described = app.openapi()["paths"].get(path, {})
    named = (method.strip() for method in headers["Allow"].split(","))
    return ", ".join(sorted({*named, *map(str.upper, described)}))
