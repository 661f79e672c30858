"""Processes that end: workers are replaced one by one, none outlives its server, and each end of
the server has its exit status."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import LONG, Server, eventually, head, refused, running

from confpred.service.metrics import Metrics, Totals, rows

pytestmark = pytest.mark.usefixtures("small_model")


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder in which a server makes its own, which it removes."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    yield folder
    eventually(lambda: not any(folder.iterdir()), "the server's folder was left")


@pytest.fixture
def model(tmp_path: Path, model_folder: Path) -> Path:
    """Return a model folder that may be damaged."""
    return shutil.copytree(model_folder, tmp_path / "model")


def alive(process: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def connections(server: Server, count: int) -> list[http.client.HTTPConnection]:
    """Connections that stay open, and have been used."""
    made = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=30) for _ in range(count)]
    assert [status(connection) for connection in made] == [200] * count
    return made


def status(connection: http.client.HTTPConnection) -> int | None:
    """Return the status of a request by `connection`; None if it was closed."""
    connection.auto_open = 0
    try:
        if connection.sock is None:
            connection.connect()
        connection.request("GET", "/readyz")
        reply = connection.getresponse()
        reply.read()
    except (ConnectionError, http.client.HTTPException):
        return None
    return reply.status


def test_connections_are_spread_evenly_and_a_killed_worker_costs_its_own_alone(
    tmp_path: Path, temporary: Path
) -> None:
    with running(tmp_path, "--workers", "2", TMPDIR=str(temporary)) as server:
        for _ in range(7):  # those that close count no longer
            assert server.get("/healthz").status_code == 200
        eventually(lambda: established(server) == [0, 0])
        before, held = server.workers(), connections(server, 8)
        assert established(server) == [4, 4]
        victim = server.kill_worker(and_wait=False)
        eventually(lambda: not alive(victim))
        # New ones are answered by the other.
        assert [status(connection) for connection in held].count(200) == 4
        assert {server.get("/readyz").status_code for _ in range(10)} == {200}
        eventually(lambda: len(server.workers()) == 2 and "answers, process" in server.said())
        assert len(server.workers() & before) == 1
        assert server.metric("confpred_workers_replaced_total") == 1
        assert re.search(r"worker \d ended by SIGKILL; another starts", server.said())
        assert server.process.poll() is None
        workers = server.workers()  # none of which outlives its server
        assert len(workers) == 2
        server.process.kill()
        eventually(lambda: not any(alive(worker) for worker in workers))


def established(server: Server) -> list[int]:
    """How many connections each worker has that its client has not closed."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    open_ = {row[9] for row in rows if row[3] == "01" and row[1].endswith(f":{server.port:04X}")}
    return [len(sockets(worker) & open_) for worker in server.workers()]


def sockets(process: int) -> set[str]:
    """Return the inodes of the sockets that `process` has open."""
    found = set()
    for each in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            kind, _, inode = os.readlink(each).partition(":")
            if kind == "socket":
                found.add(inode.strip("[]"))
    return found


def test_the_only_worker_is_replaced_while_requests_wait(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        # The server accepts a connection before it notices that its worker has ended.
        server.process.send_signal(signal.SIGSTOP)
        victim = server.kill_worker(and_wait=False)
        eventually(lambda: not alive(victim))
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(server.predict)
            time.sleep(0.5)
            server.process.send_signal(signal.SIGCONT)
            assert reply.result().status_code == 200


def lose_models(temporary: Path) -> None:
    """Remove the server's copy of its models, and have it make none again."""
    (home,) = temporary.iterdir()
    shutil.rmtree(home / "generations")
    (home / "generations").touch()


@pytest.mark.slow(reason="a worker is replaced")
def test_models_that_were_removed_from_the_temporary_folder_are_copied_again(
    tmp_path: Path, temporary: Path
) -> None:
    with running(tmp_path, TMPDIR=str(temporary)) as server:
        shutil.rmtree(next(temporary.iterdir()))
        server.kill_worker()
        assert server.predict().status_code == 200
        assert server.post("/v1/models/reload").status_code == 200


@pytest.mark.slow(reason="workers start again and again")
def test_a_server_whose_workers_cannot_start_gives_up_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with running(tmp_path, TMPDIR=str(tmp_path / "tmp")) as server:
        lose_models(tmp_path / "tmp")
        server.kill_worker(and_wait=False)
        assert server.process.wait(100) == 3
        said = server.said()
        assert "Traceback" not in said
        (reason,) = (line for line in said.splitlines() if line.startswith("confpred: "))
        assert reason.startswith("confpred: gave up after 5 starts of a worker: cannot read ")


@pytest.mark.slow(reason="workers start again and again")
def test_a_worker_that_answers_is_kept_though_others_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with running(tmp_path, "--workers", "2", TMPDIR=str(tmp_path / "tmp")) as server:
        lose_models(tmp_path / "tmp")
        server.kill_worker(and_wait=False)
        eventually(lambda: server.said().count("; another starts in ") > 2)
        assert server.predict().status_code == 200
        server.process.terminate()
        assert server.process.wait(60) == 0


def test_stopping_twice_is_at_once(tmp_path: Path, temporary: Path) -> None:
    with (
        running(tmp_path, "--grace", "3600", TMPDIR=str(temporary)) as server,
        server.connect() as held,
    ):
        held.sendall(head("content-length: 9"))
        time.sleep(0.5)  # for the request to begin
        server.process.terminate()
        time.sleep(1)
        assert server.process.poll() is None  # the request has an hour
        server.process.terminate()
        assert server.process.wait(60) == 0


def test_a_model_that_does_not_load_ends_the_start(model: Path) -> None:
    card = json.loads((model / "card.json").read_text())
    card["pytorch"]["margins"] = dict.fromkeys(card["pytorch"]["margins"], -1.0)
    (model / "card.json").write_text(json.dumps(card))
    code, said = refused("--port", "0", "--model", str(model), "--workers", "2")
    assert (code, len(said.splitlines())) == (1, 1)
    assert said.startswith("confpred: ")
    assert "margin" in said


def test_a_full_disk_at_the_start_is_one_clear_line(temporary: Path) -> None:
    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    code, said = refused("--port", "0", preexec_fn=no_room, TMPDIR=str(temporary))
    assert (code, len(said.splitlines())) == (1, 1)
    assert said.startswith("confpred: cannot write ")


def test_a_full_disk_refuses_the_reload_alone(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, "--model", str(model)) as server:
        card = (model / "card.json").read_text()
        (model / "card.json").write_text(card + "\n")
        # The log may still grow a little.
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (50_000, 50_000))
        reply = server.post("/v1/models/reload")
        assert reply.status_code == 409
        assert "cannot write " in reply.json()["error"]["message"]
        assert server.predict().status_code == 200


@pytest.mark.slow(reason="workers start, end and are replaced")
def test_a_worker_that_is_told_to_end_loses_no_request(tmp_path: Path) -> None:
    with running(tmp_path, "--workers", "2") as server:
        before, end = server.workers(), threading.Event()
        statuses: list[list[object]] = [[] for _ in range(32)]

        def ask(number: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            while not end.is_set():
                statuses[number].append(status(connection))
                time.sleep(0.02)

        with ThreadPoolExecutor(32) as pool:
            asking = [pool.submit(ask, number) for number in range(32)]
            for victim in before:
                os.kill(victim, signal.SIGTERM)
            eventually(lambda: not any(map(alive, before)) and len(server.workers()) == 2)
            end.set()
        assert not [each for each in asking if each.exception()]
        assert all(each and set(each) == {200} for each in statuses)
        assert server.said().count("was asked to end; another starts") == 2


@pytest.mark.slow(reason="a worker is replaced")
def test_a_connection_without_a_request_is_used_once_more(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        (idle,) = connections(server, 1)
        victim = server.kill_worker(signal.SIGTERM)
        assert alive(victim)
        idle.request("GET", "/readyz")
        reply = idle.getresponse()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        eventually(lambda: not alive(victim))
        assert server.process.poll() is None


def test_a_request_that_takes_longer_than_grace_is_told(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", "0") as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.predict, LONG)
        eventually(lambda: server.metric("confpred_queued_requests") == 1)
        server.process.terminate()
        reply = asked.result()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "stopping")
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.said()


# Counts of many processes are one: they need no file, outlive processes, and miss no request.


@pytest.mark.slow(reason="a worker is replaced")
def test_counts_need_no_file_and_outlive_their_process(tmp_path: Path, temporary: Path) -> None:
    counted = 'confpred_requests_total{route="/v1/predict",status="200"}'
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
