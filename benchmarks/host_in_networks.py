"""Where the host's time goes in whole networks: what `confpred.enable` costs an eager step.

    python benchmarks/host_in_networks.py [--networks A,B] [--batches 1,32] [--out FOLDER]

A layer that is called again and again is quick, as the processor's caches hold all that it needs;
between two layers of a network they hold other things. So inference of timm's networks, eagerly in
float16 as in ``networks.py``, is timed in turns in one process: without confpred, twice, which is
the noise; enabled; and enabled with no layer ours (``max_regret=1``), which is what looking costs.
A turn is some steps that are not timed, as what entering its context has emptied is filled again,
and then ``--steps`` steps: the clock of the host until the last is launched, and until the device
is done. The result is the median over the rounds; the ratio to the steps without confpred is that
of the same round.

Then each call of ``nn.Conv2d`` is timed within such steps, the clock's own tenth of a microsecond
included: the sums over the layers of a network, each at its median.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from network_models import (
    Setting,
    Step,
    images_and_labels,
    lively_network,
    prepared,
    step_of,
)
from network_steps import UNTIMED
from provenance import RESULTS, provenance, write
from torch import nn

import confpred

Around = Callable[[], AbstractContextManager[Any]]
WITHOUT, AGAIN, ENABLED, LOOKING = "eager", "eager again", "enabled", "enabled, none ours"
WAYS: dict[str, Around] = {
    WITHOUT: nullcontext,
    AGAIN: nullcontext,
    ENABLED: partial(confpred.enabled, wait=True),  # type: ignore[attr-defined]
    LOOKING: partial(confpred.enabled, wait=True, max_regret=1.0),  # type: ignore[attr-defined]
}
NETWORKS = ("efficientnet_b0", "mobilenetv3_large_100", "regnety_040", "convnext_tiny")


@dataclass(frozen=True, slots=True)
class Way:
    """A way of running a network: one step, and what makes the context of its turns."""

    step: Step
    around: Around


def ways_of(setting: Setting) -> dict[str, Way]:
    """Each with its own copy of the weights, warm."""
    base, data = lively_network(setting), images_and_labels(setting)
    found = {}
    for name, around in WAYS.items():
        model = prepared(base, setting)
        way = Way(step_of(model, model, setting, data), around)
        with way.around():
            for _ in range(UNTIMED):
                way.step()
        found[name] = way
    setting.synchronize()
    return found


def turn(way: Way, steps: int, setting: Setting) -> tuple[float, float]:
    """Milliseconds a step: until all are launched, and until the device is done."""
    with way.around():
        for _ in range(UNTIMED):
            way.step()
        setting.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            way.step()
        launched = time.perf_counter()
        setting.synchronize()
        done = time.perf_counter()
    return (launched - start) / steps * 1e3, (done - start) / steps * 1e3


def steps_of(
    ways: Mapping[str, Way], setting: Setting, rounds: int, steps: int
) -> list[dict[str, Any]]:
    """A row of each way."""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            times[name].append(turn(ways[name], steps, setting))
    return [
        {
            "way": name,
            "host_ms": statistics.median(host for host, _ in found),
            "step_ms": statistics.median(whole for _, whole in found),
            "ratio": statistics.median(
                plain / ours for (_, plain), (_, ours) in zip(times[WITHOUT], found, strict=True)
            ),
        }
        for name, found in times.items()
    ]


@contextmanager
def timed_calls() -> Iterator[dict[nn.Conv2d, list[float]]]:
    """The microseconds of each call of each layer inside the block."""
    found: dict[nn.Conv2d, list[float]] = defaultdict(list)
    inner = nn.Conv2d.forward

    def forward(self: nn.Conv2d, *given: Any) -> Any:
        start = time.perf_counter()
        out = inner(self, *given)
        found[self].append((time.perf_counter() - start) * 1e6)
        return out

    nn.Conv2d.forward = forward  # type: ignore[method-assign]
    try:
        yield found
    finally:
        nn.Conv2d.forward = inner  # type: ignore[method-assign]


def calls_of(way: Way, setting: Setting, steps: int) -> dict[str, Any]:
    """Layers and microseconds a step, by kind of layer."""
    with way.around(), timed_calls() as calls:
        for _ in range(UNTIMED):
            way.step()
        calls.clear()
        for _ in range(steps):
            way.step()
        setting.synchronize()
    by_kind: dict[str, list[float]] = {"dense": [], "grouped": []}
    for layer, times in calls.items():
        by_kind["grouped" if layer.groups > 1 else "dense"].append(statistics.median(times))
    return {kind: {"layers": len(each), "us": sum(each)} for kind, each in by_kind.items()}


def measure(setting: Setting, rounds: int, steps: int) -> list[dict[str, Any]]:
    ways = ways_of(setting)
    rows = steps_of(ways, setting, rounds, steps)
    where = {"network": setting.network, "batch": setting.batch}
    return [
        where | row | {"calls": calls_of(ways[row["way"]], setting, 2 * steps)}
        for row in sorted(rows, key=lambda row: list(ways).index(row["way"]))
    ]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = {"type": lambda text: text.split(","), "default": list(NETWORKS)}
    parser.add_argument("--networks", help="timm's names, with commas", **names)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial")
    parser.add_argument("--size", type=int, default=224, help="of images; other sizes are a trial")
    parser.add_argument("--out", type=Path, default=RESULTS, help="as in benchmarks/results/h200")
    arguments = parser.parse_args()
    trial = arguments.device == "cpu" or arguments.size != 224
    if trial and RESULTS.resolve() in (arguments.out.resolve(), *arguments.out.resolve().parents):
        parser.error("a trial is written somewhere else: name a folder with --out")
    return arguments


def main() -> None:
    arguments = parsed()
    torch.backends.cudnn.benchmark = True
    random.seed(0)
    packages = ("torch", "timm") if arguments.device == "cpu" else ("torch", "timm", "cuda-core")
    result = provenance(*packages, gpu=arguments.device == "cuda") | {"rows": []}
    for network in arguments.networks:
        for batch in arguments.batches or [1, 32]:
            setting = Setting(network, "inference", batch, arguments.size, arguments.device)
            result["rows"] += measure(setting, arguments.rounds, arguments.steps)
            path = write("host_in_networks", result, arguments.out)
            gc.collect()
        print(f"{network}: written to {path}", flush=True)


if __name__ == "__main__":
    main()
