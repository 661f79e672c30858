"""The forward of a convolution in a network that trains: `confpred.conv2d` in place of PyTorch's."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from confpred.network.instance_forward import InstanceForward
from confpred.network.modules import geometry_of
from confpred.pytorch.conv2d import conv2d


class SwappedForward(InstanceForward):
    """The forward of one ``nn.Conv2d`` by confpred's kernels, with gradients."""

    def __init__(self, module: nn.Module, settings: Any = None) -> None:
        super().__init__(module, settings)
        self._geometry = geometry_of(module)  # type: ignore[arg-type]

    def __call__(self, x: Tensor) -> Tensor:
        module = self._module()
        if x.dim() != 4:
            unbatched: Tensor = self.original(x)
            return unbatched
        stride, padding, dilation, groups = self._geometry
        return conv2d(
            x,
            module.weight,  # type: ignore[union-attr, arg-type]
            module.bias,  # type: ignore[union-attr, arg-type]
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
        )
