"""What a site does at a call: one fused call, plain PyTorch, or one operator of `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confpred import __version__
from confpred.network.chains import Program, Site
from confpred.network.modules import autocast_dtype, eps_of, geometry_of, norm_tensors
from confpred.network.operators import conv2d_norm, fold, may_be_folded
from confpred.pytorch.directions import forward
from confpred.pytorch.fallback import activate
from confpred.pytorch.operators import written
from confpred.pytorch.tracing import decision_key, dense_may_be_ours

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
            site = self._site
            return plain_call(site.convolution, site.norm, site.activation, x, residual)
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


def plain_call(
    convolution: nn.Conv2d,
    norm: nn.Module | None,
    activation: str,
    x: Tensor,
    residual: Tensor | None,
) -> Tensor:
    """A site by the operations of its modules, which `torch.compile` fuses by itself."""
    out: Tensor = F.conv2d(
        x,
        convolution.weight,
        convolution.bias,
        convolution.stride,
        convolution.padding,
        convolution.dilation,
        convolution.groups,
    )
    if norm is not None:
        weight, bias, mean, variance = norm_tensors(norm)
        out = F.batch_norm(out, mean, variance, weight, bias, False, 0.0, eps_of(norm))
    return activate(activation, out if residual is None else out + residual)


class TracedCall(nn.Module):
    """A site while `torch.compile` traces it: of plain operations, or, of a layer that may be ours,
    as one operator that is not looked into."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.convolution, self.norm, self.activation = site.convolution, site.norm, site.activation
        if site.norm is not None:
            may_be_folded(site.norm)
        self.is_dense = site.convolution.groups == 1
        self.tell(None)

    def tell(self, layer_ms: float | None) -> None:
        """Write down what the operator is told, as the compiler is not to look into it; of the
        version, as PyTorch keeps programs on disk."""
        sizes, geometry = (*self.convolution.weight.shape,), geometry_of(self.convolution)
        eps = 0.0 if self.norm is None else eps_of(self.norm)
        self.fused = written(sizes, geometry, self.activation, eps, __version__, layer_ms)
        self.apart = written(sizes, geometry, "none", eps, __version__, layer_ms)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        convolution, norm, activation = self.convolution, self.norm, self.activation
        if self.is_dense and not dense_may_be_ours():
            return plain_call(convolution, norm, activation, x, residual)
        cast = autocast_dtype(x.device.type)
        x = x if cast is None else x.to(cast)
        # A sum that promotes is PyTorch's, and so is one that broadcasts: it has another shape.
        fits = residual is None or residual.dtype == x.dtype
        weight, bias, mean, variance = (None,) * 4 if norm is None else norm_tensors(norm)
        out: Tensor = conv2d_norm(
            x,
            convolution.weight,
            convolution.bias,
            weight,
            bias,
            mean,
            variance,
            residual if fits else None,
            self.fused if fits else self.apart,
            decision_key(x.device.index) if x.is_cuda else __version__,
        )
        return out if fits or residual is None else activate(activation, out + residual)


class TracedCalls(nn.Module):
    """What a program calls while `torch.compile` traces it.

    Modules, each reached by one way: of what else the trace looks at, the compiled code would ask
    Python before each call whether it is still the same. Where the trace looks at nothing but the
    dictionaries of modules, PyTorch may ask once for all of them whether any has changed.

    Attributes:
        run: the program's function, which is called with this.
        modes: the modules that do something else in training, other than the sites' norms.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.run = program.run
        for name, call in program.others.items():
            setattr(self, name, call)
        for name, site in program.sites.items():
            setattr(self, name, TracedCall(site))
        norms = {site.norm for site in program.sites.values()}
        self.modes = nn.ModuleList(m for m in program.modes if m not in norms)

    def tell(self, layer_ms: float | None) -> None:
        """Tell all sites what PyTorch's operators take for a layer of the network, on average."""
        for call in self._modules.values():
            if isinstance(call, TracedCall):
                call.tell(layer_ms)

    def evaluates(self) -> bool:
        """Whether none of the modules that do something else in training is to train."""
        # A loop over the list looks at more than dictionaries: each site would be asked by itself.
        for module in self.modes._modules.values():
            if module.training:
                return False
        for call in self._modules.values():
            if isinstance(call, TracedCall) and call.norm is not None and call.norm.training:
                return False
        return True
