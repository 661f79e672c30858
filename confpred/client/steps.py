"""What a call does on the network, as steps of a generator, so that it is written once for threads
and for ``asyncio``: each step is taken by the client, which sends its outcome back."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

Result = TypeVar("Result")
#: Seconds on the clock that deadlines are on.
clock = time.monotonic


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request and read the whole reply; the outcome is a `Reply` or `NoReply`.

    Attributes:
        method: ``GET`` or ``POST``.
        path: from the service's address on, such as ``/v1/predict``.
        headers: beside those that every request has.
        body: JSON, or nothing.
        deadline: on `clock`, when the outcome is `NoReply`.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    deadline: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """Call something that may take milliseconds of this process; the outcome is what it returns."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the service said; `headers` finds names in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class NoReply:
    """Why there is no reply, in words."""

    reason: str


Step: TypeAlias = Send | Pause | Work
Steps: TypeAlias = Generator[Step, Any, Result]
