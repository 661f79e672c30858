"""What the server's processes log: a line for each event, as text or as JSON.

No request waits for whoever reads the log: lines are queued, and a thread writes them. A line is
lost, and counted, if nobody takes it before too many wait, or if the disk is full.
"""

from __future__ import annotations

import json
import logging
import logging.config
import os
import select
import time
from datetime import datetime, timezone
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

import orjson

from .settings import Settings

#: The logger of requests; its lines go to standard output, all others to standard error.
ACCESS = "confpred.access"

#: Bytes of lines that may wait for each of the two streams: those of a second of the most requests.
_MOST_QUEUED = 4 * 2**20
#: Bytes that even a pipe takes in one piece, so that lines of several processes are not mixed.
_PIECE = select.PIPE_BUF
#: Seconds between writes: to wake the thread for each line would take longer than to write it.
_PAUSE_S = 0.01
#: Seconds that a process which ends waits for its last lines to be taken.
_END_S = 1.0


class _Writer(QueueListener):
    """The thread that writes queued lines to a file descriptor, several at once.

    Attributes:
        done: bytes that it has written, or tried to.
        lost: lines that could not be written.
    """

    def __init__(self, lines: SimpleQueue[Any], descriptor: int) -> None:
        super().__init__(lines)
        self._lines, self._descriptor = lines, descriptor
        self.done = self.lost = 0

    def handle(self, record: Any) -> None:
        """Write a line, and those that wait behind it: here, `record` is bytes."""
        piece = record
        while not self._lines.empty():
            line = self._lines.get()
            if len(piece) + len(line) > _PIECE:
                self._write(piece)
                piece = b""
            piece += line
        self._write(piece)
        time.sleep(_PAUSE_S)

    def _write(self, piece: bytes) -> None:
        try:
            os.write(self._descriptor, piece)
        except OSError:  # nobody reads, or the disk is full
            self.lost += piece.count(b"\n")
        self.done += len(piece)


class Lines(QueueHandler):
    """Queues lines for a file descriptor.

    Attributes:
        lost: lines that were not written.
    """

    def __init__(self, descriptor: int) -> None:
        lines: SimpleQueue[Any] = SimpleQueue()
        super().__init__(lines)
        self._queued = self._refused = 0
        self._writer = _Writer(lines, descriptor)
        self._writer.start()

    @property
    def lost(self) -> int:
        return self._refused + self._writer.lost

    def prepare(self, record: logging.LogRecord) -> Any:
        """The bytes to write, made here: a record refers to what may change."""
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def enqueue(self, record: Any) -> None:
        if self._queued + len(record) - self._writer.done > _MOST_QUEUED:
            self._refused += 1
            return
        self._queued += len(record)
        self.queue.put_nowait(record)

    def flush(self) -> None:
        """Wait until the lines are written, but not for long: perhaps nobody reads."""
        end = time.monotonic() + _END_S
        while self._writer.done < self._queued and time.monotonic() < end:
            time.sleep(0.01)


class Text(logging.Formatter):
    """``INFO:     message``, as uvicorn's own."""

    def __init__(self, process: str) -> None:
        super().__init__("%(level)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.level = f"{record.levelname}:".ljust(9)
        return super().formatMessage(record)


class Json(logging.Formatter):
    """One JSON object: time, level, process, message, and the fields of `record.fields`."""

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
    """Log as `settings` say; `process` names this one in JSON lines."""
    form = Json if settings.log_format == "json" else Text
    logging.raiseExceptions = False  # else a line that cannot be made is told by a blocking write
    # As the documentation of logging advises for speed: no line tells where it was logged.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.captureWarnings(True)
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"()": form, "process": process}},
            "handlers": {
                "out": {"()": Lines, "descriptor": 1, "formatter": "line"},
                "err": {"()": Lines, "descriptor": 2, "formatter": "line"},
            },
            "root": {"handlers": ["err"], "level": "WARNING"},
            "loggers": {
                "confpred": {"level": "INFO"},
                ACCESS: {"handlers": ["out"], "propagate": False},
                # How a process starts and ends is told by the supervisor, and a malformed request
                # by its own line.
                "uvicorn": {"level": "ERROR"},
            },
        }
    )


def lost() -> int:
    """Lines that this process has lost."""
    return sum(handler.lost for handler in _handlers())


def finish() -> None:
    """Wait for the lines so far to be taken, before the process ends."""
    for handler in _handlers():
        handler.flush()


def _handlers() -> list[Lines]:
    found = (*logging.getLogger().handlers, *logging.getLogger(ACCESS).handlers)
    return [handler for handler in found if isinstance(handler, Lines)]
