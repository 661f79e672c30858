"""Who asks and what for: request ids, traces, the line in the log, and access tokens."""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import logs, tokens
from .errors import Error, reply, shorten
from .tokens import Scope as TokenScope

#: What anybody may ask, and who may not manage the server may not.
OPEN = frozenset(("/healthz", "/readyz"))
ADMIN = frozenset(("/v1/models/reload", "/v1/models/rollback"))

_SANE_ID = re.compile(rb"[\w.:/+=@-]{1,128}")
_TRACE = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_ANSWER, _TOKEN = "confpred.answer", "confpred.token"
_log = logging.getLogger(logs.ACCESS)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered, for the log.

    Attributes:
        device: key of the device asked for.
        sources: how many of the best choices came from each source.
        generation: digest of the models and pins that answered.
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
    """ASGI middleware: gives each request an id, echoes its trace, and logs it.

    An id that the client sent as ``X-Request-Id`` is taken if it is short and plain.
    """

    def __init__(self, app: ASGIApp, log: bool) -> None:
        self._app, self._log = app, log

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
        request_id = request_id or uuid4().hex.encode()
        echoed.append((b"x-request-id", request_id))

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *echoed]
            await send(message)

        try:
            await self._app(scope, receive, stamped)
        finally:
            if self._log:
                _write(scope, status, time.perf_counter() - start, echoed)
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


def _write(
    scope: Scope, status: int, seconds: float, echoed: Sequence[tuple[bytes, bytes]]
) -> None:
    client, answer = scope.get("client"), scope.get(_ANSWER)
    where = "-" if client is None else f"{client[0]}:{client[1]}"
    target = scope.get("raw_path", b"").decode("latin-1")
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    names = {b"x-request-id": "request_id", b"traceparent": "traceparent"}
    fields: dict[str, Any] = {
        "client": where,
        "method": scope["method"],
        "target": target,
        "status": status,
        "duration_ms": round(seconds * 1e3, 3),
        **{names[name]: value.decode("latin-1") for name, value in echoed},
    }
    if _TOKEN in scope:
        fields["token"] = scope[_TOKEN]
    if answer is not None:
        fields |= answer.fields()
    tail = ""
    if answer is not None:
        sources = " ".join(f"{source}={count}" for source, count in answer.sources.items())
        tail = f" {answer.device} {sources} model={(answer.model or 'none')[:12]}"
    _log.info(
        '%s - "%s %s HTTP/%s" %d %.2f ms %s%s',
        where,
        scope["method"],
        target,
        scope["http_version"],
        status,
        seconds * 1e3,
        fields["request_id"],
        tail,
        extra={"fields": fields},
    )
