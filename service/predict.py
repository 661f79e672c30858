"""``POST /v1/predict``: from a request to its reply, from a cache or computed in steps.

Two caches, both bounded in bytes: the reply to a request, by the bytes of its body, and the answer
to a problem. Both belong to one predictor and are freed with it, so that no answer outlives its
model.
"""

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
_LARGEST_SHARE = 1 / 16  # of the cache: a larger entry would evict too many small ones
#: Most bytes of a body that is parsed on the event loop, in a millisecond at most: some ten
#: problems spelled in full. A longer one is parsed in the thread, unless its reply is cached.
_SHORT_BYTES = 4096
#: Least bytes of a reply that is compressed; below them it would save a few packets at most.
LEAST_BYTES = 16_384
#: Level 1 makes a batch's reply 14 times as small in a third of the time of level 6, which makes it
#: 20 times as small.
_LEVEL = 1
#: Seconds that the client will wait: RFC 7240, section 4.3.
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*(\d{1,6})\s*(?:$|[,;])", re.IGNORECASE)
#: Code and message of the error when work is refused and the client is still connected.
REFUSALS: Mapping[Reason, tuple[str, str]] = {
    "queue": ("overloaded", "too many problems are waiting already"),
    "deadline": ("deadline_exceeded", "the answer would come later than it may"),
}


class Question(NamedTuple):
    """Key of an answer: the device's key, the number of choices, the problem, the largest bound on
    regret, and the limits."""

    device: str
    top: int
    problem: Record
    max_regret: float | None
    limits: Limits


@dataclass(eq=False)
class Promise:
    """The answer to one problem, shared by all requests that wait for it."""

    text: str | None = None  # its choices as JSON; None until they are computed
    source: str = ""  # source of the best choice


class JsonReply(NamedTuple):
    """The reply to one request."""

    body: bytes
    device: str  # key of the request's device
    sources: Mapping[str, int]  # number of problems by the source of their answers


class Latest(Generic[_K, _V]):
    """The latest values by key, up to `limit` bytes; safe to share between threads.

    The least recently used one is evicted first.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._entries: OrderedDict[_K, tuple[_V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: _K) -> _V | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: _K, value: _V, size: int) -> None:
        """Store `value`, whose texts and those of its key have `size` bytes."""
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


class AnswerCache:
    """The cached replies and answers of one predictor, up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.replies: Latest[bytes, JsonReply] = Latest(limit // 2)  # by the body of the request
        self.answers: Latest[Question, Promise] = Latest(limit // 2)
        #: Answers that some request waits for, as long as it does.
        self.open: WeakValueDictionary[Question, Promise] = WeakValueDictionary()
        #: The measured layers of its models, by their versions, from the first that was explained;
        #: and what was explained.
        self.layers: dict[str, NearestLayers] = {}
        self.explained: Latest[Question, LayerExplanation] = Latest(limit // 8)

    def remembered(self, body: bytes, asked: PredictRequest) -> JsonReply | None:
        """Return the reply to `body`, whose content is `asked`, if every answer is cached."""
        answers = []
        for question in _questions(asked):
            answer = self.answers.get(question)
            if answer is None:
                return None
            answers.append(answer)
        return self.reply(body, asked, answers)

    def reply(self, body: bytes, asked: PredictRequest, answers: Iterable[Promise]) -> JsonReply:
        """Return the reply with these `answers`, and cache it by `body`."""
        sources = Counter(answer.source for answer in answers)
        text = joined_json(answer.text or "" for answer in answers)
        reply = JsonReply(text.encode(), asked.device.key, sources)
        self.replies.put(body, reply, len(body) + len(reply.body))
        return reply


def _questions(asked: PredictRequest) -> list[Question]:
    key, top, accepted, limits = asked.device.key, asked.top, asked.max_regret, asked.limits
    return [Question(key, top, problem, accepted, limits) for problem in asked.problems]


class Predict:
    """ASGI application of ``/v1/predict``: cached replies at once, others by a `Scheduler`."""

    _scheduler: Scheduler  # from `start` on

    def __init__(
        self, settings: Settings, metrics: Metrics, find: Callable[[Scope], Generation]
    ) -> None:
        """Call `find` for the generation of each request, so that generations may change at any
        time."""
        self._settings, self._metrics, self._find = settings, metrics, find
        self._memories: WeakKeyDictionary[Predictor, AnswerCache] = WeakKeyDictionary()

    def start(self, executor: Executor) -> None:
        """Compute in the one thread of `executor`."""
        self._scheduler = Scheduler(executor, self._metrics, self._settings.max_queue)

    def memory_of(self, predictor: Predictor) -> AnswerCache:
        """Return the cache of a predictor, which is freed with it."""
        if predictor not in self._memories:
            self._memories[predictor] = AnswerCache(self._settings.cache_mib * 2**20)
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
            return  # the client has left
        scope[logs.ANSWER] = generation.log_fields(reply.device, reply.sources)
        accepted = headers.get(b"accept-encoding", b"").decode("latin-1")
        text, encoded = await encode(reply.body, accepted)
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(text))]
        for name, value in (*generation.headers.items(), *encoded.items()):
            head.append((name.encode(), value.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": text})

    async def _new(
        self, predictor: Predictor, memory: AnswerCache, body: bytes, scope: Scope, receive: Receive
    ) -> JsonReply | None:
        """Return the reply to a body that is not cached; None if the client leaves before."""
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
        self, predictor: Predictor, memory: AnswerCache, body: bytes, asked: PredictRequest | None
    ) -> Steps[JsonReply]:
        """Compute the reply to `body`, whose content is `asked` if it is parsed already, in the
        worker thread. Raises as `parsing` does.

        A problem that several requests wait for is computed by the first one that reaches it. The
        choices are the library's own, in its own JSON.
        """
        asked = asked or (yield from parsing(body, self._settings))
        questions = _questions(asked)
        answers = [
            memory.answers.get(question) or memory.open.setdefault(question, Promise())
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
        """Return the value of `steps`, about `estimate` problems, computed in their turn; None if
        the client leaves before.

        Raises:
            RequestError: 429 if too many problems wait, or it would take too long.
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
        match = _WAIT.search(preferred.decode("latin-1"))
        return min(self._settings.deadline, int(match[1]) if match else math.inf)


async def _gone(receive: Receive) -> None:
    """Return when the client has left, after its request is read to the end."""
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
