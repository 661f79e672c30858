"""Activations: functions that follow an operation in the same kernel, by name.

An activation has the name and the defaults of a function of ``torch.nn.functional``; other slopes
of leaky ReLU are in percent at the end of the name. The formulas are in ``kernels/``, and recipe 2
of ``CONTRIBUTING.md`` adds an activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gradient:
    """PyTorch's operators of an activation, as captured graphs and autograd have them.

    Attributes:
        operator: name of the gradient's operator in ``torch.ops.aten``; it takes the gradient of
            the output, the tensor that forward saved, and `arguments`.
        saves_output: whether forward saves the activation's output, not its argument.
        forward: the operator of the forward pass, if it has another name than the activation; it
            takes the argument, and `forward_arguments`.
        in_place: arguments of the gradient's operator where the activation was computed in place
            and forward saved its output; None if they are the same.
        predicted_as: the activation for which models take this one; itself if empty.
    """

    operator: str
    arguments: tuple[float, ...] = ()
    saves_output: bool = False
    forward: str = ""
    forward_arguments: tuple[float, ...] = ()
    in_place: tuple[float, ...] | None = None
    predicted_as: str = ""


def _leaky(slope: float) -> Gradient:
    """Return the row of a leaky ReLU. A model takes it for ReLU6, which no cuDNN plan applies
    either: PyTorch's time is learned relative to the best candidate, for ReLU often a plan."""
    return Gradient(
        "leaky_relu_backward", (slope, False), forward="leaky_relu",
        forward_arguments=() if slope == 0.01 else (slope,),  # graphs leave out a default
        in_place=(slope, True), predicted_as="relu6",
    )  # fmt: skip


#: The gradients by the activations' names. The position of a name is a feature of models
#: (`activation_feature`), so a new one comes last.
GRADIENTS: Mapping[str, Gradient | None] = {
    "none": None,
    "relu": Gradient("threshold_backward", (0,), saves_output=True),
    "silu": Gradient("silu_backward"),
    "gelu": Gradient("gelu_backward"),
    "relu6": Gradient(
        "hardtanh_backward", (0.0, 6.0), forward="hardtanh", forward_arguments=(0.0, 6.0)
    ),
    "hardswish": Gradient("hardswish_backward"),
    "leaky_relu": _leaky(0.01),
    "leaky_relu_10": _leaky(0.1),
    "leaky_relu_20": _leaky(0.2),
}
ACTIVATIONS = tuple(GRADIENTS)


def activation_feature(name: str) -> int:
    """Return the number of an activation among the features of models."""
    gradient = GRADIENTS[name]
    return ACTIVATIONS.index((gradient and gradient.predicted_as) or name)


def activation_macro(name: str) -> tuple[str, str]:
    """Return the macro ``ACTIVATION`` of the kernels."""
    return "ACTIVATION", f"ACTIVATION_{name.upper()}"


def activated(name: str, x: Tensor, *, in_place: bool = False) -> Tensor:
    """Return `x` after the activation `name`, by PyTorch's operator; `in_place` overwrites `x`."""
    import torch

    gradient = GRADIENTS[name]
    if gradient is None:
        return x
    operator = getattr(torch.ops.aten, (gradient.forward or name) + "_" * in_place)
    out: Tensor = operator(x, *gradient.forward_arguments)
    return out


def saved_of(name: str, argument: Tensor) -> Tensor:
    """Return the tensor that autograd saves where the activation `name` follows `argument`."""
    gradient = GRADIENTS[name]
    return activated(name, argument) if gradient and gradient.saves_output else argument


def argument_grad(name: str, grad: Tensor, saved: Tensor) -> Tensor:
    """Return the gradient of the argument of activation `name`, from the gradient of its output and
    the tensor `saved`."""
    import torch

    gradient = GRADIENTS[name]
    if gradient is None:
        return grad
    operator = getattr(torch.ops.aten, gradient.operator)
    before: Tensor = operator(grad, saved, *gradient.arguments)
    return before
