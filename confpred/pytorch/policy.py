"""How a new shape gets its kernel: at once or in the background, predicted or measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.problem.limits import UNLIMITED, Limits
from confpred.pytorch import choosing, loading
from confpred.pytorch.ready import ReadyLaunch
from confpred.pytorch.streams import is_capturing
from confpred.pytorch.verify import Verifier

# What `torch.are_deterministic_algorithms_enabled` and `torch.backends.cudnn.deterministic` read.
_deterministic = torch._C._get_deterministic_algorithms
_cudnn_deterministic = torch._C._get_cudnn_deterministic


def is_deterministic() -> bool:
    """Whether PyTorch is told to compute what is the same to the bit each time."""
    return bool(_deterministic() or _cudnn_deterministic())


@dataclass(frozen=True, slots=True)
class Policy:
    """What `confpred.enable` was told.

    Attributes:
        background: choices are made and kernels compiled in other threads, while PyTorch's own
            operator serves.
        verifier: measures the best predictions where one is set.
        max_regret: the largest bound on regret that is accepted unmeasured; None for any.
        limits: what every choice keeps within.
    """

    background: bool = False
    verifier: Verifier | None = None
    max_regret: float | None = None
    limits: Limits = UNLIMITED


_current = Policy()


def use(policy: Policy) -> Policy:
    """Follow `policy` from now on, and return the former one; what another verifier may decide is
    chosen again."""
    global _current
    former, _current = _current, policy
    choosing.accept(policy.max_regret)
    if policy.verifier is not former.verifier:
        choosing.forget()
    choosing.use_limits(policy.limits)
    choosing.notice_switch()
    return former


@dataclass(frozen=True, slots=True)
class Pending:
    """What may be ours is on its way: choices that are being made, or kernels that compile."""

    futures: tuple[Future[Any], ...]

    def until_then(
        self, theirs: Callable[..., Any], find: Callable[..., Callable[..., Any] | None]
    ) -> Callable[..., Any]:
        """`theirs` while something is on its way, then what `find` finds and remembers in its
        place, of the same inputs. A capture waits: a graph would keep PyTorch's operator."""

        def serve(*inputs: Any) -> Any:
            if is_capturing():
                wait(self.futures)
            elif not all(future.done() for future in self.futures):
                return theirs(*inputs)
            return (find(*inputs) or theirs)(*inputs)

        return serve


def is_verifying() -> bool:
    """Whether measurements decide."""
    return _current.verifier is not None


def decide(
    problems: Sequence[Problem | None], ordinal: int, own: Limits | None = None
) -> list[Choice | None] | Pending:
    """For each of `problems` the kernel of ours that is to serve it on CUDA device `ordinal`, None
    for PyTorch's own operator; or what all of them wait for. With limits of its `own`, a call
    trusts the predictions."""
    verifier = _current.verifier
    if verifier is not None and own is None and not is_capturing():
        found = [p if p is None else verifier.fastest(p, ordinal) for p in problems]
    elif _in_background() and not choosing.is_watched():
        futures = [p if p is None else choosing.choose_soon(p, ordinal, own) for p in problems]
        if not all(future is None or future.done() for future in futures):
            return Pending(tuple(future for future in futures if future is not None))
        found = [future if future is None else future.result() for future in futures]
    else:
        found = [p if p is None else choosing.choose(p, ordinal, own) for p in problems]
    return [c if c is not None and choosing.is_ours(c) else None for c in found]


def _in_background() -> bool:
    # A graph would keep PyTorch's operator for good, and what has to repeat to the bit must not
    # depend on when something ends.
    return _current.background and not is_capturing() and not is_deterministic()


def prepare(
    choice: Choice, ordinal: int, own: Limits | None = None
) -> ReadyLaunch | Pending | None:
    """The launch of `choice`, or what it waits for; None where it cannot be had."""
    if _in_background():
        futures = loading.waiting_for(choice, ordinal)
        if futures:
            return Pending(tuple(futures))
    return loading.load(choice, ordinal, own)


def find(problem: Problem, ordinal: int, own: Limits | None = None) -> ReadyLaunch | Pending | None:
    """What is to serve `problem` on CUDA device `ordinal`, within limits of the call's `own` if it
    has some; None for PyTorch's own operator."""
    found = decide([problem], ordinal, own)
    if isinstance(found, Pending):
        return found
    (choice,) = found
    return None if choice is None else prepare(choice, ordinal, own)


def saves_ms(
    choices: Iterable[Choice | None],
    ordinal: int,
    theirs_ms: Callable[[Any, int], float | None] = choosing.pytorch_ms,
) -> float:
    """Milliseconds of the GPU's time that `choices` are expected to save against what they replace,
    which takes `theirs_ms`; infinite where nothing is expected, as for a pin."""
    saved = 0.0
    for choice in choices:
        if choice is None:
            continue
        if choice.source not in ("predicted", "measured") or choice.predicted_ms is None:
            return inf
        theirs = theirs_ms(choice.problem, ordinal)
        if theirs is None:
            return inf
        saved += theirs - choice.predicted_ms
    return saved


def find_at_once(problem: Problem | None, ordinal: int) -> ReadyLaunch | None:
    """`find` where nothing can wait for a compilation."""
    if problem is None:
        return None
    choice = choosing.choose(problem, ordinal)
    return loading.load(choice, ordinal) if choice and choosing.is_ours(choice) else None
