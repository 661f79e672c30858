"""From the bytes of a request to problems: bounded reading, strict JSON, named errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from confpred.errors import InvalidInput
from confpred.predict.choice import check_top
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device

from .errors import Error, RequestError, shorten
from .settings import Settings

_FIELDS = ("device", "problem", "problems", "top")


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """One request, checked.

    Attributes:
        device: for which to choose.
        problems: one or more, in the order asked.
        top: how many choices each is to get.
    """

    device: Device
    problems: tuple[Problem, ...]
    top: int


async def read_body(request: Request, settings: Settings) -> bytes:
    """The JSON body of `request`; reading stops at the limit, whatever length was announced.

    Raises:
        RequestError: 415 for another content type, 413 for a longer body, 400 for a broken one.
    """
    _check_type(request)
    limit = settings.max_body_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise _too_large(int(announced[:20]), settings)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(size, settings)
            chunks.append(chunk)
    except ClientDisconnect:
        raise _malformed("the connection closed before its end") from None
    return b"".join(chunks)


def parse(body: bytes, settings: Settings) -> PredictRequest:
    """What `body` asks for.

    Raises:
        RequestError: the body is not JSON.
        InvalidInput: a field holds a value that is not allowed; the error has the field's path.
    """
    try:
        fields = json.loads(
            body.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
        return _request(fields, settings)
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


def _request(fields: Any, settings: Settings) -> PredictRequest:
    if not isinstance(fields, dict):
        raise InvalidInput("body", fields, "an object with the fields device and problem")
    for name in fields:
        if name not in _FIELDS:
            raise InvalidInput(shorten(name), fields[name], f"a field among {', '.join(_FIELDS)}")
    device = get_device(fields.get("device"))  # type: ignore[arg-type]  # it refuses all but names
    top = check_top(fields.get("top", 1))
    if ("problem" in fields) == ("problems" in fields):
        given = [name for name in ("problem", "problems") if name in fields]
        raise InvalidInput("problem", given or None, "exactly one of problem and problems")
    if "problem" in fields:
        return PredictRequest(device, (_problem("problem", fields["problem"]),), top)
    many = fields["problems"]
    if not isinstance(many, list) or not 1 <= len(many) <= settings.max_batch:
        shown = f"{len(many)} problems" if isinstance(many, list) else many
        raise InvalidInput("problems", shown, f"a list of 1 to {settings.max_batch} problems")
    problems = tuple(_problem(f"problems[{i}]", entry) for i, entry in enumerate(many))
    return PredictRequest(device, problems, top)


def _problem(path: str, fields: Any) -> Problem:
    if not isinstance(fields, Mapping):
        raise InvalidInput(path, fields, "an object of fields such as n, c, h, w, k")
    try:
        return Problem.from_json(fields)
    except InvalidInput as error:
        field = f"{path}.{shorten(error.field)}"
        raise InvalidInput(field, error.value, error.allowed) from None


def _check_type(request: Request) -> None:
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise _unsupported("content-type", kind, "application/json")
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise _unsupported("content-encoding", coding, "no encoding, as identity")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _malformed(f"the key {shorten(name)!r} occurs twice in one object")
        found[name] = value
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
