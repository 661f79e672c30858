"""A soak of the HTTP service: mixed load below its capacity, disturbed, and no failed request.

The load is a fixed mix of requests from several clients: repeated problems, new ones, and batches
of new ones. How many a second the server can do is measured first, by clients that never pause; the
soak then sends `_SHARE` of that, evenly, and measurements beside it. Every so often the server
loads a changed model (SIGHUP), a process of it is killed, or a worker is asked to end (SIGTERM).

A worker that is killed takes its connections along: a client asks again by another one, and the
request has failed if that fails too. Any other connection that breaks is a failed request. Rows of
an upload that was acknowledged are lost if they are not in the data once all is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.service.service_load import DATA, Connection, batch, meanwhile, one, post, upload
from confpred.service.exchange import Exchange

_CLIENTS = 8
_SHARE = 0.8  # of the capacity
_CAPACITY_S = 10.0
_SAMPLE_S = 1.0
_AGAIN_S = 0.05  # after which a client whose connection broke opens another
_LOST_WITHIN_S = 2.0  # a connection that breaks so soon after a signal to a worker is lost to it
#: The mix, of 100 requests; the remaining ones repeat a problem out of `_KNOWN`.
_NEW, _BATCHES, _BATCH, _KNOWN = 9, 1, 64, 50
#: Memory is flat if the last quarter's median is at most this much above the second quarter's; in
#: the first the memories of replies fill up.
_GROWTH = 1.1
#: Rows of an upload, seconds between two, and until the last one is checked.
_ROWS, _UPLOAD_S, _CHECKED_S = 60, 1.0, 600.0


class _Client:
    """One client and its share of the mix."""

    def __init__(self, port: int, seed: int, known: list[bytes]) -> None:
        self._port, self._rng, self._known = port, random.Random(seed), known
        self._connection: Connection | None = None
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.statuses: Counter[str] = Counter()
        self.ms: list[float] = []
        self.broken: list[float] = []  # when

    def ask(self) -> None:
        """One request of the mix; what becomes of it is counted."""
        dice = self._rng.randrange(100)
        if dice < _BATCHES:
            request = post(batch(self._rng, _BATCH))
        elif dice < _BATCHES + _NEW:
            request = post(one(self._rng))
        else:
            request = self._rng.choice(self._known)
        start = time.perf_counter()
        status = self._status(request) or self._status(request) or "no reply"
        self.statuses[status] += 1
        self.ms.append((time.perf_counter() - start) * 1e3)

    def _status(self, request: bytes) -> str | None:
        """Return the status of the reply; None if the connection broke."""
        try:
            if self._connection is None:
                self._connection = Connection(self._port)
            return str(self._connection.status(request))
        except OSError:
            self.broken.append(time.perf_counter())
            self._connection = None
            time.sleep(_AGAIN_S)
            return None


class _Uploader:
    """A client that sends measurements, each part until it is acknowledged."""

    def __init__(self, port: int) -> None:
        self._port, self._table = port, pq.read_table(sorted(DATA.glob("*.parquet"))[0])
        self.ids: list[str] = []  # of what was acknowledged

    def send(self) -> None:
        file = io.BytesIO()
        pq.write_table(self._table.slice(_ROWS * len(self.ids), _ROWS), file)
        with contextlib.suppress(OSError):  # its worker was killed
            if Connection(self._port).status(upload(file.getvalue())) == 202:
                self.ids.append(hashlib.sha256(file.getvalue()).hexdigest())
        time.sleep(_UPLOAD_S)

    def kept(self, exchange: Exchange) -> dict[str, int]:
        """Return the rows that were acknowledged, and what became of them at last."""
        until = time.perf_counter() + _CHECKED_S
        while (found := self._states(exchange))["received"] and time.perf_counter() < until:
            time.sleep(_SAMPLE_S)
        rows = {f"rows_{state}": _ROWS * count for state, count in found.items()}
        parts = {part.stem[5:]: pq.read_metadata(part).num_rows for part in exchange.data()}
        inside = sum(parts.get(name, 0) for name in self.ids)
        return {**rows, "rows_lost": _ROWS * found["admitted"] - inside}

    def _states(self, exchange: Exchange) -> Counter[str]:
        known = {each.id: each.state for each in exchange.latest(10**6)}
        return Counter(known.get(name, "admitted") for name in self.ids)  # or it is lost


@dataclass(frozen=True)
class Disturbance:
    """Reloads, kills and SIGTERMs during a soak; 0 seconds is never.

    Attributes:
        reload_every: seconds between reloads.
        kill_every: seconds between SIGKILLs, each to one process but the first.
        stop_every: seconds between SIGTERMs, each to one worker.
        card: a model's card, which changes before each reload; None reloads the same model.
    """

    reload_every: float = 0.0
    kill_every: float = 0.0
    stop_every: float = 0.0
    card: Path | None = None


class _Disturber:
    """Does that to the server whose parent process is `pid`, and records when."""

    def __init__(self, pid: int, kinds: Disturbance) -> None:
        self._pid, self._kinds, self._rng = pid, kinds, random.Random(0)
        self.at: dict[str, list[float]] = {"reload": [], "kill": [], "stop": []}
        self._begun = time.perf_counter()

    def look(self) -> None:
        """Do what is due."""
        now = time.perf_counter()
        for kind, done in self.at.items():
            every = getattr(self._kinds, f"{kind}_every")
            if every and now - self._begun > every * (len(done) + 1):
                done.append(now)
                getattr(self, f"_{kind}")()

    def _reload(self) -> None:
        if self._kinds.card is not None:
            with self._kinds.card.open("a") as card:
                card.write("\n")
        os.kill(self._pid, signal.SIGHUP)

    def _kill(self) -> None:
        children = _children(self._pid)
        self._signal(signal.SIGKILL, [*children, *chain.from_iterable(map(_children, children))])

    def _stop(self) -> None:
        self._signal(signal.SIGTERM, workers(self._pid))

    def _signal(self, number: signal.Signals, processes: list[int]) -> None:
        with contextlib.suppress(IndexError, ProcessLookupError):  # none is running just now
            os.kill(self._rng.choice(processes), number)

    def cause(self, broken: float) -> str:
        """Return the cause of a connection that broke then."""
        for kind in ("kill", "stop"):
            if any(0 <= broken - done < _LOST_WITHIN_S for done in self.at[kind]):
                return kind
        return "nothing"


def workers(pid: int) -> list[int]:
    """Return the ids of the worker processes of the server whose parent process is `pid`."""
    return [child for child in _children(pid) if b"service.worker" in _read(f"{child}/cmdline")]


def _children(pid: int) -> list[int]:
    return [*map(int, _read(f"{pid}/task/{pid}/children").split())]


def _read(name: str) -> bytes:
    """Return what the system says of a process; nothing if it has ended."""
    try:
        return Path("/proc", name).read_bytes()
    except OSError:
        return b""


def resident_mib(pid: int) -> float:
    """Resident memory of a process; 0 if it has ended."""
    pages = int([*_read(f"{pid}/statm").split(), 0, 0][1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def soak(
    port: int, pid: int, seconds: float, kinds: Disturbance, exchange: Exchange
) -> dict[str, Any]:
    """Load the server at `port`, whose parent process is `pid`."""
    rng = random.Random(0)
    known = [post(one(rng)) for _ in range(_KNOWN)]
    clients, uploader = [_Client(port, seed, known) for seed in range(_CLIENTS)], _Uploader(port)
    with meanwhile(_CLIENTS, lambda number: clients[number].ask()) as calls:
        time.sleep(_CAPACITY_S)
        capacity = sum(calls) / _CAPACITY_S
    for client in clients:
        client.forget()
    pause, begun = _CLIENTS / (capacity * _SHARE), time.perf_counter()
    due = [begun + pause * number / _CLIENTS for number in range(_CLIENTS)]

    def paced(number: int) -> None:
        time.sleep(max(0.0, due[number] - time.perf_counter()))
        due[number] = max(due[number] + pause, time.perf_counter() - 1)  # catch up, within reason
        clients[number].ask()

    memory: dict[str, list[float]] = {"all": [], "largest worker": [], "supervisor": []}
    disturber = _Disturber(pid, kinds)
    with meanwhile(_CLIENTS, paced), meanwhile(1, lambda _: uploader.send()):
        while (elapsed := time.perf_counter() - begun) < seconds:
            each = [resident_mib(worker) for worker in workers(pid)]
            memory["all"].append(resident_mib(pid) + sum(each))
            memory["largest worker"].append(max(each, default=0.0))
            memory["supervisor"].append(resident_mib(pid))
            disturber.look()
            time.sleep(_SAMPLE_S)
    statuses = sum((client.statuses for client in clients), Counter[str]())
    lost = Counter(disturber.cause(broken) for client in clients for broken in client.broken)
    percent = statistics.quantiles([ms for client in clients for ms in client.ms], n=1000)
    found = {name: _over_time(values) for name, values in memory.items()}
    return {
        "seconds": round(elapsed),
        "reloads": len(disturber.at["reload"]),
        "kills": len(disturber.at["kill"]),
        "stops": len(disturber.at["stop"]),
        "capacity_per_s": round(capacity),
        "requests_per_s": round(statuses.total() / elapsed),
        "requests": statuses.total(),
        "failed": statuses.total() - statuses["200"] + lost["stop"] + lost["nothing"],
        "statuses": dict(statuses),
        "connections_lost_to": dict(lost),
        "uploads": uploader.kept(exchange),
        "p50_ms": round(percent[499], 3),
        "p99_ms": round(percent[989], 3),
        "p999_ms": round(percent[998], 3),
        "memory_mib": found,
        "memory_flat": found["all"]["late"] <= _GROWTH * found["all"]["early"],
    }


def _over_time(mib: list[float]) -> dict[str, int]:
    """Return the medians of the second and of the last quarter, and the largest."""
    quarter = max(1, len(mib) // 4)
    early = statistics.median(mib[quarter : 2 * quarter] or mib)
    late = statistics.median(mib[-quarter:])
    return {"early": round(early), "late": round(late), "most": round(max(mib))}
