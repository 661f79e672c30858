"""What both clients are told, and what their calls do, as steps."""

from __future__ import annotations

import json
import logging
import math
import re
import ssl
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import httpx

from confpred.client import answers
from confpred.client.circuit import Circuit
from confpred.client.exchange import exchange
from confpred.client.steps import Reply, Send, Steps, Work, clock
from confpred.concurrency import PerProcess, Recent
from confpred.errors import InvalidInput, ServiceError, ServiceUnavailable
from confpred.predict.choice import Choice, check_top
from confpred.predict.plan import Plan, plan_of
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.problem.record import Record

log = logging.getLogger(__name__)
Read = TypeVar("Read")
Http = TypeVar("Http")
_Asked = tuple[Record, int]  # a problem, and how many choices
#: Seconds in which a connection has to be made: a host that is down says nothing.
CONNECT_S = 1.0


@dataclass(frozen=True, slots=True)
class Trace:
    """By what a call is found again in the service's log.

    Attributes:
        request_id: 1 to 128 letters, digits and ``._-``; made up where it is None.
        traceparent: the header of W3C Trace Context, passed on as it is; None for none.

    Raises:
        InvalidInput: one of them is no such text.
    """

    request_id: str | None = None
    traceparent: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("request_id", self.request_id), ("traceparent", self.traceparent)):
            if value is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", str(value)):
                raise InvalidInput(name, value, "1 to 128 letters, digits, dots, _ and -")


class Questions(Generic[Http]):
    """The part of a client that does not touch the network. Safe to share between threads."""

    _connections: Callable[..., Http]

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 10.0,
        retries: int = 5,
        max_batch: int = 1000,
        kept: int = 8192,
        kept_s: float = 300.0,
        fallback: Predictor | None = None,
    ) -> None:
        """Ask the service at `url`; nothing is sent yet.

        Args:
            url: its address, such as ``http://127.0.0.1:8000``; a path is put before its own.
            token: sent as a bearer token.
            timeout_s: seconds that a call may take in all, further attempts and pauses included.
            retries: further attempts where the connection fails or the service is too busy.
            max_batch: most problems in one request; a service that takes fewer is asked for fewer.
            kept: how many answers are kept, or up to twice as many; 0 keeps none.
            kept_s: for how many seconds. A new model of the service empties them when its first
                answer arrives; until then, old ones may be given for so long.
            fallback: what answers when the service cannot be reached within `timeout_s`; without
                it that is an error. The choices it makes have no `Choice.server`.

        Raises:
            InvalidInput: a value is not allowed.
        """
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError):
            parsed = httpx.URL()
        if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query:
            raise InvalidInput("url", url, "an address such as http://127.0.0.1:8000")
        for name, value, least in (
            ("timeout_s", timeout_s, 0.001),
            ("retries", retries, 0),
            ("max_batch", max_batch, 1),
            ("kept", kept, 0),
            ("kept_s", kept_s, 0),
        ):
            if not least <= value < 1e9:
                raise InvalidInput(name, value, f"a number of at least {least}")
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            raise InvalidInput("token", "...", "printable ASCII without blanks")
        self.url = str(url).rstrip("/")
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout_s, self._retries, self._max_batch = timeout_s, retries, max_batch
        self._kept_least, self._kept_s = kept, kept_s
        self._fallback = fallback
        # Reading all authorities' certificates takes 0.1 s. Without TLS nobody shows one; where a
        # proxy does after all, it is refused.
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if parsed.scheme == "http" else True
        self._http = PerProcess(partial(self._connections, verify=trusted))
        self._circuit = Circuit()
        self._kept: dict[str, _Kept] = {}
        self._is_away = False

    def _ask(
        self, problems: Iterable[Record], device: str | Device, top: int, trace: Trace | None
    ) -> Steps[list[tuple[Choice, ...]]]:
        """The best `top` choices of each problem: those that are kept, and what the service says of
        the others, each of which is sent once."""
        known, top = get_device(device), check_top(top)
        asked = [(_checked(problem), top) for problem in problems]
        kept = self._kept.setdefault(known.key, _Kept(self._kept_least, self._kept_s))
        found = {one: answer for one in asked if (answer := kept.get(one)) is not None}
        missing = [problem for problem, _ in dict.fromkeys(asked) if (problem, top) not in found]
        if missing:
            found |= yield from self._fetch(missing, known, top, kept, trace)
        return [found[one] for one in asked]

    def _fetch(
        self,
        missing: list[Record],
        device: Device,
        top: int,
        kept: _Kept,
        trace: Trace | None,
    ) -> Steps[dict[_Asked, tuple[Choice, ...]]]:
        """What the service says of `missing`, in parts that it takes; the predictor of this process
        answers the rest where the service cannot be reached."""
        exchanged = _Exchange(self, trace)
        found: dict[_Asked, tuple[Choice, ...]] = {}
        while missing:
            part = missing[: self._max_batch]
            body = {"device": device.key, "problems": [p.to_json() for p in part], "top": top}
            try:
                reply = yield from exchanged.reply("POST", "/v1/predict", json.dumps(body).encode())
            except ServiceUnavailable as error:
                local = yield Work(partial(_locally, self._instead(error), missing, device, top))
                return found | {(p, top): c for p, c in zip(missing, local, strict=True)}
            if len(part) > 1 and answers.is_too_much(reply):
                self._max_batch = max(1, min(self._max_batch, len(part) // 2))
                continue
            form = partial(
                answers.choices_of, problems=part, device=device, top=top, server=self.url
            )
            read = exchanged.read(reply, form)
            answered = {(p, top): choices for p, choices in zip(part, read, strict=True)}
            kept.put(answers.identity_of(reply, read), answered)
            found |= answered
            missing = missing[len(part) :]
        return found

    def _plan(
        self, problems: Iterable[Record], device: str | Device, trace: Trace | None
    ) -> Steps[Plan]:
        answered = yield from self._ask(problems, device, 1, trace)
        return plan_of(choices[0] for choices in answered)

    def _get(self, path: str, read: Callable[[Reply], Read], trace: Trace | None) -> Steps[Read]:
        exchanged = _Exchange(self, trace)
        return exchanged.read((yield from exchanged.reply("GET", path)), read)

    def _request(self, step: Send) -> tuple[float, dict[str, Any]]:
        """How many seconds `step` has left, and what httpx is to send."""
        left = max(0.001, step.deadline - clock())
        return left, {
            "method": step.method,
            "url": self.url + step.path,
            "content": step.body or None,
            # RFC 7240: the server need not go on once nobody waits.
            "headers": {**step.headers, "prefer": f"wait={math.ceil(left)}"},
            "timeout": httpx.Timeout(left, connect=min(left, CONNECT_S)),
        }

    def _instead(self, error: ServiceUnavailable) -> Predictor:
        if self._fallback is None:
            raise error
        if not self._is_away:
            log.warning("%s: %s; this process chooses until it answers", self.url, error)
        self._is_away = True
        return self._fallback

    def _answers_again(self) -> None:
        if self._is_away:
            log.warning("%s answers again", self.url)
        self._is_away = False


class _Exchange:
    """The requests of one call: they share its time and its name."""

    def __init__(self, questions: Questions[Any], trace: Trace | None) -> None:
        self._of, given = questions, trace or Trace()
        self._id = given.request_id or uuid.uuid4().hex
        self._headers = {"x-request-id": self._id}
        if given.traceparent is not None:
            self._headers["traceparent"] = given.traceparent
        self._deadline = clock() + questions._timeout_s

    def reply(self, method: str, path: str, body: bytes = b"") -> Steps[Reply]:
        send = Send(method, path, self._of._headers | self._headers, body, self._deadline)
        reply = yield from exchange(send, self._of._retries, self._of._circuit, self._id)
        self._of._answers_again()
        return reply

    def read(self, reply: Reply, read: Callable[[Reply], Read]) -> Read:
        """What `read` finds in `reply`.

        Raises:
            InvalidInput, ServiceError: the service refused; or its reply makes no sense.
        """
        if reply.status != 200:
            raise answers.refused(reply, self._id)
        try:
            return read(reply)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"{self._of.url} replies what makes no sense here: {error!r}"
            raise ServiceError(what, reply.status, self._id) from error


class _Kept:
    """Answers of one model, for a while."""

    def __init__(self, least: int, seconds: float) -> None:
        self._least, self._seconds = least, seconds
        self._identity: str | None = None
        self._recent: Recent[_Asked, tuple[float, tuple[Choice, ...]]] = Recent(least)

    def get(self, asked: _Asked) -> tuple[Choice, ...] | None:
        until, choices = self._recent.get(asked) or (0.0, ())
        return choices if clock() < until else None

    def put(self, identity: str | None, found: Mapping[_Asked, tuple[Choice, ...]]) -> None:
        """Keep what the model of that identity has answered, and nothing of another model."""
        if identity is not None and identity != self._identity:
            self._identity = identity
            self._recent = Recent(self._least)
        if self._least:
            until = clock() + self._seconds
            for asked, choices in found.items():
                self._recent.put(asked, (until, choices))


def _locally(
    predictor: Predictor, problems: Sequence[Record], device: Device, top: int
) -> list[tuple[Choice, ...]]:
    return [tuple(predictor.rank(problem, device, top)) for problem in problems]


def _checked(problem: Record) -> Record:
    if not isinstance(problem, Problem):
        raise InvalidInput("problem", problem, "a confpred.Problem")
    return problem
