"""Counts of requests, replies, workers and reloads, and the text of ``/metrics``.

Each process counts for itself: numbers by key, which is a metric's name and its labels. Workers
send their counts to the supervisor, which adds them up (`Totals`).
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client import metrics_core as core

from confpred._version import __version__
from confpred.model.folder import Model

#: A metric's name and its labels; for a histogram also the number of a bucket, or ``sum``.
Key = tuple[str, ...]
Counts = defaultdict[Key, float]
#: Counts in JSON: each entry is a key and its number.
Rows = list[list[Any]]

_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_PROBLEMS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Metric(NamedTuple):
    """One metric: its help text, and the names of its labels. A gauge is dropped when its process
    ends; `buckets` are the upper bounds of a histogram's buckets."""

    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["counter", "gauge", "histogram"] = "counter"
    buckets: Sequence[float] = ()


FAMILIES: Mapping[str, Metric] = {
    "confpred_requests": Metric("HTTP requests.", ("route", "status")),
    "confpred_request_seconds": Metric("Times of requests.", ("route",), "histogram", _SECONDS),
    "confpred_in_flight_requests": Metric("Requests under way.", (), "gauge"),
    "confpred_replies": Metric("Predict replies, by what had them ready.", ("origin",)),
    "confpred_problems": Metric("Problems answered, by the best choice's source.", ("source",)),
    "confpred_batch_problems": Metric("Problems of a request.", (), "histogram", _PROBLEMS),
    "confpred_worked_out_problems": Metric("Problems worked out, as they were not in memory."),
    "confpred_dropped_requests": Metric("Requests given up, by the reason.", ("reason",)),
    "confpred_queued_requests": Metric("Requests that wait for work.", (), "gauge"),
    "confpred_queued_problems": Metric("Problems that wait for work.", (), "gauge"),
    "confpred_log_lines_lost": Metric("Lines of the log that nobody took in time."),
    "confpred_workers": Metric("Worker processes that answer.", (), "gauge"),
    "confpred_workers_wanted": Metric("Worker processes that there should be.", (), "gauge"),
    "confpred_workers_replaced": Metric("Worker processes that ended and were replaced."),
    "confpred_uploads": Metric("Uploads, by what became of them.", ("state",), "gauge"),
    "confpred_upload_bytes": Metric("Bytes of all uploads."),
    "confpred_jobs": Metric("Retraining jobs, by state.", ("state",), "gauge"),
    "confpred_reloads": Metric("Reloads and rollbacks, by outcome.", ("outcome",)),
}


class Metrics:
    """The counts of one process."""

    def __init__(self, lost: Callable[[], int] = lambda: 0) -> None:
        """Count from zero; `lost` returns how many lines of the log are lost."""
        self._lost = lost
        self.counts: Counts = defaultdict(float)
        for reason in ("queue", "deadline", "gone"):  # a rate needs a zero first
            self.add(0, "confpred_dropped_requests", reason)

    def add(self, amount: float, *key: str) -> None:
        self.counts[key] += amount

    def observe(self, value: float, *key: str) -> None:
        """Count `value` in a histogram."""
        place = bisect_left(FAMILIES[key[0]].buckets, value)
        self.add(1, *key, str(place))
        self.add(value, *key, "sum")

    def served(self, route: str, status: int, seconds: float) -> None:
        """Count a request by route and status; `seconds` last from its head to its reply's end."""
        self.add(1, "confpred_requests", route, str(status))
        self.observe(seconds, "confpred_request_seconds", route)

    def answered(self, origin: str, sources: Mapping[str, int]) -> None:
        """Count a reply by its origin, and the problems by the source of their answers."""
        self.add(1, "confpred_replies", origin)
        for source, count in sources.items():
            self.add(count, "confpred_problems", source)
        self.observe(sum(sources.values()), "confpred_batch_problems")

    def rows(self) -> Rows:
        self.counts["confpred_log_lines_lost",] = self._lost()
        return rows(self.counts)


def rows(counts: Mapping[Key, float]) -> Rows:
    return [[*key, number] for key, number in list(counts.items())]


def read(rows: Rows) -> dict[Key, float]:
    return {tuple(row[:-1]): row[-1] for row in rows}


class Totals:
    """The counts of all processes of a server, also of those that have ended."""

    def __init__(self) -> None:
        self._of: dict[int, Mapping[Key, float]] = {}
        self._ended: Counts = defaultdict(float)

    def begin(self, process: int) -> None:
        self._of[process] = {}

    def note(self, process: int, rows: Rows) -> None:
        """Store the last report of `process`; ignore one of a process that has ended."""
        if process in self._of:
            self._of[process] = read(rows)

    def end(self, process: int) -> None:
        for key, number in self._of.pop(process).items():
            if FAMILIES[key[0]].kind != "gauge":
                self._ended[key] += number

    def sum(self, *more: Mapping[Key, float]) -> Counts:
        total: Counts = defaultdict(float)
        for counts in (self._ended, *self._of.values(), *more):
            for key, number in counts.items():
                total[key] += number
        return total


def families(counts: Rows) -> Iterator[core.Metric]:
    """Yield `counts` as metrics of Prometheus's client."""
    by_name: dict[str, dict[Key, float]] = {name: {} for name in FAMILIES}
    for name, *key, value in counts:
        by_name[name][tuple(key)] = value
    for name, family in FAMILIES.items():
        values = by_name[name]
        if family.kind == "histogram":
            yield _histogram(name, family, values)
            continue
        kind = core.GaugeMetricFamily if family.kind == "gauge" else core.CounterMetricFamily
        made = kind(name, family.help, labels=family.labels)
        for labels, value in values.items() or ([] if family.labels else [((), 0)]):
            made.add_metric(labels, value)
        yield made


def _histogram(name: str, family: Metric, values: Mapping[Key, float]) -> core.Metric:
    made = core.HistogramMetricFamily(name, family.help, labels=family.labels)
    for labels in dict.fromkeys(key[:-1] for key in values) or ([] if family.labels else [()]):
        total, buckets = 0.0, []
        for place, most in enumerate((*map(str, map(float, family.buckets)), "+Inf")):
            total += values.get((*labels, str(place)), 0)
            buckets.append((most, total))
        made.add_metric(labels, buckets, values.get((*labels, "sum"), 0.0))
    return made


def exposition(counts: Rows, processes: Mapping[str, int], models: Mapping[str, Model]) -> bytes:
    """Return the text of ``/metrics``: `counts`, the state of `processes` (ids by name) and
    `models` by device. It takes some milliseconds."""
    build = core.InfoMetricFamily("confpred_build", "The versions that run; always 1.")
    build.add_metric((), {"version": __version__, "python": platform.python_version()})
    answering = core.InfoMetricFamily("confpred_model", "The models that answer; always 1.")
    for device, model in models.items():
        labels = {"device": device, "version": model.version, "digest": model.digest}
        answering.add_metric((), labels)
    states: dict[str, core.Metric] = {}
    for name, process in processes.items():
        for metric in ProcessCollector("confpred", partial(int, process), registry=None).collect():
            empty = core.Metric(metric.name, metric.documentation, metric.type)
            whole = states.setdefault(metric.name, empty)
            for sample in metric.samples:
                whole.add_sample(sample.name, {"process": name}, sample.value)
    metrics = [*families(counts), build, answering, *states.values()]
    registry: Any = SimpleNamespace(collect=lambda: metrics)
    return generate_latest(registry)
