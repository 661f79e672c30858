"""Training: a convolution, and both halves of its backward, become operators of a joint graph of
forward and backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from confpred.pytorch.rewrite import causal, sites
from confpred.pytorch.rewrite.matches import Match, choose_and_replace
from confpred.pytorch.rewrite.passes import put_in_place, val_of
from confpred.pytorch.run import choosing, operators  # noqa: F401  graphs call the operators
from confpred.pytorch.run.convolve import is_deterministic, sums_bias

aten = torch.ops.aten
confpred = torch.ops.confpred


def lower_convolutions(
    graph: fx.Graph, choose: choosing.Choose, constraints: choosing.Constraints,
    compiled: bool = False,
) -> list[sites.Site]:  # fmt: skip
    """Replace convolutions of a graph, and halves of their backward, by confpred's operators
    where these are chosen, and return all sites. `constraints` are for tensors of other
    sizes; `compiled`: whether Inductor compiles the other operators."""
    layers = causal.lower_convolutions(graph, choose, constraints, fuses=False)
    matches = []
    for node in graph.nodes:
        if node.target not in (sites.CONVOLUTION, sites.CONVOLUTION_BACKWARD):
            continue
        arguments = sites.arguments_of(node)
        if not sites.is_image(image := arguments.image):
            continue
        if node.target is sites.CONVOLUTION:
            own = [sites.site_of(node, "fprop", bias=arguments.bias is not None)]
        else:
            mask = arguments.mask
            sums = mask[2] and isinstance(arguments.groups, int) and sums_bias(arguments.groups)
            fields: Any = {"bias": sums, "deterministic": is_deterministic()}
            own = [sites.site_of(node, "dgrad")] * mask[0]
            own += [sites.site_of(node, "wgrad", **fields)] * mask[1]
        put = partial(_replace_convolution, node, own, constraints, compiled)
        ends: Any = ()
        if any(site.by_layout for site in own):
            ends = ([image], [node])
            if node.target is sites.CONVOLUTION_BACKWARD:
                ends = ([node.args[0], image], [item for item in node.users if item.args[1] == 0])
        matches.append(Match(own, put, *ends))
    return layers + choose_and_replace(graph, matches, choose)


def _replace_convolution(
    node: fx.Node, own: list[sites.Site], constraints: choosing.Constraints, compiled: bool
) -> None:
    if not any(site.is_lowered for site in own):
        return
    if compiled and node.target is sites.CONVOLUTION_BACKWARD:
        _sum_apart(node, own)
    call = sites.call_of(node, own, constraints)
    if node.target is sites.CONVOLUTION:
        x, weight, bias = node.args[:3]
        put_in_place(node, confpred.conv2d.default, (x, weight, None, bias, None, call))
    else:
        put_in_place(node, confpred.conv2d_backward.default, (*node.args[:3], call))


def _sum_apart(node: fx.Node, own: list[sites.Site]) -> None:
    """Compute the gradient of the bias by a separate sum, where no kernel computes it with the
    filter's: the sum inside PyTorch's operator is several times as slow as Inductor's."""
    mask: Any = node.args[10]
    summing = [s for s in own if sites.is_convolution(s.problem) and s.problem.bias]
    if not mask[2] or any(site.is_lowered for site in summing):
        return
    node.args = (*node.args[:10], [*mask[:2], False])
    for site in summing:
        site.problem = replace(site.problem, bias=False)  # type: ignore[type-var]
    for item in [item for item in node.users if item.args[1] == 2]:
        axes = [0, *range(2, val_of(node.args[0]).dim())]
        put_in_place(item, aten.sum.dim_IntList, (node.args[0], axes))
