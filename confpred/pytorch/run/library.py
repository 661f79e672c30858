"""PyTorch's operators that compute a dense convolution with its epilogue.

cuDNN adds bias and residual and applies ReLU before it stores, cuBLAS the bias of a product: a pass
over the output less (``benchmarks/kernels/pytorch_epilogues.py``). A convolution of one pixel an
image, as in squeeze-and-excite, is a product, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from confpred.launch.assignment import Assignment
from confpred.problem.conv2d import Problem
from confpred.pytorch.run.pointwise import apply_epilogue

HALF = (torch.float16, torch.bfloat16)
_VECTOR = 8  # channels in 16 bytes: with others cuBLAS is slower than a convolution and a pass


def is_one_operator(p: Problem) -> bool:
    """Return whether one operator computes `p`: it has a bias, is dense and in half precision, and
    ends in ReLU, or has one pixel in its filter and nothing but the bias behind it."""
    if p.direction != "fprop" or p.groups != 1 or not p.bias or p.dtype == "float32":
        return False
    one_pixel = (p.r, p.s, p.stride, p.padding) == (1, 1, (1, 1), (0, 0))
    plain = p.activation == "none" and not p.residual
    is_product = one_pixel and plain and p.c % _VECTOR == 0 and p.k % _VECTOR == 0
    return p.activation == "relu" or is_product


def _refuses_products() -> bool:
    """Return whether PyTorch refuses cuBLAS, as it does where it is set to be deterministic."""
    return torch.are_deterministic_algorithms_enabled()


def takes_pixels(x: Tensor, weight: Tensor, padding: Sequence[int], groups: int) -> bool:
    """Return whether a convolution is a product of one pixel an image, in half precision."""
    sides = (*x.shape[2:], *weight.shape[2:])
    is_pixel = all(isinstance(side, int) and side == 1 for side in sides) and not any(padding)
    return is_pixel and groups == 1 and x.dtype in HALF and not _refuses_products()


def multiply_pixels(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return ``activation(convolution(x, weight, bias))`` for shapes (N, C, 1, ...) and
    (K, C, 1, ...)."""
    rows, columns = x.reshape(x.shape[:2]), weight.reshape(weight.shape[:2]).t()
    if bias is None:
        out = torch.mm(rows, columns)
    elif activation == "relu":
        out, activation = torch._addmm_activation(bias, rows, columns), "none"
    else:
        out = torch.addmm(bias, rows, columns)
    return apply_epilogue(out.view(*out.shape, *x.shape[2:]), None, None, activation)


class FusedOperator:
    """The one PyTorch operator of a problem for which `is_one_operator` holds."""

    def __init__(self, problem: Problem) -> None:
        self.assignment = Assignment(problem)

    @staticmethod
    def of(problem: Problem) -> FusedOperator | None:
        """Return the operator of `problem` under PyTorch's switches; None where there is none."""
        if not is_one_operator(problem) or not torch.backends.cudnn.enabled:
            return None
        refused = problem.activation == "none" and _refuses_products()
        return None if refused else FusedOperator(problem)

    def run(self, x: Any, weight: Any, bias: Any, residual: Any = None) -> tuple[Tensor]:
        """Compute the problem of tensors that are channels last; see `ReadyLaunch.run`."""
        p: Any = self.assignment.problem
        if p.activation == "none":
            rows, columns = x.permute(0, 2, 3, 1).reshape(-1, p.c), weight.view(p.k, p.c).t()
            out = torch.addmm(bias, rows, columns).view(p.n, p.h, p.w, p.k)
            return (out.permute(0, 3, 1, 2),)
        geometry = (p.stride, p.padding, p.dilation, 1)
        if residual is None:
            return (torch.cudnn_convolution_relu(x, weight, bias, *geometry),)
        return (torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *geometry),)
