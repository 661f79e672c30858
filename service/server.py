"""Running the application under uvicorn, in one process or several."""

from __future__ import annotations

import copy
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import uvicorn
import uvicorn.config
from fastapi import FastAPI

from confpred.errors import ConfpredError
from confpred.predict.predictor import Predictor

from .app import create_app
from .metrics import SHARED_FOLDER
from .settings import Settings

#: Hands the settings to the server processes, which uvicorn starts by an import string.
_HANDOVER = "_CONFPRED_SERVER_SETTINGS"
_SHUTDOWN_S = 30  # for requests under way, once the server is told to stop


def serve(settings: Settings) -> None:
    """Serve until told to stop (SIGINT or SIGTERM), then finish the requests under way.

    Raises:
        ModelError: the model folder is missing, damaged or foreign.
        InvalidInput, DataError: the file of pins is not valid.
        ConfpredError: the address cannot be listened on.
    """
    # Both can fail for reasons that the user can mend: find out here, not in each process.
    Predictor.load(settings.model, pins=settings.pins)
    port = _free_port(settings.host, settings.port)
    with _handover(settings):
        uvicorn.run(
            f"{__name__}:_app",
            factory=True,
            host=settings.host,
            port=port,
            workers=settings.workers,
            access_log=settings.access_log,
            log_config=_log_config(),
            server_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_S,
            ws="none",
        )


def _app() -> FastAPI:
    """The application of one server process."""
    return create_app(Settings(**json.loads(os.environ[_HANDOVER])))


@contextmanager
def _handover(settings: Settings) -> Iterator[None]:
    """Leave the settings for the server processes, and a folder to add up their counts in."""
    os.environ[_HANDOVER] = json.dumps(asdict(settings))
    if settings.workers == 1:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="confpred-metrics-") as folder:
        os.environ[SHARED_FOLDER] = folder
        yield


def _free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0, after a check that this process may listen on it."""
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server((host, port), family=family) as probe:
            found: int = probe.getsockname()[1]
            return found
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        reason = getattr(error, "strerror", "no such host")
        raise ConfpredError(f"cannot listen on {host}, port {port}: {reason}") from None


def _log_config() -> dict[str, Any]:
    """uvicorn's own logging, with confpred's messages in the same form."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["loggers"]["confpred"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return config
