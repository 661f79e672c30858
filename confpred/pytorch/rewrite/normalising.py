"""Norms: each, with its epilogue, becomes one operator a direction.

Both directions of a norm are replaced together, where that is predicted to save GPU time
(`norm_layers` finds them). Results of confpred's operators have the layout of their inputs. Nodes
keep the fake tensors of the capture, so that `layouts.keep_strides` finds results with new strides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.launch.assignment import Assignment
from confpred.predict.choice import Choice
from confpred.problem.norm import BATCH_NORM
from confpred.problem.norm_of_groups import NORM
from confpred.pytorch.rewrite import following, norm_layers, sites
from confpred.pytorch.rewrite.matches import Match, choose_and_replace, insert, insert_affine
from confpred.pytorch.rewrite.norm_layers import Layer, find_conversions, node_at
from confpred.pytorch.rewrite.passes import (
    is_of_backward,
    last_of_inputs,
    may_be_written,
    result_of,
    val_of,
)  # fmt: skip
from confpred.pytorch.run import choosing, operators  # noqa: F401  graphs call the operators

aten, confpred = torch.ops.aten, torch.ops.confpred


def lower_norms(
    graph: fx.Graph, choose: choosing.Choose, operations: Collection[str], layers: list[sites.Site]
) -> None:
    """Replace norms of a graph by confpred's operators in place, where these are predicted to be
    faster in both directions together.

    Args:
        graph: the graph to rewrite.
        choose: chooses for the problems of all norms in one call.
        operations: names of the operations to choose for.
        layers: gets the sites of the norms that confpred can compute, replaced or not.
    """
    claimed: set[fx.Node] = set()
    numbers: dict[Any, fx.Node] = {}
    read: dict[fx.Node, list[fx.Node]] = {}
    matches: list[Match] = []

    def take(layer: Layer | None) -> None:
        if layer is not None and all(layer.problems):
            claimed.update(layer.chain.nodes)
            both = layer.sites()
            matches.append(Match(both, partial(_replace, layer, both, numbers, read)))

    has_groups = NORM.name in operations
    lies = norm_layers.make_layout_test(graph, has_groups)
    for node in graph.nodes:
        if node.target is norm_layers.BATCH_NORM_BACKWARD and BATCH_NORM.name in operations:
            take(norm_layers.match_batch_norm(node, claimed, lies))
        if str(node.target) in norm_layers.GRADIENTS and has_groups:
            take(norm_layers.match_group_norm(norm_layers.norm_of(node), node, claimed, lies))
    # The later one of two norms that are summed takes the sum: the other's is there by then.
    for node in reversed(graph.nodes):
        if has_groups and node not in claimed:
            take(norm_layers.match_group_norm(node, None, claimed, lies))
    layers += choose_and_replace(graph, matches, choose)
    _read_copies(graph, read)


def _replace(
    layer: Layer, both: list[sites.Site], made: dict[Any, fx.Node],
    read: dict[fx.Node, list[fx.Node]],
) -> None:  # fmt: skip
    """Replace a norm and its epilogue by an operator a direction, if that gains time. `both` are
    the sites of `layer`; `made` caches the graph's tensors of numbers. `read` gets the operators of
    gradients by the weights and biases that others may write to before."""
    choices = [site.choice for site in both if site.choice is not None]
    if len(choices) < len(both) or _gain_ms(*choices) <= 0.0:
        for site in both:
            if (choice := site.choice) is not None:
                ms = choice.pytorch_ms
                site.choice = replace(choice, candidate=PYTORCH_OPERATOR, predicted_ms=ms)
        return
    norm, chain, back = layer.norm, layer.chain, layer.grad_path
    graph, frozen = norm.graph, norm.target is following.FIXED_NORM
    x, weight, bias, *running = layer.nodes()
    texts = [Assignment.of(choice).text() for choice in choices]
    forward, backward = (confpred.norm.default, confpred.norm_backward.default)
    if running:
        forward, backward = (confpred.batch_norm.default, confpred.batch_norm_backward.default)
    like, residual = val_of(x).new_empty(0, dtype=torch.float32), chain.residual
    scalars = layer.scalars[-1:] if frozen else layer.scalars[::-1]  # eps, then momentum
    numbers = [_add_number(value, like, graph, made) for value in scalars]
    with graph.inserting_before(layer.position()):
        if layer.scale:
            weight, bias = _add_scale(layer, norm.meta)
        operands = (x, weight, bias, residual, *running, numbers, *layer.scalars, texts[0])
        new = insert(graph, forward, operands, norm.meta)
    new.meta["val"] = [val_of(layer.ends[0]), *val_of(new)[1:]]
    results = [result_of(new, place) for place in range(len(val_of(new)))]
    for item in [item for item in norm.users if running and item.args[1]]:
        item.replace_all_uses_with(results[item.args[1]])
    for end in layer.ends:
        end.replace_all_uses_with(results[0])
    if layer.grad is None:
        return
    # The first node of the gradient. Without an activation, the residual's is that of the output.
    inner, residual = (back[-1], None) if chain.gradient is None else (chain.gradient, residual)
    statistics = running if frozen else results[1:3]
    more = (numbers if frozen else [], layer.scalars[-1]) if running else ()  # and eps
    vectors = [t for t in (weight, bias) if t is not None and (t in read or may_be_written(t))]
    with graph.inserting_before(inner):
        operands = (node_at(layer.grad), x, weight, bias, residual, *statistics, *more, texts[1])
        put = insert(graph, backward, operands, back[-1].meta)
    for vector in vectors:
        read.setdefault(vector, []).extend((new, put))
    values = val_of(put)
    for end in layer.grads.get(0, ())[:1]:
        values[0] = val_of(end)
    if residual is not None:
        values[3] = torch.empty_like(val_of(inner), dtype=values[3].dtype)
    for place, nodes in layer.grads.items():
        for node in nodes:
            node.replace_all_uses_with(result_of(put, place))
    if residual is not None:
        result = result_of(put, 3)
        for node in find_conversions(inner, val_of(x).dtype, back[0]) or ():
            node.replace_all_uses_with(result, lambda user: user is not back[0])


def recompute_norms(graph: fx.Graph) -> None:
    """Let products of the backward pass compute the result of a batch norm again, from the norm's
    input: its own gradient keeps that anyway, and Inductor's kernels read no more. So a result that
    a gate of channels multiplies is not kept. One that a layer's gradient reads from memory, too,
    is kept, and read. A maximum's, which compares last bits, reads the result: it is no product."""
    for norm in graph.find_nodes(op="call_function", target=confpred.batch_norm.default):
        x, weight, bias, residual, *_, text = norm.args
        problem: Any = Assignment.read(text).problem
        results = {item.args[1]: item for item in norm.users}
        has_products = any(user.target is aten.mul.Tensor for user in results[0].users)
        if residual is not None or problem.frozen or not has_products:
            continue
        readers = [user for user in results[0].users if is_of_backward(user)]
        if readers and all(reader.target is aten.mul.Tensor for reader in readers):
            with graph.inserting_before(min(readers)):
                again = _spell_out(norm, x, results, (weight, bias), problem.activation)
            for reader in readers:
                reader.replace_input_with(results[0], again)


def _spell_out(
    norm: fx.Node, x: fx.Node, results: Mapping[Any, fx.Node], affine: Sequence[Any], name: str
) -> fx.Node:
    """Return new nodes of PyTorch's operators that compute the result of `norm` again, in float32
    as its kernels do, with activation `name`. Mean, root, weight and bias become a scale and a
    shift first: with four vectors for each element, Inductor's sums are compute-bound."""
    graph, meta = norm.graph, norm.meta
    (mean, scale), (weight, bias) = (results[1], results[2]), affine
    if weight is not None:
        scale = insert(graph, aten.mul.Tensor, (scale, weight), meta)
    shift = insert(graph, aten.neg.default, (mean,), meta)
    shift = insert(graph, aten.mul.Tensor, (shift, scale), meta)
    if bias is not None:
        shift = insert(graph, aten.add.Tensor, (shift, bias), meta)
    y = insert_affine(x, scale, shift, meta)
    for target, named in following.ACTIVATIONS.items():
        for more in [more for more, known in named.items() if known == name]:
            y = insert(graph, target, (y, *more), meta)
    return insert(graph, torch.ops.prims.convert_element_type.default, (y, val_of(x).dtype), meta)


def _read_copies(graph: fx.Graph, read: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Let operators read copies of the keys of `read`, which one launch a dtype makes of inputs in
    the forward pass: PyTorch's gradients do not read a bias, so that a program may write to it
    before they are computed."""
    groups: dict[Any, list[fx.Node]] = {}
    for vector in read:
        groups.setdefault((last_of_inputs(vector), val_of(vector).dtype), []).append(vector)
    for (anchor, dtype), vectors in groups.items():
        with graph.inserting_after(anchor):
            made = insert(graph, confpred.convert.default, (vectors, dtype), {})
        for place, vector in enumerate(vectors):
            copy = result_of(made, place)
            for reader in read[vector]:
                reader.replace_input_with(vector, copy)


def _add_scale(layer: Layer, meta: Any) -> list[fx.Node]:
    """Return new nodes of the weight and bias of each sample and channel: those of the norm with an
    adaptive norm's factor and term behind them."""
    graph, (_, weight, bias, *_) = layer.norm.graph, layer.nodes()
    channels = val_of(layer.nodes()[0]).shape[1]

    def flat(place: Any) -> fx.Node:
        return insert(graph, aten.reshape.default, (node_at(place), [-1, channels]), meta)

    factor, term = map(flat, layer.scale)
    if weight is None:
        return [factor, term]
    scaled = [insert(graph, aten.mul.Tensor, (factor, vector), meta) for vector in (weight, bias)]
    return [scaled[0], insert(graph, aten.add.Tensor, (scaled[1], term), meta)]


def _add_number(value: Any, like: Tensor, graph: fx.Graph, made: dict[Any, fx.Node]) -> fx.Node:
    """Return the node of a tensor that holds `value`, of the dtype and device of `like`. All norms
    of `graph` share it by `made`."""
    key = value, like.dtype, like.device
    if key not in made:
        anchor = value if isinstance(value, fx.Node) else graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(anchor):
            kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
            made[key] = graph.call_function(aten.full.default, ([1], value), kind)
        made[key].meta["val"] = like.new_empty(1)
    return made[key]


def _gain_ms(*choices: Choice) -> float:
    """Return the milliseconds that both directions save; 0 if PyTorch computes one of them."""
    if any(choosing.why_pytorch(choice) is not None for choice in choices):
        return 0.0
    return sum((c.pytorch_ms or 0.0) - (c.predicted_ms or 0.0) for c in choices)
