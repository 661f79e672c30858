"""PyTorch's arguments of a convolution as a problem of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from confpred.errors import InvalidProblem
from confpred.problem.conv2d import Problem
from confpred.pytorch.ready import CHANNELS_LAST, DTYPES

Pair = tuple[int, int]
Geometry = tuple[Pair, Pair, Pair, int]  # stride, padding, dilation, groups


def problem_of(
    direction: str,
    image: Sequence[int],
    filters: Sequence[int],
    dtype: torch.dtype,
    geometry: Geometry,
    **epilogue: Any,
) -> Problem | None:
    """The problem of a layer; None for what no kernel of ours is made for.

    Args:
        direction: ``fprop``, ``dgrad`` or ``wgrad``.
        image: N, C, H, W of the convolution's input.
        filters: K, C / groups, R, S.
        dtype: of all tensors.
        geometry: stride, padding, dilation, groups.
        epilogue: further fields of the problem.
    """
    groups = geometry[3]
    if dtype not in DTYPES or len(image) != 4 or len(filters) != 4:
        return None
    if groups < 1 or image[1] != filters[1] * groups:
        return None  # PyTorch's own error message is the one that its users know
    try:
        return described(direction, image, filters, dtype, geometry, **epilogue)
    except InvalidProblem:
        return None


def described(
    direction: str,
    image: Sequence[int],
    filters: Sequence[int],
    dtype: torch.dtype,
    geometry: Geometry,
    **epilogue: Any,
) -> Problem:
    """The problem of a layer whose arguments fit together; see `problem_of`.

    Raises:
        InvalidProblem: a size is out of range, or the output would be empty.
    """
    stride, padding, dilation, groups = geometry
    n, c, h, w = image
    k, _, r, s = filters
    return Problem(
        n=n,
        c=c,
        h=h,
        w=w,
        k=k,
        r=r,
        s=s,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        dtype=DTYPES[dtype],
        direction=direction,
        **epilogue,
    )


def sums_bias(groups: int) -> bool:
    """Whether the problem of a filter's gradient has the gradient of the bias in it.

    Kernels of grouped layers sum it on their way. No plan of cuDNN's does, and PyTorch's own
    backward sums the output's gradient beside cuDNN. So of a dense layer the filter's gradient is
    asked for alone, and PyTorch's sum follows whichever of the two is taken.
    """
    return groups > 1


def alike(x: Tensor, *others: Tensor | None) -> bool:
    """Whether `x` is on a CUDA device and `others` have its dtype and device."""
    return x.is_cuda and all(
        t is None or (t.dtype is x.dtype and t.device == x.device) for t in others
    )


def is_channels_last(x: Tensor) -> bool:
    """Whether `x` is dense with its channels last, beyond doubt: a tensor of one channel or one
    pixel is dense in either layout, and PyTorch takes it for one with its channels first."""
    return x.dim() == 4 and x.is_contiguous(memory_format=CHANNELS_LAST) and not x.is_contiguous()
