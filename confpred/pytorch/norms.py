"""Batch norms of training, each with its activation and residual as one operator a direction.

    forward    batch norm -> [+ residual] -> [activation]
    backward   the gradient of that, whose argument of the activation is computed again

So the normalised tensor is neither stored nor read again. Both directions of a layer are replaced
together, where that is predicted to save GPU time. A call of other sizes, or one that no kernel
takes, computes the same by PyTorch's operators.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from confpred.errors import InvalidProblem
from confpred.launch.assignment import Assignment
from confpred.predict.choice import Choice
from confpred.problem.norm import BatchNorm
from confpred.pytorch import choosing, loading
from confpred.pytorch.choosing import kept
from confpred.pytorch.loading import ALIGNMENT, DTYPES, ReadyLaunch, dense, is_channels_last
from confpred.pytorch.passes import is_alike, val_of
from confpred.pytorch.pointwise import activate

aten = torch.ops.aten
_NORM = aten._native_batch_norm_legit_functional.default
_FROZEN = aten._native_batch_norm_legit_no_training.default
_NORM_BACKWARD = aten.native_batch_norm_backward.default
#: Activations by their operator, with its arguments behind the tensor.
_FORWARD: dict[Any, tuple[str, tuple[Any, ...]]] = {
    aten.relu.default: ("relu", ()),
    aten.silu.default: ("silu", ()),
    aten.gelu.default: ("gelu", ()),
    aten.hardswish.default: ("hardswish", ()),
    aten.hardtanh.default: ("relu6", (0.0, 6.0)),
}
#: Their gradients, with its arguments behind gradient and saved tensor.
_BACKWARD: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "relu": (aten.threshold_backward.default, (0,)),
    "silu": (aten.silu_backward.default, ()),
    "gelu": (aten.gelu_backward.default, ()),
    "hardswish": (aten.hardswish_backward.default, ()),
    "relu6": (aten.hardtanh_backward.default, (0.0, 6.0)),
}
_ALIASES = (aten.alias.default, aten.detach.default)


def problem_of(
    shape: Sequence[int], dtype: torch.dtype, direction: str, activation: str, *, residual: bool,
    affine: bool, frozen: bool,
) -> BatchNorm | None:  # fmt: skip
    """Return the problem of a batch norm of images N, C, H, W; None where there is none."""
    n, c, h, w = shape
    if direction == "backward" and activation == "none":
        residual = False  # its gradient is that of the output
    try:
        return BatchNorm(
            n, h, w, c, dtype=DTYPES[dtype], activation=activation, residual=residual,
            direction=direction, affine=affine, frozen=frozen,
        )  # fmt: skip
    except (InvalidProblem, KeyError):
        return None


# The operators


def _launch(
    images: Sequence[Tensor | None], vectors: Sequence[Tensor | None], text: str
) -> tuple[Any, ReadyLaunch | None]:
    """Return the problem that was assigned, and the launch for these tensors; None for PyTorch's
    operators."""
    assigned = Assignment.read(text)
    p: Any = assigned.problem
    given = [t for t in images if t is not None]
    x, dtype, shape = given[0], getattr(torch, p.dtype), (p.n, p.c, p.h, p.w)
    if len(given) != 1 + p.residual + p.is_backward or (vectors[0] is not None) is not p.affine:
        return p, None
    if not x.is_cuda or any(
        t.shape != shape or t.dtype is not dtype or t.device != x.device for t in given
    ):
        return p, None
    if not all(
        t is None or (t.dtype is torch.float32 and t.is_contiguous() and t.device == x.device)
        for t in vectors
    ):
        return p, None
    ordinal = x.get_device()
    return p, kept(("norm", assigned, ordinal), lambda: loading.load(assigned, ordinal))


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    running_mean: Tensor, running_var: Tensor, numbers: Sequence[Tensor], momentum: float,
    eps: float, text: str, *, in_place: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute ``activation(batch_norm(x) + residual)`` by the batch's statistics; return it, their
    mean, 1 over the root of variance and `eps`, and the new running statistics, which are written
    to `running_mean` and `running_var` where it is `in_place`. All but the first are empty for a
    frozen one. `numbers` are `eps` and `momentum` where kernels read them: the graph makes them, as
    memory that outlives it would be in the pool of its CUDA graph."""
    vectors = (weight, bias, running_mean, running_var)
    p, ready = _launch([x, residual], vectors, text)
    if ready is not None:
        images = [None if t is None else dense(t) for t in (x, residual)]
        homes = {} if p.frozen else {3: running_mean, 4: running_var}
        direct = in_place and all(t.data_ptr() % ALIGNMENT == 0 for t in homes.values())
        found = ready.run(*images, *vectors, *numbers, into=homes if direct else {})
        if direct:
            return tuple(found)
        out, *others = found
    else:
        given = (x, weight, bias, running_mean, running_var)
        out, *others = (
            _FROZEN(*given, momentum, eps) if p.frozen else _NORM(*given, True, momentum, eps)
        )
        out = activate(p.activation, out if residual is None else out + residual)
    if p.frozen:
        return out, *(running_mean.new_empty(0) for _ in range(4))
    mean, invstd, new_mean, new_var = others
    if in_place:
        new_mean, new_var = running_mean.copy_(new_mean), running_var.copy_(new_var)
    return out, mean, invstd, new_mean, new_var


def backward(
    out_grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, mean: Tensor, invstd: Tensor, numbers: Sequence[Tensor], eps: float,
    text: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of `x`, weight, bias and residual from that of the output; empty for
    one that is not there. A frozen one takes the running statistics for `mean` and `invstd`, and
    `eps` in `numbers` too."""
    vectors = (weight, bias, mean, invstd)
    p, ready = _launch([out_grad, x, residual], vectors, text)
    empty = x.new_empty(0)
    if ready is not None:
        images = [None if t is None else dense(t) for t in (out_grad, x, residual)]
        found = iter(ready.run(*images, *vectors, *numbers))
        in_grad = next(found)
        residual_grad = empty if residual is None else next(found)
        grads = (empty, empty) if weight is None else (next(found), next(found))
        return in_grad, *grads, residual_grad
    grad = out_grad
    if p.activation != "none":
        sides = (1, -1, 1, 1)
        one = torch.ones_like(mean) if weight is None else weight
        zero = torch.zeros_like(mean) if bias is None else bias
        scale = (torch.rsqrt(invstd + eps) if p.frozen else invstd) * one
        argument = x.float() * scale.view(sides) + (zero - mean * scale).view(sides)
        argument = (argument if residual is None else argument + residual).to(x.dtype)
        gradient, more = _BACKWARD[p.activation]
        grad = gradient(out_grad, argument, *more)
    mask = [True, weight is not None, bias is not None]
    running = (mean, invstd) if p.frozen else (None, None)
    each = _NORM_BACKWARD(grad, x, weight, *running, mean, invstd, not p.frozen, eps, mask)
    in_grad, *others = (empty if t is None else t for t in each)
    return dense(in_grad), *others, empty if residual is None else dense(grad)


def fake_forward(x: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    p: Any = Assignment.read(others[-1]).problem
    size = 0 if p.frozen else x.shape[1]
    vector = x.new_empty(size, dtype=torch.float32)
    out = torch.empty_like(x, memory_format=torch.channels_last)
    return out, *(torch.empty_like(vector) for _ in range(4))


def fake_backward(
    _: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    like = torch.empty_like(x, memory_format=torch.channels_last)
    empty = x.new_empty(0)
    grads = (empty if t is None else torch.empty_like(t) for t in (weight, bias))
    return like, *grads, empty if residual is None else torch.empty_like(like)


# The nodes that become one operator


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
    graph = norm.graph
    texts = [Assignment.of(choice).text() for choice in (ahead, back)]
    empty = val_of(mean).new_empty(0)
    values = [val_of(layer.out), *([empty] * 4 if layer.frozen else val_of(norm)[1:])]
    held = (eps,) if layer.frozen else (eps, momentum)
    numbers = [_number(value, empty, graph, known) for value in held]
    with graph.inserting_before(layer.place()):
        given = (x, weight, bias, layer.residual, mean, variance, numbers, momentum, eps, texts[0])
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
        back_given = (layer.grad, x, weight, bias, residual, *statistics, again, eps, texts[1])
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
