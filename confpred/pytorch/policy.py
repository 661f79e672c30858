"""How a new shape gets its kernel: at once or in the background, predicted or measured."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from confpred.cuda.compiler import Compiled
from confpred.problem.conv2d import Problem
from confpred.pytorch import choosing
from confpred.pytorch.ready import ReadyLaunch
from confpred.pytorch.verify import Verifier


@dataclass(frozen=True, slots=True)
class Policy:
    """What `confpred.enable` was told.

    Attributes:
        background: kernels that are not compiled yet are compiled in other threads, while
            PyTorch's own operator serves.
        verifier: measures the best predictions where one is set.
    """

    background: bool = False
    verifier: Verifier | None = None


_current = Policy()


def use(policy: Policy) -> None:
    """Follow `policy` from now on, for shapes that are already known too."""
    global _current
    _current = policy
    choosing.forget()


@dataclass(frozen=True, slots=True)
class Compiling:
    """Kernels of ours that are on their way."""

    futures: tuple[Future[Compiled], ...]

    def until_then(
        self, served: MutableMapping[Any, Any], key: Any, theirs: Callable[..., Any]
    ) -> Callable[..., Any]:
        """`theirs`, which has `key` looked up anew once everything is compiled."""

        def serve(*inputs: Any) -> Any:
            if all(future.done() for future in self.futures):
                served.pop(key, None)
            return theirs(*inputs)

        return serve


def find(problem: Problem, ordinal: int) -> ReadyLaunch | Compiling | None:
    """What is to serve `problem` on CUDA device `ordinal`; None for PyTorch's own operator."""
    capturing = torch.cuda.is_current_stream_capturing()
    verifier = _current.verifier
    if verifier is not None and not capturing:
        choice = verifier.fastest(problem, ordinal)
    else:
        choice = choosing.choose(problem, ordinal)
    if choice is None or not choosing.is_ours(choice):
        return None
    # A graph would keep PyTorch's operator for good, and what has to repeat to the bit must not
    # depend on when a compilation ends.
    if _current.background and not capturing and not torch.are_deterministic_algorithms_enabled():
        futures = choosing.waiting_for(choice, ordinal)
        if futures:
            return Compiling(tuple(futures))
    return choosing.load(choice, ordinal)


def find_at_once(problem: Problem | None, ordinal: int) -> ReadyLaunch | None:
    """`find` where nothing can wait for a compilation."""
    if problem is None:
        return None
    choice = choosing.choose(problem, ordinal)
    return choosing.load(choice, ordinal) if choice and choosing.is_ours(choice) else None
