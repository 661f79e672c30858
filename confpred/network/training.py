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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confpred.network.instance_forward import (
    InstanceForward,
    forget_method,
    install_method,
)
from confpred.network.modules import (
    autocast_dtype,
    is_convolution,
    is_counting_norm,
    is_linear,
)
from confpred.pytorch.fallback import PYTORCH_CONV2D
from confpred.pytorch.quiet import rests
from confpred.pytorch.routing import conv2d
from confpred.pytorch.streams import current_device, empty
from confpred.pytorch.tracing import constant_while_compiling

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


@dataclass(frozen=True, slots=True)
class Together:
    """How a model's layers work together.

    Attributes:
        running: what their forwards share.
        refused: names, in the model, of the layers that are to be left alone.
    """

    running: Running
    refused: frozenset[str]


class TrainingRoot(InstanceForward):
    """The forward of a whole model, around which is done what its layers do together."""

    def __init__(self, module: nn.Module, settings: Together) -> None:
        super().__init__(module, settings)
        self._running = settings.running
        self._chunks: list[tuple[nn.Module, ...]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._prepare()
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

    @constant_while_compiling
    def _prepare(self) -> None:
        """Before the first call: the layers, which have lost their forwards if the model comes from
        a pickle."""
        model = self._module()
        if self._chunks is None and model is not None:
            served = give_forwards(model, self._settings)
            layers = [m for m in served if isinstance(m, (nn.Conv2d, nn.Linear))]
            self._chunks = [
                tuple(layers[i : i + _CHUNK]) for i in range(0, len(layers), _CHUNK)
            ]  # fmt: skip

    def _parameters(self, dtype: torch.dtype) -> Iterable[list[Tensor]]:
        """The parameters that are to be cast, in chunks."""
        for chunk in self._chunks or ():
            found = {
                id(p): p
                for layer in chunk
                for p in layer._parameters.values()
                if p is not None and p.is_cuda and p.requires_grad and p.dtype is torch.float32
            }
            if found and dtype is not torch.float32:
                yield list(found.values())


Forward = Callable[..., Tensor]  # of a module and its input


def _convolution(running: Running, _: type[nn.Module]) -> Forward:
    def forward(self: nn.Conv2d, x: Tensor) -> Tensor:
        geometry = self.stride, self.padding, self.dilation, self.groups
        if _is_dynamo():
            return conv2d(x, self.weight, self.bias, *geometry)
        weight, bias = _tensors(self, running)
        if rests(self.__dict__):
            return PYTORCH_CONV2D(x, weight, bias, *geometry)  # type: ignore[arg-type]
        return conv2d(x, weight, bias, *geometry, layer=self)

    return forward


def _linear(running: Running, _: type[nn.Module]) -> Forward:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        if _is_dynamo():
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, *_tensors(self, running))

    return forward


def _norm(running: Running, kind: type[nn.Module]) -> Forward:
    """A batch norm's: its count of steps is raised with all others'."""
    original = kind.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        if _is_dynamo() or not running.active or not self.training or x.dim() != 4:
            return original(self, x)  # type: ignore[no-any-return]
        buffers, parameters = self._buffers, self._parameters
        out = F.batch_norm(
            x, buffers["running_mean"], buffers["running_var"], parameters["weight"],
            parameters["bias"], True, self.momentum, self.eps,
        )  # fmt: skip
        running.counts.append(buffers["num_batches_tracked"])
        if self._modules:
            out = self.act(self.drop(out))
        return out

    return forward


def _tensors(layer: nn.Module, running: Running) -> tuple[Any, Any]:
    """Weight and bias of a layer, or the copies of them where there are some."""
    parameters = layer._parameters
    weight: Tensor | None = parameters["weight"]
    bias: Tensor | None = parameters["bias"]
    copies = running.copies
    # A model may turn autocast off, or to another dtype, for some of its layers.
    if copies and running.dtype is autocast_dtype("cuda"):
        weight = copies.get(id(weight), weight)
        bias = None if bias is None else copies.get(id(bias), bias)
    return weight, bias


_FORWARDS: tuple[tuple[Callable[[nn.Module], bool], Callable[..., Forward]], ...] = (
    (is_convolution, _convolution),
    (is_linear, _linear),
    (is_counting_norm, _norm),
)


def is_trainable(module: nn.Module) -> bool:
    """Whether `module` is a layer that has a forward here."""
    return any(is_kind(module) for is_kind, _ in _FORWARDS)


def train_together(model: nn.Module, refused: frozenset[str]) -> None:
    """Give `model` and its layers these forwards, but for the layers called `refused`."""
    together = Together(Running(), refused)
    if give_forwards(model, together) and "forward" not in model.__dict__:
        TrainingRoot.install(model, together)


def give_forwards(model: nn.Module, together: Together) -> list[nn.Module]:
    """Give the layers of `model` their forwards, those that a pickle has lost included.

    A layer's forward is a method, the same function for all layers of a class: what
    `torch.compile` has to look at before each call of a program is then what it is without us,
    where a callable of its own on each layer would cost it two microseconds a layer.

    Returns:
        The layers that have one.
    """
    methods: dict[type[nn.Module], Forward] = {}
    served = []
    for name, module in list(model.named_modules()):
        forget_method(module)
        if name in together.refused:
            continue
        for is_kind, forward in _FORWARDS:
            if is_kind(module):
                kind = type(module)
                if kind not in methods:
                    methods[kind] = forward(together.running, kind)
                install_method(module, methods[kind])
                served.append(module)
    return served
