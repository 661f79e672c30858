"""A soak of the HTTP service: mixed load below its capacity, disturbed, and no failed request.

The load is a fixed mix of requests from several clients: repeated problems, new ones, and batches
of new ones. How many a second the server can do is measured first, by clients that never pause; the
soak then sends `_SHARE` of that, evenly. Every so often the server loads a changed model (SIGHUP),
one of its workers is killed, or one is told to end (SIGTERM).

A worker that is killed takes its connections along: a client asks again by another one, and the
request has failed if that fails too. Any other connection that breaks is a failed request.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.service.service_load import Connection, batch, meanwhile, one, post

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


@dataclass(frozen=True)
class Disturbance:
    """Reloads, kills and SIGTERMs during a soak; 0 seconds is never.

    Attributes:
        reload_every: seconds between reloads.
        kill_every: seconds between SIGKILLs, each to one worker.
        stop_every: seconds between SIGTERMs, each to one worker.
        card: a model's card, which changes before each reload; None reloads the same model.
    """

    reload_every: float = 0.0
    kill_every: float = 0.0
    stop_every: float = 0.0
    card: Path | None = None


class _Disturber:
    """Does that to the server whose parent process is `pid`, and notes when."""

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
        self._signal(signal.SIGKILL)

    def _stop(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(IndexError, ProcessLookupError):  # none is running just now
            os.kill(self._rng.choice(workers(self._pid)), number)

    def cause(self, broken: float) -> str:
        """Return the cause of a connection that broke then."""
        for kind in ("kill", "stop"):
            if any(0 <= broken - done < _LOST_WITHIN_S for done in self.at[kind]):
                return kind
        return "nothing"


def workers(pid: int) -> list[int]:
    """Return the ids of the worker processes of the server whose parent process is `pid`."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"service.worker" in _command(child)]


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def resident_mib(pid: int) -> float:
    """Resident memory of a process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def soak(port: int, pid: int, seconds: float, kinds: Disturbance) -> dict[str, Any]:
    """Load the server at `port`, whose parent process is `pid`."""
    rng = random.Random(0)
    known = [post(one(rng)) for _ in range(_KNOWN)]
    clients = [_Client(port, seed, known) for seed in range(_CLIENTS)]
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
    with meanwhile(_CLIENTS, paced):
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
