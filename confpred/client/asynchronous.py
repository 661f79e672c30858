"""`AsyncClient`: the service in place of a predictor, for ``asyncio``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import closing
from types import TracebackType
from typing import Any

import httpx

from confpred.client.answers import ServedDevice, ServedModel, devices_of, models_of
from confpred.client.questions import Questions, Trace
from confpred.client.steps import NoReply, Pause, Reply, Result, Send, Steps
from confpred.predict.choice import Choice
from confpred.predict.plan import Plan
from confpred.problem.device import Device
from confpred.problem.record import Record


class AsyncClient(Questions[httpx.AsyncClient]):
    """`confpred.client.Client`, whose calls are awaited, in one event loop; its fallback works in
    a thread, so that the loop goes on."""

    _connections = httpx.AsyncClient

    async def choose(
        self, problem: Record, device: str | Device, *, trace: Trace | None = None
    ) -> Choice:
        """The best config known for `problem` on `device`."""
        return (await self._take(self._ask([problem], device, 1, trace)))[0][0]

    async def choose_many(
        self, problems: Iterable[Record], device: str | Device, *, trace: Trace | None = None
    ) -> list[Choice]:
        """`choose` for each of `problems`, in order, in as few requests as the service takes."""
        return [choices[0] for choices in await self._take(self._ask(problems, device, 1, trace))]

    async def rank(
        self, problem: Record, device: str | Device, top: int = 5, *, trace: Trace | None = None
    ) -> list[Choice]:
        """The best `top` choices, best first."""
        return list((await self._take(self._ask([problem], device, top, trace)))[0])

    async def plan(
        self, problems: Iterable[Record], device: str | Device, *, trace: Trace | None = None
    ) -> Plan:
        """The choices of a network as a plan, as `Client.plan` makes it."""
        return await self._take(self._plan(problems, device, trace))

    async def devices(self, *, trace: Trace | None = None) -> tuple[ServedDevice, ...]:
        """The devices that the service answers for."""
        return await self._take(self._get("/v1/devices", devices_of, trace))

    async def models(self, *, trace: Trace | None = None) -> tuple[ServedModel, ...]:
        """The models that the service has loaded."""
        return await self._take(self._get("/v1/models", models_of, trace))

    async def close(self) -> None:
        """Close the connections; a later call makes new ones."""
        http = self._http.take()
        if http is not None:
            await http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        await self.close()

    async def _take(self, steps: Steps[Result]) -> Result:
        outcome: Any = None
        with closing(steps):
            while True:
                try:
                    step = steps.send(outcome)
                except StopIteration as end:
                    result: Result = end.value
                    return result
                if isinstance(step, Send):
                    outcome = await self._send(step)
                elif isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                else:
                    outcome = await asyncio.to_thread(step.function)

    async def _send(self, step: Send) -> Reply | NoReply:
        left, request = self._request(step)
        try:
            response = await asyncio.wait_for(self._http.get().request(**request), left)
        except httpx.RequestError as error:
            return NoReply(f"{type(error).__name__}: {error}")
        except asyncio.TimeoutError:
            return NoReply("the reply is too slow")
        return Reply(response.status_code, response.headers, response.content)
