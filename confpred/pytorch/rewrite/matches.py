"""Matches of a graph: all are found first, then chosen for in one call, then replaced.

A *match* is a set of nodes that one operator a direction may replace. Lines and volumes are
computed in the layout that is predicted to take less time, with the copies that it needs. Images
get one layout for the whole graph (`layouts.to_channels_last`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from confpred.predict.choice import Choice
from confpred.problem.conv import LAYOUTS, ConvNd
from confpred.problem.device import Device, get_device
from confpred.problem.record import Record
from confpred.pytorch.rewrite.passes import is_pointwise, val_of
from confpred.pytorch.rewrite.sites import Site, elements_of
from confpred.pytorch.run import choosing
from confpred.pytorch.run.loading import layout_of

aten = torch.ops.aten
Choices = Mapping[Record, "Choice | None"]
LAUNCH_MS = 1e-3  # of a pass over memory, in a CUDA graph
#: Operators that read a line or volume in either layout without a copy.
_READERS = (
    aten.convolution.default, aten.convolution_backward.default, aten.permute.default,
    aten.transpose.int,
)  # fmt: skip
_FARTHEST = 16  # most pointwise operators that are looked through


class Match(NamedTuple):
    """Nodes of a graph that one operator a direction may compute.

    Attributes:
        sites: the layer's directions; those that have a problem are chosen for.
        replace: called once all sites have their choices, replaces the nodes where these say so.
        reads, writes: nodes of lines or volumes that the layer reads, its input last, and
            computes; empty for images.
    """

    sites: list[Site]
    replace: Callable[[], None]
    reads: Sequence[fx.Node] = ()
    writes: Sequence[fx.Node] = ()


def choose_and_replace(
    graph: fx.Graph, matches: Sequence[Match], choose: choosing.Choose
) -> list[Site]:
    """Choose for all `matches` of `graph` in one call, replace them in place, and return their
    sites."""
    sites = [site for match in matches for site in match.sites]
    asked = [p for s in sites if s.problem for p in s.by_layout.values() or (s.problem,)]
    choices = dict(zip(asked, choose(asked) if asked else (), strict=True))
    for site in sites:
        site.choice = None if site.problem is None else choices[site.problem]
    layouts = Layouts()
    for match in matches:
        layouts.settle(match, choices)
    for match in matches:
        match.replace()
    graph.eliminate_dead_code()
    graph.lint()
    return sites


def insert(graph: fx.Graph, target: Any, args: tuple[Any, ...], meta: Any) -> fx.Node:
    """Return a new call of `target` where `graph` inserts nodes, with the metadata `meta` of
    another node and a fake result, a list for several."""
    new = graph.call_function(target, args)
    val = target(*fx.map_arg(args, val_of))
    new.meta = meta | {"val": list(val) if isinstance(val, tuple) else val}
    return new


def insert_affine(x: fx.Node, scale: fx.Node, shift: fx.Node, meta: Any) -> fx.Node:
    """Return a new node of ``x * scale + shift`` in float32, of vectors by channel; inserted as by
    `insert`."""
    graph, sizes = x.graph, [1, -1, *[1] * (val_of(x).dim() - 2)]
    y = insert(graph, torch.ops.prims.convert_element_type.default, (x, torch.float32), meta)
    for target, vector in ((aten.mul.Tensor, scale), (aten.add.Tensor, shift)):
        row = insert(graph, aten.reshape.default, (vector, sizes), meta)
        y = insert(graph, target, (y, row), meta)
    return y


class Layouts:
    """Layouts of a graph's lines and volumes, as they become known in the order of the graph."""

    def __init__(self) -> None:
        self._there: dict[fx.Node, list[str]] = {}  # of nodes so far: their own, then of copies

    def settle(self, match: Match, choices: Choices) -> None:
        """Set the problems and choices of `match` to those of the layout that is predicted to take
        less time. The input's own layout is kept unless a kernel runs in the other one, or PyTorch
        computes lines as images there. So is that of a dense volume, which gains little, while a
        grouped layer of PyTorch's behind it would lose more: `layouts.to_channels_last` decides
        about these."""
        sites = match.sites
        if not match.reads or any(len(s.by_layout) < len(LAYOUTS) or not s.problem for s in sites):
            return
        own = next(name for name in LAYOUTS if self._is_there(match.reads[-1], name))
        (other,) = (name for name in LAYOUTS if name != own)
        costs = {name: self._cost_ms(match, name, choices) for name in LAYOUTS}
        of_own, of_other = costs[own], costs[other]
        best = own
        if of_own is not None and of_other is not None and of_other < of_own:
            others = [choices[site.by_layout[other]] for site in sites]
            gains = any(map(_runs_kernel, others)) or all(site.may_be_image for site in sites)
            may_change = gains and not any(map(_is_dense_volume, sites))
            best = other if may_change else own
        for site in sites:
            site.problem = site.by_layout[best]
            site.choice = choices[site.problem]
        if any(site.is_lowered or site.is_image for site in sites):
            for node in match.reads:
                self._there.setdefault(node, [self._expected(node, {})]).append(best)
            self._there |= {node: [best] for node in match.writes}

    def _cost_ms(self, match: Match, layout: str, choices: Choices) -> float | None:
        """Return the predicted milliseconds of `match` in a layout, with the copies that it needs;
        None if no model has them."""
        total, device_key = 0.0, ""  # the device is the same for all
        for site in match.sites:
            options = [choices[site.by_layout[name]] for name in (layout, *LAYOUTS)]
            choice = options[0]
            times = [c.pytorch_ms for c in options if c is not None and c.pytorch_ms is not None]
            ms = choice.predicted_ms if choice and _runs_kernel(choice) else next(iter(times), None)
            if choice is None or ms is None:
                return None
            total, device_key = total + ms, choice.device
        copied = [node for node in match.reads if not self._is_there(node, layout)]
        copied += [
            node for node in match.writes
            if layout_of(val_of(node)) != layout and not self._is_free(node)
        ]  # fmt: skip
        return total + sum(copy_ms(val_of(node), get_device(device_key)) for node in copied)

    def _is_there(self, node: fx.Node, layout: str) -> bool:
        """Return whether `node` is expected in a layout, or a copy of it is."""
        return layout in self._there.get(node, [self._expected(node, {})])

    def _expected(self, node: fx.Node, seen: dict[fx.Node, str], depth: int = 0) -> str:
        """Return the layout that `node` is expected in: its own or, of a pointwise operator, that
        of its source; a sum of lines lies channels last where one of the two does
        (`confpred.pytorch.rewrite.layouts`). `depth` counts the operators that were looked through,
        and `seen` has the answers for them."""
        if node in self._there:
            return self._there[node][0]
        # A copy into a memory format is in that one, whatever its source is in.
        keeps = node.kwargs.get("memory_format") in (None, torch.preserve_format)
        if node not in seen:
            seen[node] = layout_of(val_of(node))
            if is_pointwise(node) and keeps and depth < _FARTHEST:
                like = val_of(node).shape
                sources = [n for n in node.all_input_nodes if _shape(n) == like]
                counted = sources[: 2 if node.target is aten.add.Tensor and len(like) == 3 else 1]
                layouts = [self._expected(source, seen, depth + 1) for source in counted]
                seen[node] = min(layouts, key=LAYOUTS.index, default=seen[node])
        return seen[node]

    def _is_free(self, node: fx.Node, depth: int = 0) -> bool:
        """Return whether all that reads `node` takes either layout without a copy: convolutions
        that are chosen for, and permutations, also behind pointwise operators."""
        return (
            depth < _FARTHEST
            and bool(node.users)
            and all(
                user.target in _READERS or (is_pointwise(user) and self._is_free(user, depth + 1))
                for user in node.users
            )
        )


def copy_ms(val: Any, device: Device) -> float:
    """Return the milliseconds that a copy of a fake tensor is expected to take on `device`, which
    reads and writes it."""
    return LAUNCH_MS + 2e3 * elements_of(val) * int(val.dtype.itemsize) / device.dram_bytes_per_s


def _runs_kernel(choice: Choice | None) -> bool:
    return choice is not None and choosing.why_pytorch(choice) is None


def _is_dense_volume(site: Site) -> bool:
    problem = site.by_layout["channels_first"]  # channels last it may be an image
    return isinstance(problem, ConvNd) and problem.rank == 3 and problem.groups == 1


def _shape(node: fx.Node) -> Any:
    return getattr(val_of(node), "shape", None)
