"""`enable`: eager grouped and depthwise layers of programs that cannot be captured.

`confpred.optimize` is the way for networks that can. While enabled, ``torch.nn.Conv2d`` asks once a
shape whether a kernel is predicted to save more than ``LEAST_MS``; dense layers are not looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401  TorchScript looks these two up here
from torch import Tensor, nn
from torch.nn.modules.utils import _pair  # noqa: F401

from confpred.cuda import driver
from confpred.forks import uninterrupted
from confpred.problem.limits import UNLIMITED, Limits
from confpred.pytorch import choosing, convolve
from confpred.pytorch.choosing import ANY, Wishes
from confpred.pytorch.conv2d import Convolution, cast, cast_dtype, is_plain
from confpred.pytorch.layers import Call
from confpred.pytorch.ready import CHANNELS_LAST

#: Milliseconds of the GPU's time that a layer has to save, forward and backward together: a call
#: from Python takes the host that much longer than PyTorch's own.
LEAST_MS = 0.02
_PYTORCH: Callable[..., Tensor] = nn.Conv2d._conv_forward
_lock = threading.Lock()
#: Settings of each `enable` without a `disable` yet, and a function that undoes its plan.
_former: list[tuple[Wishes, Callable[[], None] | None]] = []
_wishes = ANY


def enable(
    *,
    plan: str | Path | None = None,
    max_regret: float | None = None,
    limits: Limits = UNLIMITED,
) -> None:
    """Let grouped and depthwise ``torch.nn.Conv2d`` of this process run by confpred's kernels.

    No model is touched. A layer whose kernel is not predicted to save more than 20 us of the GPU's
    time is computed by PyTorch. The first call of a shape waits for its kernel to be compiled.
    `disable` undoes it. Calls nest: each `enable` needs its own `disable`, and the settings of the
    last one hold. Networks that can be captured gain much more from `confpred.optimize`.

    Args:
        plan: a file of choices (``confpred.record_plan``) that are taken as they are.
        max_regret: take a prediction only where the bound on its regret is at most this.
        limits: every choice keeps within them, such as ``confpred.Limits(workspace_bytes=2**26)``.

    Raises:
        InvalidInput: `max_regret` or `limits` is not allowed, or `plan` was made for another
            device.
        DataError: `plan` is not valid, or was made for other kernels.
    """
    global _wishes
    wishes = Wishes(limits, max_regret)
    undo = None if plan is None else choosing.use_plan(Path(plan))
    with uninterrupted, _lock:
        _former.append((_wishes, undo))
        _wishes = wishes
        nn.Conv2d._conv_forward = _conv_forward  # type: ignore[method-assign]


def disable() -> None:
    """Undo the latest `enable`, its settings and its plan included; without one, do nothing."""
    global _wishes
    with uninterrupted, _lock:
        if not _former:
            return
        _wishes, undo = _former.pop()
        if undo is not None:
            undo()
        if not _former:
            nn.Conv2d._conv_forward = _PYTORCH  # type: ignore[method-assign]


@contextmanager
def enabled(**settings: Any) -> Iterator[None]:
    """`enable` for the block; takes the same arguments."""
    enable(**settings)
    try:
        yield
    finally:
        disable()


def is_enabled() -> bool:
    """Return whether some `enable` has no `disable` yet."""
    return bool(_former)


def _conv_forward(self: nn.Conv2d, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``torch.nn.Conv2d._conv_forward`` while enabled."""
    if (
        self.groups == 1
        or torch.compiler.is_compiling()
        or self.padding_mode != "zeros"
        or isinstance(self.padding, str)
        or not input.is_cuda
        or not is_plain(input, weight, *(() if bias is None else (bias,)))
    ):
        return _PYTORCH(self, input, weight, bias)
    needs = (input.requires_grad, weight.requires_grad, bias is not None)
    call = Call(
        (self.stride, self.padding, self.dilation, self.groups),  # type: ignore[arg-type]
        mask=needs if torch.is_grad_enabled() else (False, False, False),
        wishes=_wishes,
    )
    key = (
        call, input.shape, weight.shape, input.dtype, weight.dtype, cast_dtype(input),
        bias is None, input.get_device(), weight.get_device(),
        input.is_contiguous(memory_format=CHANNELS_LAST),
    )  # fmt: skip
    if not choosing.kept(key, lambda: _saves(call, *cast(input, weight, bias))):
        return _PYTORCH(self, input, weight, bias)
    x, weight, bias = cast(input, weight, bias)
    return Convolution.of(x, weight, bias, call)


# `torch.jit.script` reads the text of this, and looks its names up in this module.
_conv_forward.__wrapped__ = _PYTORCH  # type: ignore[attr-defined]


def _saves(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a layer of these sizes is predicted to save at least ``LEAST_MS``."""
    ready = [
        convolve.forward_launch(x, weight, bias, None, call),
        *convolve.backward_launches(x, weight, call),
    ]
    saved = 0.0
    for launch in ready:
        if launch is None:
            continue
        choice = launch.choice
        if choice.source == "pinned":
            return True
        theirs = choosing.pytorch_ms(choice.problem, driver.device_of(x.get_device()))
        if theirs is not None and choice.predicted_ms is not None:
            saved += theirs - choice.predicted_ms
    return saved >= LEAST_MS
