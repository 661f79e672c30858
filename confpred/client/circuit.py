"""A server that does not answer is left alone for a while, so that it does not cost every call its
whole time, and is not overrun when it comes back."""

from __future__ import annotations

import random
import threading

from confpred.client.steps import clock
from confpred.concurrency import uninterrupted

#: Attempts that have to fail in a row.
FAILURES = 3
#: Seconds that the server is left alone the first time; each failed trial doubles them.
FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0
#: What the server asks for itself (``Retry-After``) counts up to here.
LONGEST_TOLD_S = 300.0


class Circuit:
    """Whether a server may be asked. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._rests = 0  # in a row
        self._until = 0.0
        self._trial: object | None = None  # the one call that finds out whether it is back

    def admit(self, call: object) -> bool:
        """Whether `call` may ask the server; after a rest, one call at a time may."""
        with uninterrupted, self._lock:
            if not self._rests:
                return True
            if self._trial is None and clock() >= self._until:
                self._trial = call
            return self._trial is call

    def succeeded(self) -> None:
        """The server has answered."""
        with uninterrupted, self._lock:
            self._failures = self._rests = 0
            self._trial = None

    def failed(self, told_s: float) -> None:
        """An attempt has failed; the server asked to be left alone for `told_s` seconds, or 0."""
        with uninterrupted, self._lock:
            self._failures += 1
            if self._failures < FAILURES and not self._rests:
                return
            rest = min(FIRST_REST_S * 2.0**self._rests, LONGEST_REST_S) * random.uniform(0.75, 1)
            self._rests = min(self._rests + 1, 10)
            self._until = clock() + max(rest, min(told_s, LONGEST_TOLD_S))

    def ended(self, call: object) -> None:
        """`call` is over, whatever came of it: another one may be the trial."""
        with uninterrupted, self._lock:
            if self._trial is call:
                self._trial = None
