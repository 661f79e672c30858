"""Batch norms of training, each with its activation and residual as one operator a direction.

    forward    batch norm -> [+ residual] -> [activation]
    backward   the gradient of that, whose argument of the activation is computed again

Both directions of a layer are replaced together, where that is predicted to save GPU time.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from confpred.predict.choice import Choice
from confpred.problem.norm import BatchNorm
from confpred.pytorch.rewrite.passes import is_alike, val_of
from confpred.pytorch.run import choosing
from confpred.pytorch.run.loading import DTYPES, is_channels_last
from confpred.pytorch.run.norms import (
    _BACKWARD,
    _FROZEN,
    _NORM,
    _NORM_BACKWARD,
    NormCall,
    problem_of,
)

aten = torch.ops.aten
#: Activations by their operator, with its arguments behind the tensor.
_FORWARD: dict[Any, tuple[str, tuple[Any, ...]]] = {
    aten.relu.default: ("relu", ()),
    aten.silu.default: ("silu", ()),
    aten.gelu.default: ("gelu", ()),
    aten.hardswish.default: ("hardswish", ()),
    aten.hardtanh.default: ("relu6", (0.0, 6.0)),
}
_ALIASES = (aten.alias.default, aten.detach.default)


@dataclass(slots=True)
class _Layer:
    """A batch norm of a joint graph.

    Attributes:
        norm, backward: the nodes of both directions.
        out: the node of what the fused forward returns.
        grad: the node of its gradient.
        inner: the node of the gradient before the activation; `grad` itself where there is none.
        residual: the node that is added before the activation; None if nothing is.
    """

    norm: fx.Node
    backward: fx.Node
    out: fx.Node
    grad: fx.Node
    inner: fx.Node
    frozen: bool
    activation: str = "none"
    residual: fx.Node | None = None

    def place(self) -> fx.Node | None:
        """Return the node before which the fused forward is to stand: the first one that needs a
        statistic, `out` at the latest. None where an input is not there by then."""
        inputs = [x for x in (*self.norm.args[:5], self.residual) if isinstance(x, fx.Node)]
        statistics = [item for item in self.norm.users if item.args[1] != 0]
        first = min([self.out, *(user for node in statistics for user in node.users)])
        return first if max(inputs) < first else None

    def problems(self) -> list[BatchNorm]:
        """Return those of both directions; none where there are none."""
        x = val_of(self.norm.args[0])
        fields = {
            "residual": self.residual is not None,
            "affine": self.norm.args[1] is not None,
            "frozen": self.frozen,
        }
        sizes = [s if isinstance(s, int) else s.node.hint for s in x.shape]
        found = [
            problem_of(sizes, x.dtype, direction, self.activation, **fields)
            for direction in ("forward", "backward")
        ]
        return [problem for problem in found if problem is not None]


def layers_of(graph: fx.Graph) -> list[_Layer]:
    """Return the batch norms of a joint graph that one operator a direction can compute."""
    found: list[_Layer] = []
    for node in graph.find_nodes(op="call_function", target=_NORM_BACKWARD):
        layer = _layer(node, found)
        found += [] if layer is None else [layer]
    return found


def _layer(backward: fx.Node, others: Sequence[_Layer]) -> _Layer | None:
    """Return the layer of a gradient; without what follows where that is part of one of `others`,
    as where two norms are added."""
    grad, x, weight, _, _, mean, _, training, _, mask = backward.args
    norm: Any = mean.args[0] if isinstance(mean, fx.Node) else None
    if norm is None or norm.target not in (_NORM, _FROZEN):
        return None
    frozen = norm.target is _FROZEN
    if bool(training) is frozen or not (frozen or norm.args[5]):
        return None
    if norm.args[0] is not x or norm.args[1] is not weight or not isinstance(grad, fx.Node):
        return None
    bias, statistics = norm.args[2], norm.args[3:5]
    vectors = [t for t in (weight, bias, *statistics) if t is not None]
    if (weight is None) != (bias is None) or not all(isinstance(t, fx.Node) for t in vectors):
        return None
    if any(val_of(t).dtype is not torch.float32 for t in vectors) or None in statistics:
        return None
    wanted: Any = mask
    if not wanted[0]:
        return None
    items = {item.args[1]: item for item in norm.users}
    if 0 not in items or len(items) != len(norm.users) or not _fits(val_of(x), items[0]):
        return None
    plain = _Layer(norm, backward, items[0], grad, grad, frozen)
    whole = _with_activation(plain)
    taken = any(whole.out is layer.out for layer in others if layer.backward is not backward)
    return plain if taken or whole.place() is None else whole


def _fits(x: Any, out: fx.Node) -> bool:
    """Return whether the kernels can read images such as `x`, and write such as `out`."""
    made = val_of(out)
    return bool(
        isinstance(x, Tensor) and x.dtype in DTYPES and is_channels_last(x)
        and made.dtype is x.dtype and is_channels_last(made)
    )  # fmt: skip


def _with_activation(plain: _Layer) -> _Layer:
    """Return the layer with what follows it, as far as nothing else reads what comes between."""
    first, grad = plain.out, plain.grad
    readers = _readers(first)
    sums = [n for n in readers if n.target is aten.add.Tensor]
    total = sums[0] if len(sums) == 1 else None
    residual = None if total is None else _other(total, first)
    before = first if residual is None or total is None else total
    if before is not first and readers != [total]:
        residual, before = None, first
    for node in _readers(before):
        name, arguments = _FORWARD.get(node.target, ("", ()))
        if not name or tuple(node.args[1:]) != arguments or node.kwargs.get("approximate"):
            continue
        gradient, more = _BACKWARD[name]
        saved = node if name == "relu" else before
        inner = grad
        if (
            inner.target is gradient
            and _source(inner.args[1]) is saved
            and tuple(inner.args[2:]) == more
            and set(_readers(before)) <= {node, inner}
            and (residual is not None or inner.users.keys() == {plain.backward})
        ):
            outer: Any = inner.args[0]
            return replace(plain, out=node, grad=outer, activation=name, residual=residual)
    # Where there is a residual, nothing but the sum reads the norm.
    return replace(plain, out=before, residual=residual)


def _other(total: fx.Node, one: fx.Node) -> fx.Node | None:
    """Return what `total` adds to `one`; None where it is no tensor of its shape and layout."""
    if total.kwargs.get("alpha", 1) != 1:
        return None
    others = [term for term in total.args if _source(term) is not one]
    if len(others) != 1:
        return None  # it is added to itself
    other = others[0]
    a, b = val_of(one), val_of(other) if isinstance(other, fx.Node) else None
    same = isinstance(b, Tensor) and b.shape == a.shape and b.dtype is a.dtype
    # The caller may write to an input that nothing else reads, before a backward pass reads it.
    same &= isinstance(other, fx.Node) and (other.op != "placeholder" or len(other.users) > 1)
    return other if same and is_channels_last(b) else None  # type: ignore[return-value,arg-type]


def _is_alias(node: fx.Node) -> bool:
    """Return whether a node has the values and the layout of its input, as an alias has, and the
    clone that an activation in place saves."""
    if node.target is aten.clone.default:
        return is_alike(val_of(node), val_of(node.args[0]))
    return node.target in _ALIASES


def _source(node: Any) -> Any:
    """Return what a node is an alias of."""
    while isinstance(node, fx.Node) and _is_alias(node):
        node = node.args[0]
    return node


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read `node`, aliases passed through."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if _is_alias(user) else [user]
    return found


def serve(choose: choosing.Choose, graph: fx.Graph) -> int:
    """Let confpred compute the batch norms of a joint graph where both directions together are
    predicted to be faster than PyTorch's operators; return how many."""
    layers = [layer for layer in layers_of(graph) if len(layer.problems()) == 2]
    if not layers:
        return 0
    choices = iter(choose([problem for layer in layers for problem in layer.problems()]))
    numbers: dict[Any, fx.Node] = {}
    count = 0
    for layer in layers:
        both = next(choices), next(choices)
        if None not in both and _gain_ms(*both) > 0.0:  # type: ignore[arg-type]
            now = _layer(layer.backward, layers)  # among the operators that were put in before
            if now is not None and now.problems() == layer.problems():
                _replace(now, *both, numbers)  # type: ignore[arg-type]
                count += 1
    graph.eliminate_dead_code()
    graph.lint()
    return count


def _gain_ms(*choices: Choice) -> float:
    """Return the milliseconds that are saved; none where a direction is PyTorch's."""
    if any(choosing.why_pytorch(choice) is not None for choice in choices):
        return 0.0
    return sum((c.pytorch_ms or 0.0) - (c.predicted_ms or 0.0) for c in choices)


def _number(value: Any, like: Tensor, graph: fx.Graph, made: dict[Any, fx.Node]) -> fx.Node:
    """Return the node of a tensor that holds `value` and is `like` another, one for all norms."""
    key = value, like.dtype, like.device
    if key not in made:
        known = value if isinstance(value, fx.Node) else graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(known):
            kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
            made[key] = graph.call_function(aten.full.default, ([1], value), kind)
        made[key].meta["val"] = like.new_empty(1)
    return made[key]


def _replace(layer: _Layer, ahead: Choice, back: Choice, known: dict[Any, fx.Node]) -> None:
    norm, backward = layer.norm, layer.backward
    x, weight, bias, mean, variance, *_, momentum, eps = norm.args
    image = tuple(ahead.problem.to_json()[name] for name in "nchw")
    call = NormCall(layer.activation, layer.frozen, image, ahead.candidate, back.candidate)
    graph, text = norm.graph, call.text()
    empty = val_of(mean).new_empty(0)
    values = [val_of(layer.out), *([empty] * 4 if layer.frozen else val_of(norm)[1:])]
    held = (eps,) if layer.frozen else (eps, momentum)
    numbers = [_number(value, empty, graph, known) for value in held]
    with graph.inserting_before(layer.place()):
        given = (x, weight, bias, layer.residual, mean, variance, numbers, momentum, eps, text)
        new = graph.call_function(torch.ops.confpred.batch_norm.default, given)
        new.meta = norm.meta | {"val": values}
        results = [graph.call_function(operator.getitem, (new, i)) for i in range(5)]
    for result, each in zip(results, values, strict=True):
        result.meta = norm.meta | {"val": each}
    layer.out.replace_all_uses_with(results[0])
    for item in list(norm.users):
        place: Any = item.args[1]
        if place:
            item.replace_all_uses_with(results[place])
    # Without an activation, the gradient of the residual is that of the output.
    residual = layer.residual if layer.activation != "none" else None
    with graph.inserting_before(backward if layer.inner is layer.grad else layer.inner):
        statistics = (mean, variance) if layer.frozen else results[1:3]
        again = numbers if layer.frozen else []
        back_given = (layer.grad, x, weight, bias, residual, *statistics, again, eps, text)
        put = graph.call_function(torch.ops.confpred.batch_norm_backward.default, back_given)
        of_vectors = [empty if t is None else torch.empty_like(val_of(t)) for t in (weight, bias)]
        made = [torch.empty_like(val_of(x)), *of_vectors, val_of(layer.inner)]
        put.meta = backward.meta | {"val": made}
    backward.replace_all_uses_with(put)
    if residual is not None:
        with graph.inserting_after(put):
            grad = graph.call_function(operator.getitem, (put, 3))
        grad.meta = dict(layer.inner.meta)
        layer.inner.replace_all_uses_with(grad, delete_user_cb=lambda user: user is not backward)
