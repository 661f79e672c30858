"""`Client`: the service in place of a predictor, for threads."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from types import TracebackType
from typing import Any

import httpx

from confpred.client.answers import ServedDevice, ServedModel, devices_of, models_of
from confpred.client.questions import Questions, Trace
from confpred.client.steps import NoReply, Pause, Reply, Result, Send, Steps, clock
from confpred.predict.choice import Choice
from confpred.predict.plan import Plan
from confpred.problem.device import Device
from confpred.problem.record import Record


class Client(Questions[httpx.Client]):
    """Asks the service as one asks a `confpred.Predictor`, and returns the same records.

    Connections are kept and shared by threads; a forked child makes its own. Where nothing else is
    said, a method raises:

        InvalidInput, UnknownDevice: as the predictor does.
        ServiceUnavailable: no answer within `timeout_s`, and there is no `fallback`.
        ServiceError: the service refused, or its reply makes no sense.
    """

    _connections = httpx.Client

    def choose(
        self, problem: Record, device: str | Device, *, trace: Trace | None = None
    ) -> Choice:
        """The best config known for `problem` on `device`."""
        return self._take(self._ask([problem], device, 1, trace))[0][0]

    def choose_many(
        self, problems: Iterable[Record], device: str | Device, *, trace: Trace | None = None
    ) -> list[Choice]:
        """`choose` for each of `problems`, in order, in as few requests as the service takes."""
        return [choices[0] for choices in self._take(self._ask(problems, device, 1, trace))]

    def rank(
        self, problem: Record, device: str | Device, top: int = 5, *, trace: Trace | None = None
    ) -> list[Choice]:
        """The best `top` choices, best first."""
        return list(self._take(self._ask([problem], device, top, trace))[0])

    def plan(
        self, problems: Iterable[Record], device: str | Device, *, trace: Trace | None = None
    ) -> Plan:
        """The choices of a network as a plan: written by `confpred.predict.plan.write_plan`, it is
        what ``confpred.use_plan`` and ``Predictor.load(plan=...)`` take."""
        return self._take(self._plan(problems, device, trace))

    def devices(self, *, trace: Trace | None = None) -> tuple[ServedDevice, ...]:
        """The devices that the service answers for."""
        return self._take(self._get("/v1/devices", devices_of, trace))

    def models(self, *, trace: Trace | None = None) -> tuple[ServedModel, ...]:
        """The models that the service has loaded."""
        return self._take(self._get("/v1/models", models_of, trace))

    def close(self) -> None:
        """Close the connections; a later call makes new ones."""
        http = self._http.take()
        if http is not None:
            http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self, steps: Steps[Result]) -> Result:
        outcome: Any = None
        with closing(steps):
            while True:
                try:
                    step = steps.send(outcome)
                except StopIteration as end:
                    result: Result = end.value
                    return result
                if isinstance(step, Send):
                    outcome = self._send(step)
                elif isinstance(step, Pause):
                    time.sleep(step.seconds)
                else:
                    outcome = step.function()

    def _send(self, step: Send) -> Reply | NoReply:
        _, request = self._request(step)
        try:
            with self._http.get().stream(**request) as response:
                parts = []
                for part in response.iter_bytes():
                    if clock() > step.deadline:
                        return NoReply("the reply is too slow")
                    parts.append(part)
                return Reply(response.status_code, response.headers, b"".join(parts))
        except httpx.RequestError as error:
            return NoReply(f"{type(error).__name__}: {error}")
