"""Our chosen kernel against cuDNN, side by side: one process, one clock, interleaved replays.

    python benchmarks/grouped_fprop_vs_cudnn.py [--out FOLDER]

cuDNN is timed twice, with its heuristics and with PyTorch's benchmark mode, each in a process of
its own because PyTorch keeps the first plan that it made for a shape. In each process our kernel is
timed in the same rounds. The memory floor is the layer's bytes over the bandwidth of a large
device-to-device copy measured in the same process.

Our config comes from ``Predictor.rank`` under the model that ships; ``--exhaustive`` times every
legal config as well and reports the fastest, which shows what a perfect choice would give.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from provenance import RESULTS, provenance, write

from confpred.problem import Problem

LAYERS = (
    "n=32 c=64 h=64 w=64 k=64 r=3 s=3 padding=1 groups=8",
    "n=128 c=64 h=64 w=64 k=64 r=3 s=3 padding=1 groups=8",
    "n=128 c=1024 h=16 w=16 k=1024 r=3 s=3 padding=1 groups=128",
    "n=256 c=48 h=112 w=112 k=48 r=3 s=3 padding=1 groups=6",
    "n=128 c=128 h=56 w=56 k=128 r=3 s=3 padding=1 groups=16",
    "n=128 c=256 h=28 w=28 k=256 r=3 s=3 padding=1 groups=32",
    "n=64 c=256 h=28 w=28 k=256 r=3 s=3 padding=1 groups=16",
    "n=128 c=512 h=14 w=14 k=512 r=3 s=3 padding=1 groups=32",
    "n=64 c=512 h=14 w=14 k=512 r=3 s=3 padding=1 groups=16",
    "n=128 c=1024 h=7 w=7 k=1024 r=3 s=3 padding=1 groups=32",
    "n=64 c=128 h=28 w=28 k=128 r=5 s=5 padding=2 groups=16",
    "n=64 c=128 h=28 w=28 k=128 r=7 s=7 padding=3 groups=16",
    "n=1 c=256 h=28 w=28 k=256 r=3 s=3 padding=1 groups=16",
    "n=1 c=512 h=14 w=14 k=512 r=3 s=3 padding=1 groups=32",
)

MODES = ("heuristics", "benchmark")


def copy_bandwidth() -> float:
    """Bytes read plus bytes written a second, of a 1 GiB device-to-device copy; best of medians."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * source.numel() / statistics.median(times[2:])


def compare(problem: Problem, bandwidth: float) -> dict[str, Any]:
    """One layer in this process: ours, ours again (the noise floor) and cuDNN's."""
    import torch

    from confpred.cuda import driver, peer, timing
    from confpred.cuda.compiler import compile_kernel
    from confpred.families import all_families
    from confpred.predictor import Predictor

    device, facts = driver.make_current(0), driver.device_of(0)
    choice = next(c for c in Predictor.load().rank(problem, facts, top=8) if c.family)
    family, row = all_families()[str(choice.family)], int(choice.config_id or 0)
    launch = family.launch(problem, row)
    loaded = driver.load(compile_kernel(family.source(problem, row), facts.arch), launch.smem_bytes)
    bound = driver.BoundLaunch(loaded.kernel, launch)

    def ours(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        out = torch.empty(
            (problem.n, problem.p, problem.q, problem.k), dtype=tensors[0].dtype, device="cuda"
        )
        stream = torch.cuda.current_stream().cuda_stream
        bias = tensors[2].data_ptr() if problem.bias else 0
        bound.enqueue(stream, out.data_ptr(), tensors[0].data_ptr(), tensors[1].data_ptr(), bias)
        return out.permute(0, 3, 1, 2)

    theirs = partial(peer.pytorch_call, problem)
    floor_ms = problem.minimum_bytes / bandwidth * 1e3
    launches = timing.launches_a_replay(2 * floor_ms * 1e-3)
    sets = peer.operands(problem, peer.copies_for(problem, launches, facts.l2_bytes))
    error = (ours(sets[0]).double() - theirs(sets[0]).double()).norm() / theirs(sets[0]).norm()
    if not error < 0.01:
        raise SystemExit(f"{problem}: ours and cuDNN's differ by {error}")
    turns = [sets[i % len(sets)] for i in range(launches)]
    graphs = [peer.TorchGraph([partial(f, t) for t in turns]) for f in (ours, ours, theirs)]
    evict = peer.Evictor(facts.l2_bytes)
    torch.cuda.synchronize()
    stream = device.create_stream()
    times = timing.time_interleaved(device, stream, graphs, [launches] * 3, 0, evict)
    return {
        "problem": str(problem),
        "config": choice.to_json()["config"],
        "source": choice.source,
        "floor_ms": floor_ms,
        "ours_ms": times[0].median_ms,
        "ours_again_ms": times[1].median_ms,
        "cudnn_ms": times[2].median_ms,
    }


def run_mode(mode: str) -> dict[str, Any]:
    import torch

    torch.backends.cudnn.benchmark = mode == "benchmark"
    bandwidth = copy_bandwidth()
    rows = [compare(Problem.parse(text), bandwidth) for text in LAYERS]
    return {"copy_bytes_per_s": bandwidth, "cudnn": torch.backends.cudnn.version(), "layers": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.mode:
        print(json.dumps(run_mode(arguments.mode)))
        return
    runs = {}
    for mode in MODES:
        command = [sys.executable, __file__, "--mode", mode]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        runs[mode] = json.loads(done.stdout.splitlines()[-1])
    layers = []
    for heuristics, benchmark in zip(*(runs[mode]["layers"] for mode in MODES), strict=True):
        ratios = [row["cudnn_ms"] / row["ours_ms"] for row in (heuristics, benchmark)]
        shares = [row["floor_ms"] / row["ours_ms"] for row in (heuristics, benchmark)]
        layers.append(
            {
                "problem": heuristics["problem"],
                "config": heuristics["config"],
                "source": heuristics["source"],
                "floor_ms": heuristics["floor_ms"],
                "ours_ms": heuristics["ours_ms"],
                "cudnn_heuristics_ms": heuristics["cudnn_ms"],
                "cudnn_benchmark_ms": benchmark["cudnn_ms"],
                "speedup": min(ratios),  # over the better of cuDNN's two
                "floor_share": min(shares),
                "noise": max(
                    abs(row["ours_again_ms"] / row["ours_ms"] - 1)
                    for row in (heuristics, benchmark)
                ),
            }
        )
    result = provenance("torch", gpu=True) | {
        "cudnn": runs["heuristics"]["cudnn"],
        "copy_bytes_per_s": [runs[mode]["copy_bytes_per_s"] for mode in MODES],
        "layers": layers,
    }
    path = write("grouped_fprop_vs_cudnn", result, arguments.out)
    for row in layers:
        print(
            f"{row['problem']:75s} ours {row['ours_ms']:.4f} ms"
            f"  floor share {row['floor_share']:.2f}"
            f"  cuDNN {row['cudnn_heuristics_ms']:.4f} / {row['cudnn_benchmark_ms']:.4f} ms"
            f"  speedup {row['speedup']:.2f}  noise {row['noise']:.3f}"
        )
    print(f"written: {path}")


if __name__ == "__main__":
    main()
