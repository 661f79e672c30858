"""Is the config that is fastest alone the fastest inside a network too?

    python -m benchmarks.kernels.in_situ [--model FOLDER] [--out FOLDER]
    python -m benchmarks.kernels.in_situ --render    # table and plot of the recorded result

Alone means our timing protocol (`confpred.measure.timing`): launches back to back, operands from
device memory. In situ, each layer stands in a stack of residual blocks (1x1 convolution, norm,
activation, the layer, norm, activation, 1x1 convolution, sum), where its input was just written by
another kernel, and its own kernels are timed one by one by CUPTI, through torch.profiler. The same
configs are timed both ways in the same process: some of those that the predictor ranks first and
some random ones, chosen to span the range of times, and PyTorch's own operator in cuDNN's benchmark
mode.

Published for each layer: how well the two rankings of our configs agree (Spearman's rho, Kendall's
tau), and the in-situ regret, which is the in-situ time of the config that is fastest alone, or that
the predictor chose, over that of the config that is fastest in situ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.kernels.conv_vs_cudnn import compile_all, our_call
from benchmarks.provenance import RESULTS, provenance, write
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.registry import all_families
from confpred.problem.conv2d import CONVOLUTION, Problem

if TYPE_CHECKING:
    import torch

    from confpred.predict.predictor import Predictor
    from confpred.problem.device import Device

NAME = "in_situ"
#: The networks' own layers, of unit stride, so that a block can add its input to its output.
LAYERS = (
    ("efficientnet_b0", "n=128 c=144 h=56 w=56 k=144 r=3 s=3 padding=1 groups=144"),
    ("efficientnet_b0", "n=128 c=240 h=28 w=28 k=240 r=5 s=5 padding=2 groups=240"),
    ("efficientnet_b0", "n=128 c=480 h=14 w=14 k=480 r=3 s=3 padding=1 groups=480"),
    ("efficientnet_b0", "n=64 c=1152 h=7 w=7 k=1152 r=5 s=5 padding=2 groups=1152"),
    ("mobilenetv2_100", "n=64 c=192 h=28 w=28 k=192 r=3 s=3 padding=1 groups=192"),
    ("mobilenetv2_100", "n=64 c=960 h=7 w=7 k=960 r=3 s=3 padding=1 groups=960"),
    ("convnext_tiny", "n=64 c=96 h=56 w=56 k=96 r=7 s=7 padding=3 groups=96"),
    ("convnext_tiny", "n=64 c=384 h=14 w=14 k=384 r=7 s=7 padding=3 groups=384"),
    ("resnext50_32x4d", "n=64 c=128 h=56 w=56 k=128 r=3 s=3 padding=1 groups=32"),
    ("resnext50_32x4d", "n=128 c=256 h=28 w=28 k=256 r=3 s=3 padding=1 groups=32"),
    ("resnext50_32x4d", "n=128 c=512 h=14 w=14 k=512 r=3 s=3 padding=1 groups=32"),
    ("resnext50_32x4d", "n=64 c=1024 h=7 w=7 k=1024 r=3 s=3 padding=1 groups=32"),
    ("resnext101_32x8d", "n=64 c=256 h=56 w=56 k=256 r=3 s=3 padding=1 groups=32"),
    ("resnext101_32x8d", "n=64 c=512 h=28 w=28 k=512 r=3 s=3 padding=1 groups=32"),
    ("regnetx_008", "n=128 c=288 h=14 w=14 k=288 r=3 s=3 padding=1 groups=18"),
    ("regnety_040", "n=64 c=512 h=14 w=14 k=512 r=3 s=3 padding=1 groups=8"),
)
BLOCKS = 4
ROUNDS = 8
RANKED, RANDOM, CHOSEN = 12, 12, 8
#: Configs that take longer than this many times the fastest one's time are not considered.
RANGE = 3.0
_UNDER_TEST = "the layer under test"

Call = Callable[["torch.Tensor"], "torch.Tensor"]


def candidates(predictor: Predictor, problem: Problem, device: Device) -> list[Candidate]:
    """Return the predictor's first configs, best first, and random legal ones after them."""
    ranked = predictor.rank(problem, device, top=RANKED)
    found = [c.candidate for c in ranked if c.candidate != PYTORCH_OPERATOR]
    legal = [
        Candidate(name, int(row))
        for name, family in all_families().items()
        if family.operation is CONVOLUTION
        for row in np.flatnonzero(family.legal(problem, device))
    ]
    return list(dict.fromkeys(found + random.Random(0).sample(legal, min(RANDOM, len(legal)))))


def alone(problem: Problem, configs: Sequence[Candidate]) -> dict[Candidate, float]:
    """Isolated time of each config that works, milliseconds."""
    from confpred.measure.kernels import measure

    times = {}
    for name in dict.fromkeys(config.provider for config in configs):
        rows = [config.config_id for config in configs if config.provider == name]
        for outcome in measure(
            problem, all_families()[name], rows, ordinal=0, seed=0, report=lambda _row: None
        ):
            if outcome.status == "ok":
                times[Candidate(name, outcome.config_id)] = outcome.time_ms
    return times


def spread(times: Mapping[Candidate, float], predicted: Candidate) -> list[Candidate]:
    """Return the fastest, the predicted one, and others at even steps of rank up to `RANGE`."""
    ordered = sorted(times, key=times.__getitem__)
    near = [config for config in ordered if times[config] <= RANGE * times[ordered[0]]]
    steps = np.linspace(0, len(near) - 1, min(CHOSEN, len(near))).round().astype(int)
    return list(dict.fromkeys([*(near[i] for i in steps), predicted]))


class Stack:
    """Blocks around a layer; their weights are random, their sizes the layer's."""

    def __init__(self, problem: Problem) -> None:
        import torch

        def pointwise() -> torch.nn.Module:
            return torch.nn.Conv2d(problem.c, problem.c, 1, bias=False)

        def norm() -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.BatchNorm2d(problem.c), torch.nn.SiLU())

        blocks = torch.nn.ModuleList(
            torch.nn.ModuleList([pointwise(), norm(), norm(), pointwise()]) for _ in range(BLOCKS)
        )
        self._blocks = blocks.cuda().half().eval().to(memory_format=torch.channels_last)
        x = torch.randn(problem.n, problem.h, problem.w, problem.c, device="cuda")
        self._x = x.half().permute(0, 3, 1, 2)

    def __call__(self, layer: Call) -> None:
        x = self._x
        for expand, first, second, project in self._blocks:  # type: ignore[misc]
            x = x + project(second(layer(first(expand(x)))))


def in_situ(problem: Problem, configs: Sequence[Candidate], device: Device) -> list[float]:
    """Median time of the layer's kernels inside the stack, in milliseconds: for each config, then
    for PyTorch's operator."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    inputs = {
        o.name: torch.randn(o.shape, device="cuda").half()
        for o in CONVOLUTION.operands(problem)
        if o.name == "filter"
    }

    def ours(config: Candidate) -> Call:
        launch = all_families()[config.provider].launch(problem, config.config_id)
        call = our_call(problem, launch, device)
        return lambda x: call(inputs | {"in": x.permute(0, 2, 3, 1)})[0].permute(0, 3, 1, 2)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        with record_function(_UNDER_TEST):
            out: torch.Tensor = CONVOLUTION.pytorch(problem, inputs | {"in": x.permute(0, 2, 3, 1)})
        return out

    torch.backends.cudnn.benchmark = True
    stack, calls = Stack(problem), [ours(config) for config in configs]
    for call in (*calls, theirs):
        stack(call)  # a warm-up: libraries choose algorithms, modules are loaded
    order = [index for _ in range(ROUNDS) for index in random.sample(range(len(calls)), len(calls))]
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for index in order:
            stack(calls[index])
        for _ in range(ROUNDS):
            stack(theirs)
        torch.cuda.synchronize()
    events = profiler.events()
    # Launches on one stream run in order, so the order of our kernels tells whose they are.
    steps = [all_families()[c.provider].launch(problem, c.config_id).steps for c in configs]
    entries = {step.kernel.entry for step in itertools.chain.from_iterable(steps)}
    durations = iter(
        event.time_range.elapsed_us()
        for event in sorted(events, key=lambda event: event.time_range.start)
        if event.name in entries and event.device_type == torch.autograd.DeviceType.CUDA
    )
    times: list[list[float]] = [[] for _ in configs]
    for index, _ in itertools.product(order, range(BLOCKS)):
        times[index].append(sum(next(durations) for _ in steps[index]))
    times.append(
        [
            _kernel_us(event)
            for event in events
            if event.name == _UNDER_TEST and event.device_type == torch.autograd.DeviceType.CPU
        ]
    )
    return [statistics.median(values) / 1e3 for values in times]


def _kernel_us(event: Any) -> float:
    """Microseconds of all kernels that an operator, and the operators that it calls, launched."""
    own = sum(kernel.duration for kernel in event.kernels)
    return float(own + sum(_kernel_us(child) for child in event.cpu_children))


def examine(
    network: str, problem: Problem, configs: Sequence[Candidate], device: Device
) -> dict[str, Any]:
    """One layer: both times of each config, and what follows from them."""
    import torch

    from confpred.measure.pytorch import measure_pytorch

    isolated = alone(problem, configs)
    predicted = next(config for config in configs if config in isolated)
    chosen = spread(isolated, predicted)
    theirs = measure_pytorch(CONVOLUTION, problem, ordinal=0, seed=0)
    with torch.inference_mode():
        *inside, theirs_inside = in_situ(problem, chosen, device)
    torch.cuda.empty_cache()
    outside = [isolated[config] for config in chosen]
    rho, tau = agreement(outside, inside)
    return {
        "network": network,
        "problem": str(problem),
        "configs": [
            {
                "family": config.provider,
                "row": config.config_id,
                "predicted": config == predicted,
                "alone_ms": isolated[config],
                "in_situ_ms": ms,
            }
            for config, ms in zip(chosen, inside, strict=True)
        ],
        "pytorch": {"alone_ms": theirs.time_ms, "in_situ_ms": theirs_inside},
        "spearman": rho,
        "kendall": tau,
        "regret_of_fastest_alone": inside[int(np.argmin(outside))] / min(inside),
        "regret_of_predicted": inside[chosen.index(predicted)] / min(inside),
    }


def agreement(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Spearman's rho and Kendall's tau of two lists of times; ties are not expected."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    pairs = list(itertools.combinations(zip(a, b, strict=True), 2))
    signs = [np.sign((x[0] - y[0]) * (x[1] - y[1])) for x, y in pairs]
    return float(np.corrcoef(*ranks)[0, 1]), float(np.mean(signs))


def measure_all(model: Path | None) -> dict[str, Any]:
    """Return the whole check."""
    from confpred.cuda import driver
    from confpred.predict.predictor import Predictor

    predictor, device = Predictor.load(model), driver.device_of(0)
    driver.make_current(0)
    tasks = []
    for network, text in LAYERS:
        problem = Problem.parse(text)
        if configs := candidates(predictor, problem, device):
            tasks.append((network, problem, configs))
    launches = [
        all_families()[name].launch(problem, row)
        for _, problem, configs in tasks
        for name, row in configs
    ]
    compile_all({step.kernel: None for launch in launches for step in launch.steps}, device.arch)
    layers = [examine(network, problem, configs, device) for network, problem, configs in tasks]
    known = predictor.models.get(device.key)
    return provenance("torch", gpu=True) | {
        "model": known.version if known else None,
        "blocks": BLOCKS,
        "layers": layers,
        "mean_spearman": statistics.mean(layer["spearman"] for layer in layers),
        "mean_kendall": statistics.mean(layer["kendall"] for layer in layers),
        **{
            f"geomean_{key}": statistics.geometric_mean(layer[key] for layer in layers)
            for key in ("regret_of_fastest_alone", "regret_of_predicted")
        },
    }


def show(result: Mapping[str, Any]) -> None:
    """Print the table of the result."""
    for layer in result["layers"]:
        print(
            f"{layer['network']:18s} {layer['problem']:68s} {len(layer['configs']):2d} configs"
            f"  rho {layer['spearman']:5.2f}  tau {layer['kendall']:5.2f}"
            f"  regret: fastest alone {layer['regret_of_fastest_alone']:.3f},"
            f" predicted {layer['regret_of_predicted']:.3f}"
        )
    print(
        f"mean rho {result['mean_spearman']:.3f}, tau {result['mean_kendall']:.3f}; geomean regret"
        f" of the fastest alone {result['geomean_regret_of_fastest_alone']:.3f},"
        f" of the predicted {result['geomean_regret_of_predicted']:.3f}"
    )


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Both times of every config, each relative to the layer's fastest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    ax = figure.add_subplot()
    for layer in result["layers"]:
        times = np.array([(c["alone_ms"], c["in_situ_ms"]) for c in layer["configs"]])
        alone_times, in_situ_times = (times / times.min(axis=0)).T
        label = f"{layer['network']} c={Problem.parse(layer['problem']).c}"
        ax.plot(alone_times, in_situ_times, ".", alpha=0.6, label=label)
    ax.axline((1, 1), slope=1, color="gray", linewidth=0.8, label="equal")
    ax.legend(fontsize=6, frameon=False, title="a config of", title_fontsize=6)
    ax.set(xlabel="time alone / fastest alone", ylabel="time in situ / fastest in situ")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a model folder, in place of the package's")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--render", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    if arguments.render:
        result = json.loads((arguments.out / f"{NAME}.json").read_text())
    else:
        result = measure_all(arguments.model)
        print(f"written: {write(NAME, result, arguments.out)}")
    show(result)
    try:
        plot(result, arguments.out / f"{NAME}.png")
    except ImportError:
        print("no matplotlib here: --render draws the plot where there is")


if __name__ == "__main__":
    main()
