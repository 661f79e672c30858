"""Log lines of the server's processes, as text or as JSON, and each request's id and trace.

No request waits for the reader of the log: lines are queued, and a thread writes them. A line is
lost, and counted, if too many lines wait to be read, or if the disk is full."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import select
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from queue import SimpleQueue
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import Settings
from .metrics import Metrics
from .requests import RequestError, refusal

#: The logger of requests; its lines go to standard output, all others to standard error.
ACCESS = "confpred.access"
#: Keys of an ASGI scope: the answer's fields in the log, the name of the token, and the status with
#: which the protocol refused the request, even if the application replied.
ANSWER, TOKEN, REFUSED = "confpred.answer", "confpred.token", "confpred.refused"
_GONE = 499  # nginx's status for a request whose client left before the reply
_SANE_ID = re.compile(rb"[\w.:/+=@-]{1,128}")
_TRACE = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_FIELDS = {b"x-request-id": "request_id", b"traceparent": "traceparent"}
_log = logging.getLogger(ACCESS)
_bugs = logging.getLogger(__name__)
#: Most bytes of lines that wait for each of the two streams: those of a second of full load.
_MOST_QUEUED = 4 * 2**20
#: Bytes that a pipe takes at once, so that lines of several processes are not mixed.
_PIECE = select.PIPE_BUF
#: Seconds between writes: waking the thread for each line would take longer than writing it.
_PAUSE_S = 0.01
#: Seconds that an ending process waits for its last lines to be read.
_END_S = 1.0


class Lines(logging.Handler):
    """Handler that queues lines for a file descriptor; a thread writes them, several at once."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._descriptor = descriptor
        self._queued = self._written = 0  # bytes; those that could not be written count as well
        self._refused = self._failed = 0  # lines; each is counted by one thread
        threading.Thread(target=self._write_lines, daemon=True).start()

    @property
    def lost(self) -> int:
        """Number of lines that were not written."""
        return self._refused + self._failed

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:
            return self.handleError(record)
        if self._queued + len(line) - self._written > _MOST_QUEUED:
            self._refused += 1
        else:
            self._queued += len(line)
            self._lines.put(line)
        return None

    def flush(self) -> None:
        """Wait until the lines are written, but not for long: perhaps nobody reads them."""
        end = time.monotonic() + _END_S
        while self._written < self._queued and time.monotonic() < end:
            time.sleep(0.01)

    def _write_lines(self) -> None:
        while True:
            together = self._lines.get()
            while not self._lines.empty():
                line = self._lines.get()
                if len(together) + len(line) > _PIECE:
                    self._write(together)
                    together = b""
                together += line
            self._write(together)
            time.sleep(_PAUSE_S)

    def _write(self, lines: bytes) -> None:
        try:
            os.write(self._descriptor, lines)
        except OSError:  # nobody reads, or the disk is full
            self._failed += lines.count(b"\n")
        self._written += len(lines)


#: Handlers of this process, once it is configured: for standard output, and for standard error.
_lines: list[Lines] = []


class Text(logging.Formatter):
    """Formatter of ``INFO:     message``, as uvicorn's own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return f"{record.levelname + ':':9} {record.message}"


class Json(logging.Formatter):
    """Formatter of one JSON object: time, level, process, message, and those of `record.fields`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line).decode()
        except TypeError:  # half of a character, as a file's name may have
            return json.dumps(line, default=str)


def configure(settings: Settings, process: str) -> None:
    """Log as `settings` require; `process` names this process in JSON lines."""
    logging.raiseExceptions = False  # else a bad line is reported by a blocking write
    # For speed, as the documentation of logging advises: no line says where it was called.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.captureWarnings(True)
    _lines[:] = Lines(1), Lines(2)
    for lines in _lines:
        lines.setFormatter(Json(process) if settings.log_format == "json" else Text())
    out, err = _lines
    logging.basicConfig(handlers=[err], level="WARNING", force=True)
    logging.getLogger("confpred").setLevel("INFO")
    # The supervisor logs how a process starts and ends, and a line each malformed request.
    logging.getLogger("uvicorn").setLevel("ERROR")
    _log.handlers, _log.propagate = [out], False


def lost() -> int:
    """Return how many lines this process has lost."""
    return sum(lines.lost for lines in _lines)


class Access:
    """ASGI middleware around all others. It gives each request an id, echoes its trace, counts,
    times and logs it, and turns a bug into a 500 with an id.

    An ``X-Request-Id`` of the client is the id if it is short and plain.
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
        except asyncio.CancelledError:  # the server ends, and waits no longer
            if not status:
                message = "the server stops, and this would have taken too long"
                error = RequestError(503, "stopping", message, headers={"retry-after": "1"})
                await refusal(error)(scope, receive, stamped)
        except Exception:
            incident = os.urandom(16).hex()
            _bugs.exception("request %s %r failed, id %s", scope["method"], scope["path"], incident)
            if status:  # too late for another reply: let the server cut the connection
                raise
            message = f"internal error; the server's log has it as {incident}"
            error = RequestError(500, "internal_error", message)
            await refusal(error)(scope, receive, stamped)
        finally:
            took, status = time.perf_counter() - start, scope.get(REFUSED) or status or _GONE
            # The route's own path, so that clients cannot make up label values.
            self._metrics.served(getattr(scope.get("route"), "path", "none"), status, took)
            self._metrics.add(-1, "confpred_in_flight_requests")
            if self._log:
                _write(scope, status, took, echoed)
        return None


def write_refused(client: tuple[str, int] | None, status: int, seconds: float) -> None:
    """Log a request that was refused before its head was read to the end."""
    unknown = {"client": client, "method": "-", "raw_path": b"-", "query_string": b""}
    echoed = ((b"x-request-id", os.urandom(16).hex().encode()),)
    _write({**unknown, "http_version": "1.1"}, status, seconds, echoed)


def _write(scope: Scope, status: int, took: float, echoed: Sequence[tuple[bytes, bytes]]) -> None:
    client, answer = scope.get("client"), scope.get(ANSWER, {})
    where = "-" if client is None else f"{client[0]}:{client[1]}"
    target = scope.get("raw_path", b"").decode("latin-1")
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    fields: dict[str, Any] = {
        "client": where,
        "method": scope["method"],
        "target": target,
        "status": status,
        "duration_ms": round(took * 1e3, 3),
        **{_FIELDS[name]: value.decode("latin-1") for name, value in echoed},
        **({"token": scope[TOKEN]} if TOKEN in scope else {}),
        **answer,
    }
    message = (
        f'{where} - "{scope["method"]} {target} HTTP/{scope["http_version"]}" {status} '
        f"{took * 1e3:.2f} ms {fields['request_id']}"
    )
    if answer:
        sources = " ".join(f"{source}={count}" for source, count in answer["sources"].items())
        message += f" {answer['device']} {sources} model={(answer['model'] or 'none')[:12]}"
    # A record made here takes half of the time that `info` does.
    record = logging.LogRecord(ACCESS, logging.INFO, "", 0, message, (), None)
    record.fields = fields
    _log.handle(record)
