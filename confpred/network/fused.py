"""What a site does at a call: one fused call, plain PyTorch, or one operator of `torch.compile`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from confpred.network.chains import Site
from confpred.network.modules import geometry_of, norm_tensors
from confpred.network.operators import conv2d_norm, fold
from confpred.pytorch.directions import activate, forward

CHANNELS_LAST = torch.channels_last


class FusedCall:
    """A site whose norm has been folded into its own copy of the filter.

    The call takes tensors without gradients on any device, and computes in the dtype of the copy
    where autocast asked for that.
    """

    __slots__ = (
        "_activation", "_bias", "_cast", "_channels", "_geometry", "_rows", "_weight",
    )  # fmt: skip

    def __init__(self, site: Site, dtype: torch.dtype | None, channels_last: bool) -> None:
        """Fold `site` in `dtype`, or in the filter's own where autocast is off."""
        convolution = site.convolution
        weight, bias = convolution.weight.detach(), convolution.bias
        bias = None if bias is None else bias.detach()
        if site.norm is not None:
            norm = norm_tensors(site.norm)
            weight, bias = fold(weight, bias, *norm, site.norm.eps)  # type: ignore[arg-type]
        kept = convolution.weight.dtype if dtype is None else dtype
        layout = CHANNELS_LAST if channels_last else torch.contiguous_format
        self._weight = weight.to(kept).contiguous(memory_format=layout)
        self._bias = None if bias is None else bias.to(kept)
        self._cast = dtype
        self._geometry = geometry_of(convolution)
        self._activation = site.activation
        stride, padding, dilation, _ = self._geometry
        self._channels = convolution.out_channels
        # Height and width of the output are (size + this) // stride.
        self._rows = tuple(
            (2 * padding[i] - dilation[i] * (convolution.kernel_size[i] - 1) - 1 + stride[i])
            for i in range(2)
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        cast = self._cast
        if cast is not None and x.dtype is not cast:
            x = x.to(cast)
        if residual is None:
            return forward(
                x, self._weight, self._bias, None, self._geometry, self._activation
            )
        if self._fits(x, residual):
            return forward(
                x, self._weight, self._bias, residual, self._geometry, self._activation
            )
        # A sum that promotes or broadcasts is PyTorch's.
        out = forward(x, self._weight, self._bias, None, self._geometry, "none")
        return activate(self._activation, out + residual)

    def _fits(self, x: Tensor, residual: Tensor) -> bool:
        """Whether `residual` has the dtype and the shape of the output."""
        if type(residual) is not Tensor or residual.dtype is not x.dtype or x.dim() != 4:
            return False
        (stride_h, stride_w), rows = self._geometry[0], self._rows
        n, _, h, w = x.shape
        return residual.shape == (
            n, self._channels, (h + rows[0]) // stride_h, (w + rows[1]) // stride_w
        )  # fmt: skip


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
            out = F.batch_norm(out, mean, variance, weight, bias, False, 0.0, norm.eps)  # type: ignore[arg-type]
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
            0.0 if norm is None else norm.eps,
            residual if fits else None,
            convolution.stride,
            convolution.padding,
            convolution.dilation,
            convolution.groups,
            site.activation if fits or residual is None else "none",
        )
        return out if fits or residual is None else activate(site.activation, out + residual)
