"""Nobody has to read the log: requests are answered, and lines that are lost are counted."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from test_service_process import COMMAND, ONE, Server, eventually, exchange


@contextmanager
def with_a_stuck_reader(stream: str) -> Iterator[Server]:
    """A server that writes one of its streams to a pipe that nobody reads any more."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    reader, writer = os.pipe()
    others = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | {stream: writer}
    process = subprocess.Popen([COMMAND, "serve", "--port", str(port)], **others)
    server = Server(process, port, log=None)  # type: ignore[arg-type]
    try:
        eventually(lambda: answers(server))
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"\n" * 512)
        os.set_blocking(writer, True)
        yield server
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        for end in (reader, writer):
            os.close(end)


def answers(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_nobody_waits_for_who_reads_the_lines_of_requests() -> None:
    with with_a_stuck_reader("stdout") as server, httpx.Client(timeout=5) as client:
        for _ in range(5):
            assert client.post(f"{server.url}/v1/predict", json=ONE).status_code == 200
        assert server.metric("confpred_log_lines_lost_total") == 0  # they wait
        for _ in range(160):
            assert client.get(f"{server.url}/healthz", params={"a": "a" * 30_000}).is_success
        assert 0 < server.metric("confpred_log_lines_lost_total") < 100


@pytest.mark.slow(reason="a server of its own, and reloads")
def test_nobody_waits_for_who_reads_all_other_lines() -> None:
    with with_a_stuck_reader("stderr") as server:
        for _ in range(3):
            assert b" 400 " in exchange(server, b"\x16\x03\x01 hello\r\n\r\n")
            assert httpx.post(f"{server.url}/v1/models/reload", timeout=20).status_code == 200
        assert answers(server)
