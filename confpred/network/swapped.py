"""The forward of a convolution in a network that trains: by kernels of ours, not PyTorch's."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from confpred.network.instance_forward import InstanceForward
from confpred.network.modules import geometry_of
from confpred.pytorch.layers import Geometry
from confpred.pytorch.routing import conv2d


class SwappedForward(InstanceForward):
    """The forward of one ``nn.Conv2d`` by confpred's kernels, with gradients."""

    def __init__(self, module: nn.Module, settings: Any = None) -> None:
        super().__init__(module, settings)
        # A module that is being copied has no sizes yet.
        self._geometry: Geometry | None = None

    def __call__(self, x: Tensor) -> Tensor:
        module = self._module()
        if x.dim() != 4:
            unbatched: Tensor = self.original(x)
            return unbatched
        geometry = self._geometry
        if geometry is None:
            geometry = self._geometry = geometry_of(module)  # type: ignore[arg-type]
        parameters = module._parameters  # type: ignore[union-attr]
        return conv2d(x, parameters["weight"], parameters["bias"], *geometry)  # type: ignore[arg-type]
