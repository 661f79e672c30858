"""Compare ways in which PyTorch computes a dense convolution with what follows it in inference.

    python -m benchmarks.kernels.pytorch_epilogues [--networks resnet50,mnasnet_100]
        [--batches 16,128]

The layers are those of networks where PyTorch's convolution was chosen, in float16, channels last,
with bias, residual and activation as `confpred.optimize` fuses them. Ways:

    epilogue   PyTorch's convolution, then one kernel of confpred's for all that follows
    cudnn      ``cudnn_convolution_relu`` or ``cudnn_convolution_add_relu``
    pixel      the product in place of a convolution of one pixel an image
    gemm       ``addmm`` or ``_addmm_activation`` of a 1 x 1 filter, with bias and ReLU inside

Times are of a CUDA graph of several calls, interleaved in rounds; the median. ``again`` is
``epilogue`` once more: the noise. Outputs are compared with float32. cuDNN's benchmark mode is on
unless ``--heuristic`` is given.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.provenance import RESULTS, provenance, write
from confpred.problem.activation import activated
from confpred.problem.conv2d import ACTIVATIONS, Problem

NETWORKS = (
    "resnet18", "resnet50", "mnasnet_100", "rexnet_150", "densenet121", "seresnext26t_32x4d",
    "xception41", "ghostnet_100", "efficientnet_b0", "regnety_040",
)  # fmt: skip
CALLS, ROUNDS = 8, 7
aten = torch.ops.aten


def problems_of(network: str, batch: int) -> Counter[Problem]:
    """Return the layers of a network that PyTorch computes, and how many there are of each."""
    import timm

    from confpred.problem.device import get_device
    from confpred.pytorch.explain import capture

    model = timm.create_model(network).eval().to(memory_format=torch.channels_last)
    images = torch.empty(batch, 3, 224, 224).to(memory_format=torch.channels_last)
    found: Counter[Problem] = Counter()
    for site in capture(model, images, get_device("h100"), dtype=torch.float16).sites:
        if site.problem is not None:
            if not site.is_lowered and site.problem.groups == 1:
                found[site.problem] += 1
        elif str(site.why).startswith("one pixel"):
            layer: Any = model.get_submodule(site.name)
            activation = next((name for name in site.fused if name in ACTIVATIONS), "none")
            sizes = (batch, layer.in_channels, 1, 1, layer.out_channels, 1, 1)
            found[Problem(*sizes, bias=True, activation=activation)] += 1
    return found


def operands(p: Problem) -> dict[str, Tensor | None]:
    """Return random tensors of a problem."""
    generator = torch.Generator("cuda").manual_seed(0)

    def some(*shape: int) -> Tensor:
        t = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float16)
        return t.to(memory_format=torch.channels_last) if len(shape) == 4 else t

    return {
        "x": some(p.n, p.c, p.h, p.w),
        "weight": some(p.k, p.c, p.r, p.s) * (p.c * p.r * p.s) ** -0.5,
        "bias": some(p.k) if p.bias else None,
        "residual": some(p.n, p.k, p.p, p.q) if p.residual else None,
    }


def ways_of(p: Problem, given: dict[str, Any]) -> dict[str, Callable[[], Tensor]]:
    """Return the ways that can compute a problem."""
    from confpred.problem.activation import activated
    from confpred.pytorch.run.library import multiply_pixels
    from confpred.pytorch.run.pointwise import apply_epilogue

    x, weight, bias, residual = given.values()
    geometry = (p.stride, p.padding, p.dilation)
    if p.h == p.w == 1:

        def plain() -> Tensor:
            out = torch.convolution(x, weight, bias, *geometry, False, (0, 0), 1)
            return activated(p.activation, out)

        return {
            "epilogue": plain,
            "again": plain,
            "pixel": lambda: multiply_pixels(x, weight, bias, p.activation),
        }

    def epilogue() -> Tensor:
        out = torch.convolution(x, weight, None, *geometry, False, (0, 0), 1)
        return apply_epilogue(out, bias, residual, p.activation)

    ways: dict[str, Callable[[], Tensor]] = {"epilogue": epilogue, "again": epilogue}
    if p.activation == "relu" and residual is None:
        ways["cudnn"] = lambda: torch.cudnn_convolution_relu(x, weight, bias, *geometry, 1)
    elif p.activation == "relu":
        ways["cudnn"] = lambda: torch.cudnn_convolution_add_relu(
            x, weight, residual, 1.0, bias, *geometry, 1
        )
    if (p.r, p.s, p.stride, p.padding) == (1, 1, (1, 1), (0, 0)) and bias is not None:
        rows, columns = x.permute(0, 2, 3, 1).reshape(-1, p.c), weight.view(p.k, p.c).t()
        shape = (p.n, p.h, p.w, p.k)
        if residual is None and p.activation in ("relu", "none"):
            call = aten._addmm_activation if p.activation == "relu" else aten.addmm
            ways["gemm"] = lambda: call(bias, rows, columns).view(shape).permute(0, 3, 1, 2)
        else:
            ways["gemm"] = lambda: apply_epilogue(
                torch.mm(rows, columns).view(shape).permute(0, 3, 1, 2), bias, residual,
                p.activation,
            )  # fmt: skip
    return ways


def exact(p: Problem, given: dict[str, Any]) -> Tensor:
    """Return the result in float32."""
    x, weight, bias, residual = (None if t is None else t.float() for t in given.values())
    with torch.backends.cudnn.flags(allow_tf32=False):
        out = torch.conv2d(x, weight, bias, p.stride, p.padding, p.dilation)
    out = out if residual is None else out + residual
    return activated(p.activation, out)


def graph_of(call: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def measured(p: Problem) -> dict[str, Any]:
    """Return the microseconds of each way, its first call's seconds, and what it is off by."""
    given = operands(p)
    right = exact(p, given)
    row: dict[str, Any] = {"problem": p.to_json(), "us": {}, "first_s": {}, "off": {}}
    graphs = {}
    for name, call in ways_of(p, given).items():
        start = time.perf_counter()
        try:
            out = call()
            torch.cuda.synchronize()
        except RuntimeError as error:
            row.setdefault("errors", {})[name] = str(error).splitlines()[0][:200]
            continue
        row["first_s"][name] = round(time.perf_counter() - start, 4)
        row["off"][name] = float((out.float() - right).norm() / right.norm())
        graphs[name] = graph_of(call)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS + 1):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(1e3 * begin.elapsed_time(end) / CALLS)
    row["us"] = {name: round(statistics.median(t), 2) for name, t in times.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--batches", default="16,128")
    parser.add_argument("--heuristic", action="store_true", help="without cuDNN's benchmark mode")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--budget", type=float, default=86400, help="seconds")
    told = parser.parse_args()
    torch.backends.cudnn.benchmark = not told.heuristic
    begun = time.time()
    rows: dict[Problem, dict[str, Any]] = {}
    for batch in map(int, told.batches.split(",")):
        for network in told.networks.split(","):
            sums: Counter[str] = Counter()
            for problem, count in problems_of(network, batch).items():
                if problem not in rows and time.time() - begun < told.budget:
                    rows[problem] = measured(problem) | {"of": {}}
                if problem not in rows:
                    continue
                row = rows[problem]
                row["of"][f"{network}, {batch}"] = count
                us = row["us"]
                for name in ("epilogue", "again", "cudnn", "gemm", "pixel"):
                    sums[name] += count * us.get(name, us["epilogue"])
                sums["best"] += count * min(us.values())
                for name, seconds in row["first_s"].items():
                    sums[f"first {name}"] += seconds  # type: ignore[assignment]
            print(network, batch, {k: round(float(v), 2) for k, v in sums.items()}, flush=True)
    result = provenance("torch", "timm", gpu=True) | {
        "benchmark_mode": not told.heuristic,
        "rows": list(rows.values()),
    }
    name = "pytorch_epilogues" + "_heuristic" * told.heuristic
    print(write(name, result, told.out), file=sys.stderr)


if __name__ == "__main__":
    main()
