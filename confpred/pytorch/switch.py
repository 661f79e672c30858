"""`enable` and `disable`: the one line.

While enabled, ``conv1d``, ``conv2d`` and ``conv_transpose2d`` of `torch.nn.functional` (and of
`torch`, where they have the same names) are those of `confpred.pytorch.routing`; every `torch.nn`
layer calls them. `torch.nn.Conv2d` calls them by a method that is put in place too, so that those
of its layers that stay PyTorch's do not have to; what they count for that stays out of copies and
files. And a CUDA graph that begins is noticed, as a
layer that is PyTorch's in eager steps may be ours in it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from confpred.errors import InvalidInput
from confpred.forks import uninterrupted
from confpred.predict.choice import Choice
from confpred.predict.plans import read_plan
from confpred.predict.trust import check_max_regret
from confpred.problem.limits import UNLIMITED, Limits
from confpred.pytorch import choosing, policy, quiet, routing
from confpred.pytorch.fallback import (
    PYTORCH_CAPTURE_BEGIN,
    PYTORCH_CONV1D,
    PYTORCH_CONV2D,
    PYTORCH_CONV_TRANSPOSE2D,
    PYTORCH_FORWARD,
)
from confpred.pytorch.module import forward, getstate
from confpred.pytorch.verify import Verifier

_lock = threading.Lock()
#: What each `enable` that has no `disable` yet has put aside: the settings, and what undoes a plan.
_former: list[tuple[policy.Policy, Callable[[], None] | None]] = []


def enable(
    *,
    wait: bool = False,
    verify: int | None = None,
    verify_budget_s: float = 60.0,
    plan: str | Path | None = None,
    max_regret: float | None = None,
    limits: Limits = UNLIMITED,
) -> None:
    """Let every convolution of this process be computed by the fastest kernel.

    No model is touched, but for a count that layers of PyTorch's have among their attributes
    meanwhile, and their copies and files have not; and nothing else changes: what has no kernel of
    ours, or none that is predicted to win, is computed by PyTorch's own operator. `disable` undoes
    it. Calls nest: each
    `enable` needs its own `disable`, and the settings of the latest that is not undone hold.
    Programs that `torch.compile` has compiled stay as they were compiled.

    Args:
        wait: choose and compile a kernel when it is first needed, and wait for it. Otherwise other
            threads do so, PyTorch's operator serves until it is there, and the first steps are not
            repeatable to the bit; where PyTorch is told to be deterministic, it waits.
        verify: time so many of the best predictions, and PyTorch's operator, once for each new
            shape, and take the fastest; None to trust the predictions.
        verify_budget_s: seconds after which `verify` measures no more.
        plan: a file of choices (``confpred.record_plan``) that are taken as they are; with
            `verify`, what is measured is written to it.
        max_regret: trust a prediction only where the bound on its regret is at most this; other
            shapes are measured with `verify`, and left to PyTorch's operator without it.
        limits: what every choice keeps within, such as
            ``confpred.Limits(workspace_bytes=2**26)``.

    Raises:
        InvalidInput: `verify`, `verify_budget_s`, `max_regret` or `limits` is not allowed, or
            `plan` was made for another device.
        DataError: `plan` is not valid, or was made for other kernels.
    """
    if verify is not None and (type(verify) is not int or not 1 <= verify <= 8):
        raise InvalidInput("verify", verify, "an integer from 1 to 8, or None")
    if type(verify_budget_s) not in (int, float) or not verify_budget_s > 0:
        raise InvalidInput("verify_budget_s", verify_budget_s, "a positive number of seconds")
    accepted = check_max_regret(max_regret)
    if not isinstance(limits, Limits):
        raise InvalidInput("limits", limits, "a confpred.Limits")
    path = None if plan is None else Path(plan)
    undo: Callable[[], None] | None = None
    followed: tuple[Choice, ...] = ()
    if path is not None and (verify is None or path.exists()):
        if verify is not None:
            followed = read_plan(path).choices
        undo = choosing.use_plan(path)
    verifier = None
    if verify is not None:
        verifier = Verifier(verify, verify_budget_s, path, followed=followed, max_regret=accepted)
    with uninterrupted, _lock:
        former = policy.use(policy.Policy(not wait, verifier, accepted, limits))
        _former.append((former, undo))
        _tell_torchscript()
        _tell_dynamo()
        _install(routing.conv1d, routing.conv2d, routing.conv_transpose2d, forward, _capture_begin)
        nn.Conv2d.__getstate__ = getstate  # type: ignore[assignment,method-assign]


def disable() -> None:
    """Undo the latest `enable`, its settings and its plan included; PyTorch's functions are its own
    again after the last one.

    Without an `enable` it does nothing.
    """
    with uninterrupted, _lock:
        if not _former:
            return  # what others may have put in the functions' places stays
        settings, undo_plan = _former.pop()
        policy.use(settings)
        if undo_plan is not None:
            undo_plan()
        if not _former:
            _install(
                PYTORCH_CONV1D,
                PYTORCH_CONV2D,
                PYTORCH_CONV_TRANSPOSE2D,
                PYTORCH_FORWARD,
                PYTORCH_CAPTURE_BEGIN,
            )
            del nn.Conv2d.__getstate__  # which is inherited
            quiet.leave()
            _tell_dynamo()


@contextmanager
def enabled(**settings: Any) -> Iterator[None]:
    """`enable` for the block; takes the same arguments."""
    enable(**settings)
    try:
        yield
    finally:
        disable()


def is_enabled() -> bool:
    """Whether some `enable` has no `disable` yet."""
    return bool(_former)


def _install(
    conv1d: Any, conv2d: Any, conv_transpose2d: Any, module: Any, capture_begin: Any
) -> None:
    for place in (F, torch):
        place.conv1d = conv1d  # type: ignore[attr-defined]
        place.conv2d = conv2d  # type: ignore[attr-defined]
        place.conv_transpose2d = conv_transpose2d  # type: ignore[attr-defined]
    nn.Conv2d.forward = module  # type: ignore[method-assign]
    torch.cuda.CUDAGraph.capture_begin = capture_begin  # type: ignore[method-assign]


def _capture_begin(graph: torch.cuda.CUDAGraph, *given: Any, **named: Any) -> Any:
    """``torch.cuda.CUDAGraph.capture_begin``, while enabled."""
    quiet.look_again()
    return PYTORCH_CAPTURE_BEGIN(graph, *given, **named)


def _tell_dynamo() -> None:
    """Have `torch.compile` know PyTorch's own functions. It looks functions up in a table that it
    makes once, of those that it then finds in their places; the first time may be while enabled."""
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        for function in (PYTORCH_CONV1D, PYTORCH_CONV2D, PYTORCH_CONV_TRANSPOSE2D):
            torch.compiler.allow_in_graph(function)


def _tell_torchscript() -> None:
    """Have `torch.jit.script` compile PyTorch's operators where it finds our functions."""
    register = getattr(torch.jit._builtins, "_register_builtin", None)
    if register is not None:
        register(routing.conv1d, "aten::conv1d")
        register(routing.conv2d, "aten::conv2d")
        register(routing.conv_transpose2d, "aten::conv_transpose2d")
