"""Nobody has to read the log: requests are answered, and lines that are lost are counted."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from served import COMMAND, ONE, Server, eventually

pytestmark = pytest.mark.usefixtures("small_model")


@contextmanager
def logging_to(out: int, err: int) -> Iterator[Server]:
    """Run a server that writes its two streams to these files."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([COMMAND, "serve", "--port", str(port)], stdout=out, stderr=err)
    server = Server(process, port, log=Path())
    try:
        eventually(lambda: answers(server))
        yield server
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


def answers(server: Server) -> bool:
    try:
        return server.predict(timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def stuck() -> Iterator[int]:
    """Yield a pipe that nobody reads."""
    reader, writer = os.pipe()
    yield writer
    for end in (reader, writer):
        os.close(end)


def fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"\n" * 512)
    os.set_blocking(pipe, True)


def test_nobody_waits_for_who_reads_the_lines_of_requests(stuck: int) -> None:
    with logging_to(stuck, subprocess.DEVNULL) as server, httpx.Client(timeout=5) as client:
        fill(stuck)
        for _ in range(5):
            assert client.post(f"{server.url}/v1/predict", json=ONE).status_code == 200
        assert server.metric("confpred_log_lines_lost_total") == 0  # they wait
        for _ in range(160):
            assert client.get(f"{server.url}/healthz", params={"a": "a" * 30_000}).is_success
        assert 0 < server.metric("confpred_log_lines_lost_total") < 100


@pytest.mark.slow(reason="a server of its own, and reloads")
def test_nobody_waits_for_who_reads_all_other_lines(stuck: int) -> None:
    with logging_to(subprocess.DEVNULL, stuck) as server:
        fill(stuck)
        for _ in range(3):
            assert b" 400 " in server.exchange(b"\x16\x03\x01 hello\r\n\r\n")
            assert server.post("/v1/models/reload", timeout=20).status_code == 200
        assert answers(server)


def test_a_log_that_cannot_be_written_costs_the_lines_alone() -> None:
    with Path("/dev/full").open("wb") as full, logging_to(full.fileno(), full.fileno()) as server:
        assert answers(server)
