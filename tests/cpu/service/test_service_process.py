"""`confpred serve` as a process: starting, real connections, many workers, stopping."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from slow import slow_but

from confpred.service.schema import EXAMPLE

LAYER = EXAMPLE.to_json()
ONE = {"device": "h100", "problem": LAYER}
#: Long enough in the answering that other things can be seen to happen meanwhile.
LONG = {
    "device": "h100",
    "problems": [{**LAYER, "n": 1 + i % 100, "h": 60 + i // 100} for i in range(1000)],
    "top": 8,
}
COMMAND = str(Path(sys.executable).with_name("confpred"))


@dataclass
class Server:
    """A running server, where it listens, and what it has said so far."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def workers(self) -> set[int]:
        """Return the ids of the worker processes that run now."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return set(map(int, path.read_text().split()))

    def metric(self, name: str) -> float:
        """Return the number of a metric, with its labels; 0 where it has none."""
        text = httpx.get(f"{self.url}/metrics", timeout=20).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0


@contextmanager
def running(folder: Path, *options: str, **environment: str) -> Iterator[Server]:
    log = folder / "server.log"
    with log.open("ab") as out:
        command = [COMMAND, "serve", "--port", "0", *options]
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"running on http://.*:(\d+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield Server(process, int(found[1]), log)
    finally:
        process.terminate()
        process.wait(60)


def eventually(condition: Callable[[], object], said: object = "") -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server")) as server:
        yield server


def exchange(server: Server, *parts: bytes, close: bool = False) -> bytes:
    """Return the start of the reply to these raw parts, up to some of its body; none if cut
    first."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        for part in parts:
            connection.sendall(part)
        answer = b""
        while not close and not re.search(rb"\r\n\r\n.+", answer, re.DOTALL):
            received = connection.recv(65_536)
            if not received:
                break
            answer += received
        return answer


def head(*lines: str) -> bytes:
    start = ("POST /v1/predict HTTP/1.1", "host: localhost", "content-type: application/json")
    return "\r\n".join((*start, *lines, "", "")).encode()


def test_predicts_over_a_real_connection(server: Server) -> None:
    from confpred import Predictor

    reply = httpx.post(f"{server.url}/v1/predict", json=ONE)
    assert reply.json() == {"choices": [[Predictor.load().choose(EXAMPLE, "h100").to_json()]]}
    eventually(lambda: '"POST /v1/predict HTTP/1.1" 200' in server.log.read_text())


def test_a_long_body_is_cut_off_without_an_announced_length(server: Server) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"device": "h100", "problems": ['
        for _ in range(3000):
            yield b" " * 1000

    header = {"content-type": "application/json"}
    reply = httpx.post(f"{server.url}/v1/predict", content=endless(), headers=header)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")


def test_a_long_body_is_refused_by_its_announcement(server: Server) -> None:
    answer = exchange(server, head("content-length: 999999999999"))  # and no body at all
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"body_too_large"' in answer


def test_a_body_shorter_than_announced_harms_nobody(server: Server) -> None:
    exchange(server, head("content-length: 500"), b'{"device":', close=True)
    eventually(lambda: server.metric('confpred_requests_total{route="/v1/predict",status="499"}'))
    assert "Traceback" not in server.log.read_text()


def test_a_body_longer_than_announced_harms_nobody(server: Server) -> None:
    body = json.dumps(ONE).encode()
    answer = exchange(server, head(f"content-length: {len(body)}"), body + b" and then some")
    # The rest is a request of its own, and no HTTP; how soon it is seen decides which reply comes.
    assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 "))
    assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_what_is_not_http_is_refused(server: Server) -> None:
    assert exchange(server, b"\x16\x03\x01 hello\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert httpx.get(f"{server.url}/healthz").status_code == 200


@pytest.mark.slow(reason="a batch that takes seconds")
def test_a_batch_does_not_hold_up_other_requests(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client, ThreadPoolExecutor() as pool:
        batch = pool.submit(httpx.post, f"{server.url}/v1/predict", json=LONG, timeout=60)
        answered = 0
        while not batch.done():
            assert client.get("/healthz").status_code == 200
            answered += 1
        assert batch.result().status_code == 200
    assert answered > 10


def test_the_documented_commands_work(server: Server) -> None:
    page = (Path(__file__).parents[3] / "docs" / "service.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    calls = [
        call
        for block in blocks
        for call in re.findall(r"^curl .*?(?=^curl|\Z)", block, re.MULTILINE | re.DOTALL)
    ]
    assert len(calls) == 10
    form = (
        r"""curl (-X POST )?"?http://127.0.0.1:8000([^\s"]+)"?( -H "[^"]+")?( --json '(.*)')?\s*"""
    )
    for call in calls:
        found = re.fullmatch(form, call, re.DOTALL)
        assert found, call
        url, body = server.url + found[2], found[5]
        if found[1]:
            reply = httpx.post(url)
        elif body is None:
            reply = httpx.get(url)
        else:
            reply = httpx.post(url, content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 200, reply.text


@pytest.mark.slow(reason="a server of several workers")
def test_workers_add_up_their_counts(tmp_path: Path) -> None:
    with running(tmp_path, "--workers", "2") as server:
        for _ in range(30):  # each on a connection of its own, so that both workers get some
            assert httpx.post(f"{server.url}/v1/predict", json=ONE).status_code == 200
        assert server.metric('confpred_requests_total{route="/v1/predict",status="200"}') == 30
        assert httpx.get(f"{server.url}/metrics").text.count("HELP confpred_requests_total") == 1
        server.process.terminate()
        assert server.process.wait(60) == 0


@pytest.mark.parametrize(
    "sign", slow_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT], "a long batch is finished")
)
def test_stopping_finishes_what_is_under_way(tmp_path: Path, sign: signal.Signals) -> None:
    with running(tmp_path) as server, ThreadPoolExecutor() as pool:
        batch = pool.submit(httpx.post, f"{server.url}/v1/predict", json=LONG, timeout=60)
        time.sleep(0.3)
        server.process.send_signal(sign)
        reply = batch.result()
        assert reply.status_code == 200
        assert len(reply.json()["choices"]) == len(LONG["problems"])
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log.read_text()
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url)


def refused(*options: str) -> tuple[int, str]:
    done = subprocess.run(
        [COMMAND, "serve", *options], check=False, capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_an_address_that_cannot_be_listened_on_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        asked = {
            ("--port", port): f"127.0.0.1, port {port}: ",
            ("--host", "a..b", "--port", "0"): "a..b, port 0: no such host\n",
            ("--host", "192.0.2.1", "--port", "0", "--allow-anonymous"): "192.0.2.1, port 0: ",
        }
        for options, reason in asked.items():
            code, said = refused(*options)
            assert (code, len(said.splitlines())) == (1, 1)
            assert said.startswith(f"confpred: cannot listen on {reason}")


@pytest.mark.parametrize(
    "options",
    [
        ("--port", "65536"),
        ("--port", "http"),
        ("--workers", "0"),
        ("--max-batch", "0"),
        ("--model", "/no/such/folder"),
        ("--plan", "/no/such/file"),
        ("--speed", "9"),
    ],
)
def test_a_bad_option_is_a_usage_error(options: tuple[str, str]) -> None:
    code, said = refused(*options)
    assert code == 2
    assert options[0] in said


def test_an_empty_model_folder_ends_the_command(tmp_path: Path) -> None:
    code, said = refused("--port", "0", "--model", str(tmp_path))
    assert code == 1
    assert str(tmp_path) in said
    assert said.startswith("confpred: ")
