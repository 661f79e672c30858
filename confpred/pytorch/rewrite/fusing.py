"""Inference: each convolution or batch norm with its epilogue becomes one operator.

    convolution -> [batch norm] -> [+ residual] -> [activation]
    batch norm -> [+ residual] -> [activation]

Training: a convolution, and both halves of its backward, become operators of a joint graph of
forward and backward.

All convolutions of a graph are chosen for in one call; causal ones in a call before it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from confpred.predict.choice import Choice
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device
from confpred.pytorch.rewrite import causal, following, sites
from confpred.pytorch.rewrite.matches import (
    LAUNCH_MS,
    Match,
    choose_and_replace,
    insert,
    insert_affine,
)  # fmt: skip
from confpred.pytorch.rewrite.passes import is_pointwise, put_in_place, result_of, val_of
from confpred.pytorch.run import choosing, library, operators  # noqa: F401  graphs call the operators
from confpred.pytorch.run import fold as folding
from confpred.pytorch.run.convolve import is_deterministic, sums_bias
from confpred.pytorch.run.loading import DTYPES, is_channels_last

aten = torch.ops.aten
confpred = torch.ops.confpred
_UNFOLDED = "folded filter beyond float16"
_PLAIN = (Tensor, torch.nn.Parameter)  # no fake tensor, and no other subclass
_REDUCTIONS = (aten.mean.dim, aten.sum.dim_IntList, aten.var_mean.correction, aten.amax.default)
_PATTERNS = (following.take_norm, following.take_sum, following.take_activation)


def fuse(
    graph: fx.Graph, choose: choosing.Choose, constraints: choosing.Constraints,
    inputs: Sequence[Any], folds: list[Fold], device: Device | None = None,
) -> list[sites.Site]:  # fmt: skip
    """Rewrite a graph of inference in place, and return its convolutions and norms in order, causal
    convolutions first.

    Args:
        graph: the graph to rewrite.
        choose: chooses for the sizes of the capture.
        constraints: bound its choices, and those that are made later for other sizes.
        inputs: values of the graph's inputs; empty if they are unknown.
        folds: gets the `Fold` of each norm in float16 whose values are known.
        device: the device for which Inductor compiles the other operators; None without Inductor.
    """
    layers = causal.lower_convolutions(graph, choose, constraints, fuses=True)
    placeholders = graph.find_nodes(op="placeholder")
    has_values = len(inputs) == len(placeholders)
    places = {node: place for place, node in enumerate(placeholders) if has_values}
    chains = _chains(graph)
    if device is not None:
        chains = _shorten_chains(chains, device, constraints)
    matches = []
    for chain in chains:
        site, fold = _site(chain), _fold_of(chain, places, inputs)
        if fold is not None:
            folds.append(fold)
            if fold.is_lossy:
                site.problem, site.why = None, _UNFOLDED
        put = partial(_replace, chain, site, constraints, device is None)
        x: Any = chain.nodes[0].args[0]
        reads_writes = ([x], [chain.last]) if site.by_layout else ()
        matches.append(Match([site], put, *reads_writes))
    layers += choose_and_replace(graph, matches, choose)
    _join_folds(graph)
    return layers


def _chains(graph: fx.Graph) -> list[following.Chain]:
    """Return the chains of nodes to fuse, in the order of the graph."""
    claimed: set[fx.Node] = set()
    chains: dict[fx.Node, following.Chain] = {}
    convolutions = graph.find_nodes(op="call_function", target=sites.CONVOLUTION)
    norms = graph.find_nodes(op="call_function", target=following.FIXED_NORM)
    # The later convolution of two that are summed takes the sum: the other's result is there by
    # then.
    # A norm starts a chain only where no convolution has claimed it.
    for node in [*reversed(convolutions), *norms]:
        if node in claimed or not sites.is_image(node.args[0]):
            continue
        norm = node if node.target is following.FIXED_NORM else None
        first = None if norm is None else following.first_result(norm)
        chain = following.Chain((node,) if first is None else (node, first), norm)
        # Nothing is fused behind a transposed convolution, as its problem, the gradient of an
        # image, has no epilogue.
        fuses = norm or (sites.geometry_of(node) and not sites.arguments_of(node).transposed)
        chains[node] = following.follow(chain, _PATTERNS if fuses else (), claimed)
        claimed.update(chains[node].nodes)
    return [chains[node] for node in graph.nodes if node in chains]


def _shorten_chains(
    chains: Sequence[following.Chain], device: Device, constraints: choosing.Constraints
) -> list[following.Chain]:
    """Return `chains`, each cut to its convolution where that, and Inductor's pass behind it, are
    expected to be faster than one operator."""
    asked: dict[following.Chain, list[Problem]] = {}
    for chain in chains:
        problem = _site(chain).problem if len(chain.nodes) > 1 else None
        if isinstance(problem, Problem):
            biased = replace(problem, activation="none", residual=False)
            asked[chain] = [problem, biased, replace(biased, bias=False)]
    problems = dict.fromkeys(problem for group in asked.values() for problem in group)
    choices = dict(zip(problems, choosing.preview([*problems], device, constraints), strict=True))

    taken: set[fx.Node] = set()  # by one operator with more than a convolution in it

    def is_faster_alone(chain: following.Chain) -> bool:
        if chain not in asked:
            return False
        whole, biased, bare = (choices[problem] for problem in asked[chain])
        if not whole or not biased or not bare or not bare.pytorch_ms:
            return False
        p, pass_ms = asked[chain][0], 0.0
        tensors = int(p.residual)  # that Inductor reads or writes for the epilogue
        if not _is_fused_by_readers(chain.last, taken):  # a pass of its own, over input and output
            tensors, pass_ms = tensors + 2, LAUNCH_MS
        pass_ms += tensors * p.itemsize * p.output_elements / device.dram_bytes_per_s * 1e3
        by_pytorch = bare.pytorch_ms if library.is_one_operator(p) else math.inf
        # Inductor adds the bias of PyTorch's convolution, as part of the pass.
        alone = min(_kernel_ms(biased), bare.pytorch_ms) + pass_ms
        return alone < min(_kernel_ms(whole), by_pytorch)

    shortened = []
    for chain in reversed(chains):  # readers of a result first
        norm = chain.norm
        if is_faster_alone(chain):
            if norm is not None:  # stays a chain: the norm and the node of its result
                shortened.append(following.Chain(chain.nodes[1:3], norm))
            chain = following.Chain(chain.nodes[:1])
        elif chain.nodes[0] is not norm:
            taken.update(chain.nodes[1:])
        shortened.append(chain)
    return shortened[::-1]


def _kernel_ms(choice: Choice) -> float:
    """Return the expected milliseconds of a confpred kernel or a chosen library plan; infinite if
    PyTorch's operator runs."""
    replaces = choosing.why_pytorch(choice) is None
    return choice.predicted_ms if replaces and choice.predicted_ms else math.inf


def _is_fused_by_readers(node: fx.Node, taken: Collection[fx.Node]) -> bool:
    """Return whether Inductor computes all readers of `node` in passes that can compute `node` too,
    as none of them is `taken` by another operator."""
    readers = following.readers_of(node)
    return bool(readers) and all(
        (reader.target in _REDUCTIONS or is_pointwise(reader)) and reader not in taken
        for reader in readers
    )


def _site(chain: following.Chain) -> sites.Site:
    """Return the site of `chain`, before a choice."""
    start, has_norm, has_residual = chain.nodes[0], chain.norm is not None, chain.sum is not None
    site = sites.Site(sites.name_of(start), "norm")
    if start.target is sites.CONVOLUTION:
        fields: Any = {"activation": chain.activation, "residual": has_residual}
        has_bias = has_norm or sites.arguments_of(start).bias is not None
        site = sites.site_of(start, "fprop", bias=has_bias, **fields)
    activations = [chain.activation] * (chain.activation != "none")
    site.fused = (*["norm"] * has_norm, *["add"] * has_residual, *activations)
    return site


def _is_one_operator(chain: following.Chain, site: sites.Site) -> bool:
    """Return whether one operator, confpred's or PyTorch's, computes the convolution and its
    epilogue. Such an operator takes a folded filter; a convolution and a pass behind it do not."""
    node, problem = chain.nodes[0], site.problem
    if site.is_lowered or site.why == _UNFOLDED or node.target is not sites.CONVOLUTION:
        return site.is_lowered
    if isinstance(problem, Problem):
        return library.is_one_operator(problem)
    geometry = sites.geometry_of(node)
    if geometry is None or sites.arguments_of(node).transposed or chain.sum is not None:
        return False
    _, padding, _, groups = geometry
    return library.takes_pixels(val_of(node.args[0]), val_of(node.args[1]), padding, groups)


def _replace(
    chain: following.Chain, site: sites.Site, constraints: choosing.Constraints, has_pass: bool
) -> None:
    """Replace `chain` by one operator, if that saves launches or runs a confpred kernel.
    `has_pass`: whether confpred's pass may compute the epilogue of PyTorch's convolution."""
    node, out, is_one = chain.nodes[0], val_of(chain.last), _is_one_operator(chain, site)
    if not is_one:
        if not has_pass:
            _spell_out(chain.norm)
        is_read = isinstance(out, Tensor) and out.dtype in DTYPES and is_channels_last(out)
        if not has_pass or len(chain.nodes) == 1 or not is_read:
            if site.is_image:
                _convolve_image(node, site, constraints, compiled=not has_pass)
            return  # Inductor's pass follows, or nothing
    is_norm, scale = node.target is following.FIXED_NORM, None
    x, weight, bias = (node.args[0], None, None) if is_norm else node.args[:3]
    if chain.norm is not None and is_one:
        weight, bias = _fold(chain, bias, _uncast(weight))
    elif chain.norm is not None:
        scale, bias = _fold(chain, bias, None)
    if is_norm:
        arguments = (x, scale, bias, chain.residual, chain.activation)
        put_in_place(chain.last, confpred.scale_shift.default, arguments)
    else:
        call = sites.call_of(node, [site], constraints, activation=chain.activation)
        operands = (x, weight, scale, bias, chain.residual)
        put_in_place(chain.last, confpred.conv2d.default, (*operands, call))


def _spell_out(norm: Any) -> None:
    """Replace a norm by a product and a sum with folded vectors, in float32. PyTorch's formula
    takes a root, and reads four vectors, for each element: Inductor's pass would be compute-bound.
    """
    first = None if norm is None else following.first_result(norm)
    if first is None or val_of(first).dtype not in DTYPES:
        return
    graph, convert = norm.graph, torch.ops.prims.convert_element_type.default
    scale, shift = _fold(following.Chain((norm, first), norm), None, None)
    with graph.inserting_before(first):
        y = insert_affine(norm.args[0], scale, shift, norm.meta)
    put_in_place(first, convert, (y, val_of(first).dtype))


class Fold(NamedTuple):
    """A convolution and its norm to fold in float16.

    Attributes:
        places: indices of the norm's weight, its variance and the filter among the graph's inputs;
            None for no weight.
        eps: of the norm.
        is_lossy: whether float16 cannot hold the folded filter.
    """

    places: tuple[int | None, ...]
    eps: float
    is_lossy: bool = False

    def check(self, inputs: Sequence[Any]) -> Fold:
        """Return this fold with `is_lossy` of these `inputs` of the graph."""
        gamma, *others = (None if i is None else inputs[i] for i in self.places)
        variance, filters = cast(list[Tensor], others)
        with _disable_current_modes(), torch.no_grad():
            is_lossy = folding.loses_precision(gamma, variance, filters, self.eps)
        return self._replace(is_lossy=is_lossy)


def _fold_of(
    chain: following.Chain, places: Mapping[Any, int], inputs: Sequence[Any]
) -> Fold | None:
    """Return the fold of a convolution and its norm in float16; None for other chains, and where
    values of its tensors are unknown, such as of a filter that the graph computes."""
    norm: Any = chain.norm
    start = chain.nodes[0]
    is_folded = norm is not None and start.target is sites.CONVOLUTION
    if not is_folded or val_of(chain.last).dtype is not torch.float16:
        return None
    _, gamma, _, _, variance, _, eps = norm.args
    nodes = (gamma, variance, _uncast(sites.arguments_of(start).filters))
    for node in nodes:
        t: Any = inputs[places[node]] if node in places else None
        if node is not None and (type(t) not in _PLAIN or t.shape != val_of(node).shape):
            return None
    return Fold(tuple(places.get(node) for node in nodes), eps).check(inputs)


def _fold(chain: following.Chain, bias: Any, filters: Any) -> list[fx.Node]:
    """Return the nodes of the folded filter and bias that replace the norm of `chain`; those of a
    scale and a shift if `filters` is None. `bias` and `filters` are those of the convolution before
    the norm, or None."""
    norm: Any = chain.norm
    graph, dtype = norm.graph, DTYPES[val_of(chain.last).dtype]
    _, *vectors, _, eps = norm.args  # weight, bias, mean and variance
    arguments = (*vectors, bias, filters, eps, dtype)
    with graph.inserting_before(chain.last):  # the operator takes lists, here of one norm
        node = graph.call_function(confpred.fold.default, tuple([value] for value in arguments))
    of_filters = None if filters is None else val_of(filters)
    node.meta["val"] = folding.empty(val_of(vectors[2]), of_filters, dtype)
    return [result_of(node, place) for place in (0, 1)]


def _join_folds(graph: fx.Graph) -> None:
    """Fold all norms whose tensors are inputs of the graph in one launch, by joining the eight
    lists of their operators; each norm has two results."""
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
    """Return the source of a cast by autocast, as the fold reads every dtype; else `node`."""
    if isinstance(node, fx.Node) and node.target is aten._to_copy.default:
        source: Any = node.args[0]
        if source.op == "placeholder" and val_of(source).dtype in DTYPES:
            return source
    return node


def lower_convolutions(
    graph: fx.Graph, choose: choosing.Choose, constraints: choosing.Constraints,
    compiled: bool = False,
) -> list[sites.Site]:  # fmt: skip
    """Replace convolutions of a graph, and halves of their backward, by confpred's operators
    where these are chosen, and return all sites. `constraints` are for tensors of other
    sizes; `compiled`: whether Inductor compiles the other operators."""
    layers = causal.lower_convolutions(graph, choose, constraints, fuses=False)
    matches = []
    for node in graph.nodes:
        if node.target not in (sites.CONVOLUTION, sites.CONVOLUTION_BACKWARD):
            continue
        arguments = sites.arguments_of(node)
        if not sites.is_image(image := arguments.image):
            continue
        if node.target is sites.CONVOLUTION:
            own = [sites.site_of(node, "fprop", bias=arguments.bias is not None)]
        else:
            mask = arguments.mask
            sums = mask[2] and isinstance(arguments.groups, int) and sums_bias(arguments.groups)
            fields: Any = {"bias": sums, "deterministic": is_deterministic()}
            own = [sites.site_of(node, "dgrad")] * mask[0]
            own += [sites.site_of(node, "wgrad", **fields)] * mask[1]
        put = partial(_replace_convolution, node, own, constraints, compiled)
        ends: Any = ()
        if any(site.by_layout for site in own):
            ends = ([image], [node])
            if node.target is sites.CONVOLUTION_BACKWARD:
                ends = ([node.args[0], image], [item for item in node.users if item.args[1] == 0])
        matches.append(Match(own, put, *ends))
    return layers + choose_and_replace(graph, matches, choose)


def _replace_convolution(
    node: fx.Node, own: list[sites.Site], constraints: choosing.Constraints, compiled: bool
) -> None:
    if not any(site.is_lowered or site.is_image for site in own):
        return
    if own[0].is_image and node.target is sites.CONVOLUTION:
        _convolve_image(node, own[0], constraints, compiled)
        return
    if compiled and node.target is sites.CONVOLUTION_BACKWARD:
        _sum_apart(node, own)
    call = sites.call_of(node, own, constraints)
    if node.target is sites.CONVOLUTION:
        x, weight, bias = node.args[:3]
        put_in_place(node, confpred.conv2d.default, (x, weight, None, bias, None, call))
    else:
        put_in_place(node, confpred.conv2d_backward.default, (*node.args[:3], call))


def _convolve_image(
    node: fx.Node, site: sites.Site, constraints: choosing.Constraints, compiled: bool
) -> None:
    """Replace a convolution of PyTorch's of a line by confpred's operator, which runs it as one of
    images; the bias is added behind it where `compiled`, as Inductor fuses that."""
    x, weight, bias = node.args[:3]
    problem: Any = replace(site.problem, activation="none", residual=False)  # type: ignore[type-var]
    apart = compiled and bias is not None and not library.is_one_operator(problem)
    problem = replace(problem, bias=bias is not None and not apart)
    site.problem = problem.as_conv2d() or problem if isinstance(problem, ConvNd) else problem
    call = sites.call_of(node, [site], constraints)
    operands = (x, weight, None, None if apart else bias, None, call)
    if not apart:
        put_in_place(node, confpred.conv2d.default, operands)
        return
    with node.graph.inserting_before(node):
        image = node.graph.call_function(confpred.conv2d.default, operands)
        image.meta = dict(node.meta)  # with the strides of the capture
        column = insert(node.graph, aten.unsqueeze.default, (bias, 1), node.meta)
    put_in_place(node, aten.add.Tensor, (image, column))


def _sum_apart(node: fx.Node, own: list[sites.Site]) -> None:
    """Compute the gradient of the bias by a separate sum, where no kernel computes it with the
    filter's: the sum inside PyTorch's operator is several times as slow as Inductor's."""
    mask: Any = node.args[10]
    summing = [s for s in own if sites.is_convolution(s.problem) and s.problem.bias]
    if not mask[2] or any(site.is_lowered for site in summing):
        return
    node.args = (*node.args[:10], [*mask[:2], False])
    for site in summing:
        site.problem = replace(site.problem, bias=False)  # type: ignore[type-var]
    for item in [item for item in node.users if item.args[1] == 2]:
        axes = [0, *range(2, val_of(node.args[0]).dim())]
        put_in_place(item, aten.sum.dim_IntList, (node.args[0], axes))
