"""Norms of captured graphs, each with its epilogue: the layers that confpred's operators compute.

    norm -> [+ residual] -> [activation], and the gradient of that

    batch norm        in joint graphs of forward and backward; `fusing` has those of inference
    group norm        native_group_norm; in inference with a scale and a shift of each sample, too
    instance norm     a batch norm without running statistics, of a view (1, N * C, ...)
    layer norm        native_layer_norm of one dimension
    RMS norm          _fused_rms_norm of one dimension

Autocast computes most of them in float32. The conversions before and behind become part of the
operator, unless something else reads the result, or adds to the gradient, in float32. So do the
copies into channels first that PyTorch's group and instance norms need.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from confpred.problem.record import Record
from confpred.pytorch.rewrite import following, sites
from confpred.pytorch.rewrite.following import Chain, readers_of, source_of
from confpred.pytorch.rewrite.passes import CONVERSIONS, is_pointwise, may_be_written, val_of
from confpred.pytorch.run import norms
from confpred.pytorch.run.loading import DTYPES, is_channels_last

aten = torch.ops.aten
BATCH_NORM_FORWARD = aten._native_batch_norm_legit_functional.default
BATCH_NORM_BACKWARD = aten.native_batch_norm_backward.default
_INSTANCE_NORM = aten._native_batch_norm_legit.no_stats
#: Norms of groups and their gradients, by name: not every PyTorch has all of them.
_GROUP_NORMS = {
    "aten.native_group_norm.default", "aten.native_layer_norm.default",
    "aten._fused_rms_norm.default", str(_INSTANCE_NORM),
}  # fmt: skip
GRADIENTS = {
    "aten.native_group_norm_backward.default", "aten.native_layer_norm_backward.default",
    "aten._fused_rms_norm_backward.default", str(BATCH_NORM_BACKWARD),
}  # fmt: skip
_COPIES = (aten.clone.default, *CONVERSIONS)
_FOLLOWS = {*following.ACTIVATIONS, *CONVERSIONS}  # pointwise, also without the tag
_VIEWS = (aten.view.default, aten.reshape.default)
_DIRECTIONS = ("forward", "backward")
Lies = Callable[[fx.Node], bool]  # whether a node lies channels last (`make_layout_test`)
#: A node and the index of one of its arguments: read late (`node_at`), as rewriting replaces nodes.
Place = tuple[fx.Node, int]


@dataclass(frozen=True, slots=True)
class Layer:
    """A norm of a graph with the nodes that its operators replace.

    Attributes:
        chain: the norm and its epilogue.
        problems: one a direction, forward first; None where no record describes it.
        inputs: positions of input, weight, bias, and of a batch norm's running mean and variance;
            None for an absent one.
        scalars: numbers among the arguments of the forward operator.
        ends: nodes that the first result of the forward operator replaces.
        scale: positions of an adaptive norm's factor and term by sample and channel, or empty.
        grad_path: nodes from the gradient behind the activation to the norm's own gradient, the
            last; empty without a backward pass.
        grad: position of the output's gradient; None without a backward pass.
        grads: nodes that the gradients of input, weight and bias replace, by index.
    """

    chain: Chain
    problems: Sequence[Record | None]
    inputs: Sequence[Place | None]
    scalars: tuple[Any, ...]
    ends: Sequence[fx.Node]
    scale: Sequence[Place] = ()
    grad_path: Sequence[fx.Node] = ()
    grad: Place | None = None
    grads: Mapping[int, Sequence[fx.Node]] = field(default_factory=dict)

    @property
    def norm(self) -> Any:
        return self.chain.norm

    def nodes(self) -> list[Any]:
        """Return the nodes of `inputs`."""
        return [None if place is None else node_at(place) for place in self.inputs]

    def sites(self) -> list[sites.Site]:
        """Return the site of each direction."""
        chain, name = self.chain, sites.name_of(self.norm)
        fused = ["scale"] * bool(self.scale) + ["add"] * (chain.sum is not None)
        fused += [chain.activation] * (chain.activation != "none")
        more: Any = {"fused": tuple(fused), "sizes": tuple(sites.sizes_of(val_of(self.nodes()[0])))}
        pairs = zip(_DIRECTIONS, self.problems, strict=False)
        return [sites.Site(name, direction, problem, **more) for direction, problem in pairs]

    def position(self) -> fx.Node | None:
        """Return the node before which the operator is to stand: the first reader of a batch norm's
        statistics, or the last node of the chain if that is earlier. None where an input of the
        operator is not there by then."""
        inputs = [x for x in (*self.nodes(), self.chain.residual) if isinstance(x, fx.Node)]
        statistics = [item for item in self.norm.users if item.args[1] and self.inputs[3:]]
        first = min([self.chain.last, *(user for node in statistics for user in node.users)])
        return first if max(inputs) < first else None


def make_layout_test(graph: fx.Graph, has_groups: bool) -> Lies:
    """Return a function that tells whether a node of `graph` is channels last. If `has_groups`, it
    is also true of a node that will be, once confpred computes the group norms before it."""
    expected: set[fx.Node] = set()

    def lies(node: fx.Node) -> bool:
        val = val_of(node)
        return node in expected or (isinstance(val, Tensor) and is_channels_last(val))

    for node in graph.nodes if has_groups else ():
        if str(node.target) in _GROUP_NORMS and "normalized_shape" not in _named(node):
            if lies(_input_of(_input_path(node)[0])):
                items = [item for item in node.users if item.args[1] == 0]
                expected.update(items, *(item.users for item in items if _is_instance(node)))
        elif node.target in _FOLLOWS or is_pointwise(node):
            shape = getattr(val_of(node), "shape", None)
            like = [n for n in node.all_input_nodes if getattr(val_of(n), "shape", None) == shape]
            follows = "memory_format" not in node.kwargs and not expected.isdisjoint(like)
            expected.update([node] if follows and all(map(lies, like)) else ())
    return lies


def match_batch_norm(backward: Any, claimed: Collection[fx.Node], lies: Lies) -> Layer | None:
    """Return the batch norm with the gradient `backward`; None if kernels cannot compute both.
    `claimed` are nodes of other layers; `lies` is the function of `make_layout_test`."""
    arguments: Any = backward.args
    grad, x, weight, _, _, mean, _, training, _, mask = arguments
    norm: Any = next(iter(mean.all_input_nodes), None) if isinstance(mean, fx.Node) else None
    if norm is None or norm.target not in (BATCH_NORM_FORWARD, following.FIXED_NORM):
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

    def layer(chain: Chain) -> Layer:
        problems = [
            norms.problem_of(
                sites.sizes_of(images[0]), images[0].dtype, direction, chain.activation,
                residual=chain.sum is not None, affine=weight is not None, frozen=frozen,
            ) for direction in _DIRECTIONS
        ]  # fmt: skip
        inputs = [None if norm.args[place] is None else (norm, place) for place in range(5)]
        return Layer(
            chain, problems, inputs, norm.args[-2:], [chain.last], grad_path=[backward],
            grad=(chain.gradient or backward, 0),
            grads={item.args[1]: [item] for item in backward.users},
        )  # fmt: skip

    plain = Chain((norm, items[0]), norm)
    add = partial(_take_sum, images[0].dtype, lies, True)
    patterns = (add, partial(_take_activation, [backward]))
    whole = layer(following.follow(plain, patterns, claimed))
    return layer(plain) if whole.position() is None else whole


def match_group_norm(
    norm: Any, backward: Any, claimed: Collection[fx.Node], lies: Lies
) -> Layer | None:  # fmt: skip
    """Return the norm of groups with the gradient `backward`, if there is one; None if kernels
    cannot compute it. `claimed` and `lies` are as in `match_batch_norm`."""
    if str(getattr(norm, "target", "")) not in _GROUP_NORMS:
        return None
    items = {item.args[1]: item for item in norm.users}
    readers = {reader for place, item in items.items() if place for reader in readers_of(item)}
    if 0 not in items or len(items) < len(norm.users) or readers != {backward} - {None}:
        return None
    arguments, back_arguments = _named(norm), _named(norm if backward is None else backward)
    if any(arguments.get(name) is not back_arguments.get(name) for name in ("input", "weight")):
        return None
    nodes, path = [norm, items[0]], _input_path(norm)
    if _is_instance(norm):
        views = readers_of(items[0])
        if len(views) != 1 or any(node.target not in _VIEWS for node in (norm.args[0], *views)):
            return None
        nodes += views
    for start in range(len(path)):  # the operator replaces as many copies as it can
        layer = _match_group_norm(Chain(tuple(nodes), norm), path[start:], backward, claimed, lies)
        if layer is not None:
            return layer
    return None


def _is_instance(norm: fx.Node) -> bool:
    return norm.target is _INSTANCE_NORM


def _input_path(norm: Any) -> list[Any]:
    """Return the path (`_path_to`) to a norm, or to the view that an instance norm reads."""
    has_view = _is_instance(norm) and _input_of(norm).target in _VIEWS
    return _path_to(_input_of(norm) if has_view else norm)


def _path_to(
    last: Any, dtype: torch.dtype | None = None, views: Collection[Any] = ()
) -> list[Any]:  # fmt: skip
    """Return the path to `last`: the copies before it (`_is_copy`, with `dtype`), nodes whose
    targets are `views`, and `last`. Each is the first argument of the next one."""
    path = [last]
    while _is_copy(_input_of(path[0]), dtype) or _input_of(path[0]).target in views:
        path.insert(0, _input_of(path[0]))
    return path


def _match_group_norm(
    chain: Chain, path: Sequence[Any], backward: Any, claimed: Collection[fx.Node], lies: Lies
) -> Layer | None:  # fmt: skip
    """Return the norm of groups at the start of `chain`, if confpred's operator can read the input
    of the first node of `path`, which ends at the norm. The others are as of `match_group_norm`."""
    norm: Any = chain.norm
    x, eps = val_of(_input_of(path[0])), _named(norm)["eps"]
    inputs = [(path[0], 0), _parameter(norm, "weight"), _parameter(norm, "bias")]
    weights = [val_of(node_at(place)) for place in inputs[1:] if place is not None]
    if not all(isinstance(t, Tensor) for t in (x, *weights)):
        return None  # nothing is known of a constant
    dtypes = {t.dtype for t in weights}
    # Samples, pixels, channels and groups.
    sizes = _sizes(norm, _input_of(path[0]), lies) if x.dtype in DTYPES else None
    if (
        sizes is None or val_of(chain.last).shape != x.shape or not isinstance(eps or 0.0, float)
        or (weights and inputs[1] is None) or any(t.shape != sizes[2:3] for t in weights)
        or len(dtypes) > 1 or dtypes - {x.dtype, torch.float32}
        or (backward is not None and _is_copy(path[0]) and may_be_written(_input_of(path[0])))
    ):  # fmt: skip
        return None
    chain = following.follow(chain, [partial(_take_conversion, x.dtype)], claimed)
    scale: Sequence[Place] = ()
    if backward is None and sizes[1] > 1:
        chain, scale, weights = _take_scale(chain, x, weights, claimed)
    views = _VIEWS if _is_instance(norm) else ()
    back = [] if backward is None else _path_to(backward, x.dtype, views)
    is_row = lambda node: val_of(node).is_contiguous()  # noqa: E731
    add = partial(_take_sum, x.dtype, lies if sizes[1] > 1 else is_row, bool(back))
    chain = following.follow(chain, [add, partial(_take_activation, back)], claimed)
    ends = find_conversions(chain.last, x.dtype, chain.gradient)
    grad = _grad_of(chain, back, x.dtype) if back else None
    grads = _grads_of(backward, (x, *weights)) if back else {}
    if not ends or grads is None or (grad is None and back):
        return None
    problems = [
        norms.group_problem_of(
            sizes, x.dtype, direction, chain.activation, residual=chain.sum is not None,
            weights=weights, centred="rms" not in str(norm.target),
        ) for direction in _DIRECTIONS[: 1 + bool(back)]
    ]  # fmt: skip
    scalars = (torch.finfo(torch.float32).eps if eps is None else eps,)
    return Layer(chain, problems, inputs, scalars, ends, scale, back, grad, grads)


def _sizes(norm: fx.Node, node: fx.Node, lies: Lies) -> tuple[int, ...] | None:
    """Return samples, pixels, channels and groups of a norm of groups that reads `node`; None if
    kernels cannot read it as it lies."""
    arguments, x = _named(norm), val_of(node)
    sizes = sites.sizes_of(x)
    if None in sizes:
        return None
    if "normalized_shape" in arguments:
        is_row = len(arguments["normalized_shape"]) == 1 and x.is_contiguous()
        return (prod(sizes[:-1]), 1, sizes[-1], 1) if is_row else None
    n, c, *pixels = sizes
    if not (lies(node) if pixels else x.is_contiguous()):
        return None
    if not _is_instance(norm):
        return n, prod(pixels), c, arguments["group"]
    view = sites.sizes_of(val_of(norm.args[0]))
    return (n, prod(pixels), c, c) if view == [1, n * c, *pixels] else None


def _parameter(norm: fx.Node, name: str) -> Place | None:
    """Return the position of a weight or bias, None for an absent one; of one that an instance norm
    repeats for every sample, that before the repeat."""
    arguments = _named(norm)
    node = arguments.get(name)
    if node is None:
        return None
    is_repeated = _is_instance(norm) and node.target is aten.repeat.default
    return (node, 0) if is_repeated else (norm, list(arguments).index(name))


def _grad_of(chain: Chain, back: Sequence[fx.Node], dtype: torch.dtype) -> Place | None:
    """Return the position of the output's gradient, in `dtype`; None where other nodes read a
    gradient between that and the norm's, which the operator does not return. `back` is the path
    from the gradient behind the activation to the norm's own."""
    inner = chain.gradient
    reader = back[0] if inner is None else _path_to(inner, dtype)[0]
    reads_others = inner is not None and find_conversions(inner, dtype, back[0]) is None
    return None if reads_others or val_of(_input_of(reader)).dtype is not dtype else (reader, 0)


def _grads_of(backward: Any, inputs: Sequence[Tensor]) -> dict[int, Sequence[fx.Node]] | None:
    """Return the nodes of the gradients of input, weight and bias, by index; None where the
    operator's gradients, which have the shapes and dtypes of `inputs`, cannot replace them."""
    grads: dict[int, Sequence[fx.Node]] = {}
    if not _named(backward)["output_mask"][0]:
        return None
    for item in backward.users:
        place, nodes = item.args[1], [item]
        like = inputs[place]
        if backward.target is BATCH_NORM_BACKWARD and val_of(item).shape != like.shape:
            # The gradients of a view, with a weight for every sample.
            nodes = [node for node in readers_of(item) if node.target in _VIEWS]
            if place and nodes:
                nodes = [n for n in readers_of(nodes[0]) if n.target is aten.sum.dim_IntList]
        ends = find_conversions(nodes[0], like.dtype) if len(nodes) == 1 else None
        if ends is None or val_of(nodes[0]).shape != like.shape:
            return None
        grads[place] = ends
    return grads


def _take_scale(
    chain: Chain, x: Tensor, weights: list[Tensor], claimed: Collection[fx.Node]
) -> tuple[Chain, Sequence[Place], list[Tensor]]:
    """Take an adaptive norm's factor and term for each sample and channel. Return the chain, their
    positions, and fake tensors of the weight and bias that these and the norm's own `weights`
    combine to; without them the chain, no positions, and `weights`. `x` is the norm's input."""
    nodes: list[fx.Node] = []
    places: list[Place] = []
    dtypes: set[torch.dtype] = set()
    for target in (aten.mul.Tensor, aten.add.Tensor):
        last = (*chain.nodes, *nodes)[-1]
        node, *others = readers_of(last) or [last]
        if others or node.target is not target or node in claimed or node.kwargs:
            break
        terms = [i for i, term in enumerate(node.args) if source_of(term) is not last]
        term: Any = node.args[terms[0]] if len(terms) == 1 else None
        if not isinstance(term, fx.Node) or val_of(node).dtype is not val_of(last).dtype:
            break
        val, shape = val_of(term), (*x.shape[:2], *[1] * (x.dim() - 2))
        if not isinstance(val, Tensor) or val.shape != shape:
            break
        nodes.append(node)
        places.append((node, terms[0]))
        dtypes.update(torch.promote_types(val.dtype, t.dtype) for t in weights or [val])
    if len(places) < 2 or len(weights) == 1 or len(dtypes) > 1 or dtypes - {x.dtype, torch.float32}:
        return chain, (), weights
    made = [x.new_empty(x.shape[:2], dtype=dtype) for dtype in dtypes]
    return replace(chain, nodes=(*chain.nodes, *nodes)), places, made * 2


def _take_conversion(dtype: torch.dtype, chain: Chain) -> Chain:
    """Take a conversion to `dtype`, if it is the only reader."""
    readers = readers_of(chain.last)
    if val_of(chain.last).dtype is dtype or len(readers) != 1:
        return chain
    conversions = find_conversions(chain.last, dtype)
    return replace(chain, nodes=(*chain.nodes, *conversions)) if conversions else chain


def _take_sum(dtype: torch.dtype, lies: Lies, is_saved: bool, chain: Chain) -> Chain:
    """Take a sum with a residual of `dtype`, whose layout kernels read as `lies` tells. `is_saved`:
    a backward pass reads it, too, so that nobody may write to it before."""
    longer = following.take_sum(chain, dtype)
    other = longer.residual
    is_taken = other is not None and lies(other) and not (is_saved and may_be_written(other))
    return longer if is_taken else chain


def _take_activation(back: Sequence[fx.Node], chain: Chain) -> Chain:
    """Take an activation; in a joint graph, one whose gradient only the first of `back`, and the
    residual's gradient, read."""
    if not back:
        return following.take_activation(chain)
    grad = _input_of(back[0])
    if chain.sum is None and grad.users.keys() != {back[0]}:
        return chain
    return following.take_activation(chain, grad)


def norm_of(backward: fx.Node) -> Any:
    """Return the norm whose statistics `backward` reads; None where no node computes them."""
    arguments = _named(backward)
    item = source_of(arguments.get("rstd", arguments.get("save_invstd")))
    is_item = isinstance(item, fx.Node) and item.target is operator.getitem
    return item.args[0] if is_item else None


def find_conversions(
    node: fx.Node, dtype: torch.dtype, but: fx.Node | None = None
) -> list[fx.Node] | None:
    """Return `node` itself if it has `dtype`, else its conversions to `dtype`, which are all that
    read it but for the node `but`; None where others do."""
    if val_of(node).dtype is dtype:
        return [node]
    readers = [reader for reader in readers_of(node) if reader is not but]
    all_convert = all(r.target in CONVERSIONS and val_of(r).dtype is dtype for r in readers)
    return readers if all_convert else None


def _is_copy(node: Any, dtype: torch.dtype | None = None) -> bool:
    """Return whether `node` copies a tensor on its device, in its dtype or to float32: from `dtype`
    alone, unless that is None."""
    if not isinstance(node, fx.Node) or node.target not in _COPIES:
        return False
    source, copy = val_of(node.args[0]), val_of(node)
    if not isinstance(source, Tensor):
        return False
    widens = copy.dtype is torch.float32 and source.dtype is (dtype or source.dtype)
    return bool(source.device == copy.device) and (widens or source.dtype is copy.dtype)


def _named(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operator by name."""
    target: Any = node.target
    names = (argument.name for argument in target._schema.arguments)
    return dict(zip(names, node.args, strict=False))


def node_at(place: Place) -> Any:
    return place[0].args[place[1]]


def _input_of(node: fx.Node) -> Any:
    return node.args[0]
