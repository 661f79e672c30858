"""What to measure under a budget: the policy, as pure functions.

A minute is spent where it teaches most. What a problem teaches is guessed from two things: how far
the present answers may be off (their bound on regret), and how unlike it is to all that has been
measured or is planned already. What it costs is the time to measure it, and to compile those of its
kernels that are neither compiled nor planned: a config is compiled once for all problems, so the
first problems are dear and later ones cheap.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from confpred.problem.operation import KernelSpec
from confpred.sampler.tasks import Task

#: Configs of a problem and family: as many as the model puts first, and as many at random, which
#: tell it where it is wrong.
PICKED, RANDOM = 20, 20
#: One network in so many is held out of training for good, by its name; so each model of this
#: user's is judged on networks that none of them has learned from.
HELD_OUT_OF = 10
#: What is left of a problem's worth where another one is exactly like it.
_LEAST_NOVELTY = 0.02


@dataclass(frozen=True, slots=True)
class Costs:
    """What measuring takes, in seconds.

    Attributes:
        row_s: of a config on the GPU (`benchmarks/model/sampling_rate.py`).
        task_s: of a problem with one provider, whatever its configs: operands and a reference.
        kernel_s: of compiling a kernel, in one process.
        processes: compilations at a time.
    """

    row_s: float = 1 / 300
    task_s: float = 0.25
    kernel_s: float = 0.6
    processes: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A problem that could be measured.

    Attributes:
        tasks: with each provider.
        kernels: those that are not compiled yet.
        place: the problem among others; a distance of 1 is far.
        doubt: by how much the present answer may exceed the best, such as 0.2.
    """

    tasks: tuple[Task, ...]
    kernels: frozenset[KernelSpec]
    place: NDArray[np.float64]
    doubt: float

    def measuring_s(self, costs: Costs) -> float:
        """Seconds on the GPU."""
        rows = sum(len(task.config_ids) for task in self.tasks)
        return rows * costs.row_s + len(self.tasks) * costs.task_s


def plan(
    offers: Sequence[Offer],
    known: Sequence[NDArray[np.float64]],
    costs: Costs,
    budget_s: float,
) -> list[int]:
    """Which of `offers` to measure, the most worth a second first, until `budget_s` is spent.

    Args:
        offers: problems to choose from.
        known: places of the problems that were measured before.
        costs: see `Costs`.
        budget_s: seconds, compilations included; the last offer may exceed it.
    """
    if not offers:
        return []
    places = np.stack([offer.place for offer in offers])
    doubt = np.array([offer.doubt for offer in offers])
    near = np.full(len(offers), np.inf)
    for place in known:
        near = np.minimum(near, np.linalg.norm(places - place, axis=1))
    kernel_s = costs.kernel_s / costs.processes
    missing = np.array([len(offer.kernels) for offer in offers], np.float64)
    measuring = np.array([offer.measuring_s(costs) for offer in offers])
    needing: dict[KernelSpec, list[int]] = {}
    for index, offer in enumerate(offers):
        for kernel in offer.kernels:
            needing.setdefault(kernel, []).append(index)
    chosen: list[int] = []
    open_to_choice = np.ones(len(offers), np.bool_)
    spent = 0.0
    while spent < budget_s and open_to_choice.any():
        novelty = _LEAST_NOVELTY + 1 - 1 / (1 + near)
        worth = doubt * novelty / (measuring + missing * kernel_s)
        best = int(np.where(open_to_choice, worth, -1.0).argmax())
        chosen.append(best)
        open_to_choice[best] = False
        spent += measuring[best] + missing[best] * kernel_s
        near = np.minimum(near, np.linalg.norm(places - places[best], axis=1))
        for kernel in offers[best].kernels:
            for index in needing.pop(kernel, ()):
                missing[index] -= 1
    return chosen


def is_held_out(networks: Iterable[str]) -> bool:
    """Whether a problem of `networks` is only to judge by."""
    return any(zlib.crc32(name.encode()) % HELD_OUT_OF == 0 for name in networks)
