"""Counts of many processes are one: they need no file, outlive processes, and miss no request."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from served import eventually, running

from confpred.service.metrics import Metrics, Totals, rows

pytestmark = pytest.mark.usefixtures("small_model")


@pytest.mark.slow(reason="a worker is replaced")
def test_counts_need_no_file_and_outlive_their_process(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    counted = 'confpred_requests_total{route="/v1/predict",status="200"}'
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
