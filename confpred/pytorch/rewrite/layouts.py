"""The layout of a captured graph, decided once for all of it.

Tensor cores, and confpred's kernels, read channels last. Where convolutions in half precision read
images with their channels first, the first images are copied into channels last, and all nodes
behind them follow. Results keep their layout, and so do inputs of nodes that read memory in order.
Volumes become channels last where that is expected to save more time than the copies take.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from confpred.problem.device import Device
from confpred.pytorch.rewrite import sites
from confpred.pytorch.rewrite.matches import copy_ms
from confpred.pytorch.rewrite.passes import val_of
from confpred.pytorch.run import choosing
from confpred.pytorch.run.convolve import Call
from confpred.pytorch.run.library import HALF
from confpred.pytorch.run.loading import (
    LAST_FORMATS,
    dense,
    layout_of,
    lies_channels_last,
)

log = logging.getLogger("confpred")
aten, confpred = torch.ops.aten, torch.ops.confpred
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_CONFPRED_CONVOLUTIONS = (confpred.conv2d.default, confpred.conv2d_backward.default)
#: Batch norms lie as they did: only those of channels-last images are replaced.
_NORMS = (confpred.norm.default, confpred.norm_backward.default)
#: Tags of operators whose results have sizes that depend on values.
_OF_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
#: Tags of operators that read memory in a certain order, and of those that draw random numbers.
_ORDERED_TAGS = {
    torch.Tag.nondeterministic_seeded, torch.Tag.needs_fixed_stride_order,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
}  # fmt: skip


def reads_memory_in_order(node: fx.Node) -> bool:
    """Return whether the result of `node` may depend on the strides of its inputs: an operator of
    the user's, a Triton kernel, control flow, random numbers, or an operator that says so."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(target, torch._ops.OpOverload) or target in _CONVOLUTIONS:
        return False
    is_known = target.namespace in ("aten", "prims", "confpred")
    return not is_known or target is aten.view.dtype or not _ORDERED_TAGS.isdisjoint(target.tags)


#: Numbers of dimensions of images, and of images and volumes.
_IMAGES, _VOLUMES = (4,), (4, 5)
#: By how much longer PyTorch's operator for a dense volume in half precision takes channels first,
#: relative to `sites.convolution_s`. The medians of an H200 are 1.3 (forward), 0.6 (gradient of the
#: input) and 0.25 (of the filter): ``datasets/rank_dense``.
_SAVED = 0.5


class _KeepsLayout(Exception):
    """Why a graph cannot become channels last."""


def to_channels_last(
    graph: fx.Graph, device: Device | None = None, constraints: choosing.Constraints = choosing.ANY
) -> None:
    """Bring the images of a graph, whose views are reshapes, into channels last in place, all or
    nothing, if its convolutions want that; volumes too, if that saves time on `device`.

    Results, and what `reads_memory_in_order` gets, keep the strides that they had.
    """
    saved_ms = 0.0 if device is None else _saved_ms(graph, device, constraints)
    if device is None or not saved_ms or not _bring(graph, _VOLUMES, device, saved_ms):
        _bring(graph, _IMAGES)


def _saved_ms(graph: fx.Graph, device: Device, constraints: choosing.Constraints) -> float:
    """Return the milliseconds that dense volumes are expected to save channels last; 0 where
    PyTorch would compute a grouped layer, for which it takes several times as long there."""
    saved_ms, grouped = 0.0, list[Any]()
    for node in graph.nodes:
        if node.target not in _CONVOLUTIONS:
            continue
        image, *_, groups = sites.arguments_of(node)[:9]
        if val_of(image).dim() != 5:
            continue
        directions = sites.directions_of(node)
        if groups != 1:
            grouped += [sites.site_of(node, direction) for direction in directions]
        elif val_of(image).dtype in HALF and not _is_last(val_of(image)):
            saved_ms += 1e3 * _SAVED * len(directions) * sites.convolution_s(node, device)
    if not saved_ms:
        return 0.0
    problems = [site.by_layout.get("channels_last") for site in grouped]
    if None in problems:
        return 0.0
    choices = choosing.preview(problems, device, constraints) if problems else []
    return saved_ms if all(c and choosing.why_pytorch(c) is None for c in choices) else 0.0


def _bring(
    graph: fx.Graph, dims: tuple[int, ...], device: Device | None = None, saved_ms: float = 0.0
) -> bool:
    """Bring tensors of these numbers of dimensions into channels last, all or nothing, and return
    whether any became so. On a `device`, copies of volumes must take less than `saved_ms`."""
    if not any(_is_channels_first(node, dims) for node in graph.nodes):
        return False
    try:
        vals, copies = _propagate(graph, dims)
    except _KeepsLayout as reason:
        log.debug("the graph keeps its layout: %s", reason)
        return False
    if device is not None:
        sources = dict.fromkeys(source for source, _, _ in copies if vals[source].dim() == 5)
        copies_ms = sum(copy_ms(vals[source], device) for source in sources)
        if copies_ms >= saved_ms:
            log.debug("volumes keep their layout: copies take %.3f ms", copies_ms)
            return False
    made: dict[tuple[fx.Node, Any], fx.Node] = {}  # copies
    for source, layout, reader in copies:
        copied = made.get((source, layout))
        if copied is None:
            # At once behind it: a joint graph is cut where the last result of the forward pass is.
            with graph.inserting_after(_last_of_inputs(source)):
                copied = made[source, layout] = _copy(graph, source, vals[source], layout, reader)
        reader.replace_input_with(source, copied)
    for node, val in vals.items():
        node.meta["val"] = val
    graph.lint()
    return True


def filters_to_channels_last(graph: fx.Graph) -> None:
    """Bring the filters of confpred's convolutions into the layout that kernels read, in place:
    Inductor's pass that computes or casts a filter writes that layout as well."""
    made: dict[fx.Node, fx.Node] = {}
    for target, place in ((confpred.conv2d.default, 1), (confpred.conv2d_backward.default, 2)):
        for node in graph.find_nodes(op="call_function", target=target):
            source: Any = node.args[place]
            val, x = val_of(source), val_of(node.args[place - 1])
            if lies_channels_last(val) or layout_of(x) != "channels_last":
                continue
            if source not in made:
                made[source] = _add_dense_copy(source, val, "channels_last", node)
            node.replace_input_with(source, made[source])


def keep_strides(graph: fx.Graph) -> None:
    """Keep the strides of a graph's results, and of inputs of nodes that `reads_memory_in_order`,
    by copies in place. confpred's operators of lines, volumes and norms may return another layout
    than PyTorch's, which all other nodes follow."""
    if not any(_is_of_another_rank(node) or node.target in _NORMS for node in graph.nodes):
        return
    vals: dict[fx.Node, Any] = {}
    made: dict[Any, fx.Node] = {}
    mode = _mode_of(graph)
    for node in list(graph.nodes):
        vals[node] = val_of(node)
        moved = [n for n in node.all_input_nodes if _has_new_strides(val_of(n), vals[n])]
        if node.op == "output" or (moved and _needs_captured_strides(node)):
            for source in moved:
                key = source, isinstance(node.target, torch._ops.HigherOrderOperator)
                if key not in made:
                    made[key] = _add_copy_like(source, vals[source], val_of(source), node)
                node.replace_input_with(source, made[key])
        elif moved or _is_of_another_rank(node) or node.target in _NORMS:
            if _is_of_another_rank(node):
                _copy_inputs(node, vals, made)
            arguments, named = fx.map_arg((node.args, node.kwargs), vals.__getitem__)
            run: Any = node.target
            with mode:
                vals[node] = run(*arguments, **named)
    for node, val in vals.items():
        node.meta["val"] = val
    graph.lint()


def _copy_inputs(node: fx.Node, vals: dict[fx.Node, Any], made: dict[Any, fx.Node]) -> None:
    """Let a convolution of lines or volumes read them in the layout that it was chosen for."""
    call: Any = node.args[-1]
    problems = [hint.problem for hint in Call.read(call).hints if hint is not None]
    if not problems:
        return  # PyTorch's operator computes it
    layout = getattr(problems[0], "layout", "channels_last")
    for source in node.all_input_nodes[: _CONFPRED_CONVOLUTIONS.index(node.target) + 1]:
        val = vals[source]
        if layout_of(val) == layout:
            continue
        if (source, layout) not in made:
            made[source, layout] = _add_dense_copy(source, val, layout, node)
        copy = made[source, layout]
        node.replace_input_with(source, copy)
        vals[copy] = val_of(copy)


def _is_of_another_rank(node: fx.Node) -> bool:
    """Return whether confpred's operator computes a convolution of lines or volumes."""
    return node.target in _CONFPRED_CONVOLUTIONS and val_of(node.args[0]).dim() != 4


def _needs_captured_strides(node: fx.Node) -> bool:
    """Return whether `node` needs its inputs with the strides of the capture."""
    tags = getattr(node.target, "tags", ())
    is_confpred = getattr(node.target, "namespace", "") == "confpred"  # which take every layout
    in_order = node.target is aten.as_strided.default or not _OF_VALUES.isdisjoint(tags)
    return in_order or (reads_memory_in_order(node) and not is_confpred)


def _is_channels_first(node: fx.Node, dims: tuple[int, ...]) -> bool:
    """Return whether `node` is a convolution in half precision, channels first, of a tensor of one
    of these numbers of dimensions."""
    if node.target is not aten.convolution.default or node.args[6]:
        return False
    val = val_of(node.args[0])
    return val.dim() in dims and val.dtype in HALF and not _is_last(val)


def _is_last(val: Any) -> bool:
    """Return whether an image or volume is channels last; a volume of one channel only if PyTorch
    takes it for one, as its convolution is large."""
    if val.dim() != 5:
        return lies_channels_last(val)
    like = torch.empty_like(val, memory_format=LAST_FORMATS[5])
    return bool(val.stride() == like.stride())


def _propagate(
    graph: fx.Graph, dims: tuple[int, ...]
) -> tuple[dict[fx.Node, Any], list[tuple[fx.Node, Any, fx.Node]]]:
    """Return the fake tensors of all nodes in the new layout, and the copies that it needs: the
    source, the layout of its copy, and the node that reads it."""
    vals: dict[fx.Node, Any] = {}
    copies: list[tuple[fx.Node, Any, fx.Node]] = []
    mode = _mode_of(graph)
    for node in graph.nodes:
        vals[node] = val_of(node)
        if node.op == "output" or (node.op == "call_function" and reads_memory_in_order(node)):
            moved = [n for n in node.all_input_nodes if _has_new_strides(val_of(n), vals[n])]
            copies += [(source, _layout_of(val_of(source)), node) for source in moved]
        elif node.op == "call_function":
            vals[node] = _compute(node, vals, copies, mode, dims)
    return vals, copies


def _compute(
    node: fx.Node, vals: dict[fx.Node, Any], copies: list[Any], mode: Any, dims: tuple[int, ...]
) -> Any:
    """Return the value of a node whose inputs have these values."""
    source: Any = node.args[0] if node.args else None
    if node.target is aten.as_strided.default and _has_new_strides(val_of(source), vals[source]):
        raise _KeepsLayout(str(node.target))
    arguments: Any = [fx.map_arg(argument, vals.__getitem__) for argument in node.args]
    named: Any = fx.map_arg(node.kwargs, vals.__getitem__)
    run: Any = node.target
    with mode:
        if _is_channels_first(node, dims):
            # PyTorch lays a volume's filter out as its image, and a fold does so for many at once.
            for place in (0, 1) if arguments[0].dim() == 4 else (0,):
                if not _is_last(arguments[place]):
                    layout = LAST_FORMATS[arguments[place].dim()]
                    arguments[place] = arguments[place].clone(memory_format=layout)
                    copies.append((node.args[place], layout, node))
        val = run(*arguments, **named)
        if run is aten.convolution_backward.default and lies_channels_last(arguments[1]):
            # Both gradients are channels last, too, which fake ones do not say.
            val = tuple(
                g if g is None or g.dim() not in dims else dense(g, "channels_last") for g in val
            )
    return val


def _layout_of(val: Tensor) -> torch.memory_format:
    """Return the memory format of a tensor; raise `_KeepsLayout` where it has none."""
    for layout in (torch.contiguous_format, LAST_FORMATS.get(val.dim())):
        if layout is not None and val.is_contiguous(memory_format=layout):
            return layout
    raise _KeepsLayout("strides that are neither channels last nor first")


def _has_new_strides(before: Any, after: Any) -> bool:
    if isinstance(before, (list, tuple)):
        return any(map(_has_new_strides, before, after))
    return isinstance(before, Tensor) and before.stride() != after.stride()


def _mode_of(graph: fx.Graph) -> Any:
    """Return the mode of the fake tensors of a graph."""
    return next(val_of(n).fake_mode for n in graph.nodes if isinstance(val_of(n), Tensor))


def _last_of_inputs(node: fx.Node) -> fx.Node:
    """Return `node`, or the last input of its graph where it is one."""
    return node if node.op != "placeholder" else node.graph.find_nodes(op="placeholder")[-1]


def _add_dense_copy(source: fx.Node, val: Any, layout: str, reader: fx.Node) -> fx.Node:
    """Return a new node behind `source`, for `reader`: a copy of `val`, dense in `layout`."""
    with val.fake_mode:
        like = dense(torch.empty_like(val), layout)
    return _add_copy_like(source, val, like, reader)


def _add_copy_like(source: fx.Node, val: Any, like: Any, reader: fx.Node) -> fx.Node:
    """Return a new node behind `source`, for `reader`: a copy of `val` with the strides of `like`,
    or in their order where `like` is not dense."""
    graph = source.graph
    for layout in (torch.contiguous_format, LAST_FORMATS.get(val.dim())):
        if layout is not None and like.is_contiguous(memory_format=layout):
            with _inserting_behind(source, reader):
                return _copy(graph, source, val, layout, reader)
    steps = [s if isinstance(s, int) else s.node.hint or 0 for s in like.stride()]
    order = sorted(range(val.dim()), key=steps.__getitem__, reverse=True)
    permuted = _permute(source, val, order, reader)
    with _inserting_behind(permuted, reader):
        copy = _copy(graph, permuted, val_of(permuted), torch.contiguous_format, reader)
    return _permute(copy, val_of(copy), [order.index(axis) for axis in range(val.dim())], reader)


def _inserting_behind(source: fx.Node, reader: fx.Node) -> Any:
    """Return a context that inserts nodes behind `source`; a tangent's are of the backward pass."""
    if source.op == "placeholder" and "tangents" in str(source.target):
        return source.graph.inserting_before(reader)
    return source.graph.inserting_after(_last_of_inputs(source))


def _permute(node: fx.Node, val: Any, order: Sequence[int], reader: fx.Node) -> fx.Node:
    with _inserting_behind(node, reader):
        new = node.graph.call_function(aten.permute.default, (node, list(order)))
    with val.fake_mode:
        new.meta = node.meta | {"val": val.permute(order)}
    return new


def _copy(
    graph: fx.Graph, source: fx.Node, val: Any, layout: torch.memory_format, reader: fx.Node
) -> fx.Node:
    """Return a new node: `source` in `layout`, for `reader`."""
    # Inductor may lay a clone out otherwise, and asks no control flow operator for its strides.
    in_order = isinstance(reader.target, torch._ops.HigherOrderOperator)
    clone = torch.ops.confpred.clone.default if in_order else aten.clone.default
    new = graph.call_function(clone, (source,), {"memory_format": layout})
    with val.fake_mode:
        new.meta = source.meta | {"val": val.clone(memory_format=layout)}
    return new
