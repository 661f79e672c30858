"""The step times of one network in one mode at one batch, measured in a process of its own.

`benchmarks.networks.networks` starts this with a task, as JSON; its docstring is the protocol.
"""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.networks.network_models import (
    Setting,
    Step,
    images_and_labels,
    lively_network,
    prepared,
    step_of,
)
from benchmarks.networks.networks import PARTS
from confpred.pytorch.run.graphs import memory_of_inference

#: A way may be this many times as far from float32 as eager PyTorch in half precision is, in the
#: 2-norm; networks with random weights magnify rounding, each by another factor.
TIMES_AS_FAR, SLACK = 3.0, 0.01
CHECKED = 8  # images, in inference, where they do not depend on one another
WARM_UPS = 4
LEAST_STEPS = 3  # of a turn


@dataclass
class Way:
    """A way of running the network that is ready to be timed.

    Attributes:
        step: one step.
        first_s: seconds of the first step, compilation included.
        peak_mb: most device memory that PyTorch reserves in a step, beyond what it held before the
            way was started; weights and the pools of CUDA graphs are in it. MiB.
        difference: from float32, relative, in the 2-norm.
        graph: one CUDA graph of the step, or None.
        times_ms, graph_ms: of a step, one a round.
    """

    model: nn.Module
    step: Step
    first_s: float
    difference: float
    peak_mb: float | None = None
    graph: Step | None = None
    times_ms: list[float] = field(default_factory=list)
    graph_ms: list[float] = field(default_factory=list)


def started(name: str, base: nn.Module, setting: Setting, data: tuple[Tensor, Tensor]) -> Any:
    """Return the model of a way, and its step."""
    model = prepared(base, setting)
    forward: Any = model
    if name in ("optimize", "freeze", "inductor", *PARTS):
        import confpred

        how = {"freeze": name == "freeze", "inductor": name == "inductor"}
        confpred.optimize(model, **how)  # type: ignore[attr-defined]
    elif name == "compile":
        forward = torch.compile(model)
    elif name == "reduce-overhead":
        forward = torch.compile(model, mode="reduce-overhead")
    return model, step_of(model, forward, setting, data)


def left_out(name: str) -> AbstractContextManager[Any]:
    """Return a context in which a capture has not the part that the way `name` does without."""
    if name not in PARTS:
        return nullcontext()
    module, function = PARTS[name]
    return patch(f"confpred.pytorch.{module}.{function}", lambda *given, **named: 0)


def answer(model: nn.Module, step: Step, setting: Setting) -> Tensor:
    """Return what a step computes, flat: outputs, or the gradients of all parameters."""
    out = step()
    if setting.mode == "inference":
        return out[:CHECKED].float().flatten()
    named = sorted(model.named_parameters())
    return torch.cat([p.grad.float().flatten() for _, p in named if p.grad is not None])


def reference(base: nn.Module, setting: Setting, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return the answer in float32."""
    images, labels = data
    if setting.mode == "inference":
        with exact(), torch.inference_mode():
            out: Tensor = prepared(base, setting).float()(images[:CHECKED].float())
        return out.flatten()
    model = prepared(base, setting)
    with exact():
        torch.nn.functional.cross_entropy(model(images), labels).backward()
    return answer(model, lambda: labels, setting)


def exact() -> AbstractContextManager[Any]:
    return torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=False, allow_tf32=False
    )


def leave_pool() -> None:
    """Give graphs that are recorded from now on a pool of their own, so that their need is seen."""
    from torch._inductor.cudagraph_trees import local

    local.tree_manager_containers.clear()
    memory_of_inference.cache_clear()


def make(
    name: str, base: nn.Module, setting: Setting, data: tuple[Tensor, Tensor], expected: Tensor
) -> Way:
    """Start a way, and run its first steps."""
    setting.synchronize()
    leave_pool()
    free(setting)
    held = torch.cuda.memory_reserved() if setting.device == "cuda" else 0
    begun = time.perf_counter()
    with left_out(name):
        model, step = started(name, base, setting, data)
        found = answer(model, step, setting)
    setting.synchronize()
    first = time.perf_counter() - begun
    way = Way(model, step, first, float((found - expected).norm() / expected.norm()))
    for _ in range(WARM_UPS):
        step()
    setting.synchronize()
    if setting.device == "cuda":
        free(setting)  # what only the first steps needed, such as workspaces that were tried
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        way.peak_mb = (torch.cuda.max_memory_reserved() - held) / 2**20
        if name != "reduce-overhead":
            way.graph = captured(step)
    return way


def free(setting: Setting) -> None:
    """Give back memory that is not in use."""
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()


def captured(step: Step) -> Step:
    """Return the step as one CUDA graph, captured after a warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay(kept: Step = step) -> Tensor:
        """`kept` holds the model, whose weights the graph reads at their addresses."""
        graph.replay()
        return out

    return replay


def time_rounds(ways: dict[str, Way], setting: Setting, rounds: int, turn_s: float) -> None:
    """Fill in the times of all ways, whose turns come in random order in each round."""

    def turn(step: Step, steps: int) -> float:
        step()
        setting.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        setting.synchronize()
        return (time.perf_counter() - start) / steps

    turns: list[tuple[Step, list[float]]] = []
    for way in ways.values():
        turns.append((way.step, way.times_ms))
        if way.graph is not None:
            turns.append((way.graph, way.graph_ms))
    counts = [max(LEAST_STEPS, math.ceil(turn_s / turn(step, LEAST_STEPS))) for step, _ in turns]
    order = list(range(len(turns)))
    for _ in range(rounds):
        random.shuffle(order)
        for i in order:
            step, times = turns[i]
            times.append(turn(step, counts[i]) * 1e3)


def measure(base: nn.Module, setting: Setting, task: dict[str, Any]) -> dict[str, Any]:
    """Return what was found of each way, or its error."""
    data = images_and_labels(setting)
    expected = reference(base, setting, data)
    ways: dict[str, Way] = {}
    found: dict[str, Any] = {}
    allowed = math.inf
    for name in task["ways"]:
        try:
            way = make(name, base, setting, data, expected)
            if name == "eager":
                allowed = TIMES_AS_FAR * way.difference + SLACK
            if not way.difference <= allowed:
                raise ValueError(f"{way.difference:.3g} away from float32, allowed: {allowed:.3g}")
            ways[name] = way
        except Exception as error:  # of one way; the others still count
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            print(f"{setting}: {name}: {error}", file=sys.stderr)
    time_rounds(ways, setting, task["rounds"], task["turn_s"])
    for name, way in ways.items():
        found[name] = {
            "ms": statistics.median(way.times_ms),
            "graph_ms": statistics.median(way.graph_ms) if way.graph_ms else None,
            "first_s": way.first_s,
            "peak_mb": way.peak_mb,
            "difference": way.difference,
        }
        for other in ("eager", "compile"):
            if other in ways:
                theirs = ways[other]
                found[name][f"over_{other}"] = ratio(theirs.times_ms, way.times_ms)
                found[name][f"graph_over_{other}"] = ratio(theirs.graph_ms, way.graph_ms)
    return found


def ratio(theirs: list[float], ours: list[float]) -> float | None:
    """Return the median of the rounds' ratios: a host that is slow for seconds is so for both."""
    if not theirs or not ours:
        return None
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def main() -> None:
    """``network_steps.py TASK OUT``: TASK is an object with the fields that are read here."""
    task, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    import timm  # noqa: F401 - before the wait, while another process has the GPU

    import confpred  # noqa: F401

    sys.stdin.readline()  # until it is this process's turn
    torch.backends.cudnn.benchmark = True
    random.seed(0)
    setting = Setting(task["network"], task["mode"], task["batch"], task["size"], task["device"])
    found = measure(lively_network(setting), setting, task)
    whole = out.with_suffix(".tmp")
    whole.write_text(json.dumps(found))
    whole.replace(out)


if __name__ == "__main__":
    main()
