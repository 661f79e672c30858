"""Replies of the service as records and errors. A reply is checked as any input is: it comes from
another program, which may be of another version."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, get_args

import httpx

from confpred.concurrency import Recent
from confpred.errors import InvalidInput, ServiceError, ServiceUnavailable
from confpred.predict.choice import Choice, Source
from confpred.predict.plan import named_candidate
from confpred.problem.device import KNOWN, Device, is_near
from confpred.problem.record import Record

#: A problem, and how many choices; and the choices.
Asked = tuple[Record, int]
Choices = tuple[Choice, ...]
#: Variable that allows addresses without TLS.
PLAIN_HTTP = "CONFPRED_PLAIN_HTTP"
#: Seconds on the clock that deadlines are on.
clock = time.monotonic
#: Names the model that answered by its digest; the service's, where it sends it.
MODEL_HEADER = "x-confpred-model"


class Reply(NamedTuple):
    """A whole HTTP reply; `headers` finds names in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class ServedDevice:
    """A device that the service answers for: its description there, and the version of the model
    that answers, None where estimates do."""

    device: Device
    model: str | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the service has loaded: the key of its device, its name, its card (what it was
    trained on, and how well it does), and its digest, None where the service names none."""

    device: str
    version: str
    card: Mapping[str, Any]
    digest: str | None


@dataclass(frozen=True, slots=True)
class Submission:
    """A file of measurements that was sent to the service: its id, which is the SHA-256 of its
    bytes; its state, ``received``, ``admitted`` or ``quarantined``; how many of its rows are new in
    the data, where they are; and the reason where they are not."""

    id: str
    state: str
    rows: int | None = None
    reason: str | None = None


def check_address(url: str, *, open_to_all: bool = False) -> httpx.URL:
    """Return the parsed address of a service. Other machines need TLS, without which a token could
    be read on its way, and a model changed; ``$CONFPRED_PLAIN_HTTP``, or data that are
    `open_to_all`, allow plain HTTP.

    Raises:
        InvalidInput: it is no such address.
    """
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query:
        raise InvalidInput("url", url, "an address such as http://127.0.0.1:8000")
    local = parsed.host in ("localhost", "::1") or parsed.host.startswith("127.")
    if not (parsed.scheme == "https" or local or open_to_all or os.environ.get(PLAIN_HTTP)):
        allowed = f"https://, or an address of this machine; {PLAIN_HTTP}=1 allows http:// to any"
        raise InvalidInput("url", url, allowed)
    return parsed


class Kept:
    """Answers of one model, for a while."""

    def __init__(self, least: int, seconds: float) -> None:
        self._least, self._seconds = least, seconds
        self._identity: str | None = None
        self._recent: Recent[Asked, tuple[float, Choices]] = Recent(least)

    def get(self, asked: Asked) -> Choices | None:
        until, choices = self._recent.get(asked) or (0.0, ())
        return choices if clock() < until else None

    def put(self, identity: str | None, answers: Mapping[Asked, Choices]) -> None:
        """Keep the answers of the model with this `identity`, and drop those of another model."""
        if identity is not None and identity != self._identity:
            self._identity = identity
            self._recent = Recent(self._least)
        if self._least:
            until = clock() + self._seconds
            for asked, choices in answers.items():
                self._recent.put(asked, (until, choices))


def choices_of(
    problems: Sequence[Record], device: Device, top: int, server: str, reply: Reply
) -> list[tuple[Choice, ...]]:
    """Return the choices in a reply to ``/v1/predict``, best first, one tuple a problem.

    Each config is looked up by its fields and has to be legal here: this process launches it, and
    the service may have other tables and rules.

    Raises:
        ValueError: the reply is to another request, or names a config that is unknown or not legal.
    """
    answers = json.loads(reply.body)["choices"]
    if len(answers) != len(problems):
        raise ValueError(f"{len(answers)} answers to {len(problems)} problems")
    rankings = []
    for problem, answer in zip(problems, answers, strict=True):
        if not 1 <= len(answer) <= top:
            raise ValueError(f"{len(answer)} choices where 1 to {top} were asked for")
        rankings.append(tuple(_choice(fields, problem, device, server) for fields in answer))
    return rankings


def _choice(fields: Mapping[str, Any], problem: Record, device: Device, server: str) -> Choice:
    asked = problem.to_json()
    if {name: fields["problem"].get(name) for name in asked} != asked:
        raise ValueError("an answer to another problem")
    if fields["source"] not in get_args(Source):
        raise ValueError(f"source {fields['source']!r}")
    model = fields["model"]
    # A service of an earlier release says no more than the fields that are required here.
    source_device = fields.get("measured_on") if fields["source"] == "transferred" else None
    if fields["device"] != device.key:
        raise ValueError("an answer for another device")
    if not all(text is None or isinstance(text, str) for text in (model, source_device)):
        raise ValueError("a model or a device that is no text")
    candidate = named_candidate(problem, device, fields["provider"], fields["config"] or {})
    ms, pytorch_ms = _number(fields["predicted_ms"]), _number(fields.get("pytorch_ms"))
    facts = {"model": model, "donor": source_device, "server": server, "pytorch_ms": pytorch_ms}
    facts |= {"regret_bound": _number(fields["regret_bound"]), "predicted_ms": ms}
    facts["is_near"] = source_device in KNOWN and is_near(device, KNOWN[str(source_device)])
    facts["extrapolated"] = fields.get("extrapolated", False) is True
    return Choice(problem, device.key, fields["source"], candidate, **facts)


def _number(value: object) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{value!r} where null or a number of at least 0 belongs")
    return float(value)  # type: ignore[arg-type]


def identity_of(reply: Reply, answers: Sequence[Sequence[Choice]]) -> str | None:
    """Return the digest of the model that answered, else its version; None without either."""
    digest = reply.headers.get(MODEL_HEADER)
    versions = sorted({c.model for choices in answers for c in choices if c.model is not None})
    return digest or " ".join(versions) or None


def devices_of(reply: Reply) -> tuple[ServedDevice, ...]:
    """Return the devices in a reply to ``/v1/devices``."""
    names = [field.name for field in dataclasses.fields(Device)]
    return tuple(
        ServedDevice(Device(**{n: fields[n] for n in names if n in fields}), fields["model"])
        for fields in json.loads(reply.body)["devices"]
    )


def models_of(reply: Reply) -> tuple[ServedModel, ...]:
    """Return the models in a reply to ``/v1/models``."""
    return tuple(
        ServedModel(fields["device"], fields["version"], fields["card"], fields.get("digest"))
        for fields in json.loads(reply.body)["models"]
    )


def submission_of(reply: Reply) -> Submission:
    """Return the upload in a reply to ``/v1/measurements``."""
    fields = json.loads(reply.body)
    return Submission(*(fields[field.name] for field in dataclasses.fields(Submission)))


def is_too_much(reply: Reply) -> bool:
    """Return whether the service refuses the number of problems, and would take fewer."""
    if reply.status == 413:
        return True
    return reply.status == 422 and _error_in(reply).get("field") == "problems"


def error_of(reply: Reply, request_id: str) -> ServiceError | InvalidInput:
    """Return the service's error as the library would raise it."""
    error = _error_in(reply)
    if reply.status == 422 and isinstance(error.get("field"), str):
        return InvalidInput(error["field"], error.get("value"), str(error.get("allowed")))
    message = f"the service replies {reply.status}"
    if error.get("message"):
        message += f": {error['message']}"
    return ServiceError(message, reply.status, request_id)


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that ``Retry-After`` asks to wait, as a number or a date; else 0."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        then = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    then = then if then.tzinfo else then.replace(tzinfo=timezone.utc)
    return max(0.0, (then - datetime.now(timezone.utc)).total_seconds())


def unavailable_error(reply: Reply | str, asked_s: float, request_id: str) -> ServiceUnavailable:
    """Return the error of a call whose last attempt ended with `reply`, or a failure in words."""
    if isinstance(reply, str):
        return ServiceUnavailable(f"no reply: {reply}", None, request_id)
    later = f", and asks to wait {asked_s:g} s" if asked_s else ""
    message = f"the service replies {reply.status}{later}"
    return ServiceUnavailable(message, reply.status, request_id)


def _error_in(reply: Reply) -> dict[str, Any]:
    try:
        error = json.loads(reply.body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {}
