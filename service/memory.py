"""What one process remembers of its answers, so that none is worked out or written a second time.

Two memories, both bounded in bytes: the reply to a request, by the bytes of its body, and the
answer to a problem. Both belong to one predictor and go with it, so that no answer of a model
outlives the model.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from confpred.predict.predictor import Predictor
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.record import Record

_K = TypeVar("_K")
_V = TypeVar("_V")
_ENTRY_BYTES = 750  # of Python objects for one entry, beside the texts that it holds
_LARGEST_SHARE = 1 / 16  # of the memory: one larger entry would push out too many small ones


class Question(NamedTuple):
    """What is asked of one problem: for the device of which key, how many choices, of what, up to
    which bound on regret, and within which limits."""

    device: str
    top: int
    problem: Record
    max_regret: float | None = None
    limits: Limits = UNLIMITED


@dataclass(eq=False)
class Answer:
    """The answer to one problem. All requests that wait for it hold the same one.

    Attributes:
        text: its choices as JSON; None until it is worked out.
        source: of the best choice.
    """

    text: str | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to one request.

    Attributes:
        body: JSON.
        device: key of the one that was asked for.
        sources: how many problems were answered from each source.
    """

    body: bytes
    device: str
    sources: Mapping[str, int]


class Latest(Generic[_K, _V]):
    """The latest values by key, up to `limit` bytes; safe to share between threads.

    What has not been asked for the longest goes first.
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


@dataclass(slots=True)
class Memory:
    """The memory of one predictor's answers.

    Attributes:
        replies: by the body of the request.
        answers: by question.
        open: answers that some request waits for, as long as it does.
    """

    replies: Latest[bytes, Reply]
    answers: Latest[Question, Answer]
    open: WeakValueDictionary[Question, Answer] = field(default_factory=WeakValueDictionary)

    def answer(self, question: Question) -> Answer:
        """The answer to `question`, worked out or not yet. Only for the thread that works."""
        known = self.answers.get(question)
        return known if known is not None else self.open.setdefault(question, Answer())

    def keep(self, question: Question, answer: Answer) -> None:
        """Remember an answer that has been worked out."""
        self.answers.put(question, answer, len(answer.text or ""))


class Memories:
    """The memory of each predictor that is in use."""

    def __init__(self, limit: int) -> None:
        """Let each predictor's take up to `limit` bytes."""
        self._half = limit // 2
        self._of: WeakKeyDictionary[Predictor, Memory] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._of)

    def of(self, predictor: Predictor) -> Memory:
        found = self._of.get(predictor)
        if found is None:
            found = self._of[predictor] = Memory(Latest(self._half), Latest(self._half))
        return found
