"""How much do samples a chunk gain im2col over the loop over samples, and what memory do they cost?

    python -m benchmarks.kernels.im2col_chunks [--out FOLDER] [--dtype DTYPE]
    python -m benchmarks.kernels.im2col_chunks --cpu     # no times: are all configs right?

Stacks of eight 3x3 convolutions, the sizes for which a gain of one batched product over the loop
was published, by every config of ``confpred.products.im2col``: chunks of 1 sample (the loop), 2, 4
.. and all, as one product of all rows of a chunk, and as a batch of products sample by sample,
which is what was published. Eager steps include what the host takes; CUDA graphs do not. All are
timed in turns in one run, beside PyTorch's convolution in cuDNN's benchmark mode.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import RESULTS, provenance, write
from confpred.families.protocol import Candidate, config_dict
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.problem.operation import SCRATCH, Launch, Step
from confpred.products.im2col import ALL, FAMILY

NAME = "im2col_chunks"
LAYERS = 8
#: Channels, height and width, and batch; and the published gain of one batched product over the
#: loop.
CASES = {
    (16, 16, 1): 1.0,
    (16, 16, 4): 2.6,
    (16, 16, 8): 3.4,
    (16, 16, 16): 4.1,
    (16, 8, 8): 2.6,
    (64, 32, 8): 1.9,
    (128, 28, 8): 1.17,
}
ROUNDS, REPEATS = 9, 10


def problem_of(case: tuple[int, int, int], dtype: str) -> Problem:
    channels, side, batch = case
    return Problem(batch, channels, side, side, channels, 3, 3, padding=1, dtype=dtype)


def configs(problem: Problem, *, tf32: bool) -> list[int]:
    """Return the rows to compare: all legal ones of one precision."""
    rows = np.flatnonzero(FAMILY.legal(problem, get_device("h100")))
    return [int(row) for row in rows if bool(FAMILY.configs["tf32"][row]) == tf32]


def row_of(case: tuple[int, int, int], problem: Problem, config: int) -> dict[str, Any]:
    """Return the columns that identify a measurement, with the exact workspace."""
    channels, side, batch = case
    fields = config_dict(FAMILY, config)
    samples = fields["samples"] or batch
    return {
        "channels": channels,
        "side": side,
        "batch": batch,
        "dtype": problem.dtype,
        "samples": min(samples, batch),
        "batched": bool(fields["batched"]),
        "workspace_bytes": FAMILY.launch(problem, config).workspace_bytes,
    }


def elapsed_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of one of several calls in a row, the host's included."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(REPEATS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / REPEATS


def in_turns(calls: list[Callable[[], Any]]) -> list[float]:
    """Return the median of each call's rounds, which take turns in random order."""
    for call in calls:
        call()
        call()
    times: list[list[float]] = [[] for _ in calls]
    order = list(range(len(calls)))
    for _ in range(ROUNDS):
        random.shuffle(order)
        for index in order:
            times[index].append(elapsed_ms(calls[index]))
    return [statistics.median(values) for values in times]


def graph_of(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a CUDA graph of `call`."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(case: tuple[int, int, int], dtype: str, *, tf32: bool) -> list[dict[str, Any]]:
    """Milliseconds of a stack by each config, and by PyTorch's convolution."""
    import torch

    from confpred.launch.assignment import Assignment
    from confpred.pytorch.run.loading import ready_launch

    problem = problem_of(case, dtype)

    def run_of(config: int) -> Callable[..., Any]:
        run = ready_launch(Assignment(problem, Candidate(FAMILY.name, config)), 0).run
        return lambda out, weight: run(out, weight)[0]

    layout = {"memory_format": torch.channels_last}
    kind = getattr(torch, dtype)
    x = torch.randn(problem.n, problem.c, problem.h, problem.w, device="cuda", dtype=kind)
    x = x.contiguous(**layout)
    scale = (problem.c * 9) ** -0.5
    weights = [
        (torch.randn(problem.k, problem.c, 3, 3, device="cuda") * scale)
        .to(kind)
        .contiguous(**layout)
        for _ in range(LAYERS)
    ]

    def stack(layer: Callable[[Any, Any], Any]) -> Callable[[], Any]:
        def run() -> Any:
            out = x
            for weight in weights:
                out = layer(out, weight)
            return out

        return run

    rows = configs(problem, tf32=tf32)
    calls = [stack(run_of(row)) for row in rows]
    calls.append(stack(lambda out, weight: torch.conv2d(out, weight, padding=1)))
    with torch.inference_mode():
        right = calls[-1]().double()
        errors = [float((call().double() - right).norm() / right.norm()) for call in calls]
        eager = in_turns(calls)
        graphs = in_turns([graph_of(call) for call in calls])
    found = [row_of(case, problem, row) for row in rows]
    channels, side, batch = case
    theirs = {"channels": channels, "side": side, "batch": batch, "dtype": dtype}
    found.append(theirs | {"samples": None, "batched": None, "workspace_bytes": None})
    for entry, eager_ms, graph_ms, difference in zip(found, eager, graphs, errors, strict=True):
        entry |= {"eager_ms": eager_ms, "graph_ms": graph_ms, "difference": difference}
    return found


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case the gain of all samples at once over the loop, beside what was published, and
    the memory of both; and of every chunk, its memory and its gain."""
    lines = []
    for (channels, side, batch), published in CASES.items():
        here = [
            row
            for row in rows
            if (row["channels"], row["side"], row["batch"]) == (channels, side, batch)
        ]
        ours = [row for row in here if row["samples"] is not None]
        if not ours:
            continue
        loop = next(row for row in ours if row["samples"] == 1)
        theirs = next(row for row in here if row["samples"] is None)
        line: dict[str, Any] = {
            "case": f"C={channels} {side}x{side}, batch {batch}",
            "published": published,
            "loop_workspace_bytes": loop["workspace_bytes"],
            "all_workspace_bytes": max(row["workspace_bytes"] for row in ours),
        }
        for kind in ("eager", "graph"):
            ms = f"{kind}_ms"
            for name, batched in (("one_product", False), ("batched", True)):
                whole = [
                    row[ms]
                    for row in ours
                    if row["samples"] == batch and (row["batched"] is batched or batch == 1)
                ]
                line[f"{kind}_{name}"] = loop[ms] / whole[0]
            line[f"{kind}_over_pytorch"] = theirs[ms] / min(row[ms] for row in ours)
        line["chunks"] = [
            {
                "samples": row["samples"],
                "batched": row["batched"],
                "workspace_bytes": row["workspace_bytes"],
                "eager_gain": loop["eager_ms"] / row["eager_ms"],
                "graph_gain": loop["graph_ms"] / row["graph_ms"],
            }
            for row in ours
        ]
        lines.append(line)
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Return the summary of CUDA graphs as Markdown: gains over the loop, and workspaces."""
    heads = (
        "eight layers", "published", "batched", "one product", "best over cuDNN",
        "workspace of the loop", "of all samples",
    )  # fmt: skip
    names = ("graph_batched", "graph_one_product")
    text = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for line in lines:
        cells = [line["case"], f"{line['published']:.2f}x", *(f"{line[n]:.2f}x" for n in names)]
        cells.append(f"{line['graph_over_pytorch']:.2f}x")
        for name in ("loop_workspace_bytes", "all_workspace_bytes"):
            cells.append(f"{line[name] / 2**20:.2f} MiB")
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def difference_on_cpu(problem: Problem, config: int) -> float:
    """Relative difference of a config's result from that in float64, its copies made by PyTorch's
    own ``unfold``: what is checked is the program of copies and products."""
    import torch
    import torch.nn.functional as F

    from confpred.launch.program import Bound, Operands, Program

    p, launch = problem, FAMILY.launch(problem, config)
    x = torch.rand(p.n, p.h, p.w, p.c) * 2 - 1
    filters = torch.rand(p.k, p.r, p.s, p.c) * 2 - 1

    def bind(step: Step) -> Bound:
        def copy(operands: Operands) -> None:
            first, images = step.scalars["first"], step.scalars["images"]
            some = operands["in"][first : first + images].permute(0, 3, 1, 2)
            windows = F.unfold(some, (p.r, p.s), p.dilation, p.padding, p.stride)
            rows = windows.view(images, p.c, p.r * p.s, -1).permute(0, 3, 2, 1).reshape(-1)
            operands[SCRATCH].view(torch.float32)[: len(rows)] = rows

        return copy

    operands = {"in": x, "filter": filters, "out": torch.full((p.n, p.p, p.q, p.k), torch.nan)}
    scratch = torch.full((launch.scratch_bytes,), 255, dtype=torch.uint8)
    Program(_copies(launch), bind)({**operands, SCRATCH: scratch})
    layer = (p.stride, p.padding, p.dilation, p.groups)
    right = F.conv2d(
        x.double().permute(0, 3, 1, 2), filters.double().permute(0, 3, 1, 2), None, *layer
    ).permute(0, 2, 3, 1)
    return float((operands["out"].double() - right).norm() / right.norm())


def _copies(launch: Launch) -> Launch:
    """`launch`, which has to consist of copies into rows and products."""
    strange = {kernel.entry for kernel in launch.kernels} - {"im2col"}
    if strange:
        raise ValueError(f"the CPU has no {', '.join(strange)}")
    return launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float32")
    parser.add_argument("--tf32", action="store_true", help="round float32 inputs to TF32")
    parser.add_argument("--cpu", action="store_true", help="check results on the CPU; time nothing")
    arguments = parser.parse_args()
    if arguments.cpu:
        for case in CASES:
            problem = problem_of(case, "float32")
            rows = configs(problem, tf32=False)
            worst = max(difference_on_cpu(problem, row) for row in rows)
            print(f"{problem}: {len(rows)} configs, largest difference {worst:.1e}")
            if not worst < 1e-6:
                raise SystemExit("a config is wrong")
        return
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = arguments.tf32
    rows = [row for case in CASES for row in measure(case, arguments.dtype, tf32=arguments.tf32)]
    lines = summary(rows)
    result = provenance("torch", gpu=True) | {
        "cublas": torch.version.cuda,
        "dtype": arguments.dtype,
        "tf32": arguments.tf32,
        "all": ALL,
        "summary": lines,
        "rows": rows,
    }
    print(table(lines))
    print(json.dumps({line["case"]: line["chunks"] for line in lines}))
    print(f"written: {write(NAME, result, arguments.out)}")


if __name__ == "__main__":
    main()
