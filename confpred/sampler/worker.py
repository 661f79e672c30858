"""A process that runs jobs and can be killed.

A sticky CUDA error, a crash or a hang of one job costs the process, not the run: the sampler reads
how it ended and its last report, and starts another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from typing import Any, Literal

from confpred.concurrency import end_with, stops_held

#: Function of a job, and of a function to call with each report. It is named by its import path,
#: ``"package.module:function"``, so that a spawned process can import it.
JobFunction = Callable[[Any, Callable[[int], None]], Any]

_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Done:
    """A job's result, and the seconds that it took."""

    result: Any
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """End of a job without a result; its process is gone.

    Attributes:
        how: ``error`` (the job raised), ``died`` (the process ended) or ``silent`` (it was killed
            because it reported nothing for too long).
        message: message for the user.
        reported: the job's last report, or None.
    """

    how: Literal["error", "died", "silent"]
    message: str
    reported: int | None


class JobProcess:
    """One process, started at its first job and again after each failure.

    It runs nothing of the program's ``__main__``, as `multiprocessing` would: a script that is not
    written for that would begin again there.

    Args:
        function: the import path of a `JobFunction`.
        silence_s: seconds without a report after which a job counts as hanging; they include the
            start of the process, which loads CUDA and PyTorch.

    Attributes:
        job: job in flight; None when the process is free.
    """

    def __init__(self, function: str, silence_s: float) -> None:
        self.connection: Connection | None = None
        self._function = function
        self._silence_s = silence_s
        self._process: subprocess.Popen[bytes] | None = None
        self.job: Any = None
        self._started = self._heard = 0.0
        self._reported: int | None = None

    def waited_for(self) -> list[Connection]:
        """Return the connection to wait for while a job is in flight."""
        return [] if self.job is None or self.connection is None else [self.connection]

    def start(self, job: Any) -> None:
        """Give a free process a job (picklable, and not None)."""
        if self.connection is None:
            self.connection = self._spawn()
        self.job, self._reported = job, None
        self._started = self._heard = time.monotonic()
        with contextlib.suppress(OSError):  # a dead process is noticed by `poll`
            self.connection.send(job)

    def poll(self) -> Done | Failed | None:
        """Return how the job in flight has ended, or None while it runs; never wait."""
        if self.job is None or self.connection is None:
            return None
        try:
            while self.connection.poll():
                kind, value = self.connection.recv()
                self._heard = time.monotonic()
                if kind == "report":
                    self._reported = value
                elif kind == "done":
                    self.job = None
                    return Done(value, self._heard - self._started)
                else:
                    return self._fail("error", value)
        except (EOFError, OSError):
            return self._fail("died", "the worker process died")
        if time.monotonic() - self._heard > self._silence_s:
            return self._fail("silent", f"no sign of life for {self._silence_s:g} s: killed")
        return None

    def stop(self, *, kill: bool = False) -> None:
        """End the process: an idle one by a message; a busy one, or any with `kill`, at once."""
        process, connection = self._process, self.connection
        self._process = self.connection = None
        if process is None or connection is None:
            return
        is_idle = not kill and self.job is None
        if is_idle:
            with contextlib.suppress(OSError):  # a dead process
                connection.send(None)
        connection.close()
        if is_idle:
            _ended(process)
        process.kill()
        process.wait()
        self.job = None

    def _fail(self, how: Literal["error", "died", "silent"], message: str) -> Failed:
        process, reported = self._process, self._reported
        if how == "died" and process is not None:
            message += f" ({_exit_text(_ended(process))})"
        self.stop(kill=True)
        return Failed(how, message, reported)

    def _spawn(self) -> Connection:
        ours, theirs = Pipe()
        call = f"serve({theirs.fileno()}, {self._function!r}, {os.getpid()})"
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; {call}"
        command = [sys.executable, "-c", code]
        with theirs, stops_held():
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        return ours


def serve(pipe: int, function: str, parent: int) -> None:
    """Run the jobs that come through the file descriptor `pipe`, until it or `parent` ends."""
    connection = Connection(pipe)
    end_with(parent)
    module, _, name = function.partition(":")
    while True:
        try:
            job = connection.recv()
        except (EOFError, ConnectionResetError):  # the sampler is gone
            return
        if job is None:  # a forked process may keep the pipe from its end
            return
        try:
            run: JobFunction = getattr(import_module(module), name)
            message = ("done", run(job, lambda value: connection.send(("report", value))))
        except Exception as error:  # whatever a job raises is its result
            message = ("error", f"{type(error).__name__}: {error}")
        connection.send(message)


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """Wait a little for the end of a process, and return its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_STOP_SECONDS)
    return None
