"""``POST /v1/predict``: from a request to its reply, out of memory or worked out in steps.

Two memories, both bounded in bytes: the reply to a request, by the bytes of its body, and the
answer to a problem. Both belong to one predictor and go with it, so that no answer of a model
outlives the model."""

from __future__ import annotations

import asyncio
import gzip
import math
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from confpred.predict.choice import answer_json, joined_json
from confpred.predict.explain import LayerExplanation, NearestLayers
from confpred.predict.predictor import Predictor
from confpred.problem.limits import Limits
from confpred.problem.record import Record

from . import Settings, logs
from .generations import Generation
from .metrics import Metrics
from .requests import PredictRequest, RequestError, parse, parsing, read_body
from .scheduler import Reason, Refused, Scheduler, Steps

_K = TypeVar("_K")
_V = TypeVar("_V")
_ENTRY_BYTES = 750  # of Python objects for one entry, beside the texts that it holds
_LARGEST_SHARE = 1 / 16  # of the memory: one larger entry would push out too many small ones
#: A body up to this long is read on the event loop, which takes a millisecond at most: some ten
#: problems spelled in full. A longer one is read in the thread, unless its reply is in memory.
_SHORT_BYTES = 4096
#: Compressing less saves a few packets at most.
LEAST_BYTES = 16_384
#: Level 1 makes a batch's reply 14 times as small in a third of the time of level 6, which makes it
#: 20 times as small.
_LEVEL = 1
#: How many seconds the client is prepared to wait: RFC 7240, section 4.3.
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*(\d{1,6})\s*(?:$|[,;])", re.IGNORECASE)
#: The error's code and message when work is refused and the client is still there.
REFUSALS: Mapping[Reason, tuple[str, str]] = {
    "queue": ("overloaded", "too many problems are waiting already"),
    "deadline": ("deadline_exceeded", "the answer would come later than it may"),
}


class Question(NamedTuple):
    """Question about one problem: the key of the device, the number of choices, the largest bound
    on regret, and the limits."""

    device: str
    top: int
    problem: Record
    max_regret: float | None
    limits: Limits


@dataclass(eq=False)
class Answer:
    """The answer to one problem. All requests that wait for it hold the same one."""

    text: str | None = None  # its choices as JSON; None until it is worked out
    source: str = ""  # of the best choice


class Reply(NamedTuple):
    """The reply to one request."""

    body: bytes
    device: str  # key of the one that was asked for
    sources: Mapping[str, int]  # how many problems were answered from each source


class Latest(Generic[_K, _V]):
    """The latest values by key, up to `limit` bytes; safe to share between threads.

    The one that was not asked for the longest goes first.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._entries: OrderedDict[_K, tuple[_V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: _K) -> _V | None:
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def put(self, key: _K, value: _V, size: int) -> None:
        """Remember `value`, whose texts and those of its key have `size` bytes."""
        size += _ENTRY_BYTES
        if size > self._limit * _LARGEST_SHARE:
            return
        with self._lock:
            _, former = self._entries.pop(key, (None, 0))
            self._entries[key] = (value, size)
            self._bytes += size - former
            while self._bytes > self._limit:
                _, (_, freed) = self._entries.popitem(last=False)
                self._bytes -= freed


class Memory:
    """The memory of one predictor's answers, up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.replies: Latest[bytes, Reply] = Latest(limit // 2)  # by the body of the request
        self.answers: Latest[Question, Answer] = Latest(limit // 2)
        #: Answers that some request waits for, as long as it does.
        self.open: WeakValueDictionary[Question, Answer] = WeakValueDictionary()
        #: The measured layers of its models, by their versions, from the first that was explained;
        #: and what was explained.
        self.layers: dict[str, NearestLayers] = {}
        self.explained: Latest[Question, LayerExplanation] = Latest(limit // 8)

    def remembered(self, body: bytes, asked: PredictRequest) -> Reply | None:
        """Return the reply to `body`, which asks `asked`, if every answer is in memory."""
        answers = []
        for question in _questions(asked):
            answer = self.answers.get(question)
            if answer is None:
                return None
            answers.append(answer)
        return self.reply(body, asked, answers)

    def reply(self, body: bytes, asked: PredictRequest, answers: Iterable[Answer]) -> Reply:
        """Return the reply that consists of `answers`, and remember it by `body`."""
        sources = Counter(answer.source for answer in answers)
        text = joined_json(answer.text or "" for answer in answers)
        reply = Reply(text.encode(), asked.device.key, sources)
        self.replies.put(body, reply, len(body) + len(reply.body))
        return reply


def _questions(asked: PredictRequest) -> list[Question]:
    key, top, accepted, limits = asked.device.key, asked.top, asked.max_regret, asked.limits
    return [Question(key, top, problem, accepted, limits) for problem in asked.problems]


class Predict:
    """ASGI application of ``/v1/predict``: answers at once from memory, else by a `Scheduler`."""

    _scheduler: Scheduler  # from `start` on

    def __init__(
        self, settings: Settings, metrics: Metrics, find: Callable[[Scope], Generation]
    ) -> None:
        """`find` is asked for the generation that answers each request, so that another may replace
        it at any time."""
        self._settings, self._metrics, self._find = settings, metrics, find
        self._memories: WeakKeyDictionary[Predictor, Memory] = WeakKeyDictionary()

    def start(self, executor: Executor) -> None:
        """Have work done by the one thread of `executor`."""
        self._scheduler = Scheduler(executor, self._metrics, self._settings.max_queue)

    def memory_of(self, predictor: Predictor) -> Memory:
        """Return the memory of a predictor, which goes with it."""
        if predictor not in self._memories:
            self._memories[predictor] = Memory(self._settings.cache_mib * 2**20)
        return self._memories[predictor]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._find(scope)
        predictor = generation.predictor
        memory = self.memory_of(predictor)
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
        scope[logs.ANSWER] = generation.log_fields(reply.device, reply.sources)
        accepted = headers.get(b"accept-encoding", b"").decode("latin-1")
        text, encoded = await encode(reply.body, accepted)
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(text))]
        for name, value in (*generation.headers.items(), *encoded.items()):
            head.append((name.encode(), value.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": text})

    async def _new(
        self, predictor: Predictor, memory: Memory, body: bytes, scope: Scope, receive: Receive
    ) -> Reply | None:
        """Return the reply to a body that is not in memory; None if the client leaves before."""
        asked = None
        if len(body) <= _SHORT_BYTES:
            asked = parse(body, self._settings)
            reply = memory.remembered(body, asked)
            if reply is not None:
                self._metrics.answered("answers", reply.sources)
                return reply
        steps = self._working(predictor, memory, body, asked)
        estimate = len(asked.problems) if asked else len(body) // 1024
        reply = await self.work(steps, scope, receive, estimate)
        if reply is not None:
            self._metrics.answered("work", reply.sources)
        return reply

    def _working(
        self, predictor: Predictor, memory: Memory, body: bytes, asked: PredictRequest | None
    ) -> Steps[Reply]:
        """Work out the reply to `body`, which asks what is `asked`, if it has been read; for the
        one thread that works. Raises as `parsing` does.

        A problem that several requests wait for is worked out by the first that comes to it. The
        choices are the library's own, as it writes them.
        """
        asked = asked or (yield from parsing(body, self._settings))
        questions = _questions(asked)
        answers = [
            memory.answers.get(question) or memory.open.setdefault(question, Answer())
            for question in questions
        ]
        new = {q: a for q, a in zip(questions, answers, strict=True) if a.text is None}
        for done, (question, answer) in enumerate(new.items()):
            yield len(new) - done
            if answer.text is None:
                within = predictor.within(asked.limits)
                choices = within.rank(
                    question.problem, asked.device, asked.top, max_regret=asked.max_regret
                )
                answer.source, answer.text = choices[0].source, answer_json(choices)
                memory.answers.put(question, answer, len(answer.text))
                self._metrics.add(1, "confpred_worked_out_problems")
        return memory.reply(body, asked, answers)

    async def work(
        self, steps: Steps[_V], scope: Scope, receive: Receive, estimate: int
    ) -> _V | None:
        """Return the value of `steps`, which are about `estimate` problems, done in their turn;
        None if the client leaves before.

        Raises:
            RequestError: 429, as too many problems wait, or it would take too long.
        """
        gone = asyncio.ensure_future(_gone(receive))
        try:
            return await self._scheduler.run(
                steps,
                client=scope["client"][0] if scope.get("client") else "",
                estimate=estimate,
                gone=gone,
                deadline_s=self._deadline_s(scope),
            )
        except Refused as refused:
            self._metrics.add(1, "confpred_dropped_requests", refused.reason)
            if refused.reason == "gone":
                return None
            code, message = REFUSALS[refused.reason]
            message = f"{message}; ask again in {refused.retry_s} s"
            headers = {"retry-after": str(refused.retry_s)}
            raise RequestError(429, code, message, headers=headers) from None
        finally:
            gone.cancel()

    def _deadline_s(self, scope: Scope) -> float:
        """Return the server's deadline, or the client's own if that is shorter."""
        preferred = b",".join(value for name, value in scope["headers"] if name == b"prefer")
        found = _WAIT.search(preferred.decode("latin-1"))
        return min(self._settings.deadline, int(found[1]) if found else math.inf)


async def _gone(receive: Receive) -> None:
    """Return when the client has left; its request is read to the end."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def encode(body: bytes, accepted: str) -> tuple[bytes, dict[str, str]]:
    """Return the bytes to send for `body`, and their headers: compressed, and not on the loop, if
    it is long and `accepted`, the request's Accept-Encoding, has gzip."""
    if len(body) < LEAST_BYTES:
        return body, {}
    headers = {"vary": "accept-encoding"}
    if not _takes_gzip(accepted):
        return body, headers
    compressed = await asyncio.to_thread(gzip.compress, body, _LEVEL, mtime=0)
    return compressed, {**headers, "content-encoding": "gzip"}


def _takes_gzip(accepted: str) -> bool:
    for entry in accepted.lower().split(","):
        coding, _, parameters = entry.partition(";")
        if coding.strip() in ("gzip", "x-gzip", "*"):
            return parameters.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
