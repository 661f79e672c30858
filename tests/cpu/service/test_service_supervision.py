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
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from test_service_process import COMMAND, LONG, ONE, Server, eventually, refused, running


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder in which a server makes its own, which it removes."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    yield folder
    eventually(lambda: not any(folder.iterdir()), "the server's folder was left")


@pytest.fixture
def model(tmp_path: Path, repository: Path) -> Path:
    """Return a model folder that may be damaged."""
    return shutil.copytree(repository / "models" / "h100-2026.11.24", tmp_path / "model")


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


def test_a_killed_worker_costs_its_own_connections_alone(tmp_path: Path) -> None:
    with running(tmp_path, "--workers", "2") as server:
        before = server.workers()
        held = connections(server, 4)
        victim = max(before)
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: not alive(victim))
        # Spread evenly over two workers, two of the four are left, and new ones are answered.
        assert [status(connection) for connection in held].count(200) == 2
        assert {httpx.get(f"{server.url}/readyz").status_code for _ in range(10)} == {200}
        eventually(
            lambda: len(server.workers()) == 2 and "answers, process" in server.log.read_text()
        )
        assert len(server.workers() & before) == 1
        assert server.metric("confpred_workers_replaced_total") == 1
        assert re.search(r"worker \d ended by SIGKILL; another starts", server.log.read_text())
        assert server.process.poll() is None


def test_connections_are_spread_evenly(tmp_path: Path) -> None:
    with running(tmp_path, "--workers", "2") as server:
        for _ in range(7):  # those that close count no longer
            assert httpx.get(f"{server.url}/healthz").status_code == 200
        eventually(lambda: established(server) == [0, 0])
        held = connections(server, 8)
        assert established(server) == [4, 4]
        for connection in held:
            connection.close()


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
        (victim,) = server.workers()
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: not alive(victim))
        assert httpx.post(f"{server.url}/v1/predict", json=ONE, timeout=60).status_code == 200
        assert server.workers() != {victim}


@pytest.mark.slow(reason="workers start, end and are replaced")
def test_a_worker_that_is_told_to_end_hands_over(tmp_path: Path) -> None:
    with running(tmp_path, "--workers", "2") as server:
        for victim in sorted(server.workers()):
            os.kill(victim, signal.SIGTERM)
            while alive(victim) or len(server.workers()) < 2:
                assert httpx.post(f"{server.url}/v1/predict", json=ONE).status_code == 200
        eventually(lambda: server.log.read_text().count("answers, process") == 2)


def test_no_worker_outlives_its_server(tmp_path: Path, temporary: Path) -> None:
    with running(tmp_path, "--workers", "2", TMPDIR=str(temporary)) as server:
        workers = server.workers()
        assert len(workers) == 2
        server.process.kill()
        eventually(lambda: not any(alive(worker) for worker in workers))


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
        os.kill(*server.workers(), signal.SIGKILL)
        eventually(lambda: "answers, process" in server.log.read_text())
        assert httpx.post(f"{server.url}/v1/predict", json=ONE).status_code == 200


@pytest.mark.slow(reason="workers start again and again")
def test_a_server_whose_workers_cannot_start_gives_up_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with running(tmp_path, TMPDIR=str(tmp_path / "tmp")) as server:
        lose_models(tmp_path / "tmp")
        os.kill(*server.workers(), signal.SIGKILL)
        assert server.process.wait(100) == 3
        said = server.log.read_text()
        assert "Traceback" not in said
        (reason,) = (line for line in said.splitlines() if line.startswith("confpred: "))
        assert reason.startswith("confpred: gave up after 5 starts of a worker: cannot read ")


@pytest.mark.slow(reason="workers start again and again")
def test_a_worker_that_answers_is_kept_though_others_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with running(tmp_path, "--workers", "2", TMPDIR=str(tmp_path / "tmp")) as server:
        lose_models(tmp_path / "tmp")
        os.kill(max(server.workers()), signal.SIGKILL)
        eventually(lambda: server.log.read_text().count("; another starts in ") > 2)
        assert httpx.post(f"{server.url}/v1/predict", json=ONE).status_code == 200
        server.process.terminate()
        assert server.process.wait(60) == 0


@pytest.mark.slow(reason="a worker is replaced")
def test_a_server_whose_folder_was_removed_makes_it_anew(tmp_path: Path, model: Path) -> None:
    (tmp_path / "tmp").mkdir()
    options = ("--model", str(model))
    with running(tmp_path, *options, TMPDIR=str(tmp_path / "tmp")) as server:
        shutil.rmtree(tmp_path / "tmp" / next((tmp_path / "tmp").iterdir()))
        os.kill(*server.workers(), signal.SIGKILL)
        eventually(lambda: "answers, process" in server.log.read_text())
        assert httpx.post(f"{server.url}/v1/predict", json=ONE, timeout=60).status_code == 200
        assert httpx.post(f"{server.url}/v1/models/reload", timeout=60).status_code == 200


def test_stopping_twice_is_at_once(tmp_path: Path, temporary: Path) -> None:
    with running(tmp_path, "--grace", "3600", TMPDIR=str(temporary)) as server:
        head = b"POST /v1/predict HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        held = http.client.HTTPConnection("127.0.0.1", server.port)
        held.connect()
        held.sock.sendall(head + b"content-length: 9\r\n\r\n")
        eventually(lambda: server.process.poll() is None)
        time.sleep(0.5)  # for the request to begin
        server.process.terminate()
        time.sleep(1)
        assert server.process.poll() is None  # the request has an hour
        server.process.terminate()
        assert server.process.wait(60) == 0
        held.close()


def test_a_model_that_does_not_load_ends_the_start(model: Path) -> None:
    card = json.loads((model / "card.json").read_text())
    card["pytorch"]["margins"] = dict.fromkeys(card["pytorch"]["margins"], -1.0)
    (model / "card.json").write_text(json.dumps(card))
    code, said = refused("--port", "0", "--model", str(model), "--workers", "2")
    assert (code, len(said.splitlines())) == (1, 1)
    assert said.startswith("confpred: ")
    assert "margin" in said


def test_a_log_that_cannot_be_written_costs_the_lines_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            reply = httpx.post(f"http://127.0.0.1:{port}/v1/predict", json=ONE)
            return reply.status_code == 200
        return False

    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen([COMMAND, "serve", "--port", port], stdout=full, stderr=full)
    try:
        eventually(answers)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_a_full_disk_at_the_start_is_one_clear_line(temporary: Path) -> None:
    limited = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (100_000, 100_000)); "
    limited += "from confpred.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", limited, "serve", "--port", "0"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith("confpred: cannot write ")


def test_a_full_disk_refuses_the_reload_alone(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, "--model", str(model)) as server:
        card = (model / "card.json").read_text()
        (model / "card.json").write_text(card + "\n")
        # The log may still grow a little.
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
        reply = httpx.post(f"{server.url}/v1/models/reload", timeout=60)
        assert reply.status_code == 409
        assert "cannot write " in reply.json()["error"]["message"]
        assert httpx.post(f"{server.url}/v1/predict", json=ONE).status_code == 200


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
        eventually(lambda: server.metric("confpred_queued_requests") == 1)
        server.process.terminate()
        reply = asked.result()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "stopping")
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log.read_text()
