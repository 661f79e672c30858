"""Which layout a captured graph has: decided once for the whole graph.

Tensor cores, and confpred's kernels, read channels last. Where a graph's convolutions in half
precision read images with their channels first, the first images are copied into channels last,
and everything behind them follows by itself. Results that the caller sees keep their layout.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, fx

from confpred.pytorch.library import HALF
from confpred.pytorch.loading import CHANNELS_LAST
from confpred.pytorch.passes import val_of

log = logging.getLogger("confpred")
aten = torch.ops.aten
#: Operators whose result depends on how their input lies in memory; random ones do, too.
_BOUND = {aten.as_strided.default, aten.view.dtype}


def to_channels_last(graph: fx.Graph, visible: int | None = None) -> None:
    """Bring the images of a graph, whose views are reshapes, into channels last in place, all or
    nothing, if its convolutions want that; the caller sees the first `visible` results."""
    if not any(_is_channels_first(node) for node in graph.nodes):
        return
    try:
        vals, copied = _propagated(graph)
        restored = _restored(graph, vals, visible)
    except RuntimeError as error:
        log.debug("the graph keeps its layout: %s", error)
        return
    for node, val in vals.items():
        node.meta["val"] = val
    for node, place in copied:
        source: Any = node.args[place]
        with graph.inserting_before(node):
            node.update_arg(place, _copy(graph, source, CHANNELS_LAST))
    output = graph.output_node()
    given: Any = output.args[0]
    results = list(given)
    for place in restored:
        # At once behind it: a joint graph is cut where the last result of the forward pass is.
        with graph.inserting_after(results[place]):
            results[place] = _copy(graph, results[place], torch.contiguous_format)
    output.update_arg(0, tuple(results))
    graph.lint()


def _is_channels_first(node: fx.Node) -> bool:
    """Return whether `node` is a convolution of an image in half precision, channels first."""
    if node.target is not aten.convolution.default or node.args[6]:
        return False
    val = val_of(node.args[0])
    is_half_image = isinstance(val, Tensor) and val.dim() == 4 and val.dtype in HALF
    return is_half_image and not val.is_contiguous(memory_format=CHANNELS_LAST)


def _propagated(graph: fx.Graph) -> tuple[dict[fx.Node, Any], list[tuple[fx.Node, int]]]:
    """Return the values of all nodes in the new layout, and which arguments are to be copied."""
    vals: dict[fx.Node, Any] = {}
    copied: list[tuple[fx.Node, int]] = []
    mode: Any = next(val_of(n).fake_mode for n in graph.nodes if isinstance(val_of(n), Tensor))
    for node in graph.nodes:
        if node.op != "call_function":
            vals[node] = val_of(node)
            continue
        given, named = fx.map_arg((node.args, node.kwargs), lambda n: vals[n])
        tags = getattr(node.target, "tags", ())
        bound = node.target in _BOUND or torch.Tag.nondeterministic_seeded in tags
        if bound and any(_is_moved(val_of(n), vals[n]) for n in node.all_input_nodes):
            raise RuntimeError(str(node.target))
        given = list(given)
        with mode:
            if node.target is aten.convolution.default and _is_channels_first(node):
                for place in (0, 1):
                    if not given[place].is_contiguous(memory_format=CHANNELS_LAST):
                        given[place] = given[place].clone(memory_format=CHANNELS_LAST)
                        copied.append((node, place))
            vals[node] = node.target(*given, **named)
    return vals, copied


def _restored(graph: fx.Graph, vals: dict[fx.Node, Any], visible: int | None) -> list[int]:
    """Return the places of results that have to be copied back into the layout they had."""
    results: Any = graph.output_node().args[0]
    places = []
    for place, node in enumerate(results[:visible]):
        if isinstance(node, fx.Node) and _is_moved(val_of(node), vals[node]):
            if not node.meta["val"].is_contiguous():
                raise RuntimeError("a result that is neither channels last nor first")
            places.append(place)
    return places


def _is_moved(before: Any, after: Any) -> bool:
    return isinstance(before, Tensor) and before.stride() != after.stride()


def _copy(graph: fx.Graph, source: fx.Node, layout: torch.memory_format) -> fx.Node:
    new = graph.call_function(aten.clone.default, (source,), {"memory_format": layout})
    val = val_of(source)
    with val.fake_mode:
        new.meta = source.meta | {"val": val.clone(memory_format=layout)}
    return new
