"""Forking a process whose threads predict or compile.

A lock that another thread holds at a fork stays locked in the child for good, also those inside
LightGBM and NVRTC. So ``os.fork`` waits until no thread is inside ``with uninterrupted:``, and none
enters before the fork is done; sections may be side by side and inside one another.
"""

from __future__ import annotations

import contextlib
import logging  # its fork hooks must be registered first: its locks are taken inside sections
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from functools import cached_property as cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor  # which is slow to import

Made = TypeVar("Made")
log = logging.getLogger(__name__)
#: Most seconds that a fork waits: more than a prediction, a model or a kernel takes.
LONGEST_WAIT_S = 30.0


class _Sections:
    """Count of the sections that each thread is inside; a fork waits until they end."""

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

    def __exit__(self, *error: object) -> None:
        me = threading.get_ident()
        with self._changed:
            left = self._inside.pop(me) - 1
            if left:
                self._inside[me] = left
            elif self._forking:
                self._changed.notify_all()

    def before_fork(self) -> None:
        me = threading.get_ident()
        with self._changed:
            self._forking += 1
            if not self._changed.wait_for(lambda: self._inside.keys() <= {me}, LONGEST_WAIT_S):
                log.warning("a fork no longer waits for other threads: the child may hang")

    def in_parent(self) -> None:
        with self._changed:
            self._forking -= 1
            self._changed.notify_all()

    def in_child(self) -> None:
        me = threading.get_ident()
        self._open_again({me: count} if (count := self._inside.get(me)) else {})


uninterrupted = _Sections()
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(
        before=uninterrupted.before_fork,
        after_in_parent=uninterrupted.in_parent,
        after_in_child=uninterrupted.in_child,
    )


if sys.version_info < (3, 12) and not TYPE_CHECKING:

    class cached_property(cached_property):  # noqa: N801
        """`functools.cached_property` as Python has it from 3.12 on: without the lock that all
        objects of a class share, and that a child finds locked where a thread was computing."""

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            super().__init__(compute)
            self.lock = contextlib.nullcontext()


class PerProcess(Generic[Made]):
    """A value that `make` makes once a process; a forked child makes one of its own."""

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
        """Remove and return what this process has made; `get` makes it again."""
        with uninterrupted, self._lock:
            made, self._made = self._made, None
        return made[1] if made is not None and made[0] == os.getpid() else None


Asked = TypeVar("Asked", bound=Hashable)
Found = TypeVar("Found")


def submit(threads: ThreadPoolExecutor, call: Callable[..., Made], *arguments: Any) -> Future[Made]:
    """Call in one of `threads`; in this thread where no other can be started, or where they take no
    more since the main thread has ended. Then a daemon thread ends silently: it may be cut off at
    any moment, which crashes the process inside a compiler."""
    try:
        return threads.submit(call, *arguments)
    except RuntimeError as error:
        if "shutdown" in str(error) and threading.current_thread().daemon:
            raise SystemExit from error
        from concurrent.futures import Future

        called: Future[Made] = Future()
        try:
            called.set_result(call(*arguments))
        except Exception as error:
            called.set_exception(error)
        return called


class Later(Mapping[Asked, Found]):
    """The mapping that `read` returns, which is called at the first access. Two threads may both
    call it at once, and get equal mappings."""

    def __init__(self, read: Callable[[], Mapping[Asked, Found]]) -> None:
        self._read = cache(read)

    def __getitem__(self, key: Asked) -> Found:
        return self._read()[key]

    def __iter__(self) -> Iterator[Asked]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


class Recent(Generic[Asked, Found]):
    """The entries used last: `least` of them, or up to twice as many.

    A value that is used moves to the younger of two dictionaries; when that has `least`, the older
    one is dropped, without a lock. No value is None.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._young: dict[Asked, Found] = {}
        self._old: dict[Asked, Found] = {}

    def get(self, key: Asked) -> Found | None:
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Asked, value: Found) -> None:
        if len(self._young) >= self._least:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def clear(self) -> None:
        self._young, self._old = {}, {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())


class Remembered(Generic[Asked, Found]):
    """The function `find` with a cache of the results used last (`Recent`).

    Safe to share between threads, and to fork. Threads that need the same new result at once share
    one call of `find`, which takes several arguments and returns the result of each, never None.
    """

    def __init__(self, find: Callable[[Sequence[Asked]], Sequence[Found]], least: int) -> None:
        self._find = find
        self._recent: Recent[Asked, Found] = Recent(least)
        self._lock = threading.Lock()  # guards what is under way
        self._under_way: dict[Asked, threading.Event] = {}

    def __call__(self, asked: Asked) -> Found:
        while (answer := self._recent.get(asked)) is None:
            with uninterrupted:  # so that no call is under way in a forked child
                mine = threading.Event()
                with self._lock:
                    done = self._under_way.setdefault(asked, mine)
                if done is mine:
                    return self._answer([asked], mine)[asked]
            done.wait()  # then look again; if that call failed, this thread tries
        return answer

    def many(self, asked: Sequence[Asked]) -> list[Found]:
        """Return the results of all of `asked`, in order; new ones are computed in one call."""
        answers: dict[Asked, Found | None] = {key: self._recent.get(key) for key in asked}
        new = [key for key, answer in answers.items() if answer is None]
        if new:
            with uninterrupted:
                mine = threading.Event()
                with self._lock:
                    new = [key for key in new if self._under_way.setdefault(key, mine) is mine]
                answers.update(self._answer(new, mine))
        # Results that are missing now are under way in other threads. They are waited for last, so
        # two threads that wait for each other have both finished their own.
        return [self(key) if (answer := answers[key]) is None else answer for key in asked]

    def _answer(self, asked: Sequence[Asked], done: threading.Event) -> dict[Asked, Found]:
        """Return the results of what this thread has under way."""
        try:
            # Another thread may have finished since this one looked.
            stored = {key: self._recent.get(key) for key in asked}
            answers = {key: answer for key, answer in stored.items() if answer is not None}
            if new := [key for key in asked if key not in answers]:
                answers.update(zip(new, self._find(new), strict=True))
                for key in new:
                    self._recent.put(key, answers[key])
            return answers
        finally:
            with self._lock:
                for key in asked:
                    del self._under_way[key]
            done.set()


_LOOK_SECONDS = 0.5


def end_with(parent: int) -> None:
    """Make this process end soon after `parent`, the process that started it, even if that one is
    killed. Ctrl-C, which the terminal sends to helper processes too, is left to `parent`.

    It looks twice a second: Linux's signal comes when the *thread* that started this process ends.
    """

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)  # at once, even if the main thread hangs in a driver or a long computation

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=look, daemon=True).start()


@contextlib.contextmanager
def stops_held() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends, so that no start of processes is cut off
    halfway. Signals that end this process at once, or are ignored, stay as they are. Started
    processes inherit the blocked Ctrl-C; their starter decides when they end."""
    from multiprocessing import resource_tracker  # imports a dozen modules

    resource_tracker.ensure_running()  # started later, it would unblock the signal
    came: list[int] = []
    # Blocking is not enough: a thread that has the signal unblocked may take it, and Python
    # then runs the handler in the main thread all the same.
    held = {}
    if threading.current_thread() is threading.main_thread():  # handlers run in no other
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        held = {number: handler for number, handler in handlers.items() if callable(handler)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for number in held:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in held.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
