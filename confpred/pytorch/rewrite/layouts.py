"""The layout of a captured graph, decided once for all of it.

Tensor cores, and confpred's kernels, read channels last. Where convolutions in half precision read
images with their channels first, the first images are copied into channels last, and all nodes
behind them follow. Results keep their layout, and so do inputs of nodes that read memory in order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from confpred.pytorch.rewrite.passes import is_view, val_of
from confpred.pytorch.run.convolve import Call
from confpred.pytorch.run.library import HALF
from confpred.pytorch.run.loading import (
    CHANNELS_LAST,
    LAST_FORMATS,
    dense,
    layout_of,
    lies_channels_last,
)

aten, confpred = torch.ops.aten, torch.ops.confpred
Values = dict[fx.Node, Any]  # fake tensors, as nodes lie after a rewrite
Copies = dict[Any, fx.Node]  # by the source and the layout
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_CONFPRED_CONVOLUTIONS = (confpred.conv2d.default, confpred.conv2d_backward.default)
#: Batch norms lie as they did: only those of channels-last images are replaced.
_NORMS = (confpred.norm.default, confpred.norm_backward.default)
#: PyTorch's operators that take it for granted, or only check, that memory lies as they read it:
#: their callers have seen to it, with copies that the capture lacks where it lay so.
_UNCHECKED = tuple(
    f"aten.{name}" for name in (
        "native_group_norm", "_weight_norm_interface", "_scaled_dot_product", "_flash_attention",
        "_efficient_attention", "_cdist", "_pdist", "view_as_complex", "sym_stride",
    )
)  # fmt: skip
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


def to_channels_last(graph: fx.Graph) -> None:
    """Bring the images of a graph, whose views are reshapes, into channels last in place, if its
    convolutions want that. Strides are kept as by `keep_strides`."""
    if any(_is_channels_first(node) for node in graph.nodes):
        _propagate(graph, _copy_images)


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
                with val.fake_mode:
                    like = dense(torch.empty_like(val))
                made[source] = _add_copy_like(source, val, like, node)
            node.replace_input_with(source, made[source])


def keep_strides(graph: fx.Graph) -> None:
    """Keep the strides of results, and of inputs of nodes that `_needs_captured_strides`, by copies
    in place. confpred's operators of lines, volumes and norms may return another layout than
    PyTorch's, which all other nodes follow."""
    if any(_is_of_another_rank(node) or node.target in _NORMS for node in graph.nodes):
        _propagate(graph, _copy_inputs)


def _propagate(graph: fx.Graph, copy_inputs: Callable[[fx.Node, Values, Copies], bool]) -> None:
    """Compute the fake tensors of a graph anew, where they have other strides than in the capture.
    `copy_inputs` puts copies before a node that wants another layout, and returns whether the
    strides of its result may be others then."""
    vals: Values = {}
    made: Copies = {}
    mode = next(val_of(n).fake_mode for n in graph.nodes if isinstance(val_of(n), Tensor))
    for node in list(graph.nodes):
        vals[node] = val_of(node)
        moved = [n for n in node.all_input_nodes if _has_new_strides(val_of(n), vals[n])]
        if node.op == "output" or (moved and _needs_captured_strides(node)):
            for source in node.all_input_nodes:
                node.replace_input_with(source, _as_captured(source, vals, made, node))
        elif copy_inputs(node, vals, made) or moved:
            arguments, named = fx.map_arg((node.args, node.kwargs), vals.__getitem__)
            run: Any = node.target
            with mode:
                val = run(*arguments, **named)
                if run is aten.convolution_backward.default and _is_last(arguments[1]):
                    # Both gradients are channels last, too, which fake ones do not say.
                    val = tuple(dense(g) if _is_image(g) else g for g in val)
            vals[node] = val
    for node, val in vals.items():
        node.meta["val"] = val
    graph.lint()


def _as_captured(source: fx.Node, vals: Values, made: Copies, reader: fx.Node) -> fx.Node:
    """Return `source`, for `reader`, with the strides of the capture. Views of one tensor become
    views of one copy of it: they share memory as they did."""
    key = source, isinstance(reader.target, torch._ops.HigherOrderOperator)
    if key in made:
        return made[key]
    made[key] = source
    if is_view(source.args[0] if source.target is operator.getitem else source):  # type: ignore[arg-type]
        (first, *_) = source.all_input_nodes
        copy = _as_captured(first, vals, made, reader)
        if copy is not first:
            with source.graph.inserting_after(source):
                made[key] = source.graph.node_copy(source, lambda n: copy if n is first else n)
    elif _has_new_strides(val_of(source), vals[source]):
        made[key] = _add_copy_like(source, vals[source], val_of(source), reader)
    return made[key]


def _copy_images(node: fx.Node, vals: Values, made: Copies) -> bool:
    """Let a convolution read images in half precision channels last."""
    if not _is_channels_first(node):
        return False
    for source in node.all_input_nodes[:2]:
        if not _is_last(vals[source]):
            _copy_dense(source, "channels_last", vals, made, node)
    return True


def _copy_inputs(node: fx.Node, vals: Values, made: Copies) -> bool:
    """Let a convolution of lines or volumes read them in the layout that it was chosen for."""
    if not _is_of_another_rank(node):
        return node.target in _NORMS
    call: Any = node.args[-1]
    problems = [hint.problem for hint in Call.read(call).hints if hint is not None]
    if problems:  # else PyTorch's operator computes it
        layout = getattr(problems[0], "layout", "channels_last")
        for source in node.all_input_nodes[: _CONFPRED_CONVOLUTIONS.index(node.target) + 1]:
            if layout_of(vals[source]) != layout:
                _copy_dense(source, layout, vals, made, node)
    return True


def _copy_dense(source: fx.Node, layout: str, vals: Values, made: Copies, reader: fx.Node) -> None:
    """Let `reader` read a copy of `source` that is dense in a layout."""
    if (source, layout) not in made:
        val = vals[source]
        with val.fake_mode:
            like = dense(torch.empty_like(val), layout)
        made[source, layout] = _add_copy_like(source, val, like, reader)
    copy = made[source, layout]
    reader.replace_input_with(source, copy)
    vals[copy] = val_of(copy)


def _is_of_another_rank(node: fx.Node) -> bool:
    """Return whether confpred's operator computes a convolution of lines or volumes."""
    return node.target in _CONFPRED_CONVOLUTIONS and val_of(node.args[0]).dim() != 4


def _needs_captured_strides(node: fx.Node) -> bool:
    """Return whether `node` needs its inputs with the strides of the capture."""
    tags = getattr(node.target, "tags", ())
    is_confpred = getattr(node.target, "namespace", "") == "confpred"  # which take every layout
    in_order = node.target is aten.as_strided.default or not _OF_VALUES.isdisjoint(tags)
    in_order |= str(node.target).startswith(_UNCHECKED)
    return in_order or (reads_memory_in_order(node) and not is_confpred)


def _is_channels_first(node: fx.Node) -> bool:
    """Return whether `node` is a convolution of an image in half precision, channels first."""
    if node.target is not aten.convolution.default or node.args[6]:
        return False
    val = val_of(node.args[0])
    return _is_image(val) and val.dtype in HALF and not _is_last(val)


def _is_image(val: Any) -> bool:
    return isinstance(val, Tensor) and val.dim() == 4


def _is_last(val: Any) -> bool:
    return _is_image(val) and val.is_contiguous(memory_format=CHANNELS_LAST)


def _has_new_strides(before: Any, after: Any) -> bool:
    if isinstance(before, (list, tuple)):
        return any(map(_has_new_strides, before, after))
    return isinstance(before, Tensor) and before.stride() != after.stride()


def _last_of_inputs(node: fx.Node) -> fx.Node:
    """Return `node`, or the last input of its graph where it is one."""
    return node if node.op != "placeholder" else node.graph.find_nodes(op="placeholder")[-1]


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
