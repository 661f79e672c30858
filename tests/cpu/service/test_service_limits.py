"""Clients that send too much, or too slowly, or do not read: they are told, and cut off."""

from __future__ import annotations

import json
import re
import resource
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import LAYER, LONG, ONE, Server, eventually, head, running

pytestmark = pytest.mark.usefixtures("small_model")
TIMES = ("--head-timeout", "--body-timeout", "--idle-timeout", "--write-timeout")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("limits")
    times = (word for name in TIMES for word in (name, "2"))
    with running(folder, *times, "--log-format", "json") as server:
        yield server


def rest(connection: socket.socket) -> bytes:
    """All that the server says until it closes."""
    said = b""
    try:
        while received := connection.recv(65_536):
            said += received
    except ConnectionResetError:
        pass
    return said


def refusal(said: bytes) -> tuple[int, dict[str, Any]]:
    first, _, body = said.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in first
    error = json.loads(body)["error"]
    assert error.keys() == {"code", "message", "field", "value", "allowed"}
    return int(first.split()[1]), error


def requests(route: str, status: int) -> str:
    return f'confpred_requests_total{{route="{route}",status="{status}"}}'


def logged(server: Server, status: int) -> list[dict[str, object]]:
    lines = map(json.loads, server.said().splitlines())
    return [line for line in lines if line.get("status") == status]


def flood(connection: socket.socket, start: bytes, piece: bytes, most: int) -> int:
    """Send `most` bytes of `piece` after `start`, until the server no longer takes any."""
    sent = 0
    try:
        connection.sendall(start)
        while sent < most:
            connection.sendall(piece)
            sent += len(piece)
    except OSError:
        pass
    return sent


def test_an_endless_header_is_not_read(server: Server) -> None:
    before = server.memory()
    with server.connect() as connection:
        flood(connection, b"GET /healthz HTTP/1.1\r\nx-long: ", b"a" * 65_536, 50_000_000)
        status, error = refusal(rest(connection))
    assert (status, error["code"]) == (431, "head_too_large")
    assert error["allowed"] == "32768 bytes"
    assert server.memory() - before < 8_000_000


@pytest.mark.parametrize(("size", "status"), [(30_000, 200), (40_000, 431)])
def test_the_limit_of_a_head_holds_for_one_that_comes_at_once(
    server: Server, size: int, status: int
) -> None:
    reply = server.get("/healthz", headers={"x-long": "a" * size})
    assert reply.status_code == status
    reply = server.get("/healthz", headers={f"x-{i}": "a" * 90 for i in range(size // 100)})
    assert reply.status_code == status
    reply = server.get("/healthz", params={"a": "a" * size})
    assert reply.status_code == status


@pytest.mark.parametrize("chunk", [b"1\r\n \r\n" * 10_000, b"0\r\nx-trailer: " + b"a" * 65_536])
def test_endless_chunks_and_trailers_are_cut(server: Server, chunk: bytes) -> None:
    before = server.memory()
    with server.connect() as connection:
        first, _, more = chunk.partition(b"a")
        start = head("transfer-encoding: chunked") + (first if more else b"")
        flood(connection, start, more or chunk, 100_000_000)
        # On a busy machine the time for a body may be over first.
        assert rest(connection)[:13] in (b"HTTP/1.1 413 ", b"HTTP/1.1 408 ", b"")
    assert server.memory() - before < 30_000_000
    assert server.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("start", "field"),
    [(b"GET /healthz HTTP/1.1\r\nx-slow: ", "head"), (head("content-length: 500") + b"{", "body")],
)
def test_who_sends_too_slowly_is_told_and_cut(server: Server, start: bytes, field: str) -> None:
    with server.connect() as connection:
        connection.sendall(start)
        connection.settimeout(0.2)
        began, said = time.monotonic(), b""
        while not said and time.monotonic() - began < 30:
            try:
                said = connection.recv(1)
            except TimeoutError:
                connection.sendall(b"a")
        connection.settimeout(30)
        status, error = refusal(said + rest(connection))
    assert (status, error["code"], error["field"]) == (408, "request_timeout", field)


def test_a_connection_without_a_request_is_closed(server: Server) -> None:
    with server.connect() as silent, server.connect() as idle, server.connect() as blank:
        idle.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
        blank.sendall(b"\r\n" * 10)
        assert rest(silent) == b""
        assert rest(idle).startswith(b"HTTP/1.1 200 OK")
        assert rest(blank) == b""


def test_who_does_not_read_is_cut(server: Server) -> None:
    body = json.dumps({"device": "h100", "problems": [LAYER] * 1000, "top": 32}).encode()
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(head(f"content-length: {len(body)}") + body)
        cut = select.poll()
        cut.register(connection, 0)  # an end by the other side is told without asking, or reading
        assert cut.poll(60_000)


def test_who_asks_without_reading_is_not_read(server: Server) -> None:
    before, waited = server.memory(), 0.0
    with server.connect() as connection:
        connection.settimeout(0.5)
        sent = flood(
            connection, b"", b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n" * 1000, 50_000_000
        )
        for _ in range(5):
            began = time.monotonic()
            assert server.get("/healthz").status_code == 200
            waited = max(waited, time.monotonic() - began)
        assert server.memory() - before < 8_000_000
    assert sent < 20_000_000
    assert waited < 0.5


def test_who_asks_ahead_and_reads_gets_every_answer_in_order(server: Server) -> None:
    paths = [f"/{number}" for number in range(3000)]
    asked = "".join(f"GET {path} HTTP/1.1\r\nhost: a\r\n\r\n" for path in paths).encode()
    with server.connect() as connection, ThreadPoolExecutor(1) as pool:
        body = json.dumps({"device": "h100", "problems": [LAYER] * 50}).encode()  # in two pieces
        sending = pool.submit(
            connection.sendall, head(f"content-length: {len(body)}") + body + asked[:-2]
        )
        said = b""
        while f"GET {paths[-2]}".encode() not in said:
            said += connection.recv(65_536)
        sending.result()
        connection.sendall(asked[-2:])
        while f"GET {paths[-1]}".encode() not in said:
            said += connection.recv(65_536)
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert re.findall(r"Not Found: GET (/\d+)", said.decode()) == paths


@pytest.mark.slow(reason="time-outs pass")
def test_time_outs_hold_after_a_lack_of_descriptors(server: Server) -> None:
    (worker,) = server.workers()
    slow = [server.connect() for _ in range(3)]
    for connection in slow:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nx-slow: ")
    time.sleep(0.5)
    usual = resource.prlimit(worker, resource.RLIMIT_NOFILE)
    lowest = next(n for n in range(usual[0]) if not Path(f"/proc/{worker}/fd/{n}").exists())
    resource.prlimit(worker, resource.RLIMIT_NOFILE, (lowest, usual[1]))
    try:
        assert all(b" 408 " in connection.recv(100) for connection in slow)
        cut = select.poll()
        cut.register(slow[0], 0)
        assert cut.poll(10_000)  # who does not close is cut, too
    finally:
        resource.prlimit(worker, resource.RLIMIT_NOFILE, usual)
    with server.connect() as later:
        later.sendall(b"GET /healthz HTTP/1.1\r\nx-slow: ")
        assert b" 408 " in rest(later)
    for connection in slow:
        connection.close()


@pytest.mark.slow(reason="an answer takes longer than the limits of time")
def test_a_long_answer_is_not_the_clients_fault(tmp_path: Path) -> None:
    options = ("--head-timeout", "1", "--body-timeout", "1", "--idle-timeout", "1")
    with running(tmp_path, *options) as server, server.connect() as connection:
        body = json.dumps(LONG).encode()
        asked = head(f"content-length: {len(body)}") + body
        connection.sendall(asked + asked[:40])  # and the start of another
        said = rest(connection)
        assert said.startswith(b"HTTP/1.1 200 OK")
        assert b'"choices"' in said


def test_a_long_reply_is_compressed_if_the_client_takes_that(server: Server) -> None:
    kind, body = "content-encoding", {"device": "h100", "problems": [LAYER] * 200}

    def ask(accepted: str, body: object = body) -> httpx.Response:
        return server.predict(body, headers={"accept-encoding": accepted})

    plain = ask("identity")
    assert plain.headers["vary"] == "accept-encoding"
    assert kind not in ask("gzip", ONE).headers
    for accepted in ("gzip", "br, gzip;q=0.5", "*"):
        reply = ask(accepted)
        assert reply.headers[kind] == "gzip"
        assert reply.content == plain.content
        assert int(reply.headers["content-length"]) < len(plain.content) / 10
    for refused in ("identity", "gzip;q=0", "br", ""):
        assert kind not in ask(refused).headers


UPGRADES = ("h2c", "websocket")


@pytest.mark.parametrize("protocol", UPGRADES)
def test_a_request_that_offers_another_protocol_keeps_its_body(
    server: Server, protocol: str
) -> None:
    """As the JDK's HttpClient and ``curl --http2`` ask; a server may go on as it is."""
    body = json.dumps(ONE).encode()
    lines = ("connection: Upgrade, HTTP2-Settings", f"upgrade: {protocol}", "http2-settings: AAMA")
    whole = head(*lines, f"content-length: {len(body)}") + body
    chunks = head(*lines, "transfer-encoding: chunked") + b"%x\r\n%s\r\n0\r\n\r\n" % (
        len(body),
        body,
    )
    for request in (whole, chunks):
        assert server.exchange(request).startswith(b"HTTP/1.1 200 OK")
        parts = (request[at : at + 5] for at in range(0, len(request), 5))
        assert server.exchange(*parts).startswith(b"HTTP/1.1 200 OK")
    with server.connect() as connection:  # sent ahead, and one as usual behind them
        connection.sendall(whole + chunks + whole + b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n")
        said = b""
        while b"HTTP/1.1 404" not in said:
            said += connection.recv(65_536)
    assert said.count(b"HTTP/1.1 200 OK") == 3


def test_a_request_is_of_http_1_and_names_one_host(server: Server) -> None:
    wrong = (
        b"GET /healthz\r\n\r\n",
        b"GET /healthz HTTP/0.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    )
    for request in wrong:
        assert server.exchange(request).startswith(b"HTTP/1.1 400 Bad Request"), request
    assert server.exchange(b"GET /healthz HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 OK")


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
    statuses, known = (408, 400), len(logged(server, 408))
    before = [server.metric(requests("/v1/predict", status)) for status in statuses]
    assert b" 408 " in server.exchange(head("content-length: 50"), b"{")
    after = [server.metric(requests("/v1/predict", status)) for status in statuses]
    assert after == [before[0] + 1, before[1]]
    eventually(lambda: [x["target"] for x in logged(server, 408)[known:]].count("/v1/predict") == 1)


def test_a_client_that_leaves_is_logged_as_one(server: Server) -> None:
    before, known = server.metric(requests("/v1/predict", 499)), len(logged(server, 499))
    server.exchange(head("content-length: 50"), b"{", close=True)
    body = json.dumps({"device": "h100", "problems": [ONE["problem"]] * 900, "top": 9}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head(f"content-length: {len(body)}") + body)
    eventually(lambda: len(logged(server, 499)) == known + 2)
    assert server.metric(requests("/v1/predict", 499)) == before + 2
    assert not logged(server, 0)
