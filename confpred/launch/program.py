"""Launches that consist of kernels and matrix products, on PyTorch's tensors.

Launch --> Program(launch, bind) --> program(operands)
                        |
        what a kernel is launched by: the driver, or an interpreter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from confpred.problem.operation import SCRATCH, Launch, Product, Step, View
from confpred.problem.precision import float32_sums, matmul_tf32

#: The operands by name. Those of an operation have its dtype and are dense, and come first; the
#: workspaces are of bytes.
Operands = Mapping[str, Tensor]
#: Launches a step on the current stream.
Bound = Callable[[Operands], None]

#: With bias and ReLU in cuBLASLt's epilogue; not every PyTorch has it.
_ADD_RELU: Any = getattr(torch, "_addmm_activation", None)


class Program:
    """A launch that is ready for operands of one problem; called with them, it enqueues all of it
    on PyTorch's current stream.

    It allocates nothing. PyTorch's switches for TF32 and for sums in half precision are set for the
    time of the call, where they are not as the launch has it.

    Args:
        launch: one with a program.
        bind: returns a function that launches a step.
    """

    def __init__(self, launch: Launch, bind: Callable[[Step], Bound]) -> None:
        self._parts: list[Bound | Product] = [
            bind(part) if isinstance(part, Step) else part for part in launch.program
        ]
        self._tf32 = launch.tf32

    def __call__(self, operands: Operands) -> None:
        dtype = next(iter(operands.values())).dtype
        typed = dict(operands)
        if SCRATCH in typed:
            typed[SCRATCH] = typed[SCRATCH].view(dtype)
        made: dict[View, Tensor] = {}  # layers share views, which cost the host something
        switches = matmul_tf32(self._tf32) if dtype is torch.float32 else float32_sums()
        with switches:
            for part in self._parts:
                if isinstance(part, Product):
                    multiply(part, typed, made)
                else:
                    part(typed)


def on_tensors(names: Sequence[str], enqueue: Callable[[int, Sequence[int]], None]) -> Bound:
    """Return `enqueue`, which takes a stream and the addresses of the operands `names`, as a
    function of tensors that uses the current stream."""

    def run(operands: Operands) -> None:
        addresses = [operands[name].data_ptr() if name in operands else 0 for name in names]
        enqueue(torch.cuda.current_stream().cuda_stream, addresses)

    return run


def multiply(product: Product, operands: Operands, made: dict[View, Tensor]) -> None:
    """Compute `product` in place of its `out`.

    Args:
        product: any.
        operands: by name, all of the launch's dtype.
        made: the matrices of views that were met before, to which new ones are added.
    """
    out, a, b = (
        made[view] if view in made else _made(view, operands, made)
        for view in (product.out, product.a, product.b)
    )
    if out.dim() == 3:
        if product.accumulate:
            torch.baddbmm(out, a, b, out=out)
        else:
            torch.bmm(a, b, out=out)
    elif product.bias is not None:
        bias = operands[product.bias]
        if product.relu and _ADD_RELU is not None:
            _ADD_RELU(bias, a, b, use_gelu=False, out=out)
        else:
            torch.addmm(bias, a, b, out=out)
            if product.relu:
                out.relu_()
    elif product.accumulate:
        torch.addmm(out, a, b, out=out)
    else:
        torch.mm(a, b, out=out)


def _made(view: View, operands: Operands, made: dict[View, Tensor]) -> Tensor:
    """Return the batch of matrices, or the one matrix of a batch of 1."""
    tensor = operands[view.operand]
    offset = tensor.storage_offset() + view.offset
    one = view.shape[0] == 1
    shape, strides = (view.shape[1:], view.strides[1:]) if one else (view.shape, view.strides)
    matrices = made[view] = tensor.as_strided(shape, strides, offset)
    return matrices
