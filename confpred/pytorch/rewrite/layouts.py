"""The layout of a captured graph, decided once for all of it.

Tensor cores, and confpred's kernels, read channels last. Where convolutions in half precision read
images with their channels first, copies of these images are channels last, and all nodes behind
them follow. Results keep their layout, and so do inputs of nodes that read memory in order.
Volumes become channels last where that is expected to save more time than the copies take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree

from confpred.launch.assignment import Assignment
from confpred.problem.conv import LAYOUTS
from confpred.problem.device import Device
from confpred.pytorch.rewrite import sites
from confpred.pytorch.rewrite.matches import copy_ms
from confpred.pytorch.rewrite.passes import is_tangent, last_of_inputs, owner_of, val_of
from confpred.pytorch.run import choosing
from confpred.pytorch.run.convolve import Call
from confpred.pytorch.run.library import HALF
from confpred.pytorch.run.loading import (
    LAST_FORMATS,
    dense,
    is_dense,
    layout_of,
    lies_channels_last,
)
from confpred.pytorch.run.norms import layout_read

aten, confpred = torch.ops.aten, torch.ops.confpred
Values = dict[fx.Node, Any]  # fake results of nodes, with the strides after a rewrite
Copies = dict[Any, fx.Node]  # by the source, and the layout or the kind of reader
#: Operators by how many images they read: the input; in a backward pass the gradient before it.
_CONVOLUTIONS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
_CONFPRED_CONVOLUTIONS = {confpred.conv2d.default: 1, confpred.conv2d_backward.default: 2}
#: Norms whose results may have other strides than PyTorch's, and those that have the same: only
#: those of channels-last images are replaced.
_NORMS = {confpred.norm.default: 1, confpred.norm_backward.default: 2}
_BATCH_NORMS = {confpred.batch_norm.default: 1, confpred.batch_norm_backward.default: 2}
#: PyTorch's operators that read their inputs in one order of memory, or refuse others. PyTorch's
#: callers copy inputs that lie otherwise; the capture lacks a copy that was not needed.
_UNCHECKED = tuple(
    f"aten.{name}" for name in (
        "_weight_norm_interface", "_scaled_dot_product", "_flash_attention", "_efficient_attention",
        "_cdist", "_pdist", "as_strided", "view_as_complex", "sym_stride",
    )
)  # fmt: skip
#: Others of that kind, which confpred's norms may replace, by how many images they read.
_GROUP_NORMS = {aten.native_group_norm.default: 1, aten.native_group_norm_backward.default: 2}
#: Gradients of activations that PyTorch's fake tensors expect to lie as another operand.
_GRADIENTS = tuple(
    getattr(aten, f"{name}_backward").default
    for name in ("elu", "hardsigmoid", "hardswish", "hardtanh", "rrelu_with_noise", "softplus")
)
#: Numbers of dimensions of images, and of images and volumes.
_IMAGES, _VOLUMES = (4,), (4, 5)
#: By how much longer PyTorch's operator for a dense volume in half precision takes channels first,
#: relative to `sites.convolution_s`. The medians of an H200 are 1.3 (forward), 0.6 (gradient of the
#: input) and 0.25 (of the filter): ``datasets/rank_dense``.
_SAVED = 0.5
_CLONES = (aten.clone.default, confpred.clone.default)
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


def to_channels_last(
    graph: fx.Graph, device: Device | None = None, constraints: choosing.Constraints = choosing.ANY
) -> None:
    """Bring the images of a graph, whose views are reshapes, into channels last in place, if its
    convolutions want that; volumes too, if that saves time on `device`. Strides are kept as by
    `keep_strides`."""
    dims: tuple[int, ...] = _IMAGES
    if device is not None and (saved_ms := _saved_ms(graph, device, constraints)):
        trial = fx.Graph()
        trial.output(trial.graph_copy(graph, {}))
        _propagate(trial, partial(_copy_images, dims=_VOLUMES))
        lay_out_group_norms(trial)
        if _copies_ms(trial, device) - _copies_ms(graph, device) < saved_ms:
            dims = _VOLUMES
    if any(_is_channels_first(node, dims) for node in graph.nodes):
        _propagate(graph, partial(_copy_images, dims=dims))


def _saved_ms(graph: fx.Graph, device: Device, constraints: choosing.Constraints) -> float:
    """Return the milliseconds that convolutions of dense volumes are expected to save channels
    last; 0 where PyTorch would compute a grouped layer of volumes, several times as slowly there
    as channels first."""
    saved_ms, grouped = 0.0, list[Any]()
    for node in graph.nodes:
        if node.target not in _CONVOLUTIONS:
            continue
        arguments = sites.arguments_of(node)
        image = val_of(arguments.image)
        if image.dim() != 5:
            continue
        directions = sites.directions_of(node)
        if arguments.groups != 1:
            grouped += [sites.site_of(node, direction) for direction in directions]
        elif image.dtype in HALF and not _is_last(image):
            saved_ms += 1e3 * _SAVED * len(directions) * sites.convolution_s(node, device)
    if not saved_ms:
        return 0.0
    problems = [site.by_layout.get("channels_last") for site in grouped]
    if None in problems:
        return 0.0
    choices = choosing.preview(problems, device, constraints) if problems else []
    return saved_ms if all(c and choosing.why_pytorch(c) is None for c in choices) else 0.0


def _copies_ms(graph: fx.Graph, device: Device) -> float:
    """Return the milliseconds that copies of volumes are expected to take."""
    copied = [node for node in graph.nodes if node.target in _CLONES or _is_copying_reshape(node)]
    vals = [val_of(node.all_input_nodes[0]) for node in copied]
    return sum(copy_ms(val, device) for val in vals if val.dim() == 5)


def _is_copying_reshape(node: fx.Node) -> bool:
    """Return whether `node` is a reshape that copies, as no view of its input has its shape."""
    if node.target is not aten.reshape.default:
        return False
    try:
        val_of(node.all_input_nodes[0]).view(val_of(node).shape)
    except (RuntimeError, ValueError):  # which of them depends on PyTorch's version
        return True
    return False


def filters_to_channels_last(graph: fx.Graph) -> None:
    """Bring the filters of confpred's convolutions into the layout that kernels read, in place:
    Inductor's pass that computes or casts a filter writes that layout as well."""
    made: Copies = {}
    # The index of the filter; the image is before it.
    for target, place in ((confpred.conv2d.default, 1), (confpred.conv2d_backward.default, 2)):
        for node in graph.find_nodes(op="call_function", target=target):
            source: Any = node.args[place]
            val, x = val_of(source), val_of(node.args[place - 1])
            if lies_channels_last(val) or layout_of(x) != "channels_last":
                continue
            _copy_dense(source, "channels_last", {source: val}, made, node)


def keep_strides(graph: fx.Graph) -> None:
    """Keep the strides of results, and of inputs of nodes that need those of the capture, by copies
    in place. confpred's operators of lines, volumes and norms may return another layout than
    PyTorch's, which all other nodes follow."""
    if any(map(_may_move, graph.nodes)):
        _propagate(graph, _copy_inputs)


def lay_out_inputs(graph: fx.Graph) -> None:
    """Let all other convolutions and norms read dense copies as well, in place, once it is known
    which of them confpred computes."""
    readers = _CONVOLUTIONS | _CONFPRED_CONVOLUTIONS | _BATCH_NORMS
    if any(node.target in readers for node in graph.nodes):
        _propagate(graph, partial(_copy_inputs, of_all=True))


def lay_out_gradients(graph: fx.Graph) -> None:
    """Copy operands of the gradients `_GRADIENTS` so that all lie as the fake result does. The real
    result lies as one operand, the fake one as another."""
    for target in _GRADIENTS:
        for node in graph.find_nodes(op="call_function", target=target):
            for source in node.all_input_nodes:
                if _has_new_strides(val_of(source), val_of(node)):
                    copy = _add_copy_like(source, val_of(source), val_of(node), node)
                    node.replace_input_with(source, copy)


def lay_out_group_norms(graph: fx.Graph) -> None:
    """Let PyTorch's group norms that are left read copies with the channels first, in place, and
    let their results lie as all other nodes expect."""
    made: Copies = {}
    for target, count in _GROUP_NORMS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            for source in dict.fromkeys(node.args[:count]):
                if not (val := val_of(source)).is_contiguous():
                    _copy_dense(source, "channels_first", {source: val}, made, node)
            out, *others = val_of(node)
            if out is None or out.is_contiguous():
                continue
            with out.fake_mode:
                node.meta["val"] = (out.contiguous(), *others)
            for item in [item for item in node.users if item.args[1] == 0]:
                readers = [*item.users]
                item.meta["val"] = val_of(node)[0]
                copy = _add_copy_like(item, val_of(item), out, item)
                for reader in readers:
                    reader.replace_input_with(item, copy)


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
                backward = run is aten.convolution_backward.default
                # Fake gradients do not say how they lie, nor do fake tensors of a CPU, where
                # `confpred.explain` captures: channels last where the image does.
                is_doubtful = run in _CONVOLUTIONS and (backward or not arguments[0].is_cuda)
                if is_doubtful and _is_last(arguments[backward]):
                    val = _pytree.tree_map_only(Tensor, dense, val)
            vals[node] = val
    for node, val in vals.items():
        node.meta["val"] = val
    graph.lint()


def _as_captured(source: fx.Node, vals: Values, made: Copies, reader: fx.Node) -> fx.Node:
    """Return `source`, for `reader`, with the strides of the capture: itself, a copy, or a view of
    a copy. Views of one tensor become views of one copy of it: they share memory as they did.
    `vals` has present strides, and `made` the copies so far."""
    key = source, isinstance(reader.target, torch._ops.HigherOrderOperator)  # see `_copy`
    if key in made:
        return made[key]
    made[key] = source
    if owner_of(source) is not source:
        (first, *_) = source.all_input_nodes
        copy = _as_captured(first, vals, made, reader)
        if copy is not first:
            with source.graph.inserting_after(source):
                made[key] = source.graph.node_copy(source, lambda n: copy if n is first else n)
    elif _has_new_strides(val_of(source), vals[source]):
        made[key] = _add_copy_like(source, vals[source], val_of(source), reader)
    return made[key]


def _copy_images(node: fx.Node, vals: Values, made: Copies, dims: tuple[int, ...]) -> bool:
    """Let a convolution in half precision read tensors of `dims` dimensions channels last. Return
    whether `node` is one that did not, as `_propagate` asks."""
    if not _is_channels_first(node, dims):
        return False
    # A volume's filter stays: PyTorch lays it out as its image, or a fold does, for many at once.
    for source in node.all_input_nodes[: 2 if val_of(node).dim() == 4 else 1]:
        if not _is_last(vals[source]):
            _copy_dense(source, "channels_last", vals, made, node)
    return True


def _copy_inputs(node: fx.Node, vals: Values, made: Copies, *, of_all: bool = False) -> bool:
    """Let a node that `_may_move`, or any, read its images as its operator does, and dense:
    Inductor's copy is several times as fast as the operator's own, and what computes the image may
    write that layout. Return whether the strides of the result of `node` may be others than
    PyTorch's."""
    if node.target is aten.add.Tensor:
        _put_channels_last_first(node, vals)
    may_move = _may_move(node)
    if of_all or may_move:
        images, layout = _images_read(node, vals)
        for source in images:
            if not is_dense(vals[source], layout):
                _copy_dense(source, layout, vals, made, node)
    return may_move


def _put_channels_last_first(node: fx.Node, vals: Values) -> None:
    """Let a sum of lines lie channels last where a convolution has brought one of the two there: it
    lies as its first operand does, and each of a chain of residual blocks would be copied."""
    operands = [operand for operand in node.args if isinstance(operand, fx.Node)]
    if len(operands) != 2 or node.kwargs:
        return
    x, y = map(vals.__getitem__, operands)
    is_moved = _has_new_strides(val_of(operands[1]), y) and x.dim() == 3 and x.shape == y.shape
    if is_moved and (layout_of(x), layout_of(y)) == LAYOUTS[::-1]:
        node.args = (operands[1], operands[0])


def _images_read(node: fx.Node, vals: Values) -> tuple[Sequence[Any], str]:
    """Return what `node` reads in one layout, and that; nothing where it reads any. `vals` has
    present strides."""
    target: Any = node.target
    arguments: Any = node.args
    if count := _NORMS.get(target) or _BATCH_NORMS.get(target):
        *_, residual = arguments[: count + 3]  # behind weight and bias
        images = [x for x in (*arguments[:count], residual) if x is not None]
        return images, layout_read(Assignment.read(arguments[-1]).problem)
    count = _CONVOLUTIONS.get(target) or _CONFPRED_CONVOLUTIONS.get(target)
    if count is None:
        return (), ""
    images = arguments[:count]
    image, weight = map(vals.__getitem__, arguments[count - 1 : count + 1])
    if target in _CONFPRED_CONVOLUTIONS:
        hints = Call.read(arguments[-1]).hints
        problems = [hint.problem for hint in hints if hint is not None]
        if problems:
            return images, getattr(problems[0], "layout", "channels_last")
        if image.dim() == 3:  # PyTorch's operator computes it, perhaps as an image
            return (), ""
    # cuDNN reads them so for PyTorch, but for float64.
    formats = map(torch._prims_common.suggest_memory_format, (image, weight))
    is_last = any(f in LAST_FORMATS.values() for f in formats)
    return images, "channels_last" if is_last else "channels_first"


def _copy_dense(source: fx.Node, layout: str, vals: Values, made: Copies, reader: fx.Node) -> None:
    """Let `reader` read a copy of `source` that is dense in a layout; all readers share it, by
    `made`. Its fake tensor is entered into `vals`."""
    if (source, layout) not in made:
        made[source, layout] = _add_dense_copy(source, vals[source], layout, reader)
    copy = made[source, layout]
    reader.replace_input_with(source, copy)
    vals[copy] = val_of(copy)


def _may_move(node: fx.Node) -> bool:
    """Return whether the result of `node` may have other strides than PyTorch's: confpred's
    operator computes a convolution of lines or volumes, or a norm of groups."""
    is_convolution = node.target in _CONFPRED_CONVOLUTIONS
    return node.target in _NORMS or (is_convolution and val_of(node.args[0]).dim() != 4)


def _needs_captured_strides(node: fx.Node) -> bool:
    """Return whether `node` needs its inputs with the strides of the capture."""
    tags = getattr(node.target, "tags", ())
    is_confpred = getattr(node.target, "namespace", "") == "confpred"  # which take every layout
    in_order = str(node.target).startswith(_UNCHECKED) or not _OF_VALUES.isdisjoint(tags)
    return in_order or (reads_memory_in_order(node) and not is_confpred)


def _is_channels_first(node: fx.Node, dims: tuple[int, ...]) -> bool:
    """Return whether `node` is a convolution in half precision, not transposed, of a tensor that is
    channels first and has one of these numbers of dimensions."""
    if node.target is not aten.convolution.default or sites.arguments_of(node).transposed:
        return False
    val = val_of(node.args[0])
    return val.dim() in dims and val.dtype in HALF and not _is_last(val)


def _is_last(val: Any) -> bool:
    """Return whether an image or volume is channels last. A volume of one channel is dense in both
    layouts; its strides decide, as they do for PyTorch, since its convolution is large."""
    if val.dim() != 5:
        return val.dim() == 4 and lies_channels_last(val)
    like = torch.empty_like(val, memory_format=LAST_FORMATS[5])
    return bool(val.stride() == like.stride())


def _has_new_strides(before: Any, after: Any) -> bool:
    if isinstance(before, (list, tuple)):
        return any(map(_has_new_strides, before, after))
    return isinstance(before, Tensor) and before.stride() != after.stride()


def _add_dense_copy(source: fx.Node, val: Any, layout: str, reader: fx.Node) -> fx.Node:
    """Return a new node behind `source`, for `reader`: a copy that is dense in `layout`. `val` is
    the fake tensor of `source`."""
    if layout == "channels_last" and val.dim() in LAST_FORMATS:  # of one channel, too
        with _inserting_behind(source, reader):
            return _copy(source.graph, source, val, LAST_FORMATS[val.dim()], reader)
    with val.fake_mode:
        like = dense(torch.empty_like(val), layout)
    return _add_copy_like(source, val, like, reader)


def _add_copy_like(source: fx.Node, val: Any, like: Any, reader: fx.Node) -> fx.Node:
    """Return a new node behind `source`, for `reader`: a copy with the strides of `like`, or in
    their order where `like` is not dense. `val` is the fake tensor of `source`."""
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
    """Return a context that inserts nodes behind `source`; for a tangent, an input of the backward
    pass, directly before `reader`."""
    if is_tangent(source):
        return source.graph.inserting_before(reader)
    return source.graph.inserting_after(last_of_inputs(source))


def _permute(node: fx.Node, val: Any, order: Sequence[int], reader: fx.Node) -> fx.Node:
    """Return a new node behind `node`, for `reader`: its axes in another `order`. `val` is the fake
    tensor of `node`."""
    with _inserting_behind(node, reader):
        new = node.graph.call_function(aten.permute.default, (node, list(order)))
    with val.fake_mode:
        new.meta = node.meta | {"val": val.permute(order)}
    return new


def _copy(
    graph: fx.Graph, source: fx.Node, val: Any, layout: torch.memory_format, reader: fx.Node
) -> fx.Node:
    """Return a new node where `graph` inserts nodes, for `reader`: a copy of `source` in `layout`.
    `val` is the fake tensor of `source`."""
    # Inductor may lay PyTorch's clone out otherwise, and asks no control flow operator for strides.
    in_order = isinstance(reader.target, torch._ops.HigherOrderOperator)
    clone = torch.ops.confpred.clone.default if in_order else aten.clone.default
    new = graph.call_function(clone, (source,), {"memory_format": layout})
    with val.fake_mode:
        new.meta = source.meta | {"val": val.clone(memory_format=layout)}
    return new
