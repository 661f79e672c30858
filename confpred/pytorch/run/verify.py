"""Choices by measurement on this GPU, among the candidates that the model predicts to be fastest.

``verify=3``          the best predictions and PyTorch's operator are timed when a graph is
                      captured, on random operands of the same sizes.
``verify="network"``  a graph with confpred's choices and one without are timed at its first call,
                      on that call's inputs.
"""

from __future__ import annotations

import gc
import logging
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from confpred.cuda import driver
from confpred.errors import ConfpredError, first_line
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.launch.assignment import Assignment
from confpred.measure.pytorch import library_call, operands
from confpred.predict.choice import Choice
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.limits import Limits
from confpred.pytorch.run import choosing
from confpred.pytorch.run.choosing import Constraints
from confpred.pytorch.run.library import FusedOperator
from confpred.pytorch.run.loading import compile_ahead, load

log = logging.getLogger(__name__)
_ROUNDS = 5
#: One round of a candidate takes about this long: long against the noise of an event's clock.
_ROUND_MS = 0.2
_MOST_LAUNCHES = 50
#: The same of a network. A CUDA graph is recorded at the second call.
_STEPS_MS, _FIRST_STEPS = 20.0, 3
UNTIMED = "confpred's choices are kept untimed, as "


def find_best(problem: Problem, ordinal: int, top: int, constraints: Constraints) -> Choice | None:
    """Return the fastest of the `top` best predictions and PyTorch's operator, by measurement; a
    pinned choice is taken as it is, and so is the prediction where nothing can be measured."""
    predicted = choosing.choose(problem, ordinal, constraints)
    if predicted is None or predicted.source in ("pinned", "fallback", "heuristic"):
        return predicted
    within = choosing.current_predictor().within(choosing.limits_for(problem, constraints.limits))
    ranked = within.rank(problem, driver.device_of(ordinal), top + 1)
    ranked = [predicted, *(c for c in ranked if c.candidate != predicted.candidate)]
    # Predictions of another device's model are good enough to name candidates.
    own = [replace(c, source="predicted") if c.source == "transferred" else c for c in ranked]
    candidates = [c for c in own if choosing.runs_kernel(c)][:top]
    try:
        winner = _measure(candidates, predicted, ordinal, constraints.limits)
    except (RuntimeError, ConfpredError) as error:  # of memory, too
        log.warning("%s cannot be measured: %s", problem, str(error).splitlines()[0])
        return predicted
    choosing.announce(winner)
    return winner


def _measure(candidates: list[Choice], predicted: Choice, ordinal: int, limits: Limits) -> Choice:
    problem: Any = predicted.problem
    as_loaded = compile_ahead(candidates, ordinal, limits)
    calls: dict[Choice, Callable[[], Any]] = {}
    with torch.cuda.device(ordinal), torch.no_grad():
        (tensors,) = operands(CONVOLUTION, problem, 1)
        inputs = [t.permute(0, 3, 1, 2) if t.dim() == 4 else t for t in tensors.values()]
        for choice in as_loaded.values():
            ready = load(Assignment.of(choice), ordinal, limits)
            if ready is not None:
                calls[choice] = partial(ready.run, *inputs)
        own = replace(predicted, candidate=PYTORCH_OPERATOR, predicted_ms=None)
        fused = FusedOperator.of(problem)
        if fused is None:
            calls[own] = partial(library_call(CONVOLUTION, problem, ordinal), tensors)
        else:
            calls[own] = partial(fused.run, *inputs)
        times = dict(zip(calls, time_in_turns(list(calls.values())), strict=True))
    best = min(times, key=times.__getitem__)
    log.info("%s: %s is the fastest of %d", problem, best.provider, len(calls))
    return replace(
        best, source="measured", predicted_ms=times[best], pytorch_ms=times[own], regret_bound=None
    )


def _elapsed_ms(call: Callable[[], Any], launches: int) -> float:
    """Return milliseconds a launch, by events on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The host runs ahead while the GPU sleeps, so that the host's issuing is not timed.
    torch.cuda._sleep(20_000 * launches)
    start.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / launches


def time_in_turns(
    calls: Sequence[Callable[[], Any]],
    elapsed_ms: Callable[[Callable[[], Any], int], float] = _elapsed_ms,
    round_ms: float = _ROUND_MS,
) -> list[float]:
    """Return median milliseconds of one launch of each of `calls`, whose rounds take turns."""
    order = random.Random()  # the program's random numbers stay as they are
    for call in calls:
        call()
    launches = [max(1, min(_MOST_LAUNCHES, int(round_ms / elapsed_ms(c, 1)))) for c in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_ROUNDS):
        for index in order.sample(range(len(calls)), len(calls)):
            times[index].append(elapsed_ms(calls[index], launches[index]))
    return [statistics.median(values) for values in times]


class Rivals:
    """A captured graph that was compiled with confpred's choices, and without.

    The first call times both, forward and backward together, and keeps the faster. The timing has
    no side effects: gradients are dropped, and the state of random numbers and the inputs that the
    graph writes to are restored. Where that is impossible, confpred's choices are kept untimed.

    Args:
        chosen, plain: functions of the graph's inputs, with confpred's choices and without.
        written: indices of the inputs that the graph writes to.
        on_decision: called once, with whether `chosen` is kept, and why.
    """

    confpred_capture: Any  # the capture, for `confpred.status`

    def __init__(
        self, chosen: Callable[..., Any], plain: Callable[..., Any], written: Sequence[int],
        on_decision: Callable[[bool, str], None],
    ) -> None:  # fmt: skip
        self._kept, self._written, self._lock = chosen, written, threading.Lock()
        self._open: Any = plain, on_decision  # until the first call has decided

    def __call__(self, *inputs: Any) -> Any:
        if self._open is not None:
            with self._lock:
                if self._open is not None:
                    self._decide(inputs)
        return self._kept(*inputs)

    def _decide(self, inputs: Sequence[Any]) -> None:
        (plain, on_decision), is_kept, why = self._open, True, ""
        try:
            why = _why_untimed(inputs, [inputs[i] for i in self._written])
            if not why:
                ms = _steps_ms((self._kept, plain), inputs, self._written)
                is_kept = ms[0] <= ms[1]
                kept = "confpred's choices" if is_kept else "PyTorch's operators"
                both = "{:.3f} ms a step with confpred's choices, {:.3f} ms without".format(*ms)
                text = f"{kept} are kept: {both}"
        except Exception as error:  # short of memory, say; the program's own error comes again
            why = first_line(error)
        self._kept, self._open = self._kept if is_kept else plain, None
        on_decision(is_kept, UNTIMED + why if why else text)
        del plain, on_decision
        gc.collect()  # which frees the CUDA graphs of the one that was slower


def _why_untimed(inputs: Sequence[Any], written: Sequence[Tensor]) -> str:
    """Return why further calls of a graph with these inputs would have side effects, in words;
    empty if they have none."""
    if any(isinstance(x, Tensor) and type(x) not in (Tensor, nn.Parameter) for x in inputs):
        return "an input is of a subclass of Tensor"
    if any(x.requires_grad or x._is_view() or x.is_inference() for x in written):
        return "an input that is written to is a view, or has a gradient"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "the call is being recorded"
    if torch._C._autograd._top_saved_tensors_default_hooks(True):
        return "saved tensors have hooks"
    return ""


def _steps_ms(
    runs: Sequence[Callable[..., Any]], inputs: Sequence[Any], written: Sequence[int]
) -> list[float]:
    """Return median milliseconds of a step of each of `runs`, forward and backward, until the
    device is done, and undo what it writes; `written` are positions of `inputs`."""
    # In the memory of the inputs, where CUDA graphs read them, without their hooks and gradients.
    arguments = [
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs
    ]
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    learned = [x for x in tensors if x.requires_grad]
    devices = sorted({x.get_device() for x in tensors if x.is_cuda})

    def step(run: Callable[..., Any]) -> None:
        leaves = [x for x in _pytree.tree_leaves(run(*arguments)) if isinstance(x, Tensor)]
        heads = [x for x in leaves if x.requires_grad]
        if heads and torch.is_grad_enabled():
            ones = [torch.ones_like(x) for x in heads]
            torch.autograd.grad(heads, learned, ones, allow_unused=True)

    def elapsed_ms(call: Callable[[], Any], steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            call()
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return 1e3 * (time.perf_counter() - begun) / steps

    with torch.no_grad():
        former = [(arguments[i], arguments[i].clone()) for i in written]
    with torch.random.fork_rng(devices):
        try:
            calls = [partial(step, run) for run in runs]
            for call in calls * _FIRST_STEPS:
                elapsed_ms(call, 1)
            return time_in_turns(calls, elapsed_ms, _STEPS_MS)
        finally:
            with torch.no_grad():
                for x, then in former:
                    x.copy_(then)
