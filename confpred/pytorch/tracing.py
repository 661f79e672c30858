"""What is decided while `torch.compile` traces a program: whether an operator of ours pays.

A program that Inductor has made calls PyTorch's convolution in C++, and its pointwise kernels take
what follows it; a layer of ours is launched from Python. Where it saves the GPU less than that
takes the host, the program keeps PyTorch's own, for the host is often what a compiled program waits
for. A program that becomes a CUDA graph (``mode="reduce-overhead"``) has no such cost. A library's
plan has to be there, too: a program in which PyTorch's operator is called by way of us is slower.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from confpred import __version__
from confpred.cudnn.graphs import front_end
from confpred.errors import MissingExtra
from confpred.predict.choice import Choice
from confpred.pytorch import choosing, inductor, loading, policy
from confpred.pytorch.gradients import Mask, Shape
from confpred.pytorch.layers import Geometry, problem_of
from confpred.pytorch.layouts import is_channels_last

#: What a layer of ours may cost the host more than PyTorch's own: without gradients, and in the
#: forward and backward pass together. Alone and warm it is 4 to 7 us; inside compiled networks that
#: waited for an H200's host, steps were longer by 30 to 100 us for each layer of ours.
HOST_MS, HOST_TRAINING_MS = 0.04, 0.08
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
    least = _host_ms(mask)
    # A library's plan may turn out not to be there, which takes long to find out.
    return _saves(ours, ordinal, least) and _saves(
        [c if c is None else loading.at_hand(c, ordinal) for c in ours], ordinal, least
    )


def _saves(choices: Sequence[Choice | None], ordinal: int, least: float) -> bool:
    """Whether `choices`, of which one at least is there, save `least` milliseconds."""
    return any(choices) and policy.saves_ms(choices, ordinal) >= least


def _known(size: Any) -> int | None:
    return size if isinstance(size, int) else size.node.hint


def _host_ms(mask: Mask) -> float:
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None and config.triton.cudagraphs:
        return 0.0
    return HOST_TRAINING_MS if any(mask) else HOST_MS
