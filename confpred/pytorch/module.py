"""What `torch.nn.Conv2d` runs: the way of its layers to PyTorch's function.

Most layers of most networks are PyTorch's, and a step at a small batch waits for the host. So what
asks must cost nothing inside a network, where the processor's caches are of the layers before:
PyTorch's own method spends as long on looking its parameters up, by a function in Python for each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confpred.pytorch import quiet
from confpred.pytorch.fallback import PYTORCH_CONV2D, PYTORCH_CONV_FORWARD, PYTORCH_FORWARD
from confpred.pytorch.quiet import CALLS, MARK
from confpred.pytorch.routing import conv2d

_is_dynamo = torch.compiler.is_dynamo_compiling
_Conv2d = nn.Conv2d


def _forward(self: nn.Conv2d, input: Tensor) -> Tensor:
    """``torch.nn.Conv2d.forward``, while enabled."""
    # A subclass may compute its parameters; another one may have patched the functions after us;
    # and `torch.compile` knows the functions of `torch.nn.functional` only, whatever they are when
    # it first looks.
    if (
        _is_dynamo()
        or type(self) is not _Conv2d
        or F.conv2d is not conv2d
        or _Conv2d._conv_forward is not PYTORCH_CONV_FORWARD
    ):
        return PYTORCH_FORWARD(self, input)
    own = self.__dict__
    parameters = own["_parameters"]
    if (
        own["padding_mode"] != "zeros"
        or "_conv_forward" in own  # somebody gave this layer another one
        or "weight" in own  # as do wrappers that shard or reparametrize
        or "bias" in own
        or "weight" not in parameters
        or "bias" not in parameters
    ):
        return PYTORCH_FORWARD(self, input)
    if 0 < own.get(MARK, 0) - quiet.woken <= CALLS:  # `quiet.rests`, a call of which costs as much
        own[MARK] -= 1
        return PYTORCH_CONV2D(
            input,
            parameters["weight"],
            parameters["bias"],
            own["stride"],
            own["padding"],
            own["dilation"],
            own["groups"],
        )
    return conv2d(  # type: ignore[call-overload,no-any-return]
        input,
        parameters["weight"],
        parameters["bias"],
        own["stride"],
        own["padding"],
        own["dilation"],
        own["groups"],
        layer=self,
    )


# `torch.jit.script` reads the text of this, and looks its names up in this module.
_forward.__wrapped__ = PYTORCH_FORWARD  # type: ignore[attr-defined]
forward = _forward  # a scripted method has the name of its function


def getstate(self: nn.Conv2d) -> dict[str, Any]:
    """``torch.nn.Conv2d.__getstate__``, while enabled: copies and files have no count of ours."""
    inherited = getattr(super(_Conv2d, self), "__getstate__", None)  # not before Python 3.11
    state: dict[str, Any] = self.__dict__ if inherited is None else inherited()
    return {name: value for name, value in state.items() if name != MARK}
