"""PyTorch's arguments of a convolution: as one record, and as a problem of confpred's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from confpred.errors import InvalidProblem
from confpred.families.candidate import PYTORCH_OPERATOR, Candidate
from confpred.problem.conv2d import Problem
from confpred.problem.limits import Limits
from confpred.pytorch.choosing import ANY, Wishes, kept
from confpred.pytorch.ready import CHANNELS_LAST, DTYPES

Pair = tuple[int, int]
Geometry = tuple[Pair, Pair, Pair, int]  # stride, padding, dilation, groups
Mask = tuple[bool, bool, bool]  # which gradients of x, weight and bias are asked for


@dataclass(frozen=True, slots=True)
class Hint:
    """A candidate that was chosen when a graph was captured.

    Attributes:
        image: N, C, H, W of the convolution's input that it was chosen for.
        candidate: a kernel's config, a library's plan, or PyTorch's operator.
    """

    image: tuple[int, ...]
    candidate: Candidate = PYTORCH_OPERATOR


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a convolution that are no tensors.

    Attributes:
        geometry: stride, padding, dilation, groups.
        activation: one of `confpred.problem.conv2d.ACTIVATIONS`.
        mask: of the backward pass: which gradients of x, weight and bias are asked for.
        hints: the candidates of the forward pass, or of the gradients of x and of weight, to launch
            where the sizes are those that they were chosen for.
        wishes: for choices made now.
    """

    geometry: Geometry
    activation: str = "none"
    mask: Mask = (False, False, False)
    hints: tuple[Hint | None, ...] = (None, None)
    wishes: Wishes = ANY

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What ``aten::convolution`` takes behind its tensors."""
        stride, padding, dilation, groups = self.geometry
        return stride, padding, dilation, False, (0, 0), groups

    def text(self) -> str:
        """Return this call as JSON; `read` is the way back."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @staticmethod
    def read(text: str) -> Call:
        """Return the call whose `text` this is."""

        def find() -> Call:
            fields = json.loads(text)
            stride, padding, dilation, groups = fields["geometry"]
            wishes = fields["wishes"]
            hints = (
                None if h is None else Hint(tuple(h["image"]), Candidate(**h["candidate"]))
                for h in fields["hints"]
            )
            return Call(
                (tuple(stride), tuple(padding), tuple(dilation), groups),
                fields["activation"],
                tuple(fields["mask"]),
                tuple(hints),
                Wishes(Limits(**wishes["limits"]), wishes["max_regret"]),
            )

        return kept(("call", text), find)


def problem_of(
    direction: str,
    image: Sequence[int],
    filters: Sequence[int],
    dtype: torch.dtype,
    geometry: Geometry,
    **epilogue: Any,
) -> Problem | None:
    """Return the problem of a layer; None for what no confpred kernel is made for.

    Args:
        direction: ``fprop``, ``dgrad`` or ``wgrad``.
        image: N, C, H, W of the convolution's input.
        filters: K, C / groups, R, S.
        dtype: of all tensors.
        geometry: stride, padding, dilation, groups.
        epilogue: further fields of the problem.
    """
    stride, padding, dilation, groups = geometry
    if dtype not in DTYPES or len(image) != 4 or len(filters) != 4:
        return None
    if groups < 1 or image[1] != filters[1] * groups:
        return None  # PyTorch's own error message is the one that its users know
    n, c, h, w = image
    k, _, r, s = filters
    try:
        return Problem(
            *(n, c, h, w, k, r, s),
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            dtype=DTYPES[dtype],
            direction=direction,
            **epilogue,
        )
    except InvalidProblem:  # a size is out of range, or the output would be empty
        return None


def sums_bias(groups: int) -> bool:
    """Return whether the problem of a filter's gradient has the gradient of the bias in it.

    Kernels of grouped layers sum it on their way. No plan of cuDNN's does, and PyTorch's own
    backward sums the output's gradient beside cuDNN. So of a dense layer the filter's gradient is
    asked for alone, and PyTorch's sum follows whichever of the two is taken.
    """
    return groups > 1


def is_deterministic() -> bool:
    """Return whether PyTorch is told to compute what is the same to the bit each time."""
    return torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic


def alike(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether `x` is on a CUDA device and `others` have its dtype and device."""
    return x.is_cuda and all(
        t is None or (t.dtype is x.dtype and t.device == x.device) for t in others
    )


def is_channels_last(x: Tensor) -> bool:
    """Return whether `x` is dense with its channels last, beyond doubt: a tensor of one channel or
    one pixel is dense in either layout, and PyTorch takes it for one with its channels first."""
    return x.dim() == 4 and x.is_contiguous(memory_format=CHANNELS_LAST) and not x.is_contiguous()
