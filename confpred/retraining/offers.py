"""Tasks under a budget: the problems of a suite, and their worth.

A minute is spent where it teaches most. The lesson of a problem is guessed from two things: how far
the present answers may be off (their bound on regret), and how unlike it is to all that has been
measured or is planned already. Its cost is the time to measure it, and to compile those of its
kernels that are neither compiled nor planned: a config is compiled once for all problems, so the
first problems are dear and later ones cheap.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from confpred.cuda.compiler import compiled_before
from confpred.cuda.epilogue import epilogue_source
from confpred.data.suites import Entry, Suite
from confpred.families.kernel_text import identity_of
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate, Family
from confpred.families.registry import config_ids, families_of, kernels_of, operation_of
from confpred.model.folder import Model
from confpred.model.rank import rank_by_estimate
from confpred.predict.predictor import Predictor
from confpred.problem.device import Device
from confpred.problem.operation import KernelSpec
from confpred.problem.record import Record
from confpred.sampler.tasks import BENCHMARK, Measured, Task

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
    """Costs of measuring, in seconds.

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


#: So many times the problems that the budget could hold are looked at; describing one takes tens of
#: milliseconds.
_LOOKED_AT = 3
#: What a folder of measurements holds, as the sampler's store tells it.
Have = Mapping[Measured, AbstractSet[str]]
_UNKNOWN_DOUBT = 1.0  # of an answer without a bound


def to_learn_from(suite: Suite) -> list[Entry]:
    """Return the entries of `suite` that share no layer with a network that is held out, each
    once."""
    held_out = {e.problem.layer() for e in suite.entries if is_held_out(e.networks)}
    return [e for e in _joined(suite) if e.problem.layer() not in held_out]


def to_judge_by(suite: Suite) -> list[Entry]:
    """Return the entries of `suite` that are of a network that is held out, each once."""
    return [entry for entry in _joined(suite) if is_held_out(entry.networks)]


def _joined(suite: Suite) -> list[Entry]:
    networks: dict[Record, tuple[str, ...]] = {}
    for entry in suite.entries:
        known = networks.get(entry.problem, ())
        networks[entry.problem] = tuple(dict.fromkeys(known + entry.networks))
    return [Entry(problem, names) for problem, names in networks.items()]


def tasks_to_learn(
    suite: Suite,
    device: Device,
    donor: Model | None,
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
        donor: the model whose first configs are measured beside random ones; None for those that
            the families' estimates put first.
        predictor: says how far its answers may be off.
        measured: what needs no measurement.
        costs, budget_s: see `confpred.retraining.offers.plan`.
        seed: of the random configs, and of which problems are looked at.
        pytorch: whether PyTorch's own operator is measured too.
    """
    entries = to_learn_from(suite)
    rng = np.random.default_rng(seed)
    held = budget_s / (costs.task_s + (PICKED + RANDOM) * costs.row_s)
    few = rng.permutation(len(entries))[: max(1, int(_LOOKED_AT * held))]
    scale = _Scale([entry.problem for entry in entries], device)
    compiled: dict[KernelSpec, bool] = {}
    offers = []
    for index in few:
        entry = entries[index]
        tasks = _tasks(entry, device, donor, measured, seed, pytorch=pytorch)
        if tasks:
            bound = predictor.choose(entry.problem, device).regret_bound
            offers.append(
                Offer(
                    tasks,
                    _not_compiled(tasks, device.arch, compiled),
                    scale.place(entry.problem),
                    _UNKNOWN_DOUBT if bound is None else bound - 1,
                )
            )
    places = [scale.place(problem) for problem in {key.problem for key in measured}]
    return [task for i in plan(offers, places, costs, budget_s) for task in offers[i].tasks]


def tasks_to_judge(entry: Entry, candidates: Iterable[Candidate]) -> list[Task]:
    """Tasks that time these candidates of a problem."""
    providers: dict[str, set[int]] = {}
    for candidate in candidates:
        providers.setdefault(candidate.provider, set()).add(candidate.config_id)
    families = families_of(entry.problem)
    found = []
    for provider, ids in sorted(providers.items()):
        rows = tuple(sorted(ids))
        if provider in families:
            digest = identity_of(families[provider].launch(entry.problem, rows[0]).source)
            found.append(Task(entry.problem, entry.networks, provider, digest, rows))
        else:
            found.append(_of_pytorch(entry))
    return found


def _of_pytorch(entry: Entry) -> Task:
    operator, source = PYTORCH_OPERATOR, epilogue_source(entry.problem)
    where = (entry.problem, entry.networks, operator.provider, source)
    return Task(*where, (operator.config_id,), BENCHMARK)


class _Scale:
    """Places of problems: their operation's features, each over its spread among `problems`."""

    def __init__(self, problems: Sequence[Record], device: Device) -> None:
        self._device = device
        rows = np.concatenate([self._features(problem) for problem in problems])
        spread = rows.std(axis=0)
        width = np.sqrt(rows.shape[1])  # so that typical problems are at a distance of about 1
        self._factor = np.divide(1 / width, spread, out=np.zeros_like(spread), where=spread > 0)

    def _features(self, problem: Record) -> NDArray[np.float64]:
        return operation_of(problem).features(problem, self._device).astype(np.float64)

    def place(self, problem: Record) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self._features(problem)[0] * self._factor
        return found


def _tasks(
    entry: Entry,
    device: Device,
    donor: Model | None,
    measured: Have,
    seed: int,
    *,
    pytorch: bool,
) -> tuple[Task, ...]:
    problem, found = entry.problem, []
    for family in kernels_of(problem).values():
        rows = _rows(family, problem, device, donor, seed)
        if not rows:
            continue
        digest = identity_of(family.launch(problem, rows[0]).source)
        task = Task(problem, entry.networks, family.name, digest, tuple(rows))
        have = measured.get(Measured(problem, family.name, digest), frozenset())
        done = {config_ids(family.name).get(words) for words in have}
        left = tuple(row for row in rows if row not in done)
        if left:
            found.append(replace(task, config_ids=left))
    theirs = _of_pytorch(entry)
    timed = Measured(problem, theirs.provider, theirs.source_digest) in measured
    if pytorch and found and not timed:
        found.append(theirs)
    return tuple(found)


def _rows(
    family: Family, problem: Record, device: Device, donor: Model | None, seed: int
) -> list[int]:
    """Return the configs that come first by the model, or by the estimate, and random other
    ones."""
    legal = np.flatnonzero(family.legal(problem, device))
    if not len(legal):
        return []
    learned = donor.families.get(family.name) if donor is not None else None
    if learned is None:
        first, _ = rank_by_estimate(family, problem, device)
    else:
        first, _ = learned.rank(problem, device, legal)
    picked = {int(row) for row in first[:PICKED]}
    others = np.array([row for row in legal if int(row) not in picked], np.intp)
    name = zlib.crc32(f"{family.name} {problem}".encode())
    rng = np.random.default_rng([seed, name])
    drawn = rng.choice(others, min(RANDOM, len(others)), replace=False)
    return sorted(picked | {int(row) for row in drawn})


def _not_compiled(
    tasks: Sequence[Task], arch: str, compiled: dict[KernelSpec, bool]
) -> frozenset[KernelSpec]:
    kernels = {kernel for task in tasks for each in task.kernels() for kernel in each}
    for kernel in kernels - compiled.keys():
        compiled[kernel] = compiled_before(kernel, arch) is not None
    return frozenset(kernel for kernel in kernels if not compiled[kernel])
