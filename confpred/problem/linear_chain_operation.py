"""Chains of linear layers as an operation: `confpred.problem.linear_chain.LinearChain`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from confpred.problem.conv2d import ACTIVATIONS, DTYPES
from confpred.problem.device import Device
from confpred.problem.linear_chain import MOST_LAYERS, LinearChain
from confpred.problem.operation import REFERENCE, KernelSpec, Operand, Step
from confpred.problem.precision import matmul_tf32
from confpred.problem.record import Record

if TYPE_CHECKING:
    import torch

_THREADS = 256


class LinearChains:
    """Operands: ``in`` (batch, inputs), ``out`` (batch, outputs), and of layer i, from 0,
    ``weight<i>`` (features after, features before) and ``bias<i>``."""

    name = "linear_chain"
    problem: type[Record] = LinearChain
    feature_names: tuple[str, ...] = (
        "log_batch", "log_inputs", "log_hidden", "log_outputs", "layers", "dtype", "tf32",
        "activation", "bias", "last", "log_bytes", "log_intensity", "log_roofline",
    )  # fmt: skip

    def operands(self, problem: LinearChain) -> tuple[Operand, ...]:
        """Made-up weights keep the size of what passes through them, as trained ones do."""
        p = problem
        found = [
            Operand("out", (p.batch, p.outputs), p.dtype, terms=sum(p.widths[:-1])),
            Operand("in", (p.batch, p.inputs), p.dtype),
        ]
        for index, (before, after) in enumerate(pairwise(p.widths)):
            scale = min(1.0, (6.0 / before) ** 0.5)
            found.append(Operand(f"weight{index}", (after, before), p.dtype, scale=scale))
            if p.bias:
                found.append(Operand(f"bias{index}", (after,), p.dtype, scale=0.5))
        return tuple(found)

    def features(self, problem: LinearChain, device: Device) -> NDArray[np.float32]:
        """Logarithms are to base 2."""
        p = problem
        intensity = p.flops / p.minimum_bytes
        row = (
            *np.log2((p.batch, p.inputs, p.hidden, p.outputs)), p.layers,
            DTYPES.index(p.dtype), p.tf32, ACTIVATIONS.index(p.activation), p.bias, p.last,
            *np.log2((p.minimum_bytes, intensity, device.roofline_s(p))),
        )  # fmt: skip
        return np.array([row], np.float32)

    def reference(self, problem: LinearChain, output: str) -> Step:
        p = problem
        layers = range(MOST_LAYERS)
        defines = (
            ("DTYPE", f"DTYPE_{p.dtype.upper()}"),
            ("ACTIVATION", f"ACTIVATION_{p.activation.upper()}"),
            ("THREADS", _THREADS),
        )
        return Step(
            KernelSpec("reference_chain.cu", "reference_chain", defines),
            grid=(p.batch, 1, 1),
            block=(_THREADS, 1, 1),
            smem_bytes=2 * 8 * max(p.widths),
            operands=(
                REFERENCE,
                "in",
                *(f"weight{i}" for i in layers),
                *(f"bias{i}" for i in layers),
            ),
            scalars={
                "inputs": p.inputs,
                "hidden": p.hidden,
                "outputs": p.outputs,
                "layers": p.layers,
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
                activation = problem.activated(index)
                if activation != "none":
                    x = getattr(F, activation)(x)
        return x


LINEAR_CHAIN = LinearChains()
