"""A *problem*: one convolution layer with its sizes, dtype, direction and epilogue."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from confpred.errors import InvalidProblem

DTYPES = ("float16", "bfloat16")
DIRECTIONS = ("fprop",)
ACTIVATIONS = ("none", "relu", "silu", "gelu")
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


@dataclass(frozen=True, slots=True)
class Problem:
    """One convolution layer, sizes as PyTorch's ``conv2d`` counts them.

    Attributes:
        n, c, h, w: input batch, channels, height, width (``LIMITS`` has each range).
        k, r, s: filters (output channels), filter height, filter width.
        stride, padding, dilation: ``(vertical, horizontal)``.
        groups: ``c`` and ``k`` are both multiples of it.
        dtype: of input, filter and output; accumulation is in float32.
        direction: which of the layer's convolutions.
        bias: whether a bias of length ``k`` is added in the kernel.
        activation: applied to the output in the kernel.

    Raises:
        InvalidProblem: a field is out of range, or the output would be empty.
    """

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

    def __post_init__(self) -> None:
        for name, limits in LIMITS.items():
            value = getattr(self, name)
            if name in PAIRS:
                pair = value if isinstance(value, (tuple, list)) else (value, value)
                if len(pair) != 2:
                    raise InvalidProblem(name, value, "one integer or a pair of them")
                object.__setattr__(self, name, tuple(_integer(name, v, limits) for v in pair))
            else:
                object.__setattr__(self, name, _integer(name, value, limits))
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise InvalidProblem(name, value, " or ".join(choices))
        if not isinstance(self.bias, bool):
            raise InvalidProblem("bias", self.bias, "true or false")
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

    @property
    def p(self) -> int:
        """Output height."""
        return _output_size(self.h, self.r, self.stride[0], self.padding[0], self.dilation[0])

    @property
    def q(self) -> int:
        """Output width."""
        return _output_size(self.w, self.s, self.stride[1], self.padding[1], self.dilation[1])

    @property
    def group_width(self) -> int:
        """Input channels of one group."""
        return self.c // self.groups

    @property
    def input_elements(self) -> int:
        return self.n * self.c * self.h * self.w

    @property
    def filter_elements(self) -> int:
        return self.k * self.group_width * self.r * self.s

    @property
    def output_elements(self) -> int:
        return self.n * self.k * self.p * self.q

    @property
    def minimum_bytes(self) -> int:
        """Bytes that must cross device memory: every operand read or written once."""
        elements = self.input_elements + self.filter_elements + self.output_elements
        return 2 * (elements + (self.k if self.bias else 0))

    @property
    def flops(self) -> int:
        """Multiplications plus additions."""
        return 2 * self.output_elements * self.group_width * self.r * self.s

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that `from_json` accepts; pairs become lists."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Problem:
        """Build a problem from a mapping of field names.

        Raises:
            InvalidProblem: a field is unknown, missing or out of range.
        """
        if not isinstance(fields, Mapping):
            raise InvalidProblem("problem", fields, "an object of fields such as n, c, h, w, k")
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                raise InvalidProblem(str(name), fields[name], f"a field among {', '.join(known)}")
        for name, field in known.items():
            if field.default is dataclasses.MISSING and name not in fields:
                raise InvalidProblem(name, None, f"an integer {_span(*LIMITS[name])} (required)")
        return cls(**fields)

    @classmethod
    def parse(cls, text: str) -> Problem:
        """Build a problem from words such as ``"n=32 c=64 h=56 w=56 k=64 r=3 s=3 padding=1x2"``.

        A pair is one integer, or two joined by ``x``.

        Raises:
            InvalidProblem: a word is not ``field=value``, or `from_json` refuses the fields.
        """
        fields: dict[str, Any] = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            if not equals:
                raise InvalidProblem("layer", word, "words of the form field=value")
            if name in fields:
                raise InvalidProblem(name, value, "one value a field")
            fields[name] = _parse_value(name, value)
        return cls.from_json(fields)

    def __str__(self) -> str:
        """The words that `parse` reads, defaults left out."""
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if isinstance(value, tuple):
                value = value[0] if value[0] == value[1] else "x".join(map(str, value))
            words.append(f"{field.name}={str(value).lower()}")
        return " ".join(words)


def _output_size(size: int, filter_size: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (filter_size - 1) - 1) // stride + 1


def _span(low: int, high: int) -> str:
    return f"from {low} to {high}"


def _integer(name: str, value: object, limits: tuple[int, int]) -> int:
    """`value` as an int within `limits`: NumPy integers too, but no boolean, float or text."""
    allowed = f"an integer {_span(*limits)}" + (", or a pair of them" if name in PAIRS else "")
    if isinstance(value, (bool, str, float)):
        raise InvalidProblem(name, value, allowed)
    try:
        number = int(value.__index__())  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise InvalidProblem(name, value, allowed) from None
    if not limits[0] <= number <= limits[1]:
        raise InvalidProblem(name, value, allowed)
    return number


def _parse_value(name: str, text: str) -> Any:
    if name in CHOICES:
        return text
    if name == "bias":
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    if name in PAIRS and re.fullmatch(r"[0-9]{1,18}x[0-9]{1,18}", text):
        return [int(part) for part in text.split("x")]
    return text
