"""Tuning: on a GPU that no model knows, the layers of a capture are measured, within a budget.

    a guess without a kept answer (`confpred.pytorch.run.choosing`)
      -> measured now, the layers that may save most first             while the budget lasts
      -> the guess from a device of this architecture, else PyTorch's operator

The sampler measures, by its protocol and in processes of its own: a fault or a hang costs a
candidate. PyTorch's operator is timed before and after the candidates of each layer, and every
candidate's results are compared with a reference and with PyTorch's. Ranks of ``torch.distributed``
measure nothing.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from confpred.cuda import driver
from confpred.cuda.epilogue import left_to_pytorch
from confpred.cudnn.plans import lacks_library
from confpred.data.suites import Entry, Suite
from confpred.errors import ConfpredError, FolderBusy, first_line
from confpred.families.protocol import PYTORCH, Candidate, within
from confpred.families.registry import families_of, kernels_of, operation_of
from confpred.launch.assignment import Assignment
from confpred.measure.pytorch import library_call, operands
from confpred.measure.timing import Outcome
from confpred.model.rank import rank_by_estimate
from confpred.predict.choice import MAX_TOP, Choice
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import Device, get_device
from confpred.problem.limits import Limits
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.pytorch.run import choosing
from confpred.pytorch.run.choosing import Constraints, is_open, limits_for
from confpred.pytorch.run.loading import load
from confpred.sampler import kept
from confpred.sampler.jobs import MeasureJob, measure_job
from confpred.sampler.tasks import RowKey, Task, left_of, pytorch_task, task_of

log = logging.getLogger("confpred")
#: Seconds that a network is given on a GPU without a model.
BUDGET_S = 60.0
#: Candidates of a layer in each round, those of earlier rounds included. A later round begins only
#: where so many seconds are left, as it loads PyTorch and CUDA first.
_ROUNDS, _ROUND_S = (4, 12), 10.0
#: Candidates of a layer that differs from an earlier one only in what follows the convolution.
_ALIKE = 2
#: How much less than PyTorch's operator the fastest config takes, as a share of the layer's
#: roofline time, by grouping: medians of an H100's measurements in ``datasets/``. An H200's are
#: 0.5, 3.3 and 18.
_SAVED = {"dense": 0.45, "grouped": 2.2, "depthwise": 3.3}
#: A candidate that says nothing for so long hangs; so long after the budget all is stopped.
_SILENCE_S, _GRACE_S = 20.0, 5.0
_BY_ESTIMATE = 4  # candidates of each family, which the predictor may leave out
_PROCESSES = 16  # that compile, at most; each holds 100 MB of the host's memory
_BUSY_S = 0.5  # between two looks whether another process still measures
#: Memory of a second process: its context and libraries, and times what a layer reads and writes,
#: as operands come several times and the reference is in float64.
_CONTEXT_BYTES, _COPIES = 3 << 29, 12
#: Largest ||out - PyTorch's|| / ||PyTorch's||: algorithms differ in how they round.
LARGEST_ERROR = {"float16": 1e-2, "bfloat16": 4e-2, "float32": 1e-2}
_FURTHER = "`confpred retrain --kept` makes a model of them, `confpred submit` shares them"
#: Import path of the job function for `MeasureJob`s.
JOB = f"{__name__}:compared_job"


class Measured(BaseException):
    """Layers were measured while a graph was compiled that PyTorch's cache would keep by the
    answers before: it is compiled anew. No step of a rewrite takes it for its own failure."""


@dataclass(eq=False)
class Tuner:
    """Measures layers of one network on one GPU, and remembers what that has taken.

    Attributes:
        budget_s: seconds of measuring; None for ``BUDGET_S`` where no model knows the GPU, else 0.
        spent_s: of them, waiting for another process included.
        note: what was done, or why nothing is, in words; empty where there was nothing to do.
        begins_anew: whether what was measured is said by raising `Measured`.
        is_done: whether another process would rewrite a graph alike: since it was set, every layer
            had an answer, or the budget is 0; all that is kept could be read; and nothing failed.
    """

    budget_s: float | None = None
    spent_s: float = 0.0
    note: str = ""
    begins_anew: bool = False
    is_done: bool = True
    _tried: set[Record] = field(default_factory=set)
    _warned: bool = False
    _is_off: bool = False

    def on(self, ordinal: int) -> choosing.Measure:
        """Return a function that replaces guesses by measured choices on CUDA device `ordinal`."""
        return partial(self._replace, ordinal)

    def _replace(
        self,
        ordinal: int,
        choices: Sequence[Choice | None],
        device: Device,
        constraints: Constraints,
    ) -> Sequence[Choice | None]:
        """Return `choices` on CUDA device `ordinal`, which is `device`, with answers instead of
        guesses as far as these are measured within the budget."""
        self.note_kept(choices)
        self.is_done &= not kept.unread and None not in choices
        if not self._budget_on(device):
            return choices
        guesses = Counter(c for c in choices if c is not None and is_open(c, constraints))
        groups: dict[tuple[Operation, Limits], list[Record]] = {}
        for guess in sorted(guesses, key=lambda c: -guesses[c] * _saved_s(c.problem, device)):
            problem = guess.problem
            key = operation_of(problem), limits_for(problem, constraints.limits)
            groups.setdefault(key, []).append(problem)
        answers: dict[Record, Choice] = {}
        for (operation, limits), problems in groups.items():
            layers = _Layers(ordinal, device, operation, limits)
            try:
                answers |= self._measured(layers, problems)
            except (ConfpredError, ImportError, OSError, RuntimeError) as error:
                self._stop(f"measuring failed: {first_line(error)}")
        if answers and self.begins_anew:
            raise Measured
        self.is_done &= all(guess.problem in answers for guess in guesses)
        return [None if c is None else answers.get(c.problem, c) for c in choices]

    def note_kept(self, choices: Iterable[Choice | None]) -> None:
        """Say in `note` where answers are kept if some of `choices` are: measured, by no model."""
        for choice in filter(None, choices):
            if choice.source == "measured" and choice.model is None and not self.note:
                device, operation = get_device(choice.device), operation_of(choice.problem)
                folder = choosing.kept_folder(device, operation)
                self.note = f"answers are kept in {folder}; {_FURTHER}"

    def _budget_on(self, device: Device) -> float:
        if self.budget_s is not None:
            return self.budget_s
        return 0.0 if device.key in choosing.current_predictor().models else BUDGET_S

    def _left_s(self, device: Device) -> float:
        return 0.0 if self._is_off else self._budget_on(device) - self.spent_s

    def _measured(self, layers: _Layers, problems: Sequence[Record]) -> dict[Record, Choice]:
        """Return the answers to those of `problems` that can be measured now."""
        missing = [p for p in problems if p not in self._tried]
        self._tried.update(missing)
        if not missing or self._left_s(layers.device) <= 0:
            return {}
        if why := layers.why_unmeasured():
            self._stop(why)
            return {}
        fitting = layers.fitting(missing)
        begun = time.monotonic()
        try:
            self._measure(layers, fitting)
        finally:
            self.spent_s += time.monotonic() - begun
        answers = choosing.kept_answers(missing, layers.device, layers.operation, layers.limits)
        short = len(missing) - len(fitting)
        self.note = (
            f"measured {len(answers)} of {len(missing)} layers in {self.spent_s:.0f} s"
            + f", for {short} the GPU lacks memory" * bool(short)
            + f"; {_FURTHER}"
        )
        log.info("tune: %s", self.note)
        return answers

    def _measure(self, layers: _Layers, problems: Sequence[Record]) -> None:
        from confpred.sampler.run import Here, Sampling, find_gpus, sample  # imports pyarrow

        if not problems:
            return
        left_s = self._left_s(layers.device)
        deadline = time.monotonic() + left_s
        if not self._warned:
            self._warned = True
            log.warning(
                "no model knows %s: measuring layers for at most %.0f s, and keeping the answers "
                "in %s; tune=0 turns it off",
                *(layers.device.product, left_s, layers.folder),
            )
        suite = Suite("tuned", (Entry(problems[0]),))  # for its operation; `_tasks` has the tasks
        for number, most in enumerate(_ROUNDS):
            chosen = partial(_tasks, layers, problems, most, layers.hints())
            while (left_s := deadline - time.monotonic()) > _ROUND_S * (number > 0):
                settings = Sampling(
                    processes=min(len(os.sched_getaffinity(0)), _PROCESSES), budget_s=left_s,
                    silence_s=_SILENCE_S, measure=JOB,
                )  # fmt: skip
                here = Here(find_gpus(str(layers.ordinal)), settings)  # a run of its own
                try:
                    sample(
                        suite, layers.folder, here, settings, chosen=chosen, show=self._show,
                        interrupts=partial(_over, deadline + _GRACE_S),
                    )  # fmt: skip
                    break
                except FolderBusy:  # another process measures the same, perhaps
                    time.sleep(_BUSY_S)

    def _show(self, tally: Any) -> None:
        self.note = f"measuring: {tally.rows} of {tally.total_rows} candidates"

    def _stop(self, why: str) -> None:
        """Measure no more, and say why."""
        self._is_off, self.note = True, why
        log.warning("layers that no model knows are not measured: %s", why)


#: The tuner of all networks of this process that ``torch.compile`` compiles, by its budget.
of_process = cache(Tuner)


def _over(deadline: float) -> int:
    """Return how often a run is asked to stop: after `deadline` twice, which means at once."""
    return 2 * (time.monotonic() > deadline)


def _saved_s(problem: Record, device: Device) -> float:
    return device.roofline_s(problem) * _SAVED.get(problem.grouping.partition(" ")[0], 1.0)


@dataclass(frozen=True, slots=True)
class _Layers:
    """Where and how layers of one operation are measured."""

    ordinal: int
    device: Device
    operation: Operation
    limits: Limits

    @property
    def folder(self) -> Path:
        return choosing.kept_folder(self.device, self.operation)

    def hints(self) -> kept.Times:
        """Return what was measured under other versions of driver or cuDNN, the ones used last: it
        says what to measure first, as its times may no longer hold."""
        folders = kept.folders_of(self.device.key, self.operation)
        others = [folder for folder in folders if folder != self.folder]
        return kept.times_in(others[0], self.operation) if others else {}

    def why_unmeasured(self) -> str:
        """Return why nothing can be measured now, in words; empty where it can."""
        if choosing.ranks() > 1:
            return "ranks of torch.distributed use answers that one process has kept before"
        if driver.is_part(self.ordinal):
            return "other processes see all of a GPU that this context has a part of"
        if driver.is_exclusive(self.ordinal):
            return "the GPU's compute mode allows one process"
        return ""

    def fitting(self, problems: Sequence[Record]) -> list[Record]:
        """Return those of `problems` that a second process has the memory for."""
        free = torch.cuda.mem_get_info(self.ordinal)[0] - _CONTEXT_BYTES
        return [p for p in problems if _COPIES * p.minimum_bytes <= free]


def candidates(
    problem: Record, device: Device, limits: Limits, hints: Iterable[Candidate] = ()
) -> list[Candidate]:
    """Return what is worth measuring: the first candidate of each family, then the second ones,
    and so on, so that one family's wrong estimates do not use up the time; families and candidates
    in the order of `hints`, the predictor and estimates. Those of `hints` may be beyond `limits`,
    which answers are held to."""
    predictor = choosing.current_predictor(operation_of(problem).name).within(limits)
    ranked = [choice.candidate for choice in predictor.rank(problem, device, MAX_TOP)]
    limits = predictor.limits
    for name, family in kernels_of(problem).items():
        rows = rank_by_estimate(family, problem, device)[0]
        legal = within(family, problem, rows, limits, _BY_ESTIMATE)
        ranked += [Candidate(name, int(row)) for row in legal]
    by_family: dict[str, list[Candidate]] = {}
    families = families_of(problem)
    for candidate in dict.fromkeys((*hints, *ranked)):
        owner = families.get(candidate.provider)  # PyTorch's operator, timed beside all, has none
        if owner is None or not owner.legal(problem, device)[candidate.config_id]:
            continue
        if lacks_library(candidate.provider):
            continue
        by_family.setdefault(candidate.provider, []).append(candidate)
    turns = zip_longest(*by_family.values())
    return [candidate for turn in turns for candidate in turn if candidate is not None]


def _tasks(
    layers: _Layers, problems: Sequence[Record], most: int, hints: kept.Times,
    measured: Mapping[RowKey, AbstractSet[str]],
) -> list[Task]:  # fmt: skip
    """Return the tasks that are left of `problems`: of each its first candidates, and PyTorch's
    operator before and after them.

    Args:
        layers: where and how they are measured.
        problems: the layers, those that may save most first.
        most: how many candidates of a layer; fewer of one that resembles an earlier one.
        hints: times under other versions, whose candidates come first.
        measured: the configs that the folder has, by the columns of their rows.
    """
    tasks: list[Task] = []
    seen: set[Record] = set()
    for problem in problems:
        if not layers.operation.operands(problem):  # or PyTorch has no call for it
            continue
        bare = left_to_pytorch(problem) if isinstance(problem, Problem) else problem
        count = _ALIKE if bare in seen else most
        seen.add(bare)
        hinted = [timed.candidate for timed in hints.get(problem, ()) if timed.ms < math.inf]
        rows: dict[str, list[int]] = {}
        for candidate in candidates(problem, layers.device, layers.limits, hinted)[:count]:
            rows.setdefault(candidate.provider, []).append(candidate.config_id)
        families = families_of(problem)
        planned = [task_of(problem, (), families[name], own) for name, own in rows.items()]
        left = [part for task in planned for part in left_of(task, measured)]
        around = [pytorch_task(problem, ())] * bool(left)
        tasks += [*around, *left, *around]
    return tasks


# The job of the worker process.


def compared_job(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    """Measure a task as the sampler does. Then launch the candidates that gave right results as
    PyTorch would, and compare their results with those of PyTorch's operator."""
    outcomes, problem = measure_job(job, report), job.task.problem
    if job.task.provider == PYTORCH or not isinstance(problem, Problem):
        return outcomes
    with torch.cuda.device(job.ordinal), torch.no_grad():
        (tensors,) = operands(CONVOLUTION, problem, 1)
        expected = _as_list(library_call(CONVOLUTION, problem, job.ordinal)(tensors))
        arguments = [t.permute(0, 3, 1, 2) if t.dim() == 4 else t for t in tensors.values()]

        def compared(outcome: Outcome) -> Outcome:
            if outcome.status != "ok":
                return outcome
            report(outcome.config_id)
            candidate = Candidate(job.task.provider, outcome.config_id)
            ready = load(Assignment(problem, candidate), job.ordinal)
            if ready is None or ready.assignment.candidate != candidate:
                return replace(outcome, status="launch_error", message="PyTorch cannot launch it")
            error = largest_error(ready.run(*arguments), expected)
            if error <= LARGEST_ERROR[problem.dtype]:
                return outcome
            message = f"the error against PyTorch's result is {error:.2g}"
            return replace(outcome, status="wrong_result", message=message)

        return [compared(outcome) for outcome in outcomes]


def _as_list(result: Any) -> list[torch.Tensor]:
    tensors = result if isinstance(result, tuple) else (result,)
    return [t for t in tensors if t is not None]


def largest_error(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest ||actual - expected|| / ||expected||; NaN where a result is NaN."""
    errors = []
    for one, other in zip(actual, expected, strict=True):
        wide, reference = one.double(), other.double()
        errors.append(float((wide - reference).norm() / reference.norm().clamp(min=1e-30)))
    return float(torch.tensor(errors).max())
