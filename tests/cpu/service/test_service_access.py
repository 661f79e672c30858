"""Who may ask and who may manage; request ids, traces and the lines of the log."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from served import COMMAND, Server, eventually, refused, running

from confpred.cli import cli
from confpred.errors import DataError
from confpred.service import tokens

ENTRY = {"name": "a", "scope": "read", "sha256": "0" * 64}
pytestmark = pytest.mark.usefixtures("small_model")
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def token(path: Path, *words: str) -> str:
    done = CliRunner().invoke(cli, ["token", "--tokens", str(path), *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("access")


@pytest.fixture(scope="module")
def secrets(folder: Path) -> dict[str, str]:
    """Return some of the tokens of the server; thousands are in its file."""
    path = folder / "tokens.json"
    made = [tokens.make(f"host {number}", "read") for number in range(3000)]
    tokens.write(path, [kept for _, kept in made])
    return {
        "last of many": made[-1][0],
        "host-1": token(path, "host-1"),
        "host-2": token(path, "host-2"),
        "ops": token(path, "ops", "--scope", "admin"),
    }


@pytest.fixture(scope="module")
def guarded(folder: Path, secrets: dict[str, str]) -> Iterator[Server]:
    options = ("--tokens", str(folder / "tokens.json"), "--log-format", "json", "--workers", "2")
    with running(folder, *options) as server:
        yield server


@pytest.fixture
def plain(plain_server: Server) -> Server:
    return plain_server


def ask(server: Server, path: str, secret: str | None, **headers: str) -> httpx.Response:
    if secret is not None:
        headers["authorization"] = f"Bearer {secret}"
    if path == "/v1/predict":
        return server.predict(headers=headers)
    return (server.post if path.startswith("/v1/models/") else server.get)(path, headers=headers)


ASKED = ("/v1/predict", "/v1/models", "/v1/devices", "/metrics", "/openapi.json", "/docs", "/")
MANAGED = ("/v1/models/reload", "/v1/models/rollback")


@pytest.mark.parametrize("path", [*ASKED, *MANAGED, "/no/such/path"])
def test_without_a_token_nothing_is_told(guarded: Server, path: str) -> None:
    for secret in (None, "confpred_wrong"):
        reply = ask(guarded, path, secret)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "unauthorized")
        assert reply.headers["www-authenticate"].startswith('Bearer realm="confpred"')
        assert reply.headers["x-request-id"]
    reply = ask(guarded, path, None, authorization="Basic dXNlcjpwYXNz")
    assert reply.status_code == 401


def test_a_token_to_ask_does_not_manage(guarded: Server, secrets: dict[str, str]) -> None:
    for path in ASKED:
        for name in ("host-1", "last of many", "ops"):
            assert ask(guarded, path, secrets[name]).status_code == 200
    for path in MANAGED:
        reply = ask(guarded, path, secrets["host-1"])
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden")
        assert 'error="insufficient_scope", scope="admin"' in reply.headers["www-authenticate"]
    assert ask(guarded, "/v1/models/reload", secrets["ops"]).status_code == 200


def test_health_needs_no_token(guarded: Server) -> None:
    for path in ("/healthz", "/readyz"):
        assert ask(guarded, path, None).status_code == 200
        head = httpx.head(f"{guarded.url}{path}")
        assert (head.status_code, head.content) == (200, b"")


def test_a_revoked_token_is_refused_after_the_next_reload(
    guarded: Server, folder: Path, secrets: dict[str, str]
) -> None:
    path = folder / "tokens.json"
    token(path, "host-2", "--revoke")
    added = token(path, "host-3")
    assert ask(guarded, "/v1/models", secrets["host-2"]).status_code == 200
    assert ask(guarded, "/v1/models/reload", secrets["ops"]).json()["outcome"] == "unchanged"
    assert (statuses(guarded, secrets["host-2"]), statuses(guarded, added)) == ({401}, {200})


def test_only_digests_are_kept_and_the_log_has_names(
    guarded: Server, folder: Path, secrets: dict[str, str]
) -> None:
    path = folder / "tokens.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert ask(guarded, "/v1/models", secrets["host-1"]).status_code == 200
    kept, logged = path.read_text(), guarded.said()
    for secret in secrets.values():
        assert secret not in kept
        assert secret not in logged
    eventually(lambda: '"token":"host-1"' in guarded.said())


def statuses(server: Server, secret: str) -> set[int]:
    """Return the statuses of requests by connections of their own, so that every worker gets
    some."""
    return {ask(server, "/v1/devices", secret).status_code for _ in range(12)}


@pytest.mark.slow(reason="workers are replaced")
def test_a_new_worker_knows_the_tokens_that_the_others_know(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    ops, host = token(path, "ops", "--scope", "admin"), token(path, "host")
    with running(tmp_path, "--tokens", str(path), "--workers", "2") as server:
        token(path, "host", "--revoke")
        late = token(path, "late")
        server.kill_worker()
        assert (statuses(server, host), statuses(server, late)) == ({200}, {401})
        assert ask(server, "/v1/models/reload", ops).status_code == 200
        assert (statuses(server, host), statuses(server, late)) == ({401}, {200})
        path.write_text("{")  # damaged, it costs no worker
        server.kill_worker()
        assert (statuses(server, host), statuses(server, late)) == ({401}, {200})
        reply = ask(server, "/v1/models/reload", ops)
        assert reply.status_code == 409
        assert f"{path} is not JSON" in reply.json()["error"]["message"]
        assert statuses(server, ops) == {200}


@pytest.mark.slow(reason="two servers start")
def test_listening_elsewhere_needs_tokens_or_a_word(tmp_path: Path) -> None:
    for host in ("::", "192.0.2.1"):
        done = CliRunner().invoke(cli, ["serve", "--host", host, "--port", "0"])
        assert "--tokens" in str(done.exception)
    code, said = refused("--host", "0.0.0.0", "--port", "0")
    assert (code, len(said.splitlines())) == (2, 1)
    assert "--allow-anonymous" in said
    with running(tmp_path, "--host", "0.0.0.0", "--allow-anonymous") as server:
        assert ask(server, "/v1/predict", None).status_code == 200


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON"),
        ("{}", "is not a file of tokens"),
        ({}, "tokens is not a list"),
        ([{**ENTRY, "scope": "owner"}], "read or write or admin"),
        ([{**ENTRY, "sha256": "secret"}], "64 hexadecimal digits"),
        ([{**ENTRY, "more": 1}], "is not an object of name, scope and sha256"),
    ],
)
def test_a_damaged_file_of_tokens_says_what_is_wrong(
    tmp_path: Path, content: Any, reason: str
) -> None:
    path = tmp_path / "tokens.json"
    whole = json.dumps({"format": tokens.FORMAT, "tokens": content})
    path.write_text(content if isinstance(content, str) else whole)
    with pytest.raises(DataError, match=reason):
        tokens.read(path)


def test_a_name_has_one_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token(path, "a")
    for words in (["a"], ["b", "--revoke"], ["\n"], ["x" * 65]):
        done = CliRunner().invoke(cli, ["token", "--tokens", str(path), *words])
        assert done.exit_code == 1
        assert "name=" in str(done.exception)
    assert [each.name for each in tokens.read(path)] == ["a"]


def test_commands_at_once_keep_each_other_s_tokens(tmp_path: Path) -> None:
    path, names = tmp_path / "tokens.json", [f"host-{number}" for number in range(6)]
    command = [COMMAND, "token", "--tokens", str(path)]
    started = [subprocess.Popen([*command, name], stdout=subprocess.DEVNULL) for name in names]
    assert [process.wait(60) for process in started] == [0] * 6
    assert sorted(each.name for each in tokens.read(path)) == names


def test_only_the_owner_may_ever_read_a_file_of_tokens(tmp_path: Path) -> None:
    path, modes, done = tmp_path / "tokens.json", set(), threading.Event()
    _, kept = tokens.make("a", "read")
    tokens.write(path, [kept])

    def look() -> None:
        while not done.is_set():
            modes.add(path.stat().st_mode & 0o777)

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(300):
        tokens.write(path, [kept])
    done.set()
    looking.join()
    assert modes == {0o600}


def test_without_tokens_only_programs_of_the_machine_manage(plain: Server) -> None:
    for header in ("origin", "x-forwarded-for", "forwarded"):
        reply = ask(plain, "/v1/models/reload", None, **{header: "127.0.0.1"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden")
    assert ask(plain, "/v1/models/reload", None).status_code == 200


def test_a_sane_request_id_is_taken_and_any_other_replaced(plain: Server) -> None:
    made = set()
    for given, taken in (
        ("a1-B2.c_3:4/5+6=7@8", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("", False),
        ('"}', False),
    ):
        found = ask(plain, "/healthz", None, **{"x-request-id": given}).headers["x-request-id"]
        assert (found == given) == taken
        assert re.fullmatch(r"[\w.:/+=@-]{1,128}", found)
        made.add(found)
    assert len(made) == 6
    assert ask(plain, "/no/such/path", None).headers["x-request-id"]


def test_a_trace_is_passed_through(plain: Server) -> None:
    assert ask(plain, "/healthz", None, traceparent=TRACE).headers["traceparent"] == TRACE
    for bad in ("00-xyz-1-01", TRACE.upper(), TRACE[:-1]):
        assert "traceparent" not in ask(plain, "/healthz", None, traceparent=bad).headers


def test_a_line_of_json_tells_what_was_answered(guarded: Server, secrets: dict[str, str]) -> None:
    headers = {"x-request-id": "this-one", "traceparent": TRACE}
    reply = ask(guarded, "/v1/predict", secrets["host-1"], **headers)
    assert reply.status_code == 200
    eventually(lambda: "this-one" in guarded.said())
    lines: list[dict[str, Any]] = [json.loads(x) for x in guarded.said().splitlines()]
    (line,) = (line for line in lines if line.get("request_id") == "this-one")
    digests = dict(part.split("=") for part in reply.headers["x-confpred-model"].split(", "))
    expected = {
        "level": "info",
        "method": "POST",
        "target": "/v1/predict",
        "status": 200,
        "traceparent": TRACE,
        "token": "host-1",
        "device": "h100",
        "problems": 1,
        "sources": {"predicted": 1},
        "model": digests["h100"],
    }
    assert expected.items() <= line.items()
    assert 0 < line["duration_ms"] < 10_000
    assert line["process"] in ("0", "1")
    assert all({"time", "level", "process", "message"} <= line.keys() for line in lines)


def test_a_line_of_text_tells_it_too(plain: Server) -> None:
    ask(plain, "/v1/predict", None, **{"x-request-id": "that-one"})
    eventually(lambda: "that-one" in plain.said())
    line = next(x for x in plain.said().splitlines() if "that-one" in x)
    form = r'INFO:     127\.0\.0\.1:\d+ - "POST /v1/predict HTTP/1\.1" 200 [\d.]+ ms that-one '
    assert re.fullmatch(form + r"h100 predicted=1 model=[0-9a-f]{12}", line)
