"""`enable`: eager grouped and depthwise layers of programs that cannot be captured.

`confpred.optimize` is the way for networks that can. While enabled, ``torch.nn.Conv2d`` asks once a
shape whether a kernel is predicted to save more than ``LEAST_MS``; dense layers are not looked at.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401  TorchScript looks these two up here
from torch import Tensor, nn
from torch.nn.modules.utils import _pair  # noqa: F401
from torch.nn.parameter import Parameter

from confpred.cuda import driver
from confpred.forks import uninterrupted
from confpred.problem.limits import UNLIMITED, Limits
from confpred.pytorch import choosing, convolve
from confpred.pytorch.choosing import ANY, Wishes
from confpred.pytorch.layers import Geometry
from confpred.pytorch.ready import CHANNELS_LAST

log = logging.getLogger("confpred")
#: Milliseconds of the GPU's time that a layer has to save, forward and backward together: a call
#: from Python takes the host that much longer than PyTorch's own.
LEAST_MS = 0.02
_PLAIN = frozenset((Tensor, Parameter))
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
    geometry: Geometry = (self.stride, self.padding, self.dilation, self.groups)  # type: ignore[assignment]
    dtype = input.dtype
    if torch.is_autocast_enabled("cuda") and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype("cuda")
    needs = torch.is_grad_enabled() and (input.requires_grad, weight.requires_grad)
    key = (
        "eager", input.shape, weight.shape, dtype, geometry, bias is None, input.get_device(),
        needs, weight.is_cuda, input.is_contiguous(memory_format=CHANNELS_LAST), _wishes,
    )  # fmt: skip
    if not choosing.kept(key, lambda: _saves(input, weight, bias, dtype, geometry, needs)):
        return _PYTORCH(self, input, weight, bias)
    x, weight = input.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    return Convolution.of(x, weight, bias, geometry, _wishes)


# `torch.jit.script` reads the text of this, and looks its names up in this module.
_conv_forward.__wrapped__ = _PYTORCH  # type: ignore[attr-defined]


def _saves(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    geometry: Geometry,
    needs: Any,
) -> bool:
    """Return whether a layer of these sizes is predicted to save at least ``LEAST_MS``."""
    if not weight.is_cuda:
        return False
    with torch.no_grad():
        low = x.to(dtype)
        tensors = (low, weight.to(dtype), None if bias is None else bias.to(dtype))
        ready = [convolve.forward_launch(*tensors, None, geometry, "none", wishes=_wishes)]
        if needs:
            mask = (needs[0], needs[1], bias is not None)
            ready += convolve.backward_launches(low, tensors[1], geometry, mask, wishes=_wishes)
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


def is_plain(*tensors: Tensor) -> bool:
    """Return whether nothing but eager mode sees these tensors: no subclass, transform or mode."""
    return (
        all(type(t) in _PLAIN for t in tensors)
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._get_tracing_state()
        and not torch.autograd.forward_ad._current_level >= 0
    )


class Convolution(torch.autograd.Function):
    """A convolution whose three directions are chosen apart; gradients of gradients are
    PyTorch's."""

    @staticmethod
    def of(
        x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, wishes: Wishes = ANY
    ) -> Tensor:
        """Compute the convolution of plain tensors of one dtype, with a record of gradients."""
        out: Tensor = Convolution.apply(x, weight, bias, geometry, wishes)  # type: ignore[no-untyped-call]
        return out

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, wishes: Wishes
    ) -> Tensor:
        x, weight = x.resolve_neg(), weight.resolve_neg()
        bias = None if bias is None else bias.resolve_neg()
        ctx.save_for_backward(x, weight)
        ctx.told = geometry, wishes
        return convolve.forward(x, weight, bias, None, geometry, "none", wishes=wishes)

    @staticmethod
    def backward(ctx: Any, *out_grads: Tensor) -> Any:
        (out_grad,) = out_grads
        geometry, wishes = ctx.told
        x, weight = ctx.saved_tensors
        mask = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or not is_plain(out_grad) or not torch._C._has_storage(out_grad):
            # Gradients of gradients, or many gradients in one batch: PyTorch has formulas.
            stride, padding, dilation, groups = geometry
            sizes = [out_grad.shape[1]] if mask[2] else None
            grads = torch.ops.aten.convolution_backward(
                out_grad, x, weight, sizes, stride, padding, dilation, False, (0, 0), groups,
                list(mask),
            )  # fmt: skip
        else:
            grads = convolve.backward(
                out_grad.resolve_neg(), x, weight, geometry, mask, wishes=wishes
            )
        return (*grads, None, None)
