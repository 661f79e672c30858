"""How a network of one or three spatial dimensions is written down: a chain of layers.

A `Net` knows the tensor that its next layer reads, so a network is a list of layers and of the few
steps between them that change a tensor's sizes: pooling, concatenation, interpolation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from confpred.problem.conv import MAX_RANK, ConvNd

Axes = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """One convolution of a network.

    Attributes:
        problem: of one sample in float16, with bias and activation as inference has them: a batch
            norm is folded, so it counts as a bias. A transposed convolution is a ``dgrad``.
        bias_gradient: whether training computes the gradient of a bias.
    """

    problem: ConvNd
    bias_gradient: bool


@dataclass(slots=True)
class Net:
    """A network that is being written down.

    Attributes:
        c, size: channels, and the length or (depth, height, width), of the next layer's input.
        layout: of its tensors, as its code has them.
        layers: those that were written, with repeats.
    """

    c: int
    size: tuple[int, ...]
    layout: str = ""
    layers: list[Layer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = self.layout or ("channels_first", "", "channels_last")[len(self.size) - 1]

    def conv(
        self,
        k: int,
        window: Axes = 3,
        stride: Axes = 1,
        act: str = "none",
        *,
        norm: bool = False,
        bias: bool = True,
        residual: bool = False,
        groups: int = 1,
        dilation: Axes = 1,
        padding: Axes | None = None,
        causal: str = "",
    ) -> Net:
        """Append a layer of `k` channels, padded by half its filter unless `padding` is given.

        Args:
            norm: a batch norm follows, and the layer has no bias of its own.
            causal: along the first axis; ``cut`` pads both ends and leaves the last outputs out,
                ``pad`` finds an input that was padded in front.
        """
        taps, steps, spread = map(self._axes, (window, stride, dilation))
        reach = [d * (t - 1) for d, t in zip(spread, taps, strict=True)]
        pads = [r // 2 for r in reach] if padding is None else [*self._axes(padding)]
        size, cut = [*self.size], 0
        if causal == "cut":
            pads[0] = cut = reach[0]
        elif causal == "pad":
            size[0] += reach[0]
            pads[0] = 0
        problem = self._problem(
            size, taps, k=k, c=self.c, stride=steps, padding=pads, dilation=spread, groups=groups,
            cut=cut, bias=bias or norm, activation=act, residual=residual,
        )  # fmt: skip
        self.layers.append(Layer(problem, bias and not norm))
        self.c, self.size = k, problem.output_shape[MAX_RANK - len(self.size) :]
        return self

    def dw(self, window: Axes, stride: Axes = 1, act: str = "none", **others: Any) -> Net:
        """Append a depthwise layer; arguments as of `conv`."""
        return self.conv(self.c, window, stride, act, groups=self.c, **others)

    def up(
        self,
        k: int,
        window: Axes,
        stride: Axes,
        *,
        padding: Axes = 0,
        more: Axes = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> Net:
        """Append a transposed layer with `k` channels of output; `more` is its output padding."""
        axes = [*map(self._axes, (window, stride, padding, more))]
        size = [
            (length - 1) * step - 2 * pad + taps + extra
            for length, taps, step, pad, extra in zip(self.size, *axes, strict=True)
        ]
        problem = self._problem(
            size, axes[0], k=self.c, c=k, stride=axes[1], padding=axes[2], groups=groups,
            bias=bias, direction="dgrad",
        )  # fmt: skip
        self.layers.append(Layer(problem, bias))
        self.c, self.size = k, tuple(size)
        return self

    def pool(self, factor: Axes) -> Net:
        """Go on with every size divided, and rounded up."""
        factors = self._axes(factor)
        self.size = tuple(-(-s // f) for s, f in zip(self.size, factors, strict=True))
        return self

    def grow(self, factor: Axes) -> Net:
        """Go on with every size multiplied, as by interpolation."""
        factors = self._axes(factor)
        self.size = tuple(s * f for s, f in zip(self.size, factors, strict=True))
        return self

    def to(self, c: int | None = None, size: Axes | None = None) -> Net:
        """Go on with another tensor: after a concatenation, a gate, a crop."""
        self.c = self.c if c is None else c
        self.size = self.size if size is None else self._axes(size)
        return self

    def fork(self) -> Net:
        """Return a branch that begins here, and writes to the same list."""
        return Net(self.c, self.size, self.layout, self.layers)

    def _axes(self, value: Axes) -> tuple[int, ...]:
        return value if isinstance(value, tuple) else (value,) * len(self.size)

    def _problem(self, size: Sequence[int], taps: Sequence[int], **fields: Any) -> ConvNd:
        rank = len(self.size)
        sizes = dict(zip("dhw"[-rank:], size, strict=True))
        sizes |= dict(zip("trs"[-rank:], taps, strict=True))
        fields |= {n: tuple(v) for n, v in fields.items() if isinstance(v, list)}
        return ConvNd(n=1, rank=rank, layout=self.layout, **sizes, **fields)


@dataclass(frozen=True, slots=True)
class Network:
    """A written network.

    Attributes:
        kind: what it is for.
        source: the paper, or the public code, that its channels and filters are from.
        write: returns it for an input of a size, at the end of its chain.
        runs: inputs that it is run on: the batch, and the size that `write` takes.
    """

    kind: str
    source: str
    write: Callable[..., Net]
    runs: tuple[tuple[int, ...], ...]
