"""What the server counts, and the middleware that counts it."""

from __future__ import annotations

import logging
import os
import time
from uuid import uuid4

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Error, reply

#: Where the processes of one server keep their counts for each other (prometheus_client's name).
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"

_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_log = logging.getLogger(__name__)


class Metrics:
    """The counters of one server.

    Attributes:
        requests: by route and status.
        seconds: by route, from the request's head to the end of the reply.
        problems: by the source of the best choice.
    """

    def __init__(self) -> None:
        self._registry, self._state = CollectorRegistry(), CollectorRegistry()
        self.requests = Counter(
            "confpred_requests", "HTTP requests.", ("route", "status"), registry=self._registry
        )
        self.seconds = Histogram(
            "confpred_request_seconds",
            "Time to serve a request.",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.problems = Counter(
            "confpred_problems",
            "Problems answered, by the source of the best choice.",
            ("source",),
            registry=self._registry,
        )

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
            self._metrics.requests.labels(route, status).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - start)
        return None
