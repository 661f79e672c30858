"""PyTorch's operators of each activation, as captured graphs have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from confpred.problem.activation import GRADIENTS

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


#: By the names of `confpred.problem.activation.ACTIVATIONS`, but for ``none``.
OPERATORS: Mapping[str, Operators] = {
    name: Operators(
        getattr(aten, row.forward or name).default, getattr(aten, row.operator).default,
        row.forward_arguments, row.arguments, row.saves_output,
    )
    for name, row in GRADIENTS.items() if row is not None
}  # fmt: skip
#: Names by the operator of the forward pass.
NAMES: dict[Any, str] = {row.forward: name for name, row in OPERATORS.items()}
