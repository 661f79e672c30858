"""The HTTP protocol of a worker: uvicorn's, with limits on the sizes and times of requests.

uvicorn's parser (httptools) has no limit on a head or on a chunk's trailers, and a time-out for
idle connections alone. Deadlines are attributes of the connections that one task checks each
second, because a timer for each request would cost more than the request's own checks.

A client may send requests before earlier ones are answered (pipelining). They are parsed only once
the earlier ones are answered, and while many bytes of them wait, no more are read.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
import sys
import time
from collections.abc import Callable
from http import HTTPStatus

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from . import Settings
from .logs import REFUSED
from .requests import RequestError

_SWEEP_S = 1.0
#: Seconds that a refused client's further bytes are read, so that it gets the reply.
_LINGER_S = 2
#: Most bytes on the wire for each byte of a body: chunks of one byte take six.
_WIRE_FACTOR = 8
#: Bytes that are parsed at once. Each of the requests in them takes some 3 KiB, and the shortest
#: has 18 bytes.
_PIECE = 4096
#: Path of requests whose body is measurements.
UPLOADS = b"/v1/measurements"
#: Headers that say where a body ends.
_FRAMING = (b"content-length", b"transfer-encoding")
#: Bytes that may wait to be parsed before no more are read.
_MOST_HELD = 65_536
_SLOW_HEAD, _SLOW_BODY = (
    RequestError(408, "request_timeout", f"the {part} of the request did not arrive in time", part)
    for part in ("head", "body")
)
#: Called with the client's address, the status and the seconds since the request's first byte.
OnRefused = Callable[[tuple[str, int] | None, int, float], None]
_log = logging.getLogger(__name__)


class _Flow(FlowControl):
    """The flow of a connection: it reads no more while many bytes (`held`) wait to be parsed."""

    held = b""

    def hold(self, data: bytes) -> None:
        self.held = data
        if len(data) > _MOST_HELD:
            self.pause_reading()

    def resume_reading(self) -> None:
        if len(self.held) <= _MOST_HELD:
            super().resume_reading()


class LimitedProtocol(HttpToolsProtocol):
    """One connection. The settings are those of a subclass that `limited` makes."""

    limits = Settings()
    leaving = False  # whether this process ends; set for all connections at once
    deadline = math.inf  # end of the client's time, by the monotonic clock
    on_refused: OnRefused  # called for each request that is refused before the application runs
    on_lost: Callable[[], None] = staticmethod(lambda: None)  # called when the connection closes
    _due: RequestError | None = None  # the reply at the deadline; None closes without a reply
    _in_head = _refused = _resuming = False
    _piece = b""  # bytes that are being parsed
    _began = 0.0
    _received = 0  # bytes of the message that is arriving ...
    _most_body = 0  # ... and most bytes of its body on the wire

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow: _Flow = _Flow(self.transport)
        self._set_deadline(self.limits.head_timeout, None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        self._parse(self.flow.held + data if self.flow.held else data)

    def _parse(self, data: bytes) -> None:
        """Parse the bytes that have arrived, up to a request that must wait for an earlier
        reply."""
        place = 0
        while place < len(data) and not self._must_wait():
            piece = data[place : place + _PIECE]
            place += len(piece)
            self._received += len(piece)
            self._piece = piece
            super().data_received(piece)
            if self._received > self.limits.max_head + (0 if self._in_head else self._most_body):
                self._refuse_length()
        self.flow.hold(b"" if self._refused else data[place:])
        if self.leaving:
            self.leave()

    def _must_wait(self) -> bool:
        return self._refused or self._answering() or self.flow.write_paused

    def _go_on(self) -> None:
        if self.flow.held and not self.transport.is_closing():
            self._parse(self.flow.held)
            if not self._must_wait():
                self.flow.resume_reading()

    def leave(self) -> None:
        """Close after the reply to the last request that has arrived."""
        if self.cycle is not None and not (self.flow.held or self._in_head):
            self.cycle.keep_alive = False

    def _unsupported_upgrade_warning(self) -> None:
        """Continue with a request as if it had not asked for another protocol, as RFC 9110
        requires. The parser takes the body for that protocol's, so a new parser gets the headers
        that frame it."""
        offset = sys.exc_info()[1].args[0]  # type: ignore[union-attr]
        framing = (header for header in self.headers if header[0] in _FRAMING)
        head = b"".join(b"%s: %s\r\n" % header for header in framing)
        self._piece, self._resuming = self._piece[offset:], True
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + head + b"\r\n")
        self._resuming = False
        super().data_received(self._piece)

    def on_url(self, url: bytes) -> None:
        if not self._resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._resuming:
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        if self._resuming:
            return
        super().on_message_begin()
        self._in_head = True
        self._set_deadline(self.limits.head_timeout, _SLOW_HEAD)
        self._began = time.monotonic()

    def on_headers_complete(self) -> None:
        if self._received > self.limits.max_head:  # perhaps with bytes of the body
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self.limits.max_head:
                self._refuse_length()
        if self._resuming:
            return
        self._in_head = False
        hosts = sum(name == b"host" for name, _ in self.headers)
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1") or hosts > 1 or (version == "1.1" and not hosts):
            self.send_400_response("")
        limits, is_upload = self.limits, self.url.startswith(UPLOADS)
        most = limits.max_upload_mib * 2**20 if is_upload else limits.max_body_bytes
        self._most_body = _WIRE_FACTOR * most
        if not self._refused:
            self._set_deadline(self.limits.body_timeout, _SLOW_BODY)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not (self._refused or self.parser.should_upgrade()):
            self._received, self.deadline = 0, math.inf
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._go_on()

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError(400, "bad_request", "the request is not HTTP/1.1 with one Host"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_deadline(self.limits.write_timeout, None)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._in_head:
            self._set_deadline(self.limits.head_timeout, _SLOW_HEAD)
        elif self.cycle is not None and self.cycle.more_body:
            self._set_deadline(self.limits.body_timeout, _SLOW_BODY)
        else:
            self.deadline = math.inf
        self._go_on()

    def check(self, now: float) -> None:
        """Cut the connection if its deadline has passed."""
        if self.deadline == math.inf and self.transport.is_closing():
            self._set_deadline(self.limits.write_timeout, None)  # to read the end of the reply
        elif self.deadline < now:
            if self._due is None:
                self._abort()
            elif self._answering():  # the client waits, though it has begun to send beyond
                self._set_deadline(self.limits.head_timeout, self._due)
            else:
                self._refuse(self._due)

    def _answering(self) -> bool:
        """Return whether a request that has arrived in full waits for its reply."""
        cycle = self.cycle
        if cycle is None:
            return False
        return bool(self.pipeline) or not (cycle.response_complete or cycle.more_body)

    def _set_deadline(self, seconds: float, due: RequestError | None) -> None:
        self.deadline, self._due = time.monotonic() + seconds, due

    def _abort(self) -> None:
        """Close at once, without unread bytes of the reply in the system's buffers."""
        # Not a copy: there may be no descriptor left. uvloop's own socket has no such method.
        same = socket.socket(fileno=self.transport.get_extra_info("socket").fileno())
        try:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            same.detach()
        self.transport.abort()

    def _refuse_length(self) -> None:
        if self._in_head:
            allowed = f"{self.limits.max_head} bytes"
            message = f"the request's line and headers are too long; allowed: {allowed}"
            self._refuse(RequestError(431, "head_too_large", message, "head", None, allowed))
        else:
            message = "the request has too many bytes"
            self._refuse(RequestError(413, "body_too_large", message, "body"))

    def _refuse(self, error: RequestError) -> None:
        """Reply if no reply is under way, and close."""
        if self._refused:
            return None
        self._refused = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self.on_refused(self.client, error.status, time.monotonic() - self._began)
        else:
            if not cycle.response_started:
                cycle.scope[REFUSED] = error.status  # type: ignore[literal-required]
            cycle.disconnected = True  # a reply of the application would be too late
            cycle.message_event.set()
        if self.pipeline or (cycle is not None and cycle.response_started and cycle.more_body):
            return self._abort()
        phrase = HTTPStatus(error.status).phrase
        head = (
            f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(error.body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write((head + error.body).encode())
        self.transport.write_eof()
        return self._set_deadline(_LINGER_S, None)


def limited(settings: Settings, refused: OnRefused) -> type[LimitedProtocol]:
    """Return the protocol with the limits of `settings`."""
    own = {"limits": settings, "on_refused": staticmethod(refused)}
    return type("_Protocol", (LimitedProtocol,), own)


def connections(server: uvicorn.Server) -> list[LimitedProtocol]:
    """Return the open connections of `server`."""
    every = server.server_state.connections
    return [connection for connection in every if isinstance(connection, LimitedProtocol)]


def leave(server: uvicorn.Server) -> None:
    """Have each connection of `server` close after the reply to its next request."""
    server.config.http_protocol_class.leaving = True  # type: ignore[attr-defined]
    for connection in connections(server):
        connection.leave()


async def sweep(server: uvicorn.Server) -> None:
    """Cut the connections of `server` whose deadlines have passed, for ever."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        now = time.monotonic()
        for connection in connections(server):
            try:
                connection.check(now)
            except Exception:  # an error on one connection must not keep the others open
                _log.exception("a connection could not be cut")
