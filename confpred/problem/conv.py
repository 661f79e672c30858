"""Convolution in one, two or three spatial dimensions, whose tensors may be channels first, and
transposed convolution: its *problem*, and the operation.

Two-dimensional convolution of channels-last images is a kind of problem of its own
(`confpred.problem.conv2d`); `ConvNd.as_conv2d` converts a problem that is the same computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from confpred.concurrency import cached_property
from confpred.errors import InvalidProblem, nearest
from confpred.problem.activation import (
    ACTIVATIONS,
    activated,
    activation_feature,
    activation_macro,
)
from confpred.problem.conv2d import (
    DIRECTIONS,
    DTYPES,
    MAX_ELEMENTS,
    Problem,
    dtype_macro,
    gradients_by_pytorch,
    output_size,
    places_read,
    product,
)
from confpred.problem.device import Device
from confpred.problem.operation import REFERENCE, KernelSpec, Operand, Step
from confpred.problem.record import Record

if TYPE_CHECKING:
    import torch

LAYOUTS = ("channels_last", "channels_first")
MAX_RANK = 3
#: Names of an axis' sizes: of the input, of the filter, and of the output. The last axes are those
#: of a layer of lower rank.
_INPUT, _FILTER, _OUTPUT = ("d", "h", "w"), ("t", "r", "s"), ("z", "p", "q")
#: Values of an axis that a layer does not have.
_NEUTRAL: Mapping[str, int] = {"stride": 1, "padding": 0, "dilation": 1}


@dataclass(frozen=True)  # without slots, for cached properties
class ConvNd(Record):
    """One convolution of one layer of `rank` spatial dimensions.

    The sizes are those of the layer, whatever the direction: ``dgrad`` computes the gradient of the
    input from that of the output, ``wgrad`` the gradient of the filter. A transposed convolution is
    a ``dgrad``, which computes the "input"; so a ``dgrad`` too may have a bias, of `c` values, and
    an activation.

    Attributes:
        n, c, d, h, w: input batch, channels, depth, height, width (``LIMITS`` has each range).
        k, t, r, s: filters (output channels), filter depth, height, width.
        rank: 1 has only `w` and `s`, 2 has `h` and `r`, too, 3 has all. In `from_json` it follows
            from the sizes that are named.
        stride, padding, dilation: an integer an axis, depth first; one integer stands for all.
        cut: how many outputs are left out at the end of the last axis. A causal layer
            pads by ``dilation * (s - 1)`` and cuts as much, or its input was padded on the left.
        groups: ``c`` and ``k`` are both multiples of it.
        layout: of all tensors: ``channels_last`` (N, D, H, W, C; filter K, T, R, S, C / groups) or
            ``channels_first`` (N, C, D, H, W; filter K, C / groups, T, R, S).
        dtype: of input, filter and output, or of their gradients; accumulation is in float32.
        direction: which of the layer's convolutions.
        bias: fprop and dgrad: a bias is added; wgrad: its gradient is computed too.
        activation: applied to the result; fprop and dgrad only.
        residual: a tensor of the result's shape is added before the activation; fprop and dgrad
            only.
        deterministic: the result must be the same to the bit at every call; wgrad only, as the
            other directions always are.

    Raises:
        InvalidProblem: a field is out of range, the output would be empty, or the direction or
            rank has no such field.
    """

    LIMITS: ClassVar[Mapping[str, tuple[int, int]]] = {
        **dict.fromkeys(("n", "c", "d", "h", "k"), (1, 65_536)),
        "w": (1, 2**24),
        **dict.fromkeys(("t", "r"), (1, 64)),
        "s": (1, 4_096),
        "rank": (1, MAX_RANK),
        "stride": (1, 4_096),
        "padding": (0, 2**24),
        "dilation": (1, 65_536),
        "cut": (0, 2**24),
        "groups": (1, 65_536),
    }
    TUPLES: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(_NEUTRAL, _INPUT)
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "layout": LAYOUTS,
        "dtype": DTYPES,
        "direction": DIRECTIONS,
        "activation": ACTIVATIONS,
    }

    n: int
    c: int
    w: int
    k: int
    s: int
    d: int = 1
    h: int = 1
    t: int = 1
    r: int = 1
    rank: int = MAX_RANK
    stride: tuple[int, ...] = (1, 1, 1)
    padding: tuple[int, ...] = (0, 0, 0)
    dilation: tuple[int, ...] = (1, 1, 1)
    cut: int = 0
    groups: int = 1
    layout: str = "channels_last"
    dtype: str = "float16"
    direction: str = "fprop"
    bias: bool = False
    activation: str = "none"
    residual: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        rank = self._integer("rank", self.rank)
        missing = MAX_RANK - rank
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            members = tuple(value) if isinstance(value, (tuple, list)) else (value,) * rank
            if len(members) == rank:
                object.__setattr__(self, name, (neutral,) * missing + members)
            elif len(members) != MAX_RANK or members[:missing] != (neutral,) * missing:
                several = "" if rank == 1 else f", or {rank} of them"
                self._refuse(name, f"an integer{several}, as rank is {rank}")
        super().__post_init__()
        for name in (*_INPUT[:missing], *_FILTER[:missing]):
            if getattr(self, name) != 1:
                self._refuse(name, f"1, as rank {rank} has no such axis")
        for name in ("activation", "residual"):
            if self.direction == "wgrad" and getattr(self, name) not in ("none", False):
                self._refuse(name, "left out in direction wgrad")
        if self.deterministic and self.direction != "wgrad":
            self._refuse("deterministic", f"false in direction {self.direction}")
        for name in ("c", "k"):
            if getattr(self, name) % self.groups:
                self._refuse(name, f"a multiple of groups={self.groups}")
        for name, size in zip(_INPUT, self.output_shape, strict=True):
            if size < 1:
                self._refuse(
                    name,
                    f"large enough for an output of at least 1 (these sizes give {size})",
                )
        for name, elements in (("n", self.input_elements), ("k", self.output_elements)):
            if elements > MAX_ELEMENTS:
                self._refuse(name, f"a tensor of at most {MAX_ELEMENTS} elements")

    def _refuse(self, name: str, allowed: str) -> None:
        raise InvalidProblem(name, getattr(self, name), allowed)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ConvNd:
        """Build a problem from a mapping of field names; without ``rank``, it is 3 where a depth is
        named, else 2 where a height is, else 1.

        Raises:
            InvalidProblem: a field is unknown, missing or out of range.
        """
        if isinstance(fields, Mapping) and "rank" not in fields:
            pairs = zip(_INPUT, _FILTER, strict=True)
            named = [not fields.keys().isdisjoint(names) for names in pairs]
            fields = {**fields, "rank": MAX_RANK - (named[:2].index(True) if any(named[:2]) else 2)}
        return super().from_json(fields)

    def layer(self) -> ConvNd:
        """Return the problem with fixed values for all that a user chooses: batch, dtype,
        direction, epilogue."""
        return replace(
            self, n=1, dtype="float16", direction="fprop", bias=False, activation="none",
            residual=False, deterministic=False,
        )  # fmt: skip

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Depth, height and width of the input."""
        return self.d, self.h, self.w

    @property
    def filter_shape(self) -> tuple[int, ...]:
        """Depth, height and width of the filter."""
        return self.t, self.r, self.s

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Depth, height and width of the output."""
        axes = zip(
            self.input_shape, self.filter_shape, self.stride, self.padding, self.dilation,
            strict=True,
        )  # fmt: skip
        *outer, last = (output_size(*axis) for axis in axes)
        return *outer, last - self.cut

    @property
    def z(self) -> int:
        """Output depth."""
        return self.output_shape[0]

    @property
    def p(self) -> int:
        """Output height."""
        return self.output_shape[1]

    @property
    def q(self) -> int:
        """Output width."""
        return self.output_shape[2]

    @property
    def taps(self) -> int:
        """Positions of the filter."""
        return prod(self.filter_shape)

    @property
    def group_width(self) -> int:
        """Input channels of one group."""
        return self.c // self.groups

    @property
    def is_channels_last(self) -> bool:
        return self.layout == "channels_last"

    @property
    def grouping(self) -> str:
        """``dense 3d`` (one group), ``depthwise 1d`` (as many as channels), or ``grouped ...``."""
        sort = "dense" if self.groups == 1 else "depthwise" if self.group_width == 1 else "grouped"
        return f"{sort} {self.rank}d"

    @property
    def kind(self) -> str:
        """The grouping, of dense layers the layout, and whether more is computed."""
        layout = f" {self.layout}" if self.groups == 1 else ""
        fused = self.bias or self.residual or self.activation != "none"
        return f"{'fused ' * fused}{self.grouping}{layout}"

    @property
    def input_elements(self) -> int:
        return self.n * self.c * prod(self.input_shape)

    @property
    def filter_elements(self) -> int:
        return self.k * self.group_width * self.taps

    @property
    def output_elements(self) -> int:
        return self.n * self.k * prod(self.output_shape)

    @cached_property
    def minimum_bytes(self) -> int:
        """Bytes that must cross device memory: what is written, and what is read of each operand,
        once. A strided filter may leave out positions of the input, whose gradient has them all."""
        image = self.input_elements
        if self.direction != "dgrad":
            axes = zip(
                self.input_shape, self.output_shape, self.filter_shape, self.stride, self.padding,
                self.dilation, strict=True,
            )  # fmt: skip
            image = self.n * self.c * prod(places_read(*axis) for axis in axes)
        result, channels = self.output_elements, self.k
        if self.direction == "dgrad":
            result, channels = self.input_elements, self.c
        elements = image + self.filter_elements + self.output_elements
        return self.itemsize * (elements + channels * self.bias + result * self.residual)

    @cached_property
    def flops(self) -> int:
        """Multiplications plus additions."""
        return 2 * self.output_elements * self.group_width * self.taps

    def as_conv2d(self) -> Problem | None:
        """Return the convolution of channels-last images that is the same computation on the same
        memory; None if there is none.

        An axis on which the filter has one tap, no stride and no padding mixes nothing. If depth is
        one, its slices are further images of the batch. If height and width both are, they are
        flattened into the image's width, and depth becomes its height.
        """
        if not self.is_channels_last or self.cut:
            return None
        n, (d, h, w), (t, r, s) = self.n, self.input_shape, self.filter_shape
        unmixed = [
            (taps, stride, padding) == (1, 1, 0)
            for taps, stride, padding in zip(
                self.filter_shape, self.stride, self.padding, strict=True
            )
        ]
        image_axes: tuple[int, int] = (1, 2)
        if unmixed[0]:
            n *= d
        elif unmixed[1] and unmixed[2]:
            h, w, r, s, image_axes = d, h * w, t, 1, (0, 2)
        else:
            return None
        axes: Any = {name: tuple(getattr(self, name)[i] for i in image_axes) for name in _NEUTRAL}
        fields: Any = {
            name: getattr(self, name)
            for name in (
                "c", "k", "groups", "dtype", "direction", "bias", "activation", "residual",
                "deterministic",
            )
        }  # fmt: skip
        try:
            return Problem(n=n, h=h, w=w, r=r, s=s, **axes, **fields)
        except InvalidProblem:  # too large as an image, or a gradient with an epilogue
            return None

    def __str__(self) -> str:
        """Return the words that `parse` reads, defaults and axes that the rank lacks left out."""
        return " ".join(
            f"{name}={text}"
            for name, text in self.to_texts().items()
            if getattr(self, name) != self._fields()[name].default or name == "rank"
        )

    def to_texts(self) -> dict[str, str]:
        """Return the texts of all fields, sizes first, axes in order."""
        fields = super().to_texts()
        texts = {name: fields[name] for name in dict.fromkeys((*"ncdhwktrs", *fields))}
        for name in _NEUTRAL:
            own = getattr(self, name)[MAX_RANK - self.rank :]
            texts[name] = str(own[0]) if len(set(own)) == 1 else "x".join(map(str, own))
        return texts


#: Fields that a `Problem` of `confpred.problem.conv2d` lacks.
OWN_FIELDS = frozenset(("d", "t", "rank", "layout", "cut"))


def kind_of(fields: object) -> type[Problem] | type[ConvNd]:
    """Return the class of a convolution with fields of these names: `ConvNd` if one of them is, or
    is close to, a field of `ConvNd` alone, or if ``w`` or ``s`` is there without ``h`` and ``r``.
    """
    if not isinstance(fields, Mapping):
        return Problem  # which refuses it
    own = ConvNd._fields()
    named = {name if name in own else nearest(name, own) for name in fields}
    if named & OWN_FIELDS or (named & {"w", "s"} and not named & {"h", "r"}):
        return ConvNd
    return Problem


_THREADS = 256
#: Outputs and inputs of each direction.
_OPERANDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fprop": (("out",), ("in", "filter", "bias", "residual")),
    "dgrad": (("in_grad",), ("out_grad", "filter", "bias", "residual")),
    "wgrad": (("filter_grad", "bias_grad"), ("out_grad", "in")),
}
#: Into how many parts the reference cuts the positions that a filter element's gradient sums over.
_SLICES = 512
_MOST_ALIGNED = 64


class ConvNds:
    """Tensors are of the problem's layout, with an axis for each of its rank; names as of
    `confpred.problem.conv2d.Convolutions`. The bias of a ``dgrad`` has `c` values."""

    name = "conv"
    problem: type[Record] = ConvNd
    feature_names: tuple[str, ...] = (
        "direction", "dtype", "rank", "channels_first", "log_n", "log_c", "log_k", "log_z", "log_p",
        "log_q", "t", "r", "s", "group_width", "log_groups", "stride_d", "stride_h", "stride_w",
        "dilation_d", "dilation_h", "dilation_w", "cut", "bias", "activation", "residual",
        "deterministic", "log_bytes", "log_intensity", "log_roofline", "align_c", "align_k",
        "align_w", "align_q",
    )  # fmt: skip

    def operands(self, problem: ConvNd) -> tuple[Operand, ...]:
        p, (outputs, inputs) = problem, _OPERANDS[problem.direction]
        shapes = self._shapes(p)
        result, channels = ("in", p.c) if p.direction == "dgrad" else ("out", p.k)
        shapes |= {"bias": (channels,)} if p.bias else {}
        shapes |= {"residual": shapes[result]} if p.residual else {}
        terms = product(p)[2]
        return tuple(
            Operand(name, shapes[tensor], p.dtype, terms if name in outputs else 0)
            for name in (*outputs, *inputs)
            if (tensor := name.removesuffix("_grad")) in shapes
        )

    def features(self, problem: ConvNd, device: Device) -> NDArray[np.float32]:
        """Return the features. Logarithms are to base 2; `align_c` is the power of two that divides
        `c`, up to 64."""
        p = problem
        sizes = (p.n, p.c, p.k, *p.output_shape, p.groups, p.minimum_bytes)
        costs = (p.flops / p.minimum_bytes, device.roofline_s(p))
        n, c, k, z, height, width, groups, *work = np.log2(np.array((*sizes, *costs))).tolist()
        row = (
            DIRECTIONS.index(p.direction), DTYPES.index(p.dtype), p.rank, not p.is_channels_last,
            n, c, k, z, height, width, *p.filter_shape, p.group_width, groups, *p.stride,
            *p.dilation, p.cut, p.bias, activation_feature(p.activation), p.residual,
            p.deterministic, *work,
            *(min(size & -size, _MOST_ALIGNED) for size in (p.c, p.k, p.w, p.q)),
        )  # fmt: skip
        return np.array([row], np.float32)

    def reference(self, problem: ConvNd, output: str) -> Step:
        p = problem
        inputs = ("out_grad",) if output == "bias_grad" else _OPERANDS[p.direction][1]
        (elements,) = (o.elements for o in self.operands(p) if o.name == output)
        macros = (dtype_macro(p), activation_macro(p.activation))
        return Step(
            KernelSpec("reference_conv.cu", f"reference_conv_{output}", macros),
            grid=(-(-elements // _THREADS), _SLICES if p.direction == "wgrad" else 1, 1),
            block=(_THREADS, 1, 1),
            smem_bytes=0,
            operands=(REFERENCE, *inputs),
            scalars=_reference_scalars(p),
        )

    def pytorch(self, problem: ConvNd, tensors: Mapping[str, torch.Tensor]) -> Any:
        import torch.nn.functional as F

        p, own, shapes = problem, slice(MAX_RANK - problem.rank, None), self._shapes(problem)
        t = {
            name: x if x.dim() == 1 else self._channels_second(p, x) for name, x in tensors.items()
        }
        stride, padding, dilation = (axes[own] for axes in (p.stride, p.padding, p.dilation))
        if p.direction == "fprop":
            convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[p.rank - 1]
            out = convolve(t["in"], t["filter"], t.get("bias"), stride, padding, dilation, p.groups)
            return self._finished(p, out[..., : p.q], t)
        grad = F.pad(t["out_grad"], (0, p.cut)) if p.cut else t["out_grad"]
        if p.direction == "dgrad" and (p.bias or p.residual or p.activation != "none"):
            transposed: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
            full = replace(p, cut=0)
            reached = [
                (size - 1) * step - 2 * pad + spread * (window - 1) + 1
                for size, step, pad, spread, window in zip(
                    full.output_shape, p.stride, p.padding, p.dilation, p.filter_shape, strict=True
                )
            ]
            more = [size - least for size, least in zip(p.input_shape, reached, strict=True)][own]
            out = transposed[p.rank - 1](
                grad, t["filter"], t.get("bias"), stride, padding, more, p.groups, dilation
            )
            return self._finished(p, out, t)
        # The operator reads only the sizes of the operand whose gradient it computes; but it would
        # copy one of another memory layout.
        x, weight = (
            t[name] if name in t else self._channels_second(p, grad.new_empty(shapes[name]))
            for name in ("in", "filter")
        )
        return gradients_by_pytorch(p, grad, x, weight, stride, padding, dilation)

    @staticmethod
    def _shapes(p: ConvNd) -> dict[str, tuple[int, ...]]:
        """Return the shapes of input, output and filter by name."""
        own = slice(MAX_RANK - p.rank, None)

        def ordered(first: int, channels: int, sizes: Sequence[int]) -> tuple[int, ...]:
            return (first, *sizes, channels) if p.is_channels_last else (first, channels, *sizes)

        return {
            "in": ordered(p.n, p.c, p.input_shape[own]),
            "out": ordered(p.n, p.k, p.output_shape[own]),
            "filter": ordered(p.k, p.group_width, p.filter_shape[own]),
        }

    @staticmethod
    def _channels_second(p: ConvNd, x: torch.Tensor) -> torch.Tensor:
        return x.movedim(-1, 1) if p.is_channels_last else x

    @staticmethod
    def _finished(p: ConvNd, out: torch.Tensor, t: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return activated(p.activation, out + t["residual"] if p.residual else out)


def _reference_scalars(p: ConvNd) -> dict[str, int]:
    sizes = {name: getattr(p, name) for name in (*"ncdhwktrszpq", "groups")}
    for name, axes in (("stride", p.stride), ("pad", p.padding), ("dilation", p.dilation)):
        sizes |= {f"{name}_{axis}": size for axis, size in zip(_INPUT, axes, strict=True)}
    return sizes | {"channels_first": int(not p.is_channels_last)}


CONV = ConvNds()
