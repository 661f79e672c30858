"""What does PyTorch's operator take on channels-first tensors, and what does converting them take?

    python benchmarks/channels_first.py [--out FOLDER]

For forward layers of the networks in ``datasets/networks.json``, float16 and batch 32: the time of
PyTorch's operator (cuDNN's benchmark mode) on dense tensors with their channels first, and with
their channels last, and of the copies of input and output between the two. Each is the median over
rounds that take turns, of launches back to back while the host is ahead. `confpred.pytorch.layouts`
holds what follows from it: a low percentile of the ratio, and the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from conv_vs_cudnn import problems
from provenance import RESULTS, provenance, write

from confpred.problem.conv2d import Problem

NAME = "channels_first"
BATCH, LAYERS = 32, 60
LOW = 10  # percentile


def measure(problem: Problem) -> dict[str, Any]:
    """Milliseconds of one layer."""
    import torch
    import torch.nn.functional as F

    from confpred.pytorch.verify import interleaved

    p = problem
    x = torch.randn(p.n, p.c, p.h, p.w, device="cuda", dtype=torch.float16)
    weight = torch.randn(p.k, p.group_width, p.r, p.s, device="cuda", dtype=torch.float16)
    last = torch.channels_last
    x_last, weight_last = x.to(memory_format=last), weight.to(memory_format=last)
    out = torch.randn(p.n, p.k, p.p, p.q, device="cuda", dtype=torch.float16)
    out_last = out.to(memory_format=last)
    arguments = (None, p.stride, p.padding, p.dilation, p.groups)
    with torch.inference_mode():
        first_ms, last_ms, in_ms, out_ms = interleaved(
            [
                lambda: F.conv2d(x, weight, *arguments),
                lambda: F.conv2d(x_last, weight_last, *arguments),
                lambda: x.contiguous(memory_format=last),
                lambda: out_last.contiguous(),
            ]
        )
    return {
        "problem": str(problem),
        "channels_first_ms": first_ms,
        "channels_last_ms": last_ms,
        "copies_ms": in_ms + out_ms,
        "copied_bytes": 2 * p.itemsize * (p.input_elements + p.output_elements),
    }


def summary(rows: list[dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    """Percentiles of the ratio by kind of layer, and the copies' share of the bandwidth."""
    found: dict[str, Any] = {}
    for kind in (True, False):
        ratios = sorted(
            row["channels_first_ms"] / row["channels_last_ms"]
            for row in rows
            if (Problem.parse(row["problem"]).group_width == 1) is kind
        )
        low = ratios[len(ratios) * LOW // 100]
        found["depthwise" if kind else "grouped"] = {
            "layers": len(ratios),
            f"p{LOW}": low,
            "median": statistics.median(ratios),
        }
    shares = [row["copied_bytes"] / (row["copies_ms"] * 1e-3) / bandwidth for row in rows]
    found["copy_share"] = {"median": statistics.median(shares), "smallest": min(shares)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    import torch

    from confpred.cuda import driver

    torch.backends.cudnn.benchmark = True
    wanted = [p for p in problems() if p.direction == "fprop" and p.n == BATCH]
    chosen = random.Random(0).sample(wanted, min(LAYERS, len(wanted)))
    rows = [measure(problem) for problem in chosen]
    bandwidth = driver.device_of(0).dram_bytes_per_s
    result = provenance("torch", gpu=True) | {"summary": summary(rows, bandwidth), "rows": rows}
    print(json.dumps(result["summary"], indent=1))
    print(f"written: {write(NAME, result, arguments.out)}")


if __name__ == "__main__":
    main()
