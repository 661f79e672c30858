"""The text of ``/metrics``: the counts of all processes, and how they and their models are."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.metrics_core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from confpred._version import __version__

from .generations import Loaded
from .metrics import Key, families


class Exposition(Collector):
    """One answer to Prometheus."""

    def __init__(
        self,
        counts: Mapping[Key, float],
        processes: Mapping[str, int],
        loaded: Loaded | None,
    ) -> None:
        """Tell `counts`, the state of `processes` (ids by name) and the models of `loaded`."""
        self._counts, self._processes, self._loaded = counts, processes, loaded

    def text(self) -> bytes:
        """The whole answer; takes some milliseconds."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        yield from families(self._counts)
        yield _info(
            "confpred_build",
            "The versions that run; always 1.",
            ({"version": __version__, "python": platform.python_version()},),
        )
        models = {} if self._loaded is None else self._loaded.current.predictor.models
        yield _info(
            "confpred_model",
            "The models that answer; always 1.",
            (
                {"device": device, "version": model.version, "digest": model.digest}
                for device, model in models.items()
            ),
        )
        yield from _of_processes(self._processes)


def _info(name: str, help: str, rows: Iterable[Mapping[str, str]]) -> Metric:
    found = InfoMetricFamily(name, help)
    for row in rows:
        found.add_metric((), dict(row))
    return found


def _of_processes(processes: Mapping[str, int]) -> Iterator[Metric]:
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
