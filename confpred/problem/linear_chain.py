"""Linear chains: linear layers one after the other, with a bias and an activation after each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from confpred.errors import InvalidProblem
from confpred.problem.activation import (
    ACTIVATIONS,
    activated,
    activation_feature,
    activation_macro,
)
from confpred.problem.conv2d import DTYPES, dtype_macro
from confpred.problem.device import Device
from confpred.problem.operation import REFERENCE, KernelSpec, Operand, Step
from confpred.problem.precision import matmul_tf32
from confpred.problem.record import Record

if TYPE_CHECKING:
    import torch

#: A longer chain is computed in parts.
MOST_LAYERS = 8
#: The reference holds two rows of float64 in the shared memory of a block.
MOST_WIDTH = 14_336


@dataclass(frozen=True, slots=True)
class LinearChain(Record):
    """``x = activation(x @ weight.T + bias)``, layer after layer.

    Attributes:
        batch: rows of the input.
        inputs, hidden, outputs: features of the input, of what lies between two layers, and of the
            output; `hidden` is that of the output where there is one layer.
        layers: how many.
        dtype: of all tensors; sums are in float32.
        tf32: whether float32 inputs may be rounded to TF32.
        activation: after each layer.
        bias: whether the layers have one.
        last: whether the activation follows the last layer too.

    Raises:
        InvalidProblem: a field is out of range, or does not go with the others.
    """

    LIMITS: ClassVar[Mapping[str, tuple[int, int]]] = {
        "batch": (1, 2**20),
        **dict.fromkeys(("inputs", "hidden", "outputs"), (1, MOST_WIDTH)),
        "layers": (1, MOST_LAYERS),
    }
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {"dtype": DTYPES, "activation": ACTIVATIONS}

    batch: int
    inputs: int
    hidden: int
    outputs: int
    layers: int
    dtype: str = "float16"
    tf32: bool = False
    activation: str = "relu"
    bias: bool = True
    last: bool = True

    def __post_init__(self) -> None:
        Record.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        if self.tf32 and self.dtype != "float32":
            raise InvalidProblem("tf32", self.tf32, f"false with dtype {self.dtype}")
        if self.layers == 1 and self.hidden != self.outputs:
            raise InvalidProblem("hidden", self.hidden, "that of outputs where layers is 1")

    def layer(self) -> LinearChain:
        """Return the problem with fixed values for all that a user chooses: batch, dtype and
        length."""
        return LinearChain(1, self.inputs, self.hidden, self.outputs, min(self.layers, 2))

    @property
    def widths(self) -> tuple[int, ...]:
        """Features before the first layer, between layers, and after the last one."""
        return (self.inputs, *(self.hidden,) * (self.layers - 1), self.outputs)

    @property
    def weight_elements(self) -> int:
        return sum(a * b for a, b in pairwise(self.widths))

    @property
    def minimum_bytes(self) -> int:
        """Bytes that must cross device memory: input, parameters and output once."""
        biases = sum(self.widths[1:]) if self.bias else 0
        ends = self.batch * (self.inputs + self.outputs)
        return self.itemsize * (ends + self.weight_elements + biases)

    @property
    def flops(self) -> int:
        """Multiplications plus additions of ordinary products."""
        return 2 * self.batch * self.weight_elements

    def activated(self, index: int) -> str:
        """Return the activation after layer `index`."""
        return self.activation if self.last or index < self.layers - 1 else "none"


_THREADS = 256


class LinearChains:
    """The operation. Operands: ``in`` (batch, inputs), ``out`` (batch, outputs), and of layer i,
    from 0, ``weight<i>`` (features after, features before) and ``bias<i>``."""

    name = "linear_chain"
    problem: type[Record] = LinearChain
    feature_names: tuple[str, ...] = (
        "log_batch", "log_inputs", "log_hidden", "log_outputs", "layers", "dtype", "tf32",
        "activation", "bias", "last", "log_bytes", "log_intensity", "log_roofline",
    )  # fmt: skip

    def operands(self, problem: LinearChain) -> tuple[Operand, ...]:
        """Return the operands. Made-up weights keep the size of what passes through them, as
        trained ones do."""
        p = problem
        operands = [
            Operand("out", (p.batch, p.outputs), p.dtype, terms=sum(p.widths[:-1])),
            Operand("in", (p.batch, p.inputs), p.dtype),
        ]
        for index, (before, after) in enumerate(pairwise(p.widths)):
            scale = min(1.0, (6.0 / before) ** 0.5)
            operands.append(Operand(f"weight{index}", (after, before), p.dtype, scale=scale))
            if p.bias:
                operands.append(Operand(f"bias{index}", (after,), p.dtype, scale=0.5))
        return tuple(operands)

    def features(self, problem: LinearChain, device: Device) -> NDArray[np.float32]:
        """Return the features. Logarithms are to base 2."""
        p = problem
        intensity = p.flops / p.minimum_bytes
        row = (
            *np.log2((p.batch, p.inputs, p.hidden, p.outputs)), p.layers,
            DTYPES.index(p.dtype), p.tf32, activation_feature(p.activation), p.bias, p.last,
            *np.log2((p.minimum_bytes, intensity, device.roofline_s(p))),
        )  # fmt: skip
        return np.array([row], np.float32)

    def reference(self, problem: LinearChain, output: str) -> Step:
        p = problem
        layers = range(MOST_LAYERS)
        weights, biases = ([f"{name}{i}" for i in layers] for name in ("weight", "bias"))
        return Step(
            KernelSpec(
                "reference_chain.cu",
                "reference_chain",
                (dtype_macro(p), activation_macro(p.activation), ("THREADS", _THREADS)),
            ),
            grid=(p.batch, 1, 1),
            block=(_THREADS, 1, 1),
            smem_bytes=2 * 8 * max(p.widths),
            operands=(REFERENCE, "in", *weights, *biases),
            scalars={
                **{name: getattr(p, name) for name in ("inputs", "hidden", "outputs", "layers")},
                "last": int(p.last),
                "widest": max(p.widths),
            },
        )

    def pytorch(self, problem: LinearChain, tensors: Mapping[str, torch.Tensor]) -> Any:
        import torch.nn.functional as F

        x = tensors["in"]
        with matmul_tf32(problem.tf32):
            for index in range(problem.layers):
                x = F.linear(x, tensors[f"weight{index}"], tensors.get(f"bias{index}"))
                x = activated(problem.activated(index), x)
        return x


LINEAR_CHAIN = LinearChains()
