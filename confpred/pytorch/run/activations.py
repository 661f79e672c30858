"""PyTorch's operators of each activation, as captured graphs have them: a row an activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Operators:
    """Operators of one activation.

    Attributes:
        forward: takes the argument, then `arguments`.
        gradient: takes the gradient, what is saved, then `gradient_arguments`.
        saves_result: the result of `forward` is saved, and not its argument.
    """

    forward: Any
    gradient: Any
    arguments: tuple[Any, ...] = ()
    gradient_arguments: tuple[Any, ...] = ()
    saves_result: bool = False


_SIX = (0.0, 6.0)
#: By the names of `confpred.problem.conv2d.ACTIVATIONS`, but for ``none``.
OPERATORS: Mapping[str, Operators] = {
    "relu": Operators(
        aten.relu.default, aten.threshold_backward.default,
        gradient_arguments=(0,), saves_result=True,
    ),
    "silu": Operators(aten.silu.default, aten.silu_backward.default),
    "gelu": Operators(aten.gelu.default, aten.gelu_backward.default),
    "relu6": Operators(aten.hardtanh.default, aten.hardtanh_backward.default, _SIX, _SIX),
    "hardswish": Operators(aten.hardswish.default, aten.hardswish_backward.default),
}  # fmt: skip
#: Names by the operator of the forward pass.
NAMES: dict[Any, str] = {row.forward: name for name, row in OPERATORS.items()}
