"""confpred: the best kernel configuration for a convolution, in a millisecond.

Importing this package does no work; names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from confpred.choice import Choice as Choice
    from confpred.device import Device as Device
    from confpred.device import get_device as get_device
    from confpred.ops import conv2d as conv2d
    from confpred.ops import use_predictor as use_predictor
    from confpred.predictor import Predictor as Predictor
    from confpred.problem import Problem as Problem

__version__ = "0.1.0"
_WHERE = {
    "Choice": "confpred.choice",
    "Device": "confpred.device",
    "Predictor": "confpred.predictor",
    "Problem": "confpred.problem",
    "conv2d": "confpred.ops",
    "get_device": "confpred.device",
    "use_predictor": "confpred.ops",
}
__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
