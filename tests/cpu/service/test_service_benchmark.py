"""The benchmark of the service measures a real server, briefly here."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.service import service_latency, service_soak
from benchmarks.service.service_load import get, metric, no_op_server, one, post, server
from confpred.service.exchange import Exchange


@pytest.mark.slow(reason="two servers start")
def test_a_service_is_measured_in_turn_with_a_no_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_latency, "_RATE_S", 0.2)  # seconds instead of minutes
    request = post(one(random.Random(0)))
    with no_op_server() as (idle, _), server() as (port, _):
        targets = {
            "no-op": (idle, request),
            "known": (port, request),
            "up": (port, get("/healthz")),
        }
        found = service_latency.in_turn(targets, rounds=2, requests=20)
        assert metric(port, "confpred_worked_out_problems_total") == 1
    for figures in found.values():
        assert figures["requests"] == 20
        assert 0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]
        assert figures["requests_per_s"] > 0


@pytest.fixture
def short_soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(service_soak, "_CAPACITY_S", 1.0)  # seconds instead of minutes
    monkeypatch.setattr(service_soak, "_SAMPLE_S", 0.2)  # samples of so short a soak
    return service_soak


@pytest.fixture
def exchange(tmp_path: Path) -> Exchange:
    return Exchange(tmp_path)


@pytest.mark.slow(reason="a server is asked for seconds")
def test_a_soak_disturbs_the_server_and_tells_what_that_cost(
    short_soak: Any, exchange: Exchange
) -> None:
    kinds = short_soak.Disturbance(reload_every=1, kill_every=2)
    with server("--workers", "2", "--exchange", str(exchange.folder)) as (port, pid):
        found = short_soak.soak(port, pid, 3, kinds, exchange)
    assert found["uploads"]["rows_admitted"] >= 60
    assert found["uploads"]["rows_lost"] == 0
    assert (found["reloads"], found["kills"], found["stops"]) == (2, 1, 0)
    assert (found["failed"], found["statuses"].keys()) == (0, {"200"})
    assert found["connections_lost_to"].keys() <= {"kill"}
    assert found["requests"] > 50
    assert found["memory_mib"]["all"]["early"] > 150
    assert found["memory_mib"]["largest worker"]["early"] > 50


@pytest.mark.slow(reason="a server is asked for seconds")
def test_a_soak_sees_a_server_that_ends(short_soak: Any, exchange: Exchange) -> None:
    with server() as (port, pid):
        killer = threading.Timer(2, os.kill, (pid, signal.SIGKILL))
        killer.start()
        found = short_soak.soak(port, pid, 2, short_soak.Disturbance(), exchange)
        killer.join()
    assert found["failed"] > 0
