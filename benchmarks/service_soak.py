"""A soak of the HTTP service: mixed load below its capacity, with reloads and no failed request.

The load is a fixed mix of requests from several clients: repeated problems, new ones, and batches
of new ones. How many a second the server can do is measured first, by clients that never pause; the
soak then sends `_SHARE` of that, evenly, and tells the server to load its models again (SIGHUP)
every so often.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import time
from collections import Counter
from typing import Any

from service_load import Connection, batch, meanwhile, one, post

_CLIENTS = 8
_SHARE = 0.8  # of the capacity
_CAPACITY_S = 10.0
_SAMPLE_S = 1.0
_AGAIN_S = 0.05  # after which a client whose connection broke opens another
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
        self.statuses: Counter[str] = Counter()
        self.ms: list[float] = []

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
        try:
            if self._connection is None:
                self._connection = Connection(self._port)
            status = str(self._connection.status(request))
        except OSError as error:
            status, self._connection = type(error).__name__, None
            time.sleep(_AGAIN_S)
        self.statuses[status] += 1
        self.ms.append((time.perf_counter() - start) * 1e3)


def resident_mib(pid: int) -> float:
    """Resident memory of a process and of all that it started."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid=,rss="], capture_output=True, text=True, check=True
    )
    rows = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    family, total = {pid}, 0
    for number, parent, kib in sorted(rows):
        if number == pid or parent in family:
            family.add(number)
            total += kib
    return total / 1024


def soak(port: int, pid: int, seconds: float, reload_every: float) -> dict[str, Any]:
    """Load the server at `port`, whose parent process is `pid`.

    Args:
        reload_every: seconds between reloads; 0 for none.
    """
    rng = random.Random(0)
    known = [post(one(rng)) for _ in range(_KNOWN)]
    clients = [_Client(port, seed, known) for seed in range(_CLIENTS)]
    with meanwhile(_CLIENTS, lambda number: clients[number].ask()) as calls:
        time.sleep(_CAPACITY_S)
        capacity = sum(calls) / _CAPACITY_S
    for client in clients:
        client.statuses.clear()
        client.ms.clear()
    pause, begun = _CLIENTS / (capacity * _SHARE), time.perf_counter()
    due = [begun + pause * number / _CLIENTS for number in range(_CLIENTS)]

    def paced(number: int) -> None:
        time.sleep(max(0.0, due[number] - time.perf_counter()))
        due[number] = max(due[number] + pause, time.perf_counter() - 1)  # catch up, within reason
        clients[number].ask()

    reloads, memory = 0, []
    with meanwhile(_CLIENTS, paced):
        while (elapsed := time.perf_counter() - begun) < seconds:
            memory.append(resident_mib(pid))
            if reload_every and elapsed > reload_every * (reloads + 1):
                os.kill(pid, signal.SIGHUP)
                reloads += 1
            time.sleep(_SAMPLE_S)
    statuses = sum((client.statuses for client in clients), Counter[str]())
    percent = statistics.quantiles([ms for client in clients for ms in client.ms], n=1000)
    quarter = max(1, len(memory) // 4)
    early = statistics.median(memory[quarter : 2 * quarter] or memory)
    late = statistics.median(memory[-quarter:])
    return {
        "seconds": round(elapsed),
        "reloads": reloads,
        "capacity_per_s": round(capacity),
        "requests_per_s": round(statuses.total() / elapsed),
        "requests": statuses.total(),
        "failed": statuses.total() - statuses["200"],
        "statuses": dict(statuses),
        "p50_ms": round(percent[499], 3),
        "p99_ms": round(percent[989], 3),
        "p999_ms": round(percent[998], 3),
        "memory_mib": {"early": round(early), "late": round(late), "most": round(max(memory))},
        "memory_flat": late <= _GROWTH * early,
    }
