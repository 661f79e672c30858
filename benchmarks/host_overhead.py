"""Host time of one call: how long until the caller has its tensor back and can go on.

    python benchmarks/host_overhead.py [--alternatives] [--out FOLDER]

The first part calls layers that are so small that the GPU is never the bottleneck: fused ones here,
and in `host_layers` plain ones with and without gradients, ours and not ours. The calls run back to
back on one stream, with the synchronisation outside of the timed region; the result is the median
over many short runs, interleaved. The second part is the first call of a shape: choose, compile (or
read the compiled kernel from disk), load and launch, each in a fresh process, against PyTorch's
first call. With ``--alternatives`` there is a third: what the ways into PyTorch cost without any
work inside (`host_mechanisms`). PyTorch's calls are always in its default mode here: cuDNN's
heuristics choose, not its benchmark mode.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from host_timing import Turn, interleaved_us
from provenance import RESULTS, provenance, write

CALLS, RUNS, PROCESSES = 100, 60, 5

_FIRST = """
import json, sys, time
import torch
import torch.nn.functional as F
import confpred
x = torch.randn(32, 256, 28, 28, device="cuda", dtype=torch.float16)
x = x.to(memory_format=torch.channels_last)
w = torch.randn(256, 8, 3, 3, device="cuda", dtype=torch.float16)
w = w.to(memory_format=torch.channels_last)
call = {"confpred": confpred.conv2d, "PyTorch": F.conv2d}[sys.argv[1]]
torch.cuda.synchronize()
start = time.perf_counter()
call(x, w, padding=1, groups=32)
torch.cuda.synchronize()
print(json.dumps(time.perf_counter() - start))
"""


def steady_us() -> dict[str, float]:
    """Median microseconds a call."""
    import torch
    import torch.nn.functional as F

    import confpred
    from confpred.cuda import driver

    x = torch.randn(1, 64, 14, 14, device="cuda", dtype=torch.float16)
    x = x.to(memory_format=torch.channels_last)
    weight = torch.randn(64, 8, 3, 3, device="cuda", dtype=torch.float16)
    weight = weight.to(memory_format=torch.channels_last)
    bias = torch.randn(64, device="cuda", dtype=torch.float16)
    shape = {"padding": 1, "groups": 8}
    calls: dict[str, Callable[[], object]] = {
        "F.conv2d": lambda: F.conv2d(x, weight, **shape),
        "confpred.conv2d": lambda: confpred.conv2d(x, weight, **shape),
        "F.relu(F.conv2d with bias)": lambda: F.relu(F.conv2d(x, weight, bias, **shape)),
        "confpred.conv2d with bias and relu": lambda: confpred.conv2d(
            x, weight, bias, activation="relu", **shape
        ),
        "torch.empty_like": lambda: torch.empty_like(x),
    }
    print(f"device: {driver.describe(0)[0]}", file=sys.stderr)
    turns = {name: Turn(call) for name, call in calls.items()}
    with torch.inference_mode():
        return interleaved_us(turns, calls=CALLS, runs=RUNS, synchronize=torch.cuda.synchronize)


def first_call_s() -> dict[str, float]:
    """Median seconds of the first call in a process."""

    def run(who: str, cache: str) -> float:
        environment = os.environ | {"CONFPRED_CACHE_DIR": cache}
        command = [sys.executable, "-c", _FIRST, who]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return float(json.loads(done.stdout.splitlines()[-1]))

    cold, warm, theirs = [], [], []
    for _ in range(PROCESSES):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(run("confpred", cache))
            warm.append(run("confpred", cache))
            theirs.append(run("PyTorch", cache))
    return {
        "confpred, kernel not compiled before": statistics.median(cold),
        "confpred, kernel compiled by another process": statistics.median(warm),
        "PyTorch (cuDNN heuristics)": statistics.median(theirs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--alternatives", action="store_true", help="time empty mechanisms too")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    from host_layers import layers_us

    parts: dict[str, Any] = {
        "call_us": steady_us(),
        "layers": layers_us(),
        "first_call_s": first_call_s(),
    }
    if arguments.alternatives:
        from host_mechanisms import mechanisms_us

        parts["mechanisms"] = mechanisms_us("cuda")
    path = write("host_overhead", provenance("torch", "cuda-core", gpu=True) | parts, arguments.out)
    print(json.dumps(parts, indent=1))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
