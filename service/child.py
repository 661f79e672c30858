"""A worker process as its supervisor sees it, the messages between them, and states sent to
systemd."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from confpred.errors import ConfpredError

from . import Settings

#: Fields of a message, beside its name.
Fields = dict[str, Any]
#: Returns the answer to a message of the other end; an exception is sent as ``error``.
Handler = Callable[[str, Fields], Awaitable[Fields | None]]

#: Most bytes of a line: counts have some 30 KiB, 100,000 tokens some 16 MiB.
_LONGEST = 2**24
_PROGRAM = "import sys; sys.path[:] = {path!r}; from confpred.service.{module} import main; main()"
#: Signals that end a process which crashes, rather than being stopped.
_CRASHES = frozenset((signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE))
_US = 1_000_000
_PATIENCE_S = 1.0  # for systemd to read earlier messages, and before a process starts again
_log = logging.getLogger(__name__)


class Gone(ConnectionError):
    """The other end has closed: its process ended."""


class Channel:
    """One end of a pair of sockets. Both ends may ask, and answers may come in any order."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler
    ) -> None:
        self._reader, self._writer, self._handler = reader, writer, handler
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Fields]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, end: socket.socket, handler: Handler) -> Channel:
        return cls(*await asyncio.open_connection(sock=end, limit=_LONGEST), handler)

    def send(self, word: str, **fields: Any) -> None:
        """Send a message that needs no answer; it is lost if the other end has closed."""
        self._write({"do": word, **fields})

    async def ask(self, word: str, **fields: Any) -> Fields:
        """Send a message, and wait for the answer.

        Raises:
            Gone: the other end closed before it answered.
        """
        if self._reader.at_eof() or self._writer.is_closing():
            raise Gone(word)
        number = next(self._numbers)
        answer: asyncio.Future[Fields] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._write({"do": word, "number": number, **fields})
        try:
            return await answer
        finally:
            del self._waiting[number]

    async def listen(self) -> None:
        """Handle the messages of the other end until it closes."""
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if "do" in message:
                    task = asyncio.create_task(self._serve(message))
                    self._serving.add(task)
                    task.add_done_callback(self._serving.discard)
                elif (answer := self._waiting.get(message.pop("number"))) and not answer.done():
                    answer.set_result(message)
        except ConnectionError:
            pass
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(Gone("the process ended"))
            self._writer.close()

    async def _serve(self, message: Fields) -> None:
        word, number = message.pop("do"), message.pop("number", None)
        try:
            answer = await self._handler(word, message) or {}
        except Exception as error:
            if not isinstance(error, (ConfpredError, OSError)):
                _log.exception("%s failed", word)
            answer = {"error": str(error)}
        if number is not None:
            self._write({"number": number, **answer})

    def _write(self, message: Fields) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that starts the `main` of a module of this package in a new interpreter,
    with this one's module path, in any folder."""
    return sys.executable, "-c", _PROGRAM.format(path=sys.path, module=module), *arguments


@dataclass(frozen=True, slots=True)
class Start:
    """Arguments of a worker, as one argument of its command line."""

    settings: Fields
    name: str  # name in the log
    control: int  # file descriptor of the worker's end of the channel
    connections: int  # file descriptor of the socket that connections arrive on
    generations: list[str]  # folders to load; the last is the current one
    home: str  # folder of the server, which a worker removes if it outlives the supervisor


class Child:
    """A worker process, named by its number among the workers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready = self.was_ready = False  # whether it takes connections; whether it ever did
        self.leaving = False  # whether it alone was asked to end, and not the server
        self.crashed = False  # whether it ended by a signal of a crash
        self.failed: str | None = None  # its message about why it could not start
        self.closed = self._handed = 0  # connections

    async def start(
        self, settings: Settings, home: Path, generations: Iterable[Path], handler: Handler
    ) -> None:
        """Start the process with the arguments of `Start`; raise an OSError if there are too many
        processes or open files."""
        with contextlib.ExitStack() as on_error:
            control, control_end = map(on_error.enter_context, socket.socketpair())
            connections, connections_end = map(on_error.enter_context, socket.socketpair())
            with control_end, connections_end:
                ends = (control_end.fileno(), connections_end.fileno())
                folders = [str(folder) for folder in generations]
                start = Start(asdict(settings), self.name, *ends, folders, str(home))
                self._process = await asyncio.create_subprocess_exec(
                    *command("worker", json.dumps(asdict(start))),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=ends,
                )
            self._connections = connections
            self._connections.setblocking(False)
            self.channel = await Channel.open(control, handler)
            on_error.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def load(self) -> tuple[int, int]:
        """Open connections, and all connections so far; workers are compared by these."""
        return self._handed - self.closed, self._handed

    async def ask(self, word: str, within_s: float, **fields: Any) -> Fields | None:
        """Return the answer, with ``error`` if there is none in time; None if the process has
        ended."""
        try:
            return await asyncio.wait_for(self.channel.ask(word, **fields), within_s)
        except Gone:
            return None
        except asyncio.TimeoutError:
            return {"error": f"worker {self.name} did not load it within {within_s:.0f} s"}

    def hand(self, connection: socket.socket) -> bool:
        """Hand it a connection; return False if too many are waiting there, or it has ended."""
        try:
            socket.send_fds(self._connections, [b"c"], [connection.fileno()])
        except BlockingIOError:
            return False
        except OSError:
            self.ready = False  # `run` is about to report the end
            return False
        self._handed += 1
        return True

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def run(self) -> str:
        """Listen until the process has ended, and return in words how it ended."""
        await self.channel.listen()
        await asyncio.sleep(0)  # so that its last messages are handled
        status = await self._process.wait()
        self.ready = False
        self._connections.close()
        if self.failed is not None:
            return self.failed
        self.crashed = -status in _CRASHES
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return f"ended {how}"


async def keep(settings: Settings) -> None:
    """Keep the process that checks uploads and retrains (`service.keeper`) running, for ever."""
    words = (json.dumps(asdict(settings)), str(os.getpid()))
    while True:
        process = await asyncio.create_subprocess_exec(
            *command("keeper", *words), stdin=asyncio.subprocess.DEVNULL
        )
        try:
            status = await process.wait()
        finally:
            while process.returncode is None:
                process.kill()
                with contextlib.suppress(asyncio.CancelledError):  # it is raised again
                    await process.wait()
        _log.warning("the process that checks uploads ended with %d; another starts", status)
        await asyncio.sleep(_PATIENCE_S)


def tell_systemd(**states: str) -> None:
    """Send states, such as ``READY="1"``; do nothing if systemd has not asked for them."""
    name = os.environ.get("NOTIFY_SOCKET")
    if name:
        address = "\0" + name[1:] if name.startswith("@") else name
        text = "\n".join(f"{key}={value}" for key, value in states.items())
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        ):
            datagrams.settimeout(_PATIENCE_S)
            datagrams.sendto(text.encode(), address)


async def show_life() -> None:
    """Tell systemd's watchdog for ever that the event loop runs, twice in its period; return at
    once if there is no watchdog."""
    waits_s = int(os.environ.get("WATCHDOG_USEC", "0")) / _US
    while waits_s:
        tell_systemd(WATCHDOG="1")
        await asyncio.sleep(waits_s / 2)
