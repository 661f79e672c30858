"""How many shards a second the HTTP service takes, and whom that delays: a real server on loopback.

    python -m benchmarks.service.service_uploads [--shards 800] [--clients 8] [--workers 2]

Shards of 1 MB are real measurements, each with other bytes. All are acknowledged, and so on the
disk, when the clock stops; checking them goes on at the system's idle priority. Clients send as
many as they can at first, and then `PACE` a second. Meanwhile one more client asks a remembered
problem every few milliseconds. It does the same while nothing else happens, and while a model is
retrained on the committed measurements. Clients and server share the machine. Writes
``benchmarks/results/service_uploads.json``.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.provenance import ROOT, write
from benchmarks.service.service_latency import machine, summary
from benchmarks.service.service_load import DATA, Connection, get, metric, one, post, server, upload

BYTES = 1_000_000
PACE = 55.0  # uploads a second
_PAUSE_S = 0.003  # of the client that asks a remembered problem
_IDLE_S, _JOB_S = 10.0, 60.0
_NUMBER = b"number=%08d"


def shard() -> bytes:
    """Return a file of measurements of about `BYTES`, with a number in its metadata."""
    table = pq.read_table(next(DATA.glob("*.parquet")))
    rows = 50_000
    while True:
        file = io.BytesIO()
        some = table.slice(0, rows)
        kept = {**(some.schema.metadata or {}), b"shard": _NUMBER % 0}
        pq.write_table(some.replace_schema_metadata(kept), file, compression="zstd")
        if file.tell() >= BYTES:
            return file.getvalue()
        rows = int(rows * max(1.02, BYTES / file.tell()))


def send_all(
    port: int, requests: Sequence[bytes], clients: int, pace: float | None, seconds: Any
) -> None:
    """Send all requests from so many connections, no more than `pace` a second in all, and put down
    how long that took."""
    start = time.perf_counter()

    def work(number: int) -> None:
        connection = Connection(port)
        for place in range(number, len(requests), clients):
            if pace is not None:
                time.sleep(max(0.0, start + place / pace - time.perf_counter()))
            if (status := connection.status(requests[place])) != 202:
                raise SystemExit(f"an upload is answered {status}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds.value = time.perf_counter() - start


def asked_while(port: int, goes_on: Callable[[], bool]) -> dict[str, Any]:
    """Return the times of a remembered problem while something goes on."""
    client, request, ms = Connection(port), post(one(random.Random("remembered"))), []
    client.seconds(request)
    while goes_on():
        ms.append(client.seconds(request) * 1e3)
        time.sleep(_PAUSE_S)
    client.close()
    return summary(ms)


def lasting(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


def measure(shards: int, clients: int, workers: int) -> dict[str, Any]:
    """Return the figures of one server."""
    whole = shard()
    if whole.count(_NUMBER % 0) != 1:
        raise SystemExit("the shard's number is not once in its bytes")
    requests = [upload(whole.replace(_NUMBER % 0, _NUMBER % i)) for i in range(1, shards + 1)]
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        admitted = Path(folder) / "admitted"
        admitted.mkdir()
        shutil.copy(next(DATA.glob("*.parquet")), admitted)
        options = ("--exchange", folder, "--workers", str(workers), "--quota-mib", "100000")
        with server(*options) as (port, _):
            found = {"alone": asked_while(port, lasting(_IDLE_S))}
            context = multiprocessing.get_context("fork")
            rates = {}
            half = len(requests) // 2
            parts = {
                "as many uploads as go": (requests[:half], None),
                f"{PACE:g} uploads a second": (requests[half:], PACE),
            }
            for name, (part, pace) in parts.items():
                seconds = context.Value("d", 0.0)
                words = (port, part, clients, pace, seconds)
                sender = context.Process(target=send_all, args=words)
                sender.start()
                found[f"beside {name}"] = asked_while(port, sender.is_alive)
                sender.join()
                rates[name] = round(len(part) / seconds.value, 1)
            checked = metric(port, 'confpred_uploads{state="admitted"}')
        for path in (Path(folder) / "incoming").iterdir():
            path.unlink()  # the next server is not to check them
        (Path(folder) / "exchange.sqlite").unlink()
        with server(*options) as (port, _):
            job = b"POST /v1/jobs?device=h100" + get("/")[5:]
            if (status := Connection(port).status(job)) != 202:
                raise SystemExit(f"a job is answered {status}")
            while not metric(port, 'confpred_jobs{state="running"}'):
                time.sleep(0.1)
            found["beside a retraining"] = asked_while(port, lasting(_JOB_S))
            if not metric(port, 'confpred_jobs{state="running"}'):
                raise SystemExit("the retraining ended too early")
    return {
        "shards": shards,
        "bytes_each": len(whole),
        "clients": clients,
        "workers": workers,
        "uploads_per_s": rates,
        "checked_meanwhile": int(checked),
        "remembered problem": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=800)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    where = {"machine": machine()}
    found = where | measure(options.shards, options.clients, options.workers)
    print(write("service_uploads", found).read_text())


if __name__ == "__main__":
    main()
