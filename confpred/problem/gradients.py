"""Both gradients of a two-dimensional convolution as one problem, and its operation: a backward
pass that asks for both may read the output's gradient once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from confpred.problem.conv2d import CHOICES, Convolution, Problem
from confpred.problem.device import Device
from confpred.problem.operation import Operand, Step
from confpred.problem.record import Record

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Gradients(Problem):
    """The gradients of the input and of the filter of one convolution; fields as of `Problem`.

    Attributes:
        direction: ``both``.
        bias: the bias's gradient is computed too.
        deterministic: the filter's gradient must be the same to the bit at every call.
    """

    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {**CHOICES, "direction": ("both",)}

    direction: str = "both"

    def layer(self) -> Gradients:
        return replace(self, n=1, dtype="float16", bias=False, deterministic=False)

    def apart(self, direction: str) -> Problem:
        """Return the convolution of one of its two directions, ``dgrad`` or ``wgrad``."""
        fields = {name: getattr(self, name) for name in self._fields()} | {"direction": direction}
        if direction == "dgrad":
            fields |= {"bias": False, "deterministic": False}
        return Problem(**fields)

    @cached_property
    def minimum_bytes(self) -> int:
        """Bytes of the two directions, less those of one reading of the output's gradient."""
        parts = (self.apart(direction).minimum_bytes for direction in ("dgrad", "wgrad"))
        return sum(parts) - self.itemsize * self.output_elements

    @cached_property
    def flops(self) -> int:
        return 2 * self.apart("dgrad").flops


class ConvolutionGradients(Convolution):
    """Operands are named and laid out as those of `Convolution`."""

    name = "conv2d_gradients"
    problem: type[Record] = Gradients

    def operands(self, problem: Any) -> tuple[Operand, ...]:
        in_grad, out_grad, filters = super().operands(problem.apart("dgrad"))
        *outputs, _, image = super().operands(problem.apart("wgrad"))
        return (in_grad, *outputs, out_grad, image, filters)

    def features(self, problem: Any, device: Device) -> NDArray[np.float32]:
        """Return those of the filter's gradient."""
        return super().features(problem.apart("wgrad"), device)

    def reference(self, problem: Any, output: str) -> Step:
        direction = "dgrad" if output == "in_grad" else "wgrad"
        return super().reference(problem.apart(direction), output)

    def pytorch(self, problem: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return the gradients of input, filter and bias, by the call of a backward pass."""
        import torch

        p = problem
        t = {name: x.permute(0, 3, 1, 2) if x.dim() == 4 else x for name, x in tensors.items()}
        with torch.backends.cudnn.flags(
            enabled=True,
            benchmark=torch.backends.cudnn.benchmark,
            deterministic=p.deterministic,
            allow_tf32=torch.backends.cudnn.allow_tf32,
        ):
            found = torch.ops.aten.convolution_backward(
                t["out_grad"], t["in"], t["filter"], [p.k] if p.bias else None,
                p.stride, p.padding, p.dilation, False, (0, 0), p.groups, [True, True, p.bias],
            )  # fmt: skip
        return found if p.bias else found[:2]


GRADIENTS = ConvolutionGradients()
