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
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from network_group import Group
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

#: A variant may be this many times as far from float32 as eager PyTorch in half precision is, in
#: the 2-norm; networks with random weights magnify rounding, each by another factor.
TIMES_AS_FAR = 3.0
SLACK = 0.01
CHECKED = 8  # images, in inference, where they do not depend on one another
WARM_UPS = 3
LEAST_STEPS = 3  # of a turn
#: Steps of a turn that are not timed: after `confpred.enable` or `disable`, which make all variants
#: of ours forget, come finding, noting, agreeing, and one more.
UNTIMED = 4


@dataclass
class Variant:
    """A variant that is ready to be timed.

    Attributes:
        model: the network.
        step: one step.
        around: makes the context in which its turns stand.
        peak_mb: see `peak_mb`.
        difference: of its answer (see `answer`) from float32's, relative, in the 2-norm.
        times_ms: of a step, one for each round.
    """

    model: nn.Module
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


def captured(step: Step) -> Step:
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

    def replay(kept: Step = step) -> Tensor:
        """`kept` holds the model, whose weights the graph reads at their addresses."""
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


def answer(model: nn.Module, step: Step, setting: Setting) -> Tensor:
    """What a step computes, in one dimension: some outputs, or the gradients of all parameters."""
    out = step()
    if setting.mode == "inference":
        return out[:CHECKED].float().flatten()
    named = sorted(model.named_parameters())
    return torch.cat([p.grad.float().flatten() for _, p in named if p.grad is not None])


def reference(base: nn.Module, setting: Setting, data: tuple[Tensor, Tensor]) -> Tensor:
    """The answer in float32."""
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


def started(
    name: str,
    base: nn.Module,
    setting: Setting,
    data: tuple[Tensor, Tensor],
    plain: Variant | None,
) -> tuple[nn.Module, Step, Callable[[], AbstractContextManager[Any]]]:
    """The variant's model, its step, and what makes the context that its steps stand in. `plain` is
    the eager variant without confpred, if there is one yet."""
    way, helped = split(name)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if helped == "enable":
        import confpred

        around = partial(confpred.enabled, wait=True)  # type: ignore[attr-defined]
        if plain is not None and way == "eager":  # a copy would be another one to the host
            plain.model.load_state_dict(base.state_dict())  # for the gradients that are compared
            return plain.model, plain.step, around
    model = prepared(base, setting)
    if helped == "optimize":
        model = optimized(model, data[0], setting)
    forward: Any = torch.compile(model, backend=own_inductor()) if way == "compile" else model
    return model, step_of(model, forward, setting, data), around


def make(
    name: str,
    base: nn.Module,
    setting: Setting,
    data: tuple[Tensor, Tensor],
    check: Check,
    plain: Variant | None,
) -> Variant:
    """The variant, warm and checked; `plain` as of `started`.

    Raises:
        ValueError: its answer is further from float32's than half precision explains.
    """
    model, step, around = started(name, base, setting, data, plain)
    with around():
        difference = check(answer(model, step, setting))
        for _ in range(WARM_UPS - 1):
            step()
        peak = peak_mb(step, setting)
        if split(name)[0] == "graph":
            step = captured(step)
            if setting.mode == "inference":  # the weights are still those of the reference
                difference = check(answer(model, step, setting))
        setting.synchronize()
    return Variant(model, step, around, peak, difference, [])


class Check:
    """Compares answers with a reference; the first, of eager PyTorch, sets what is allowed."""

    def __init__(self, expected: Tensor) -> None:
        self._expected = expected
        self.allowed = float("nan")

    def __call__(self, found: Tensor) -> float:
        """The difference, relative to the reference, in the 2-norm."""
        difference = float((found - self._expected).norm() / self._expected.norm())
        if math.isnan(self.allowed):
            self.allowed = TIMES_AS_FAR * difference + SLACK
        if not difference <= self.allowed:
            raise ValueError(f"{difference:.3g} away from float32, allowed is {self.allowed:.3g}")
        return difference


def time_interleaved(
    variants: Mapping[str, Variant], setting: Setting, rounds: int, turn_s: float
) -> dict[str, str]:
    """Fill in the variants' times, in milliseconds a step (the protocol is in ``networks.py``).

    Returns:
        What went wrong with variants, which were not timed any further.
    """

    def turn(variant: Variant, steps: int) -> float:
        with variant.around():
            for _ in range(UNTIMED):
                variant.step()
            setting.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                variant.step()
            setting.synchronize()
            return (time.perf_counter() - start) / steps

    steps = dict.fromkeys(variants, 0)
    errors: dict[str, str] = {}
    for number in range(1 + rounds):
        names = [name for name in variants if name not in errors]
        random.shuffle(names)
        for name in names:
            try:
                step_s = turn(variants[name], steps[name] or LEAST_STEPS)
            except Exception as error:  # of one variant, such as too little memory
                errors[name] = told(error)
                continue
            if number == 0:
                steps[name] = max(LEAST_STEPS, math.ceil(turn_s / step_s))
            else:
                variants[name].times_ms.append(step_s * 1e3)
    return errors


def free(setting: Setting) -> None:
    """Give back what memory is not in use, for the other processes."""
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()


def wait_while(path: Path | None) -> None:
    """Return once there is no file at `path`."""
    while path is not None and path.exists():
        time.sleep(0.2)


def measure(
    base: nn.Module,
    setting: Setting,
    names: list[str],
    rounds: int,
    turn_s: float,
    group: Group,
    hold: Path | None = None,
) -> dict[str, Any]:
    """All variants of one batch: for each its ``times_ms``, ``peak_mb`` and ``difference``, or its
    ``error``. `group` is what the process belongs to; none is timed as long as `hold` exists."""
    found: dict[str, Any] = {}
    variants: dict[str, Variant] = {}
    data = images_and_labels(setting)
    errors: dict[str, str] = {}

    def add(names: Iterable[str]) -> None:
        for name in names:
            try:
                variants[name] = make(name, base, setting, data, check, variants.get("eager"))
            except Exception as error:  # of one variant; the others still count
                errors[name] = told(error)

    with group.alone():  # cuDNN's benchmark mode chooses by time
        check = Check(reference(base, setting, data))
        add(("eager", AGAIN["eager"]))
        free(setting)
    wanted = dict.fromkeys([*names, *(AGAIN[split(name)[0]] for name in names)])
    add(name for name in wanted if name not in {*variants, *errors})
    free(setting)
    wait_while(hold)
    with group.alone():
        errors |= time_interleaved(variants, setting, rounds, turn_s)
    for name, variant in variants.items():
        if name not in errors:
            found[name] = {
                "times_ms": variant.times_ms,
                "peak_mb": variant.peak_mb,
                "difference": variant.difference,
            }
    for name, error in errors.items():
        found[name] = {"error": error}
        print(f"{setting}: {name}: {error}", file=sys.stderr)
    return found


def told(error: Exception) -> str:
    """An error as text; the error itself would keep its variant's tensors alive."""
    return f"{type(error).__name__}: {error}"[:500]


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
        hold = Path(task["hold"]) if task["hold"] else None
        timing = (task["rounds"], task["turn_s"], Group(Path(task["group"])), hold)
        batches[batch] = measure(base, setting, task["variants"], *timing)
        whole = out.with_suffix(".tmp")
        whole.write_text(json.dumps(batches))  # a crash later on costs only the later batches
        whole.replace(out)
        torch._dynamo.reset()  # or the next batch is compiled for any batch
        free(setting)


if __name__ == "__main__":
    main()
