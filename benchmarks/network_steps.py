"""The step times of one network in one mode, measured in a process of its own.

``benchmarks/networks.py`` starts this file with a task, as JSON, and reads what it writes; its
docstring is the protocol. A *variant* is a way of running the network (``eager``, ``graph``,
``compile``) without confpred, after ``confpred.enable()`` or after ``confpred.optimize()``.
"""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from network_models import (
    Setting,
    Step,
    images_and_labels,
    lively_network,
    optimized,
    prepared,
    step_of,
)
from network_results import AGAIN, split
from torch import Tensor, nn

#: Largest difference of an output from eager PyTorch's, relative to the largest output, that half
#: precision explains; the loss of a first training step is held to it too.
TOLERANCE = 0.03
WARM_UPS = 3
LEAST_STEPS = 3  # of a turn


@dataclass
class Variant:
    """A variant that is ready to be timed.

    Attributes:
        step: one step.
        around: makes the context in which its turns stand.
        peak_mb: see `peak_mb`.
        difference: of its output from eager PyTorch's, relative to the largest output.
        times_ms: of a step, one for each round.
    """

    step: Step
    around: Callable[[], AbstractContextManager[Any]]
    peak_mb: float | None
    difference: float
    times_ms: list[float]


def own_inductor() -> Callable[..., Any]:
    """``torch.compile``'s default backend under an identity of its own. Dynamo shares what it has
    compiled between copies of a module, and would hand one variant another one's code."""

    def backend(module: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(module, inputs)

    return backend


def captured(step: Step, setting: Setting) -> Step:
    """The step as a CUDA graph, captured after a warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def peak_mb(step: Step, setting: Setting) -> float | None:
    """The most device memory that is allocated during `step`, above what the process held before,
    in MiB: activations, gradients, workspaces, but neither weights nor other variants."""
    if setting.device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def make(
    name: str,
    base: nn.Module,
    setting: Setting,
    data: tuple[Tensor, Tensor],
    expected: Tensor | None,
) -> tuple[Variant, Tensor]:
    """The variant, warm and checked, and its first output.

    Raises:
        ValueError: its output is not eager PyTorch's.
    """
    way, helped = split(name)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    model = prepared(base, setting)
    if helped == "enable":
        import confpred

        around = confpred.enabled  # type: ignore[attr-defined]
    elif helped == "optimize":
        model = optimized(model, data[0], setting)
    forward: Any = torch.compile(model, backend=own_inductor()) if way == "compile" else model
    step = step_of(model, forward, setting, data)
    with around():
        first = step().float().clone()
        difference = 0.0 if expected is None else relative_difference(first, expected)
        if not difference <= TOLERANCE:
            raise ValueError(f"differs from eager PyTorch by {difference:.3g}")
        for _ in range(WARM_UPS - 1):
            step()
        peak = peak_mb(step, setting)
        if way == "graph":
            step = captured(step, setting)
            replayed = step().float()
            if setting.mode == "inference" and expected is not None:
                difference = relative_difference(replayed, expected)
                if not difference <= TOLERANCE:
                    raise ValueError(f"replayed, it differs from eager by {difference:.3g}")
        setting.synchronize()
    return Variant(step, around, peak, difference, []), first


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value; NaN if any of them is."""
    return float((found - expected).abs().max() / expected.abs().max())


def time_interleaved(
    variants: Mapping[str, Variant], setting: Setting, rounds: int, turn_s: float
) -> None:
    """Fill in the variants' times, in milliseconds a step (the protocol is in ``networks.py``)."""

    def turn(variant: Variant, steps: int) -> float:
        with variant.around():
            variant.step()  # untimed: what entering the context has emptied is filled again
            setting.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                variant.step()
            setting.synchronize()
            return (time.perf_counter() - start) / steps

    steps = {
        name: max(LEAST_STEPS, math.ceil(turn_s / turn(variant, LEAST_STEPS)))
        for name, variant in variants.items()
    }
    names = list(variants)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            variants[name].times_ms.append(turn(variants[name], steps[name]) * 1e3)


def measure(
    base: nn.Module, setting: Setting, names: list[str], rounds: int, turn_s: float
) -> dict[str, Any]:
    """All variants of one batch: for each its ``ms``, ``peak_mb`` and ``difference``, or its
    ``error``."""
    found: dict[str, Any] = {}
    variants: dict[str, Variant] = {}
    data = images_and_labels(setting)
    expected: Tensor | None = None
    for name in ("eager", AGAIN, *(name for name in names if name != "eager")):
        try:
            variants[name], first = make(name, base, setting, data, expected)
        except Exception as error:  # of one variant; the others still count
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            print(f"{setting}: {name}: {found[name]['error']}", file=sys.stderr)
        else:
            expected = first if expected is None else expected
    time_interleaved(variants, setting, rounds, turn_s)
    for name, variant in variants.items():
        found[name] = {
            "ms": statistics.median(variant.times_ms),
            "peak_mb": variant.peak_mb,
            "difference": variant.difference,
        }
    return found


def compile_only(base: nn.Module, setting: Setting, names: list[str]) -> dict[str, Any]:
    """Fill Inductor's cache: one step of each compiled variant."""
    data = images_and_labels(setting)
    for name in names:
        if split(name)[0] == "compile":
            try:
                make(name, base, setting, data, None)
            except Exception as error:  # it comes up again, and is recorded, when it is timed
                print(f"{setting}: {name}: {error}", file=sys.stderr)
    return {}


def main() -> None:
    """``network_steps.py TASK OUT``: TASK is an object with the fields that are read here."""
    task, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.backends.cudnn.benchmark = True
    random.seed(0)
    sizes = {"size": task["size"], "device": task["device"]}
    base: nn.Module | None = None
    batches: dict[str, Any] = {}
    for batch in task["batches"]:
        if time.time() > task["deadline"]:
            print(f"no time left for {task['network']}, {task['mode']}, {batch}", file=sys.stderr)
            break
        setting = Setting(task["network"], task["mode"], batch, **sizes)
        base = base or lively_network(setting)
        if task["compile_only"]:
            compile_only(base, setting, task["variants"])
        else:
            timing = (task["rounds"], task["turn_s"])
            batches[batch] = measure(base, setting, task["variants"], *timing)
            out.write_text(json.dumps(batches))  # a crash later on costs only the later batches
        torch._dynamo.reset()  # or the next batch is compiled for any batch
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
