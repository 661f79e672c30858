"""Our choice for real networks' layers against cuDNN's best, in all three directions.

    python -m benchmarks.kernels.conv_vs_cudnn [--model FOLDER] [--minutes 6]
        [--out FOLDER] [--resume]
    python -m benchmarks.kernels.conv_vs_cudnn --render    # table and plot of the recorded result

The layers are the distinct grouped and depthwise ones of `NETWORKS` that our kernels are meant for,
in float16 at each batch of `BATCHES`. cuDNN is timed with its heuristics and with PyTorch's
benchmark mode. Each mode has a process of its own, because PyTorch keeps the first algorithm that
it chose for a shape. In each process our choice is timed twice, in the same rounds as cuDNN, which
shows the noise. Where the choice is PyTorch's own operator, its time is that of cuDNN's best by
definition. The floor is the layer's roofline, with the bandwidth of a large copy measured in the
same process. Several GPUs of one kind share the problems. ``--resume`` continues a run that ended
before all problems were timed; each problem's figures still come from one run and one GPU.

How good is the choice for a network that nobody has measured? For that, train without these:

    exclusions=$(python -m benchmarks.kernels.conv_vs_cudnn --exclusions)
    confpred train datasets/h200 --out /tmp/holdout $exclusions
    python -m benchmarks.kernels.conv_vs_cudnn --model /tmp/holdout

The result says for each problem whether the model's data had it (``seen``: ``problem``), had only
its layer in another batch, direction or dtype (``layer``), or had neither (``no``).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.provenance import DATASETS, RESULTS, provenance, write
from confpred.cuda.compiler import compile_kernel
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.families.registry import all_families
from confpred.problem.conv2d import CONVOLUTION, DIRECTIONS, Problem
from confpred.problem.operation import SCRATCH, ZEROED, KernelSpec, Launch

if TYPE_CHECKING:
    import torch

    from confpred.predict.predictor import Predictor
    from confpred.problem.device import Device

NAME = "conv_vs_cudnn"
NETWORKS = (
    "efficientnet_b0", "efficientnet_b4", "mobilenetv2_100", "mobilenetv3_large_100",
    "mobilenetv4_conv_medium", "mnasnet_100", "convnext_tiny", "fastvit_t8",
    "regnety_004", "regnetx_008", "regnety_040", "resnext50_32x4d", "resnext101_32x8d",
)  # fmt: skip
BATCHES = (32, 128)
GROUP_WIDTHS = (1, 4, 8, 16, 32, 64)
MODES = ("benchmark", "heuristics")
SLOWER = 1.05  # a layer this many times as slow as cuDNN's best counts as lost
SHARE_BATCH = 64  # from this batch on, a layer can be expected to come near the floor


def problems() -> dict[Problem, list[str]]:
    """Return the problems that are timed, each with the networks that have it."""
    content = json.loads((DATASETS / "networks.json").read_text())["networks"]
    found: dict[Problem, list[str]] = {}
    for name in NETWORKS:
        for fields in content[name]:
            sizes = {field: value for field, value in fields.items() if field != "count"}
            layer = Problem.from_json(sizes | {"n": 1})
            if layer.group_width not in GROUP_WIDTHS:
                continue
            for direction in DIRECTIONS:
                if direction == "fprop" or layer.k == layer.c:
                    for n in BATCHES:
                        problem = replace(layer, n=n, direction=direction)
                        found.setdefault(problem, []).append(name)
    return found


def choices(
    predictor: Predictor, device: Device, timed: Collection[str], deadline: float
) -> list[dict[str, Any]]:
    """Return the choice for each problem that is not in `timed`, with its kernels compiled; in
    random order, so that a run that is cut short leaves a fair sample."""
    of_networks = problems()
    order = list(of_networks)
    random.Random(0).shuffle(order)
    order = [problem for problem in order if str(problem) not in timed]
    model = predictor.models.get(device.key)
    measured = {Problem.parse(words) for words in model.measured} if model else set()
    layers = {problem.layer() for problem in measured}
    rows, kernels = [], {}
    for problem in order:
        choice = predictor.choose(problem, device)
        if choice.candidate != PYTORCH_OPERATOR:
            family = all_families()[choice.candidate.provider]
            launch = family.launch(problem, choice.candidate.config_id)
            kernels |= dict.fromkeys(step.kernel for step in launch.steps)
        seen = "problem" if problem in measured else "layer" if problem.layer() in layers else "no"
        answer = choice.to_json()
        rows.append(
            {key: answer[key] for key in ("source", "family", "config_id", "config")}
            | {"problem": str(problem), "networks": of_networks[problem], "seen": seen}
        )
    compile_all(kernels, device.arch)
    print(f"{len(rows)} problems, {len(kernels)} kernels, {deadline - time.time():.0f} s left")
    return rows


def compile_all(kernels: Iterable[KernelSpec], arch: str) -> None:
    """Fill the kernel cache, in as many processes as there are cores."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(compile_kernel, arch=arch), kernels, chunksize=4))


def copy_bandwidth() -> float:
    """Median bandwidth of a 1 GiB device-to-device copy: bytes read plus bytes written a second."""
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


def our_call(
    problem: Problem, launch: Launch, device: Device
) -> Callable[[Mapping[str, torch.Tensor]], list[torch.Tensor]]:
    """Return the launch as a function of the problem's inputs, by name, that returns new
    outputs."""
    import torch

    from confpred.launch.runner import bound

    operands = CONVOLUTION.operands(problem)
    names = [o.name for o in operands]
    enqueue = bound(launch, (*names, ZEROED, SCRATCH), 0)
    zeroed = torch.zeros(launch.zeroed_bytes, dtype=torch.uint8, device="cuda")
    scratch = torch.empty(launch.scratch_bytes, dtype=torch.uint8, device="cuda")

    def call(inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        outputs = {
            o.name: torch.empty(o.shape, dtype=getattr(torch, o.dtype), device="cuda")
            for o in operands
            if o.terms
        }
        tensors = outputs | dict(inputs)
        addresses = [tensors[name].data_ptr() for name in names]
        addresses += [zeroed.data_ptr(), scratch.data_ptr()]
        enqueue(torch.cuda.current_stream().cuda_stream, addresses)
        return list(outputs.values())

    return call


def compare(row: dict[str, Any], bandwidth: float, evict: Any) -> dict[str, Any]:
    """Return the times of one problem in this process, in milliseconds: confpred's twice and
    cuDNN's."""
    from confpred.cuda import driver
    from confpred.measure import pytorch as operator
    from confpred.measure import timing

    problem = Problem.parse(row["problem"])
    driver.make_current(0)
    facts = driver.device_of(0)
    floor_s = replace(facts, dram_bytes_per_s=bandwidth).roofline_s(problem)
    launches = timing.launches_a_replay(2 * floor_s)
    copies = operator.copies_for(problem, launches, facts.l2_bytes)
    sets = operator.operands(CONVOLUTION, problem, copies)
    turns = [sets[i % len(sets)] for i in range(launches)]
    theirs = partial(CONVOLUTION.pytorch, problem)
    calls: list[Callable[..., Any]] = [theirs]
    found: dict[str, Any] = {"floor_ms": floor_s * 1e3}
    if row["family"] is not None:
        launch = all_families()[row["family"]].launch(problem, row["config_id"])
        ours = our_call(problem, launch, facts)
        found["difference"] = _difference(ours(sets[0])[0], theirs(sets[0]), problem)
        calls += [ours, ours]
    names = ("cudnn_ms", "ours_ms", "ours_again_ms")
    return found | dict(zip(names, interleaved_ms(calls, turns, evict), strict=False))


def interleaved_ms(
    calls: Iterable[Callable[..., Any]], turns: Sequence[Any], evict: Any
) -> list[float]:
    """Median milliseconds of each of `calls` on the operands of `turns`, one graph each, timed in
    the same rounds."""
    import torch

    from confpred.cuda import driver
    from confpred.measure import pytorch as operator
    from confpred.measure import timing

    device = driver.make_current(0)
    graphs = [operator.TorchGraph([partial(call, turn) for turn in turns]) for call in calls]
    torch.cuda.synchronize()
    launches = [len(turns)] * len(graphs)
    stream = device.create_stream()
    times = timing.time_interleaved(device, stream, graphs, launches, 0, evict)
    return [t.median_ms for t in times]


def _difference(ours: torch.Tensor, theirs: Any, problem: Problem) -> float:
    """Relative difference of the two outputs in the 2-norm."""
    if problem.direction != "fprop":
        theirs = theirs[DIRECTIONS.index(problem.direction) - 1]
    theirs = theirs.permute(0, 2, 3, 1).float()
    return float((ours.float() - theirs).norm() / theirs.norm())


def run_mode(mode: str, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return the times of as many of `rows` as there is time for."""
    import torch

    from confpred.cuda import driver
    from confpred.measure import pytorch as operator

    end = time.time() + seconds
    torch.backends.cudnn.benchmark = mode == "benchmark"
    driver.make_current(0)
    bandwidth, evict = copy_bandwidth(), operator.Evictor(driver.device_of(0).l2_bytes)
    times: list[dict[str, Any]] = []
    for row in rows:
        if time.time() > end:
            break
        times.append(compare(row, bandwidth, evict))
        torch.cuda.empty_cache()  # the next problem's tensors have other sizes
    return {
        "copy_bytes_per_s": bandwidth,
        "times": times,
    }


def joined(row: dict[str, Any], times: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One problem of the result, made from what both processes measured.

    Where a confpred kernel is chosen, each process compares it with its own cuDNN, and the smaller
    ratio counts.
    """
    cudnn = {f"cudnn_{mode}_ms": times[mode]["cudnn_ms"] for mode in MODES}
    floor = times["heuristics"]["floor_ms"]
    if row["family"] is None:
        best = min(cudnn.values())
        figures = {"ours_ms": best, "speedup": 1.0, "floor_share": floor / best}
    else:
        both = [times[mode] for mode in MODES]
        figures = {
            "ours_ms": statistics.mean(t["ours_ms"] for t in both),
            "speedup": min(t["cudnn_ms"] / t["ours_ms"] for t in both),
            "floor_share": min(t["floor_ms"] / t["ours_ms"] for t in both),
            "noise": max(abs(t["ours_again_ms"] / t["ours_ms"] - 1) for t in both),
            "difference": max(t["difference"] for t in both),
        }
    return row | {"floor_ms": floor} | cudnn | figures


def kind_of(layer: Mapping[str, Any]) -> str:
    """``depthwise`` or ``grouped``."""
    return "depthwise" if Problem.parse(layer["problem"]).group_width == 1 else "grouped"


def summary(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geomeans by kind of layer and direction."""
    parts: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for layer in layers:
        parts[kind_of(layer), Problem.parse(layer["problem"]).direction].append(layer)
    return [
        {
            "kind": kind,
            "direction": direction,
            "problems": len(part),
            "speedup": _geomean(layer["speedup"] for layer in part),
            "cudnn_floor_share": _geomean(
                layer["floor_ms"] / min(layer[f"cudnn_{mode}_ms"] for mode in MODES)
                for layer in part
                if Problem.parse(layer["problem"]).n >= SHARE_BATCH
            ),
            "floor_share": _geomean(
                layer["floor_share"]
                for layer in part
                if Problem.parse(layer["problem"]).n >= SHARE_BATCH
            ),
            "pytorch_chosen": sum(layer["family"] is None for layer in part),
            "slower": sum(layer["speedup"] < 1 / SLOWER for layer in part),
            "worst": min(layer["speedup"] for layer in part),
        }
        for (kind, direction), part in sorted(
            parts.items(), key=lambda item: (item[0][0], DIRECTIONS.index(item[0][1]))
        )
    ]


def _geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(statistics.mean(logs)) if logs else None


def show(result: Mapping[str, Any]) -> None:
    """Print the table of the result."""
    print(
        f"{'':20s} {'problems':>8s} {'speedup':>8s} {'floor share':>12s} {'cuDNN share':>12s}"
        f" {'PyTorch':>8s} {'slower':>7s} {'worst':>6s}"
    )
    for part in result["summary"]:
        shares = (part["floor_share"] or math.nan, part["cudnn_floor_share"] or math.nan)
        print(
            f"{part['kind'] + ' ' + part['direction']:20s} {part['problems']:8d}"
            f" {part['speedup']:7.2f}x {shares[0]:12.2f} {shares[1]:12.2f}"
            f" {part['pytorch_chosen']:8d} {part['slower']:7d} {part['worst']:6.2f}"
        )


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Speedup over cuDNN's best of each layer beside its share of the floor, by direction."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, len(DIRECTIONS), sharey=True)
    for ax, direction in zip(axes, DIRECTIONS, strict=True):
        for kind, marker in (("depthwise", "o"), ("grouped", "^")):
            part = [
                layer
                for layer in result["layers"]
                if Problem.parse(layer["problem"]).direction == direction and kind_of(layer) == kind
            ]
            ax.scatter(
                [layer["floor_share"] for layer in part],
                [layer["speedup"] for layer in part],
                marker=marker,
                s=14,
                alpha=0.7,
                label=kind,
            )
        ax.axhline(1, color="gray", linewidth=0.8)
        ax.set(title=direction, xlabel="share of the roofline floor", yscale="log", xlim=(0, 1.05))
    axes[0].set_ylabel("times as fast as cuDNN's best")
    axes[0].legend()
    figure.savefig(path, dpi=130)


def earlier_layers(earlier: Mapping[str, Any], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the layers of an `earlier` result, if `facts` say that it is of the same code and
    machine.

    Raises:
        SystemExit: it is of other code or of another machine.
    """
    for name in ("commit", "device", "driver", "nvrtc", "cudnn", "versions", "model"):
        if earlier[name] != facts[name]:
            raise SystemExit(
                f"--resume: the result is of {name} {earlier[name]}, not {facts[name]}"
            )
    layers: list[dict[str, Any]] = earlier["layers"]
    return layers


def visible_gpus() -> list[str]:
    """Return the GPUs that may be used, as ``CUDA_VISIBLE_DEVICES`` names them."""
    from confpred.cuda import driver

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(driver.device_count())]


def measure_on(gpu: str, rows: list[dict[str, Any]], deadline: float) -> dict[str, Any]:
    """Return the layers of the result that one GPU has time for, and its bandwidth in each
    process."""
    runs: dict[str, Any] = {}
    for left, mode in zip((2, 1), MODES, strict=True):  # processes still to run, this one included
        job = {"rows": rows, "seconds": (deadline - time.time()) / left}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.kernels.conv_vs_cudnn", "--mode", mode],
            input=json.dumps(job),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
        )
        runs[mode] = json.loads(done.stdout.splitlines()[-1])
        rows = rows[: len(runs[mode]["times"])]
    return {
        "copy_bytes_per_s": {mode: runs[mode]["copy_bytes_per_s"] for mode in MODES},
        "layers": [
            joined(row, {mode: runs[mode]["times"][index] for mode in MODES})
            for index, row in enumerate(rows)
        ],
    }


def measure(model: Path | None, minutes: float, earlier: Mapping[str, Any] | None) -> Any:
    """Return the whole benchmark, or the part of it that `earlier` lacks, in about `minutes`."""
    import torch

    from confpred.cuda import driver
    from confpred.predict.predictor import Predictor

    deadline = time.time() + 60 * minutes
    predictor, device = Predictor.load(model), driver.device_of(0)
    known = predictor.models.get(device.key)
    facts = provenance("torch", gpu=True) | {
        "cudnn": torch.backends.cudnn.version(),
        "model": known.version if known else None,
    }
    before = earlier_layers(earlier, facts) if earlier else []
    rows = choices(predictor, device, {layer["problem"] for layer in before}, deadline)
    gpus = visible_gpus()
    with ThreadPoolExecutor(len(gpus)) as pool:
        shares = [rows[index :: len(gpus)] for index in range(len(gpus))]
        done = list(pool.map(partial(measure_on, deadline=deadline), gpus, shares))
    layers = before + [layer for part in done for layer in part["layers"]]
    return facts | {
        "excluded_networks": known.card.data.excluded_networks if known else [],
        "networks": NETWORKS,
        "problems_left_out": len(problems()) - len(layers),
        "copy_bytes_per_s": [part["copy_bytes_per_s"] for part in done],
        "summary": summary(layers),
        "layers": sorted(layers, key=lambda layer: str(layer["problem"])),
    }


def exclusions() -> str:
    """Options of ``confpred train`` that keep the benchmark's networks out of a model."""
    suites = [json.loads((DATASETS / "suites" / f"{d}.json").read_text()) for d in DIRECTIONS]
    known = {name for suite in suites for p in suite["problems"] for name in p["networks"]}
    return " ".join(f"--exclude-network {name}" for name in NETWORKS if name in known)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a model folder, in place of the package's")
    parser.add_argument("--minutes", type=float, default=6.0, help="stop after about this long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true", help="measure what the result lacks")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--exclusions", action="store_true", help="options for a hold-out model")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.exclusions:
        print(exclusions())
        return
    if arguments.mode:
        job = json.load(sys.stdin)
        print(json.dumps(run_mode(arguments.mode, job["rows"], job["seconds"])))
        return
    recorded = None
    if arguments.render or arguments.resume:
        recorded = json.loads((arguments.out / f"{NAME}.json").read_text())
    if arguments.render:
        result = recorded
    else:
        result = measure(arguments.model, arguments.minutes, recorded)
        print(f"written: {write(NAME, result, arguments.out)}")
    show(result)
    try:
        plot(result, arguments.out / f"{NAME}.png")
    except ImportError:
        print("no matplotlib here: --render draws the plot where there is")


if __name__ == "__main__":
    main()
