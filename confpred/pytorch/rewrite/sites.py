"""Layers of a graph: for each direction a problem and its choice, or why there is none.

An *open size* is symbolic: it is not fixed when the graph is captured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from operator import ge
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, fx
from torch.utils import _pytree

from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.launch.assignment import Assignment
from confpred.predict.choice import Choice
from confpred.problem.conv import LAYOUTS, MAX_RANK, ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device
from confpred.problem.record import Record
from confpred.pytorch.rewrite.passes import val_of
from confpred.pytorch.run import choosing
from confpred.pytorch.run.convolve import TURNED, Call, Geometry, problem_of
from confpred.pytorch.run.loading import CHANNELS_LAST, DTYPES, is_channels_last, layout_of

CONVOLUTION = torch.ops.aten.convolution.default
CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
#: A kernel that is bound by memory takes at least this long, and reaches this share of the
#: bandwidth; a matrix product this share of the tensor cores' rate.
_FLOOR_S, _BANDWIDTH_SHARE, _TENSOR_SHARE = 2e-6, 0.8, 0.6
_PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")}

#: A call of ``getattr`` without another one inside: the module, a quotation mark, and the name.
_GETATTR = re.compile(r"getattr\(((?:(?!getattr\().)*?), (['\"])(.*?)\2\)")


@dataclass(slots=True)
class Site:
    """One convolution or norm of a graph in one direction.

    Attributes:
        name: of the layer, as the network calls it; empty where it is not known.
        direction: ``fprop``, ``dgrad`` or ``wgrad``; ``norm`` for a batch norm of
            inference that follows no convolution, else its direction.
        problem: the problem to choose for; None if confpred has no kernels for it.
        why: why there is no problem, in words; None where there is one.
        choice: the predictor's choice for the problem; None without a choice.
        fused: operators that are fused into it, such as ``("norm", "relu")``.
        by_layout: the problem of a line or volume in each layout; empty for others, and for
            causal layers.
        sizes: input sizes of a norm; empty for others.
    """

    name: str
    direction: str
    problem: Record | None = None
    why: str | None = None
    choice: Choice | None = None
    fused: tuple[str, ...] = ()
    by_layout: dict[str, Record] = field(default_factory=dict)
    sizes: tuple[Any, ...] = ()

    @property
    def is_lowered(self) -> bool:
        """Whether a confpred kernel, or a chosen library plan, computes it."""
        return self.choice is not None and choosing.why_pytorch(self.choice) is None

    @property
    def may_be_image(self) -> bool:
        """Whether PyTorch's operator gets a line as an image where it lies channels last
        (`confpred.pytorch.run.convolve`)."""
        line: Any = self.by_layout.get("channels_first")  # channels last it is one of images
        if not isinstance(line, ConvNd) or line.rank != 1 or line.groups != 1:
            return False
        is_doubtful = min(line.c, line.k, line.w) == 1  # it lies in either layout
        return line.dtype != "float32" and not is_doubtful

    @property
    def is_image(self) -> bool:
        """Whether PyTorch's operator gets a line as an image."""
        is_last = self.may_be_image and self.problem is self.by_layout["channels_last"]
        return is_last and not self.is_lowered

    @property
    def reason(self) -> str:
        """Why PyTorch's operators compute it, in words; empty where a confpred kernel does."""
        if self.choice is None:
            return self.why or "no model for this device"
        return choosing.why_pytorch(self.choice) or ""


class Causal(NamedTuple):
    """A causal convolution of lines, or its backward (`confpred.pytorch.rewrite.causal`).

    Attributes:
        node: the convolution, or its backward.
        padding: the problem's padding on both sides.
        cut: outputs left out at the end, as in `ConvNd`.
        pad: the node that pads the layer's input on the left; None where the network pads both
            sides and slices the result instead.
        last: the node of the layer's result, in a forward pass.
        unpadded: nodes that cut the gradient of the padded input to that of `x`, in a backward
            pass.
    """

    node: fx.Node
    padding: int
    cut: int
    pad: fx.Node | None
    last: fx.Node
    unpadded: tuple[fx.Node, ...] = ()

    @property
    def x(self) -> fx.Node:
        """The input of the layer before padding; read anew, as rewriting replaces nodes."""
        x: Any = arguments_of(self.node).image if self.pad is None else self.pad.args[0]
        return x  # type: ignore[no-any-return]

    @property
    def grad(self) -> fx.Node:
        """The gradient of the layer's result, in a backward pass."""
        grad: Any = self.node.args[0]
        # Without a pad this is the gradient of the slice, whose first argument is the result's.
        return grad.args[0] if self.pad is None else grad  # type: ignore[no-any-return]

    def geometry(self) -> Geometry | None:
        """Return the geometry of the problem: that of the node (`geometry_of`) with `padding`."""
        geometry = geometry_of(self.node)
        return geometry and (geometry[0], (self.padding,), *geometry[2:])


def call_of(
    node: fx.Node, sites: Sequence[Site], constraints: choosing.Constraints,
    causal: Causal | None = None, **fields: Any,
) -> str:  # fmt: skip
    """Return how confpred's operator computes `node`, a convolution or its backward, as the text
    that is an argument of that operator.

    Args:
        node: the convolution or its backward.
        sites: its directions, with the choices for the sizes of the capture.
        constraints: bound those choices, and those for tensors of other sizes.
        causal: the causal convolution that `node` is a part of.
        fields: further ones of `Call`, such as an activation.
    """
    arguments = arguments_of(node)
    hints = {site.direction: _hint(site) for site in sites}
    geometry: Any = geometry_of(node) if causal is None else causal.geometry()
    fields |= {"constraints": constraints, "cut": 0 if causal is None else causal.cut}
    if arguments.transposed:
        fields["output_padding"] = tuple(arguments.output_padding)
    if node.target is CONVOLUTION:
        return Call(geometry, hints=(hints["fprop"], None), **fields).text()
    both = hints.get("dgrad"), hints.get("wgrad")  # None: it is not computed
    return Call(geometry, hints=both, mask=tuple(arguments.mask), **fields).text()


def _hint(site: Site) -> Assignment | None:
    """Return the assignment for the sizes of the capture: to PyTorch's operator where nothing else
    is chosen. None without a problem."""
    if site.problem is None:
        return None
    candidate = site.choice.candidate if site.choice and site.is_lowered else PYTORCH_OPERATOR
    return Assignment(site.problem, candidate)


def site_of(node: fx.Node, direction: str, causal: Causal | None = None, **fields: Any) -> Site:
    """Return the site of a convolution, or of a direction of its backward, with its problem or why
    there is none; `fields` are further ones of the problem."""
    arguments = arguments_of(node)
    image, filters = val_of(arguments.image), val_of(arguments.filters)
    site, geometry = Site(name_of(node), direction), geometry_of(node)
    if causal is not None:
        image, geometry = val_of(causal.x), causal.geometry()
        fields["cut"] = causal.cut
    sizes, filter_sizes = sizes_of(image), [s for s in filters.shape if isinstance(s, int)]
    if arguments.transposed:  # its result is the gradient of an image
        sizes = sizes_of(val_of(node if node.target is CONVOLUTION else node.args[0]))
        direction = TURNED[direction]
        # PyTorch sums the gradient of its bias (`confpred.pytorch.run.convolve`).
        fields |= {"bias": False} if direction == "wgrad" else {}
        if not all(type(n) is int for n in arguments.output_padding):
            geometry = None
    if geometry is None or len(filter_sizes) != filters.dim():
        site.why = "a filter or geometry of an open size"
    elif image.dtype not in DTYPES:
        site.why = f"dtype {str(image.dtype).removeprefix('torch.')}"
    elif None in sizes:
        site.why = "a size that depends on values"
    elif arguments.transposed and any(map(ge, arguments.output_padding, geometry[0])):
        # Dilated filters allow it; a convolution of the result has a larger output than the input.
        site.why = "an output padding beyond the stride"
    else:
        layer = (direction, sizes, filter_sizes, image.dtype, geometry)
        problem = problem_of(*layer, layout_of(image), **fields)
        if problem is None:
            site.why = "no convolution that confpred describes"
        elif causal is not None:
            site.problem = problem
        elif image.dim() != 4:
            problems = {layout: problem_of(*layer, layout, **fields) for layout in LAYOUTS}
            site.problem = problem
            site.by_layout = {layout: p for layout, p in problems.items() if p is not None}
        elif is_channels_last(image):
            site.problem = problem
        else:
            in_both = image.is_contiguous(memory_format=CHANNELS_LAST)  # dense in both layouts
            site.why = "one pixel or one channel" if in_both else "channels first"
    return site


class Arguments(NamedTuple):
    """Arguments of PyTorch's operator for a convolution. Its backward has the sizes of the bias for
    `bias`, and a mask of the gradients that it computes."""

    image: Any
    filters: Any
    bias: Any
    stride: Any
    padding: Any
    dilation: Any
    transposed: Any
    output_padding: Any
    groups: Any
    mask: Any = ()


def arguments_of(node: fx.Node) -> Arguments:
    """Return the arguments of a convolution, or of its backward without the gradient."""
    return Arguments(*(node.args[1:] if node.target is CONVOLUTION_BACKWARD else node.args))


def directions_of(node: fx.Node) -> list[str]:
    """Return the directions that a convolution, or its backward, computes."""
    if node.target is CONVOLUTION:
        return ["fprop"]
    mask = arguments_of(node).mask  # its last member is for the bias
    return [name for name, wanted in zip(("dgrad", "wgrad"), mask, strict=False) if wanted]


def geometry_of(node: fx.Node) -> Geometry | None:
    """Return stride, padding, dilation, groups of a convolution or its backward. None where one of
    them is of an open size, or has not a number for each spatial dimension."""
    arguments = arguments_of(node)
    axes = arguments.stride, arguments.padding, arguments.dilation
    stride, padding, dilation = map(tuple, axes)
    numbers = [*stride, *padding, *dilation, arguments.groups]
    rank = val_of(arguments.filters).dim() - 2
    if any(len(axis) != rank for axis in axes) or not all(type(n) is int for n in numbers):
        return None
    return stride, padding, dilation, arguments.groups


def sizes_of(image: Tensor) -> list[Any]:
    """Return the sizes of a fake tensor: for an open size its hint, the size of the capture; None
    for a size that depends on values."""
    return [s if isinstance(s, int) else s.node.hint for s in image.shape]


def elements_of(val: Tensor) -> int:
    """Return the elements of a fake tensor, by the hints of its open sizes; a size that depends on
    values, or is 0, counts as 1."""
    return prod(int(size or 1) for size in sizes_of(val))


def is_image(node: Any) -> bool:
    """Return whether `node` is a batch of lines, images or volumes with channels."""
    val = val_of(node) if isinstance(node, fx.Node) else None
    return isinstance(val, Tensor) and 3 <= val.dim() <= 2 + MAX_RANK


def is_convolution(problem: Record | None) -> TypeGuard[Problem | ConvNd]:
    """Return whether `problem` is of a convolution."""
    return isinstance(problem, (Problem, ConvNd))


def name_of(node: fx.Node) -> str:
    """Return the name of the innermost module that `node` comes from, as ``named_modules`` has it.
    Dynamo writes ``stage.0.1x`` as an expression, such as ``getattr(L['self'].stage[0], '1x')`` or
    ``L['self']._modules['stage']...``."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str([*stack.values()][-1][0]) if stack else ""
    for _ in range(path.count("getattr(")):  # the inner ones first
        path = _GETATTR.sub(r"\1.\3", path)
    text = re.sub(r"^[A-Z]\[[^]]*\]|^self\.|\._modules\b", "", path)
    text = re.sub(r"\[(['\"])(.*?)\1\]|\[(\d+)\]", lambda m: "." + (m[2] or m[3]), text)
    return text.strip(".")


def convolution_s(node: fx.Node, device: Device) -> float:
    """Return the seconds that a direction of a convolution is expected to take, by its bytes and
    operations."""
    arguments = arguments_of(node)
    image, filters = val_of(arguments.image), val_of(arguments.filters)
    out = val_of(node) if node.target is CONVOLUTION else val_of(node.args[0])
    if arguments.transposed:
        image, out = out, image  # transposed: each pixel of the input meets the filter
    moved = sum(elements_of(t) * t.dtype.itemsize for t in (image, filters, out))
    # Each output meets one filter, (C / groups, R, S).
    flops = 2.0 * elements_of(out) * elements_of(filters) / (sizes_of(filters)[0] or 1)
    # TF32, PyTorch's default for convolutions, has half the rate of half precision.
    return _bound_s(moved, flops * (1 if image.dtype.itemsize == 2 else 2), device)


def node_s(node: fx.Node, device: Device) -> float:
    """Return the expected seconds of an operator that is no convolution."""
    leaves = _pytree.tree_leaves([val_of(n) for n in (node, *node.all_input_nodes)])
    tensors, flops = [t for t in leaves if isinstance(t, Tensor)], 0.0
    if node.target in _PRODUCTS:
        # The left factor; `all_input_nodes` has a matrix that is both factors only once.
        flops = 2.0 * tensors[0].numel() * val_of(node.args[-2]).shape[-1]
    return _bound_s(sum(t.numel() * t.element_size() for t in tensors), flops, device)


def _bound_s(moved: float, flops: float, device: Device) -> float:
    """Return the seconds of a kernel that moves `moved` bytes and computes `flops` operations."""
    return max(
        _FLOOR_S,
        float(moved) / (_BANDWIDTH_SHARE * device.dram_bytes_per_s),
        float(flops) / (_TENSOR_SHARE * device.tensor_flops),
    )
