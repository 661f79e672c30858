"""Measured choices: the best predictions and PyTorch's operator are timed when a graph is captured.

The prediction names the candidates, the GPU at hand decides, on random operands of the same sizes.
"""

from __future__ import annotations

import logging
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from confpred.cuda import driver
from confpred.errors import ConfpredError
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.launch.assignment import Assignment
from confpred.measure.pytorch import as_the_library_calls, operands
from confpred.predict.choice import Choice
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.pytorch.run import choosing
from confpred.pytorch.run.choosing import Wishes
from confpred.pytorch.run.library import FusedOperator
from confpred.pytorch.run.loading import compile_ahead, load

log = logging.getLogger(__name__)
_ROUNDS = 5
#: One round of a candidate takes about this long: long against the noise of an event's clock.
_ROUND_MS = 0.2
_MOST_LAUNCHES = 50


def fastest(problem: Problem, ordinal: int, top: int, wishes: Wishes) -> Choice | None:
    """Return the fastest of the `top` best predictions and PyTorch's operator, by measurement; a
    pinned choice is taken as it is, and so is the prediction where nothing can be measured."""
    predicted = choosing.choose(problem, ordinal, wishes)
    if predicted is None or predicted.source in ("pinned", "fallback", "heuristic"):
        return predicted
    within = choosing.current_predictor().within(choosing.limits_for(problem, wishes.limits))
    ranked = within.rank(problem, driver.device_of(ordinal), top + 1)
    # A measurement needs no trust in the model of another device.
    own = [replace(c, source="predicted") if c.source == "transferred" else c for c in ranked]
    ours = [c for c in own if choosing.is_ours(c)][:top]
    try:
        winner = _measured(ours, predicted, ordinal, wishes)
    except (RuntimeError, ConfpredError) as error:  # of memory, too
        log.warning("%s cannot be measured: %s", problem, str(error).splitlines()[0])
        return predicted
    choosing.announce(winner)
    return winner


def _measured(ours: list[Choice], predicted: Choice, ordinal: int, wishes: Wishes) -> Choice:
    problem: Any = predicted.problem
    compile_ahead(ours, ordinal, wishes.limits)
    calls: dict[Choice, Callable[[], Any]] = {}
    with torch.cuda.device(ordinal), torch.no_grad():
        (tensors,) = operands(CONVOLUTION, problem, 1)
        given = [t.permute(0, 3, 1, 2) if t.dim() == 4 else t for t in tensors.values()]
        for choice in ours:
            ready = load(Assignment.of(choice), ordinal, wishes.limits)
            if ready is not None:
                launched = replace(choice, candidate=ready.assignment.candidate)
                calls[launched] = partial(ready.run, *given)
        own = replace(predicted, candidate=PYTORCH_OPERATOR, predicted_ms=None)
        fused = FusedOperator.of(problem)
        if fused is None:
            calls[own] = partial(as_the_library_calls(CONVOLUTION, problem, ordinal), tensors)
        else:
            calls[own] = partial(fused.run, *given)
        times = dict(zip(calls, interleaved(list(calls.values())), strict=True))
    best = min(times, key=times.__getitem__)
    log.info("%s: %s is the fastest of %d", problem, best.provider, len(calls))
    return replace(
        best, source="measured", predicted_ms=times[best], pytorch_ms=times[own], regret_bound=None
    )


def interleaved(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Return median milliseconds of one launch of each of `calls`, whose rounds take turns."""
    for call in calls:
        call()
    launches = [max(1, min(_MOST_LAUNCHES, int(_ROUND_MS / _elapsed_ms(c, 1)))) for c in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_ROUNDS):
        for index in random.sample(range(len(calls)), len(calls)):
            times[index].append(_elapsed_ms(calls[index], launches[index]))
    return [statistics.median(values) for values in times]


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
