"""Training: each direction of a convolution, and of a batch norm with what follows it, becomes one
operator of a joint graph of forward and backward.

    convolution, and both halves of its backward
    batch norm -> [+ residual] -> [activation], and the gradient of that, whose argument of the
        activation is computed again

Both directions of a norm are replaced together, where that is predicted to save GPU time.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from confpred.predict.choice import Choice
from confpred.pytorch.rewrite import following, sites
from confpred.pytorch.rewrite.following import FIXED_NORM, Chain
from confpred.pytorch.rewrite.passes import put_in_place, val_of
from confpred.pytorch.rewrite.sites import CONVOLUTION, CONVOLUTION_BACKWARD, Site
from confpred.pytorch.run import choosing, operators  # noqa: F401  graphs call the operators
from confpred.pytorch.run.choosing import ANY, Wishes
from confpred.pytorch.run.convolve import is_deterministic, sums_bias
from confpred.pytorch.run.loading import DTYPES, is_channels_last
from confpred.pytorch.run.norms import NormCall, problem_of

aten = torch.ops.aten
confpred = torch.ops.confpred
BATCH_NORM = aten._native_batch_norm_legit_functional.default
BATCH_NORM_BACKWARD = aten.native_batch_norm_backward.default


def serve_convolutions(
    graph: fx.Graph, choose: choosing.Choose, wishes: Wishes = ANY
) -> list[Site]:
    """Let confpred compute the convolutions of a graph, and halves of their backward, in place, and
    return them; `wishes` are those of `choose`, for tensors of other sizes."""
    matches = []
    for node in graph.nodes:
        if node.target is CONVOLUTION and sites.is_image(node.args[0]):
            has_bias = node.args[2] is not None
            matches.append(_Convolution(node, [sites.site_of(node, "fprop", bias=has_bias)]))
        elif node.target is CONVOLUTION_BACKWARD and sites.is_image(node.args[1]):
            groups, mask = node.args[9:11]
            bias = mask[2] and isinstance(groups, int) and sums_bias(groups)
            fields = {"bias": bias, "deterministic": is_deterministic()}
            halves = [sites.site_of(node, "dgrad")] if mask[0] else []
            halves += [sites.site_of(node, "wgrad", **fields)] if mask[1] else []
            matches.append(_Convolution(node, halves))
    return sites.choose_and_replace(graph, matches, choose, wishes)


@dataclass(slots=True)
class _Convolution:
    """A convolution, or its backward with the sites of both halves."""

    node: fx.Node
    sites: list[Site]

    def replace(self, wishes: Wishes) -> None:
        node = self.node
        if not any(site.is_ours for site in self.sites):
            return
        if node.target is CONVOLUTION:
            x, weight, bias = node.args[:3]
            given = (x, weight, None, bias, None, sites.call_of(node, self.sites, wishes))
            put_in_place(node, confpred.conv2d.default, given)
        else:
            mask: Any = node.args[10]
            text = sites.call_of(node, self.sites, wishes, mask=tuple(mask))
            put_in_place(node, confpred.conv2d_backward.default, (*node.args[:3], text))


def serve_norms(graph: fx.Graph, choose: choosing.Choose) -> list[Site]:
    """Let confpred compute the batch norms of a joint graph, in place, where both directions
    together are predicted to be faster than PyTorch's operators; return both of each."""
    claimed: set[fx.Node] = set()
    numbers: dict[Any, fx.Node] = {}
    matches = []
    for node in graph.find_nodes(op="call_function", target=BATCH_NORM_BACKWARD):
        chain = _norm(node, claimed)
        if chain is not None:
            claimed.update(chain.nodes)
            match = _Norm(chain, node, numbers)
            matches += [match] if all(site.problem for site in match.sites) else []
    return sites.choose_and_replace(graph, matches, choose)


def _norm(backward: fx.Node, claimed: set[fx.Node]) -> Chain | None:
    """Return the chain of the norm whose gradient `backward` is; None if kernels cannot compute
    both."""
    grad, x, weight, _, _, mean, _, training, _, mask = backward.args
    norm: Any = mean.args[0] if isinstance(mean, fx.Node) else None
    if norm is None or norm.target not in (BATCH_NORM, FIXED_NORM):
        return None
    frozen = norm.target is FIXED_NORM
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
    items = {item.args[1]: item for item in norm.users}
    if not wanted[0] or 0 not in items or len(items) != len(norm.users):
        return None
    if not _fits(val_of(x), items[0]):
        return None
    plain = Chain((norm, items[0]), norm)
    whole = following.follow(plain, (_sum_after, partial(_activation_after, backward)), claimed)
    return plain if _place(whole) is None else whole


def _fits(x: Any, out: fx.Node) -> bool:
    """Return whether the kernels can read images such as `x`, and write such as `out`."""
    made = val_of(out)
    return bool(
        isinstance(x, Tensor) and x.dtype in DTYPES and is_channels_last(x)
        and made.dtype is x.dtype and is_channels_last(made)
    )  # fmt: skip


def _sum_after(chain: Chain) -> Chain:
    """Take a sum as kernels read it in both directions."""
    longer = following.sum_after(chain)
    other = longer.residual
    if other is None or not is_channels_last(val_of(other)):
        return chain
    # The caller may write to an input that nothing else reads, before a backward pass reads it.
    return chain if other.op == "placeholder" and len(other.users) == 1 else longer


def _activation_after(backward: fx.Node, chain: Chain) -> Chain:
    """Take an activation whose gradient the norm's `backward` alone reads, and the residual's."""
    grad: Any = backward.args[0]
    if chain.sum is None and grad.users.keys() != {backward}:
        return chain
    return following.activation_after(chain, grad)


def _place(chain: Chain) -> fx.Node | None:
    """Return the node before which the operator of a norm's `chain` is to stand: the first one that
    needs a statistic, the last of the chain at the latest. None where an input is not there by
    then."""
    norm: Any = chain.norm
    inputs = [x for x in (*norm.args[:5], chain.residual) if isinstance(x, fx.Node)]
    statistics = [item for item in norm.users if item.args[1] != 0]
    first = min([chain.last, *(user for node in statistics for user in node.users)])
    return first if max(inputs) < first else None


class _Norm:
    """A batch norm with what follows it, and its gradient.

    Attributes:
        chain: the nodes of the forward.
        backward: the node of the norm's gradient.
        inner: the first node of the gradient: the activation's, or `backward`.
        numbers: the tensors of numbers that the graph has made so far.
        sites: of both directions.
    """

    def __init__(self, chain: Chain, backward: fx.Node, numbers: dict[Any, fx.Node]) -> None:
        self.chain, self.backward, self.numbers = chain, backward, numbers
        self.inner = backward if chain.gradient is None else chain.gradient
        norm: Any = chain.norm
        x = val_of(norm.args[0])
        fields = {
            "residual": chain.sum is not None,
            "affine": norm.args[1] is not None,
            "frozen": norm.target is FIXED_NORM,
        }
        sizes = [s if isinstance(s, int) else s.node.hint for s in x.shape]
        self.sites = [
            Site(sites.name_of(norm), direction,
                 problem_of(sizes, x.dtype, direction, chain.activation, **fields))
            for direction in ("forward", "backward")
        ]  # fmt: skip

    def replace(self, wishes: Wishes) -> None:
        choices = [site.choice for site in self.sites if site.choice is not None]
        if len(choices) == len(self.sites) and _gain_ms(*choices) > 0.0:
            self._replace_both(*choices)

    def _replace_both(self, ahead: Choice, back: Choice) -> None:
        norm: Any = self.chain.norm
        frozen = norm.target is FIXED_NORM
        x, weight, bias, mean, variance, *_, momentum, eps = norm.args
        image = tuple(ahead.problem.to_json()[name] for name in "nchw")
        call = NormCall(self.chain.activation, frozen, image, ahead.candidate, back.candidate)
        graph, text = norm.graph, call.text()
        empty = val_of(mean).new_empty(0)
        values = [val_of(self.chain.last), *([empty] * 4 if frozen else val_of(norm)[1:])]
        held = (eps,) if frozen else (eps, momentum)
        numbers = [self._number(value, empty) for value in held]
        with graph.inserting_before(_place(self.chain)):
            residual = self.chain.residual
            given = (x, weight, bias, residual, mean, variance, numbers, momentum, eps, text)
            new = graph.call_function(confpred.batch_norm.default, given)
            new.meta = norm.meta | {"val": values}
            results = [graph.call_function(operator.getitem, (new, i)) for i in range(5)]
        for result, each in zip(results, values, strict=True):
            result.meta = norm.meta | {"val": each}
        self.chain.last.replace_all_uses_with(results[0])
        for item in list(norm.users):
            place: Any = item.args[1]
            if place:
                item.replace_all_uses_with(results[place])
        # Without an activation, the gradient of the residual is that of the output.
        residual = residual if self.chain.gradient is not None else None
        with graph.inserting_before(self.inner):
            statistics = (mean, variance) if frozen else results[1:3]
            again = numbers if frozen else []
            grads = (self.inner.args[0], x, weight, bias, residual, *statistics, again, eps, text)
            put = graph.call_function(confpred.batch_norm_backward.default, grads)
        of_vectors = [empty if t is None else torch.empty_like(val_of(t)) for t in (weight, bias)]
        made = [torch.empty_like(val_of(x)), *of_vectors, val_of(self.backward.args[0])]
        put.meta = self.backward.meta | {"val": made}
        self.backward.replace_all_uses_with(put)
        if residual is not None:
            with graph.inserting_after(put):
                grad = graph.call_function(operator.getitem, (put, 3))
            grad.meta = dict(self.inner.meta)
            self.inner.replace_all_uses_with(grad, lambda user: user is not self.backward)

    def _number(self, value: Any, like: Tensor) -> fx.Node:
        """Return the node of a tensor that holds `value` and is `like` another, one for all norms
        of a graph."""
        made, graph = self.numbers, self.backward.graph
        key = value, like.dtype, like.device
        if key not in made:
            known = value if isinstance(value, fx.Node) else graph.find_nodes(op="placeholder")[-1]
            with graph.inserting_after(known):
                kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
                made[key] = graph.call_function(aten.full.default, ([1], value), kind)
            made[key].meta["val"] = like.new_empty(1)
        return made[key]


def _gain_ms(*choices: Choice) -> float:
    """Return the milliseconds that are saved; none where a direction is PyTorch's."""
    if any(choosing.why_pytorch(choice) is not None for choice in choices):
        return 0.0
    return sum((c.pytorch_ms or 0.0) - (c.predicted_ms or 0.0) for c in choices)
