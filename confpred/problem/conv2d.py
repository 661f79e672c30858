"""Two-dimensional convolution: its *problem* (one layer with sizes, dtype, direction and epilogue),
the *kind* of a problem that compiled kernels depend on, and the operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from confpred.concurrency import cached_property
from confpred.errors import InvalidProblem
from confpred.problem.activation import (
    ACTIVATIONS,
    activated,
    activation_feature,
    activation_macro,
)
from confpred.problem.device import Device
from confpred.problem.operation import REFERENCE, KernelSpec, Operand, Step
from confpred.problem.record import Record

if TYPE_CHECKING:
    import torch

DTYPES = ("float16", "bfloat16", "float32")
DIRECTIONS = ("fprop", "dgrad", "wgrad")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "dtype": DTYPES,
    "direction": DIRECTIONS,
    "activation": ACTIVATIONS,
}

#: Smallest and largest value of every integer field; a pair field obeys it in both members.
LIMITS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("n", "c", "h", "w", "k"), (1, 65_536)),
    **dict.fromkeys(("r", "s", "stride"), (1, 64)),
    "padding": (0, 64),
    "dilation": (1, 64),
    "groups": (1, 65_536),
}
PAIRS = ("stride", "padding", "dilation")
MAX_ELEMENTS = 2**40  # of any one tensor: far beyond a GPU's memory, and safe in 64-bit arithmetic

#: Fields that only some directions have: the field, its value in all others, and the directions.
_ONLY_IN = (
    ("bias", False, ("fprop", "wgrad")),
    ("activation", "none", ("fprop",)),
    ("residual", False, ("fprop",)),
    ("deterministic", False, ("wgrad",)),
)
#: Fields in which the problems of one layer differ, and the values that `Problem.layer` gives them.
_OF_A_LAYER: Mapping[str, Any] = {
    "n": 1,
    "dtype": "float16",
    "direction": "fprop",
    **{name: default for name, default, _ in _ONLY_IN},
}


@dataclass(frozen=True)  # without slots, for cached properties
class Problem(Record):
    """One convolution of one layer, sizes as PyTorch's ``conv2d`` counts them.

    The sizes are those of the layer, whatever the direction: ``dgrad`` computes the gradient of the
    (N, C, H, W) input from that of the (N, K, P, Q) output, ``wgrad`` the gradient of the filter.

    Attributes:
        n, c, h, w: input batch, channels, height, width (``LIMITS`` has each range).
        k, r, s: filters (output channels), filter height, filter width.
        stride, padding, dilation: ``(vertical, horizontal)``.
        groups: ``c`` and ``k`` are both multiples of it.
        dtype: of input, filter and output, or of their gradients; accumulation is in float32.
        direction: which of the layer's convolutions.
        bias: fprop: a bias of length ``k`` is added; wgrad: its gradient is computed too.
        activation: applied to the output in the kernel; fprop only.
        residual: a tensor of the output's shape is added before the activation; fprop only.
        deterministic: the result must be the same to the bit at every call; wgrad only, as the
            other directions always are.

    Raises:
        InvalidProblem: a field is out of range, the output would be empty, or the direction has no
            such field.
    """

    LIMITS: ClassVar[Mapping[str, tuple[int, int]]] = LIMITS
    TUPLES: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(PAIRS, ("h", "w"))
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = CHOICES

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    dtype: str = "float16"
    direction: str = "fprop"
    bias: bool = False
    activation: str = "none"
    residual: bool = False
    deterministic: bool = False

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> Problem:
        """Build a problem from the texts of its fields; ``padding=same`` and ``valid`` are as in
        ``torch.nn.Conv2d``.

        Raises:
            InvalidProblem: as of `from_json`, or no padding gives an output of the input's size.
        """
        padding, read = texts.get("padding"), dict(texts)
        if padding in ("same", "valid"):
            read["padding"] = "64"  # until the filter is known
            p = super().from_texts(read)
            spans = (p.dilation[0] * (p.r - 1), p.dilation[1] * (p.s - 1))
            if padding == "same" and (p.stride != (1, 1) or spans[0] % 2 or spans[1] % 2):
                raise InvalidProblem("padding", padding, "numbers, unless stride is 1 and r, s odd")
            sizes = spans if padding == "same" else (0, 0)
            read["padding"] = f"{sizes[0] // 2}x{sizes[1] // 2}"
        return super().from_texts(read)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default, directions in _ONLY_IN:
            if getattr(self, name) != default and self.direction not in directions:
                self._refuse(name, f"{str(default).lower()} in direction {self.direction}")
        for name in ("c", "k"):
            if getattr(self, name) % self.groups:
                self._refuse(name, f"a multiple of groups={self.groups}")
        for name, size in (("h", self.p), ("w", self.q)):
            if size < 1:
                enough = f"an output of at least 1 (these sizes give {size})"
                self._refuse(name, f"large enough for {enough}")
        for name, elements in (("n", self.input_elements), ("k", self.output_elements)):
            if elements > MAX_ELEMENTS:
                self._refuse(name, f"a tensor of at most {MAX_ELEMENTS} elements")

    def _refuse(self, name: str, allowed: str) -> None:
        raise InvalidProblem(name, getattr(self, name), allowed)

    def layer(self) -> Problem:
        """Return the problem with fixed values for all that a user chooses: batch, dtype,
        direction, epilogue."""
        return replace(self, **_OF_A_LAYER)

    @cached_property
    def p(self) -> int:
        """Output height."""
        return output_size(self.h, self.r, self.stride[0], self.padding[0], self.dilation[0])

    @cached_property
    def q(self) -> int:
        """Output width."""
        return output_size(self.w, self.s, self.stride[1], self.padding[1], self.dilation[1])

    @property
    def taps(self) -> int:
        """Positions of the filter."""
        return self.r * self.s

    @property
    def group_width(self) -> int:
        """Input channels of one group."""
        return self.c // self.groups

    @property
    def grouping(self) -> str:
        """``dense`` (one group), ``depthwise`` (as many as channels) or ``grouped``."""
        return "dense" if self.groups == 1 else "depthwise" if self.group_width == 1 else "grouped"

    @property
    def has_epilogue(self) -> bool:
        """Whether more than a bias follows the convolution."""
        return self.residual or self.activation != "none"

    @property
    def has_wide_groups(self) -> bool:
        """Whether there are groups, each of a multiple of 64 channels, in and out."""
        return self.groups > 1 and not any(n // self.groups % 64 for n in (self.c, self.k))

    @property
    def kind(self) -> str:
        """The grouping, whether groups are wide, and whether more is computed."""
        wide = "wide " if self.has_wide_groups else ""
        return f"{'fused ' * (self.bias or self.has_epilogue)}{wide}{self.grouping}"

    @property
    def input_elements(self) -> int:
        return self.n * self.c * self.h * self.w

    @property
    def filter_elements(self) -> int:
        return self.k * self.group_width * self.r * self.s

    @property
    def output_elements(self) -> int:
        return self.n * self.k * self.p * self.q

    @cached_property
    def minimum_bytes(self) -> int:
        """Bytes that must cross device memory: what is written, and what is read of each operand,
        once.

        Every direction has the same three tensors, and writes one of them. From the image, a
        strided filter may leave out pixels; only its gradient has a value for each of them.
        """
        image = self.input_elements
        if self.direction != "dgrad":
            down, across = zip(self.stride, self.padding, self.dilation, strict=True)
            rows = places_read(self.h, self.p, self.r, *down)
            image = self.n * self.c * rows * places_read(self.w, self.q, self.s, *across)
        elements = image + self.filter_elements + self.output_elements
        extra = self.k * self.bias + self.output_elements * self.residual
        return self.itemsize * (elements + extra)

    @cached_property
    def flops(self) -> int:
        """Multiplications plus additions."""
        return 2 * self.output_elements * self.group_width * self.r * self.s


def output_size(size: int, filter_size: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (filter_size - 1) - 1) // stride + 1


@lru_cache(maxsize=4096)
def places_read(
    size: int, outputs: int, taps: int, stride: int, padding: int, dilation: int
) -> int:
    """Return how many of `size` positions along an axis lie under some tap of some filter."""
    if dilation == 1 and stride <= taps:  # filters meet: all from the first to the last position
        return max(min((outputs - 1) * stride + taps - padding, size), 0)
    read = _repeated(_repeated(1, stride, outputs), dilation, taps)  # bit 0: first padded row
    return (read >> padding & (1 << size) - 1).bit_count()


def _repeated(bits: int, step: int, count: int) -> int:
    """Return `bits` and its copies shifted by `step`, twice `step`, and so on: `count` of them."""
    done = 1
    while done < count:
        more = min(done, count - done)
        bits |= bits << more * step
        done += more
    return bits


class Kind(NamedTuple):
    """The fields of a problem that a kernel may be compiled for; names as in `Problem`."""

    direction: str
    dtype: str
    r: int
    s: int
    stride: tuple[int, int]
    dilation: tuple[int, int]
    group_width: int
    multiplier: int
    bias: bool
    activation: str
    residual: bool

    @classmethod
    def of(cls, problem: Problem) -> Kind:
        """Return the kind of `problem`."""
        p = problem
        return cls(
            p.direction, p.dtype, p.r, p.s, p.stride, p.dilation, p.group_width, p.k // p.c,
            p.bias, p.activation, p.residual,
        )  # fmt: skip

    def __str__(self) -> str:
        epilogue = "+".join(n for n in ("bias", "residual") if getattr(self, n))
        (up, across), (tall, wide) = self.stride, self.dilation
        return (
            f"{self.direction} {self.dtype} {self.r}x{self.s} stride {up}x{across} "
            f"dilation {tall}x{wide} width {self.group_width} x{self.multiplier} "
            f"{self.activation} {epilogue or 'plain'}"
        )

    def stand_ins(self) -> tuple[Kind, ...]:
        """Return the kinds of the most similar kernels, best first: with less of an epilogue, then
        of the other dtype of that size."""
        plain = self._replace(activation="none")
        fewer = (self, plain, plain._replace(bias=False, residual=False))
        other = {"float16": "bfloat16", "bfloat16": "float16"}.get(self.dtype)
        kinds = fewer if other is None else (*fewer, *(k._replace(dtype=other) for k in fewer))
        return tuple(dict.fromkeys(kinds))[1:]


_THREADS = 256
#: Outputs and inputs of each direction.
_OPERANDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fprop": (("out",), ("in", "filter", "bias", "residual")),
    "dgrad": (("in_grad",), ("out_grad", "filter")),
    "wgrad": (("filter_grad", "bias_grad"), ("out_grad", "in")),
}
#: Arguments of the reference's kernels, in their order.
_SIZES = "n c h w k r s p q stride_h stride_w pad_h pad_w dilation_h dilation_w groups"
#: Into how many parts the reference cuts the pixels that a filter element's gradient sums over.
_SLICES = 512
#: The reference of a dense convolution: rows and columns of a block's tile, and how many blocks are
#: enough to fill a GPU.
_TILE, _BLOCKS = 64, 1024
_MOST_ALIGNED = 64


def product(problem: Any) -> tuple[int, int, int]:
    """Return rows, columns and terms of a sum of the matrix product that computes one group, in any
    number of dimensions."""
    p, pixels = problem, problem.output_elements // problem.k
    width, depth = p.group_width, p.k // p.groups
    if p.direction == "fprop":
        return pixels, depth, p.taps * width
    if p.direction == "dgrad":
        return p.input_elements // p.c, width, p.taps * depth
    return depth, p.taps * width, pixels


class Convolutions:
    """Activations are N H W C (and N P Q K), filters K R S C/groups; names as in `operands`."""

    name = "conv2d"
    problem: type[Record] = Problem
    feature_names: tuple[str, ...] = (
        "direction", "dtype", "log_n", "log_c", "log_k", "log_p", "log_q", "r", "s",
        "group_width", "log_groups", "stride_h", "stride_w", "dilation_h", "dilation_w",
        "padding_h", "padding_w", "bias", "activation", "residual", "deterministic",
        "log_bytes", "log_intensity", "log_roofline",
        "log_rows", "log_columns", "log_terms", "align_c", "align_k",
    )  # fmt: skip

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        p, (outputs, inputs) = problem, _OPERANDS[problem.direction]
        shapes: dict[str, tuple[int, ...]] = {
            "in": (p.n, p.h, p.w, p.c),
            "out": (p.n, p.p, p.q, p.k),
            "filter": (p.k, p.r, p.s, p.group_width),
        }
        shapes |= {"bias": (p.k,)} if p.bias else {}
        shapes |= {"residual": shapes["out"]} if p.residual else {}
        terms = product(p)[2]
        return tuple(
            Operand(name, shapes[tensor], p.dtype, terms if name in outputs else 0)
            for name in (*outputs, *inputs)
            if (tensor := name.removesuffix("_grad")) in shapes
        )

    def features(self, problem: Problem, device: Device) -> NDArray[np.float32]:
        """Return the features. Logarithms are to base 2; `align_c` is the power of two that divides
        `c`, up to 64, as tensor cores read channels in such portions."""
        p = problem
        costs = (p.minimum_bytes, p.flops / p.minimum_bytes, device.roofline_s(p))
        sizes = (p.n, p.c, p.k, p.p, p.q, p.groups, *costs, *product(p))
        n, c, k, height, width, groups, *work = np.log2(np.array(sizes, np.float64)).tolist()
        row = (
            DIRECTIONS.index(p.direction), DTYPES.index(p.dtype),
            n, c, k, height, width, p.r, p.s,
            p.group_width, groups, *p.stride, *p.dilation, *p.padding,
            p.bias, activation_feature(p.activation), p.residual, p.deterministic,
            *work, *(min(size & -size, _MOST_ALIGNED) for size in (p.c, p.k)),
        )  # fmt: skip
        return np.array([row], np.float32)

    def reference(self, problem: Problem, output: str) -> Step:
        p = problem
        inputs = ("out_grad",) if output == "bias_grad" else _OPERANDS[p.direction][1]
        (elements,) = (o.elements for o in self.operands(p) if o.name == output)
        slices = _SLICES if p.direction == "wgrad" else 1
        source, grid = "reference", (-(-elements // _THREADS), slices, 1)
        if p.groups == 1 and output != "bias_grad":
            rows, columns, terms = product(p)
            tiles = -(-rows // _TILE), -(-columns // _TILE)
            slices = min(-(-_BLOCKS // (tiles[0] * tiles[1])), -(-terms // _TILE))
            source, grid = "reference_dense", (*tiles, slices if output == "filter_grad" else 1)
        return Step(
            KernelSpec(
                f"{source}.cu",
                f"{source}_{output}",
                (dtype_macro(p), activation_macro(p.activation)),
            ),
            grid=grid,
            block=(_THREADS, 1, 1),
            smem_bytes=0,
            operands=(REFERENCE, *inputs),
            scalars=kernel_sizes(p, _SIZES),
        )

    def pytorch(self, problem: Problem, tensors: Mapping[str, torch.Tensor]) -> Any:
        import torch.nn.functional as F

        p = problem
        t = {name: x.permute(0, 3, 1, 2) if x.dim() == 4 else x for name, x in tensors.items()}
        if p.direction == "fprop":
            sizes = (p.stride, p.padding, p.dilation, p.groups)
            out = F.conv2d(t["in"], t["filter"], t.get("bias"), *sizes)
            if p.residual:
                out = out + t["residual"]
            return activated(p.activation, out)
        # The operator reads only the sizes of the operand whose gradient it computes.
        shapes = {"in": (p.n, p.h, p.w, p.c), "filter": (p.k, p.r, p.s, p.group_width)}
        x, weight = (
            t[name] if name in t else t["out_grad"].new_empty(*shape).permute(0, 3, 1, 2)
            for name, shape in shapes.items()
        )
        return gradients_by_pytorch(p, t["out_grad"], x, weight, p.stride, p.padding, p.dilation)


def gradients_by_pytorch(
    problem: Any, out_grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *axes: Any
) -> Any:
    """Return the gradients of `problem`, of any rank, by PyTorch's operator; None for one that the
    direction does not need. `axes` are stride, padding and dilation."""
    import torch

    p = problem
    mask = [p.direction == "dgrad", p.direction == "wgrad", p.bias]
    with torch.backends.cudnn.flags(
        enabled=True,
        benchmark=torch.backends.cudnn.benchmark,
        deterministic=p.deterministic,
        allow_tf32=torch.backends.cudnn.allow_tf32,
    ):
        return torch.ops.aten.convolution_backward(
            out_grad, x, weight, [p.k] if p.bias else None, *axes, False, (0,) * len(axes[0]),
            p.groups, mask,
        )  # fmt: skip


def kernel_sizes(problem: Problem, names: str) -> dict[str, int]:
    """Return a kernel's arguments for a problem: the sizes in `names`, such as ``n c h w pad_h
    pad_w``, in that order."""
    p = problem
    sizes = {name: getattr(p, name) for name in (*"nchwkrspq", "groups")}
    for name, pair in (("stride", p.stride), ("pad", p.padding), ("dilation", p.dilation)):
        sizes[f"{name}_h"], sizes[f"{name}_w"] = pair
    return {name: sizes[name] for name in names.split()}


def dtype_macro(problem: Record) -> tuple[str, str]:
    """Return the macro ``DTYPE`` of ``kernels/common.cuh``."""
    return "DTYPE", f"DTYPE_{problem.dtype.upper()}"


CONVOLUTION = Convolutions()
