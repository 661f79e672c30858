"""How long the HTTP service takes, and whom it lets wait: real servers on loopback.

    python -m benchmarks.service.service_latency [--requests 2000] [--rounds 5]
        [--workers 2] [--model DIR]
    python -m benchmarks.service.service_latency --soak 600 [--kill-every 60] [--stop-every 25]

Beside each figure of `confpred serve` stands a no-op: an application of the same framework, under
the same server, that reads the same request and sends constant bytes. The two are measured in turn,
round by round, so that what else the machine does falls on both. Clients and servers share the
machine, so every figure is the whole round trip, and more workers than half of the cores show less
than they could do. Writes ``benchmarks/results/service_latency.json``; a soak adds itself to it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.provenance import RESULTS, ROOT
from benchmarks.service import service_soak
from benchmarks.service.service_load import (
    Connection,
    as_the_unit_runs_it,
    batch,
    get,
    meanwhile,
    metric,
    no_op_server,
    one,
    post,
    rate,
    server,
)

SHIPPED = ROOT / "models"
RESULT = RESULTS / "service_latency.json"
BATCH = 512
BATCHERS = 4
ABANDONED = (20, 1000)  # batches, and problems in each
_CONNECTIONS = 8  # enough to keep one process busy
_RATE_S = 1.0
_WORKERS_S = 8.0
_WARM_UP = 20
_PREPARED = 30  # batches of one client
_SWITCH_S = 0.0005  # between threads of this process: the default is longer than most requests
_PATIENCE_S = 0.2  # of those who go


def times(client: Connection, requests: Iterator[bytes], count: int) -> list[float]:
    """Milliseconds of `count` requests, one after the other."""
    return [client.seconds(next(requests)) * 1e3 for _ in range(count)]


def summary(ms: list[float], per_s: float | None = None) -> dict[str, Any]:
    """`per_s` is the rate with many connections; without it, that of the one that was timed."""
    percent = statistics.quantiles(ms, n=100, method="inclusive")
    return {
        "requests": len(ms),
        "p50_ms": round(percent[49], 3),
        "p95_ms": round(percent[94], 3),
        "p99_ms": round(percent[98], 3),
        "max_ms": round(max(ms), 3),
        "requests_per_s": round(per_s or 1e3 * len(ms) / sum(ms)),
    }


def in_turn(
    targets: dict[str, tuple[int, bytes]], rounds: int, requests: int
) -> dict[str, dict[str, Any]]:
    """Targets (a port, and what to send) measured in turn: one client alone, then many."""
    ms: dict[str, list[float]] = {name: [] for name in targets}
    rates: dict[str, list[float]] = {name: [] for name in targets}
    for _ in range(rounds):
        for name, (port, request) in targets.items():
            client = Connection(port)
            times(client, itertools.repeat(request), _WARM_UP)
            ms[name] += times(client, itertools.repeat(request), requests // rounds)
            client.close()
            rates[name].append(rate(port, request, _CONNECTIONS, _RATE_S))
    return {name: summary(ms[name], statistics.median(rates[name])) for name in targets}


def unseen(rng: random.Random, size: int) -> Iterator[bytes]:
    while True:
        yield post(one(rng) if size == 1 else batch(rng, size))


def prepared(rng: random.Random) -> Iterator[bytes]:
    """Batches, most of them made now: to make one takes time that is not to be measured."""
    made = itertools.islice(unseen(rng, BATCH), _PREPARED)
    return itertools.chain(list(made), unseen(rng, BATCH))


def beside_batches(port: int, body: dict[str, Any], requests: int) -> dict[str, dict[str, Any]]:
    """Return a known and new problems while `BATCHERS` clients ask for batches of new ones."""
    others = [Connection(port) for _ in range(BATCHERS)]
    batches = [prepared(random.Random(seed)) for seed in range(1, BATCHERS + 1)]

    def ask(number: int) -> None:
        others[number].seconds(next(batches[number]))

    client, beside = Connection(port), f"beside {BATCHERS} clients with batches of {BATCH}"
    with meanwhile(BATCHERS, ask):
        while metric(port, "confpred_queued_requests") < BATCHERS:
            time.sleep(0.01)
        return {
            f"repeated problem {beside}": summary(
                times(client, itertools.repeat(post(body)), requests)
            ),
            f"repeated problem in a body of 100 kB {beside}": summary(
                times(client, itertools.repeat(post(body, padding=100_000)), requests)
            ),
            f"unseen problem {beside}": summary(
                times(client, unseen(random.Random("beside"), 1), requests // 10)
            ),
        }


def abandoned(port: int) -> dict[str, Any]:
    """Measure the work that clients leave behind when they close their connections."""
    count, size = ABANDONED
    batches, rng = unseen(random.Random(100), size), random.Random(99)
    before = metric(port, "confpred_worked_out_problems_total")
    clients = [Connection(port) for _ in range(count)]
    for client in clients:
        client.socket.sendall(next(batches))
    time.sleep(_PATIENCE_S)
    for client in clients:
        client.close()
    waited = Connection(port).seconds(next(unseen(rng, 1)))
    while metric(port, "confpred_queued_requests"):
        time.sleep(0.01)
    return {
        "batches": count,
        "problems_in_each": size,
        "problems_worked_out": metric(port, "confpred_worked_out_problems_total") - before - 1,
        "next_request_ms": round(waited * 1e3, 3),
    }


def with_workers(workers: int, model: list[str], body: dict[str, Any]) -> dict[str, float]:
    """Problems a second in batches, and known requests a second, of so many processes."""
    clients = 2 * workers
    with server("--workers", str(workers), *model) as (port, _):
        batches = [unseen(random.Random(seed), BATCH // 4) for seed in range(clients)]
        connections = [Connection(port) for _ in range(clients)]

        def ask(number: int) -> None:
            connections[number].seconds(next(batches[number]))

        with meanwhile(clients, ask) as done:
            time.sleep(1)  # until all processes have warmed up
            before, start = sum(done), time.perf_counter()
            time.sleep(_WORKERS_S)
            batched = (sum(done) - before) / (time.perf_counter() - start)
        return {
            "unseen_problems_per_s": round(batched * (BATCH // 4)),
            "repeated_requests_per_s": round(
                statistics.median(
                    rate(port, post(body), _CONNECTIONS * workers, _RATE_S) for _ in range(5)
                )
            ),
        }


def models(port: int) -> dict[str, str]:
    """Return the version of each device's model; a device without one is answered by the
    heuristic."""
    reply = json.loads(Connection(port).reply(get("/v1/models")).partition(b"\r\n\r\n")[2])
    return {model["device"]: model["version"] for model in reply["models"]}


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    packages = ("confpred", "fastapi", "uvicorn", "uvloop", "httptools", "lightgbm", "numpy")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def measure(requests: int, rounds: int, workers: int, model: list[str]) -> dict[str, Any]:
    where, rng = machine(), random.Random(0)
    body = one(rng)
    with no_op_server() as (idle, _), server(*model) as (port, _):
        served, known = models(port), post(body)
        targets = {
            "no-op of the same framework": (idle, known),
            "repeated problem": (port, known),
            "healthz": (port, get("/healthz")),
        }
        latency = in_turn(targets, rounds, requests)
        client = Connection(port)
        latency["unseen problem"] = summary(times(client, unseen(rng, 1), requests // 4))
        latency[f"unseen batch of {BATCH}"] = summary(times(client, unseen(rng, BATCH), 5))
        latency |= beside_batches(port, body, requests)
        left = abandoned(port)
    with as_the_unit_runs_it(*model) as (same, port, header), no_op_server() as (idle, _):
        with_token = known.replace(b"\r\n", b"\r\n" + header, 1)
        targets = {
            "no-op beside the next two": (idle, known),
            "no-op with the middleware, tokens and JSON log": (same, with_token),
            "repeated problem with tokens and JSON log": (port, with_token),
        }
        latency |= in_turn(targets, rounds, requests)
    rates = {name: figures["requests_per_s"] for name, figures in latency.items()}
    plain, alike, unit = (rates[name] for name in targets)
    no_op, repeated, *_ = latency.values()
    return {
        "machine": where,
        "models": served,
        "latency": latency,
        "against_no_op": {
            "requests_per_s": round(repeated["requests_per_s"] / no_op["requests_per_s"], 2),
            "p50": round(repeated["p50_ms"] / no_op["p50_ms"], 2),
            "requests_per_s_with_tokens_and_log": round(unit / plain, 2),
            "requests_per_s_with_tokens_and_log_on_both": round(unit / alike, 2),
        },
        "abandoned": left,
        "workers": {count: with_workers(count, model, body) for count in sorted({1, workers})},
    }


def show(result: dict[str, Any]) -> None:
    for name, figures in result.pop("latency").items():
        print(f"{name:70}", *(f"{key} {value}" for key, value in figures.items()))
    print(json.dumps(result, indent=2))


def write(result: dict[str, Any]) -> None:
    partial = RESULT.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    partial.replace(RESULT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5, help="of no-op and service in turn")
    parser.add_argument("--workers", type=int, default=2, help="to compare with one")
    parser.add_argument("--model")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="only a soak of this length")
    parser.add_argument("--reload-every", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--kill-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--stop-every", type=float, default=25.0, metavar="SECONDS")
    arguments = parser.parse_args()
    sys.setswitchinterval(_SWITCH_S)
    model = ["--model", arguments.model] if arguments.model else []
    if arguments.soak is None:
        result = measure(arguments.requests, arguments.rounds, arguments.workers, model)
        former = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        if "soak" in former:
            result["soak"] = former["soak"]
        write(result)
        show(result)
        return
    where = machine()
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        shutil.copytree(arguments.model or SHIPPED, models)
        card = max(models.glob("**/card.json"))
        options = ["--workers", str(arguments.workers), "--model", str(models)]
        kinds = service_soak.Disturbance(
            arguments.reload_every, arguments.kill_every, arguments.stop_every, card
        )
        with server(*options) as (port, pid):
            soak = service_soak.soak(port, pid, arguments.soak, kinds)
    soak = {"machine": where, "workers": arguments.workers, **soak}
    write(json.loads(RESULT.read_text()) | {"soak": soak})
    print(json.dumps(soak, indent=2))
    if soak["failed"] or not soak["memory_flat"]:
        raise SystemExit("the soak failed")


if __name__ == "__main__":
    main()
