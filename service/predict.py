"""``POST /v1/predict`` as a plain ASGI application, which FastAPI describes and does not run."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from confpred.predict.predictor import Predictor

from . import access, compression
from .answering import remembered, working
from .errors import Error, RequestError
from .generations import Generation
from .memory import Memories, Memory, Reply
from .metrics import Metrics
from .requests import parse, read_body
from .scheduler import Reason, Refused, Scheduler
from .settings import Settings

#: A body up to this long is read on the event loop, which takes a millisecond at most: some ten
#: problems spelled in full. A longer one is read in the thread, unless its reply is in memory.
_SHORT_BYTES = 4096
#: How many seconds the client is prepared to wait: RFC 7240, section 4.3.
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*(\d{1,6})\s*(?:$|[,;])", re.IGNORECASE)
#: The error's code and message when work is refused and the client is still there.
REFUSALS: Mapping[Reason, tuple[str, str]] = {
    "queue": ("overloaded", "too many problems are waiting already"),
    "deadline": ("deadline_exceeded", "the answer would have come later than it may"),
}


class Predict:
    """Answers at once what is in memory, and has everything else worked out by a `Scheduler`."""

    def __init__(
        self, settings: Settings, metrics: Metrics, find: Callable[[Scope], Generation]
    ) -> None:
        """`find` is asked for the generation that answers each request, so that another may take
        its place at any time."""
        self._settings, self._metrics, self._find = settings, metrics, find
        self._memories = Memories(settings.cache_mib * 2**20)
        self._scheduler: Scheduler | None = None

    def start(self, executor: Executor) -> None:
        """Have work done by the one thread of `executor`."""
        self._scheduler = Scheduler(executor, self._metrics, self._settings.max_queue)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._find(scope)
        predictor = generation.predictor
        memory = self._memories.of(predictor)
        headers = dict(scope["headers"])
        try:
            body = await read_body(headers, receive, self._settings)
        except ClientDisconnect:
            return
        reply = memory.replies.get(body)
        if reply is not None:
            self._metrics.answered("body", reply.sources)
        else:
            reply = await self._new(predictor, memory, body, scope, receive)
        if reply is None:
            return  # nobody is there to read it
        access.note(scope, generation.answer(reply.device, reply.sources))
        accepted = headers.get(b"accept-encoding", b"").decode("latin-1")
        text, encoded = await compression.encode(reply.body, accepted)
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(text))]
        for name, value in (*generation.headers.items(), *encoded.items()):
            head.append((name.encode(), value.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": text})

    async def _new(
        self, predictor: Predictor, memory: Memory, body: bytes, scope: Scope, receive: Receive
    ) -> Reply | None:
        """The reply to a body that is not in memory; None if the client leaves before."""
        asked = None
        if len(body) <= _SHORT_BYTES:
            asked = parse(body, self._settings)
            reply = remembered(memory, body, asked)
            if reply is not None:
                self._metrics.answered("answers", reply.sources)
                return reply
        if self._scheduler is None:
            raise RuntimeError("Predict was not started")
        steps = working(predictor, memory, self._settings, body, asked, self._worked_out)
        gone = asyncio.ensure_future(_gone(receive))
        try:
            reply = await self._scheduler.run(
                steps,
                client=scope["client"][0] if scope.get("client") else "",
                estimate=len(asked.problems) if asked else len(body) // 1024,
                gone=gone,
                deadline_s=self._deadline_s(scope),
            )
        except Refused as refused:
            self._metrics.add(1, "confpred_dropped_requests", refused.reason)
            if refused.reason == "gone":
                return None
            raise _unavailable(refused) from None
        finally:
            gone.cancel()
        self._metrics.answered("work", reply.sources)
        return reply

    def _worked_out(self) -> None:
        self._metrics.add(1, "confpred_worked_out_problems")

    def _deadline_s(self, scope: Scope) -> float:
        """The server's deadline, or the client's own if that is shorter."""
        preferred = b",".join(value for name, value in scope["headers"] if name == b"prefer")
        found = _WAIT.search(preferred.decode("latin-1"))
        return min(self._settings.deadline, int(found[1]) if found else math.inf)


async def _gone(receive: Receive) -> None:
    """Return when the client has left; its request is read to the end."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _unavailable(refused: Refused) -> RequestError:
    code, message = REFUSALS[refused.reason]
    error = Error(code, f"{message}; ask again in {refused.retry_s} s")
    return RequestError(503, error, {"retry-after": str(refused.retry_s)})
