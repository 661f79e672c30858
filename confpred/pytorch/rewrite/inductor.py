"""Inductor for the other operators of a captured graph; confpred's operators stay as they are."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from confpred.pytorch.rewrite.passes import is_pointwise, val_of
from confpred.pytorch.run.memory import Run

aten = torch.ops.aten
log = logging.getLogger("confpred")


@cache
def is_available() -> bool:
    """Return whether Inductor can compile for CUDA here: with Triton, and a C compiler that Triton
    builds its launcher with. Where it cannot, a warning says what is missing, once."""
    from torch.utils._triton import has_triton

    compilers = filter(None, (os.environ.get("CC"), "gcc", "clang", "cc"))
    tools = {"Triton": has_triton(), "a C compiler": any(map(shutil.which, compilers))}
    missing = " and ".join(name for name, is_there in tools.items() if not is_there)
    if missing:
        log.warning(
            "Inductor does not compile PyTorch's operators, as %s is missing: steps take longer;"
            " inductor=False turns this warning off", missing,
        )  # fmt: skip
    return not missing


def start_workers() -> None:
    """Start the processes that compile Inductor's kernels, which takes seconds: without them this
    process compiles the first kernels, one after another."""
    from torch._inductor.async_compile import maybe_warm_pool

    with suppress(Exception):  # Inductor says itself what is wrong, where it compiles
        maybe_warm_pool()


def decompose(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Return `gm` decomposed into the operators that Inductor lowers; inputs keep their names."""
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
    placeholders = (g.graph.find_nodes(op="placeholder") for g in (gm, traced))
    for old, new in zip(*placeholders, strict=True):
        new.target = old.target
        new._rename(old.name)
    permute_before_pointwise(traced.graph)
    traced.recompile()
    return traced


def permute_before_pointwise(graph: fx.Graph) -> None:
    """Permute the operands of pointwise operators of lines in place, not their results, where that
    brings the axes into the order of memory. Inductor lays such a result out in the order of its
    shape, whatever its strides are, and a view of it, such as a factor of a product, is a copy
    then. Images and volumes that are channels last it knows itself."""
    for node in reversed(graph.find_nodes(op="call_function", target=aten.permute.default)):
        source: Any = node.args[0]
        operands, shape = source.all_input_nodes, val_of(source).shape
        if (
            not is_pointwise(source)
            or val_of(source).dim() != 3
            or len(source.users) != 1
            or val_of(source).is_contiguous()
            or not val_of(node).is_contiguous()
            or any(getattr(val_of(x), "shape", None) != shape for x in operands)
        ):
            continue
        for x in operands:
            with graph.inserting_before(source):
                permuted = graph.call_function(aten.permute.default, (x, node.args[1]))
            permuted.meta = x.meta | {"val": val_of(x).permute(node.args[1])}
            source.replace_input_with(x, permuted)
        source.meta["val"] = val_of(node)
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def compile_pass(
    gm: fx.GraphModule, inputs: Sequence[Any], static: Sequence[int], visible: int | None, kind: str
) -> tuple[Any, dict[int, tuple[int, ...]]]:
    """Return `gm` compiled by Inductor, and the strides of its inputs by their index, () where one
    depends on an open size; the arguments are those of `confpred.pytorch.run.graphs.Graphed`.

    Random numbers are drawn by PyTorch's operators, as replays of a CUDA graph advance only
    PyTorch's generator.
    """
    from torch._functorch import config as functorch
    from torch._inductor import compile_fx, config

    places = gm.graph.find_nodes(op="placeholder")
    examples = [*inputs, *map(val_of, places[len(inputs) :])]  # the kept ones of `passes.freeze`
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


def accept_any_layout(
    program: Run, strides: Mapping[int, tuple[int, ...]], written: Sequence[int]
) -> Run:
    """Return a function that runs a program of `compile_pass`, which writes to inputs at `written`.

    Inductor's code requires the strides of the capture, and plain tensors. Inputs with other
    strides, such as parameters in a new layout, which no guard of PyTorch 2.11 checks, are copied;
    so are negative and conjugate views. cuDNN is on, as at the capture: without it convolutions
    return another layout.
    """

    def call(arguments: list[Any]) -> Any:
        back = []
        for i, stride in strides.items():
            x = arguments[i]
            wanted = stride or x.stride()
            if x.stride() == wanted and not x.is_neg() and not x.is_conj():
                continue
            arguments[i] = torch.empty_strided(x.shape, wanted, dtype=x.dtype, device=x.device)
            arguments[i].copy_(x)
            if i in written:
                back.append((x, arguments[i]))
        is_on = torch.backends.cudnn.enabled
        torch._C._set_cudnn_enabled(True)
        try:
            outputs = program(arguments)
        finally:
            torch._C._set_cudnn_enabled(is_on)
        for x, copy in back:
            x.copy_(copy)
        return outputs

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
