"""Counts of many processes are one: they need no file, outlive processes, and miss no request."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import ONE, Server, eventually, head, running

from confpred.service.metrics import Metrics, Totals, rows

TIMES = ("--head-timeout", "1", "--body-timeout", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("metrics")
    with running(folder, *TIMES, "--log-format", "json") as server:
        yield server


def requests(route: str, status: int) -> str:
    return f'confpred_requests_total{{route="{route}",status="{status}"}}'


def logged(server: Server, status: int) -> list[dict[str, object]]:
    lines = map(json.loads, server.said().splitlines())
    return [line for line in lines if line.get("status") == status]


@pytest.mark.slow(reason="a worker is replaced")
def test_counts_need_no_file_and_outlive_their_process(tmp_path: Path) -> None:
    temporary, counted = tmp_path / "tmp", requests("/v1/predict", 200)
    temporary.mkdir()
    with running(tmp_path, "--workers", "2", TMPDIR=str(temporary)) as server:
        for _ in range(10):
            assert server.predict().status_code == 200
        (home,) = temporary.iterdir()
        assert [path.name for path in home.iterdir()] == ["generations"]
        assert server.metric(counted) == 10
        server.kill_worker()
        eventually(lambda: server.metric("confpred_workers_replaced_total") == 1)
        assert server.metric(counted) == 10
        eventually(lambda: server.metric("confpred_workers") == 2)
        assert server.metric("confpred_workers_wanted") == 2
        shutil.rmtree(home)
        assert server.metric(counted) == 10
        assert server.get("/metrics").text.count("HELP confpred_requests_total") == 1


def test_processes_that_have_ended_are_one_to_add_up() -> None:
    totals, metrics = Totals(), Metrics()
    metrics.served("/healthz", 200, 0.001)
    metrics.add(1, "confpred_in_flight_requests")
    for process in range(1000):
        totals.begin(process)
        totals.note(process, metrics.rows())
        totals.end(process)
        totals.note(process, metrics.rows())  # too late
    start = time.perf_counter()
    total = totals.sum()
    assert time.perf_counter() - start < 0.01
    assert total["confpred_requests", "/healthz", "200"] == 1000
    assert "confpred_in_flight_requests" not in {name for name, *_ in rows(total)}


def test_requests_that_are_not_http_or_too_long_are_counted_and_logged(server: Server) -> None:
    for sent, status in (
        (b"\x16\x03\x01 hello\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx-long: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nx-slow: ", 408),
    ):
        before = server.metric(requests("none", status))
        assert server.exchange(sent).startswith(b"HTTP/1.1 %d " % status)
        assert server.metric(requests("none", status)) == before + 1
        eventually(lambda status=status: logged(server, status))
        assert str(logged(server, status)[-1]["client"]).startswith("127.0.0.1:")


def test_a_slow_body_is_counted_as_what_it_is_answered(server: Server) -> None:
    before = server.metric(requests("/v1/predict", 408))
    assert b" 408 " in server.exchange(head("content-length: 50"), b"{")
    assert server.metric(requests("/v1/predict", 408)) == before + 1
    assert server.metric(requests("/v1/predict", 400)) == 0
    eventually(lambda: [line["target"] for line in logged(server, 408)].count("/v1/predict") == 1)


def test_a_client_that_leaves_is_logged_as_one(server: Server) -> None:
    server.exchange(head("content-length: 50"), b"{", close=True)
    body = json.dumps({"device": "h100", "problems": [ONE["problem"]] * 900, "top": 9}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head(f"content-length: {len(body)}") + body)
    eventually(lambda: len(logged(server, 499)) == 2)
    assert server.metric(requests("/v1/predict", 499)) == 2
    assert not logged(server, 0)
