"""Parsing and refusing requests: bounded reading, strict JSON, and the one form of every reply that
is not a success, ``{"error": {"code": ..., ...}}``."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from confpred.errors import InvalidInput
from confpred.predict.choice import check_max_regret, check_top
from confpred.problem.conv import ConvNd, kind_of
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.problem.limits import UNLIMITED, Limits

from . import Settings

_LONGEST = 80  # most characters of a client's text that an error repeats
_JSON = b"application/json"
_FIELDS = ("device", "problem", "problems", "top", "max_regret", "limits")
_Record = TypeVar("_Record", Problem, ConvNd, Limits)


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
    """A request that cannot be served: the status, the body and the headers of the reply."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        field: str | None = None,
        value: Any = None,
        allowed: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        # Escaped to ASCII: a client's text may have lone surrogates, which UTF-8 cannot encode.
        self.body = json.dumps(asdict(ErrorReply(Error(code, message, field, value, allowed))))


def refusal(error: RequestError | InvalidInput) -> Response:
    """Return the reply to a request that was refused."""
    if isinstance(error, InvalidInput):
        shown = _shown(error.value)
        error = RequestError(422, "invalid_input", str(error), error.field, shown, error.allowed)
    return Response(error.body, error.status, error.headers, media_type="application/json")


def shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _shown(value: Any) -> Any:
    """Return `value` if it is short and can be JSON, else the start of its text."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return shorten(reprlib.repr(value))  # reprlib does not follow deep nesting
    return value if len(text) <= _LONGEST else shorten(text)


def install(app: FastAPI) -> None:
    """Give every error of `app` that is not a bug the one form; `logs.Access` replies to bugs."""

    @app.exception_handler(RequestError)
    @app.exception_handler(InvalidInput)
    async def refused(request: Request, error: RequestError | InvalidInput) -> Response:
        return refusal(error)

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        """Reply to an unknown path, or to a method that the path does not have."""
        status, path = HTTPStatus(error.status_code), request.scope["path"]
        code = status.phrase.lower().replace(" ", "_")
        message = f"{status.phrase}: {request.method} {shorten(path)}"
        headers = error.headers or {}
        field, value, allowed = "path", shorten(path), "a path that /openapi.json lists"
        if "Allow" in headers:
            # Routing names the methods of one route, the description those of the whole path.
            named = {method.strip() for method in headers["Allow"].split(",")}
            named |= set(map(str.upper, app.openapi()["paths"].get(path, ())))
            field, value, allowed = "method", request.method, ", ".join(sorted(named))
            headers = {"allow": allowed}
        return refusal(RequestError(status, code, message, field, value, allowed, headers))


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """One request, checked; its fields are those of ``Predictor.rank``."""

    device: Device
    problems: tuple[Problem | ConvNd, ...]
    top: int
    max_regret: float | None
    limits: Limits


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, settings: Settings) -> bytes:
    """Return the JSON body of a request; reading stops at the limit, even if a shorter length was
    announced.

    Args:
        headers: headers by name in lower case, as in ASGI.

    Raises:
        RequestError: 415 for another content type, 413 for a longer body.
        ClientDisconnect: the connection closed before its end.
    """
    _check_type(headers)
    announced = headers.get(b"content-length", b"")
    if announced.isdigit():
        _check_size(int(announced[:20]), settings)
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        _check_size(size, settings)
        more = message.get("more_body", False)
    return b"".join(chunks)


def _check_type(headers: Mapping[bytes, bytes]) -> None:
    if headers.get(b"content-type") == _JSON and b"content-encoding" not in headers:
        return
    kind = headers.get(b"content-type", b"").decode("latin-1")
    if kind.partition(";")[0].strip().lower() != _JSON.decode():
        raise _unsupported("content-type", kind, _JSON.decode())
    coding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if coding.lower() != "identity":
        raise _unsupported("content-encoding", coding, "no encoding, as identity")


def _unsupported(header: str, value: str, allowed: str) -> RequestError:
    value = shorten(value)
    message = f"the header {header}={value!r} is not supported; allowed: {allowed}"
    return RequestError(415, "unsupported_media_type", message, header, value, allowed)


def _check_size(size: int, settings: Settings) -> None:
    if size > settings.max_body_bytes:
        allowed = f"{settings.max_body_bytes} bytes and {settings.max_batch} problems a request"
        message = f"the body has {size} bytes or more; allowed: {allowed}"
        raise RequestError(413, "body_too_large", message, "body", f"{size} bytes", allowed)


def parse(body: bytes, settings: Settings) -> PredictRequest:
    """Return the request in `body`; raises as `parsing` does."""
    steps = parsing(body, settings)
    try:
        while True:
            next(steps)
    except StopIteration as done:
        asked: PredictRequest = done.value
        return asked


def parsing(body: bytes, settings: Settings) -> Generator[None, None, PredictRequest]:
    """Return the request in `body`, parsed one problem after each yield.

    Raises:
        RequestError: the body is not JSON.
        InvalidInput: a field holds a value that is not allowed; the error has the field's path.
    """
    try:
        text, unique = body.decode(), _unique
        fields = json.loads(text, object_pairs_hook=unique, parse_constant=_refuse_constant)
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise _malformed(f"the key {shorten(name)!r} occurs twice in one object")
    return fields


def _refuse_constant(name: str) -> Any:
    raise _malformed(f"{name} is not a JSON number")


def _malformed(reason: str) -> RequestError:
    message = f"the body is not JSON: {reason}"
    return RequestError(400, "malformed_json", message, "body", None, "one JSON object, UTF-8")


def _request(fields: Any, settings: Settings) -> Generator[None, None, PredictRequest]:
    if not isinstance(fields, dict):
        raise InvalidInput("body", fields, "an object with the fields device and problem")
    for name in fields:
        if name not in _FIELDS:
            raise InvalidInput(shorten(name), fields[name], f"a field among {', '.join(_FIELDS)}")
    device = get_device(fields.get("device"))  # type: ignore[arg-type]  # it refuses all but names
    top = check_top(fields.get("top", 1))
    accepted = check_max_regret(fields.get("max_regret"))
    limits = _read("limits", Limits, fields["limits"]) if "limits" in fields else UNLIMITED
    named = [name for name in ("problem", "problems") if name in fields]
    if len(named) != 1:
        raise InvalidInput("problem", named or None, "exactly one of problem and problems")
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


def _problem(path: str, fields: Any) -> Problem | ConvNd:
    if kind_of(fields) is ConvNd:
        return _read(path, ConvNd, fields)
    return _read(path, Problem, fields)


def _read(path: str, kind: type[_Record], fields: Any) -> _Record:
    """Return the record that `fields` spell out; an error names its field's path."""
    try:
        return kind.from_json(fields)
    except InvalidInput as error:
        whole = error.value is fields  # `fields` is no such object at all
        field = path if whole else f"{path}.{shorten(error.field)}"
        raise InvalidInput(field, error.value, error.allowed) from None
