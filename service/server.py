"""Starting a server: what can be checked first, its socket, its folder, and its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from confpred.errors import ConfpredError, InvalidInput

from . import logs, systemd
from .access import is_loopback
from .settings import Settings
from .supervisor import Supervisor

_BACKLOG = 2048
_log = logging.getLogger(__name__)


def serve(settings: Settings) -> None:
    """Serve until told to stop (SIGINT or SIGTERM), then finish the requests under way.

    Raises:
        ModelError: the model folder is missing, damaged or foreign.
        InvalidInput, DataError: the plan or the file of tokens is not valid; or there are no tokens
            and other machines could connect.
        ConfpredError: the address cannot be listened on.
        GaveUp: workers ended again and again.
    """
    logs.configure(settings, "supervisor")
    with _listener(settings) as listener, _home(settings) as home:
        supervisor = Supervisor(settings, listener, home, lambda: _announce(settings, listener))
        try:
            asyncio.run(supervisor.run())
        finally:
            logs.finish()


def _listener(settings: Settings) -> socket.socket:
    """A socket that listens, on an address that the settings allow."""
    host, port = settings.host, settings.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not (is_loopback(str(address[0])) or settings.tokens or settings.allow_anonymous):
            allowed = "127.0.0.1 or another loopback address, unless --tokens FILE says who may "
            raise InvalidInput("host", host, allowed + "ask, or --allow-anonymous is given")
        found = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        reason = getattr(error, "strerror", None) or "no such host"
        raise ConfpredError(f"cannot listen on {host}, port {port}: {reason}") from None
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    return found


@contextlib.contextmanager
def _home(settings: Settings) -> Iterator[Path]:
    """A folder for what the processes of this server share, gone when it ends."""
    try:
        made = tempfile.TemporaryDirectory(prefix="confpred-serve-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfpredError(f"cannot make a temporary folder: {error.strerror}") from error
    with made as name:
        home = Path(name)
        # Who tidies up /tmp leaves a folder that is locked.
        lock = os.open(home, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            yield home
        finally:
            os.close(lock)


def _announce(settings: Settings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    workers = f"{settings.workers} worker{'s' if settings.workers > 1 else ''}"
    _log.info("confpred running on http://%s:%d with %s", shown, port, workers)
    systemd.tell(READY="1")
