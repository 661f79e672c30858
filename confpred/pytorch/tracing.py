"""What is decided while `torch.compile` traces a program: whether an operator of ours pays.

A program that Inductor has made calls PyTorch's convolution in C++, and its pointwise kernels take
what follows it; a layer of ours is launched from Python, which takes the host a little longer. The
host is often what a compiled program waits for; it is not where the GPU takes longer for a layer
than the host. Where that is so of a network's layers on average, each that saves more than it costs
is ours; else those that save much. Where the network is not known, each is judged by itself. What
is saved is counted against what the program would have: a convolution, and one kernel for all that
follows it, where eager mode has several. A program that becomes a CUDA graph
(``mode="reduce-overhead"``) has no such cost. A library's plan has to be there, too: a program in
which PyTorch's operator is called by way of us is slower.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from confpred import __version__
from confpred.cuda import driver
from confpred.cudnn.graphs import front_end
from confpred.errors import ConfpredError, MissingExtra
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.pytorch import choosing, inductor, loading, policy
from confpred.pytorch.gradients import Mask, Shape
from confpred.pytorch.host import COMPILED, COMPILED_NETWORK, COMPILED_TRAINING, GRAPH, Host
from confpred.pytorch.layers import Geometry, problem_of
from confpred.pytorch.layouts import is_channels_last

#: What a pointwise kernel of Inductor's is taken to reach of the device's bandwidth, and to cost
#: besides, milliseconds.
POINTWISE_SHARE, POINTWISE_MS = 0.75, 0.0025
_PLAIN = (Tensor, torch.nn.Parameter)
log = logging.getLogger(__name__)
_means: dict[tuple[tuple[Problem, ...], int], float | None] = {}
choosing.when_forgotten(_means.clear)
Function = TypeVar("Function", bound=Callable[..., Any])


def constant_while_compiling(function: Function) -> Function:
    """What ``torch.compiler.assume_constant_result`` does, to which this is equal, without
    importing the compiler, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_while_compiling
def dense_may_be_ours() -> bool:
    """Whether a dense layer of the program that is being traced may be anything but PyTorch's own
    operator. A program where none may be is traced as it is without us."""
    return torch.cuda.is_available() and choosing.serves_dense(torch.cuda.current_device())


@constant_while_compiling
def decision_key(index: int | None) -> str:
    """All that decides which layers of a traced program on CUDA device `index` are ours, as a text.

    PyTorch keeps on disk what it makes of a program, and takes it where the same one is traced
    again: before anybody is asked whether an operator pays. So the text is an argument of the
    operators that are asked, and a program that another version, model or setting would make
    otherwise is another program.
    """
    ordinal = torch.cuda.current_device() if index is None else index
    switches = policy.is_verifying(), policy.is_deterministic()
    facts = __version__, choosing.decided_by(ordinal), switches, _cudnn()
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _cudnn() -> tuple[object, ...]:
    """Which cuDNN plans are built by, if there is one."""
    try:
        library = front_end()
    except MissingExtra:
        return ()
    return library.__version__, library.backend_version()


def pays(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    activation: str,
    mask: Mask,
    layer_ms: float | None = None,
) -> bool:
    """Whether the operator of ours is to be called for tensors like these, of which `x` may be one
    of a trace; `mask` tells of which of `x`, `weight` and `bias` there will be gradients, and
    `layer_ms` what `mean_layer_ms` says of the network.

    A size that is not known stands for the one that the program is traced with.
    """
    if type(x) in _PLAIN:
        return True  # no trace
    inductor.teach()
    if not x.is_cuda or not is_channels_last(x):
        return False
    hints = [_known(size) for size in x.shape]
    sizes = tuple(size for size in hints if size is not None)
    if policy.is_verifying() or len(sizes) < len(hints):
        # It is measured, or told by the sizes, at run time. But most dense layers are left to
        # PyTorch, to which a program's own call is cheaper than one by way of us.
        if geometry[3] > 1:
            return True
        if len(sizes) < len(hints):
            return False
    filters = tuple(map(int, weight.shape))
    ordinal = torch.cuda.current_device() if x.device.index is None else x.device.index
    epilogue = {"activation": activation, "residual": residual is not None}
    shape = Shape(sizes, filters, bias is not None, x.dtype, ordinal, geometry)
    problems = [
        problem_of("fprop", sizes, filters, x.dtype, geometry, bias=bias is not None, **epilogue),
        shape.problem("x") if mask[0] else None,
        shape.problem("weight", policy.is_deterministic()) if mask[1] else None,
    ]
    found = [None if p is None else choosing.choose(p, ordinal) for p in problems]
    ours = [c if c is not None and choosing.is_ours(c) else None for c in found]
    if not any(ours):  # as on a device that nothing is known of
        return False
    if layer_ms is None:
        layer_ms = sum(compiled_ms(p, ordinal) or 0.0 for p in problems if p is not None)
        least = _host(mask, COMPILED).least(layer_ms)
    else:
        least = _host(mask, COMPILED_NETWORK).least(layer_ms)
    if not _save(ours, ordinal, least):
        return False
    # A library's plan may turn out not to be there, which takes long to find out.
    there = [c if c is None else loading.at_hand(c, ordinal) for c in ours]
    return _save(there, ordinal, least)


def _save(choices: Sequence[Choice | None], ordinal: int, least: float) -> bool:
    """Whether `choices`, of which one at least is there, save `least` milliseconds."""
    return any(choices) and policy.saves_ms(choices, ordinal, compiled_ms) >= least


def compiled_ms(problem: Problem, ordinal: int) -> float | None:
    """Milliseconds that a program without us is expected to take for `problem` on CUDA device
    `ordinal`. PyTorch's operator was measured as eager mode runs it, with a kernel each for bias,
    sum and activation; Inductor makes one kernel of them. A bias alone, or a norm, is taken to
    share one with what comes later."""
    if problem.direction != "fprop" or not (problem.bias or problem.has_epilogue):
        return choosing.pytorch_ms(problem, ordinal)
    bare = replace(problem, bias=False, residual=False, activation="none")
    alone_ms = choosing.pytorch_ms(bare, ordinal)
    if alone_ms is None or not problem.has_epilogue:
        return alone_ms
    moved = problem.itemsize * problem.output_elements * (3 if problem.residual else 2)
    bandwidth = driver.device_of(ordinal).dram_bytes_per_s
    return alone_ms + POINTWISE_MS + 1e3 * moved / (POINTWISE_SHARE * bandwidth)


def mean_layer_ms(problems: Sequence[Problem]) -> float | None:
    """What a program without us is expected to take for one of `problems` on the current CUDA
    device, on average; None where nothing tells. It is remembered, as each part of a network that
    is traced by itself asks."""
    if not problems or not torch.cuda.is_available():
        return None
    asked = tuple(problems), torch.cuda.current_device()
    if asked not in _means:
        _means[asked] = _mean_ms(*asked)
    return _means[asked]


def _mean_ms(problems: Sequence[Problem], ordinal: int) -> float | None:
    try:
        times = {p: compiled_ms(p, ordinal) for p in dict.fromkeys(problems)}
    except ConfpredError as error:  # such as an unknown device
        log.debug("the layers of a network are judged one by one: %s", error)
        return None
    known = [ms for p in problems if (ms := times[p]) is not None]
    return sum(known) / len(known) if known else None


def _known(size: Any) -> int | None:
    return size if isinstance(size, int) else size.node.hint


def _host(mask: Mask, inference: Host) -> Host:
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None and config.triton.cudagraphs:
        return GRAPH
    return COMPILED_TRAINING if any(mask) else inference
