"""One worker process, as its supervisor sees it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .channel import Channel, Handler
from .settings import Settings

_PROGRAM = "import sys; sys.path[:] = {path!r}; from confpred.service.{module} import main; main()"
#: How a process ends that crashes, rather than being told to.
_CRASHES = frozenset((signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE))


def command(module: str) -> tuple[str, str, str]:
    """Start the `main` of a module of this package in a new interpreter, which finds modules where
    this one does, whatever folder it is started in."""
    return sys.executable, "-c", _PROGRAM.format(path=sys.path, module=module)


class Child:
    """A worker process.

    Attributes:
        name: its place among the workers, for the log.
        ready: whether it takes connections.
        was_ready: whether it ever did.
        leaving: whether it was told to end, though the server was not.
        failed: why it could not start, in its own words.
        crashed: whether it ended by a signal of its own doing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready = self.was_ready = self.leaving = self.crashed = False
        self.failed: str | None = None
        self._handed = self._closed = 0

    async def start(
        self, settings: Settings, home: Path, generations: Sequence[Path], handler: Handler
    ) -> None:
        """Start the process; it loads `generations`, of which the last is current, and removes
        `home` if it outlives this one.

        Raises:
            OSError: there are too many processes or open files.
        """
        with _Pairs() as pairs:
            theirs = (pairs.control[1].fileno(), pairs.connections[1].fileno())
            start = {
                "settings": asdict(settings),
                "name": self.name,
                "control": theirs[0],
                "connections": theirs[1],
                "generations": [str(folder) for folder in generations],
                "home": str(home),
            }
            self._process = await asyncio.create_subprocess_exec(
                *command("worker"),
                json.dumps(start),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=theirs,
            )
            self._connections = pairs.connections[0]
            self._connections.setblocking(False)
            self.channel = await Channel.open(pairs.control[0], handler)
            pairs.keep_ours()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def load(self) -> tuple[int, int]:
        """By what workers are compared: its open connections, and all that it ever had."""
        return self._handed - self._closed, self._handed

    def count_closed(self, closed: int) -> None:
        self._closed = closed

    def hand(self, connection: socket.socket) -> bool:
        """Give it a connection; False if it has too many waiting already."""
        try:
            socket.send_fds(self._connections, [b"c"], [connection.fileno()])
        except OSError:  # full, or the process has just ended
            return False
        self._handed += 1
        return True

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def run(self) -> str:
        """Listen until the process has ended; how it ended, in words."""
        await self.channel.listen()
        await asyncio.sleep(0)  # for its last words to be heard
        status = await self._process.wait()
        self.ready = False
        self._connections.close()
        if self.failed is not None:
            return self.failed
        self.crashed = -status in _CRASHES
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"


class _Pairs:
    """The two pairs of sockets between the processes; the worker's ends are closed here."""

    def __enter__(self) -> _Pairs:
        self.control = socket.socketpair()
        self.connections = socket.socketpair()
        self._ours: list[Any] = [self.control[0], self.connections[0]]
        return self

    def keep_ours(self) -> None:
        self._ours = []

    def __exit__(self, *error: object) -> None:
        for end in (*self._ours, self.control[1], self.connections[1]):
            end.close()
