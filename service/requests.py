"""Requests read, and refused: bounded reading, strict JSON, and the one form of every reply that is
not a success, ``{"error": {"code": ..., ...}}``."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from confpred.errors import InvalidInput
from confpred.predict.choice import check_max_regret, check_top
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.problem.limits import UNLIMITED, Limits

from . import Settings

_LONGEST = 80  # characters of a client's own text that an error repeats


@dataclass(frozen=True, slots=True)
class Error:
    """Error of a request.

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
    """Return the reply to a request that was refused."""
    if isinstance(error, InvalidInput):
        return reply(422, invalid(error))
    return reply(error.status, error.error, error.headers)


def shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def invalid(error: InvalidInput) -> Error:
    """Return `error` with the client's own text cut to a length that is fit for a reply."""
    return Error("invalid_input", str(error), error.field, _shown(error.value), error.allowed)


def _shown(value: Any) -> Any:
    """Return `value` itself if it is short and can be JSON, else the start of its text."""
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
        """Reply to an unknown path, or to a method that the path does not have."""
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
    """Return the methods of `path`, if the method was wrong. Routing names those of one of its
    routes, and the description those of all that are described."""
    if "Allow" not in headers:
        return ""
    described = app.openapi()["paths"].get(path, {})
    named = (method.strip() for method in headers["Allow"].split(","))
    return ", ".join(sorted({*named, *map(str.upper, described)}))


#: The headers of a request by name in small letters, as ASGI has them.
Headers = Mapping[bytes, bytes]

_JSON = b"application/json"
_FIELDS = ("device", "problem", "problems", "top", "max_regret", "limits")


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """One request, checked.

    Attributes:
        device: for which to choose.
        problems: one or more, in the order asked.
        top: how many choices each is to get.
        max_regret: the largest bound on regret that is accepted; None for any.
        limits: what they keep within.
    """

    device: Device
    problems: tuple[Problem, ...]
    top: int
    max_regret: float | None = None
    limits: Limits = UNLIMITED


async def read_body(headers: Headers, receive: Receive, settings: Settings) -> bytes:
    """Return the JSON body of a request; reading stops at the limit, whatever length was announced.

    Raises:
        RequestError: 415 for another content type, 413 for a longer body.
        ClientDisconnect: the connection closed before its end.
    """
    _check_type(headers)
    limit = settings.max_body_bytes
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced[:20]) > limit:
        raise _too_large(int(announced[:20]), settings)
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(size, settings)
        chunks.append(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


def parse(body: bytes, settings: Settings) -> PredictRequest:
    """Return the request that `body` is; raises as `parsing` does."""
    steps = parsing(body, settings)
    try:
        while True:
            next(steps)
    except StopIteration as done:
        asked: PredictRequest = done.value
        return asked


def parsing(body: bytes, settings: Settings) -> Generator[None, None, PredictRequest]:
    """Return the request that `body` is, read a problem at a time: each comes after a yield.

    Raises:
        RequestError: the body is not JSON.
        InvalidInput: a field holds a value that is not allowed; the error has the field's path.
    """
    try:
        fields = json.loads(
            body.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
        return (yield from _request(fields, settings))
    except RecursionError:
        raise _malformed("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} at character {error.pos}") from None
    except InvalidInput:
        raise
    except ValueError:  # Python refuses to read an integer of thousands of digits
        raise _malformed("it has an integer of thousands of digits") from None


def _request(fields: Any, settings: Settings) -> Generator[None, None, PredictRequest]:
    if not isinstance(fields, dict):
        raise InvalidInput("body", fields, "an object with the fields device and problem")
    for name in fields:
        if name not in _FIELDS:
            raise InvalidInput(shorten(name), fields[name], f"a field among {', '.join(_FIELDS)}")
    device = get_device(fields.get("device"))  # type: ignore[arg-type]  # it refuses all but names
    top = check_top(fields.get("top", 1))
    accepted = check_max_regret(fields.get("max_regret"))
    limits = _limits(fields["limits"]) if "limits" in fields else UNLIMITED
    if ("problem" in fields) == ("problems" in fields):
        given = [name for name in ("problem", "problems") if name in fields]
        raise InvalidInput("problem", given or None, "exactly one of problem and problems")
    if "problem" in fields:
        problem = _problem("problem", fields["problem"])
        return PredictRequest(device, (problem,), top, accepted, limits)
    many = fields["problems"]
    if not isinstance(many, list) or not 1 <= len(many) <= settings.max_batch:
        shown = f"{len(many)} problems" if isinstance(many, list) else many
        raise InvalidInput("problems", shown, f"a list of 1 to {settings.max_batch} problems")
    problems = []
    for index, entry in enumerate(many):
        yield
        problems.append(_problem(f"problems[{index}]", entry))
    return PredictRequest(device, tuple(problems), top, accepted, limits)


def _limits(fields: Any) -> Limits:
    try:
        return Limits.from_json(fields)
    except InvalidInput as error:
        field = error.field if error.field == "limits" else f"limits.{error.field}"
        raise InvalidInput(field, error.value, error.allowed) from None


def _problem(path: str, fields: Any) -> Problem:
    if not isinstance(fields, Mapping):
        raise InvalidInput(path, fields, "an object of fields such as n, c, h, w, k")
    try:
        return Problem.from_json(fields)
    except InvalidInput as error:
        field = f"{path}.{shorten(error.field)}"
        raise InvalidInput(field, error.value, error.allowed) from None


def _check_type(headers: Headers) -> None:
    if headers.get(b"content-type") == _JSON and b"content-encoding" not in headers:
        return
    kind = headers.get(b"content-type", b"").decode("latin-1")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise _unsupported("content-type", kind, "application/json")
    coding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if coding.lower() != "identity":
        raise _unsupported("content-encoding", coding, "no encoding, as identity")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise _malformed(f"the key {shorten(name)!r} occurs twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise _malformed(f"{name} is not a JSON number")


def _malformed(reason: str) -> RequestError:
    error = Error(
        "malformed_json", f"the body is not JSON: {reason}", "body", None, "one JSON object, UTF-8"
    )
    return RequestError(400, error)


def _unsupported(header: str, value: str, allowed: str) -> RequestError:
    message = f"the header {header}={shorten(value)!r} is not supported; allowed: {allowed}"
    error = Error("unsupported_media_type", message, header, shorten(value), allowed)
    return RequestError(415, error)


def _too_large(size: int, settings: Settings) -> RequestError:
    allowed = f"{settings.max_body_bytes} bytes and {settings.max_batch} problems a request"
    message = f"the body has {size} bytes or more; allowed: {allowed}"
    return RequestError(413, Error("body_too_large", message, "body", f"{size} bytes", allowed))
