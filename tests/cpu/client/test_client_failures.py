"""A client whose service is slow, busy, broken, gone, or another one than before."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path

import pytest
from client_servers import Answer, ToldServer
from served import copy_model, running
from shared import python, python_says

from confpred.client import AsyncClient, Client, Trace, clients
from confpred.client.answers import retry_after_s
from confpred.errors import InvalidInput, ServiceError, ServiceUnavailable, install_command
from confpred.predict.choice import Choice
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem

LAYER = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1")
BUSY = Answer(503, body=b"{}")


@pytest.fixture(scope="module")
def local(model_folder: Path) -> Predictor:
    return Predictor.load(model_folder)


def choose(url: str, **settings: object) -> Choice:
    with Client(url, **settings) as client:
        return client.choose(LAYER, "h100")


def choose_awaited(url: str, **settings: object) -> Choice:
    async def ask() -> Choice:
        async with AsyncClient(url, **settings) as client:
            return await client.choose(LAYER, "h100")

    return asyncio.run(ask())


Choose = Callable[..., Choice]
both = pytest.mark.parametrize("ask", [choose, choose_awaited], ids=["blocking", "awaited"])


@both
@pytest.mark.parametrize("first", [BUSY, Answer(drop=True), Answer(429, body=b"{}")])
def test_what_is_safe_is_tried_again(ask: Choose, first: Answer, local: Predictor) -> None:
    with ToldServer(local, first, first, Answer()) as server:
        assert ask(server.url) == local.choose(LAYER, "h100")
        assert len(server.seen) == 3
        assert len({seen["x-request-id"] for seen in server.seen}) == 1


@both
def test_retry_after_is_honoured(ask: Choose, local: Predictor) -> None:
    told = Answer(503, {"Retry-After": "1"}, b"{}")
    with ToldServer(local, told, BUSY, Answer()) as server:
        start = time.monotonic()
        assert ask(server.url).server == server.url
        assert time.monotonic() - start >= 1


@both
def test_who_is_told_to_come_back_too_late_does_not_wait(ask: Choose, local: Predictor) -> None:
    with ToldServer(local, Answer(503, {"Retry-After": "100"}, b"{}")) as server:
        start = time.monotonic()
        with pytest.raises(ServiceUnavailable, match="replies 503, and asks to wait 100 s"):
            ask(server.url, timeout_s=60)
        assert time.monotonic() - start < 30
        assert len(server.seen) == 1


def test_retry_after_may_be_a_date() -> None:
    then = datetime.now(timezone.utc) + timedelta(seconds=100)
    assert 90 < retry_after_s({"retry-after": format_datetime(then, usegmt=True)}) <= 100
    assert retry_after_s({"retry-after": "7"}) == 7
    for nothing in ("", "soon", "-3", "Thu, 01 Jan 1970 00:00:00 GMT"):
        assert retry_after_s({"retry-after": nothing}) == 0


@both
@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 500])
def test_what_is_refused_is_not_tried_again(ask: Choose, status: int, local: Predictor) -> None:
    error = json.dumps({"error": {"code": "no", "message": "not like this"}}).encode()
    with ToldServer(local, Answer(status, body=error)) as server:
        with pytest.raises(ServiceError, match=f"replies {status}: not like this") as caught:
            ask(server.url, fallback=local)
        assert not isinstance(caught.value, ServiceUnavailable)
        assert len(server.seen) == 1


def test_bad_input_that_only_the_server_knows_is_bad_input(local: Predictor) -> None:
    said = {"field": "problem.k", "value": 160, "allowed": "less", "message": "no"}
    refusal = Answer(422, body=json.dumps({"error": said}).encode())
    with ToldServer(local, refusal) as server, pytest.raises(InvalidInput) as caught:
        choose(server.url)
    error = caught.value
    assert (error.field, error.value, error.allowed) == ("problem.k", 160, "less")


@both
@pytest.mark.parametrize(
    "slow", [Answer(before_s=20), Answer(drip_s=0.05), BUSY], ids=["silent", "dripping", "busy"]
)
def test_no_call_outlives_its_deadline(ask: Choose, slow: Answer, local: Predictor) -> None:
    with ToldServer(local, slow) as server:
        start = time.monotonic()
        with pytest.raises(ServiceUnavailable):
            ask(server.url, timeout_s=0.5, retries=100)
        assert time.monotonic() - start < 10


@both
def test_the_predictor_of_this_process_answers_instead(
    ask: Choose, local: Predictor, caplog: pytest.LogCaptureFixture
) -> None:
    with ToldServer(local) as server:
        gone = server.url
    choice = ask(gone, fallback=local, retries=1, timeout_s=20)
    assert choice == local.choose(LAYER, "h100")
    assert choice.server is None
    assert f"{gone}: no reply: ConnectError" in caplog.text
    with pytest.raises(ServiceUnavailable, match="no reply: ConnectError"):
        ask(gone, retries=1, timeout_s=20)


def test_a_dead_server_is_left_alone_and_found_again(
    local: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "FIRST_OPEN_S", 2.0)  # long enough to be seen on a busy machine
    silent = ToldServer(local, Answer(before_s=30))
    with silent, Client(silent.url, timeout_s=0.2, retries=0, kept=0) as client:
        for _ in range(clients.FAILURES):
            with pytest.raises(ServiceUnavailable, match="no reply"):
                client.choose(LAYER, "h100")
        asked = len(silent.seen)
        start = time.monotonic()
        refused = 0
        while time.monotonic() - start < 0.15:
            with pytest.raises(ServiceUnavailable, match="is not asked"):
                client.choose(LAYER, "h100")
            refused += 1
        assert refused > 3  # each would have taken 0.2 s
        assert len(silent.seen) == asked
        silent.answers = [Answer()]
        until = time.monotonic() + 30
        while True:
            try:
                assert client.choose(LAYER, "h100").server == silent.url
                break
            except ServiceUnavailable:
                assert time.monotonic() < until
                time.sleep(0.02)


def test_after_a_rest_one_call_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "FIRST_OPEN_S", 0.01)  # a shorter rest
    broken = clients.Circuit()
    first, second = object(), object()
    for _ in range(clients.FAILURES):
        assert broken.admit(first)
        broken.failed(0)
    time.sleep(0.02)
    assert broken.admit(first)
    assert not broken.admit(second)
    broken.ended(first)
    assert broken.admit(second)
    broken.succeeded()
    assert broken.admit(first)
    assert broken.admit(second)


@pytest.mark.parametrize("told", [False, True], ids=["by version", "by digest"])
def test_another_model_empties_the_cache(told: bool, local: Predictor, model_folder: Path) -> None:
    other = Predictor({"h100": replace(local.models["h100"], version="made-up-2")})
    before, after = (
        Answer(headers={"X-Confpred-Model": digest} if told else {}) for digest in ("1a", "2b")
    )
    with ToldServer(local, before) as server, Client(server.url) as client:
        first = [client.choose(replace(LAYER, n=n), "h100") for n in (2, 3)]
        assert {choice.model for choice in first} == {local.models["h100"].version}
        server.answers = [after]
        if not told:
            server.predictor = other
        assert client.choose(replace(LAYER, n=2), "h100") is first[0]  # nobody knows yet
        client.choose(replace(LAYER, n=4), "h100")
        asked = len(server.seen)
        again = client.choose(replace(LAYER, n=2), "h100")
        assert len(server.seen) == asked + 1
        assert again.model == ("made-up-2" if not told else first[0].model)


def test_an_answer_is_kept_for_a_while_only(local: Predictor) -> None:
    with ToldServer(local) as server, Client(server.url, kept_s=0.05) as client:
        client.choose(LAYER, "h100")
        time.sleep(0.1)
        client.choose(LAYER, "h100")
        assert len(server.seen) == 2


@pytest.mark.slow(reason="two servers start")
def test_a_server_that_is_restarted_with_another_model_is_noticed(
    local: Predictor, model_folder: Path, tmp_path: Path
) -> None:
    other, bounds = tmp_path / "made-up-2", local.models["h100"].card.content["bounds"]
    offsets = dict.fromkeys(bounds["offsets"], 2.0)
    copy_model(model_folder, other, bounds=bounds | {"offsets": offsets})
    with running(tmp_path, "--model", str(model_folder)) as server:
        client = Client(server.url, timeout_s=60, retries=50)
        assert client.choose(LAYER, "h100").model == "made-up-1"
    with running(tmp_path, "--model", str(other), port=server.port):
        client.choose(replace(LAYER, n=3), "h100")
        assert client.choose(LAYER, "h100").regret_bound > 5
        client.close()


def test_traces_and_tokens_are_passed_on(local: Predictor) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    settings = {"token": "s3cret", "kept": 0, "timeout_s": 60}
    with ToldServer(local) as server, Client(server.url, **settings) as client:
        client.choose(LAYER, "h100", trace=Trace("mine-1", parent))
        client.choose(LAYER, "h100")
    first, second = server.seen
    assert (first["x-request-id"], first["traceparent"]) == ("mine-1", parent)
    assert first["authorization"] == second["authorization"] == "Bearer s3cret"
    assert len(second["x-request-id"]) == 32
    assert first["prefer"] == "wait=60"
    assert "traceparent" not in second


def test_connections_are_kept(local: Predictor) -> None:
    with ToldServer(local) as server, Client(server.url, kept=0) as client:
        for _ in range(20):
            client.choose(LAYER, "h100")
        assert len(server.connections) == 1


@pytest.mark.parametrize(
    "asker", ["Client(sys.argv[1], kept=0)", "ServedPredictor(Client(sys.argv[1], kept=0), {}, 30)"]
)
def test_threads_share_it_and_forked_children_ask_too(asker: str, local: Predictor) -> None:
    program = f"""
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from confpred import Problem
from confpred.client import Client
from confpred.client.served import ServedPredictor
layer = Problem.parse("{LAYER}")
asker = {asker}
def ask(n):
    choice = asker.choose(replace(layer, n=n), "h100")
    return choice.server == sys.argv[1] and choice.problem.n == n
with ThreadPoolExecutor(16) as threads:
    answers = [threads.submit(ask, n // 2 + 1) for n in range(160)]
    for n in range(200, 208):
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(not ask(n))
        assert os.waitpid(child, 0)[1] == 0
assert all(answer.result() for answer in answers)
"""
    with ToldServer(local) as server:
        python_says("-c", program, server.url)
        assert len(server.connections) <= 16 + 8


def test_a_trial_of_the_parents_keeps_no_child_from_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "FIRST_OPEN_S", 0.0)  # no rest at all
    client = Client("http://127.0.0.1:1")
    for _ in range(clients.FAILURES):
        client._circuit.get().failed(0)
    assert client._circuit.get().admit("a thread's trial")
    assert not client._circuit.get().admit("another call")
    if (child := os.fork()) == 0:
        os._exit(not client._circuit.get().admit("the child's call"))
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"config": {"block_n": 3}},
        {"config": None},
        {"provider": "nobody"},
        {"problem": replace(LAYER, n=25).to_json()},
        {"problem": None},
        {"device": "h200"},
        {"source": "guessed"},
        {"predicted_ms": -1},
        {"predicted_ms": "fast"},
        {"model": 7},
    ],
    ids=str,
)
def test_a_choice_that_makes_no_sense_is_refused(changed: dict, local: Predictor) -> None:
    fields = local.choose(LAYER, "h100").to_json() | changed
    check_refused(json.dumps({"choices": [[fields]]}).encode())


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [[]]}', b"\xff"]
)
def test_a_reply_that_makes_no_sense_is_refused(body: bytes) -> None:
    check_refused(body)


def check_refused(body: bytes) -> None:
    told = ToldServer(None, Answer(body=body))
    with told, pytest.raises(ServiceError, match="unexpected response"):
        choose(told.url)


def test_without_httpx_the_extra_is_named() -> None:
    program = "import sys; sys.modules['httpx'] = None\nimport confpred.client"
    last = python("-c", program).stderr.splitlines()[-1]
    assert last.endswith(f"this needs httpx: {install_command('client')}")
