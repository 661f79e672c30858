"""Convolution of plain tensors, without a record of gradients: forward, and both gradients.

Tensors of some sizes get the launch of the candidate that was chosen when a graph was captured
(`Call.hints`), else of one that is chosen now and cached, else PyTorch's operator. A line or volume
that equals a computation on images (`ConvNd.as_conv2d`) is launched as such, on views.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from confpred.errors import InvalidProblem
from confpred.launch.assignment import MOST_READ, Assignment, text_of
from confpred.problem.activation import activated
from confpred.problem.conv import CONV, MAX_RANK, ConvNd
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.limits import Limits
from confpred.problem.precision import convolutions_allow_tf32
from confpred.pytorch.run import library, loading
from confpred.pytorch.run.choosing import ANY, Constraints, cached
from confpred.pytorch.run.library import FusedOperator
from confpred.pytorch.run.loading import (
    DTYPES,
    ReadyLaunch,
    aligned,
    alike,
    dense,
    is_channels_last,
    layout_of,
)
from confpred.pytorch.run.pointwise import apply_epilogue

Axes = tuple[int, ...]  # a number for each spatial dimension
Geometry = tuple[Axes, Axes, Axes, int]  # stride, padding, dilation, groups
Mask = tuple[bool, bool, bool]  # which gradients of x, weight and bias are asked for
Grads = tuple["Tensor | None", ...]  # of x, weight and bias
#: Directions of transposed layers' problems by directions of the network.
TURNED = {"fprop": "dgrad", "dgrad": "fprop", "wgrad": "wgrad"}


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a convolution that are no tensors.

    Attributes:
        geometry: stride, padding, dilation, groups.
        activation: applied last, in a forward pass.
        mask: gradients that the backward pass computes.
        hints: assignments made when a graph was captured, of the forward pass and None, or of the
            gradients of x and of weight; launched where the problem is the same.
        constraints: bound choices made now; their limits bound launches of `hints`, too.
        cut: outputs left out at the end of the last axis, as in `ConvNd`.
        output_padding: of a transposed convolution; empty for others.
    """

    geometry: Geometry
    activation: str = "none"
    mask: Mask = (False, False, False)
    hints: tuple[Assignment | None, ...] = (None, None)
    constraints: Constraints = ANY
    cut: int = 0
    output_padding: Axes = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of ``aten::convolution`` behind its tensors."""
        stride, padding, dilation, groups = self.geometry
        output_padding = self.output_padding or (0,) * len(stride)
        return stride, padding, dilation, bool(self.output_padding), output_padding, groups

    @property
    def arguments_of_image(self) -> tuple[Any, ...]:
        """Return `arguments` for images of height 1 instead of lines."""
        stride, padding, dilation, transposed, output_padding, groups = self.arguments
        axes = (1, *stride), (0, *padding), (1, *dilation), transposed, (0, *output_padding)
        return *axes, groups

    def biases(self, weight: Tensor) -> int:
        """Return the values of a bias, one for each channel of the result; a transposed layer's
        filters are (C, K / groups, ...)."""
        return weight.shape[1] * self.geometry[3] if self.output_padding else weight.shape[0]

    def image(self, x: Tensor, weight: Tensor) -> Sequence[int]:
        """Return the shape of the layer's image, as of `layer_of`: that of `x`, or of the result of
        a transposed layer, which is the gradient of an image."""
        if not self.output_padding:
            return x.shape
        sides = (x.shape[2:], weight.shape[2:], *self.geometry[:3], self.output_padding)
        sizes = (
            (size - 1) * stride - 2 * padding + dilation * (window - 1) + more + 1
            for size, window, stride, padding, dilation, more in zip(*sides, strict=True)
        )
        return x.shape[0], self.biases(weight), *sizes

    def direction(self, name: str) -> str:
        """Return the direction of the problem for a direction of the network."""
        return TURNED[name] if self.output_padding else name

    def text(self) -> str:
        """Return this call as one text; `read` is the way back."""
        hints = [hint and hint.to_json() for hint in self.hints]
        common = [self.geometry, self.activation, self.mask, hints]
        limits, rare = self.constraints.limits.to_json(), (self.cut, self.output_padding)
        bounds = [list(limits.values()), self.constraints.max_regret]
        return text_of([*common, *bounds, *(rare if any(rare) else ())])

    @staticmethod
    @lru_cache(MOST_READ)
    def read(text: str) -> Call:
        """Return the call whose `text` this is."""
        (*axes, groups), activation, mask, hints, limits, max_regret, *rare = json.loads(text)
        cut, output_padding = rare or (0, ())
        return Call(
            (*map(tuple, axes), groups), activation, tuple(mask),
            tuple(hint and Assignment.from_json(hint) for hint in hints),
            Constraints(Limits(*limits), max_regret), cut, tuple(output_padding),
        )  # fmt: skip


def layer_of(
    direction: str, image: Sequence[int], filters: Sequence[int], dtype: torch.dtype,
    geometry: Geometry, layout: str = "channels_last", **fields: Any,
) -> Problem | ConvNd | None:  # fmt: skip
    """Return the problem of a layer of any rank in a direction; None if no record describes it.

    In every direction `image` is the shape of the layer's input, (N, C, ...), and `filters` that of
    its filters, (K, C / groups, ...). `layout` is of lines and volumes; `fields` are the problem's
    others.
    """
    stride, padding, dilation, groups = geometry
    rank = len(filters) - 2
    if dtype not in DTYPES or len(image) != len(filters) or not 1 <= rank <= MAX_RANK:
        return None
    if groups < 1 or image[1] != filters[1] * groups:
        return None  # PyTorch's own error message is the one that its users know
    fields |= {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    fields |= {"dtype": DTYPES[dtype], "direction": direction, "k": filters[0]}
    (n, c, *sizes), windows = image, filters[2:]
    for axes, values in (("dhw", sizes), ("trs", windows)):
        fields |= dict(zip(axes[-rank:], values, strict=True))
    try:
        # `Problem` has no bias in dgrad, where a transposed layer of images adds one.
        if rank == 2 and not (direction == "dgrad" and fields.get("bias")):
            return Problem(n, c, **fields)
        return ConvNd(n, c, rank=rank, layout=layout, **fields)
    except InvalidProblem:  # a size is out of range, or the output would be empty
        return None


def problem_of(*layer: Any, **fields: Any) -> Problem | ConvNd | None:
    """Return the problem to choose for: that of `layer_of`, as one of images where these compute
    the same."""
    problem = layer_of(*layer, **fields)
    return problem.as_conv2d() or problem if isinstance(problem, ConvNd) else problem


class OnImages:
    """The launch of a problem of images, on tensors of another rank that lie in the same memory."""

    def __init__(self, ready: ReadyLaunch | FusedOperator, layer: ConvNd) -> None:
        self.assignment, self._ready = ready.assignment, ready
        problem: Any = ready.assignment.problem
        self._inputs = [o.shape for o in CONVOLUTION.operands(problem) if not o.terms]
        self._outputs = [o.shape for o in CONV.operands(layer) if o.terms]

    def run(self, *inputs: Tensor | None) -> list[Tensor]:
        """Compute as `ReadyLaunch.run` does."""
        tensors = [t for t in inputs if t is not None]
        images = map(self._viewed, tensors, self._inputs)
        return list(map(self._viewed, self._ready.run(*images), self._outputs))

    @staticmethod
    def _viewed(t: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return `t`, which is channels last, with the sizes of `shape`, in the order of memory."""
        return t if t.dim() == 1 else t.movedim(1, -1).reshape(shape).movedim(-1, 1)


Ready = ReadyLaunch | FusedOperator | OnImages


def sums_bias(groups: int) -> bool:
    """Return whether the problem of a filter's gradient has the gradient of the bias in it: kernels
    of grouped layers sum it on their way. No plan of cuDNN's does, so PyTorch's sum follows."""
    return groups > 1


def is_deterministic() -> bool:
    """Return whether PyTorch is set to deterministic algorithms."""
    return torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, call: Call
) -> Tensor:
    """Compute ``activation(convolution(x, weight, bias) + residual)`` of plain tensors. The cut of
    `call` precedes the sum; `residual` may be broadcast to the shape of the result."""
    ready = forward_launch(x, weight, bias, residual, call)
    if ready is not None:
        operands, layout = (x, weight, bias, residual), layout_of(x)
        return ready.run(*(None if t is None else dense(t, layout) for t in operands))[0]
    _, padding, _, groups = call.geometry
    is_plain = residual is None and not call.output_padding
    if is_plain and library.takes_pixels(x, weight, padding, groups):
        return library.multiply_pixels(x, weight, bias, call.activation)
    x, weight = aligned(x), aligned(weight)  # cuDNN's heuristics may end in a misaligned load
    if call.cut or not x.is_cuda or (residual is None and call.activation == "none"):
        out = by_pytorch(x, weight, bias, call)
        out = out[..., : out.shape[-1] - call.cut] if call.cut else out
        return activated(call.activation, out if residual is None else out + residual)
    out = by_pytorch(x, weight, None, call)
    if residual is None or (residual.shape == out.shape and residual.dtype is out.dtype):
        return apply_epilogue(out, bias, residual, call.activation)
    return activated(call.activation, apply_epilogue(out, bias, None, "none") + residual)


def by_pytorch(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """Compute a convolution by PyTorch's operator."""
    if not _is_image(x, call):
        return torch.convolution(x, weight, bias, *call.arguments)
    x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    return torch.convolution(x, weight, bias, *call.arguments_of_image).squeeze(2)


def _is_image(x: Tensor, call: Call) -> bool:
    """Return whether PyTorch's operator gets `x` as an image of height 1: a line that lies channels
    last, which it would copy to have the channels first, to be copied back by cuDNN."""
    is_line = x.dim() == 3 and x.dtype in library.HALF and layout_of(x) == "channels_last"
    return is_line and call.geometry[-1] == 1


def forward_launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, call: Call
) -> Ready | None:
    """Return the launch that `forward` takes; None for PyTorch's convolution."""
    if not alike(x, weight, bias, residual) or not _is_read(x):
        return None
    if bias is not None and bias.shape != (call.biases(weight),):
        return None  # PyTorch raises the error
    has_bias, shape = bias is not None, None if residual is None else residual.shape
    fields = {"bias": has_bias, "activation": call.activation, "residual": shape is not None}
    return _find_launch("fprop", x, weight, call, fields, shape)


def backward(out_grad: Tensor, x: Tensor, weight: Tensor, call: Call) -> Grads:
    """Compute the gradients of a convolution of plain tensors of one dtype; None where the mask of
    `call` says so."""
    grad_x = grad_weight = grad_bias = None
    if alike(out_grad, x, weight):
        run_x, run_weight = backward_launches(x, weight, call)
        layout = layout_of(x)
        if run_x is not None or run_weight is not None:
            out_grad = dense(out_grad, layout)
        if run_x is not None:
            (grad_x,) = run_x.run(out_grad, dense(weight, layout), None)
        if run_weight is not None:
            # The image of a transposed layer is its output: the two change roles.
            operands = (out_grad, dense(x, layout))
            grad_weight, *of_bias = run_weight.run(*operands[:: -1 if call.output_padding else 1])
            grad_bias = of_bias[0] if of_bias else None
    grads = (grad_x, grad_weight, grad_bias)
    left = [wanted and grad is None for wanted, grad in zip(call.mask, grads, strict=True)]
    if left == [False, False, True]:
        return grad_x, grad_weight, out_grad.sum((0, *range(2, out_grad.dim())))
    if any(left):
        out_grad, x, weight = (aligned(t) for t in (out_grad, x, weight))
        others = backward_by_pytorch(out_grad, x, weight, call, left)
        return tuple(a if missing else b for a, missing, b in zip(others, left, grads, strict=True))
    return grads


def backward_by_pytorch(
    out_grad: Tensor, x: Tensor, weight: Tensor, call: Call, mask: Sequence[bool]
) -> Grads:
    """Compute those gradients of a convolution that `mask` asks for by PyTorch's operator."""
    sizes = [call.biases(weight)] if mask[2] else None
    out_grad = F.pad(out_grad, (0, call.cut)) if call.cut else out_grad
    run, wanted = torch.ops.aten.convolution_backward.default, list(mask)
    if not _is_image(x, call):
        return run(out_grad, x, weight, sizes, *call.arguments, wanted)  # type: ignore[no-any-return]
    images = (t.unsqueeze(2) for t in (out_grad, x, weight))
    grads = run(*images, sizes, *call.arguments_of_image, wanted)
    return tuple(g.squeeze(2) if g is not None and g.dim() == 4 else g for g in grads)


def backward_launches(x: Tensor, weight: Tensor, call: Call) -> tuple[Ready | None, Ready | None]:
    """Return the launches of the gradients of `x` and `weight`; None for PyTorch's operator."""
    run_x = run_weight = None
    if alike(x, weight) and _is_read(x):
        if call.mask[0]:
            run_x = _find_launch("dgrad", x, weight, call, {})
        if call.mask[1]:
            bias = call.mask[2] and not call.output_padding and sums_bias(call.geometry[3])
            fields = {"bias": bias, "deterministic": is_deterministic()}
            run_weight = _find_launch("wgrad", x, weight, call, fields)
    return run_x, run_weight


def _is_read(x: Tensor) -> bool:
    """Return whether kernels may read `x` as it lies: images that are channels first stay
    PyTorch's."""
    return x.dim() != 4 or is_channels_last(x)


def _find_launch(
    direction: str, x: Tensor, weight: Tensor, call: Call, fields: dict[str, Any],
    residual: torch.Size | None = None,
) -> Ready | None:  # fmt: skip
    """Return the launch for the sizes, dtype and device of `x`; None for PyTorch's convolution, as
    for a residual that is broadcast.

    Args:
        direction: the direction of the network; that of a transposed layer's problem is another.
        x, weight: input and filter of the layer, in every direction.
        call: the other arguments of the convolution.
        fields: further fields of the problem.
        residual: shape of the residual; None without one.
    """
    dtype, ordinal, geometry, constraints = x.dtype, x.get_device(), call.geometry, call.constraints
    hint, layout = call.hints[direction == "wgrad"], layout_of(x)  # the second one is of `weight`
    direction = call.direction(direction)
    switches = (
        dtype is torch.float32 and not convolutions_allow_tf32(), torch.backends.cudnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    key = (
        direction, x.shape, weight.shape, dtype, ordinal, geometry, *fields.values(), *switches,
        hint, constraints, layout, call.cut, call.output_padding, residual,
    )  # fmt: skip

    def find() -> Ready | None:
        sizes = (direction, call.image(x, weight), weight.shape, dtype, geometry, layout)
        more: Any = fields | ({"cut": call.cut} if call.cut else {})
        layer = layer_of(*sizes, **more)
        if layer is None or (residual is not None and residual != _result_shape(layer)):
            return None
        problem = layer if isinstance(layer, Problem) else layer.as_conv2d() or layer
        if hint is not None and hint.problem == problem:
            ready = loading.load(hint, ordinal, constraints.limits)
        else:  # a kernel that was chosen for other sizes or switches may not be legal
            ready = loading.choose_and_load(problem, ordinal, constraints)
        if isinstance(problem, ConvNd):
            return ready
        launch = ready or FusedOperator.of(problem)
        return launch if launch is None or isinstance(layer, Problem) else OnImages(launch, layer)

    return cached(key, find)


def _result_shape(layer: Problem | ConvNd) -> tuple[int, ...]:
    sizes = layer.output_shape[-layer.rank :] if isinstance(layer, ConvNd) else (layer.p, layer.q)
    return layer.n, layer.k, *sizes
