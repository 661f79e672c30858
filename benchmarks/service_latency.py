"""How long the HTTP service takes: a real server on loopback, one keep-alive client.

    python benchmarks/service_latency.py [--requests 2000] [--model DIR]

The client is the standard library's, which costs about 0.1 ms a request itself; ``healthz`` shows
that floor. Client and server share the machine, so every figure is the whole round trip. Writes
``benchmarks/results/service_latency.json``.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.metadata
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "service_latency.json"
BATCH = 512


@contextmanager
def server(*options: str) -> Iterator[int]:
    """A running `confpred serve`; the value is its port."""
    command = [sys.executable, "-c", "from confpred.cli import main; main()", "serve"]
    command += ["--port", "0", "--no-access-log", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr or ():
                if found := re.search(r"running on http://.*:(\d+)", line):
                    break
            else:
                raise SystemExit("the server did not start")
            yield int(found[1])
        finally:
            process.terminate()


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port)

    def seconds(self, body: dict[str, Any] | None) -> float:
        """The time of one request, from before it is sent until its reply is read."""
        encoded = None if body is None else json.dumps(body).encode()
        start = time.perf_counter()
        if encoded is None:
            self.connection.request("GET", "/healthz")
        else:
            header = {"content-type": "application/json"}
            self.connection.request("POST", "/v1/predict", encoded, header)
        reply = self.connection.getresponse()
        text = reply.read()
        elapsed = time.perf_counter() - start
        if reply.status != 200:
            raise SystemExit(f"status {reply.status}: {text!r}")
        return elapsed


def problem(rng: random.Random) -> dict[str, int]:
    """A layer that almost certainly no earlier request asked for."""
    groups = rng.choice((2, 4, 8, 16, 32, 64))
    channels = 8 * groups
    size = {"n": rng.randint(1, 256), "h": rng.randint(7, 112), "w": rng.randint(7, 112)}
    return {**size, "c": channels, "k": channels, "r": 3, "s": 3, "padding": 1, "groups": groups}


def ask(count: int, client: Client, bodies: Iterator[dict[str, Any] | None]) -> dict[str, Any]:
    """The latency of `count` requests, one after the other, after a warm-up."""
    for _ in range(min(20, count)):
        client.seconds(next(bodies))
    times = [client.seconds(next(bodies)) * 1e3 for _ in range(count)]
    percent = statistics.quantiles(times, n=100, method="inclusive")
    return {
        "requests": count,
        "p50_ms": round(percent[49], 3),
        "p95_ms": round(percent[94], 3),
        "p99_ms": round(percent[98], 3),
        "max_ms": round(max(times), 3),
        "requests_per_s": round(1e3 * count / sum(times)),
    }


def one(body: dict[str, Any] | None) -> Iterator[dict[str, Any] | None]:
    while True:
        yield body


def unseen(rng: random.Random, batch: int) -> Iterator[dict[str, Any]]:
    while True:
        if batch == 1:
            yield {"device": "h100", "problem": problem(rng)}
        else:
            yield {"device": "h100", "problems": [problem(rng) for _ in range(batch)]}


def models(port: int) -> dict[str, str]:
    """The version of each device's model; a device without one is answered by the heuristic."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as reply:
        return {model["device"]: model["version"] for model in json.load(reply)["models"]}


def measure(port: int, requests: int) -> dict[str, Any]:
    rng = random.Random(0)
    client, repeated = Client(port), one({"device": "h100", "problem": problem(rng)})
    batches = unseen(rng, BATCH)
    found = {
        "healthz": ask(requests, client, one(None)),
        "repeated problem": ask(requests, client, repeated),
        "unseen problem": ask(requests, client, unseen(rng, 1)),
        f"unseen batch of {BATCH}": ask(5, client, batches),
    }
    stop = threading.Event()
    other = Client(port)

    def load() -> None:
        while not stop.is_set():
            other.seconds(next(batches))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        found[f"repeated problem beside batches of {BATCH}"] = ask(
            min(requests, 500), client, repeated
        )
    finally:
        stop.set()
        thread.join()
    return found


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    packages = ("confpred", "fastapi", "uvicorn", "lightgbm", "numpy")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--model")
    arguments = parser.parse_args()
    where = machine()
    options = ["--model", arguments.model] if arguments.model else []
    with server(*options) as port:
        served, found = models(port), measure(port, arguments.requests)
    for name, figures in found.items():
        print(f"{name:40}", *(f"{key} {value}" for key, value in figures.items()))
    partial = RESULT.with_suffix(".partial")
    partial.write_text(
        json.dumps({"machine": where, "models": served, "latency": found}, indent=2) + "\n"
    )
    partial.replace(RESULT)


if __name__ == "__main__":
    main()
