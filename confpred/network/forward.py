"""The forward of an optimized module: when it may run, and what must not have changed since.

    call --+-- torch.compile ------------> the graph, by plain operations and one operator
           |-- training, gradients, -----> the class's own forward
           |   transforms, other arguments
           `-- the rest -----------------> changed since? --> traced or folded again
                                           the graph, by fused calls

What is looked at before each call is little, and in C where it can be: whether hooks are empty,
modules evaluate and have the same children, and parameters and buffers are the same tensors, of the
same version, at the same address.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as every_module

from confpred.forks import uninterrupted
from confpred.network.chains import Program, Site, fuse
from confpred.network.fused import TracedCalls, fused_call
from confpred.network.instance_forward import InstanceForward
from confpred.network.modules import autocast_dtype, is_convolution, norm_slots
from confpred.network.tracing import convolutions_of, trace
from confpred.problem.conv2d import Problem
from confpred.pytorch.streams import is_capturing
from confpred.pytorch.tracing import constant_while_compiling, mean_layer_ms

log = logging.getLogger("confpred")

_PLAIN = (Tensor, nn.Parameter)
_training = itemgetter("training")
_version = attrgetter("_version")
_needs_grad = attrgetter("requires_grad")
_building = threading.RLock()  # a trace patches PyTorch's modules for as long as it lasts
_warned = False


@dataclass(frozen=True, slots=True)
class Settings:
    """How a module is to be optimized.

    Attributes:
        refused: names, in the module, of the convolutions that are to be left alone.
        channels_last: whether the input is brought into that layout.
        layers: the convolutions of the whole network for its example inputs, if there were any.
    """

    refused: frozenset[str] = frozenset()
    channels_last: bool = True
    layers: tuple[Problem, ...] = ()

    def within(self, name: str) -> Settings:
        """The same for the submodule `name`."""
        prefix = f"{name}." if name else ""

        def cut(names: frozenset[str]) -> frozenset[str]:
            return frozenset(n[len(prefix) :] for n in names if f"{n}.".startswith(prefix))

        return replace(self, refused=cut(self.refused))


class ModuleWatch:
    """The modules that a `Program` relies on, and whether they are as they were."""

    def __init__(self, program: Program) -> None:
        relied_on = program.relied_on
        self._hooks = (
            every_module._global_forward_hooks,
            every_module._global_forward_pre_hooks,
            *(h for m in relied_on for h in (m._forward_hooks, m._forward_pre_hooks)),
        )
        self._states = tuple(m.__dict__ for m in relied_on)
        self._homes = program.children
        self._children = self._children_now()

    def _children_now(self) -> list[nn.Module | None]:
        return [*chain.from_iterable(map(dict.values, self._homes))]

    def is_same(self) -> bool:
        """Whether modules have no hooks, do not train, and have the children that they had."""
        return (
            not any(self._hooks)
            and not any(map(_training, self._states))
            and self._children_now() == self._children
        )


class TensorWatch:
    """The parameters and buffers that went into a fold, and whether they are as they were."""

    def __init__(self, sites: Iterable[Site]) -> None:
        slots: dict[tuple[int, str], tuple[Mapping[str, Tensor | None], str]] = {}
        for site in sites:
            parameters = site.convolution._parameters
            found = [(parameters, "weight"), (parameters, "bias")]
            found += [] if site.norm is None else norm_slots(site.norm)  # type: ignore[arg-type]
            slots.update({(id(home), name): (home, name) for home, name in found})
        self._held = tuple(slot for slot in slots.values() if slot[0].get(slot[1]) is not None)
        self._missing = tuple(slot for slot in slots.values() if slot[0].get(slot[1]) is None)
        self._tensors = [home[name] for home, name in self._held]
        # Versions only rise, so that their sum stays the same if each of them does.
        self._versions = sum(map(_version, self._tensors))
        self._addresses = [*map(Tensor.data_ptr, self._tensors)]  # type: ignore[arg-type]

    def is_same(self) -> bool:
        """Whether no tensor has been replaced, written to, or moved."""
        try:
            now = [home[name] for home, name in self._held]
        except KeyError:
            return False
        return (
            all(map(is_, now, self._tensors))
            and sum(map(_version, now)) == self._versions
            and [*map(Tensor.data_ptr, now)] == self._addresses  # type: ignore[arg-type]
            and not [name for home, name in self._missing if home.get(name) is not None]
        )


@dataclass(frozen=True, slots=True)
class Fold:
    """What the sites of a program do at a call, and the tensors that this was made from."""

    calls: SimpleNamespace
    watch: TensorWatch


class OptimizedForward(InstanceForward):
    """The forward of a module by its `Program`; built at the first call."""

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        super().__init__(module, settings)
        self._program: Program | None = None
        self._watch: ModuleWatch | None = None
        self._folds: dict[torch.dtype | None, Fold] = {}
        self._captured: list[Fold] = []
        self._traced: TracedCalls | None = None
        self._channels_last: bool = settings.channels_last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._call_compiled(*args, **kwargs)
        if kwargs:
            args, kwargs = self._in_order(args, kwargs)
        calls = None if kwargs else self._calls_for(args)
        if calls is None:
            return self.original(*args, **kwargs)
        if self._channels_last:
            args = tuple(_channels_last(x) for x in args)
        return self._program.run(calls, *args)  # type: ignore[union-attr]

    def _call_compiled(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or torch.is_grad_enabled() or not self._is_ready(len(args)):
            return self.original(*args, **kwargs)
        traced = self._traced
        if self._module().training or not traced.evaluates():  # type: ignore[union-attr]
            return self.original(*args)
        if self._channels_last:
            args = tuple([_channels_last(x) for x in args])
        return traced.run(traced, *args)  # type: ignore[union-attr]

    @constant_while_compiling
    def _is_ready(self, arguments: int) -> bool:
        """Whether the graph is there for so many arguments and up to date, with its sites told of
        the network; run while compiling, not compiled."""
        module = self._module()
        if module is None or module.training or not self._is_built(module):
            return False
        program, traced = self._program, self._traced
        if program is None or traced is None or len(program.arguments) != arguments:
            return False
        traced.tell(mean_layer_ms(self._settings.layers))
        return True

    def _in_order(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`args` with those of `kwargs` that are arguments of the program, if that takes all."""
        module = self._module()
        if self._program is None and module is not None and not module.training:
            self._is_built(module)
        if self._program is not None:
            names = self._program.arguments[len(args) :]
            if set(names) == kwargs.keys():
                return (*args, *(kwargs[name] for name in names)), {}
        return args, kwargs

    def _calls_for(self, args: tuple[Any, ...]) -> SimpleNamespace | None:
        """What the sites of the program are to do at this call; None: the class's own forward."""
        module = self._module()
        if module is None or not args:
            return None
        if module.training:
            self._folds = {}
            return None
        for x in args:
            if type(x) not in _PLAIN:
                return None
        if (
            torch._C._get_tracing_state() is not None
            or torch._C._functorch.peek_interpreter_stack() is not None  # vmap, grad, jvp
            or torch._C._len_torch_dispatch_stack()
            or forward_ad._current_level >= 0
            or (torch.is_grad_enabled() and _wants_gradients(module, args))
        ):
            return None
        if not self._is_built(module):
            return None
        program = self._program
        if program is None or len(args) != len(program.arguments):
            return None
        device = args[0].device.type
        cast = autocast_dtype(device)
        fold = self._folds.get(cast)
        if fold is None or not fold.watch.is_same():
            fold = self._fold(module, program, cast)
        if fold is None:
            return None
        if device == "cuda" and is_capturing():
            self._captured.append(fold)  # a graph reads the copies at their addresses
        return fold.calls

    def _is_built(self, module: nn.Module) -> bool:
        """Trace `module` where that has not been done, or its modules have changed."""
        if self._watch is not None and self._watch.is_same():
            return True
        if self._watch is not None and _every_hook():
            return False
        with uninterrupted, _building:
            self._build(module)
        return self._watch is not None and self._watch.is_same()

    def _build(self, module: nn.Module) -> None:
        settings: Settings = self._settings
        self._folds = {}
        self._program = self._watch = None
        mine = module.__dict__.pop("forward", None)  # a trace is of what the class does
        try:
            convolutions = convolutions_of(module, lambda _, name: name not in settings.refused)
            part = trace(module, convolutions)
        finally:
            if mine is not None:
                module.__dict__["forward"] = mine
        if part is None:
            return
        program = fuse(part, convolutions)
        self._traced = TracedCalls(program)
        self._program, self._watch = program, ModuleWatch(program)

    def _fold(self, module: nn.Module, program: Program, cast: torch.dtype | None) -> Fold | None:
        """Fold everything again; None where that has to wait."""
        on_gpu = torch.cuda.is_available() and any(p.is_cuda for p in module.parameters())
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return None
        with uninterrupted, _building:
            # Without a norm and a cast the parameters themselves are used, and need no watch.
            watched = [s for s in program.sites.values() if s.norm is not None or cast is not None]
            if not all(is_convolution(s.convolution) for s in watched):
                self._watch = None  # something else than a plain filter has been put there
                return None
            watch = TensorWatch(watched)
            with torch.inference_mode(False), torch.no_grad():
                made = {
                    key: fused_call(site, cast, self._channels_last)
                    for key, site in program.sites.items()
                }
            if on_gpu:
                torch.cuda.synchronize()  # other streams are going to read what was folded
            fold = Fold(SimpleNamespace(**program.others, **made), watch)
            self._folds[cast] = fold
        return fold


def _every_hook() -> bool:
    """Whether there are hooks on all modules of this process."""
    return bool(every_module._global_forward_hooks or every_module._global_forward_pre_hooks)


def _channels_last(x: Tensor) -> Tensor:
    if x.dim() == 4 and x.is_floating_point():
        return x.contiguous(memory_format=torch.channels_last)
    return x


def _wants_gradients(module: nn.Module, args: tuple[Any, ...]) -> bool:
    global _warned
    if not any(map(_needs_grad, args)) and not any(map(_needs_grad, module.parameters())):
        return False
    if not _warned:
        _warned = True
        log.warning(
            "an optimized %s is called where gradients are recorded, and runs as it was: use "
            "torch.inference_mode() or torch.no_grad()",
            type(module).__name__,
        )
    return True
