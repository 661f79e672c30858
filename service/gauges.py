"""What is exposed of the server's state: its models, its processes and its reloads.

These are told by whichever worker is asked, for the whole server, so they are not kept in the files
by which the processes add up their counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from fastapi import FastAPI
from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Gauges(Collector):
    """The state of `app`'s server, as its supervisor told it last."""

    def __init__(self, app: FastAPI) -> None:
        self._state = app.state

    def collect(self) -> Iterator[Metric]:
        status = self._state.server_status
        processes = status.get("processes", {"0": os.getpid()})
        yield self._models()
        workers = GaugeMetricFamily("confpred_workers", "Worker processes that answer.")
        workers.add_metric((), sum(name != "supervisor" for name in processes))
        yield workers
        replaced = CounterMetricFamily(
            "confpred_workers_replaced", "Worker processes that ended and were replaced."
        )
        replaced.add_metric((), status.get("replaced", 0))
        yield replaced
        reloads = CounterMetricFamily(
            "confpred_reloads", "Reloads and rollbacks, by outcome.", labels=("outcome",)
        )
        for outcome, count in status.get("reloads", {}).items():
            reloads.add_metric((outcome,), count)
        yield reloads
        yield from _of_processes(processes)

    def _models(self) -> Metric:
        found = GaugeMetricFamily(
            "confpred_model_info",
            "The models that answer; always 1.",
            labels=("device", "version", "digest"),
        )
        if self._state.loaded is not None:
            for device, model in self._state.loaded.current.predictor.models.items():
                found.add_metric((device, model.version, model.digest), 1)
        return found


def _of_processes(processes: dict[str, int]) -> Iterator[Metric]:
    """Memory, CPU time and open files of each process, with its name among the workers."""
    merged: dict[str, Metric] = {}
    for name, process in processes.items():
        for metric in ProcessCollector("confpred", partial(int, process), registry=None).collect():
            whole = merged.setdefault(
                metric.name, Metric(metric.name, metric.documentation, metric.type)
            )
            for sample in metric.samples:
                whole.add_sample(sample.name, {"process": name}, sample.value)
    yield from merged.values()
