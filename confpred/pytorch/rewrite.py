"""Passes over ATen graphs: which convolutions confpred computes, and what is fused with them.

    inference   convolution -> [batch norm] -> [+ residual] -> [activation]      one operator
                batch norm -> [+ residual] -> [activation]                       one operator
    training    convolution, and both halves of its backward                     an operator each
                batch norm as eager mode computes it, statistics updated in place

All convolutions of a graph are chosen in one call. A node that no pass changes runs as PyTorch runs
it. Graphs come from AOTAutograd: functional, but for copies into mutated inputs at the end.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.pytorch import choosing, library, operators  # noqa: F401  graphs call the operators
from confpred.pytorch import fold as folding
from confpred.pytorch.choosing import ANY, Wishes
from confpred.pytorch.convolve import (
    Call,
    Geometry,
    Hint,
    is_deterministic,
    problem_of,
    sums_bias,
)
from confpred.pytorch.loading import CHANNELS_LAST, DTYPES, is_channels_last

aten = torch.ops.aten
confpred = torch.ops.confpred
#: From the problems of a graph to choices; None where nothing is known.
Choose = Callable[[Sequence[Problem]], Sequence["Choice | None"]]
_NORM = aten._native_batch_norm_legit_no_training.default
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
        convolution, norm: the nodes, or None.
        sum: the node that adds the residual, or None, and the residual's place among its arguments.
        activation: one of `confpred.problem.conv2d.ACTIVATIONS`.
        site: what is known of it.
    """

    nodes: list[fx.Node]
    convolution: fx.Node | None = None
    norm: fx.Node | None = None
    sum: tuple[fx.Node, int] | None = None
    activation: str = "none"
    site: Site = field(default_factory=lambda: Site("", "norm", None))

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def residual(self) -> Any:
        """The node that is added, or None; another one once its own chain is replaced."""
        return None if self.sum is None else self.sum[0].args[self.sum[1]]


# ------------------------------------------------------------------------------------- inference


def fuse(graph: fx.Graph, choose: Choose, wishes: Wishes = ANY) -> list[Site]:
    """Rewrite a graph of inference in place.

    Args:
        graph: from AOTAutograd; nodes have their fake tensors in ``meta["val"]``.
        choose: chooses for all convolutions of the graph.
        wishes: what `choose` was told, for tensors of other sizes.

    Returns:
        What was found, in the order of the graph.
    """
    chains = list(_chains(graph))
    for chain in chains:
        _describe(chain)
    _choose([chain.site for chain in chains], choose)
    for chain in chains:
        _replace(chain, wishes)
    _join_folds(graph)
    graph.eliminate_dead_code()
    graph.lint()
    return [chain.site for chain in chains]


def _chains(graph: fx.Graph) -> Iterator[_Chain]:
    """Yield what is fused, in the order of the graph."""
    claimed: set[fx.Node] = set()
    found: dict[fx.Node, _Chain] = {}
    convolutions = [n for n in graph.nodes if n.target is aten.convolution.default]
    norms = [n for n in graph.nodes if n.target is _NORM]
    # The later convolution of two that are summed takes the sum: the other's is there by then.
    # A norm starts a chain only where no convolution has claimed it.
    for node in [*reversed(convolutions), *norms]:
        if node not in claimed and _is_image(node.args[0]):
            found[node] = _follow(node, claimed)
            claimed.update(found[node].nodes)
    for node in graph.nodes:
        if node in found:
            yield found[node]


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
        if start.args[6]:
            return chain  # transposed: not what confpred's operator computes
    while len(chain.last.users) == 1 and chain.activation == "none":
        last = chain.last
        (node,) = last.users
        first = _first_result(node) if node.target is _NORM else None
        following = [node] if first is None else [node, first]
        val = _val(following[-1])
        if node in claimed or not isinstance(val, Tensor) or val.dtype is not _val(last).dtype:
            break
        if node.target is _NORM:
            if node.args[0] is not last or chain.norm or chain.sum:
                break
            chain.norm = node
        elif node.target is aten.add.Tensor and chain.sum is None:
            place = _other_operand(node, last)
            if place is None or is_channels_last(_val(node)) != is_channels_last(_val(last)):
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
    a, b = _val(one), _val(other)
    same = isinstance(b, Tensor) and b.shape == a.shape and b.dtype is a.dtype
    return place if same and b.device == a.device else None


def _describe(chain: _Chain) -> None:
    """Say what `chain` is, as far as that is known before anything is chosen."""
    has_norm, has_residual = chain.norm is not None, chain.residual is not None
    fused = ["norm"] * has_norm + ["add"] * has_residual
    fused += [chain.activation] * (chain.activation != "none")
    chain.site = Site(_name(chain.nodes[0]), "norm", None)
    node = chain.convolution
    if node is not None:
        has_bias = has_norm or node.args[2] is not None
        chain.site = _site(
            node, "fprop", bias=has_bias, activation=chain.activation, residual=has_residual
        )
    chain.site.fused = tuple(fused)


def _is_one_of_pytorchs(chain: _Chain) -> bool:
    """Return whether one operator of PyTorch's computes the convolution and what follows it."""
    node, problem = chain.convolution, chain.site.problem
    if problem is not None or node is None:
        return problem is not None and library.fuses(problem)
    _, padding, _, groups = _geometry(node, 3)
    x, weight = _val(node.args[0]), _val(node.args[1])
    is_pixel = library.takes_pixels(x, weight, padding, groups) and not node.args[6]
    return is_pixel and chain.residual is None


def _replace(chain: _Chain, wishes: Wishes) -> None:
    """Put one operator in the place of `chain`, if that is fewer launches or a confpred kernel."""
    node, norm, last = chain.convolution, chain.norm, chain.last
    # One operator takes a folded filter; PyTorch's convolution and a pass over its output do not.
    out = _val(last)
    is_one = chain.site.is_ours or _is_one_of_pytorchs(chain)
    if not is_one:
        if not isinstance(out, Tensor) or out.dtype not in DTYPES or not is_channels_last(out):
            return
        if norm is None and len(chain.nodes) == 1:
            return  # PyTorch's convolution with nothing after it
    given: tuple[Any, ...]
    x, weight, bias = (chain.nodes[0].args[0], None, None) if node is None else node.args[:3]
    if norm is None:
        given = (x, weight, None, bias)
    else:
        first, second = _fold(last, norm, bias, _uncast(weight) if is_one else None, out.dtype)
        given = (x, first, None, second) if is_one else (x, weight, first, second)
    if node is None:
        given = (x, *given[2:], chain.residual, chain.activation)
        _put_in_place(last, confpred.scale_shift.default, given)
    else:
        hints = (_hint(chain.site), None)
        call = Call(_geometry(node, 3), chain.activation, hints=hints, wishes=wishes)
        _put_in_place(last, confpred.conv2d.default, (*given, chain.residual, call.text()))
    for old in reversed(chain.nodes[:-1]):
        for unused in list(old.users):  # other results of a norm
            unused.graph.erase_node(unused)
        old.graph.erase_node(old)


def _fold(
    last: fx.Node, norm: fx.Node, bias: Any, filters: Any, dtype: torch.dtype
) -> list[fx.Node]:
    """Fold `norm` before the node `last`.

    Args:
        bias, filters: of the convolution before the norm, or None.
        dtype: of the activations.

    Returns:
        The nodes of filter and bias, or of scale and shift.
    """
    graph, mean = last.graph, norm.args[3]
    given = ([arg] for arg in (*norm.args[1:5], bias, filters, norm.args[6]))
    with graph.inserting_before(last):
        node = graph.call_function(confpred.fold.default, (*given, str(dtype).split(".")[1]))
        results = [graph.call_function(operator.getitem, (node, place)) for place in (0, 1)]
    of_filters = None if filters is None else _val(filters)
    node.meta["val"] = folding.empty(_val(mean), of_filters, dtype)
    for result, val in zip(results, node.meta["val"], strict=True):
        result.meta["val"] = val
    return results


def _join_folds(graph: fx.Graph) -> None:
    """Fold all norms whose tensors are inputs of the graph in one launch."""
    folds = [
        node
        for node in graph.find_nodes(op="call_function", target=confpred.fold.default)
        if all(given.op == "placeholder" for given in node.all_input_nodes)
    ]
    if not folds:
        return
    lists = [[x for node in folds for x in node.args[i]] for i in range(7)]
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        names = ",".join(node.args[7] for node in folds)
        new = graph.call_function(confpred.fold.default, (*lists, names))
    new.meta["val"] = [val for node in folds for val in node.meta["val"]]
    for place, node in enumerate(folds):
        for result in list(node.users):
            result.args = (new, 2 * place + result.args[1])
        graph.erase_node(node)


def _uncast(node: Any) -> Any:
    """Return the tensor that autocast has cast, as the fold reads every dtype."""
    if isinstance(node, fx.Node) and node.target is aten._to_copy.default:
        source: Any = node.args[0]
        if source.op == "placeholder" and _val(source).dtype in DTYPES:
            return source
    return node


# -------------------------------------------------------------------------------------- training


def serve(graph: fx.Graph, choose: Choose, wishes: Wishes = ANY) -> list[Site]:
    """Let confpred compute the convolutions of a graph, and halves of their backward, in place.

    Args:
        graph, choose, wishes: as of `fuse`; a joint graph of forward and backward, or one of both.

    Returns:
        What was found, in the order of the graph.
    """
    found: dict[fx.Node, list[Site]] = {}
    for node in graph.nodes:
        if node.target is aten.convolution.default and _is_image(node.args[0]):
            found[node] = [_site(node, "fprop", bias=node.args[2] is not None)]
        elif node.target is aten.convolution_backward.default and _is_image(node.args[1]):
            found[node] = list(_backward_sites(node))
    everywhere = [site for sites in found.values() for site in sites]
    _choose(everywhere, choose)
    for node, sites in found.items():
        if any(site.is_ours for site in sites):
            _serve_one(node, sites, wishes)
    graph.lint()
    return everywhere


def _backward_sites(node: fx.Node) -> Iterator[Site]:
    groups: Any = node.args[9]
    mask: Any = node.args[10]
    if mask[0]:
        yield _site(node, "dgrad")
    if mask[1]:
        bias = mask[2] and sums_bias(groups)
        yield _site(node, "wgrad", bias=bias, deterministic=is_deterministic())


def _serve_one(node: fx.Node, sites: Sequence[Site], wishes: Wishes) -> None:
    hints = {site.direction: _hint(site) for site in sites}
    if node.target is aten.convolution.default:
        x, weight, bias = node.args[:3]
        call = Call(_geometry(node, 3), hints=(hints["fprop"], None), wishes=wishes)
        _put_in_place(node, confpred.conv2d.default, (x, weight, None, bias, None, call.text()))
    else:
        mask: Any = node.args[10]
        both = hints.get("dgrad"), hints.get("wgrad")
        call = Call(_geometry(node, 4), mask=tuple(mask), hints=both, wishes=wishes)
        _put_in_place(node, confpred.conv2d_backward.default, (*node.args[:3], call.text()))


def batch_norms_as_eager(graph: fx.Graph) -> None:
    """Let batch norms of training be computed by the library that eager mode would take.

    A capture names PyTorch's own kernels in the place of cuDNN's. The operators that replace them
    here decide as eager mode does, and hand cuDNN's reserve from forward to backward.
    """
    forward = aten._batch_norm_with_update_functional.default
    backward = aten.batch_norm_backward.default
    reserves: dict[fx.Node, fx.Node] = {}  # by the node of the saved mean
    for node in list(graph.nodes):
        if node.target is aten._native_batch_norm_legit_functional.default:
            x, weight, bias, mean, variance, training, momentum, eps = node.args
            if not training or not all(isinstance(t, fx.Node) for t in (weight, mean, variance)):
                continue  # the backward of the other operator wants a weight
            with graph.inserting_before(node):
                new = graph.call_function(forward, (x, weight, bias, mean, variance, momentum, eps))
                reserve = graph.call_function(operator.getitem, (new, 3))
            new.meta, reserve.meta = dict(node.meta), dict(node.meta)
            values = list(node.meta["val"])
            empty = values[0].new_empty(0, dtype=torch.uint8)
            new.meta["val"], reserve.meta["val"] = [*values[:3], empty, *values[3:]], empty
            for item in list(node.users):
                place = item.args[1]
                item.args = (new, place if place < 3 else place + 1)
                if place == 1:
                    reserves[item] = reserve
            graph.erase_node(node)
            # The results of the update are to stand behind the node that computes them.
            new.append(reserve)
        elif node.target is aten.native_batch_norm_backward.default:
            grad, x, weight, _, _, saved_mean, saved_deviation, training, eps, mask = node.args
            reserve_of = reserves.get(saved_mean)
            if reserve_of is None or not training:
                continue
            saved = (None, None, saved_mean, saved_deviation, True, eps, mask, reserve_of)
            _put_in_place(node, backward, (grad, x, weight, *saved))


def refuse_mixed_dtypes(graph: fx.Graph) -> None:
    """Refuse convolutions whose operands have several dtypes, as eager mode does.

    Raises:
        RuntimeError: there is one; the operator of a captured graph would take it.
    """
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        operands = [_val(n) for n in node.args[:3] if isinstance(n, fx.Node)]
        if len({t.dtype for t in operands}) > 1:
            dtypes = ", ".join(str(t.dtype) for t in operands)
            raise RuntimeError(f"input, weight and bias should have one dtype, not {dtypes}")


def drop_copies(graph: fx.Graph) -> None:
    """Drop copies that nothing can tell from their source, such as those of dropout in inference.

    A functional graph writes to nothing that is read later. So only a result of the graph has to
    stay a copy, where its source is an input or another result.
    """
    owners: dict[fx.Node, fx.Node] = {}  # a node whose memory this one shares, or itself

    def owner_of(node: fx.Node) -> fx.Node:
        while owners[node] is not node:
            node = owners[node]
        return node

    for node in graph.nodes:
        viewed = node.args[0] if node.target is operator.getitem else node
        owners[node] = node.all_input_nodes[0] if is_view(viewed) else node
    results = {owner_of(node) for node in graph.output_node().all_input_nodes}
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        (source,) = node.all_input_nodes
        owner = owner_of(source)
        if node in results and (owner.op == "placeholder" or owner in results):
            continue
        if _is_alike(_val(node), _val(source)):
            owners[node] = owner
            if node in results:
                results.add(owner)
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def is_view(node: fx.Node) -> bool:
    """Return whether the result of `node` may share memory with its first input."""
    schema = getattr(node.target, "_schema", None)
    returns = () if schema is None else schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _is_alike(a: Any, b: Any) -> bool:
    return bool(
        isinstance(a, Tensor) and a.shape == b.shape and a.stride() == b.stride()
        and a.dtype is b.dtype and a.device == b.device and a.is_neg() == b.is_neg()
        and a.is_conj() == b.is_conj() and a.layout is b.layout
    )  # fmt: skip


def views_of_any_layout(graph: fx.Graph) -> None:
    """Let views copy where tensors lie in memory otherwise than fake ones did at the capture.

    Such as results of a library's convolution in bfloat16, channels last, on a CPU.
    """
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default


def update_in_place(graph: fx.Graph) -> set[fx.Node]:
    """Let a forward graph update running statistics and counts of batches where they are.

    A functional graph computes new ones and copies them at its end, two launches a batch norm more.

    Returns:
        The inputs that are written.
    """
    functional = aten._batch_norm_with_update_functional.default
    written: set[fx.Node] = set()
    counts: list[fx.Node] = []
    for copy in [n for n in graph.nodes if n.target is aten.copy_.default]:
        home, value = copy.args[:2]
        if not isinstance(home, fx.Node) or not isinstance(value, fx.Node):
            continue
        if home.op != "placeholder" or copy.users:
            continue
        written.add(home)
        counted = value.target is aten.add.Tensor and value.args == (home, 1) and not value.kwargs
        if counted and len(value.users) == 1 and home.users.keys() == {value, copy}:
            graph.erase_node(copy)
            graph.erase_node(value)
            counts.append(home)
    for node in [n for n in graph.nodes if n.target is functional]:
        _update_one(graph, node)
    if counts:
        with graph.inserting_before(graph.output_node()):
            graph.call_function(aten._foreach_add_.Scalar, (counts, 1))
    graph.lint()
    return written


def _update_one(graph: fx.Graph, node: fx.Node) -> None:
    homes = node.args[3:5]
    items = {item.args[1]: item for item in node.users}
    copies = []
    for place, home in ((4, homes[0]), (5, homes[1])):
        item = items.get(place)
        if item is None or len(item.users) != 1 or not isinstance(home, fx.Node):
            return
        (copy,) = item.users
        if copy.target is not aten.copy_.default or copy.args[0] is not home:
            return
        if home.users.keys() != {node, copy}:
            return  # something else reads the statistics
        copies += [copy, item]
    for old in copies:
        graph.erase_node(old)
    new = _put_in_place(node, aten._batch_norm_with_update.default, node.args)
    new.meta["val"] = new.meta["val"][:4]


# ---------------------------------------------------------------------------------------- shared


def _put_in_place(node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """Return a new call of `target`, which stands where `node` was."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


def _choose(sites: Sequence[Site], choose: Choose) -> None:
    asked = [site for site in sites if site.problem is not None]
    if asked:
        choices = choose([site.problem for site in asked if site.problem is not None])
        for site, choice in zip(asked, choices, strict=True):
            site.choice = choice


def _hint(site: Site) -> Hint | None:
    """Return what is to run for the sizes of the capture."""
    p = site.problem
    if p is None:
        return None
    image = (p.n, p.c, p.h, p.w)
    if site.choice is None or not site.is_ours:
        return Hint(image)
    return Hint(image, site.choice.candidate)


def _site(node: fx.Node, direction: str, **fields: Any) -> Site:
    """Return the site of a convolution, or of a direction of its backward, with its problem or why
    there is none; `fields` are further ones of the problem."""
    at = 3 if direction == "fprop" else 4  # the place of the stride among the arguments
    image, filters = (_val(n) for n in node.args[at - 3 : at - 1])
    site, sizes = Site(_name(node), direction, None), [_size(s) for s in image.shape]
    if node.args[at + 3]:
        site.why = "transposed"
    elif image.dtype not in DTYPES:
        site.why = f"dtype {str(image.dtype).removeprefix('torch.')}"
    elif None in sizes:
        site.why = "a size that depends on values"
    else:
        filter_sizes = [int(s) for s in filters.shape]
        geometry = _geometry(node, at)
        problem = problem_of(direction, sizes, filter_sizes, image.dtype, geometry, **fields)
        if problem is None:
            site.why = "no convolution that confpred describes"
        elif is_channels_last(image):
            site.problem = problem
        else:
            either = image.is_contiguous(memory_format=CHANNELS_LAST)
            site.why = "one pixel or one channel" if either else "channels first"
    return site


def _geometry(node: fx.Node, at: int) -> Geometry:
    """Return stride, padding, dilation, groups; `at` is the place of the stride."""
    given: Any = node.args
    stride, padding, dilation = ((int(v[0]), int(v[1])) for v in given[at : at + 3])
    return stride, padding, dilation, int(given[at + 5])


def _is_image(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(_val(node), Tensor) and _val(node).dim() == 4


def _val(node: Any) -> Any:
    return node.meta.get("val")


def _size(size: Any) -> Any:
    """Return a size, or the one that stands for it where it is open; None where nothing does."""
    return size if isinstance(size, int) else size.node.hint


def _name(node: fx.Node) -> str:
    """Return the name of the innermost module that `node` comes from, as ``named_modules`` has it;
    Dynamo writes it as an expression."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str([*stack.values()][-1][0]) if stack else ""
    text = re.sub(r"^[A-Z]\[[^]]*\]\.?(_modules)?|self\.|\._modules", "", path)
    text = re.sub(r"\['([^']*)'\]|\[(\d+)\]", lambda m: "." + (m[1] or m[2]), text)
    return re.sub(r"^(copy|model)\.", "", text.strip("."))
