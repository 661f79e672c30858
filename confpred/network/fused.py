"""What a site does at a call: one fused call, plain PyTorch, or one operator of `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from confpred.network.chains import Site
from confpred.network.modules import STEPS, autocast_dtype, eps_of, geometry_of, norm_tensors
from confpred.network.operators import conv2d_norm, fold
from confpred.pytorch.directions import forward
from confpred.pytorch.fallback import activate
from confpred.pytorch.operators import written

CHANNELS_LAST = torch.channels_last


class FusedCall:
    """A site as one call, with tensors without gradients on any device.

    Its filter and its bias are kept in a dictionary: that of the convolution's parameters, or one
    with copies that the norm has been folded into, or that autocast's dtype has been given.
    """

    __slots__ = ("_activation", "_cast", "_geometry", "_kept", "_site")

    def __init__(self, site: Site, kept: Mapping[str, Any], cast: torch.dtype | None) -> None:
        self._site, self._kept, self._cast = site, kept, cast
        self._activation = site.activation
        self._geometry = geometry_of(site.convolution)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if x.dim() != 4:  # no batch
            return PlainCall(self._site)(x, residual)
        kept, cast = self._kept, self._cast
        if cast is not None and x.dtype is not cast:
            x = x.to(cast)
        weight, bias = kept["weight"], kept["bias"]
        return forward(x, weight, bias, residual, self._geometry, self._activation, id(self))


def fused_call(site: Site, cast: torch.dtype | None, channels_last: bool) -> FusedCall:
    """The call of `site` with its parameters as they are now, in autocast's dtype where `cast` is
    one; it has to be made again when they change, unless there is neither a norm nor a cast."""
    convolution = site.convolution
    if site.norm is None and cast is None:
        return FusedCall(site, convolution._parameters, None)
    weight, bias = convolution.weight.detach(), convolution.bias
    bias = None if bias is None else bias.detach()
    dtype = weight.dtype if cast is None else cast
    if site.norm is not None:
        norm: list[Any] = norm_tensors(site.norm)
        weight, bias = fold(weight, bias, *(*norm, eps_of(site.norm)))
    layout = CHANNELS_LAST if channels_last else torch.contiguous_format
    kept = {
        "weight": weight.to(dtype).contiguous(memory_format=layout),
        "bias": None if bias is None else bias.to(dtype),
    }
    return FusedCall(site, kept, cast)


class PlainCall:
    """A site by the operations of its modules, which `torch.compile` fuses by itself."""

    __slots__ = ("_site",)

    def __init__(self, site: Site) -> None:
        self._site = site

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        site = self._site
        convolution = site.convolution
        out: Tensor = F.conv2d(
            x,
            convolution.weight,
            convolution.bias,
            convolution.stride,
            convolution.padding,
            convolution.dilation,
            convolution.groups,
        )
        norm = site.norm
        if norm is not None:
            weight, bias, mean, variance = norm_tensors(norm)
            out = F.batch_norm(out, mean, variance, weight, bias, False, 0.0, eps_of(norm))
        return activate(site.activation, out if residual is None else out + residual)


class OperatorCall:
    """A site as one operator that `torch.compile` does not look into."""

    __slots__ = ("_apart", "_fused", "_site")

    def __init__(self, site: Site) -> None:
        self._site = site
        sizes, geometry = (*site.convolution.weight.shape,), geometry_of(site.convolution)
        eps = 0.0 if site.norm is None else eps_of(site.norm)
        # Written here, as the compiler is not to look into it.
        self._fused = written(sizes, geometry, site.activation, eps)
        self._apart = written(sizes, geometry, "none", eps)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        site = self._site
        convolution = site.convolution
        cast = autocast_dtype(x.device.type)
        x = x if cast is None else x.to(cast)
        # A sum that promotes is PyTorch's, and so is one that broadcasts: it has another shape.
        fits = residual is None or residual.dtype == x.dtype
        norm = site.norm
        weight, bias, mean, variance = (None,) * 4 if norm is None else norm_tensors(norm)
        out = conv2d_norm(
            x,
            convolution.weight,
            convolution.bias,
            weight,
            bias,
            mean,
            variance,
            None if norm is None else norm._buffers.get(STEPS),
            residual if fits else None,
            self._fused if fits else self._apart,
        )
        return out if fits else activate(site.activation, out + residual)
