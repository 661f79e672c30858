"""Ctrl-C and SIGTERM end a command with one line, after what it had begun to write is removed."""

from __future__ import annotations

import signal
from types import FrameType

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Stopped(BaseException):
    """A signal asked the command to end.

    Attributes:
        exit_code: what shells expect of a process that ended so: 128 and the signal's number.
    """

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(_WORDS[signal.Signals(number)])


def stop_behind(error: BaseException | None) -> Stopped | None:
    """The `Stopped` that `error` is, or that was on its way when `error` was raised, as by a
    library that was stopped amid its start and failed to clear up."""
    while error is not None and not isinstance(error, Stopped):
        error = error.__cause__ or error.__context__
    return error


def stop_on_signals() -> None:
    """From now on the first of these signals raises `Stopped` in the main thread; further ones are
    ignored, so that they do not cut the clearing up short."""
    for number in _WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` and `&` in a script ask
            signal.signal(number, _stop)


def leave_signals() -> None:
    """Undo `stop_on_signals`, before what handles these signals itself."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is _stop:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    for each in _WORDS:
        signal.signal(each, signal.SIG_IGN)
    raise Stopped(number)
