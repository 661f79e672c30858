"""What a site does at a call: one fused call, plain PyTorch, or one operator of `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from confpred.network.chains import Site
from confpred.network.modules import STEPS, eps_of, geometry_of, norm_tensors
from confpred.network.operators import conv2d_norm, fold
from confpred.pytorch.directions import forward
from confpred.pytorch.fallback import activate

CHANNELS_LAST = torch.channels_last


class FusedCall:
    """A site as one call, with tensors without gradients on any device.

    Its filter and its bias are kept in a dictionary: that of the convolution's parameters, or one
    with copies that the norm has been folded into, or that autocast's dtype has been given.
    """

    __slots__ = (
        "_activation", "_cast", "_channels", "_geometry", "_kept", "_margin", "_site",
    )  # fmt: skip

    def __init__(self, site: Site, kept: Mapping[str, Any], cast: torch.dtype | None) -> None:
        self._site, self._kept, self._cast = site, kept, cast
        self._activation = site.activation
        self._geometry = geometry_of(site.convolution)
        stride, padding, dilation, _ = self._geometry
        sizes = site.convolution.kernel_size
        self._channels = site.convolution.out_channels
        # The output's height and width are (size + margin) // stride.
        self._margin = tuple(
            2 * padding[i] - dilation[i] * (sizes[i] - 1) - 1 + stride[i] for i in range(2)
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if x.dim() != 4:  # no batch
            return PlainCall(self._site)(x, residual)
        kept, cast = self._kept, self._cast
        if cast is not None and x.dtype is not cast:
            x = x.to(cast)
        if residual is None or self._fits(x, residual):
            return forward(
                x, kept["weight"], kept["bias"], residual, self._geometry, self._activation
            )
        # A sum that promotes or broadcasts is PyTorch's.
        out = forward(x, kept["weight"], kept["bias"], None, self._geometry, "none")
        return activate(self._activation, out + residual)

    def _fits(self, x: Tensor, residual: Tensor) -> bool:
        """Whether `residual` has the dtype and the shape of the output."""
        if type(residual) is not Tensor or residual.dtype is not x.dtype:
            return False
        (stride_h, stride_w), (margin_h, margin_w) = self._geometry[0], self._margin
        n, _, h, w = x.shape
        rows, columns = (h + margin_h) // stride_h, (w + margin_w) // stride_w
        return residual.shape == (n, self._channels, rows, columns)


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

    __slots__ = ("_site",)

    def __init__(self, site: Site) -> None:
        self._site = site

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        site = self._site
        convolution = site.convolution
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        # A sum that promotes is PyTorch's, and so is one that broadcasts: it has another shape.
        fits = residual is not None and residual.dtype == x.dtype
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
            0.0 if norm is None else eps_of(norm),
            residual if fits else None,
            convolution.stride,
            convolution.padding,
            convolution.dilation,
            convolution.groups,
            site.activation if fits or residual is None else "none",
        )
        return out if fits or residual is None else activate(site.activation, out + residual)
