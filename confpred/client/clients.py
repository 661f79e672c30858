"""`Client` and `AsyncClient`: the HTTP service in place of a predictor.

A call is written once, as a coroutine of `_Questions`. `AsyncClient` awaits it. `Client` sends,
pauses and computes in the calling thread, so that its first step runs the coroutine to its end.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 -- else the first connection does, while another thread forks
import hashlib
import json
import logging
import math
import random
import re
import ssl
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import httpx

from confpred.client import answers
from confpred.client.answers import (
    Asked,
    Choices,
    Reply,
    ServedDevice,
    ServedModel,
    Submission,
    clock,
)
from confpred.concurrency import PerProcess, uninterrupted
from confpred.data.remote import RemoteFile
from confpred.errors import InvalidInput, ServiceError, ServiceUnavailable
from confpred.predict.choice import Choice, check_top
from confpred.predict.plan import Plan, plan_of
from confpred.predict.predictor import Predictor
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.problem.record import Record

log = logging.getLogger(__name__)
Read = TypeVar("Read")
Result = TypeVar("Result")
Http = TypeVar("Http")
Given = ParamSpec("Given")
PARQUET = "application/vnd.apache.parquet"
_TOO_SLOW = "the reply is too slow"
#: Seconds in which a connection has to be made: a host that is down does not reply at all.
CONNECT_S = 1.0
#: Statuses of requests that the server, or a proxy before it, has not worked on. All requests are
#: safe to repeat, also after a broken connection.
REPEATED = frozenset({429, 502, 503, 504})
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
#: Attempts that have to fail in a row to open the circuit.
FAILURES = 3
#: Seconds that the circuit is open at first, doubled after each failed trial; ``Retry-After``
#: counts up to the last.
FIRST_OPEN_S, LONGEST_OPEN_S, LONGEST_RETRY_AFTER_S = 1.0, 30.0, 300.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Names by which a call is found in the service's log.

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


class Circuit:
    """Circuit breaker: whether a server may be asked. Safe to share between threads.

    It opens when attempts fail in a row, so that a dead server does not cost every call its whole
    time, and is not overrun when it comes back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._openings = 0  # in a row
        self._until = 0.0
        self._trial: object | None = None  # the one call that finds out whether it is back

    def admit(self, call: object) -> bool:
        """Return whether `call` may ask the server; after an opening, one call at a time may."""
        with uninterrupted, self._lock:
            if not self._openings:
                return True
            if self._trial is None and clock() >= self._until:
                self._trial = call
            return self._trial is call

    def succeeded(self) -> None:
        """Close: the server has answered."""
        with uninterrupted, self._lock:
            self._failures = self._openings = 0
            self._trial = None

    def failed(self, retry_after_s: float) -> None:
        """Count a failed attempt; the server asks to wait `retry_after_s` seconds, or 0."""
        with uninterrupted, self._lock:
            self._failures += 1
            if self._failures < FAILURES and not self._openings:
                return
            seconds = min(FIRST_OPEN_S * 2.0**self._openings, LONGEST_OPEN_S)
            self._openings = min(self._openings + 1, 10)
            wait = max(seconds * random.uniform(0.75, 1), min(retry_after_s, LONGEST_RETRY_AFTER_S))
            self._until = clock() + wait

    def ended(self, call: object) -> None:
        """End `call`: if it was the trial, another call may be."""
        with uninterrupted, self._lock:
            if self._trial is call:
                self._trial = None


@dataclass(frozen=True, slots=True, eq=False)
class _ApiCall:
    """A call, whose requests share its id, its headers and its deadline on `clock`."""

    id: str
    headers: dict[str, str]
    deadline: float


class _Questions(ABC, Generic[Http]):
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
            kept_s: for how many seconds. The first answer of a new model of the service drops the
                kept ones; until then, old ones may be returned for so long.
            fallback: predictor that answers when the service cannot be reached within `timeout_s`;
                without it that is an error. The choices it makes have no `Choice.server`.

        Raises:
            InvalidInput: a value is not allowed.
        """
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
        parsed = answers.check_address(url, open_to_all=token is None)
        self.url = str(url).rstrip("/")
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout_s, self._retries, self._max_batch = timeout_s, retries, max_batch
        self._make_kept = partial(answers.Kept, kept, kept_s)
        self._fallback = fallback
        # Reading all authorities' certificates takes 0.1 s. Without TLS nobody shows one; where a
        # proxy does after all, it is refused.
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if parsed.scheme == "http" else True
        self._http = PerProcess(partial(self._connections, verify=trusted))
        self._circuit = PerProcess(Circuit)  # a trial of the parent's never ends in a child
        self._kept: dict[str, answers.Kept] = {}
        self._is_away = False

    @abstractmethod
    async def _send(self, request: dict[str, Any], deadline: float) -> Reply | str:
        """Send a request and read the whole reply; return why there is none by `deadline`."""

    @abstractmethod
    async def _pause(self, seconds: float) -> None: ...

    @abstractmethod
    async def _compute(self, function: Callable[[], Result]) -> Result:
        """Call something that may take milliseconds of this process."""

    async def _choose(
        self, problem: Record, device: str | Device, *, trace: Trace | None = None
    ) -> Choice:
        """Return the best config known for `problem` on `device`."""
        return (await self._ask([problem], device, 1, trace))[0][0]

    async def _choose_many(
        self, problems: Iterable[Record], device: str | Device, *, trace: Trace | None = None
    ) -> list[Choice]:
        """Return the `choose` of each of `problems`, in order, in as few requests as possible."""
        return [choices[0] for choices in await self._ask(problems, device, 1, trace)]

    async def _rank(
        self, problem: Record, device: str | Device, top: int = 5, *, trace: Trace | None = None
    ) -> list[Choice]:
        """Return the best `top` choices, best first."""
        return list((await self._ask([problem], device, top, trace))[0])

    async def _plan(
        self, problems: Iterable[Record], device: str | Device, *, trace: Trace | None = None
    ) -> Plan:
        """Return the choices of a network as a plan: written by `confpred.predict.plan.write_plan`,
        it is read by ``confpred.use_plan`` and ``Predictor.load(plan=...)``."""
        return plan_of(await self._choose_many(problems, device, trace=trace))

    async def _devices(self, *, trace: Trace | None = None) -> tuple[ServedDevice, ...]:
        """Return the devices that the service answers for."""
        return await self._get("/v1/devices", answers.devices_of, trace)

    async def _models(self, *, trace: Trace | None = None) -> tuple[ServedModel, ...]:
        """Return the models that the service has loaded."""
        return await self._get("/v1/models", answers.models_of, trace)

    async def _submit(
        self, shard: str | Path | RemoteFile, *, trace: Trace | None = None
    ) -> Submission:
        """Send a file of measurements, and return its state; a file with the same bytes as an
        earlier one counts once."""
        file = Path(shard) if isinstance(shard, str) else shard
        body = await self._compute(file.read_bytes) or b""
        call = self._call(trace)
        key = hashlib.sha256(body).hexdigest()
        call.headers.update({"content-type": PARQUET, "idempotency-key": key})
        reply = await self._exchange(call, "POST", "/v1/measurements", body)
        return self._read(reply, answers.submission_of, call, 202)

    async def _submission(self, upload: str, *, trace: Trace | None = None) -> Submission:
        """Return the state of a file that was sent, by its id."""
        return await self._get(f"/v1/measurements/{upload}", answers.submission_of, trace)

    async def _ask(
        self, problems: Iterable[Record], device: str | Device, top: int, trace: Trace | None
    ) -> list[Choices]:
        """Return the best `top` choices of each problem: cached ones, and the service's for the
        others. Equal problems are sent once."""
        target, top = get_device(device), check_top(top)
        asked: list[Asked] = []
        for problem in problems:
            if not isinstance(problem, Problem | ConvNd):
                allowed = "a confpred.Problem or a confpred.ConvNd"
                raise InvalidInput("problem", problem, allowed)
            asked.append((problem, top))
        kept = self._kept.setdefault(target.key, self._make_kept())
        chosen = {one: answer for one in asked if (answer := kept.get(one)) is not None}
        missing = [problem for problem, _ in dict.fromkeys(asked) if (problem, top) not in chosen]
        call = self._call(trace)
        while missing:
            part = missing[: self._max_batch]
            body = {"device": target.key, "problems": [p.to_json() for p in part], "top": top}
            try:
                reply = await self._exchange(call, "POST", "/v1/predict", json.dumps(body).encode())
            except ServiceUnavailable as error:
                rank = self._get_fallback(error).rank
                for p in missing:
                    chosen[p, top] = tuple(await self._compute(partial(rank, p, target, top)))
                break
            if len(part) > 1 and answers.is_too_much(reply):
                self._max_batch = max(1, min(self._max_batch, len(part) // 2))
                continue
            form = partial(answers.choices_of, part, target, top, self.url)
            read = self._read(reply, form, call)
            answered = {(p, top): choices for p, choices in zip(part, read, strict=True)}
            kept.put(answers.identity_of(reply, read), answered)
            chosen |= answered
            missing = missing[len(part) :]
        return [chosen[one] for one in asked]

    async def _get(self, path: str, read: Callable[[Reply], Read], trace: Trace | None) -> Read:
        call = self._call(trace)
        return self._read(await self._exchange(call, "GET", path), read, call)

    def _read(
        self, reply: Reply, read: Callable[[Reply], Read], call: _ApiCall, status: int = 200
    ) -> Read:
        """Return `reply` parsed by `read`, if it has the `status` of success.

        Raises:
            InvalidInput, ServiceError: the service refused, or its response is unexpected.
        """
        if reply.status != status:
            raise answers.error_of(reply, call.id)
        try:
            with uninterrupted:  # the first one imports all families
                return read(reply)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            message = f"unexpected response from {self.url}: {error!r}"
            raise ServiceError(message, reply.status, call.id) from error

    def _call(self, trace: Trace | None) -> _ApiCall:
        ids = trace or Trace()
        request_id = ids.request_id or uuid.uuid4().hex
        headers = {**self._headers, "x-request-id": request_id}
        if ids.traceparent is not None:
            headers["traceparent"] = ids.traceparent
        return _ApiCall(request_id, headers, clock() + self._timeout_s)

    async def _exchange(self, call: _ApiCall, method: str, path: str, body: bytes = b"") -> Reply:
        """Return the reply to a request, after at most `retries` further attempts.

        Raises:
            ServiceUnavailable: there is none by the deadline, or there cannot be, as the circuit is
                open or the server asks for more time than the call has left.
        """
        circuit = self._circuit.get()
        if not circuit.admit(call):
            message = "recent requests failed, so the service is not asked for some seconds"
            raise ServiceUnavailable(message, None, call.id)
        attempt = 0
        try:
            while True:
                left = max(0.001, call.deadline - clock())
                request = {
                    "method": method,
                    "url": self.url + path,
                    "content": body or None,
                    # RFC 7240: the server need not go on once nobody waits.
                    "headers": {**call.headers, "prefer": f"wait={math.ceil(left)}"},
                    "timeout": httpx.Timeout(left, connect=min(left, CONNECT_S)),
                }
                reply = await self._send(request, call.deadline)
                if isinstance(reply, Reply) and reply.status not in REPEATED:
                    circuit.succeeded()
                    self._note_answer()
                    return reply
                asked_s = 0.0 if isinstance(reply, str) else answers.retry_after_s(reply.headers)
                circuit.failed(asked_s)
                # Jitter, so that clients that failed together do not come back together.
                pause = random.uniform(0, min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S))
                if attempt == self._retries or clock() + asked_s + pause >= call.deadline:
                    raise answers.unavailable_error(reply, asked_s, call.id)
                await self._pause(asked_s + pause)
                attempt += 1
        finally:
            circuit.ended(call)

    def _get_fallback(self, error: ServiceUnavailable) -> Predictor:
        if self._fallback is None:
            raise error
        if not self._is_away:
            log.warning("%s: %s; choosing in this process meanwhile", self.url, error)
        self._is_away = True
        return self._fallback

    def _note_answer(self) -> None:
        if self._is_away:
            log.warning("%s answers again", self.url)
        self._is_away = False


def _make_blocking(
    call: Callable[Concatenate[Any, Given], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, Given], Result]:
    """Return `call` as a method of `Client`, whose coroutines never suspend."""

    @wraps(call)
    def run(self: Any, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            call(self, *args, **kwargs).send(None)
        except StopIteration as end:
            result: Result = end.value
            return result
        raise AssertionError("a call of Client was suspended")

    run.__name__ = call.__name__.lstrip("_")
    return run  # type: ignore[return-value]


class Client(_Questions[httpx.Client]):
    """Client for threads, with the methods of a `confpred.Predictor`.

    Connections are kept and shared by threads; a forked child makes its own. Unless its docstring
    says otherwise, a method raises:

        InvalidInput, UnknownDevice: as the predictor does.
        ServiceUnavailable: no answer within `timeout_s`, and there is no `fallback`.
        ServiceError: the service refused, or its response is unexpected.
    """

    _connections = httpx.Client
    choose = _make_blocking(_Questions._choose)
    choose_many = _make_blocking(_Questions._choose_many)
    rank = _make_blocking(_Questions._rank)
    plan = _make_blocking(_Questions._plan)
    devices = _make_blocking(_Questions._devices)
    models = _make_blocking(_Questions._models)
    submit = _make_blocking(_Questions._submit)
    submission = _make_blocking(_Questions._submission)

    def close(self) -> None:
        """Close the connections; a later call makes new ones."""
        if (http := self._http.take()) is not None:
            http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _send(self, request: dict[str, Any], deadline: float) -> Reply | str:
        try:
            with self._http.get().stream(**request) as response:
                parts = []
                for part in response.iter_bytes():
                    if clock() > deadline:
                        return _TOO_SLOW
                    parts.append(part)
                return Reply(response.status_code, response.headers, b"".join(parts))
        except httpx.RequestError as error:
            return f"{type(error).__name__}: {error}"

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    async def _compute(self, function: Callable[[], Result]) -> Result:
        return function()


class AsyncClient(_Questions[httpx.AsyncClient]):
    """`Client` whose calls are awaited, in one event loop; its fallback computes in a thread."""

    _connections = httpx.AsyncClient
    choose = _Questions._choose
    choose_many = _Questions._choose_many
    rank = _Questions._rank
    plan = _Questions._plan
    devices = _Questions._devices
    models = _Questions._models
    submit = _Questions._submit
    submission = _Questions._submission

    async def close(self) -> None:
        """Close the connections; a later call makes new ones."""
        if (http := self._http.take()) is not None:
            await http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _send(self, request: dict[str, Any], deadline: float) -> Reply | str:
        left = max(0.001, deadline - clock())
        try:
            response = await asyncio.wait_for(self._http.get().request(**request), left)
        except httpx.RequestError as error:
            return f"{type(error).__name__}: {error}"
        except asyncio.TimeoutError:
            return _TOO_SLOW
        return Reply(response.status_code, response.headers, response.content)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _compute(self, function: Callable[[], Result]) -> Result:
        return await asyncio.to_thread(function)
