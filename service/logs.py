"""What the server's processes log: a line for each event, as text or as JSON.

Lines go to the file descriptors themselves, each in one write: several processes share them, and a
full disk must cost the line and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.config
import os
from datetime import datetime, timezone

from .settings import Settings

#: The logger of requests; its lines go to standard output, all others to standard error.
ACCESS = "confpred.access"


class Lines(logging.Handler):
    """Writes to a file descriptor. A line that cannot be written is lost."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        with contextlib.suppress(OSError):  # nobody reads, or the disk is full
            os.write(self._descriptor, line)


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
        time = datetime.fromtimestamp(record.created, timezone.utc)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(settings: Settings, process: str) -> None:
    """Log as `settings` say; `process` names this one in JSON lines."""
    form = Json if settings.log_format == "json" else Text
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"()": form, "process": process}},
            "handlers": {
                "out": {"()": Lines, "descriptor": 1, "formatter": "line"},
                "err": {"()": Lines, "descriptor": 2, "formatter": "line"},
            },
            "loggers": {
                "confpred": {"handlers": ["err"], "level": "INFO", "propagate": False},
                ACCESS: {"handlers": ["out"], "level": "INFO", "propagate": False},
                # How a process starts and ends is told by the supervisor.
                "uvicorn": {"handlers": ["err"], "level": "WARNING", "propagate": False},
                "asyncio": {"handlers": ["err"], "level": "WARNING", "propagate": False},
            },
        }
    )
