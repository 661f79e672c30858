"""A real ``confpred serve`` for the tests of service and client."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

from confpred.service.schema import EXAMPLE

LAYER = EXAMPLE.to_json()
ONE = {"device": "h100", "problem": LAYER}
#: Long enough in the answering that other things can be seen to happen meanwhile.
LONG = {
    "device": "h100",
    "problems": [{**LAYER, "n": 1 + i % 100, "h": 60 + i // 100} for i in range(400)],
    "top": 8,
}
COMMAND = str(Path(sys.executable).with_name("confpred"))


@dataclass
class Server:
    """A running server, where it listens, and the file of all that it says."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def said(self) -> str:
        """Return what it has said so far."""
        return self.log.read_text()

    def get(self, path: str, **how: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", **{"timeout": 60, **how})

    def post(self, path: str, **how: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", **{"timeout": 120, **how})

    def predict(self, body: object = ONE, **how: Any) -> httpx.Response:
        """Ask on a connection of its own, so that every worker gets some of many."""
        return self.post("/v1/predict", json=body, **how)

    def workers(self) -> set[int]:
        """Return the ids of the worker processes that run now."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return set(map(int, path.read_text().split()))

    def kill_worker(self, number: int = signal.SIGKILL, *, and_wait: bool = True) -> int:
        """Send a signal to a worker; wait until another answers in its place."""
        before, victim = self.said().count("answers, process"), min(self.workers())
        os.kill(victim, number)
        if and_wait:
            eventually(lambda: self.said().count("answers, process") > before)
        return victim

    def metric(self, name: str) -> float:
        """Return the number of a metric, with its labels; 0 where it has none."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def exchange(self, *parts: bytes, close: bool = False) -> bytes:
        """Return the start of the reply to these raw parts, up to some of its body; none if cut
        first."""
        with self.connect() as connection:
            for part in parts:
                connection.sendall(part)
            answer = b""
            while not close and not re.search(rb"\r\n\r\n.+", answer, re.DOTALL):
                received = connection.recv(65_536)
                if not received:
                    break
                answer += received
            return answer

    def memory(self) -> int:
        """Return the bytes that the only worker has."""
        (worker,) = self.workers()
        return int(Path(f"/proc/{worker}/statm").read_text().split()[1]) * 4096


@contextmanager
def running(folder: Path, *options: str, port: int = 0, **environment: str) -> Iterator[Server]:
    """Run a server that is ready."""
    log = folder / "server.log"
    with log.open("wb") as file:
        command = [COMMAND, "serve", "--port", str(port), *options]
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environment}
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


def refused(
    *options: str, preexec_fn: Callable[[], None] | None = None, **environment: str
) -> tuple[int, str]:
    """Return how a server ends that cannot start, and what it says."""
    done = subprocess.run(
        [COMMAND, "serve", *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        preexec_fn=preexec_fn,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def eventually(condition: Callable[[], object], said: object = "", within_s: float = 60) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def copy_model(model: Path, to: Path, **card: object) -> str:
    """Copy a model folder, whole or not at all, with these entries in its card; return its
    digest."""
    away = to.with_name(f"{to.name}.copying")
    shutil.copytree(model, away)
    text = json.dumps(json.loads((away / "card.json").read_text()) | card)
    (away / "card.json").write_text(text)
    to.parent.mkdir(parents=True, exist_ok=True)
    away.rename(to)
    return sha256(text.encode()).hexdigest()


def head(*lines: str) -> bytes:
    start = ("POST /v1/predict HTTP/1.1", "host: localhost", "content-type: application/json")
    return "\r\n".join((*start, *lines, "", "")).encode()
