"""Measured choices: the best predictions and PyTorch's own operator are timed once, at first use.

The prediction names the candidates, the GPU at hand decides among them. Operands are random and of
the problem's sizes; nothing that the user computes is touched, and nothing is timed while a CUDA
graph is captured.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from confpred.cuda import driver
from confpred.families.candidate import PYTORCH_OPERATOR
from confpred.measure.pytorch import operands
from confpred.predict.choice import Choice
from confpred.predict.trust import is_trusted, within
from confpred.problem.conv2d import Problem
from confpred.problem.conv2d_operation import CONVOLUTION
from confpred.problem.limits import Limits
from confpred.pytorch import choosing, loading
from confpred.pytorch.fallback import pytorch_for
from confpred.pytorch.ready import INPUTS

log = logging.getLogger(__name__)
_ROUNDS = 5
#: One round of a candidate takes about this long: long against the noise of an event's clock.
_ROUND_S = 2e-4
_MOST_LAUNCHES = 50


@dataclass(slots=True)
class Verifier:
    """Times candidates until its budget is spent, and predicts from then on.

    Attributes:
        top: how many of our best predictions are timed.
        budget_s: seconds that all measurements together may take, compilations included.
        plan: a file that winners are kept in, or None.
        spent_s: seconds taken so far.
        winners: what was chosen for a problem on a CUDA device within limits.
        followed: choices of the plan that were taken as they are, and stay in it.
        max_regret: predictions whose bound on regret is at most this are taken as they are; None to
            measure all.
    """

    top: int
    budget_s: float
    plan: Path | None = None
    spent_s: float = 0.0
    winners: dict[tuple[Problem, int, Limits], Choice] = field(default_factory=dict)
    followed: tuple[Choice, ...] = ()
    max_regret: float | None = None

    def fastest(self, problem: Problem, ordinal: int) -> Choice | None:
        """The fastest of the candidates by measurement, or the predicted choice where the budget is
        spent, a pin decides or there is nothing to compare."""
        key = (problem, ordinal, choosing.limits_of(problem))
        if key in self.winners:
            choosing.announce(self.winners[key])
            return self.winners[key]
        predicted = choosing.choose(problem, ordinal, any_bound=True)
        if predicted is None:
            return None
        if self.max_regret is not None and is_trusted(predicted, self.max_regret):
            return predicted
        if self.spent_s >= self.budget_s:
            return within([predicted], self.max_regret)[0]
        if _trusted(predicted).is_guess or predicted.source in ("pinned", "fallback"):
            return predicted
        started = time.monotonic()
        try:
            winner = self._measured(problem, ordinal, predicted)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            log.warning("%s cannot be measured: %s", problem, str(error).splitlines()[0])
            winner = predicted
        self.spent_s += time.monotonic() - started
        self.winners[key] = winner
        choosing.announce(winner)
        if self.plan is not None:
            self._keep(ordinal)
        return winner

    def _measured(self, problem: Problem, ordinal: int, predicted: Choice) -> Choice:
        device = driver.device_of(ordinal)
        within = choosing.current_predictor().within(choosing.limits_of(problem))
        ranked = within.rank(problem, device, self.top + 1)
        ours = [c for c in map(_trusted, ranked) if choosing.is_ours(c)][: self.top]
        loading.compile_ahead(ours, (), ordinal)
        calls: list[tuple[Choice, Callable[[], Any]]] = []
        with torch.cuda.device(ordinal), torch.no_grad():
            (tensors,) = operands(CONVOLUTION, problem, 1)
            inputs = {
                name: t.permute(0, 3, 1, 2) if t.dim() == 4 else t for name, t in tensors.items()
            }
            given = [inputs.get(name) for name in INPUTS[problem.direction]]
            for choice in ours:
                ready = loading.load(choice, ordinal)
                if ready is not None:
                    calls.append((ready.choice, partial(ready.run, *given)))
            own = replace(predicted, candidate=PYTORCH_OPERATOR, predicted_ms=None)
            calls.append((own, partial(pytorch_for(problem), *given)))
            times = interleaved([call for _, call in calls])
        best = min(range(len(calls)), key=times.__getitem__)
        log.info("%s: %s is the fastest of %d", problem, calls[best][0].provider, len(calls))
        return replace(
            calls[best][0], source="measured", predicted_ms=times[best], regret_bound=None
        )

    def _keep(self, ordinal: int) -> None:
        from confpred.predict.plans import plan_of, write_plan

        if self.plan is not None:
            measured = [choice for key, choice in self.winners.items() if key[1] == ordinal]
            write_plan(self.plan, plan_of([*self.followed, *measured]))


def _trusted(choice: Choice) -> Choice:
    """`choice` as if its model were of this device: what is measured need not be trusted."""
    return replace(choice, source="predicted") if choice.source == "transferred" else choice


def interleaved(calls: list[Callable[[], Any]]) -> list[float]:
    """Median milliseconds of one launch of each of `calls`, whose rounds take turns."""
    times: list[list[float]] = [[] for _ in calls]
    launches = []
    for call in calls:
        call()
        launches.append(max(1, min(_MOST_LAUNCHES, int(_ROUND_S * 1e3 / _elapsed(call, 1)))))
    order = list(range(len(calls)))
    for _ in range(_ROUNDS):
        random.shuffle(order)
        for index in order:
            times[index].append(_elapsed(calls[index], launches[index]))
    return [statistics.median(values) for values in times]


def _elapsed(call: Callable[[], Any], launches: int) -> float:
    """Milliseconds a launch, by events on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The host runs ahead while the GPU sleeps, so that what is timed is not the host's issuing.
    torch.cuda._sleep(20_000 * launches)
    start.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / launches
