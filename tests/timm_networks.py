"""timm on machines where torchvision does not load.

Its wheels are built for CUDA, and beside a PyTorch for the CPU they fail with ``operator
torchvision::nms does not exist``. timm's networks need none of it: timm gets modules that have the
names which it imports.
"""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import nn

_MODULES = (
    "torchvision", "torchvision.datasets", "torchvision.models",
    "torchvision.models.feature_extraction", "torchvision.ops", "torchvision.ops.misc",
    "torchvision.transforms", "torchvision.transforms.functional", "torchvision.utils",
)  # fmt: skip


class _Interpolation(Enum):
    NEAREST, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = range(6)


class _Stub(ModuleType):
    """A module in which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Interpolation if name == "InterpolationMode" else type(name, (nn.Module,), {})
        setattr(self, name, made)
        return made


def stand_in() -> None:
    """Let stubs stand in for torchvision in this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in _MODULES:
        sys.modules[name] = _Stub(name)
        if "." in name:
            parent, _, last = name.rpartition(".")
            setattr(sys.modules[parent], last, sys.modules[name])


def timm() -> Any:
    """Return the package, imported beside torchvision or without it."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        stand_in()
    import timm as package

    return package


def made(name: str, size: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a network of timm's with random weights and statistics that matter, and two images.

    Args:
        name: as of ``timm.create_model``.
        size: of the images; 0 for what the network asks for.
    """
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_classes": 10}
    model = timm().create_model(name, **options)
    wanted = model.default_cfg["input_size"][1] if model.default_cfg.get("fixed_input_size") else 0
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.normal_(module.running_mean, std=0.1)
            if module.weight is not None:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.1)
    side = size or wanted or 64
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    return model, images
