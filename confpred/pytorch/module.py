"""What `torch.nn.Conv2d` calls: the way of its dense layers to PyTorch's function.

A function in between takes the host two microseconds a layer inside a network, of which most layers
are dense; a method in place of another takes nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.utils import _pair  # noqa: F401 (of the text that TorchScript reads)

from confpred.pytorch import choosing
from confpred.pytorch.choosing import latest
from confpred.pytorch.fallback import PYTORCH_CONV2D, PYTORCH_CONV_FORWARD
from confpred.pytorch.routing import conv2d

_is_dynamo = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled


def _conv_forward(
    self: torch.nn.Conv2d, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """``torch.nn.Conv2d._conv_forward``, while enabled."""
    # Another one may have patched the function after us; and `torch.compile` knows the functions of
    # `torch.nn.functional` only, whatever they are when it first looks.
    if _is_dynamo() or self.padding_mode != "zeros" or F.conv2d is not conv2d:
        return PYTORCH_CONV_FORWARD(self, input, weight, bias)  # type: ignore[no-any-return]
    groups, run = self.groups, conv2d
    if groups == 1:
        known = latest.get(id(weight))
        if not choosing.may_serve_dense or (
            known is not None
            and known[0] is None  # as `conv2d` would find out, which takes twice as long
            and known[2] is (_is_grad_enabled() and weight.requires_grad)
            and known[1](input)
        ):
            run = PYTORCH_CONV2D
    return run(input, weight, bias, self.stride, self.padding, self.dilation, groups)


# `torch.jit.script` reads the text of this, and looks its names up in this module.
_conv_forward.__wrapped__ = PYTORCH_CONV_FORWARD  # type: ignore[attr-defined]
conv_forward = _conv_forward  # a scripted method has the name of its function
