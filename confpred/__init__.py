"""confpred: the best kernel configuration for a convolution, in a millisecond.

Importing this package does no work; names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from confpred._version import __version__

if TYPE_CHECKING:
    from confpred.predict.choice import Choice as Choice
    from confpred.predict.explain import LayerExplanation as LayerExplanation
    from confpred.predict.explain import explain_layer as explain_layer
    from confpred.predict.predictor import Predictor as Predictor
    from confpred.problem.conv import ConvNd as ConvNd
    from confpred.problem.conv2d import Problem as Problem
    from confpred.problem.device import Device as Device
    from confpred.problem.device import get_device as get_device
    from confpred.problem.limits import Limits as Limits
    from confpred.pytorch.eager import conv2d as conv2d
    from confpred.pytorch.eager import convolution as convolution
    from confpred.pytorch.eager import disable as disable
    from confpred.pytorch.eager import enable as enable
    from confpred.pytorch.eager import enabled as enabled
    from confpred.pytorch.explain import Explanation as Explanation
    from confpred.pytorch.explain import explain as explain
    from confpred.pytorch.linear_chain import linear_chain as linear_chain
    from confpred.pytorch.network import optimize as optimize
    from confpred.pytorch.network import revert as revert
    from confpred.pytorch.plan import prepare as prepare
    from confpred.pytorch.plan import record_plan as record_plan
    from confpred.pytorch.run.choosing import use_plan as use_plan
    from confpred.pytorch.run.choosing import use_predictor as use_predictor
    from confpred.pytorch.status import Status as Status
    from confpred.pytorch.status import status as status
    from confpred.pytorch.status import verbose as verbose
    from confpred.pytorch.tuned import tuned as tuned

_WHERE = {
    "Choice": "confpred.predict.choice",
    "ConvNd": "confpred.problem.conv",
    "Device": "confpred.problem.device",
    "Explanation": "confpred.pytorch.explain",
    "LayerExplanation": "confpred.predict.explain",
    "Limits": "confpred.problem.limits",
    "Predictor": "confpred.predict.predictor",
    "Problem": "confpred.problem.conv2d",
    "Status": "confpred.pytorch.status",
    "conv2d": "confpred.pytorch.eager",
    "convolution": "confpred.pytorch.eager",
    "disable": "confpred.pytorch.eager",
    "enable": "confpred.pytorch.eager",
    "enabled": "confpred.pytorch.eager",
    "explain": "confpred.pytorch.explain",
    "explain_layer": "confpred.predict.explain",
    "get_device": "confpred.problem.device",
    "linear_chain": "confpred.pytorch.linear_chain",
    "optimize": "confpred.pytorch.network",
    "prepare": "confpred.pytorch.plan",
    "record_plan": "confpred.pytorch.plan",
    "revert": "confpred.pytorch.network",
    "status": "confpred.pytorch.status",
    "tuned": "confpred.pytorch.tuned",
    "use_plan": "confpred.pytorch.run.choosing",
    "use_predictor": "confpred.pytorch.run.choosing",
    "verbose": "confpred.pytorch.status",
}
__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
