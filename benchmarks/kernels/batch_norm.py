"""Batch norm with its activation: the best config of confpred's kernels against PyTorch's own.

    python -m benchmarks.kernels.batch_norm [--out FOLDER] [--seconds 140] [--configs N]

Both directions of a dozen layers of networks, in float16 and channels last. Every legal config of
every family is checked against the float64 reference and timed; then the fastest is timed again,
twice, in the same rounds as PyTorch's operators, each in a CUDA graph with cold caches. PyTorch's
are cuDNN's batch norm, the addition and the activation, and what eager mode saves between
directions. Shares are those of the bytes' floor: each pass over the activations at the bandwidth of
a large copy, where statistics are known before the second pass begins.

A process of its own measures. Where a config ends it, or takes no end, the config is named in the
result, and another process goes on without it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from benchmarks.kernels.conv_vs_cudnn import copy_bandwidth, interleaved_ms
from benchmarks.provenance import folder_of, provenance, write
from confpred.families.protocol import Family, config_dict
from confpred.families.registry import kernels_of
from confpred.problem.device import Device, get_device
from confpred.problem.norm import BATCH_NORM, DIRECTIONS, BatchNorm
from confpred.problem.operation import SCRATCH, ZEROED, KernelSpec
from confpred.problem.record import Record

NAME = "batch_norm"
#: Batch, channels, height and width, activation, whether a residual is added.
LAYERS: tuple[tuple[int, int, int, str, bool], ...] = (
    (128, 256, 56, "relu", False),
    (128, 512, 28, "relu", False),
    (32, 256, 56, "relu", False),
    (128, 480, 14, "silu", False),
    (128, 144, 56, "silu", False),
    (128, 32, 112, "silu", False),
    (128, 256, 56, "relu", True),
    (128, 1024, 14, "relu", True),
    (128, 2048, 7, "relu", True),
    (128, 96, 56, "none", False),
    (32, 64, 112, "relu", False),
    (32, 1152, 7, "silu", False),
)
LARGE_BYTES = 2**26  # the target of the shares is for tensors beyond
SILENT_S = 45  # a process that says nothing for so long is ended
SHOWN = 3  # configs of each family in the result


def problems() -> list[BatchNorm]:
    """Return the layers, in both directions."""
    return [
        BatchNorm(n, side, side, c, activation=activation, residual=residual, direction=direction)
        for n, c, side, activation, residual in LAYERS
        for direction in DIRECTIONS
    ]


def rows_of(
    family: Family, problem: BatchNorm, device: Device, most: int, left_out: Sequence[int]
) -> list[int]:
    """Return the legal configs of a family without those `left_out`; a random choice of `most`."""
    rows = [r for r in np.flatnonzero(family.legal(problem, device)) if r not in left_out]
    chosen = random.Random(str(problem)).sample(rows, min(most, len(rows)))
    return sorted(int(row) for row in chosen)


def kernels(device: Device, most: int) -> list[KernelSpec]:
    """Return every kernel that a run needs."""
    found: dict[KernelSpec, None] = {}
    for problem in problems():
        for family in kernels_of(problem).values():
            for row in rows_of(family, problem, device, most, ()):
                found.update(dict.fromkeys(family.launch(problem, row).kernels))
        for output in BATCH_NORM.operands(problem):
            if output.terms:
                found[BATCH_NORM.reference(problem, output.name).kernel] = None
    return list(found)


def compile_one(spec: KernelSpec, arch: str) -> str:
    """Compile a kernel to the cache; returns the error, if there is one."""
    from confpred.cuda.compiler import compile_kernel
    from confpred.errors import ConfpredError

    try:
        compile_kernel(spec, arch)
    except ConfpredError as error:
        return f"{spec.entry}: {error}"
    return ""


def compiled(specs: Sequence[KernelSpec], arch: str) -> list[str]:
    """Compile kernels side by side, and return the errors: NVRTC scales with processes."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        errors = pool.map(compile_one, specs, [arch] * len(specs), chunksize=4)
        return [error for error in errors if error]


# The process that measures; it prints a line for each thing that it begins, and for each result.


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def work(job: Mapping[str, Any]) -> None:
    """Measure the problems of `job`, and print each result."""
    import torch

    from confpred.cuda import driver
    from confpred.measure import pytorch as operator

    driver.make_current(0)
    torch.cuda.set_device(0)
    device = driver.device_of(0)
    bandwidth, evict = copy_bandwidth(), operator.Evictor(device.l2_bytes)
    say(bandwidth=bandwidth)
    for words in job["problems"]:
        if time.time() > job["end"]:
            break
        try:
            result = one(BatchNorm.parse(words), device, bandwidth, evict, job)
        except Exception as error:  # the others still count
            result = {"problem": words, "failed": f"{type(error).__name__}: {error}"[:300]}
        say(result=result)
        torch.cuda.empty_cache()


def one(
    problem: BatchNorm, device: Device, bandwidth: float, evict: Any, job: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the result of one problem."""
    from confpred.measure.kernels import measure

    found: dict[str, Any] = {"problem": str(problem), "direction": problem.direction}
    found |= {"tensor_bytes": problem.tensor_bytes, "families": {}, "failures": []}
    best: tuple[float, Family, int] | None = None
    for name, family in kernels_of(problem).items():
        left_out = [row for p, f, row in job["left_out"] if (p, f) == (str(problem), name)]
        rows = rows_of(family, problem, device, job["configs"], left_out)
        if not rows:
            continue

        def report(row: int, name: str = name) -> None:
            say(begun=[str(problem), name, row])

        outcomes = measure(problem, family, rows, ordinal=0, seed=0, report=report)
        good = sorted((o for o in outcomes if o.status == "ok"), key=lambda o: o.time_ms)
        found["families"][name] = {
            "configs": len(rows),
            "best": [{"ms": o.time_ms, **config_dict(family, o.config_id)} for o in good[:SHOWN]],
            "median_ms": float(np.median([o.time_ms for o in good])) if good else None,
        }
        found["failures"] += [
            f"{name} {config_dict(family, o.config_id)}: {o.status} {o.message}"[:300]
            for o in outcomes
            if o.status != "ok"
        ][:SHOWN]
        if good and (best is None or good[0].time_ms < best[0]):
            best = good[0].time_ms, family, good[0].config_id
    if best is None:
        return found | {"failed": "no config is right"}
    return found | against_pytorch(problem, *best[1:], bandwidth, evict)


def call_of(
    family: Family, problem: Record, row: int, steps: int | None = None
) -> Callable[[Mapping[str, Any]], list[Any]]:
    """Return a function from inputs by name to the outputs of one config, or of its first `steps`,
    which are new tensors; its workspaces are its own, as those of one stream are."""
    import torch

    from confpred.launch.kernels import bound

    launch = family.launch(problem, row)
    launch = replace(launch, steps=launch.steps[:steps])
    operands = family.operation.operands(problem)
    outputs = [o for o in operands if o.terms]
    names = [*(o.name for o in operands), ZEROED, SCRATCH]
    enqueue = bound(launch, names, 0)
    sizes = (launch.zeroed_bytes, launch.scratch_bytes)
    spaces = [torch.zeros(size + 1, dtype=torch.uint8, device="cuda") for size in sizes]

    def call(tensors: Mapping[str, Any]) -> list[Any]:
        made = [torch.empty(o.shape, dtype=getattr(torch, o.dtype), device="cuda") for o in outputs]
        given = [tensors[o.name] for o in operands if not o.terms]
        addresses = [t.data_ptr() for t in (*made, *given, *spaces)]
        enqueue(torch.cuda.current_stream().cuda_stream, addresses)
        return made

    return call


def against_pytorch(
    problem: BatchNorm, family: Family, row: int, bandwidth: float, evict: Any
) -> dict[str, Any]:
    """Time a config twice and PyTorch's operators, in the same rounds on the same inputs."""
    from confpred.cuda import driver
    from confpred.measure import pytorch as operator
    from confpred.measure import timing

    say(begun=[str(problem), family.name, row])
    facts = driver.device_of(0)
    launches = timing.launches_a_replay(2 * facts.roofline_s(problem))
    # Two sets at least: the next launch must not find what the last one left in the L2 cache.
    copies = max(2, operator.copies_for(problem, launches, facts.l2_bytes))
    sets = operator.operands(BATCH_NORM, problem, min(copies, launches))
    if problem.is_backward:
        for tensors in sets:
            tensors |= {"mean": tensors["saved_mean"], "invstd": tensors["saved_invstd"]}
    ours = call_of(family, problem, row)

    def theirs(tensors: dict[str, Any]) -> Any:
        return BATCH_NORM.pytorch(problem, tensors)

    one, other = ours(sets[0])[0].float(), theirs(sets[0])
    other = (other[0] if problem.is_backward else other).permute(0, 2, 3, 1).float()
    difference = float((one - other).norm() / other.norm())
    del one, other
    turns = [sets[i % len(sets)] for i in range(launches)]
    pytorch_ms, ours_ms, again_ms = interleaved_ms((theirs, ours, ours), turns, evict)
    floor_ms = 1e3 * problem.passes * problem.tensor_bytes / bandwidth
    mean_ms = (ours_ms + again_ms) / 2
    return {
        "family": family.name,
        "config": config_dict(family, row),
        "difference": difference,
        "pytorch_ms": pytorch_ms,
        "ours_ms": ours_ms,
        "ours_again_ms": again_ms,
        "noise": abs(again_ms / ours_ms - 1),
        "speedup": pytorch_ms / mean_ms,
        "floor_ms": floor_ms,
        "share": floor_ms / mean_ms,
        "pytorch_share": floor_ms / pytorch_ms,
        "share_of_one_read": 1e3 * problem.tensors * problem.tensor_bytes / bandwidth / mean_ms,
    }


# The process that watches it.


def lines_of(output: Iterable[str]) -> queue.Queue[str | None]:
    """Return the lines of a process's output, as they come; None at the end."""
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in output:
            found.put(line)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found


def watched(
    job: dict[str, Any], command: Sequence[str], silent_s: float = SILENT_S
) -> dict[str, Any]:
    """Run processes until every problem of `job` has a result or its time is up.

    Returns:
        ``results``, the ``bandwidth``, and ``ended``: the configs that ended a process.
    """
    results: list[dict[str, Any]] = []
    ended: list[list[Any]] = []
    bandwidth = None
    left = list(job["problems"])
    while left and time.time() < job["end"]:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        task = json.dumps(job | {"problems": left, "left_out": ended})
        print(task, file=process.stdin, flush=True)
        lines, begun = lines_of(process.stdout or ()), None
        while True:
            try:
                line = lines.get(timeout=silent_s)
            except queue.Empty:
                line = None
            if line is None:
                break
            if not line.startswith("{"):
                continue
            said = json.loads(line)
            bandwidth = said.get("bandwidth", bandwidth)
            begun = said.get("begun", begun)
            if "result" in said:
                results.append(said["result"])
                left.remove(said["result"]["problem"])
                begun = None
        process.kill()
        code = process.wait()
        if begun is not None:
            ended.append(begun)
        elif code and left:  # nothing to blame: the next problem is given up
            results.append({"problem": left.pop(0), "failed": f"the process ended with {code}"})
        elif not code:
            break
    return {"results": results, "bandwidth": bandwidth, "ended": ended}


def record(
    name: str, found: Mapping[str, Any], summed: Any, errors: Sequence[str], out: Path | None
) -> None:
    """Print and write what `watched` found, with its summary and what was not compiled."""
    results = found["results"]
    for r in results:
        print(*r.get("failures", ()), sep="\n", end="\n" if r.get("failures") else "")
    print(json.dumps(summed, indent=1))
    facts = provenance("torch", gpu=True) | {"copy_bytes_per_s": found["bandwidth"]}
    facts |= {"summary": summed, "ended_processes": found["ended"], "not_compiled": errors}
    print(f"written: {write(name, facts | {'layers': results}, folder_of(out))}")


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return, for each direction, speeds over PyTorch and shares of the floor."""
    found: dict[str, Any] = {}
    for direction in DIRECTIONS:
        here = [r for r in results if r.get("direction") == direction and "speedup" in r]
        large = [r["share"] for r in here if r["tensor_bytes"] > LARGE_BYTES]
        if here:
            speeds = [r["speedup"] for r in here]
            found[direction] = {
                "layers": len(here),
                "speedup": geometric_mean(speeds),
                "least": min(speeds),
                "share": geometric_mean(large) if large else None,
                "least_share": min(large, default=None),
            }
    return found


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as Markdown."""
    heads = ("layer", "PyTorch, ms", "ours, ms", "gain", "share of the floor", "PyTorch's", "noise")
    lines = [f"| {' | '.join(heads)} | kernel |", f"|---|{'---:|' * (len(heads) - 1)}---|"]
    for r in results:
        if "speedup" not in r:
            lines.append(f"| {r['problem']} | failed: {r.get('failed')} |")
            continue
        cells = [
            r["problem"], f"{r['pytorch_ms']:.4f}", f"{r['ours_ms']:.4f}", f"{r['speedup']:.2f}x",
            f"{r['share']:.2f}", f"{r['pytorch_share']:.2f}", f"{r['noise']:.1%}",
            f"{r['family']} {r['config']}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="default: the device's folder of results")
    parser.add_argument("--seconds", type=float, default=140.0, help="begin nothing after these")
    parser.add_argument("--configs", type=int, default=10_000, help="at most so many a family")
    parser.add_argument("--device", default="h100", help="whose configs are compiled beforehand")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(json.loads(sys.stdin.readline()))
        return
    start, device = time.time(), get_device(arguments.device)
    errors = compiled(kernels(device, arguments.configs), device.arch)
    print(f"compiled in {time.time() - start:.0f} s", *errors, sep="\n")
    job = {
        "problems": [str(problem) for problem in problems()],
        "end": start + arguments.seconds,
        "configs": arguments.configs,
    }
    found = watched(job, [sys.executable, "-m", "benchmarks.kernels.batch_norm", "--work"])
    results = found["results"]
    print(table(results))
    record(NAME, found, summary(results), errors, arguments.out)


if __name__ == "__main__":
    main()
