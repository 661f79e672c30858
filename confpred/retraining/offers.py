"""Choose what to measure in a budget of time: the problems of a suite by their worth a second.

The worth of a problem has two parts: how far the present answer may be off (its bound on regret),
and the distance of the problem to all that are measured or planned. Its cost is the time to measure
it, and to compile those of its kernels that are neither compiled nor planned. A kernel is compiled
once for all problems, so the first problems are expensive and later ones cheap.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from confpred.cuda.compiler import compiled_before
from confpred.data.suites import Entry, Suite
from confpred.families.protocol import Candidate, Family
from confpred.families.registry import families_of, kernels_of, operation_of
from confpred.model.folder import Model
from confpred.model.rank import rank_by_estimate
from confpred.predict.predictor import Predictor
from confpred.problem.device import Device
from confpred.problem.operation import KernelSpec
from confpred.problem.record import Record
from confpred.sampler.tasks import RowKey, Task, left_of, pytorch_task, task_of

#: Configs of a problem and family: so many that the model puts first, and so many random ones,
#: which show where the model is wrong.
PICKED, RANDOM = 20, 20
#: One network in so many is held out of training for good, by its name; so each of a user's models
#: is judged on networks that none of them was trained on.
HELD_OUT_OF = 10
#: Share of a problem's worth that remains if the same problem was measured.
_LEAST_NOVELTY = 0.02
#: Problems to consider, as a multiple of those that the budget allows; describing one takes tens of
#: milliseconds.
_LOOKED_AT = 3
_UNKNOWN_DOUBT = 1.0  # doubt of an answer without a bound
#: Measured configs of a folder by key, as the sampler's store lists them.
Have = Mapping[RowKey, AbstractSet[str]]


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of measuring, in seconds."""

    row_s: float = 1 / 300  # of a config on the GPU (`benchmarks/model/sampling_rate.py`)
    task_s: float = 0.25  # of a problem with one provider: operands and a reference
    kernel_s: float = 0.6  # of compiling a kernel, in one process
    processes: int = 1  # compilations at a time


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A problem that could be measured."""

    tasks: tuple[Task, ...]  # a task a provider
    kernels: frozenset[KernelSpec]  # kernels that are not compiled yet
    place: NDArray[np.float64]  # scaled features of the problem; a distance of 1 is far
    doubt: float  # excess of the present answer's time over the best, at most; such as 0.2

    def measuring_s(self, costs: Costs) -> float:
        """Return the seconds on the GPU."""
        rows = sum(len(task.config_ids) for task in self.tasks)
        return rows * costs.row_s + len(self.tasks) * costs.task_s


def plan(
    offers: Sequence[Offer], measured: Sequence[NDArray[np.float64]], costs: Costs, budget_s: float
) -> list[int]:
    """Return which of `offers` to measure, the most worth a second first, until `budget_s` is
    spent, compilations included; the last one may exceed it. `measured` are the positions of
    problems that were measured before."""
    if not offers:
        return []
    places = np.stack([offer.place for offer in offers])
    doubt = np.array([offer.doubt for offer in offers])
    distances = [np.linalg.norm(places - place, axis=1) for place in measured]
    near = np.minimum.reduce([np.full(len(offers), np.inf), *distances])
    kernel_s = costs.kernel_s / costs.processes
    missing = np.array([len(offer.kernels) for offer in offers], np.float64)
    measuring = np.array([offer.measuring_s(costs) for offer in offers])
    needing: dict[KernelSpec, list[int]] = defaultdict(list)
    for index, offer in enumerate(offers):
        for kernel in offer.kernels:
            needing[kernel].append(index)
    chosen: list[int] = []
    spent = 0.0
    while spent < budget_s and len(chosen) < len(offers):
        novelty = _LEAST_NOVELTY + 1 - 1 / (1 + near)
        worth = doubt * novelty / (measuring + missing * kernel_s)
        worth[chosen] = -1.0
        best = int(worth.argmax())
        chosen.append(best)
        spent += measuring[best] + missing[best] * kernel_s
        near = np.minimum(near, np.linalg.norm(places - places[best], axis=1))
        for kernel in offers[best].kernels:
            for index in needing.pop(kernel, ()):
                missing[index] -= 1
    return chosen


def is_held_out(networks: Iterable[str]) -> bool:
    """Return whether a problem of `networks` is held out of training."""
    return any(zlib.crc32(name.encode()) % HELD_OUT_OF == 0 for name in networks)


def judged_as(networks: Sequence[str]) -> str:
    """Return the network that a problem of `networks` is judged by: one that is held out, if any
    is; the layers of one network are alike, and count together."""
    return next((name for name in networks if is_held_out([name])), networks[0])


def to_learn_from(suite: Suite) -> list[Entry]:
    """Return the entries of `suite` that share no layer with a held-out network, without
    duplicates."""
    held_out = {e.problem.layer() for e in suite.entries if is_held_out(e.networks)}
    entries = (Entry(problem, names) for problem, names in suite.networks.items())
    return [entry for entry in entries if entry.problem.layer() not in held_out]


def to_judge_by(suite: Suite) -> list[Entry]:
    """Return the entries of `suite` with a held-out network, without duplicates."""
    return [Entry(p, names) for p, names in suite.networks.items() if is_held_out(names)]


def tasks_to_learn(
    suite: Suite,
    device: Device,
    source: Model | None,
    predictor: Predictor,
    *,
    measured: Have,
    costs: Costs,
    budget_s: float,
    seed: int,
    pytorch: bool,
) -> list[Task]:
    """Return the tasks of `suite` for `budget_s` seconds, in that order.

    Args:
        suite: the problems, of one operation.
        device: the device that is measured.
        source: the model whose first configs are measured beside random ones; None for the first
            ones by the families' estimates.
        predictor: gives the bound on the regret of present answers.
        measured: the configs that need no measurement.
        costs, budget_s: see `plan`.
        seed: seed of the random configs, and of the problems to consider.
        pytorch: whether PyTorch's operator is measured too.
    """
    entries = to_learn_from(suite)
    held = budget_s / (costs.task_s + (PICKED + RANDOM) * costs.row_s)
    order = np.random.default_rng(seed).permutation(len(entries))
    place = _scaled([entry.problem for entry in entries], device)
    is_compiled = cache(lambda kernel: compiled_before(kernel, device.arch) is not None)
    offers = []
    for index in order[: max(1, int(_LOOKED_AT * held))]:
        entry = entries[index]
        tasks = _tasks(entry, device, source, measured, seed, pytorch=pytorch)
        if tasks:
            kernels = {k for task in tasks for of_config in task.kernels() for k in of_config}
            missing = frozenset(kernel for kernel in kernels if not is_compiled(kernel))
            bound = predictor.choose(entry.problem, device).regret_bound
            doubt = _UNKNOWN_DOUBT if bound is None else bound - 1
            offers.append(Offer(tasks, missing, place(entry.problem), doubt))
    places = [place(problem) for problem in {key.problem for key in measured}]
    return [task for i in plan(offers, places, costs, budget_s) for task in offers[i].tasks]


def tasks_to_judge(entry: Entry, candidates: Iterable[Candidate]) -> list[Task]:
    """Return tasks that time these candidates of a problem."""
    providers: dict[str, set[int]] = defaultdict(set)
    for candidate in candidates:
        providers[candidate.provider].add(candidate.config_id)
    families = families_of(entry.problem)
    where = (entry.problem, entry.networks)
    return [
        task_of(*where, families[name], sorted(ids)) if name in families else pytorch_task(*where)
        for name, ids in sorted(providers.items())
    ]


def _scaled(problems: Sequence[Record], device: Device) -> Callable[[Record], NDArray[np.float64]]:
    """Return a function from a problem to its position: the operation's features, each divided by
    its spread over `problems`."""

    def features(problem: Record) -> NDArray[np.float64]:
        (row,) = operation_of(problem).features(problem, device).astype(np.float64)
        values: NDArray[np.float64] = row
        return values

    rows = np.stack([features(problem) for problem in problems])
    spread = rows.std(axis=0)
    width = np.sqrt(rows.shape[1])  # so that typical problems are at a distance of about 1
    factor = np.divide(1 / width, spread, out=np.zeros_like(spread), where=spread > 0)
    return lambda problem: features(problem) * factor


def _tasks(
    entry: Entry, device: Device, source: Model | None, measured: Have, seed: int, *, pytorch: bool
) -> tuple[Task, ...]:
    problem, tasks = entry.problem, list[Task]()
    for family in kernels_of(problem).values():
        if rows := _rows(family, problem, device, source, seed):
            tasks += left_of(task_of(problem, entry.networks, family, rows), measured)
    theirs = pytorch_task(problem, entry.networks)
    if pytorch and tasks and theirs.key not in measured:
        tasks.append(theirs)
    return tuple(tasks)


def _rows(
    family: Family, problem: Record, device: Device, source: Model | None, seed: int
) -> list[int]:
    """Return the first configs by the model, or by the estimate, and random others."""
    legal = np.flatnonzero(family.legal(problem, device))
    if not len(legal):
        return []
    learned = source.families.get(family.name) if source is not None else None
    by_estimate = partial(rank_by_estimate, family, problem, device)
    first, _ = by_estimate() if learned is None else learned.rank(problem, device, legal)
    picked = first[:PICKED]
    others = np.setdiff1d(legal, picked)
    rng = np.random.default_rng([seed, zlib.crc32(f"{family.name} {problem}".encode())])
    drawn = rng.choice(others, min(RANDOM, len(others)), replace=False)
    rows: list[int] = np.union1d(picked, drawn).tolist()
    return rows
