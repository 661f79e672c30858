"""Inductor for the other operations of a captured graph: what confpred serves stays as it is."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from confpred.pytorch.rewrite.passes import val_of
from confpred.pytorch.run.graphs import Run

log = logging.getLogger("confpred")


@cache
def is_available() -> bool:
    """Return whether Inductor can compile for CUDA here: with Triton, and a C compiler that Triton
    builds its launcher with. Where it cannot, a warning says what is missing, once."""
    from torch.utils._triton import has_triton

    compilers = filter(None, (os.environ.get("CC"), "gcc", "clang", "cc"))
    found = {"Triton": has_triton(), "a C compiler": any(map(shutil.which, compilers))}
    missing = " and ".join(name for name, is_there in found.items() if not is_there)
    if missing:
        log.warning(
            "Inductor does not compile what confpred leaves to PyTorch, as %s is missing: steps"
            " take longer; inductor=False says that this is meant", missing,
        )  # fmt: skip
    return not missing


def decomposed(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Return `gm` in the operators that Inductor lowers, with names of inputs as they are."""
    from torch._guards import detect_fake_mode
    from torch._inductor import config, lowering  # noqa: F401  decompositions look into it
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx import traceback
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils import _pytree

    def run(*flat: Any) -> Any:
        return fx.Interpreter(gm).run(*flat, enable_io_processing=False)

    mode: Any = detect_fake_mode(inputs)
    with config.patch(fallback_random=True), mode, traceback.preserve_node_meta():
        traced = make_fx(run, select_decomp_table())(*_pytree.tree_leaves(inputs))
    each = (g.graph.find_nodes(op="placeholder") for g in (gm, traced))
    for old, new in zip(*each, strict=True):
        new.target = old.target
        new._rename(old.name)
    traced.recompile()
    return traced


def compiled(
    gm: fx.GraphModule, inputs: Sequence[Any], static: Sequence[int], visible: int | None, kind: str
) -> tuple[Any, dict[int, tuple[int, ...]]]:
    """Return `gm` compiled by Inductor, and the strides of its inputs by their index, () where one
    depends on an open size; the arguments are those of `confpred.pytorch.run.graphs.Graphed`.

    PyTorch's operators draw random numbers, as a CUDA graph's replays know only these.
    """
    from torch._functorch import config as functorch
    from torch._inductor import compile_fx, config

    places = gm.graph.find_nodes(op="placeholder")
    examples = [*inputs, *map(val_of, places[len(inputs) :])]  # the kept ones of `passes.frozen`
    strides = {
        i: x.stride() if all(isinstance(s, int) for s in x.stride()) else ()
        for i, x in enumerate(examples) if isinstance(x, Tensor)
    }  # fmt: skip
    output = gm.graph.output_node()
    results: Any = output.args[0]
    seen = [i for i, result in enumerate(results) if isinstance(result, fx.Node)]
    output.meta["user_visible_output_idxs"] = [i for i in seen if visible is None or i < visible]
    # Inductor keeps its programs itself, under a key that `confpred.pytorch.graph_cache` takes.
    apart = (
        {"bundled_autograd_cache": False} if hasattr(functorch, "bundled_autograd_cache") else {}
    )
    with config.patch(fallback_random=True), functorch.patch(apart):
        compile_fx.record_original_output_strides(gm)
        program = compile_fx.compile_fx_inner(
            gm, examples, static_input_idxs=static, is_backward=kind == "backward",
            is_inference=kind == "inference",
        )  # fmt: skip
    return program, strides


def checked(program: Run, strides: Mapping[int, tuple[int, ...]], written: Sequence[int]) -> Run:
    """Return a function that runs what `compiled` has returned; it writes to inputs at `written`.

    Inductor's programs refuse inputs that lie in memory otherwise than at the capture, such as
    parameters that were brought into another layout, which no guard of PyTorch 2.11 sees. They do
    not read the bits of negative and conjugate views, either. Such inputs are copied. cuDNN is on,
    as at the capture: without it convolutions return another layout.
    """

    def call(given: list[Any]) -> Any:
        back = []
        for i, known in strides.items():
            x = given[i]
            wanted = known or x.stride()
            if x.stride() == wanted and not x.is_neg() and not x.is_conj():
                continue
            given[i] = torch.empty_strided(x.shape, wanted, dtype=x.dtype, device=x.device)
            given[i].copy_(x)
            if i in written:
                back.append((x, given[i]))
        is_on = torch.backends.cudnn.enabled
        torch._C._set_cudnn_enabled(True)
        try:
            found = program(given)
        finally:
            torch._C._set_cudnn_enabled(is_on)
        for x, copy in back:
            x.copy_(copy)
        return found

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
