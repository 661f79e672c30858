"""What the server counts, and the middleware that counts it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from uuid import uuid4

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Error, reply

#: Where the processes of one server keep their counts for each other (prometheus_client's name).
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"

_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_PROBLEMS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_LABELS = 256  # combinations that are kept: far more than there are
_GONE = 499  # nginx's status for a request whose client left before the reply
_log = logging.getLogger(__name__)


class Metrics:
    """The counters of one server.

    Attributes:
        in_flight: requests whose reply is not complete.
        queued_requests: that wait for the thread, or are being worked on.
        queued_problems: that they have left.
    """

    def __init__(self) -> None:
        self._registry, self._state = CollectorRegistry(), CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, labels, registry=self._registry)

        def histogram(name: str, help: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(name, help, labels, buckets=buckets, registry=self._registry)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(name, help, registry=self._registry, multiprocess_mode="livesum")

        self._requests = counter("confpred_requests", "HTTP requests.", "route", "status")
        self._seconds = histogram(
            "confpred_request_seconds", "Time to serve a request.", _SECONDS, "route"
        )
        self.in_flight = gauge("confpred_in_flight_requests", "Requests under way.")
        self._replies = counter(
            "confpred_replies", "Predict replies, by what had them ready.", "origin"
        )
        self._problems = counter(
            "confpred_problems", "Problems answered, by the source of the best choice.", "source"
        )
        self._batch = histogram(
            "confpred_batch_problems", "Problems in a request that was answered.", _PROBLEMS
        )
        self._worked_out = counter(
            "confpred_worked_out_problems", "Problems worked out, as they were not in memory."
        )
        self._dropped = counter(
            "confpred_dropped_requests", "Requests given up, by the reason.", "reason"
        )
        self.queued_requests = gauge("confpred_queued_requests", "Requests that wait for work.")
        self.queued_problems = gauge("confpred_queued_problems", "Problems that wait for work.")
        # Looking a child up by its labels takes longer than counting: each is looked up once.
        self._served = lru_cache(_LABELS)(self._serve_children)
        self._origin = lru_cache(_LABELS)(self._replies.labels)
        self._source = lru_cache(_LABELS)(self._problems.labels)
        self.worked_out = self._worked_out.inc

    def served(self, route: str, status: int, seconds: float) -> None:
        """Count a request by route and status; `seconds` go from its head to its reply's end."""
        requests, times = self._served(route, status)
        requests.inc()
        times.observe(seconds)

    def answered(self, origin: str, sources: Mapping[str, int]) -> None:
        """Count a reply: where it was found, and how many problems each source answered."""
        self._origin(origin).inc()
        for source, count in sources.items():
            self._source(source).inc(count)
        self._batch.observe(sum(sources.values()))

    def dropped(self, reason: str) -> None:
        """Count a request that was given up."""
        self._dropped.labels(reason).inc()

    def _serve_children(self, route: str, status: int) -> tuple[Counter, Histogram]:
        return self._requests.labels(route, status), self._seconds.labels(route)

    def add(self, collector: Collector) -> None:
        """Expose `collector` too, which knows of all processes and is not summed over them."""
        self._state.register(collector)

    def text(self) -> bytes:
        """The Prometheus exposition, summed over the server's processes where there are many."""
        registry = self._registry
        if SHARED_FOLDER in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry) + generate_latest(self._state)


class Telemetry:
    """ASGI middleware: counts and times each request, and turns a bug into a 500 with an id."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        start = time.perf_counter()
        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, watched)
        except Exception:
            incident = uuid4().hex
            _log.exception("request %s %r failed, id %s", scope["method"], scope["path"], incident)
            if status:  # too late to reply otherwise: let the server cut the connection
                raise
            message = f"internal error; the server's log has it as {incident}"
            await reply(500, Error("internal_error", message))(scope, receive, watched)
        finally:
            # The route's own path, so that clients cannot make up label values.
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.served(route, status or _GONE, time.perf_counter() - start)
            self._metrics.in_flight.dec()
        return None
