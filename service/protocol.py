"""The HTTP protocol of a worker: uvicorn's, with limits on what a client may send, and how slowly.

uvicorn's parser (httptools) has no limit on a head or on a chunk's trailers, and no time-out but
for idle connections. Deadlines are marks on the connections that one task looks over each second,
since a timer for each request would cost more than the request's own checks.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import Error, ErrorReply
from .settings import Settings

_SWEEP_S = 1.0
#: How long what a refused client still sends is read, so that it sees why it was refused.
_LINGER_S = 2
#: Bytes on the wire for each byte of the longest body: chunks of one byte cost six.
_WIRE_FACTOR = 8


class LimitedProtocol(HttpToolsProtocol):
    """One connection. The settings are those of a subclass that `limited` makes.

    Attributes:
        deadline: by the monotonic clock, when the client has had its time.
        on_lost: called when the connection is closed.
    """

    limits = Settings()
    deadline = math.inf
    _due: Error | None = None  # the reply at the deadline; None closes without a word
    _in_head = _refused = False
    _received = 0  # bytes of the message that is arriving
    on_lost: Callable[[], None] = staticmethod(lambda: None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._set_deadline(self.limits.head_timeout, None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._received += len(data)
        super().data_received(data)
        if self._received > self._most_bytes():
            self._refuse(*self._too_long())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._set_deadline(self.limits.head_timeout, _SLOW_HEAD)

    def on_headers_complete(self) -> None:
        if self._received > self.limits.max_head:  # perhaps by the body that came with it
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self.limits.max_head:
                self._refuse(*self._too_long())
        self._in_head = False
        if not self._refused:
            self._set_deadline(self.limits.body_timeout, _SLOW_BODY)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            self._received, self.deadline = 0, math.inf
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, Error("bad_request", "the request is not HTTP/1.1"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_deadline(self.limits.write_timeout, None)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.deadline = math.inf

    def check(self, now: float) -> None:
        """Cut the connection if its client has had its time."""
        if self.deadline == math.inf and self.transport.is_closing():
            self._set_deadline(self.limits.write_timeout, None)  # to read the end of the reply
        elif self.deadline < now:
            if self._answering():
                self._set_deadline(self.limits.head_timeout, self._due)
            elif self._due is None:
                self._abort()
            else:
                self._refuse(408, self._due)

    def _answering(self) -> bool:
        """Whether the client waits for us, and not we for what it has begun to send beyond."""
        if self._due is None or self.cycle is None:
            return False
        return bool(self.pipeline) or not (self.cycle.response_complete or self.cycle.more_body)

    def _set_deadline(self, seconds: float, due: Error | None) -> None:
        self.deadline, self._due = time.monotonic() + seconds, due

    def _most_bytes(self) -> int:
        body = 0 if self._in_head else _WIRE_FACTOR * self.limits.max_body_bytes
        return self.limits.max_head + body

    def _too_long(self) -> tuple[int, Error]:
        if self._in_head:
            allowed = f"{self.limits.max_head} bytes"
            message = f"the request's line and headers are too long; allowed: {allowed}"
            return 431, Error("head_too_large", message, "head", None, allowed)
        return 413, Error("body_too_large", "the request has too many bytes", "body")

    def _abort(self) -> None:
        """Close at once; the system is not to keep what the client did not read either."""
        connection = self.transport.get_extra_info("socket")
        with socket.fromfd(connection.fileno(), connection.family, connection.type) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _refuse(self, status: int, error: Error) -> None:
        """Reply if no reply is under way, and close."""
        if self._refused:
            return None
        self._refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # whatever the application says is too late
            cycle.message_event.set()
        if self.pipeline or (cycle is not None and cycle.response_started and cycle.more_body):
            return self._abort()
        body = json.dumps(asdict(ErrorReply(error)))
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write((head + body).encode())
        self.transport.write_eof()
        return self._set_deadline(_LINGER_S, None)


def limited(settings: Settings) -> type[LimitedProtocol]:
    """The protocol with the limits of `settings`."""
    return type("_Protocol", (LimitedProtocol,), {"limits": settings})


async def sweep(server: uvicorn.Server) -> None:
    """Cut the connections of `server` whose clients have had their time, for ever."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        now = time.monotonic()
        for connection in [*server.server_state.connections]:
            if isinstance(connection, LimitedProtocol):
                connection.check(now)


_SLOW_HEAD = Error("request_timeout", "the head of the request did not arrive in time", "head")
_SLOW_BODY = Error("request_timeout", "the body of the request did not arrive in time", "body")
