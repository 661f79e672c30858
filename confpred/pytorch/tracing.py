"""What is decided while `torch.compile` traces a program: whether an operator of ours pays.

A program that Inductor has made calls PyTorch's convolution in C++, and its pointwise kernels take
what follows it; a layer of ours is launched from Python, which takes the host a little longer. The
host is often what a compiled program waits for, and whether it is, nobody knows while it is traced.
So a layer is judged by itself: it is ours where the GPU takes as long for PyTorch's operator as the
host takes for a layer, and ours saves more than it costs. A program that becomes a CUDA graph
(``mode="reduce-overhead"``) has no such cost. A library's plan has to be there, too: a program in
which PyTorch's operator is called by way of us is slower.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor

from confpred import __version__
from confpred.cudnn.graphs import front_end
from confpred.errors import MissingExtra
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.pytorch import choosing, inductor, loading, policy
from confpred.pytorch.gradients import Mask, Shape
from confpred.pytorch.layers import Geometry, problem_of
from confpred.pytorch.layouts import is_channels_last


@dataclass(frozen=True, slots=True)
class Host:
    """What a layer takes the host in a compiled program, in milliseconds.

    Attributes:
        layer: one of PyTorch's, with the pointwise kernel behind it.
        more: how much longer one of ours takes.
    """

    layer: float
    more: float


#: In compiled networks of 53 to 81 convolutions at batch 32, an H200's host took 34 to 36 us a
#: layer, and 0 to 10 us more for one of ours. In training, forward and backward pass together, it
#: is taken to be three times that.
INFERENCE, TRAINING, GRAPH = Host(0.03, 0.006), Host(0.09, 0.02), Host(0.0, 0.0)
_PLAIN = (Tensor, torch.nn.Parameter)
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
) -> bool:
    """Whether the operator of ours is to be called for tensors like these, of which `x` may be one
    of a trace; `mask` tells of which of `x`, `weight` and `bias` there will be gradients.

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
    asked = [p for p in problems if p is not None]
    if not _pay(ours, asked, ordinal, _host(mask)):
        return False
    # A library's plan may turn out not to be there, which takes long to find out.
    there = [c if c is None else loading.at_hand(c, ordinal) for c in ours]
    return _pay(there, asked, ordinal, _host(mask))


def _pay(
    choices: Sequence[Choice | None], problems: Sequence[Problem], ordinal: int, host: Host
) -> bool:
    """Whether `choices` for `problems`, of which one at least is there, are worth the host's time;
    they are where nothing is predicted, as for a pin."""
    if not any(choices):
        return False
    saved = policy.saves_ms(choices, ordinal)
    if saved == inf:
        return True
    theirs = sum(choosing.pytorch_ms(problem, ordinal) or 0.0 for problem in problems)
    return saved >= host.more and theirs >= host.layer


def _known(size: Any) -> int | None:
    return size if isinstance(size, int) else size.node.hint


def _host(mask: Mask) -> Host:
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None and config.triton.cudagraphs:
        return GRAPH
    return TRAINING if any(mask) else INFERENCE
