"""The forward of a network that trains: convolutions by the fastest kernel, weights cast together.

Autocast casts every float32 weight at every step in an operator of its own, and its gradient back
in another: two launches and two nodes of the graph for each weight, which the host issues one by
one. Here the root's forward casts the weights of some dozen layers in one operator, and one node
casts their gradients back:

    root's forward --> CastTogether (a chunk of layers) --> layer's forward takes its own copy
                                 ^                                    |
                                 '------ gradients of the chunk ------'

A chunk's gradients are there when its first layer's is, so what waits for gradients, such as DDP,
still gets them in several parts. Likewise every batch norm adds one to its count of steps; the root
does so for all that ran, in one operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from confpred.network.instance_forward import InstanceForward
from confpred.network.modules import (
    autocast_dtype,
    geometry_of,
    is_convolution,
    is_counting_norm,
    is_linear,
)
from confpred.pytorch.layers import Geometry
from confpred.pytorch.routing import conv2d
from confpred.pytorch.streams import current_device, empty

_CHUNK = 24  # layers; larger saves little more, smaller makes gradients wait less
_is_dynamo = torch.compiler.is_dynamo_compiling


class Running(threading.local):
    """What a forward of the root and its layers share, in the thread that runs it.

    Attributes:
        active: whether the root is running.
        copies: the copy of a parameter, by its identity.
        dtype: of the copies.
        counts: counts of steps that are to be raised at the end.
    """

    def __init__(self) -> None:
        self.active = False
        self.copies: dict[int, Tensor] = {}
        self.dtype: torch.dtype | None = None
        self.counts: list[Tensor] = []

    def __reduce__(self) -> tuple[type[Running], tuple[()]]:
        return Running, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        return self


class _CastTogether(torch.autograd.Function):
    """Copies of parameters in another dtype."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [p.dtype for p in parameters]
        copies = tuple(_empty_like(p, dtype) for p in parameters)
        torch._foreach_copy_(copies, parameters)
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = [(g, dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True) if g is not None]
        if torch.is_grad_enabled():  # gradients of gradients
            cast = [g.to(dtype) for g, dtype in found]
        else:
            cast = [torch.empty_like(g, dtype=dtype) for g, dtype in found]
            if cast:
                torch._foreach_copy_(cast, [g for g, _ in found])
        each = iter(cast)
        return None, *(None if g is None else next(each) for g in grads)


def _empty_like(p: Tensor, dtype: torch.dtype) -> Tensor:
    if p.get_device() == current_device():
        return empty((*p.shape,), p.stride(), dtype)
    return torch.empty_like(p, dtype=dtype)


class TrainingRoot(InstanceForward):
    """The forward of a whole model, around which is done what its layers do together."""

    def __init__(self, module: nn.Module, settings: Running) -> None:
        super().__init__(module, settings)
        self._running = settings
        self._chunks: list[tuple[nn.Module, ...]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = self._running
        if _is_dynamo() or running.active:  # a model may call itself
            return self.original(*args, **kwargs)
        running.active = True
        try:
            if torch.is_autocast_enabled("cuda") and torch.is_grad_enabled():
                dtype = running.dtype = torch.get_autocast_dtype("cuda")
                for parameters in self._parameters(dtype):
                    low = _CastTogether.apply(dtype, *parameters)  # type: ignore[no-untyped-call]
                    running.copies.update(zip(map(id, parameters), low, strict=True))
            return self.original(*args, **kwargs)
        finally:
            running.active = False
            running.copies.clear()
            if running.counts:
                torch._foreach_add_(running.counts, 1)
                running.counts.clear()

    def _parameters(self, dtype: torch.dtype) -> Iterable[list[Tensor]]:
        """The parameters that are to be cast, in chunks."""
        if self._chunks is None:
            layers = [m for m in _modules(self._module()) if _has_weights(m)]
            self._chunks = [
                tuple(layers[i : i + _CHUNK]) for i in range(0, len(layers), _CHUNK)
            ]  # fmt: skip
        for chunk in self._chunks:
            found = {
                id(p): p
                for layer in chunk
                for p in layer._parameters.values()
                if p is not None and p.is_cuda and p.requires_grad and p.dtype is torch.float32
            }
            if found and dtype is not torch.float32:
                yield list(found.values())


class _Layer(InstanceForward):
    """The forward of one layer."""

    def __init__(self, module: nn.Module, settings: Running) -> None:
        super().__init__(module, settings)
        self._running = settings

    def _tensors(self) -> Sequence[Any]:
        """Weight and bias, or the copies of them where there are some."""
        parameters = self._module()._parameters  # type: ignore[union-attr]
        weight, bias = parameters["weight"], parameters["bias"]
        if not _is_dynamo():
            copies = self._running.copies
            # A model may turn autocast off, or to another dtype, for some of its layers.
            if copies and self._running.dtype is autocast_dtype("cuda"):
                weight = copies.get(id(weight), weight)
                bias = None if bias is None else copies.get(id(bias), bias)
        return weight, bias


class ConvolutionForward(_Layer):
    """The forward of one ``nn.Conv2d`` by confpred's kernels, with gradients."""

    def __init__(self, module: nn.Module, settings: Running) -> None:
        super().__init__(module, settings)
        # A module that is being copied has no sizes yet.
        self._geometry: Geometry | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._tensors()
        if _is_dynamo():  # what is kept here would have it compile anew, or for this process alone
            return conv2d(x, weight, bias, *geometry_of(self._module()))  # type: ignore[arg-type]
        if self._geometry is None:
            self._geometry = geometry_of(self._module())  # type: ignore[arg-type]
        return conv2d(x, weight, bias, *self._geometry, place=id(self))


class LinearForward(_Layer):
    """The forward of one ``nn.Linear``."""

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._tensors()
        return torch.nn.functional.linear(x, weight, bias)


class NormForward(_Layer):
    """The forward of one batch norm: its count of steps is raised with all others'."""

    def __call__(self, x: Tensor) -> Tensor:
        module: Any = self._module()
        buffers = module._buffers
        count = buffers["num_batches_tracked"]
        running = self._running
        if _is_dynamo() or not running.active or not module.training or x.dim() != 4:
            return self.original(x)  # type: ignore[no-any-return]
        parameters = module._parameters
        out = torch.nn.functional.batch_norm(
            x, buffers["running_mean"], buffers["running_var"], parameters["weight"],
            parameters["bias"], True, module.momentum, module.eps,
        )  # fmt: skip
        running.counts.append(count)
        if module._modules:
            out = module.act(module.drop(out))
        return out


_FORWARDS: tuple[tuple[Callable[[nn.Module], bool], type[_Layer]], ...] = (
    (is_convolution, ConvolutionForward),
    (is_linear, LinearForward),
    (is_counting_norm, NormForward),
)


def is_trainable(module: nn.Module) -> bool:
    """Whether `module` is a layer that has a forward here."""
    return any(is_kind(module) for is_kind, _ in _FORWARDS)


def train_together(model: nn.Module, refused: frozenset[str]) -> None:
    """Give `model` and its layers these forwards, but for the layers called `refused`."""
    running = Running()
    served = 0
    for name, module in list(model.named_modules()):
        for is_kind, forward in _FORWARDS:
            if name not in refused and is_kind(module):
                forward.install(module, running)
                served += 1
    if served and "forward" not in model.__dict__:
        TrainingRoot.install(model, running)


def _modules(model: nn.Module | None) -> Iterable[nn.Module]:
    return () if model is None else model.modules()


def _has_weights(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), (ConvolutionForward, LinearForward))
