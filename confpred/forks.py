"""Forking a process whose threads predict or compile.

A forked child has a copy of all memory and one thread. A lock that another thread held at that
moment stays locked in the child for good: ours, and those inside LightGBM and NVRTC, which nobody
can reach. So a fork waits until no thread is inside such a section, and none enters before the fork
is done:

    with uninterrupted:  # any number of threads side by side, and sections inside sections
        ...

What waits is ``os.fork``, and with it ``multiprocessing`` by its method ``fork`` and PyTorch's
loaders of data; ``subprocess`` does not fork in this sense.
"""

from __future__ import annotations

import logging  # its locks are taken inside sections, so that its hooks must be there before ours
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

Made = TypeVar("Made")
log = logging.getLogger(__name__)
#: Seconds that a fork waits at most: more than a prediction, a model or a kernel takes.
LONGEST_WAIT_S = 30.0


class _Sections:
    """How many sections each thread is inside, and whether a fork waits for their end."""

    def __init__(self) -> None:
        self._open_again()

    def _open_again(self, inside: dict[int, int] | None = None) -> None:
        # The condition's lock can be taken twice by one thread: a handler of signals may fork.
        self._changed = threading.Condition()
        self._inside = inside or {}
        self._forking = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            if me not in self._inside:  # who is inside a section is waited for, and goes on
                while self._forking:
                    self._changed.wait()
            self._inside[me] = self._inside.get(me, 0) + 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        me = threading.get_ident()
        with self._changed:
            left = self._inside.pop(me) - 1
            if left:
                self._inside[me] = left
            elif self._forking:
                self._changed.notify_all()

    def _before_fork(self) -> None:
        me = threading.get_ident()
        with self._changed:
            self._forking += 1
            if not self._changed.wait_for(lambda: self._inside.keys() <= {me}, LONGEST_WAIT_S):
                log.warning("a fork no longer waits for other threads: the child may hang")

    def _in_parent(self) -> None:
        with self._changed:
            self._forking -= 1
            self._changed.notify_all()

    def _in_child(self) -> None:
        me = threading.get_ident()
        count = self._inside.get(me, 0)
        self._open_again({me: count} if count else {})

    def guard_forks(self) -> None:
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._in_parent,
            after_in_child=self._in_child,
        )


uninterrupted = _Sections()
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    uninterrupted.guard_forks()


class PerProcess(Generic[Made]):
    """What `make` makes, once a process: a forked child has no use for its parent's connections and
    threads, and makes its own."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._made: tuple[int, Made] | None = None
        self._lock = threading.Lock()

    def get(self) -> Made:
        made = self._made
        if made is None or made[0] != os.getpid():
            with uninterrupted, self._lock:
                made = self._made
                if made is None or made[0] != os.getpid():
                    made = self._made = (os.getpid(), self._make())
        return made[1]

    def take(self) -> Made | None:
        """What this process has made, which it makes anew when it needs it again."""
        with uninterrupted, self._lock:
            made, self._made = self._made, None
        return made[1] if made is not None and made[0] == os.getpid() else None
