"""A *problem*: one convolution layer with its sizes, dtype, direction and epilogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np

from confpred.errors import InvalidProblem
from confpred.problem.record import Record

DTYPES = ("float16", "bfloat16", "float32")
DIRECTIONS = ("fprop", "dgrad", "wgrad")
ACTIVATIONS = ("none", "relu", "silu", "gelu", "relu6", "hardswish")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "dtype": DTYPES,
    "direction": DIRECTIONS,
    "activation": ACTIVATIONS,
}

#: Smallest and largest value of every integer field; a pair field obeys it in both members.
LIMITS: Mapping[str, tuple[int, int]] = {
    "n": (1, 65_536),
    "c": (1, 65_536),
    "h": (1, 65_536),
    "w": (1, 65_536),
    "k": (1, 65_536),
    "r": (1, 64),
    "s": (1, 64),
    "stride": (1, 64),
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


@dataclass(frozen=True)  # without slots, as the sizes that are asked for most are kept
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
    PAIRS: ClassVar[tuple[str, ...]] = PAIRS
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

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default, directions in _ONLY_IN:
            value = getattr(self, name)
            if value != default and self.direction not in directions:
                allowed = f"{str(default).lower()} in direction {self.direction}"
                raise InvalidProblem(name, value, allowed)
        for name in ("c", "k"):
            if getattr(self, name) % self.groups:
                raise InvalidProblem(
                    name, getattr(self, name), f"a multiple of groups={self.groups}"
                )
        for name, size in (("h", self.p), ("w", self.q)):
            if size < 1:
                raise InvalidProblem(
                    name,
                    getattr(self, name),
                    f"large enough for an output of at least 1 (these sizes give {size})",
                )
        for name, elements in (("n", self.input_elements), ("k", self.output_elements)):
            if elements > MAX_ELEMENTS:
                raise InvalidProblem(
                    name, getattr(self, name), f"a tensor of at most {MAX_ELEMENTS} elements"
                )

    def layer(self) -> Problem:
        """`self` with batch, dtype, direction and epilogue made all the same."""
        return replace(
            self,
            n=1,
            dtype="float16",
            direction="fprop",
            bias=False,
            activation="none",
            residual=False,
            deterministic=False,
        )

    @cached_property
    def p(self) -> int:
        """Output height."""
        return _output_size(self.h, self.r, self.stride[0], self.padding[0], self.dilation[0])

    @cached_property
    def q(self) -> int:
        """Output width."""
        return _output_size(self.w, self.s, self.stride[1], self.padding[1], self.dilation[1])

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
    def kind(self) -> str:
        """Its grouping, and whether more than the convolution is to be computed."""
        fused = self.bias or self.has_epilogue
        return f"fused {self.grouping}" if fused else self.grouping

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self.dtype == "float32" else 2

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

        Every direction has the same three tensors, and writes one of them. Of the image, a strided
        window may leave out pixels; only its gradient has a value for each of them.
        """
        image = self.input_elements
        if self.direction != "dgrad":
            image = self.n * self.c * self._pixels_read
        elements = image + self.filter_elements + self.output_elements
        extra = (self.k if self.bias else 0) + (self.output_elements if self.residual else 0)
        return self.itemsize * (elements + extra)

    @property
    def _pixels_read(self) -> int:
        """Pixels of an image of the input that some window has."""
        sizes = ((self.h, self.p, self.r), (self.w, self.q, self.s))
        rows, columns = (
            _places_read(size, outputs, taps, stride, padding, dilation)
            for (size, outputs, taps), stride, padding, dilation in zip(
                sizes, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return rows * columns

    @cached_property
    def flops(self) -> int:
        """Multiplications plus additions."""
        return 2 * self.output_elements * self.group_width * self.r * self.s


def _output_size(size: int, filter_size: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (filter_size - 1) - 1) // stride + 1


@lru_cache(maxsize=4096)
def _places_read(
    size: int, outputs: int, taps: int, stride: int, padding: int, dilation: int
) -> int:
    """How many of `size` places along an axis are under some tap of some window."""
    if dilation == 1 and stride <= taps:  # windows meet: all from the first to the last place
        return max(min((outputs - 1) * stride + taps - padding, size), 0)
    read = np.zeros(size, np.bool_)
    for tap in range(taps):
        first = tap * dilation - padding  # of the places that this tap meets, one a window
        end = max(first + (outputs - 1) * stride + 1, 0)
        read[first if first >= 0 else first % stride : end : stride] = True
    return int(read.sum())
