"""Ctrl-C as a count to look at, so that it never cuts a write or a message in two."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class Interrupts:
    """How often the user asked to stop, and by which signal the last time."""

    count: int = 0
    signal: int = 0


@contextlib.contextmanager
def count_interrupts() -> Iterator[Interrupts]:
    """Count SIGINT and SIGTERM instead of being ended by them; for the main thread only."""
    interrupts = Interrupts()

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.count += 1
        interrupts.signal = number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
