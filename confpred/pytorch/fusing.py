"""Which convolutions of an ATen graph confpred computes, and what is fused with them.

    inference   convolution -> [batch norm] -> [+ residual] -> [activation]      one operator
                batch norm -> [+ residual] -> [activation]                       one operator
    training    convolution, and both halves of its backward                     an operator each

All convolutions of a graph are chosen in one call. A node that is not replaced runs as PyTorch runs
it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.launch.assignment import Assignment
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.pytorch import choosing, library, operators  # noqa: F401  graphs call the operators
from confpred.pytorch import fold as folding
from confpred.pytorch.choosing import ANY, Wishes
from confpred.pytorch.convolve import Call, Geometry, is_deterministic, problem_of, sums_bias
from confpred.pytorch.loading import CHANNELS_LAST, DTYPES, is_channels_last
from confpred.pytorch.passes import put_in_place, val_of

aten = torch.ops.aten
confpred = torch.ops.confpred
_NORM = aten._native_batch_norm_legit_no_training.default
_UNFOLDED = "folded filter beyond float16"
_PLAIN = (Tensor, torch.nn.Parameter)  # no fake tensor, and no other subclass
_ACTIVATIONS: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.silu.default: "silu",
    aten.hardswish.default: "hardswish",
}


@dataclass(slots=True)
class Site:
    """One convolution of a graph in one direction, or a batch norm that follows none.

    Attributes:
        name: of the layer, as the network calls it; empty where it is not known.
        direction: ``fprop``, ``dgrad`` or ``wgrad``; ``norm`` for a batch norm.
        problem: what is computed; None where no confpred kernel is made for it.
        why: why no kernel is, in words; None where there is a problem.
        choice: what was chosen; None where nothing is known.
        fused: operators that became one with it, such as ``("norm", "relu")``.
    """

    name: str
    direction: str
    problem: Problem | None
    why: str | None = None
    choice: Choice | None = None
    fused: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether a confpred kernel, or a chosen plan of a library, computes it."""
        return self.choice is not None and choosing.why_pytorch(self.choice) is None


@dataclass(slots=True)
class _Chain:
    """Nodes that become one operator.

    Attributes:
        nodes: first to last, with the ``getitem`` of a norm.
        sum: the node that adds the residual, and the residual's place among its arguments.
    """

    nodes: list[fx.Node]
    convolution: fx.Node | None = None
    norm: fx.Node | None = None
    sum: tuple[fx.Node, int] | None = None
    activation: str = "none"

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def residual(self) -> Any:
        """The node that is added, or None; another one once its own chain is replaced."""
        return None if self.sum is None else self.sum[0].args[self.sum[1]]


def fuse(
    graph: fx.Graph, choose: choosing.Choose, wishes: Wishes = ANY, inputs: Sequence[Any] = ()
) -> list[Site]:
    """Rewrite a graph of inference in place, and return its convolutions and norms in order;
    `wishes` are those of `choose`, for tensors of other sizes; `inputs` are the graph's, or none
    where their values are not known."""
    chains = _chains(graph)
    sites = [_site_of(chain) for chain in chains]
    places = graph.find_nodes(op="placeholder")
    values = dict(zip(places, inputs, strict=True)) if len(inputs) == len(places) else {}
    for chain, site in zip(chains, sites, strict=True):
        if _loses_precision(chain, values):
            site.problem, site.why = None, _UNFOLDED
    _choose(sites, choose)
    for chain, site in zip(chains, sites, strict=True):
        _replace(chain, site, wishes)
    _join_folds(graph)
    graph.eliminate_dead_code()
    graph.lint()
    return sites


def _chains(graph: fx.Graph) -> list[_Chain]:
    """Return what is fused, in the order of the graph."""
    claimed: set[fx.Node] = set()
    found: dict[fx.Node, _Chain] = {}
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    norms = graph.find_nodes(op="call_function", target=_NORM)
    # The later convolution of two that are summed takes the sum: the other's is there by then.
    # A norm starts a chain only where no convolution has claimed it.
    for node in [*reversed(convolutions), *norms]:
        if node not in claimed and _is_image(node.args[0]):
            found[node] = _follow(node, claimed)
            claimed.update(found[node].nodes)
    return [found[node] for node in graph.nodes if node in found]


def _follow(start: fx.Node, claimed: set[fx.Node]) -> _Chain:
    """Return the longest chain that begins with `start`."""
    chain = _Chain([start])
    if start.target is _NORM:
        chain.norm, first = start, _first_result(start)
        if first is None:
            return chain
        chain.nodes.append(first)
    else:
        chain.convolution = start
        if start.args[6] or _geometry(start, 3) is None:
            return chain  # not what confpred's operator computes
    while len(chain.last.users) == 1 and chain.activation == "none":
        last = chain.last
        (node,) = last.users
        first = _first_result(node) if node.target is _NORM else None
        following = [node] if first is None else [node, first]
        val = val_of(following[-1])
        if node in claimed or not isinstance(val, Tensor) or val.dtype is not val_of(last).dtype:
            break
        if node.target is _NORM:
            if node.args[0] is not last or chain.norm or chain.sum:
                break
            chain.norm = node
        elif node.target is aten.add.Tensor and chain.sum is None:
            place = _other_operand(node, last)
            if place is None or is_channels_last(val_of(node)) != is_channels_last(val_of(last)):
                break  # nodes that follow count on the strides of the sum
            chain.sum = (node, place)
        elif (activation := _activation(node)) is not None:
            chain.activation = activation
        else:
            break
        chain.nodes += following
    return chain


def _first_result(norm: fx.Node) -> fx.Node | None:
    """Return the node of the normalised tensor; None where other results are used, too."""
    items = [n for n in norm.users if n.users]
    if len(items) == 1 and items[0].target is operator.getitem and items[0].args[1] == 0:
        return items[0]
    return None


def _activation(node: fx.Node) -> str | None:
    if node.target is aten.gelu.default and node.kwargs.get("approximate", "none") == "none":
        return "gelu"
    if node.target is aten.hardtanh.default and tuple(node.args[1:]) == (0.0, 6.0):
        return "relu6"
    return _ACTIVATIONS.get(node.target)


def _other_operand(node: fx.Node, one: fx.Node) -> int | None:
    """Return the place of what `node` adds to `one`; None where that has another shape or dtype."""
    if node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return None
    place = 1 if node.args[0] is one else 0
    other = node.args[place]
    if not isinstance(other, fx.Node) or other is one:
        return None
    a, b = val_of(one), val_of(other)
    same = isinstance(b, Tensor) and b.shape == a.shape and b.dtype is a.dtype
    return place if same and b.device == a.device else None


def _site_of(chain: _Chain) -> Site:
    """Return what is known of `chain` before anything is chosen."""
    node, has_norm, has_residual = chain.convolution, chain.norm is not None, chain.sum is not None
    site = Site(_name(chain.nodes[0]), "norm", None)
    if node is not None:
        bias, activation = has_norm or node.args[2] is not None, chain.activation
        site = _site(node, "fprop", bias=bias, activation=activation, residual=has_residual)
    activations = [chain.activation] * (chain.activation != "none")
    site.fused = (*["norm"] * has_norm, *["add"] * has_residual, *activations)
    return site


def _is_one_of_pytorchs(chain: _Chain, problem: Problem | None) -> bool:
    """Return whether one operator of PyTorch's computes the convolution and what follows it."""
    node = chain.convolution
    if problem is not None:
        return library.fuses(problem)
    geometry = None if node is None else _geometry(node, 3)
    if node is None or geometry is None or node.args[6] or chain.sum is not None:
        return False
    _, padding, _, groups = geometry
    return library.takes_pixels(val_of(node.args[0]), val_of(node.args[1]), padding, groups)


def _loses_precision(chain: _Chain, values: Mapping[Any, Any]) -> bool:
    """Return whether the folded filter of `chain` is one that float16 cannot hold."""
    if chain.norm is None or chain.convolution is None:
        return False
    arguments: Any = chain.norm.args
    nodes = (arguments[1], arguments[4], _uncast(chain.convolution.args[1]))
    tensors: Any = [values.get(node) for node in nodes]
    for node, t in zip(nodes, tensors, strict=True):
        if node is not None and (type(t) not in _PLAIN or t.shape != val_of(node).shape):
            return False  # computed in the graph, or without values
    if val_of(chain.last).dtype is not torch.float16:
        return False
    with _disable_current_modes(), torch.no_grad():
        gamma, variance, filters = tensors
        return folding.loses_precision(gamma, variance, filters, arguments[6])


def _replace(chain: _Chain, site: Site, wishes: Wishes) -> None:
    """Put one operator in the place of `chain`, if that is fewer launches or a confpred kernel."""
    node, norm, last, out = chain.convolution, chain.norm, chain.last, val_of(chain.last)
    # One operator takes a folded filter; PyTorch's convolution and a pass over its output do not.
    is_folded = site.why != _UNFOLDED
    is_one = site.is_ours or (is_folded and _is_one_of_pytorchs(chain, site.problem))
    if not is_one:
        if not isinstance(out, Tensor) or out.dtype not in DTYPES or not is_channels_last(out):
            return
        if norm is None and len(chain.nodes) == 1:
            return  # PyTorch's convolution with nothing after it
    scale: Any = None
    x, weight, bias = (chain.nodes[0].args[0], None, None) if node is None else node.args[:3]
    if norm is not None and is_one:
        weight, bias = _fold(last, norm, bias, _uncast(weight), out.dtype)
    elif norm is not None:
        scale, bias = _fold(last, norm, bias, None, out.dtype)
    if node is None:
        given = (x, scale, bias, chain.residual, chain.activation)
        put_in_place(last, confpred.scale_shift.default, given)
    else:
        geometry: Any = _geometry(node, 3)
        hints = (_hint(site), None)
        call = Call(geometry, chain.activation, hints=hints, wishes=wishes).text()
        operands = (x, weight, scale, bias, chain.residual)
        put_in_place(last, confpred.conv2d.default, (*operands, call))


def _fold(
    last: fx.Node, norm: fx.Node, bias: Any, filters: Any, dtype: torch.dtype
) -> list[fx.Node]:
    """Return the nodes of filter and bias, or of scale and shift, that stand for `norm` before the
    node `last`; `bias` and `filters` are those of the convolution before it, or None."""
    graph = last.graph
    given = (*norm.args[1:5], bias, filters, norm.args[6], DTYPES[dtype])
    with graph.inserting_before(last):
        node = graph.call_function(confpred.fold.default, tuple([each] for each in given))
        results = [graph.call_function(operator.getitem, (node, place)) for place in (0, 1)]
    of_filters = None if filters is None else val_of(filters)
    node.meta["val"] = folding.empty(val_of(norm.args[3]), of_filters, DTYPES[dtype])
    for result, val in zip(results, node.meta["val"], strict=True):
        result.meta["val"] = val
    return results


def _join_folds(graph: fx.Graph) -> None:
    """Fold all norms whose tensors are inputs of the graph in one launch."""
    folds = graph.find_nodes(op="call_function", target=confpred.fold.default)
    folds = [n for n in folds if all(x.op == "placeholder" for x in n.all_input_nodes)]
    if not folds:
        return
    lists = tuple([x for node in folds for x in node.args[i]] for i in range(8))
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        new = graph.call_function(confpred.fold.default, lists)
    new.meta["val"] = [val for node in folds for val in node.meta["val"]]
    for place, node in enumerate(folds):
        for result in list(node.users):
            result.args = (new, 2 * place + result.args[1])


def _uncast(node: Any) -> Any:
    """Return the tensor that autocast has cast, as the fold reads every dtype."""
    if isinstance(node, fx.Node) and node.target is aten._to_copy.default:
        source: Any = node.args[0]
        if source.op == "placeholder" and val_of(source).dtype in DTYPES:
            return source
    return node


def serve(graph: fx.Graph, choose: choosing.Choose, wishes: Wishes = ANY) -> list[Site]:
    """Let confpred compute the convolutions of a graph, and halves of their backward, in place; see
    `fuse`. It is a joint graph of forward and backward, or one of the two."""
    found: dict[fx.Node, list[Site]] = {}
    for node in graph.nodes:
        if node.target is aten.convolution.default and _is_image(node.args[0]):
            found[node] = [_site(node, "fprop", bias=node.args[2] is not None)]
        elif node.target is aten.convolution_backward.default and _is_image(node.args[1]):
            groups, mask = node.args[9:11]
            bias = mask[2] and isinstance(groups, int) and sums_bias(groups)
            is_fixed = is_deterministic()
            found[node] = [_site(node, "dgrad")] if mask[0] else []
            if mask[1]:
                found[node].append(_site(node, "wgrad", bias=bias, deterministic=is_fixed))
    everywhere = [site for sites in found.values() for site in sites]
    _choose(everywhere, choose)
    for node, sites in found.items():
        if any(site.is_ours for site in sites):
            _serve_one(node, sites, wishes)
    graph.lint()
    return everywhere


def _serve_one(node: fx.Node, sites: Sequence[Site], wishes: Wishes) -> None:
    hints = {site.direction: _hint(site) for site in sites}
    geometry: Any = _geometry(node, 3 if node.target is aten.convolution.default else 4)
    if node.target is aten.convolution.default:
        x, weight, bias = node.args[:3]
        call = Call(geometry, hints=(hints["fprop"], None), wishes=wishes)
        put_in_place(node, confpred.conv2d.default, (x, weight, None, bias, None, call.text()))
    else:
        mask: Any = node.args[10]
        both = hints.get("dgrad"), hints.get("wgrad")
        call = Call(geometry, mask=tuple(mask), hints=both, wishes=wishes)
        put_in_place(node, confpred.conv2d_backward.default, (*node.args[:3], call.text()))


def _choose(sites: Sequence[Site], choose: choosing.Choose) -> None:
    asked = [site for site in sites if site.problem is not None]
    if asked:
        choices = choose([site.problem for site in asked if site.problem is not None])
        for site, choice in zip(asked, choices, strict=True):
            site.choice = choice


def _hint(site: Site) -> Assignment | None:
    """Return what is to run for the sizes of the capture."""
    if site.problem is None:
        return None
    candidate = site.choice.candidate if site.choice and site.is_ours else PYTORCH_OPERATOR
    return Assignment(site.problem, candidate)


def _site(node: fx.Node, direction: str, **fields: Any) -> Site:
    """Return the site of a convolution, or of a direction of its backward, with its problem or why
    there is none; `fields` are further ones of the problem."""
    at = 3 if direction == "fprop" else 4  # the place of the stride among the arguments
    image, filters = (val_of(n) for n in node.args[at - 3 : at - 1])
    # The hint of an open size stands for it; a size that depends on values has none.
    sizes = [s if isinstance(s, int) else s.node.hint for s in image.shape]
    site, geometry = Site(_name(node), direction, None), _geometry(node, at)
    filter_sizes = [s for s in filters.shape if isinstance(s, int)]
    if node.args[at + 3]:
        site.why = "transposed"
    elif geometry is None or len(filter_sizes) != filters.dim():
        site.why = "a filter or geometry of an open size"
    elif image.dtype not in DTYPES:
        site.why = f"dtype {str(image.dtype).removeprefix('torch.')}"
    elif None in sizes:
        site.why = "a size that depends on values"
    else:
        problem = problem_of(direction, sizes, filter_sizes, image.dtype, geometry, **fields)
        if problem is None:
            site.why = "no convolution that confpred describes"
        elif is_channels_last(image):
            site.problem = problem
        else:
            either = image.is_contiguous(memory_format=CHANNELS_LAST)
            site.why = "one pixel or one channel" if either else "channels first"
    return site


def _geometry(node: fx.Node, at: int) -> Geometry | None:
    """Return stride, padding, dilation, groups; `at` is the place of the stride. None where one of
    them is of an open size, or they are not those of an image."""
    given: Any = node.args
    stride, padding, dilation = pairs = [tuple(v) for v in given[at : at + 3]]
    numbers = [*stride, *padding, *dilation, given[at + 5]]
    if any(len(pair) != 2 for pair in pairs) or not all(type(n) is int for n in numbers):
        return None
    return stride, padding, dilation, given[at + 5]


def _is_image(node: Any) -> bool:
    val = val_of(node) if isinstance(node, fx.Node) else None
    return isinstance(val, Tensor) and val.dim() == 4


def _name(node: fx.Node) -> str:
    """Return the name of the innermost module that `node` comes from, as ``named_modules`` has it;
    Dynamo writes it as an expression."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str([*stack.values()][-1][0]) if stack else ""
    text = re.sub(r"^[A-Z]\[[^]]*\]\.?(_modules)?|self\.|\._modules", "", path)
    text = re.sub(r"\['([^']*)'\]|\[(\d+)\]", lambda m: "." + (m[1] or m[2]), text)
    return re.sub(r"^(copy|model)\.", "", text.strip("."))
