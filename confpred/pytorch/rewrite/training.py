"""Training: each direction of a convolution, and of a batch norm with what follows it, becomes one
operator of a joint graph of forward and backward.

    convolution, and both halves of its backward
    batch norm -> [+ residual] -> [activation], and the gradient of that, whose argument of the
        activation is computed again

Both directions of a norm are replaced together, where that is predicted to save GPU time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.launch.assignment import Assignment
from confpred.predict.choice import Choice
from confpred.pytorch.rewrite import causal, following, sites
from confpred.pytorch.rewrite.matches import Match, choose_and_replace
from confpred.pytorch.rewrite.passes import put_in_place, result_of, val_of
from confpred.pytorch.run import choosing, operators  # noqa: F401  graphs call the operators
from confpred.pytorch.run.convolve import is_deterministic, sums_bias
from confpred.pytorch.run.loading import DTYPES, is_channels_last
from confpred.pytorch.run.norms import problem_of

aten = torch.ops.aten
confpred = torch.ops.confpred
BATCH_NORM = aten._native_batch_norm_legit_functional.default
BATCH_NORM_BACKWARD = aten.native_batch_norm_backward.default


def serve_convolutions(
    graph: fx.Graph, choose: choosing.Choose, wishes: choosing.Wishes, compiled: bool = False
) -> list[sites.Site]:
    """Let confpred compute the convolutions of a graph, and halves of their backward, in place, and
    return them; `wishes` are those of `choose`, for tensors of other sizes; `compiled` says whether
    Inductor computes the rest."""
    found = causal.serve(graph, choose, wishes, fuses=False)
    matches = []
    for node in graph.nodes:
        if node.target not in (sites.CONVOLUTION, sites.CONVOLUTION_BACKWARD):
            continue
        image, _, bias, *_, groups = sites.arguments_of(node)[:9]
        if not sites.is_image(image):
            continue
        if node.target is sites.CONVOLUTION:
            own = [sites.site_of(node, "fprop", bias=bias is not None)]
        else:
            mask: Any = node.args[10]
            sums = mask[2] and isinstance(groups, int) and sums_bias(groups)
            fields: Any = {"bias": sums, "deterministic": is_deterministic()}
            own = [sites.site_of(node, "dgrad")] * mask[0]
            own += [sites.site_of(node, "wgrad", **fields)] * mask[1]
        put = partial(_replace_convolution, node, own, wishes, compiled)
        ends: Any = ()
        if any(site.by_layout for site in own):
            ends = ([image], [node])
            if node.target is sites.CONVOLUTION_BACKWARD:
                ends = ([node.args[0], image], [item for item in node.users if item.args[1] == 0])
        matches.append(Match(own, put, *ends))
    return found + choose_and_replace(graph, matches, choose)


def _replace_convolution(
    node: fx.Node, own: list[sites.Site], wishes: choosing.Wishes, compiled: bool
) -> None:
    if not any(site.is_ours for site in own):
        return
    if compiled and node.target is sites.CONVOLUTION_BACKWARD:
        _sum_apart(node, own)
    call = sites.call_of(node, own, wishes)
    if node.target is sites.CONVOLUTION:
        x, weight, bias = node.args[:3]
        put_in_place(node, confpred.conv2d.default, (x, weight, None, bias, None, call))
    else:
        put_in_place(node, confpred.conv2d_backward.default, (*node.args[:3], call))


def _sum_apart(node: fx.Node, own: list[sites.Site]) -> None:
    """Let a sum of its own compute the gradient of the bias, where no kernel does on its way: the
    operator's would be PyTorch's, which is several times as slow as Inductor's."""
    mask: Any = node.args[10]
    summing = [s for s in own if sites.is_convolution(s.problem) and s.problem.bias]
    if not mask[2] or any(site.is_ours for site in summing):
        return
    node.args = (*node.args[:10], [*mask[:2], False])
    for site in summing:
        site.problem = replace(site.problem, bias=False)  # type: ignore[type-var]
    for item in [item for item in node.users if item.args[1] == 2]:
        axes = [0, *range(2, val_of(node.args[0]).dim())]
        put_in_place(item, aten.sum.dim_IntList, (node.args[0], axes))


def serve_norms(graph: fx.Graph, choose: choosing.Choose) -> list[sites.Site]:
    """Let confpred compute the batch norms of a joint graph, in place, where both directions
    together are predicted to be faster than PyTorch's operators; return both of each."""
    claimed: set[fx.Node] = set()
    numbers: dict[Any, fx.Node] = {}
    matches = []
    for node in graph.find_nodes(op="call_function", target=BATCH_NORM_BACKWARD):
        chain = _norm(node, claimed)
        if chain is not None:
            claimed.update(chain.nodes)
            both = [_site(chain, direction) for direction in ("forward", "backward")]
            if all(site.problem for site in both):
                put = partial(_replace_norm, chain, node, both, numbers)
                matches.append(Match(both, put))
    return choose_and_replace(graph, matches, choose)


def _norm(backward: fx.Node, claimed: set[fx.Node]) -> following.Chain | None:
    """Return the chain of the norm whose gradient `backward` is; None if kernels cannot compute
    both."""
    given: Any = backward.args
    grad, x, weight, _, _, mean, _, training, _, mask = given
    norm: Any = mean.args[0] if isinstance(mean, fx.Node) else None
    if norm is None or norm.target not in (BATCH_NORM, following.FIXED_NORM):
        return None
    frozen = norm.target is following.FIXED_NORM
    bias, statistics = norm.args[2], norm.args[3:5]
    vectors = [*statistics, *(t for t in (weight, bias) if t is not None)]
    items = {item.args[1]: item for item in norm.users}
    if (
        bool(training) is frozen or not (frozen or norm.args[5]) or not mask[0]
        or norm.args[0] is not x or norm.args[1] is not weight or (weight is None) != (bias is None)
        or not all(isinstance(t, fx.Node) for t in (grad, *vectors))
        or any(val_of(t).dtype is not torch.float32 for t in vectors)
        or 0 not in items or len(items) != len(norm.users)
    ):  # fmt: skip
        return None
    images = val_of(x), val_of(items[0])  # that kernels read and write
    if images[0].dtype not in DTYPES or images[0].dim() != 4:
        return None
    if not all(map(is_channels_last, images)):
        return None
    plain = following.Chain((norm, items[0]), norm)
    whole = following.follow(plain, (_sum_after, partial(_activation_after, backward)), claimed)
    return plain if _place(whole) is None else whole


def _sum_after(chain: following.Chain) -> following.Chain:
    """Take a sum as kernels read it in both directions."""
    longer = following.sum_after(chain)
    other = longer.residual
    if other is None or not is_channels_last(val_of(other)):
        return chain
    # The caller may write to an input that nothing else reads, before a backward pass reads it.
    return chain if other.op == "placeholder" and len(other.users) == 1 else longer


def _activation_after(backward: fx.Node, chain: following.Chain) -> following.Chain:
    """Take an activation whose gradient the norm's `backward` alone reads, and the residual's."""
    grad: Any = backward.args[0]
    if chain.sum is None and grad.users.keys() != {backward}:
        return chain
    return following.activation_after(chain, grad)


def _place(chain: following.Chain) -> fx.Node | None:
    """Return the node before which the operator of a norm's `chain` is to stand: the first one that
    needs a statistic, the last of the chain at the latest. None where an input is not there by
    then."""
    norm: Any = chain.norm
    inputs = [x for x in (*norm.args[:5], chain.residual) if isinstance(x, fx.Node)]
    statistics = [item for item in norm.users if item.args[1] != 0]
    first = min([chain.last, *(user for node in statistics for user in node.users)])
    return first if max(inputs) < first else None


def _site(chain: following.Chain, direction: str) -> sites.Site:
    """Return the site of a direction of a norm with what follows it."""
    norm: Any = chain.norm
    x = val_of(norm.args[0])
    problem = problem_of(
        sites.sizes_of(x), x.dtype, direction, chain.activation, residual=chain.sum is not None,
        affine=norm.args[1] is not None, frozen=norm.target is following.FIXED_NORM,
    )  # fmt: skip
    return sites.Site(sites.name_of(norm), direction, problem)


def _replace_norm(
    chain: following.Chain, backward: fx.Node, both: list[sites.Site], made: dict[Any, fx.Node]
) -> None:
    """Put an operator a direction in the place of a norm with what follows it; `made` are the
    tensors of numbers that the graph has."""
    choices = [site.choice for site in both if site.choice is not None]
    if len(choices) < len(both) or _gain_ms(*choices) <= 0.0:
        for site, choice in zip(both, choices, strict=False):
            theirs = choice.pytorch_ms
            site.choice = replace(choice, candidate=PYTORCH_OPERATOR, predicted_ms=theirs)
        return
    norm: Any = chain.norm
    graph, frozen = norm.graph, norm.target is following.FIXED_NORM
    x, weight, bias, mean, variance, *_, momentum, eps = norm.args
    ahead, back = (Assignment.of(choice).text() for choice in choices)
    empty, residual = val_of(mean).new_empty(0), chain.residual
    held = (eps,) if frozen else (eps, momentum)
    numbers = [_number(value, empty, graph, made) for value in held]
    with graph.inserting_before(_place(chain)):
        given = (x, weight, bias, residual, mean, variance, numbers, momentum, eps, ahead)
        new = graph.call_function(confpred.batch_norm.default, given)
    values = [val_of(chain.last), *([empty] * 4 if frozen else val_of(norm)[1:])]
    new.meta = norm.meta | {"val": values}
    results = [result_of(new, place) for place in range(5)]
    for item in list(norm.users):
        place: Any = item.args[1]
        if place:
            item.replace_all_uses_with(results[place])
    chain.last.replace_all_uses_with(results[0])
    # The first node of the gradient. Without an activation, the residual's is that of the output.
    inner, residual = (backward, None) if chain.gradient is None else (chain.gradient, residual)
    with graph.inserting_before(inner):
        statistics, again = ((mean, variance), numbers) if frozen else (results[1:3], [])
        given = (inner.args[0], x, weight, bias, residual, *statistics, again, eps, back)
        put = graph.call_function(confpred.batch_norm_backward.default, given)
    of_vectors = [empty if t is None else torch.empty_like(val_of(t)) for t in (weight, bias)]
    values = [torch.empty_like(val_of(x)), *of_vectors, val_of(backward.args[0])]
    put.meta = backward.meta | {"val": values}
    backward.replace_all_uses_with(put)
    if residual is not None:
        inner.replace_all_uses_with(result_of(put, 3), lambda user: user is not backward)


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


def _gain_ms(*choices: Choice) -> float:
    """Return the milliseconds that are saved; none where a direction is PyTorch's."""
    if any(choosing.why_pytorch(choice) is not None for choice in choices):
        return 0.0
    return sum((c.pytorch_ms or 0.0) - (c.predicted_ms or 0.0) for c in choices)
