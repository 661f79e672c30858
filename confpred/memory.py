"""What was found lately: kept up to a number, and found once however many threads ask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from confpred.forks import uninterrupted

Asked = TypeVar("Asked", bound=Hashable)
Found = TypeVar("Found")


class Recent(Generic[Asked, Found]):
    """The entries used last: `least` of them, or up to twice as many.

    They are in two dictionaries. What is used moves to the younger one; when that has `least`, it
    takes the place of the older one, which is dropped. So nobody waits for a lock. Threads that do
    this at the same moment may drop more than they need to, which costs them finding it again.
    No value is None.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._young: dict[Asked, Found] = {}
        self._old: dict[Asked, Found] = {}

    def get(self, key: Asked) -> Found | None:
        found = self._young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: Asked, value: Found) -> None:
        if len(self._young) >= self._least:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def clear(self) -> None:
        self._young, self._old = {}, {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())


class Remembered(Generic[Asked, Found]):
    """The function `find`, of which the answers used last are kept, as in `Recent`.

    Safe to share between threads, and to fork. Threads that ask the same new thing at once share
    one call of `find`; those that ask other things do not wait. `find` takes several things that
    were asked, and returns the answer to each, none of which is None.
    """

    def __init__(self, find: Callable[[Sequence[Asked]], Sequence[Found]], least: int) -> None:
        self._find = find
        self._recent: Recent[Asked, Found] = Recent(least)
        self._lock = threading.Lock()  # guards what is under way
        self._under_way: dict[Asked, threading.Event] = {}

    def __call__(self, asked: Asked) -> Found:
        while (found := self._recent.get(asked)) is None:
            with uninterrupted:  # so that a forked child finds nothing under way
                mine = threading.Event()
                with self._lock:
                    done = self._under_way.setdefault(asked, mine)
                if done is mine:
                    return self._found([asked], mine)[asked]
            done.wait()  # then look again: where it failed, this thread tries
        return found

    def many(self, asked: Sequence[Asked]) -> list[Found]:
        """The answers to all of `asked`, in order; those that are new are found in one call."""
        found: dict[Asked, Found | None] = {each: self._recent.get(each) for each in asked}
        new = [each for each, known in found.items() if known is None]
        if new:
            with uninterrupted:
                mine = threading.Event()
                with self._lock:
                    new = [each for each in new if self._under_way.setdefault(each, mine) is mine]
                found.update(self._found(new, mine))
        # What is missing now is under way elsewhere, which is waited for last: two threads that
        # each wait for something of the other's have both done their own.
        return [self(each) if (known := found[each]) is None else known for each in asked]

    def _found(self, asked: Sequence[Asked], done: threading.Event) -> dict[Asked, Found]:
        """The answers to what this thread has under way."""
        try:
            # Another thread may have been done between this one's look and its turn.
            known = {each: self._recent.get(each) for each in asked}
            new = [each for each, found in known.items() if found is None]
            answers = {each: found for each, found in known.items() if found is not None}
            if new:
                answers.update(zip(new, self._find(new), strict=True))
            for each in new:
                self._recent.put(each, answers[each])
            return answers
        finally:
            with self._lock:
                for each in asked:
                    del self._under_way[each]
            done.set()
