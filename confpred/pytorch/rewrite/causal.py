"""Causal convolutions of lines: a padding on the left, or a cut at the end, is part of the problem.

    pad (left, zeros) -> convolution, and its backward -> gradient of the pad
    convolution (padded on both sides) -> slice, and gradient of the slice -> its backward

One kernel computes either. Where none is chosen, the graph stays as it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from confpred.problem.conv2d import output_size
from confpred.pytorch.rewrite import following, sites
from confpred.pytorch.rewrite.matches import Match, choose_and_replace
from confpred.pytorch.rewrite.passes import is_pointwise, may_be_written, put_in_place, val_of
from confpred.pytorch.rewrite.sites import Causal
from confpred.pytorch.run.choosing import Choose, Constraints
from confpred.pytorch.run.convolve import is_deterministic, sums_bias
from confpred.pytorch.run.loading import layout_of

aten, confpred = torch.ops.aten, torch.ops.confpred
_PATTERNS = (following.take_sum, following.take_activation)


def lower_convolutions(
    graph: fx.Graph, choose: Choose, constraints: Constraints, *, fuses: bool
) -> list[sites.Site]:
    """Replace the causal layers of a graph by confpred's operators in place, where these are
    chosen, and return the sites of those that it replaced.

    Args:
        graph: the graph to rewrite.
        choose: chooses for the sizes of the capture.
        constraints: bound its choices, and those that are made later for other sizes.
        fuses: whether epilogues are fused, as in inference.
    """
    matches: list[Match] = []
    claimed: set[fx.Node] = set()
    for node in reversed(graph.nodes):  # of two layers that are summed, the later takes the sum
        if node.target in (sites.CONVOLUTION, sites.CONVOLUTION_BACKWARD):
            layer = match_padded(node) or match_cut(node)
            if layer is not None:
                matches.append(_match(layer, constraints, fuses, claimed))
    matches.reverse()
    if matches:
        choose_and_replace(graph, matches, choose)
    served = [match.sites for match in matches if any(site.is_lowered for site in match.sites)]
    return [site for own in served for site in own]


def match_padded(node: fx.Node) -> Causal | None:
    """Return the causal layer of a convolution, or its backward, whose input is padded with zeros
    on the left; None for others."""
    geometry, pad = _geometry(node), sites.arguments_of(node).image
    if geometry is None or pad.target is not aten.constant_pad_nd.default:
        return None
    stride, padding, dilation, window = geometry
    x, amounts, *value = pad.args
    if padding or amounts[1:] != [0] or type(amounts[0]) is not int or any(value):
        return None
    left, size = amounts[0], val_of(x).shape[-1]
    if left < 1 or layout_of(val_of(x)) != "channels_first":
        return None
    extra = left  # positions that the result would have more if the input were padded on both sides
    if stride != 1:
        if not isinstance(size, int):
            return None
        extra = output_size(size, window, stride, left, dilation)
        extra -= output_size(size + left, window, stride, 0, dilation)
    is_forward = node.target is sites.CONVOLUTION
    # The backward pass reads the padded input, for which the forward pass has to read it, too: else
    # PyTorch may pad in the backward pass, when others have written to `x`.
    if may_be_written(x) and not (is_forward and len(pad.users) == 1):
        return None
    if is_forward:
        return Causal(node, left, extra, pad, node)
    grads = [user for item in node.users if item.args[1] == 0 for user in item.users]
    unpad = aten.constant_pad_nd.default, ([-left, 0],)
    if any(_target_and_others(user) != unpad for user in grads):
        return None
    return Causal(node, left, extra, pad, node, tuple(grads))


def match_cut(node: fx.Node) -> Causal | None:
    """Return the causal layer of a convolution with the slice of its result, or of its backward
    with the slice's; None for others."""
    geometry, x = _geometry(node), sites.arguments_of(node).image
    if geometry is None or layout_of(val_of(x)) != "channels_first":
        return None
    if node.target is sites.CONVOLUTION:
        users = list(node.users)
        cut = _cut_places(users[0], val_of(node)) if len(users) == 1 else None
        return None if cut is None else Causal(node, geometry[1], cut, None, users[0])
    spread: Any = node.args[0]
    if spread.target is not aten.slice_backward.default:
        return None
    grad, _, axis, start, _, step = spread.args
    cut = _constant(val_of(spread).shape[-1] - val_of(grad).shape[-1])
    if (axis, start, step) != (2, 0, 1) or not cut:
        return None
    return Causal(node, geometry[1], cut, None, node)


def _geometry(node: fx.Node) -> tuple[int, int, int, int] | None:
    """Return stride, padding, dilation and filter size of a convolution of lines, else None."""
    geometry, arguments = sites.geometry_of(node), sites.arguments_of(node)
    window = val_of(arguments.filters).shape[2:]
    if geometry is None or arguments.transposed or len(window) != 1:
        return None
    ((stride,), (padding,), (dilation,), _), (size,) = geometry, window
    return (stride, padding, dilation, size) if isinstance(size, int) else None


def _target_and_others(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the target of `node` and its arguments behind the first one."""
    return node.target, tuple(list(a) if isinstance(a, (list, tuple)) else a for a in node.args[1:])


def _cut_places(node: fx.Node, val: Any) -> int | None:
    """Return how many positions `node` cuts at the end of `val`; None where that is 0 or no
    constant, where it does something else, and where a reader may depend on its strides."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4 or node.kwargs:
        return None
    _, axis, start, _ = node.args
    if axis not in (2, -1) or start != 0:
        return None
    is_free = all(map(is_pointwise, node.users))
    return _constant(val.shape[-1] - val_of(node).shape[-1]) if is_free else None


def _constant(number: Any) -> int | None:
    """Return a number that may be an expression of open sizes, if it is always the same and not
    0; else None."""
    constant = number if isinstance(number, int) else number.node.maybe_as_int()
    return constant or None


def _match(layer: Causal, constraints: Constraints, fuses: bool, claimed: set[fx.Node]) -> Match:
    """Return the match of `layer`. If it `fuses`, its nodes are added to those that later matches
    must not take, `claimed`."""
    node, arguments = layer.node, sites.arguments_of(layer.node)
    fields: dict[str, Any] = {"causal": layer}
    if node.target is sites.CONVOLUTION:
        nodes = (node,) if layer.last is node else (node, layer.last)
        chain = following.Chain(nodes)
        if fuses:
            chain = following.follow(chain, _PATTERNS, claimed)
            claimed.update(chain.nodes)
        bias, residual = arguments.bias is not None, chain.sum is not None
        named: Any = {"bias": bias, "activation": chain.activation, "residual": residual}
        site = sites.site_of(node, "fprop", **fields, **named)
        site.fused = (*["add"] * residual, *[chain.activation] * (chain.activation != "none"))
        return Match([site], partial(_replace, layer, chain, site, constraints))
    mask = arguments.mask
    sums = mask[2] and sums_bias(arguments.groups)
    of_weight: Any = {"bias": sums, "deterministic": is_deterministic()}
    own = [sites.site_of(node, "dgrad", **fields)] * mask[0]
    own += [sites.site_of(node, "wgrad", **fields, **of_weight)] * mask[1]
    return Match(own, partial(_replace_backward, layer, own, constraints))


def _replace(
    layer: Causal, chain: following.Chain, site: sites.Site, constraints: Constraints
) -> None:
    """Replace `chain`, which begins with the convolution of `layer`, by confpred's operator where
    `site` says so."""
    if not site.is_lowered:
        return
    node, arguments = layer.node, sites.arguments_of(layer.node)
    call = sites.call_of(node, [site], constraints, layer, activation=chain.activation)
    operands = (layer.x, arguments.filters, None, arguments.bias, chain.residual)  # None: no scale
    put_in_place(chain.last, confpred.conv2d.default, (*operands, call))


def _replace_backward(layer: Causal, own: list[sites.Site], constraints: Constraints) -> None:
    if not any(site.is_lowered for site in own):
        return
    node = layer.node
    call = sites.call_of(node, own, constraints, layer)
    weight = sites.arguments_of(node).filters
    new = put_in_place(node, confpred.conv2d_backward.default, (layer.grad, layer.x, weight, call))
    for item in [item for item in new.users if item.args[1] == 0]:
        for grad in layer.unpadded:  # the operator's gradient is that of `x` already
            grad.replace_all_uses_with(item)
            item.meta["val"] = val_of(grad)
            grad.graph.erase_node(grad)
