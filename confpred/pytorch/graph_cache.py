"""PyTorch's cache of compiled graphs, which keeps those of this backend too.

AOTAutograd keeps a graph of Dynamo's with all that was compiled for it if the compilers return an
`OutputCode`. `CachedPass` is one: it names what Inductor compiled by the key in Inductor's own
cache, and holds what starts it. In the next process such a graph is neither traced nor rewritten.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch
from torch._functorch._aot_autograd.autograd_cache import (
    BypassAOTAutogradCache,
    should_use_local_autograd_cache,
)
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor.output_code import OutputCode

from confpred.cuda import driver
from confpred.families.registry import all_operations, is_extended, operation_named
from confpred.measure.pytorch import cudnn_version
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import CONVOLUTION
from confpred.pytorch.rewrite.fusing import Fold
from confpred.pytorch.run import choosing
from confpred.pytorch.run.graphs import read_switches

_SOURCES = Path(__file__).parents[1]
_compiling = threading.local()  # `owner`: whose graphs are being compiled


class Owner(Protocol):
    """The compiler of a graph."""

    def resume(self, lowered: Any, program: Any) -> Any: ...

    def is_still_right(self, fold: Fold) -> bool: ...


@dataclass
class CachedPass(OutputCode):
    """A pass that can be kept: how it is started (`confpred.pytorch.backend.Lowered`), the key,
    components and guards of its program in Inductor's cache, and what runs it in this process."""

    lowered: Any
    key: Any
    components: list[str]
    guards: str | None
    run: Any

    def __post_init__(self) -> None:
        self._boxed_call = True

    @classmethod
    def of(cls, lowered: Any, program: Any, run: Any) -> CachedPass:
        """Return a pass that was compiled now; without a program it is not kept."""
        key = getattr(program, "_fx_graph_cache_key", None)
        components = getattr(program, "_fx_graph_cache_debug_lines", None) or []
        return cls(lowered, key, components, getattr(program, "guards_expr", None), run)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.run(inputs)

    def prepare_for_serialization(self) -> None:
        if self.key is None:
            raise BypassAOTAutogradCache("Inductor has not kept a pass")
        self.run = None

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Inductor keeps its kernels in its own cache."""

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Start what was loaded.

        Raises:
            BypassAOTAutogradCache: it is not right for these inputs, or Inductor has lost the
                program. PyTorch compiles the graph then.
        """
        from torch._functorch._aot_autograd.aot_autograd_result import CompiledForward

        owner: Owner = _compiling.owner
        if not all(map(owner.is_still_right, self.lowered.folds)):
            raise BypassAOTAutogradCache("statistics of norms are others")
        kept = CompiledForward((self.key, self.components), self.guards)
        program = kept.post_compile(kept.load(example_inputs), graph_kwargs)
        self.run = owner.resume(self.lowered, program)


@contextmanager
def caching(owner: Owner, gm: fx.GraphModule, identity: str) -> Iterator[None]:
    """Let PyTorch keep the graphs that `owner` compiles for `gm` inside the block, under a key that
    has `identity` in it. The backward pass is compiled there too, as a graph is kept whole."""
    former = getattr(_compiling, "owner", None)
    # PyTorch's key covers attributes in their order, so it stays for another attempt.
    gm.confpred_identity = identity  # type: ignore[assignment]
    _compiling.owner = owner
    try:
        with functorch.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True):
            yield
    finally:
        _compiling.owner = former


def serializable(compile: Callable[..., Any]) -> Any:
    """Return `compile` as PyTorch knows compilers whose results can be kept."""
    return SerializableAOTDispatchCompiler(CachedPass, compile)


def identity_of(options: Any, inputs: Sequence[Any], is_training: bool) -> str | None:
    """Return what the rewriting of a graph depends on beside what PyTorch's key covers.

    None where that cannot be said, as with open sizes, several GPUs, choices by a service or by
    `verify`, families of a plug-in, damaged models, and kept answers that ranks have to agree
    about; and where a backward pass may never be asked for, as it is compiled with it.
    """
    try:
        return _identity_of(options, inputs, is_training)
    except Exception as error:  # no optimization may fail the program
        choosing.warn_of(error, "PyTorch's cache", "a graph is not kept")
        return None


def _identity_of(options: Any, inputs: Sequence[Any], is_training: bool) -> str | None:
    if not should_use_local_autograd_cache():
        return None
    with_gradients = torch.is_grad_enabled() and any(getattr(x, "requires_grad", 0) for x in inputs)
    if with_gradients and not is_training:
        return None
    sizes = [s for x in inputs if isinstance(x, Tensor) for s in (*x.shape, *x.stride())]
    is_open = not all(isinstance(x, Tensor) for x in inputs)
    is_open |= not all(type(size) is int for size in sizes)
    ordinals = _ordinals(inputs)
    if is_open or options.verify or options.freeze or len(ordinals) > 1:
        return None
    facts: list[Any] = [_sources(), options, cudnn_version(), read_switches()]
    for ordinal in ordinals:
        device = choosing.device_of(ordinal)
        if device is None:
            return None
        facts += [device, driver.describe(ordinal)]
        for operation in filter(choosing.is_known, all_operations()):
            predictor = choosing.current_predictor(operation)
            if type(predictor) is not Predictor or is_extended(operation):
                return None
            kept = choosing.kept_shards(device, operation_named(operation))
            is_known = operation != CONVOLUTION.name or device.key in predictor.models
            if choosing.ranks() > 1 and (kept or not is_known):
                return None
            facts += [operation, predictor.planned, predictor.limits, *kept]
            facts += [source.digest for source in predictor.models.values()]
    return repr(facts)


def _ordinals(inputs: Sequence[Any]) -> set[int]:
    """Return the CUDA devices of `inputs`."""
    return {x.device.index or 0 for x in inputs if isinstance(x, Tensor) and x.is_cuda}


@cache
def _sources() -> str:
    """Return a digest of the package's Python files and tables."""
    digest = hashlib.sha256()
    for path in sorted(p for kind in ("py", "csv") for p in _SOURCES.rglob(f"*.{kind}")):
        digest.update(path.relative_to(_SOURCES).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
