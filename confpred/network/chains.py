"""Convolution -> norm -> residual -> activation: found in a graph, and put into one call.

    conv2d --> [batch norm] --> [+ residual] --> [activation]      a site

Every link is used by the next one alone. The call stands where the last link stood, because the
residual may be computed late; so no link is taken behind an operation in place, which might change
the convolution's input in between.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from confpred.network.modules import (
    activation_of,
    eps_of,
    has_own_activation,
    is_identity,
    is_norm,
    is_plain,
    norm_tensors,
)
from confpred.network.tracing import Part

_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    F.silu: "silu",
    F.gelu: "gelu",
    F.relu6: "relu6",
    F.hardswish: "hardswish",
}
_METHODS = {"relu": "relu", "relu_": "relu"}
_SUMS = (operator.add, operator.iadd, torch.add)
_SUM_METHODS = ("add", "add_")


@dataclass(frozen=True, slots=True)
class Site:
    """One fused call.

    Attributes:
        name: the convolution's, in the network.
        convolution: the module, which keeps the weight and the bias.
        norm: the batch norm after it, or None.
        activation: one of `confpred.problem.conv2d.ACTIVATIONS`.
        residual: whether the call has a second argument, which is added before the activation.
    """

    name: str
    convolution: nn.Conv2d
    norm: nn.Module | None
    activation: str
    residual: bool


@dataclass(frozen=True, slots=True)
class Read:
    """A call that returns a parameter or a buffer as it is now."""

    home: Mapping[str, Any]
    name: str

    def __call__(self) -> Tensor:
        found: Tensor = self.home[self.name]
        return found


def _home(module: nn.Module, name: str) -> Mapping[str, Any]:
    """Which dictionary of `module` holds `name`. Not the module: it would be kept alive."""
    homes = (module._parameters, module._buffers, module.__dict__)
    return next(home for home in homes if name in home)


@dataclass(frozen=True, slots=True)
class Normalise:
    """A call of what a norm with its own activation does before that."""

    norm: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias, mean, variance = norm_tensors(self.norm)
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps_of(self.norm))


@dataclass(frozen=True, slots=True)
class Program:
    """A part of a network as a flat function.

    Attributes:
        name, arguments: see `Part`. The module itself is not kept alive.
        run: called with an object whose attributes are `sites` and `others`, and with the
            arguments; PyTorch has generated it.
        sites: the fused calls by attribute name.
        others: what else is called, by attribute name.
        relied_on: modules whose hooks and mode the function does not look at: those whose own
            call is gone.
        modes: those of them that do something else in training.
        children: dictionaries of child modules that the function has taken as they were.
    """

    name: str
    arguments: tuple[str, ...]
    run: Callable[..., Any]
    sites: Mapping[str, Site]
    others: Mapping[str, Callable[..., Any]]
    relied_on: tuple[nn.Module, ...]
    modes: tuple[nn.Module, ...]
    children: tuple[dict[str, nn.Module | None], ...]


@dataclass(slots=True)
class _Chain:
    nodes: list[fx.Node]
    convolution: nn.Conv2d
    norm: nn.Module | None = None
    activation: str = "none"
    sum_at: tuple[fx.Node, int] | None = None  # the sum, and which of its operands is the residual


def fuse(part: Part, convolutions: frozenset[nn.Module]) -> Program:
    """`part` with every one of `convolutions` in one call with what follows it."""
    graph = part.graph
    gone: dict[nn.Module, None] = {}
    called = _Calls(part.module, graph)
    called.expand_norms(gone)
    called.drop_identities(gone)
    sites: dict[str, Site] = {}
    claimed: set[fx.Node] = set()
    chains = []
    # The later convolution of two that are summed takes the sum: the other's is there by then.
    for node in reversed(list(graph.nodes)):
        module = called.module(node)
        if not isinstance(module, nn.Conv2d) or module not in convolutions:
            continue
        if len(node.args) == 1 and not node.kwargs:
            chain = _follow(node, module, called, claimed)
            claimed.update(chain.nodes)
            chains.append(chain)
    prefix = f"{part.name}." if part.name else ""
    for index, chain in enumerate(reversed(chains)):
        first, last = chain.nodes[0], chain.nodes[-1]
        inputs = [first.args[0]]
        if chain.sum_at is not None:
            inputs.append(chain.sum_at[0].args[chain.sum_at[1]])
        key = f"site_{index}"
        with graph.inserting_before(last):
            fused = graph.call_module(key, tuple(inputs))
        last.replace_all_uses_with(fused)
        for node in reversed(chain.nodes):
            replaced = called.module(node)
            if replaced is not None:
                gone[replaced] = None
            graph.erase_node(node)
        name = (prefix + str(first.target)).rstrip(".")
        sites[key] = Site(
            name,
            chain.convolution,
            chain.norm,
            chain.activation,
            chain.sum_at is not None,
        )
    others = called.rename(sites)
    return Program(
        part.name,
        part.arguments,
        _generated(graph, [*sites, *others]),
        sites,
        others,
        tuple(m for m in {**dict.fromkeys(part.entered), **gone} if m is not part.module),
        tuple(m for m in gone if is_norm(m) or (is_identity(m) and type(m) is not nn.Identity)),
        tuple(m._modules for m in (part.module, *part.entered) if m._modules),
    )


def _generated(graph: fx.Graph, names: list[str]) -> Callable[..., Any]:
    """The function of `graph`. It finds what it calls in its first argument, and so keeps neither
    the graph nor any module alive."""
    made = fx.GraphModule(dict.fromkeys(names), graph)
    run: Callable[..., Any] = type(made).forward
    return run


class _Calls:
    """What the ``call_module`` nodes of a graph call, by target."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self._root = module
        self._graph = graph
        self._special: dict[str, Normalise] = {}

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that `node` calls; None if it calls something else."""
        if node.op != "call_module":
            return None
        target = str(node.target)
        special = self._special.get(target)
        return self._root.get_submodule(target) if special is None else special.norm

    def expand_norms(self, gone: dict[nn.Module, None]) -> None:
        """Let norms with their own activation be three calls: norm, dropout, activation."""
        for node in list(self._graph.nodes):
            module = self.module(node)
            if module is None or not is_norm(module) or not has_own_activation(module):
                continue
            if len(node.args) != 1 or node.kwargs:
                continue
            target = str(node.target)
            self._special[f"{target} alone"] = Normalise(module)
            with self._graph.inserting_before(node):
                last = self._graph.call_module(f"{target} alone", node.args)
                for child in ("drop", "act"):
                    last = self._graph.call_module(f"{target}.{child}", (last,))
            node.replace_all_uses_with(last)
            self._graph.erase_node(node)
            gone[module] = None

    def drop_identities(self, gone: dict[nn.Module, None]) -> None:
        for node in list(self._graph.nodes):
            module = self.module(node)
            if module is not None and is_identity(module) and len(node.args) == 1:
                node.replace_all_uses_with(node.args[0])
                self._graph.erase_node(node)
                gone[module] = None

    def rename(self, sites: Mapping[str, Site]) -> dict[str, Callable[..., Any]]:
        """What is called beside `sites`, by the names that take the place of the targets."""
        others: dict[str, Callable[..., Any]] = {}
        for node in list(self._graph.nodes):
            key = f"other_{len(others)}"
            if node.op == "call_module" and node.target not in sites:
                target = str(node.target)
                others[key] = self._special.get(target) or self._root.get_submodule(target)
                node.target = key
            elif node.op == "get_attr":
                home, _, name = str(node.target).rpartition(".")
                others[key] = Read(_home(self._root.get_submodule(home), name), name)
                with self._graph.inserting_before(node):
                    node.replace_all_uses_with(self._graph.call_module(key))
                self._graph.erase_node(node)
        return others


def _follow(
    first: fx.Node, convolution: nn.Conv2d, called: _Calls, claimed: set[fx.Node]
) -> _Chain:
    """The longest chain that begins with `first`, which calls `convolution`."""
    chain = _Chain([first], convolution)
    channels = convolution.out_channels
    while len(chain.nodes[-1].users) == 1:
        last = chain.nodes[-1]
        (node,) = last.users
        between = _between(last, node)
        if node in claimed or any(_may_change(n, called) for n in between):
            break
        module = called.module(node)
        if node.op == "call_module" and (len(node.args) != 1 or node.kwargs):
            break
        activation = _activation(node, module)
        residual = _residual_operand(node, last, called)
        if activation is not None:
            chain.nodes.append(node)
            chain.activation = activation
            break
        if chain.sum_at is None and residual is not None:
            chain.nodes.append(node)
            chain.sum_at = (node, residual)
        elif chain.norm is None and chain.sum_at is None and _norms(module, channels):
            chain.nodes.append(node)
            chain.norm = module
        else:
            break
    return chain


def _norms(module: nn.Module | None, channels: int) -> bool:
    if module is None or not is_norm(module):
        return False
    mean = norm_tensors(module)[2]
    return mean is not None and mean.shape == (channels,)


def _activation(node: fx.Node, module: nn.Module | None) -> str | None:
    if module is not None:
        return activation_of(module)
    if node.op == "call_method" and len(node.args) == 1 and not node.kwargs:
        return _METHODS.get(str(node.target))
    if node.op != "call_function":
        return None
    kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
    if node.target is F.gelu and kwargs.pop("approximate", "none") != "none":
        return None
    # The second argument of the others is `inplace`: there is nobody left to see the difference.
    if kwargs or len(node.args) > (1 if node.target in (F.gelu, torch.relu, torch.relu_) else 2):
        return None
    return _FUNCTIONS.get(node.target)


def _residual_operand(node: fx.Node, value: fx.Node, called: _Calls) -> int | None:
    """Which operand of the sum `node` is the residual of `value`; None if it is no such sum."""
    method = node.op == "call_method" and node.target in _SUM_METHODS
    if not (method or (node.op == "call_function" and node.target in _SUMS)):
        return None
    if node.kwargs or len(node.args) != 2:
        return None
    left, right = node.args
    if left is right or not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    if left is value:
        return 1
    # A sum into the residual itself may change what others see of it.
    into_residual = node.target in (operator.iadd, "add_")
    return None if into_residual and not _is_only_here(left, called) else 0


def _is_only_here(node: fx.Node, called: _Calls) -> bool:
    """Whether the value of `node` shares its memory with no other, and is used once."""
    if len(node.users) != 1:
        return False
    module = called.module(node)
    if module is not None:
        return isinstance(module, (nn.Conv2d, nn.BatchNorm2d)) and is_plain(module)
    if node.target is operator.iadd:
        into = node.args[0]
        return isinstance(into, fx.Node) and _is_only_here(into, called)
    return node.op == "call_function" and node.target in (operator.add, torch.add)


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _may_change(node: fx.Node, called: _Calls) -> bool:
    """Whether `node` may write into one of its arguments."""
    if node.op == "call_method":
        name = str(node.target)
        return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        in_place = name.endswith("_") or name == "setitem"
        of_operators = getattr(node.target, "__module__", "") == "_operator"
        if of_operators and name.startswith("i") and hasattr(operator, f"__{name}__"):
            in_place = name not in ("inv", "invert", "index", "is_", "is_not")
        flagged = any(node.kwargs.get(k) not in (None, False) for k in ("inplace", "out"))
        return in_place or flagged or any(a is True for a in node.args[1:])
    module = called.module(node)
    if module is None or is_norm(module):
        return False
    ours = type(module).__module__.startswith("torch.nn")
    return not ours or any(getattr(m, "inplace", False) for m in module.modules())
