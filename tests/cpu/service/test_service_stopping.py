"""A process that is told to end loses no request, and says so where it cannot wait for one."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from test_service_process import LONG, eventually, running
from test_service_supervision import alive, status

CLIENTS = 32


@pytest.mark.slow(reason="workers start, end and are replaced")
def test_a_worker_that_is_told_to_end_loses_no_request(tmp_path: Path) -> None:
    with running(tmp_path, "--workers", "2") as server:
        before, end, statuses = (
            server.workers(),
            threading.Event(),
            [list[object]() for _ in range(CLIENTS)],
        )

        def ask(number: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            while not end.is_set():
                statuses[number].append(status(connection))
                time.sleep(0.02)

        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(ask, number) for number in range(CLIENTS)]
            for victim in before:
                os.kill(victim, signal.SIGTERM)
            eventually(lambda: not any(map(alive, before)) and len(server.workers()) == 2)
            end.set()
        assert not [each for each in asking if each.exception()]
        assert all(each and set(each) == {200} for each in statuses)
        assert server.log.read_text().count("was told to end; another starts") == 2


@pytest.mark.slow(reason="a worker is replaced")
def test_a_connection_without_a_request_is_used_once_more(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        (victim,) = server.workers()
        idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        assert status(idle) == 200
        os.kill(victim, signal.SIGTERM)
        eventually(lambda: "answers, process" in server.log.read_text())
        assert alive(victim)
        idle.request("GET", "/readyz")
        reply = idle.getresponse()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        eventually(lambda: not alive(victim))
        assert server.process.poll() is None


def test_a_request_that_takes_longer_than_grace_is_told(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", "0") as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{server.url}/v1/predict", json=LONG, timeout=60)
        eventually(
            lambda: "confpred_queued_requests 1.0" in httpx.get(f"{server.url}/metrics").text
        )
        server.process.terminate()
        reply = asked.result()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "stopping")
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log.read_text()
