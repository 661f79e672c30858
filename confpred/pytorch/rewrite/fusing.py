"""Inference: each convolution or batch norm with what follows it becomes one operator.

    convolution -> [batch norm] -> [+ residual] -> [activation]
    batch norm -> [+ residual] -> [activation]

All convolutions of a graph are chosen in one call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device
from confpred.pytorch.rewrite import causal, following, sites
from confpred.pytorch.rewrite.matches import LAUNCH_MS, Match, choose_and_replace
from confpred.pytorch.rewrite.passes import put_in_place, result_of, val_of
from confpred.pytorch.run import choosing, library, operators  # noqa: F401  graphs call the operators
from confpred.pytorch.run import fold as folding
from confpred.pytorch.run.loading import DTYPES, is_channels_last

aten = torch.ops.aten
confpred = torch.ops.confpred
_UNFOLDED = "folded filter beyond float16"
_PLAIN = (Tensor, torch.nn.Parameter)  # no fake tensor, and no other subclass
_REDUCTIONS = (aten.mean.dim, aten.sum.dim_IntList, aten.var_mean.correction, aten.amax.default)
_PATTERNS = (following.norm_after, following.sum_after, following.activation_after)


def fuse(
    graph: fx.Graph, choose: choosing.Choose, wishes: choosing.Wishes, inputs: Sequence[Any],
    folds: list[Fold], device: Device | None = None,
) -> list[sites.Site]:  # fmt: skip
    """Rewrite a graph of inference in place, and return its convolutions and norms in order.

    Args:
        graph: what is rewritten.
        choose, wishes: choose for it; the latter for tensors of other sizes, too.
        inputs: of the graph, or none where their values are not known.
        folds: gets what is seen of the values.
        device: that Inductor compiles other operations for; None where it does not.
    """
    found = causal.serve(graph, choose, wishes, fuses=True)
    placeholders = graph.find_nodes(op="placeholder")
    is_known = len(inputs) == len(placeholders)
    places = {node: place for place, node in enumerate(placeholders) if is_known}
    chains = _chains(graph)
    if device is not None:
        chains = _shortened(chains, device, wishes)
    matches = []
    for chain in chains:
        site, fold = _site(chain), _fold_of(chain, places, inputs)
        folds += [fold] * (fold is not None)
        if fold is not None and fold.is_lossy:
            site.problem, site.why = None, _UNFOLDED
        put = partial(_replace, chain, site, wishes, device is None)
        x: Any = chain.nodes[0].args[0]
        ends = ([x], [chain.last]) if site.by_layout else ()
        matches.append(Match([site], put, *ends))
    found += choose_and_replace(graph, matches, choose)
    _join_folds(graph)
    return found


def _chains(graph: fx.Graph) -> list[following.Chain]:
    """Return what is fused, in the order of the graph."""
    claimed: set[fx.Node] = set()
    found: dict[fx.Node, following.Chain] = {}
    convolutions = graph.find_nodes(op="call_function", target=sites.CONVOLUTION)
    norms = graph.find_nodes(op="call_function", target=following.FIXED_NORM)
    # The later convolution of two that are summed takes the sum: the other's is there by then.
    # A norm starts a chain only where no convolution has claimed it.
    for node in [*reversed(convolutions), *norms]:
        if node in claimed or not sites.is_image(node.args[0]):
            continue
        norm = node if node.target is following.FIXED_NORM else None
        first = None if norm is None else following.first_result(norm)
        chain = following.Chain((node,) if first is None else (node, first), norm)
        # confpred's operator computes no transposed convolutions.
        plain = norm is not None or not (node.args[6] or sites.geometry_of(node) is None)
        found[node] = following.follow(chain, _PATTERNS if plain else (), claimed)
        claimed.update(found[node].nodes)
    return [found[node] for node in graph.nodes if node in found]


def _shortened(
    chains: Sequence[following.Chain], device: Device, wishes: choosing.Wishes
) -> list[following.Chain]:
    """Return `chains`, of some their convolution alone: where that and the pass of Inductor's that
    follows it are expected to be faster than one operator."""
    asked: dict[following.Chain, list[Problem]] = {}
    for chain in chains:
        problem = _site(chain).problem if len(chain.nodes) > 1 else None
        if isinstance(problem, Problem):
            biased = replace(problem, activation="none", residual=False)
            asked[chain] = [problem, biased, replace(biased, bias=False)]
    problems = dict.fromkeys(problem for each in asked.values() for problem in each)
    choices = dict(zip(problems, choosing.weigh([*problems], device, wishes), strict=True))

    taken: set[fx.Node] = set()  # by one operator with more than a convolution in it

    def is_faster_alone(chain: following.Chain) -> bool:
        if chain not in asked:
            return False
        whole, biased, bare = (choices[problem] for problem in asked[chain])
        if not whole or not biased or not bare or not bare.pytorch_ms:
            return False
        p, follows = asked[chain][0], 0.0
        tensors = int(p.residual)
        if not _is_read_on_its_way(chain.last, taken):
            tensors, follows = tensors + 2, LAUNCH_MS
        follows += tensors * p.itemsize * p.output_elements / device.dram_bytes_per_s * 1e3
        by_pytorch = bare.pytorch_ms if library.fuses(p) else math.inf
        # Inductor adds the bias of PyTorch's convolution, as part of the pass.
        alone = min(_ours_ms(biased), bare.pytorch_ms) + follows
        return alone < min(_ours_ms(whole), by_pytorch)

    found = []
    for chain in reversed(chains):  # what reads a result comes before it
        norm = chain.norm
        if is_faster_alone(chain):
            if norm is not None:
                found.append(following.Chain(chain.nodes[1:3], norm))
            chain = following.Chain(chain.nodes[:1])
        elif chain.nodes[0] is not norm:
            taken.update(chain.nodes[1:])
        found.append(chain)
    return found[::-1]


def _ours_ms(choice: Choice) -> float:
    """Return the expected milliseconds of a confpred kernel, or of a plan that was chosen."""
    is_ours = choosing.why_pytorch(choice) is None
    return choice.predicted_ms if is_ours and choice.predicted_ms else math.inf


def _is_read_on_its_way(node: fx.Node, taken: Collection[fx.Node]) -> bool:
    """Return whether all that reads `node` is computed in passes of Inductor's, which compute what
    is before them as they read, and not `taken` by another operator."""

    def is_pass(reader: fx.Node) -> bool:
        tags = getattr(reader.target, "tags", ())
        return reader.target in _REDUCTIONS or torch.Tag.pointwise in tags

    readers = following.readers_of(node)
    return bool(readers) and all(is_pass(each) and each not in taken for each in readers)


def _site(chain: following.Chain) -> sites.Site:
    """Return what is known of `chain` before anything is chosen."""
    start, has_norm, has_residual = chain.nodes[0], chain.norm is not None, chain.sum is not None
    site = sites.Site(sites.name_of(start), "norm")
    if start.target is sites.CONVOLUTION:
        fields: Any = {"activation": chain.activation, "residual": has_residual}
        has_bias = has_norm or start.args[2] is not None
        site = sites.site_of(start, "fprop", bias=has_bias, **fields)
    activations = [chain.activation] * (chain.activation != "none")
    site.fused = (*["norm"] * has_norm, *["add"] * has_residual, *activations)
    return site


def _is_one_operator(chain: following.Chain, site: sites.Site) -> bool:
    """Return whether one operator, of confpred's or PyTorch's, computes the convolution with all
    that follows it. Such a one takes a folded filter; PyTorch's convolution and a pass over its
    output do not."""
    node, problem = chain.nodes[0], site.problem
    if site.is_ours or site.why == _UNFOLDED or node.target is not sites.CONVOLUTION:
        return site.is_ours
    if isinstance(problem, Problem):
        return library.fuses(problem)
    geometry = sites.geometry_of(node)
    if geometry is None or node.args[6] or chain.sum is not None:
        return False
    _, padding, _, groups = geometry
    return library.takes_pixels(val_of(node.args[0]), val_of(node.args[1]), padding, groups)


def _replace(
    chain: following.Chain, site: sites.Site, wishes: choosing.Wishes, has_pass: bool
) -> None:
    """Put one operator in place of `chain`, if that is fewer launches or a confpred kernel;
    `has_pass` says whether one pass of confpred's may compute what follows a convolution."""
    node, out, is_one = chain.nodes[0], val_of(chain.last), _is_one_operator(chain, site)
    if not is_one:
        if not has_pass:
            _spell_out(chain.norm)
        if not has_pass or len(chain.nodes) == 1:
            return  # Inductor's pass follows, or nothing
        if not isinstance(out, Tensor) or out.dtype not in DTYPES or not is_channels_last(out):
            return
    is_norm, scale = node.target is following.FIXED_NORM, None
    x, weight, bias = (node.args[0], None, None) if is_norm else node.args[:3]
    if chain.norm is not None and is_one:
        weight, bias = _fold(chain, bias, _uncast(weight))
    elif chain.norm is not None:
        scale, bias = _fold(chain, bias, None)
    if is_norm:
        given = (x, scale, bias, chain.residual, chain.activation)
        put_in_place(chain.last, confpred.scale_shift.default, given)
    else:
        call = sites.call_of(node, [site], wishes, activation=chain.activation)
        operands = (x, weight, scale, bias, chain.residual)
        put_in_place(chain.last, confpred.conv2d.default, (*operands, call))


def _spell_out(norm: Any) -> None:
    """Put a product and a sum with folded vectors in place of a norm, in float32. PyTorch's
    formula takes a root, and four vectors, for each element, and such a pass of Inductor's takes
    longer than its memory."""
    first = None if norm is None else following.first_result(norm)
    if first is None or val_of(first).dtype not in DTYPES:
        return
    graph, convert = norm.graph, torch.ops.prims.convert_element_type.default
    vectors = _fold(following.Chain((norm, first), norm), None, None)
    with graph.inserting_before(first):
        y = graph.call_function(convert, (norm.args[0], torch.float32))
        for target, vector in zip((aten.mul.Tensor, aten.add.Tensor), vectors, strict=True):
            sides = [1] * (val_of(first).dim() - 2)
            column = graph.call_function(aten.reshape.default, (vector, [1, -1, *sides]))
            y = graph.call_function(target, (y, column))
    put_in_place(first, convert, (y, val_of(first).dtype))


class Fold(NamedTuple):
    """A convolution and its norm that are to be folded: indices of the norm's weight (or None), of
    its variance and of the filter among a graph's inputs, the norm's epsilon, and whether the
    folded filter is one that float16 cannot hold."""

    places: tuple[int | None, ...]
    eps: float
    is_lossy: bool = False

    def looked_at(self, inputs: Sequence[Any]) -> Fold:
        """Return what holds with these `inputs` of the graph."""
        gamma, variance, filters = (None if i is None else inputs[i] for i in self.places)
        with _disable_current_modes(), torch.no_grad():
            is_lossy = folding.loses_precision(gamma, variance, filters, self.eps)
        return self._replace(is_lossy=is_lossy)


def _fold_of(
    chain: following.Chain, places: Mapping[Any, int], inputs: Sequence[Any]
) -> Fold | None:
    """Return the fold of a convolution and its norm in float16; None where there is none, or
    without values of its tensors, as where they are computed in the graph."""
    norm: Any = chain.norm
    start = chain.nodes[0]
    is_folded = norm is not None and start.target is sites.CONVOLUTION
    if not is_folded or val_of(chain.last).dtype is not torch.float16:
        return None
    nodes = (norm.args[1], norm.args[4], _uncast(start.args[1]))
    for node in nodes:
        t = inputs[places[node]] if node in places else None
        if node is not None and (type(t) not in _PLAIN or t.shape != val_of(node).shape):
            return None
    return Fold(tuple(places.get(node) for node in nodes), norm.args[6]).looked_at(inputs)


def _fold(chain: following.Chain, bias: Any, filters: Any) -> list[fx.Node]:
    """Return the nodes of filter and bias, or of scale and shift, that stand for the norm of
    `chain`; `bias` and `filters` are those of the convolution before it, or None."""
    norm: Any = chain.norm
    graph, dtype = norm.graph, DTYPES[val_of(chain.last).dtype]
    given = (*norm.args[1:5], bias, filters, norm.args[6], dtype)
    with graph.inserting_before(chain.last):
        node = graph.call_function(confpred.fold.default, tuple([each] for each in given))
    of_filters = None if filters is None else val_of(filters)
    node.meta["val"] = folding.empty(val_of(norm.args[3]), of_filters, dtype)
    return [result_of(node, place) for place in (0, 1)]


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
        graph.erase_node(node)
    graph.lint()


def _uncast(node: Any) -> Any:
    """Return the tensor that autocast has cast, as the fold reads every dtype."""
    if isinstance(node, fx.Node) and node.target is aten._to_copy.default:
        source: Any = node.args[0]
        if source.op == "placeholder" and val_of(source).dtype in DTYPES:
            return source
    return node
