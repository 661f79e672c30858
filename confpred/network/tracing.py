"""A network as a graph of calls, or its parts where the whole cannot be traced.

A trace runs a module's forward once, with proxies for its tensors. What depends on values, or keeps
something between calls, cannot be traced; the module in which that happens is then called as it is,
and what is below it is traced on its own.
"""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from confpred.network.modules import is_convolution, is_opaque

log = logging.getLogger("confpred")
_MOST_TRIES = 64


@dataclass(frozen=True, slots=True)
class Part:
    """A module and its forward as a graph, whose ``call_module`` nodes name opaque modules.

    Attributes:
        name: of the module in the network; empty for the whole.
        module: whose forward it is.
        graph: the calls; its placeholders are `arguments`.
        arguments: names of the arguments of the forward that have no default.
        entered: the modules that were looked into, other than `module`.
    """

    name: str
    module: nn.Module
    graph: fx.Graph
    arguments: tuple[str, ...]
    entered: tuple[nn.Module, ...]


class Untraceable(Exception):
    """A forward that a graph would not describe."""


def convolutions_of(
    model: nn.Module, accept: Callable[[nn.Module, str], bool]
) -> frozenset[nn.Module]:
    """The convolutions of `model` that are to be optimized: `accept` says so of each name."""
    found: set[nn.Module] = set()
    refused: set[nn.Module] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if is_convolution(module):
            (found if accept(module, name) else refused).add(module)
    return frozenset(found - refused)


def trace_parts(model: nn.Module, convolutions: frozenset[nn.Module]) -> Iterator[Part]:
    """The largest parts of `model` that can be traced and have one of `convolutions`; from the
    outside in, so that a part may call another as an opaque module."""
    yield from _parts("", model, convolutions, set())


def _parts(
    name: str, module: nn.Module, convolutions: frozenset[nn.Module], seen: set[nn.Module]
) -> Iterator[Part]:
    if module in seen or convolutions.isdisjoint(module.modules()):
        return
    seen.add(module)
    part = trace(module, convolutions, name)
    prefix = f"{name}." if name else ""
    if part is None:
        for child, below in module.named_children():
            yield from _parts(prefix + child, below, convolutions, seen)
        return
    called = [str(node.target) for node in part.graph.nodes if node.op == "call_module"]
    below_name = dict.fromkeys(target for target in called if target)
    if any(module.get_submodule(target) in convolutions for target in called):
        yield part
    for target in below_name:
        below = module.get_submodule(target)
        if below not in convolutions:
            yield from _parts(prefix + target, below, convolutions, seen)


def trace(module: nn.Module, convolutions: frozenset[nn.Module], name: str = "") -> Part | None:
    """The graph of `module`, or None if its own forward cannot be traced."""
    if module in convolutions:
        graph = fx.Graph()
        graph.output(graph.call_module("", (graph.placeholder("input"),)))
        return Part(name, module, graph, ("input",), ())
    # Hooks of the module itself run around its forward, whatever that does.
    if "forward" in module.__dict__ or type(module).__module__.startswith("torch.nn.parallel"):
        return None
    opaque: set[type[nn.Module]] = set()
    for _ in range(_MOST_TRIES):
        before = _snapshot(module)
        tracer = _Tracer(module, convolutions, opaque)
        try:
            graph = tracer.trace(module)
            tracer.check_unchanged(before)
            return Part(name, module, graph, tracer.arguments, tuple(tracer.entered))
        except Exception as error:  # whatever a forward may raise on seeing a proxy
            _restore(before)
            culprit = tracer.culprit
            where = type(module if culprit is None else culprit).__name__
            log.debug("%s cannot be traced: %s", where, error)
            if culprit is None or type(culprit) is nn.Sequential or type(culprit) in opaque:
                return None
            opaque.add(type(culprit))
    return None


_Snapshot = list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]


def _snapshot(module: nn.Module) -> _Snapshot:
    """What the modules hold: each module, a dictionary of it, and a copy of that."""
    return [
        (m, held, dict(held))
        for m in module.modules()
        for held in (m.__dict__, m._parameters, m._buffers, m._modules)
    ]


def _changed(before: _Snapshot) -> Iterator[tuple[nn.Module, dict[str, Any], dict[str, Any]]]:
    for module, held, then in before:
        if held.keys() != then.keys() or any(held[key] is not then[key] for key in then):
            yield module, held, then


def _restore(before: _Snapshot) -> None:
    """Undo what a trace has left in the modules, such as proxies that were to be kept."""
    for _, held, then in _changed(before):
        held.clear()
        held.update(then)


class _Value(fx.Proxy):
    """A proxy that passes for a tensor where a forward asks with ``isinstance``."""

    _is_param = False

    __class__ = property(lambda _: Tensor)


def _in_place(function: Callable[..., Any]) -> Callable[[_Value, Any], Any]:
    def method(self: _Value, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


# A proxy of torch.fx takes `x += y` for `x = x + y`, and others would not see what is written to x.
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(_Value, f"__i{_name}__", _in_place(getattr(operator, f"__i{_name}__")))


class _Tracer(fx.Tracer):
    """Looks into the modules that lead to a convolution, and remembers where it failed.

    Attributes:
        arguments: see `Part`.
        entered: see `Part`.
        culprit: the innermost module whose forward raised; None for the outermost.
    """

    def __init__(
        self,
        module: nn.Module,
        convolutions: frozenset[nn.Module],
        opaque: set[type[nn.Module]],
    ) -> None:
        super().__init__()
        self._outermost = module
        self._convolutions = convolutions
        self._opaque = opaque
        self.arguments: tuple[str, ...] = ()
        self.entered: dict[nn.Module, None] = {}
        self.culprit: nn.Module | None = None

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Only arguments without a default are traced; a call that gives others is not ours."""
        names = []
        for parameter in list(inspect.signature(root_fn).parameters.values())[1:]:
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise Untraceable("any number of arguments")
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                if parameter.kind is parameter.KEYWORD_ONLY:
                    raise Untraceable("an argument that needs its name")
                names.append(parameter.name)
        self.arguments = tuple(names)
        if not names:
            raise Untraceable("no arguments")
        return root_fn, [
            self.root,
            *(self.create_proxy("placeholder", name, (), {}) for name in names),
        ]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_arg(self, a: Any) -> Any:
        if issubclass(type(a), fx.Proxy):
            return a.node
        if isinstance(a, nn.Module):
            raise Untraceable("a module is passed as an argument")
        if isinstance(a, Tensor):
            held = a in self.tensor_attrs or any(
                a is t for t in (*self.root.parameters(), *self.root.buffers())
            )
            if not held:
                raise Untraceable("a tensor is made that depends on no argument")
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in self._opaque or is_opaque(m, self._convolutions)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        opaque = self.is_leaf_module(m, "")
        if not opaque:
            self.entered[m] = None
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.culprit is None and not opaque:
                self.culprit = m
            raise

    def check_unchanged(self, before: _Snapshot) -> None:
        """
        Raises:
            Untraceable: a module keeps something between calls, which a graph would not do.
        """
        for module, _, _ in _changed(before):
            self.culprit = None if module is self._outermost else module
            raise Untraceable("something is kept between calls")
