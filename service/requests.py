"""From the bytes of a request to problems: bounded reading, strict JSON, named errors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from confpred.errors import InvalidInput
from confpred.predict.choice import check_max_regret, check_top
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.problem.limits import UNLIMITED, Limits

from .errors import Error, RequestError, shorten
from .settings import Settings

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
    """The JSON body of a request; reading stops at the limit, whatever length was announced.

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
    """What `body` asks for, and raises what `parsing` does."""
    steps = parsing(body, settings)
    try:
        while True:
            next(steps)
    except StopIteration as done:
        asked: PredictRequest = done.value
        return asked


def parsing(body: bytes, settings: Settings) -> Generator[None, None, PredictRequest]:
    """What `body` asks for, read a problem at a time: each comes after a yield.

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
