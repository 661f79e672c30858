"""Servers to measure and clients that measure them, for `service_latency.py`.

Clients are bare sockets that send ready bytes: one costs some 10 us a request, so that what is
timed is the server.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.provenance import ROOT
from confpred.service import Settings, logs, tokens
from confpred.service.app import Guard
from confpred.service.metrics import Metrics

#: uvicorn's settings of the no-op; those of `confpred serve` are the same.
_SERVED_ALIKE = {"access_log": False, "server_header": False, "ws": "none"}
_NO_OP = "from benchmarks.service.service_load import serve_no_op; serve_no_op"
_SERVE = "from confpred.cli import main; main()"
DATA = ROOT / "datasets" / "h100"
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


def no_op() -> FastAPI:
    """Return the least that an application of the same framework can do with the same request."""
    app, constant = FastAPI(), b" " * 640  # bytes, as a reply of one problem has

    @app.post("/v1/predict")
    async def predict(request: Request) -> Response:
        await request.body()
        return Response(constant, media_type="application/json")

    return app


def serve_no_op(tokens_file: str | None = None) -> None:
    """Serve the no-op; with a file of tokens, with the middleware and the log that `confpred serve`
    has as the unit in docs/deploy runs it."""
    import uvicorn

    app, log = no_op(), {}
    if tokens_file is not None:
        settings = Settings(log_format="json", tokens=tokens_file)
        app.state.tokens = tokens.read(tokens_file)
        app.add_middleware(Guard)
        app.add_middleware(logs.Access, metrics=Metrics(), log=True)
        logs.configure(settings, "0")
        logging.getLogger("uvicorn").setLevel("INFO")  # it tells its port
        log = {"log_config": None}
    uvicorn.run(app, port=0, **_SERVED_ALIKE, **log)


@contextmanager
def running(code: str, *arguments: str, out: IO[str] | None = None) -> Iterator[tuple[int, int]]:
    """Start a server by Python `code`; the value is its port and process id."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        for line in process.stderr or ():
            if found := re.search(r"running on http://.*:(\d+)", line):
                break
        else:
            raise SystemExit("the server did not start")
        try:
            drain = threading.Thread(target=_drain, args=(process.stderr,))
            drain.start()
            port = int(found[1])
            while True:  # with several workers the address is announced before they answer
                try:
                    Connection(port).status(get("/healthz"))
                    break
                except OSError:
                    time.sleep(0.05)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait()
            drain.join()


def _drain(said: IO[str] | None) -> None:
    """Read the server's further output, so that the pipe does not fill."""
    for _ in said or ():
        pass


def server(*options: str) -> Any:
    """Return a running ``confpred serve``."""
    return running(_SERVE, "serve", "--port", "0", "--no-access-log", *options)


def no_op_server() -> Any:
    """Return the no-op, run by the same server in the same way."""
    return running(f"{_NO_OP}()")


@contextmanager
def as_the_unit_runs_it(*options: str) -> Iterator[tuple[int, int, bytes]]:
    """Start a no-op and a ``confpred serve`` with the access log as JSON, in a file, and with
    tokens: the port of each, and the header that a request needs."""
    secret, token = tokens.make("benchmark", "read")
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "a") as out:
        path = f"{folder}/tokens.json"
        tokens.write(path, [token])
        no_op = running(f"{_NO_OP}({path!r})", out=out)
        served = ("serve", "--port", "0", "--tokens", path, "--log-format", "json", *options)
        with no_op as (idle, _), running(_SERVE, *served, out=out) as (port, _):
            yield idle, port, f"authorization: Bearer {secret}\r\n".encode()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


def post(body: dict[str, Any], padding: int = 0, wait_s: int = 60) -> bytes:
    """Return the bytes of a predict request, its JSON made longer by so many spaces."""
    text = json.dumps(body).encode() + b" " * padding
    lines = (
        "POST /v1/predict HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"prefer: wait={wait_s}",
        f"content-length: {len(text)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + text


def upload(body: bytes) -> bytes:
    """Return the bytes of a request that sends `body`."""
    lines = (
        "POST /v1/measurements HTTP/1.1",
        "host: localhost",
        "content-type: application/vnd.apache.parquet",
        f"idempotency-key: {hashlib.sha256(body).hexdigest()}",
        f"content-length: {len(body)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


class Connection:
    """One keep-alive connection, opened again where the server has closed it."""

    def __init__(self, port: int, client: str = "127.0.0.1") -> None:
        self._port, self._client = port, client
        self._open()

    def _open(self) -> None:
        where, own = ("127.0.0.1", self._port), (self._client, 0)
        self.socket = socket.create_connection(where, source_address=own)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self.socket.close()

    def reply(self, request: bytes) -> bytes:
        """Return the whole reply to `request`."""
        self.socket.sendall(request)
        received = b""
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += self._more()
        length = _LENGTH.search(received[: end + 2])
        if length is None:
            raise SystemExit(f"a reply without its length: {received[:200]!r}")
        missing = end + 4 + int(length[1]) - len(received)
        parts = [received]
        while missing > 0:
            parts.append(self._more())
            missing -= len(parts[-1])
        if b"\r\nconnection: close\r\n" in received[: end + 2]:
            self.close()
            self._open()
        return b"".join(parts)

    def _more(self) -> bytes:
        received = self.socket.recv(1 << 20)
        if not received:
            raise ConnectionError("the server closed the connection")
        return received

    def status(self, request: bytes) -> int:
        return int(self.reply(request)[9:12])

    def seconds(self, request: bytes) -> float:
        """Return the time of one request, from before it is sent until its reply is read."""
        start = time.perf_counter()
        reply = self.reply(request)
        elapsed = time.perf_counter() - start
        if reply[9:12] != b"200":
            raise SystemExit(repr(reply[:500]))
        return elapsed


def problem(rng: random.Random) -> dict[str, int]:
    """Return a layer that almost certainly no earlier request asked for."""
    groups = rng.choice((2, 4, 8, 16, 32, 64))
    channels = 8 * groups
    size = {"n": rng.randint(1, 256), "h": rng.randint(7, 112), "w": rng.randint(7, 112)}
    return {**size, "c": channels, "k": channels, "r": 3, "s": 3, "padding": 1, "groups": groups}


def one(rng: random.Random) -> dict[str, Any]:
    return {"device": "h100", "problem": problem(rng)}


def batch(rng: random.Random, count: int) -> dict[str, Any]:
    return {"device": "h100", "problems": [problem(rng) for _ in range(count)]}


def rate(port: int, request: bytes, connections: int, seconds: float) -> float:
    """Return replies a second to one request from so many connections that never pause."""
    clients = [Connection(port) for _ in range(connections)]
    size = len(clients[0].reply(request))  # each reply is the same
    left = dict.fromkeys((client.socket for client in clients), size)
    count, start = 0, time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for connection in left:
            selector.register(connection, selectors.EVENT_READ)
            connection.sendall(request)
        while (elapsed := time.perf_counter() - start) < seconds:
            for key, _ in selector.select(timeout=1):
                ready: Any = key.fileobj
                left[ready] -= len(ready.recv(1 << 20))
                if left[ready] <= 0:
                    left[ready] = size
                    count += 1
                    ready.sendall(request)
    for client in clients:
        client.close()
    return count / elapsed


def metric(port: int, name: str) -> float:
    """Return the value of one of the server's metrics; 0 where it has none yet."""
    text = Connection(port).reply(get("/metrics")).decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@contextmanager
def meanwhile(clients: int, ask: Callable[[int], None]) -> Iterator[list[int]]:
    """Threads that call `ask` with their number, again and again; the value counts the calls."""
    stop, calls = threading.Event(), [0] * clients

    def work(number: int) -> None:
        while not stop.is_set():
            ask(number)
            calls[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield calls
    finally:
        stop.set()
        for thread in threads:
            thread.join()
