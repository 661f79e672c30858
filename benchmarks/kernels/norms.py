"""Norms with their activation: the best config of confpred's kernels, PyTorch and Inductor.

    python -m benchmarks.kernels.norms [--groups] [--out FOLDER] [--seconds 140] [--configs N]

Both directions of a dozen batch norms of networks, in float16 and channels last; or, of `--groups`,
the norms of the hold-out beyond 4 MB. Every legal config of every family is checked against the
float64 reference and timed; then the fastest is timed again, twice, in the same rounds as PyTorch's
operators, each in a CUDA graph with cold caches; of norms of groups the same by Inductor, too.
PyTorch's are the norm, the addition and the activation, and what eager mode saves between
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
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from benchmarks.kernels.conv_vs_cudnn import copy_bandwidth, interleaved_ms
from benchmarks.provenance import folder_of, provenance, write
from confpred.data.suites import read_suite
from confpred.families.protocol import Family, config_dict
from confpred.families.registry import kernels_of, operation_named, operation_of
from confpred.problem.activation import activated, argument_grad, saved_of
from confpred.problem.device import Device, get_device
from confpred.problem.norm import DIRECTIONS, EPS, BatchNorm
from confpred.problem.norm_of_groups import AFFINE, NORM, Norm
from confpred.problem.operation import SCRATCH, ZEROED, KernelSpec
from confpred.problem.record import Record

HOLDOUT = Path(__file__).parents[2] / "datasets" / "suites" / "group_norm" / "holdout.json"
LEAST_BYTES = 2**22  # of a hold-out's tensor
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


def problems(groups: bool = False) -> list[Any]:
    """Return the layers, in both directions; or the hold-out's norms of `groups`, large ones
    first."""
    if groups:
        held = [entry.problem for entry in read_suite(HOLDOUT).entries]
        large = [problem for problem in held if problem.tensor_bytes > LEAST_BYTES]
        return sorted(large, key=lambda problem: -problem.tensor_bytes)
    return [
        BatchNorm(n, side, side, c, activation=activation, residual=residual, direction=direction)
        for n, c, side, activation, residual in LAYERS
        for direction in DIRECTIONS
    ]


def rows_of(
    family: Family, problem: Any, device: Device, most: int, left_out: Sequence[int]
) -> list[int]:
    """Return the legal configs of a family without those `left_out`; a random choice of `most`."""
    rows = [r for r in np.flatnonzero(family.legal(problem, device)) if r not in left_out]
    chosen = random.Random(str(problem)).sample(rows, min(most, len(rows)))
    return sorted(int(row) for row in chosen)


def kernels(device: Device, most: int, groups: bool = False) -> list[KernelSpec]:
    """Return every kernel that a run needs."""
    found: dict[KernelSpec, None] = {}
    for problem in problems(groups):
        for family in kernels_of(problem).values():
            for row in rows_of(family, problem, device, most, ()):
                found.update(dict.fromkeys(family.launch(problem, row).kernels))
        operation = operation_of(problem)
        for output in operation.operands(problem):
            if output.terms:
                found[operation.reference(problem, output.name).kernel] = None
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


def let_inductor_compile(asked: Sequence[Norm]) -> None:
    """Fill Inductor's cache with its code of norms, side by side."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        list(pool.map(_inductor_compiles, asked))


def _inductor_compiles(problem: Norm) -> None:
    import torch
    from torch._inductor import config

    config.compile_threads = 1  # in this process alone, as there is one a core
    torch.cuda.set_device(0)
    with suppress(Exception):  # the process that measures meets it again, and names it
        by_inductor(problem)(inputs_of(problem, 1)[0])


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
    kind = operation_named(job["operation"]).problem
    for words in job["problems"]:
        if time.time() > job["end"]:
            break
        try:
            result = one(kind.parse(words), device, bandwidth, evict, job)
        except Exception as error:  # the others still count
            result = {"problem": words, "failed": f"{type(error).__name__}: {error}"[:300]}
        say(result=result)
        torch.cuda.empty_cache()


def one(
    problem: Any, device: Device, bandwidth: float, evict: Any, job: Mapping[str, Any]
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

    from confpred.launch.runner import bound

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
    problem: Any, family: Family, row: int, bandwidth: float, evict: Any
) -> dict[str, Any]:
    """Time a config twice, PyTorch's operators and Inductor's, in the same rounds on the same
    inputs."""
    from confpred.cuda import driver
    from confpred.measure import pytorch as operator
    from confpred.measure import timing

    say(begun=[str(problem), family.name, row])
    facts = driver.device_of(0)
    launches = timing.launches_a_replay(2 * facts.roofline_s(problem))
    # Two sets at least: the next launch must not find what the last one left in the L2 cache.
    copies = max(2, operator.copies_for(problem, launches, facts.l2_bytes))
    operation = operation_of(problem)
    sets = inputs_of(problem, min(copies, launches))
    ours = call_of(family, problem, row)

    def theirs(tensors: dict[str, Any]) -> Any:
        return operation.pytorch(problem, tensors)

    one, other = ours(sets[0])[0].float(), theirs(sets[0])
    other = (other[0] if problem.is_backward else other).float()
    if other.shape != one.shape:  # channels first
        other = other.movedim(1, -1)
    difference = float((one - other).norm() / other.norm())
    calls, rival = [theirs, ours, ours], dict[str, float]()
    if isinstance(problem, Norm):
        calls.append(by_inductor(problem))
        other = calls[-1](sets[0])
        other = (other[0] if problem.is_backward else other).float()
        rival["inductor_difference"] = float((one - other).norm() / other.norm())
    del one, other
    turns = [sets[i % len(sets)] for i in range(launches)]
    pytorch_ms, ours_ms, again_ms, *inductor_ms = interleaved_ms(calls, turns, evict)
    floor_ms = 1e3 * problem.passes * problem.tensor_bytes / bandwidth
    mean_ms = (ours_ms + again_ms) / 2
    if inductor_ms:
        rival |= {"inductor_ms": inductor_ms[0], "over_inductor": inductor_ms[0] / mean_ms}
    return rival | {
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


def inputs_of(problem: Any, count: int) -> list[dict[str, Any]]:
    """Return `count` sets of what PyTorch's operators and confpred's kernels take."""
    from confpred.measure import pytorch as operator

    sets = operator.operands(operation_of(problem), problem, count)
    for tensors in sets if problem.is_backward else ():
        tensors |= statistics_of(problem, tensors)
    return sets


def statistics_of(problem: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean and 1 over the deviation that backward takes."""
    if not isinstance(problem, Norm):
        return {"mean": tensors["saved_mean"], "invstd": tensors["saved_invstd"]}
    p = problem
    x = tensors["in"].float().view(p.n, p.p, p.groups, p.width)
    mean = x.mean((1, 3)) * p.centred
    invstd = ((x - mean[:, None, :, None]).square().mean((1, 3)) + EPS).rsqrt()
    return {"mean": mean, "invstd": invstd}


def by_inductor(problem: Norm) -> Callable[[dict[str, Any]], Any]:
    """Return a function from inputs by name to what the problem asks for, by code that Inductor
    makes of the norm's operators, of channels-last activations. Backward computes the activation's
    argument again, from the input and the statistics, as Inductor's own backward graphs do."""
    import torch
    import torch.nn.functional as F

    # Else Dynamo counts this function's graphs of other problems, and soon runs it as it is.
    torch._dynamo.reset()
    p, aten = problem, torch.ops.aten

    def of_channels(vector: Any) -> Any:
        return vector[..., None] if p.adaptive else vector[:, None]

    def after(out: Any, t: Mapping[str, Any]) -> Any:
        return out + t["residual"].transpose(1, 2) if p.residual else out

    def scaled(out: Any, t: Mapping[str, Any]) -> Any:
        out = out * of_channels(t["weight"]) if "weight" in t else out
        return out + of_channels(t["bias"]) if "bias" in t else out

    def forward(t: dict[str, Any]) -> Any:
        x = t["in"].float() if p.is_widened else t["in"]
        if not p.is_of_rows:
            out = F.group_norm(x.transpose(1, 2), p.groups, eps=EPS)
        else:
            norm = F.layer_norm if p.centred else F.rms_norm
            out = norm(x, (p.c,), eps=EPS).transpose(1, 2)
        out = activated(p.activation, after(scaled(out, t), t))
        return out.transpose(1, 2).to(t["in"].dtype)

    def backward(t: dict[str, Any]) -> Any:
        wide = torch.float32 if p.is_widened else t["in"].dtype
        x, grad = (t[name].to(wide).transpose(1, 2) for name in ("in", "out_grad"))
        mean, invstd = t.get("mean"), t["invstd"]
        grouped = x.reshape(p.n, p.groups, p.width, p.p)
        grouped = grouped if mean is None else grouped - mean[..., None, None]
        unit = (grouped * invstd[..., None, None]).reshape(x.shape).to(wide)
        argument = after(scaled(unit, t), t)
        grad = argument_grad(p.activation, grad, saved_of(p.activation, argument).to(grad.dtype))
        weight, bias = t.get("weight"), t.get("bias")
        own: list[Any] = []
        if p.adaptive:
            own = [(grad * unit).sum(2), grad.sum(2)][: AFFINE.index(p.affine)]
            inner, weight, bias = grad * of_channels(weight), None, None
        else:
            inner = grad
        mask = [True, weight is not None, bias is not None]
        if p.is_of_rows and mean is not None:
            rows = (inner.transpose(1, 2), x.transpose(1, 2), [p.c], mean[..., None])
            found = aten.native_layer_norm_backward(*rows, invstd[..., None], weight, bias, mask)
        elif p.is_of_rows:
            rows = (inner.transpose(1, 2), x.transpose(1, 2), [p.c], invstd[..., None])
            found = (*aten._fused_rms_norm_backward(*rows, weight, mask[:2]), inner.sum((0, 2)))
        else:
            found = aten.native_group_norm_backward(
                inner, x, mean, invstd, weight, p.n, p.c, p.p, p.groups, mask
            )
            found = found[0].transpose(1, 2), *found[1:]
        more = (grad.transpose(1, 2).to(t["in"].dtype),) if p.residual else ()
        return found[0].to(t["in"].dtype), *more, *own, *found[1 : 1 + sum(mask[1:])]

    compiled: Callable[[dict[str, Any]], Any] = torch.compile(
        backward if p.is_backward else forward, dynamic=False
    )
    names = [o.name for o in NORM.operands(p) if not o.terms and o.name != "eps"]
    return lambda tensors: compiled({name: tensors[name] for name in names})


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
            over = [r["over_inductor"] for r in here if "over_inductor" in r]
            found[direction] = {
                "layers": len(here),
                "speedup": geometric_mean(speeds),
                "least": min(speeds),
                **(
                    {"over_inductor": geometric_mean(over), "least_over": min(over)} if over else {}
                ),
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
    parser.add_argument("--groups", action="store_true", help="norms of groups of the hold-out")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(json.loads(sys.stdin.readline()))
        return
    start, device = time.time(), get_device(arguments.device)
    asked = problems(arguments.groups)
    errors = compiled(kernels(device, arguments.configs, arguments.groups), device.arch)
    if arguments.groups:
        let_inductor_compile(asked)
    print(f"compiled in {time.time() - start:.0f} s", *errors, sep="\n")
    job = {
        "operation": operation_of(asked[0]).name,
        "problems": [str(problem) for problem in asked],
        "end": start + arguments.seconds,
        "configs": arguments.configs,
    }
    found = watched(job, [sys.executable, "-m", "benchmarks.kernels.norms", "--work"])
    results = found["results"]
    print(table(results))
    name = "group_norm" if arguments.groups else "batch_norm"
    record(name, found, summary(results), errors, arguments.out)


if __name__ == "__main__":
    main()
