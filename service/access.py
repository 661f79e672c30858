"""Who asks and what for: request ids, traces, the line in the log, and access tokens."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import logs, tokens
from .errors import Error, reply, shorten
from .metrics import Metrics, status_of
from .tokens import Scope as TokenScope

#: What anybody may ask, and who may not manage the server may not.
OPEN = frozenset(("/healthz", "/readyz"))
ADMIN = frozenset(("/v1/models/reload", "/v1/models/rollback"))

_SANE_ID = re.compile(rb"[\w.:/+=@-]{1,128}")
_TRACE = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_FIELDS = {b"x-request-id": "request_id", b"traceparent": "traceparent"}
_ANSWER, _TOKEN = "confpred.answer", "confpred.token"
_log = logging.getLogger(logs.ACCESS)
_bugs = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered, for the log.

    Attributes:
        device: key of the device asked for.
        sources: how many of the best choices came from each source.
        generation: digest of the models and the plan that answered.
        model: digest of the model of the device, if there is one.
    """

    device: str
    sources: Mapping[str, int]
    generation: str
    model: str | None

    def fields(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "problems": sum(self.sources.values()),
            "sources": dict(self.sources),
            "generation": self.generation,
            "model": self.model,
        }


def is_loopback(address: str) -> bool:
    """Whether `address` is this machine's own; a name is not."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def note(scope: Scope, answer: Answer) -> None:
    """Have the log tell of `answer`."""
    scope[_ANSWER] = answer


class Access:
    """ASGI middleware around all others: gives each request an id, echoes its trace, counts, times
    and logs it, and turns a bug into a 500 with an id.

    An id that the client sent as ``X-Request-Id`` is taken if it is short and plain.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, log: bool) -> None:
        self._app, self._metrics, self._log = app, metrics, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start = time.perf_counter()
        request_id, echoed, status = b"", [], 0
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _SANE_ID.fullmatch(value):
                request_id = value
            elif name == b"traceparent" and _TRACE.fullmatch(value):
                echoed.append((name, value))
        request_id = request_id or os.urandom(16).hex().encode()
        echoed.append((b"x-request-id", request_id))

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *echoed]
            await send(message)

        self._metrics.add(1, "confpred_in_flight_requests")
        try:
            await self._app(scope, receive, stamped)
        except asyncio.CancelledError:  # the server ends, and cannot wait any longer
            if not status:
                error = Error("stopping", "the server stops, and this would have taken too long")
                await reply(503, error, {"retry-after": "1"})(scope, receive, stamped)
        except Exception:
            incident = os.urandom(16).hex()
            _bugs.exception("request %s %r failed, id %s", scope["method"], scope["path"], incident)
            if status:  # too late to reply otherwise: let the server cut the connection
                raise
            message = f"internal error; the server's log has it as {incident}"
            await reply(500, Error("internal_error", message))(scope, receive, stamped)
        finally:
            took, status = time.perf_counter() - start, status_of(scope, status)
            # The route's own path, so that clients cannot make up label values.
            self._metrics.served(getattr(scope.get("route"), "path", "none"), status, took)
            self._metrics.add(-1, "confpred_in_flight_requests")
            if self._log:
                _write(scope, status, took, echoed)
        return None


class Guard:
    """ASGI middleware: asks for a token that allows what is asked for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            return await self._app(scope, receive, send)
        needed: TokenScope = "admin" if scope["path"] in ADMIN else "read"
        known: Sequence[tokens.Token] = scope["app"].state.tokens
        secret = _bearer(scope)
        token = None if secret is None else tokens.find(known, secret)
        if token is None:
            given = "" if secret is None else ', error="invalid_token"'
            said = "no token" if secret is None else "an unknown token"
            error = Error(
                "unauthorized",
                f"the request has {said}",
                "authorization",
                None,
                "Bearer and a token of scope " + needed,
            )
            return await _refuse(401, error, given)(scope, receive, send)
        scope[_TOKEN] = token.name
        if not token.allows(needed):
            message = f"the token {shorten(token.name)!r} is not for this"
            error = Error("forbidden", message, "authorization", None, f"a token of scope {needed}")
            given = f', error="insufficient_scope", scope="{needed}"'
            return await _refuse(403, error, given)(scope, receive, send)
        return await self._app(scope, receive, send)


def _bearer(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, secret = value.partition(b" ")
            return secret.strip() if scheme.lower() == b"bearer" else b""
    return None


def _refuse(status: int, error: Error, parameters: str) -> ASGIApp:
    header = f'Bearer realm="confpred"{parameters}'
    return reply(status, error, {"www-authenticate": header})


def write_refused(client: tuple[str, int] | None, status: int, seconds: float) -> None:
    """Log a request that was refused before its head was read to the end."""
    unknown = {"client": client, "method": "-", "raw_path": b"-", "query_string": b""}
    echoed = ((b"x-request-id", os.urandom(16).hex().encode()),)
    _write({**unknown, "http_version": "1.1"}, status, seconds, echoed)


def _write(
    scope: Scope, status: int, seconds: float, echoed: Sequence[tuple[bytes, bytes]]
) -> None:
    client, answer = scope.get("client"), scope.get(_ANSWER)
    where = "-" if client is None else f"{client[0]}:{client[1]}"
    target = scope.get("raw_path", b"").decode("latin-1")
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    fields: dict[str, Any] = {
        "client": where,
        "method": scope["method"],
        "target": target,
        "status": status,
        "duration_ms": round(seconds * 1e3, 3),
    }
    for name, value in echoed:
        fields[_FIELDS[name]] = value.decode("latin-1")
    if _TOKEN in scope:
        fields["token"] = scope[_TOKEN]
    tail = ""
    if answer is not None:
        fields |= answer.fields()
        sources = " ".join(f"{source}={count}" for source, count in answer.sources.items())
        tail = f" {answer.device} {sources} model={(answer.model or 'none')[:12]}"
    message = (
        f'{where} - "{scope["method"]} {target} HTTP/{scope["http_version"]}" {status} '
        f"{seconds * 1e3:.2f} ms {fields['request_id']}{tail}"
    )
    # A record made here takes half of the time that `info` does.
    record = logging.LogRecord(logs.ACCESS, logging.INFO, "", 0, message, (), None)
    record.fields = fields
    _log.handle(record)
