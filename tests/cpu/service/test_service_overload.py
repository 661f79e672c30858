"""More work than a server can do: who is refused is told at once, and others get their answers."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import LAYER, Server, running

_RANDOM = random.Random(5)
pytestmark = pytest.mark.usefixtures("small_model")


def batch(count: int) -> bytes:
    """Problems that no other request has asked."""
    problems = [
        {**LAYER, "n": _RANDOM.randint(1, 9999), "h": _RANDOM.randint(8, 999)} for _ in range(count)
    ]
    return json.dumps({"device": "h100", "problems": problems}).encode()


def asked(server: Server, body: bytes, client: str, **headers: str) -> tuple[int, float, Any]:
    """Return status, seconds and headers of a reply to a client behind a proxy."""
    known = {"content-type": "application/json", "x-forwarded-for": client, **headers}
    start = time.monotonic()
    reply = server.post("/v1/predict", content=body, headers=known)
    return reply.status_code, time.monotonic() - start, reply.headers


@pytest.mark.slow(reason="a server is kept busy for some seconds")
def test_batches_of_many_clients_are_answered_or_refused_at_once(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        start = time.monotonic()
        assert asked(server, batch(512), "10.0.0.1")[0] == 200
        pace_s = time.monotonic() - start
        count = round(4 * 10 / pace_s)  # four times of what can be done
        bodies = [batch(512) for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            replies = pool.map(
                lambda number: asked(server, bodies[number], f"10.0.1.{number}", prefer="wait=10"),
                range(count),
            )
            singles = [asked(server, batch(1), "10.0.2.1") for _ in range(20)]
        found = [*replies]
    refused = [reply for reply in found if reply[0] != 200]
    assert {status for status, *_ in refused} == {429}
    assert {status for status, *_ in singles} == {200}
    assert all(1 <= int(headers["retry-after"]) < 60 for *_, headers in refused)
    assert max(seconds for _, seconds, _ in refused) < 5  # and not when it is too late
    answered = len(found) - len(refused)
    assert answered >= 0.5 * 10 / pace_s
    assert max(seconds for status, seconds, _ in found if status == 200) < 11
