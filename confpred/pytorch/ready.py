"""A launch that is ready to run for tensors of one shape: what a call costs the host is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from confpred.predict.choice import Choice
from confpred.problem.conv2d_operation import CONVOLUTION
from confpred.problem.linear_chain import LinearChain
from confpred.problem.linear_chain_operation import LINEAR_CHAIN
from confpred.problem.operation import SCRATCH, ZEROED, Launch
from confpred.pytorch.kernels import current_stream, in_context

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
CHANNELS_LAST = torch.channels_last
ALIGNMENT = 16  # bytes; the kernels load this much at a time
#: Inputs of a convolution, in the order in which a ready launch is given them.
INPUTS = {
    "fprop": ("in", "filter", "bias", "residual"),
    "dgrad": ("out_grad", "filter"),
    "wgrad": ("out_grad", "in"),
}
Enqueue = Callable[[Sequence[Tensor]], Any]
#: From the operands' names to what enqueues a launch on the current stream, given the operands.
Bind = Callable[[Sequence[str]], Enqueue]


class ReadyLaunch:
    """A launch for one problem, chosen, compiled and loaded.

    Attributes:
        choice: what it is the launch of.
    """

    __slots__ = ("_enqueue", "_ordinal", "_outputs", "_workspaces", "choice")

    def __init__(self, choice: Choice, launch: Launch, bind: Bind, ordinal: int) -> None:
        self.choice, self._ordinal = choice, ordinal
        problem: Any = choice.problem
        operation = LINEAR_CHAIN if isinstance(problem, LinearChain) else CONVOLUTION
        operands = operation.operands(problem)  # outputs first
        self._outputs = [(*_layout(o.shape), getattr(torch, o.dtype)) for o in operands if o.terms]
        sizes: dict[str, tuple[int, Callable[..., Tensor]]] = {
            ZEROED: (launch.zeroed_bytes, torch.zeros),
            SCRATCH: (launch.scratch_bytes, torch.empty),
        }
        spaces = {name: given for name, given in sizes.items() if given[0]}
        self._workspaces = tuple(spaces.values())
        self._enqueue = bind([*(o.name for o in operands), *spaces])

    def run(self, *inputs: Tensor | None) -> list[Tensor]:
        """Enqueue the launch on the current stream of its device.

        Args:
            inputs: in the order of ``INPUTS``, or of the operation's operands; of the problem's
                shapes and dtype, on the launch's device, dense as the kernels read them (`dense`).
                None for one that the problem does not have. Unaligned ones are copied.

        Returns:
            The outputs. Workspaces are new at each call, from the current stream's pool: memory
            that is kept would be shared by streams and CUDA graphs.
        """
        ordinal = self._ordinal
        if torch.cuda.current_device() != ordinal:
            with torch.cuda.device(ordinal):
                return self.run(*inputs)
        device = torch.device("cuda", ordinal)
        given = [aligned(t) for t in inputs if t is not None]
        made = [torch.empty_strided(*o[:2], dtype=o[2], device=device) for o in self._outputs]
        spaces = [make(n, dtype=torch.uint8, device=device) for n, make in self._workspaces]
        in_context(ordinal, partial(self._enqueue, [*made, *given, *spaces]))
        return made


def by_address(
    bind: Callable[[Sequence[str]], Callable[[int, Sequence[int]], None]], ordinal: int
) -> Bind:
    """Return `bind`, whose result takes a stream's handle and addresses, as one for tensors."""

    def bound(names: Sequence[str]) -> Enqueue:
        enqueue = bind(names)
        return lambda tensors: enqueue(current_stream(ordinal), [t.data_ptr() for t in tensors])

    return bound


def dense(t: Tensor) -> Tensor:
    """Return `t` as the kernels read it: channels last, or a dense vector; no negative view."""
    layout = CHANNELS_LAST if t.dim() == 4 else torch.contiguous_format
    return t.resolve_neg().contiguous(memory_format=layout)


def aligned(t: Tensor) -> Tensor:
    """Return `t`, or a copy that begins where kernels can load ``ALIGNMENT`` bytes."""
    return t.clone(memory_format=torch.preserve_format) if t.data_ptr() % ALIGNMENT else t


def _layout(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides, as PyTorch counts them, of an operand whose dense shape is
    `shape`: an image or filter has its channels last."""
    strides = tuple(torch.empty(tuple(shape), device="meta").stride())
    if len(shape) == 4:
        return tuple(shape[i] for i in (0, 3, 1, 2)), tuple(strides[i] for i in (0, 3, 1, 2))
    return tuple(shape), strides
