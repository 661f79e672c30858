"""Activations by PyTorch's functions, with no code in common with confpred."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

_SLOPES = {"leaky_relu_10": 0.1, "leaky_relu_20": 0.2}


def activate(name: str | None, x: Tensor) -> Tensor:
    """Return `x` after the activation `name`; after none, `x` itself."""
    if name in _SLOPES:
        return F.leaky_relu(x, _SLOPES[name])
    return x if name in (None, "none") else getattr(F, name)(x)
