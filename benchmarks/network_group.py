"""Processes that get ready side by side, of which one at a time is alone."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Group:
    """The processes whose identities are the lines of a file, which is their lock too.

    Attributes:
        path: of the file, which exists.
    """

    path: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A time in which no process of the group is alone."""
        with open(self.path) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def add(self, process: int) -> None:
        """Let a process belong to the group; to be called in `locked`, in which it was started."""
        self._write([*self._processes(), process])

    def remove(self, process: int) -> None:
        """The end of a process, which may have stopped the others; to be called in `locked`."""
        left = [one for one in self._processes() if one != process]
        self._write(left)
        _send(signal.SIGCONT, left)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A time in which all other processes of the group are stopped."""
        with self.locked():
            others = [one for one in self._processes() if one != os.getpid()]
            _send(signal.SIGSTOP, others)
            try:
                yield
            finally:
                _send(signal.SIGCONT, others)

    def _processes(self) -> list[int]:
        return [int(line) for line in self.path.read_text().split()]

    def _write(self, processes: list[int]) -> None:
        self.path.write_text("".join(f"{process}\n" for process in processes))


def _send(what: signal.Signals, processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, what)
