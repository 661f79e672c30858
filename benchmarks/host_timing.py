"""Interleaved timing of calls on the host, in microseconds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

Call = Callable[[], object]


@dataclass(frozen=True)
class Turn:
    """One thing to time.

    Attributes:
        call: what is called again and again.
        around: makes the context in which a whole turn of many calls stands, so that entering and
            leaving it costs no call anything.
    """

    call: Call
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def interleaved_us(
    turns: Mapping[str, Turn],
    *,
    calls: int,
    runs: int,
    synchronize: Call,
    prepare: Call = lambda: None,
) -> dict[str, float]:
    """Median host time of a call of each turn, in microseconds.

    Each run gives every turn one go of `calls` calls, in a random order, so that a slow moment of
    the machine meets all alike. The device is idle when a go starts, and is waited for only after
    its clock has stopped. `prepare` is called before each go.
    """
    times: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for name in names:  # a warm-up: libraries choose algorithms, kernels are compiled
        with turns[name].around():
            for _ in range(3):
                turns[name].call()
            synchronize()
    for _ in range(runs):
        random.shuffle(names)
        for name in names:
            call = turns[name].call
            prepare()
            with turns[name].around():
                call()  # what the context has emptied is filled again
                synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                times[name].append((time.perf_counter() - start) / calls * 1e6)
                synchronize()
    return {name: statistics.median(values) for name, values in times.items()}
