"""Patterns of epilogues, the operations that are fused behind a convolution or norm.

    convolution or norm -> [batch norm] -> [+ residual] -> [activation]

A pattern is a function that returns a chain with one operation more, or as it was. Only the next
node of the chain reads an intermediate result, and in training the gradient of an activation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from confpred.problem.activation import GRADIENTS
from confpred.pytorch.rewrite.passes import is_alike, val_of
from confpred.pytorch.run.loading import is_channels_last

aten = torch.ops.aten
FIXED_NORM = aten._native_batch_norm_legit_no_training.default
_ALIASES = (aten.alias.default, aten.detach.default)
#: Names of activations by the operator of the forward pass, and its arguments behind the first.
ACTIVATIONS: dict[Any, dict[tuple[Any, ...], str]] = {}
for _name, _row in GRADIENTS.items():
    if _row is not None:
        _operator = getattr(aten, _row.forward or _name).default
        ACTIVATIONS.setdefault(_operator, {})[_row.forward_arguments] = _name


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes that become one operator.

    Attributes:
        nodes: first to last, with the ``getitem`` of a norm.
        norm: the batch norm among them.
        sum: the node that adds the residual, and the residual's index among its arguments.
        activation: name of the activation, or ``none``.
        gradient: the node of the activation's gradient; None in a graph of inference.
    """

    nodes: tuple[fx.Node, ...]
    norm: fx.Node | None = None
    sum: tuple[fx.Node, int] | None = None
    activation: str = "none"
    gradient: fx.Node | None = None

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def residual(self) -> Any:
        """The node that is added, or None; read anew, as rewriting replaces nodes."""
        return None if self.sum is None else self.sum[0].args[self.sum[1]]


Pattern = Callable[[Chain], Chain]


def follow(chain: Chain, patterns: Sequence[Pattern], claimed: Collection[fx.Node]) -> Chain:
    """Return `chain` after each of `patterns` in order; one that would take a node that another
    chain has `claimed` is left out."""
    for pattern in patterns:
        longer = pattern(chain)
        if not any(node in claimed for node in longer.nodes[len(chain.nodes) :]):
            chain = longer
    return chain


def take_norm(chain: Chain) -> Chain:
    """Take a batch norm by running statistics, if its normalised tensor alone is used."""
    norm = _only_reader(chain.last)
    if chain.norm is not None or norm is None or norm.target is not FIXED_NORM:
        return chain
    first = first_result(norm)
    if first is None or source_of(norm.args[0]) is not chain.last:
        return chain
    return replace(chain, nodes=(*chain.nodes, norm, first), norm=norm)


def take_sum(chain: Chain, dtype: torch.dtype | None = None) -> Chain:
    """Take a sum with a residual of the same shape, without a factor.

    The residual has the dtype of the chain's result, and the sum its layout, because later nodes
    rely on the strides of the sum. With `dtype`, for operators of any layout that add in float32,
    the residual has that dtype, and the sum the dtype of the chain's result.
    """
    total = _only_reader(chain.last)
    if total is None or total.target is not aten.add.Tensor:
        return chain
    places = [i for i, term in enumerate(total.args) if source_of(term) is not chain.last]
    residual: Any = total.args[places[0]] if len(places) == 1 else None  # not added to itself
    if not isinstance(residual, fx.Node) or total.kwargs.get("alpha", 1) != 1:
        return chain
    a, b, c = map(val_of, (chain.last, residual, total))
    if not isinstance(b, Tensor) or b.shape != a.shape or b.dtype is not (dtype or a.dtype):
        return chain
    if c.dtype is not a.dtype if dtype else is_channels_last(c) != is_channels_last(a):
        return chain
    return replace(chain, nodes=(*chain.nodes, total), sum=(total, places[0]))


def take_activation(chain: Chain, gradient: fx.Node | None = None) -> Chain:
    """Take an activation; in a joint graph, its `gradient` may read the same node."""
    readers = set(readers_of(chain.last)) - {gradient}
    node = readers.pop() if len(readers) == 1 else None
    name = None if node is None else activation_of(node)
    if node is None or name is None:
        return chain
    if gradient is not None and not is_gradient(gradient, name, chain.last, node):
        return chain
    return replace(chain, nodes=(*chain.nodes, node), activation=name, gradient=gradient)


def activation_of(node: fx.Node) -> str | None:
    """Return the activation that `node` computes; None if it is none of `ACTIVATIONS`."""
    names = ACTIVATIONS.get(node.target, {})
    exact = node.kwargs.get("approximate", "none") == "none"  # of GELU
    return names.get(tuple(node.args[1:])) if exact else None


def is_gradient(node: fx.Node, name: str, argument: fx.Node, result: fx.Node) -> bool:
    """Return whether `node` is the gradient of activation `name`, which made `result` of
    `argument`."""
    row = GRADIENTS[name]
    if row is None or node.target is not getattr(aten, row.operator).default:
        return False
    # Its arguments: the gradient of the result, the saved tensor, and numbers.
    given = source_of(node.args[1]), tuple(node.args[2:])
    saved = result if row.saves_output else argument
    return given in ((saved, row.arguments), (result, row.in_place))


def first_result(norm: fx.Node) -> fx.Node | None:
    """Return the node of the normalised tensor; None where other results are used, too."""
    items = [n for n in norm.users if n.users]
    if len(items) == 1 and items[0].target is operator.getitem and items[0].args[1] == 0:
        return items[0]
    return None


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read `node`, aliases passed through."""
    readers: list[fx.Node] = []
    for user in node.users:
        readers += readers_of(user) if _is_alias(user) else [user]
    return readers


def _only_reader(node: fx.Node) -> fx.Node | None:
    readers = readers_of(node)
    return readers[0] if len(readers) == 1 else None


def source_of(node: Any) -> Any:
    """Return the node that `node` is an alias of, or itself."""
    while isinstance(node, fx.Node) and _is_alias(node):
        node = node.args[0]
    return node


def _is_alias(node: fx.Node) -> bool:
    """Return whether a node has the values and the layout of its input: an alias, or the clone that
    is made before an activation in place."""
    if node.target is aten.clone.default:
        return is_alike(val_of(node), val_of(node.args[0]))
    return node.target in _ALIASES
