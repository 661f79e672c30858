"""`confpred serve` as a process: starting, real connections, many workers, stopping."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from served import LONG, ONE, Server, eventually, head, refused, running
from slow import slow_but

from confpred.cli import cli

pytestmark = pytest.mark.usefixtures("small_model")


@pytest.fixture
def server(plain_server: Server) -> Server:
    return plain_server


def test_a_long_body_is_cut_off_without_an_announced_length(server: Server) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"device": "h100", "problems": ['
        for _ in range(3000):
            yield b" " * 1000

    header = {"content-type": "application/json"}
    reply = server.post("/v1/predict", content=endless(), headers=header)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")


def test_a_body_of_another_length_than_announced_harms_nobody(server: Server) -> None:
    answer = server.exchange(head("content-length: 999999999999"))  # and no body at all
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"body_too_large"' in answer
    counted = 'confpred_requests_total{route="/v1/predict",status="499"}'
    before = server.metric(counted)
    server.exchange(head("content-length: 500"), b'{"device":', close=True)
    eventually(lambda: server.metric(counted) > before)
    body = json.dumps(ONE).encode()
    answer = server.exchange(head(f"content-length: {len(body)}"), body + b" and then some")
    # The rest is a request of its own, and no HTTP; how soon it is seen decides which reply comes.
    assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 "))
    assert server.get("/healthz").status_code == 200
    assert "Traceback" not in server.said()


def test_the_documented_commands_work(server: Server) -> None:
    page = (Path(__file__).parents[3] / "docs" / "service.md").read_text()
    page = page.replace("h100-2026.11.29", "made-up-1")  # the only model of this server
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    each = re.compile(r"^curl .*?(?=^curl|\Z)", re.MULTILINE | re.DOTALL)
    calls = [call for block in blocks for call in each.findall(block)]
    assert len(calls) == 11
    form = (
        r"""curl (-X POST )?"?http://127.0.0.1:8000([^\s"]+)"?( -H "[^"]+")?( --json '(.*)')?\s*"""
    )
    for call in calls:
        found = re.fullmatch(form, call, re.DOTALL)
        assert found, call
        header = {"content-type": "application/json"}
        if found[1] or found[5]:
            reply = server.post(found[2], content=found[5], headers=header)
        else:
            reply = server.get(found[2])
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "sign", slow_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT], "a long batch is finished")
)
def test_stopping_finishes_what_is_under_way(tmp_path: Path, sign: signal.Signals) -> None:
    with running(tmp_path) as server, ThreadPoolExecutor() as pool:
        batch = pool.submit(server.predict, LONG)
        eventually(lambda: server.metric("confpred_queued_requests") == 1)
        server.process.send_signal(sign)
        reply = batch.result()
        assert reply.status_code == 200
        assert len(reply.json()["choices"]) == len(LONG["problems"])
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.said()
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url)


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


def test_a_bad_option_is_a_usage_error_and_an_empty_folder_is_not(tmp_path: Path) -> None:
    for name, value in (("--workers", "0"), ("--plan", "/no/such/file"), ("--speed", "9")):
        done = CliRunner().invoke(cli, ["serve", name, value])
        assert (done.exit_code, name in done.output) == (2, True)
    code, said = refused("--port", "0", "--model", str(tmp_path))
    assert (code, f"confpred: {tmp_path}" in said) == (2, True)
