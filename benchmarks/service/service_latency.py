"""How long the HTTP service takes, and whom it lets wait: real servers on loopback.

    python -m benchmarks.service.service_latency [--requests 2000] [--rounds 5] [--model DIR]
    python -m benchmarks.service.service_latency --overload 60
    python -m benchmarks.service.service_latency --soak 600 [--kill-every 60] [--stop-every 25]

Beside each figure of `confpred serve` stands a no-op: an application of the same framework, under
the same server, that reads the same request and sends constant bytes. The two are measured in turn,
round by round, so that what else the machine does falls on both. Clients and servers share the
machine, so every figure is the whole round trip. Writes ``service_latency.json`` of the results; an
overload and a soak add themselves to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.provenance import RESULTS, ROOT, provenance, write
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
from confpred.service.exchange import Exchange

SHIPPED = ROOT / "models"
RESULT = RESULTS / "service_latency.json"
BATCH = 512
BATCHERS = 4
_CONNECTIONS = 8  # enough to keep one process busy
_RATE_S = 1.0
_WARM_UP = 20
_SWITCH_S = 0.0005  # between threads of this process: the default is longer than most requests
#: An overload: batches of so many times the capacity, which so many clients await so long; and the
#: seconds from one single problem to the next.
_OVERLOAD, _OVERLOADERS, _WAIT_S, _SINGLE_S = 3, 24, 10, 0.05


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


def beside_batches(port: int, body: dict[str, Any], requests: int) -> dict[str, dict[str, Any]]:
    """Return a known and new problems while `BATCHERS` clients ask for batches of new ones."""
    others = [Connection(port) for _ in range(BATCHERS)]
    batches = [unseen(random.Random(seed), BATCH) for seed in range(1, BATCHERS + 1)]

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


def replies(
    port: int, requests: list[bytes], threads: int, pause: float = 0.0, net: int = 1
) -> tuple[list[tuple[int, float]], float]:
    """Send requests, one each `pause` seconds, of `_OVERLOADERS` clients: the status and seconds of
    each, and the seconds of all."""
    start = time.perf_counter()

    def ask(place: int) -> tuple[int, float]:
        time.sleep(max(0.0, start + place * pause - time.perf_counter()))
        connection = Connection(port, f"127.0.{net}.{1 + place % _OVERLOADERS}")
        begun = time.perf_counter()
        status = connection.status(requests[place])
        connection.close()
        return status, time.perf_counter() - begun

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(ask, range(len(requests)))), time.perf_counter() - start


def overload(port: int, seconds: float) -> dict[str, Any]:
    """Measure what is answered of `_OVERLOAD` times the batches that the server can do, each in
    time for its client, and single new problems beside them."""
    rng = random.Random("overload")

    def batches(count: int, wait_s: int) -> list[bytes]:
        return [post(batch(rng, BATCH), wait_s=wait_s) for _ in range(count)]

    found, took = replies(port, batches(5 * BATCHERS, 60), BATCHERS)
    capacity = sum(status == 200 for status, _ in found) / took
    many = batches(round(_OVERLOAD * capacity * seconds), _WAIT_S)
    few = list(itertools.islice(unseen(rng, 1), round(seconds / _SINGLE_S)))
    with ThreadPoolExecutor(1) as beside:
        timing = beside.submit(replies, port, few, BATCHERS, _SINGLE_S, 2)
        found, took = replies(port, many, len(many), 1 / (_OVERLOAD * capacity))
    singles, times = zip(*timing.result()[0], strict=True)
    answered = [seconds for status, seconds in found if status == 200]
    return {
        "times": _OVERLOAD,
        "seconds": round(took),
        "batches": len(found),
        "answered": len(answered),
        "failed": sum(s not in (200, 429) for s, _ in found) + len(few) - singles.count(200),
        "slowest_answer_s": round(max(answered, default=0.0), 2),
        "capacity_problems_per_s": round(capacity * BATCH),
        "goodput": round(len(answered) / took / capacity, 2),
        "refusals": summary([1e3 * seconds for status, seconds in found if status == 429]),
        "singles": summary([1e3 * seconds for seconds in times]),
    }


def models(port: int) -> dict[str, str]:
    """Return the version of each device's model; a device without one is answered by the
    heuristic."""
    reply = json.loads(Connection(port).reply(get("/v1/models")).partition(b"\r\n\r\n")[2])
    return {model["device"]: model["version"] for model in reply["models"]}


def machine() -> dict[str, Any]:
    """Return where and with what this is measured, and beside how much else."""
    packages = ("confpred", "fastapi", "uvicorn", "uvloop", "httptools", "lightgbm", "numpy")
    return provenance(*packages, gpu=False) | {"load_before": round(os.getloadavg()[0], 2)}


def measure(requests: int, rounds: int, model: list[str]) -> dict[str, Any]:
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
    with as_the_unit_runs_it(*model) as (same, port, header), no_op_server() as (idle, _):
        with_token = known.replace(b"\r\n", b"\r\n" + header, 1)
        targets = {
            "no-op beside the next two": (idle, known),
            "no-op with the middleware, tokens and JSON log": (same, with_token),
            "repeated problem with tokens and JSON log": (port, with_token),
        }
        latency |= in_turn(targets, rounds, requests)
    return {"machine": where, "models": served, "latency": latency}


def soaked(
    seconds: float, workers: int, model: str | None, kinds: tuple[float, float, float]
) -> dict[str, Any]:
    """Soak a server of its own, whose model changes."""
    with tempfile.TemporaryDirectory() as folder:
        models, exchange = Path(folder) / "models", Exchange(Path(folder) / "exchange")
        shutil.copytree(model or SHIPPED, models)
        options = ["--workers", str(workers), "--model", str(models)]
        options += ["--exchange", str(exchange.folder), "--retrain-rows", "3000"]
        disturbance = service_soak.Disturbance(*kinds, max(models.glob("**/card.json")))
        with server(*options) as (port, pid):
            return service_soak.soak(port, pid, seconds, disturbance, exchange)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5, help="of no-op and service in turn")
    parser.add_argument("--workers", type=int, default=2, help="of a soak")
    parser.add_argument("--model")
    parser.add_argument("--overload", type=float, metavar="SECONDS", help="only an overload")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="only a soak of this length")
    parser.add_argument("--reload-every", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--kill-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--stop-every", type=float, default=25.0, metavar="SECONDS")
    arguments = parser.parse_args()
    sys.setswitchinterval(_SWITCH_S)
    model = ["--model", arguments.model] if arguments.model else []
    where, former = machine(), json.loads(RESULT.read_text()) if RESULT.exists() else {}
    failed = False
    if arguments.overload is not None:
        with server(*model) as (port, _):
            found = {"overload": {"machine": where, **overload(port, arguments.overload)}}
    elif arguments.soak is None:
        found = measure(arguments.requests, arguments.rounds, model)
    else:
        kinds = arguments.reload_every, arguments.kill_every, arguments.stop_every
        soak = soaked(arguments.soak, arguments.workers, arguments.model, kinds)
        failed = soak["failed"] or soak["uploads"]["rows_lost"] or not soak["memory_flat"]
        found = {"soak": {"machine": where, "workers": arguments.workers, **soak}}
    write(RESULT.stem, former | found)
    print(json.dumps(found, indent=2))
    if failed:
        raise SystemExit("the soak failed")


if __name__ == "__main__":
    main()
