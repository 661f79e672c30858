"""Whether a call is of the same kind as a former one, asked in one call of C++.

What serves a call is looked up by the shapes, strides, dtypes and devices of its tensors. In a
network each layer comes with the same ones at each step, and to fetch them from the tensors costs
the host more than the lookup: Python's caches are cold between two layers. The guards of
`torch.compile` compare all of them at once, and the types and the dispatch keys with them, which
differ under autocast, inference mode, transforms, tracers and modes of dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def _never(*_: Tensor) -> bool:
    return False


def guard(*tensors: Tensor) -> Callable[..., bool]:
    """A function that tells of as many tensors whether they agree with `tensors`, one by one, in
    type, dispatch keys (also those of the thread), dtype, device, shape, strides and
    ``requires_grad``. It keeps none of them alive."""
    if _TensorGuards is None:
        return _never
    guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return guards.check  # type: ignore[no-any-return]
