"""One server process: uvicorn, on connections that the supervisor hands over.

It ends when the supervisor asks for it or has ended. `service.supervisor` lists their messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from confpred.errors import ConfpredError

from . import Settings, generations, logs, tokens
from .app import create_app
from .child import Channel, Fields, Start
from .generations import Loaded
from .protocol import leave, limited, sweep

_REPORT_S = 0.01  # closed connections are reported together
_COUNTS_S = 1.0  # between reports of the counts, which are lost if the process is killed


class Worker:
    """The worker's end of the channel to the supervisor, beside the server that answers requests.
    A method ``_on_...`` handles the message of that name."""

    def __init__(self, start: Start, app: FastAPI, loaded: Loaded) -> None:
        self._control, self._app, self._loaded = start.control, app, loaded
        self._connections = socket.socket(fileno=start.connections)
        self._connections.setblocking(False)
        self._closed = 0  # connections, since the start
        self._leave_at = math.inf
        self._reporting = self.orphaned = False
        self._tasks: set[asyncio.Task[None]] = set()
        # One thread, because the system keeps memory for each thread that ever loads a model.
        self._loader = ThreadPoolExecutor(1, "load")

    async def attach(self, server: uvicorn.Server) -> None:
        """Take connections for `server`, which has started, and report that to the supervisor."""
        self._server = server
        self._channel = await Channel.open(socket.socket(fileno=self._control), self._handle)
        self._app.state.supervisor = self._channel
        self._tasks |= {*map(asyncio.create_task, (self._listen(), sweep(server), self._count()))}
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connections.fileno(), self._take)
        loop.add_signal_handler(signal.SIGTERM, self._channel.send, "leaving")
        self._channel.send("ready", generation=self._loaded.current.digest)

    async def _listen(self) -> None:
        await self._channel.listen()
        self.orphaned = not self._server.should_exit  # the supervisor has ended
        self._server.should_exit = True

    async def _handle(self, word: str, fields: Fields) -> Fields | None:
        answer: Fields | None = await getattr(self, f"_on_{word}")(**fields)
        return answer

    async def _on_prepare(self, folder: str) -> None:
        """Load a generation beside those that are loaded."""
        path, loop = Path(folder), asyncio.get_running_loop()
        if path.name not in self._loaded:
            self._loaded.add(await loop.run_in_executor(self._loader, generations.load, path))

    async def _on_switch(self, generation: str, keep: list[str], accepted: list[Fields]) -> None:
        """Answer by a generation, and accept the tokens `accepted`, from the next request on."""
        self._loaded.switch(generation, keep)
        self._app.state.tokens = tuple(tokens.Token(**fields) for fields in accepted)
        # Forgotten generations refer to themselves. The search takes 10 ms, as imports are frozen.
        asyncio.get_running_loop().run_in_executor(self._loader, gc.collect)

    async def _on_counts(self) -> Fields:
        return {"counts": self._app.state.metrics.rows()}

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(_COUNTS_S)
            self.report_counts()

    def report_counts(self) -> None:
        self._channel.send("counts", counts=self._app.state.metrics.rows())

    async def _on_stop(self, wait: float) -> None:
        """Take the connections that were handed over already; end when all are closed. A connection
        closes after its next reply, or after `wait` seconds without a request."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._connections.fileno())
        self._take()
        leave(self._server)
        self._leave_at = min(self._leave_at, loop.time() + wait)
        await asyncio.sleep(0.05)  # so that requests that arrived with them are read
        while self._server.server_state.connections and loop.time() < self._leave_at:
            await asyncio.sleep(0.01)
        self._server.should_exit = True

    def _take(self) -> None:
        """Take all connections that the supervisor has handed over."""
        while True:
            try:
                said, handed, _, _ = socket.recv_fds(self._connections, 1, 1)
            except BlockingIOError:
                return
            if not said:  # the supervisor has ended
                asyncio.get_running_loop().remove_reader(self._connections.fileno())
                return
            for descriptor in handed:
                task = asyncio.create_task(self._connect(socket.socket(fileno=descriptor)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            if not handed:  # this process has no descriptor left
                self._count_closed()

    async def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: self._protocol(loop), connection)
        except OSError:
            connection.close()
            self._count_closed()

    def _protocol(self, loop: asyncio.AbstractEventLoop) -> asyncio.Protocol:
        """Return the protocol of one connection, as uvicorn makes it for those that it accepts."""
        made = self._server.config.http_protocol_class(  # type: ignore[call-arg]
            config=self._server.config,
            server_state=self._server.server_state,
            app_state=self._server.lifespan.state,
            _loop=loop,
        )
        made.on_lost = self._count_closed  # type: ignore[attr-defined]
        return made

    def _count_closed(self) -> None:
        self._closed += 1
        if not self._reporting:
            self._reporting = True
            asyncio.get_running_loop().call_later(_REPORT_S, self._report)

    def _report(self) -> None:
        self._reporting = False
        self._channel.send("closed", count=self._closed)


class _Server(uvicorn.Server):
    """uvicorn's server, without listeners and signals of its own."""

    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self._worker.attach(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._worker.report_counts()
        await asyncio.sleep(0)  # so that the report leaves before the loop ends


def main() -> None:
    """Load, serve, and end with 0; with 1 if the models cannot be loaded."""
    start = Start(**json.loads(sys.argv[1]))
    for ignored in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all its processes
        signal.signal(ignored, signal.SIG_IGN)
    settings = Settings(**start.settings)
    logs.configure(settings, start.name)
    gc.freeze()
    try:
        *others, current = (generations.load(Path(folder)) for folder in start.generations)
    except (ConfpredError, OSError) as error:
        message = json.dumps({"do": "failed", "reason": str(error)}) + "\n"
        os.write(start.control, message.encode())
        sys.exit(1)
    loaded = Loaded(current, others)
    app = create_app(settings, loaded)
    how: dict[str, Any] = {"ws": "none", "log_config": None, "access_log": False}
    how |= {"server_header": False, "forwarded_allow_ips": settings.trusted_proxies}
    how |= {"timeout_keep_alive": settings.idle_timeout}
    how |= {"timeout_graceful_shutdown": settings.grace}
    config = uvicorn.Config(app, http=limited(settings, app.state.refused), **how)
    worker = Worker(start, app, loaded)
    _Server(config, worker).run(sockets=[])
    if worker.orphaned:  # nobody else tidies up
        shutil.rmtree(start.home, ignore_errors=True)
