"""Whole answers for networks held out: what a user would have got, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import exp, inf, log

import numpy as np

from confpred.families.candidate import PYTORCH_OPERATOR, Candidate
from confpred.model.gate import Gate
from confpred.model.pytorch_ratio import PytorchModel, with_pytorch
from confpred.model.rank import FINALISTS, Options
from confpred.model.trees import Trees
from confpred.problem.record import Record
from confpred.training.dataset import Dataset, Timings
from confpred.training.fit import Hyperparameters
from confpred.training.gate import fit_gate
from confpred.training.methods import Score
from confpred.training.pytorch import fastest_ms, fit_pytorch, margins
from confpred.training.split import Fold


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What models that saw none of a problem's layers answer.

    Attributes:
        problem: what was asked.
        networks: the networks that have it, sorted.
        options: all candidates in the order of the answer, with their expected seconds.
        ours_ms: measured time of the first of those candidates of ours that were measured.
        our_best_ms: time of the fastest measured config of all families.
        pytorch_ms: measured time of PyTorch's operator; None where it is no candidate.
    """

    problem: Record
    networks: tuple[str, ...]
    options: Options
    ours_ms: float
    our_best_ms: float
    pytorch_ms: float | None

    @property
    def chosen(self) -> Candidate:
        """What comes first."""
        return self.options[0][1]

    @property
    def time_ms(self) -> float:
        """Measured time of what comes first."""
        if self.pytorch_ms is not None and self.chosen == PYTORCH_OPERATOR:
            return self.pytorch_ms
        return self.ours_ms

    @property
    def best_ms(self) -> float:
        """Time of the fastest of all that was measured."""
        return min(self.our_best_ms, self.pytorch_ms or inf)

    @property
    def regret(self) -> float:
        return self.time_ms / self.best_ms


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """What came of problems that were held out.

    Attributes:
        answers: of each.
        margins: of the regressor of PyTorch's time, by kind of problem, by all of them and what was
            held out on other devices (`confpred.training.pytorch.margins`).
    """

    answers: tuple[Answer, ...]
    margins: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Offered:
    """A problem of a fold's test, before PyTorch's operator has its place among the candidates of
    `ours`; `log_ratio` is what is expected of its time, or None where nothing is."""

    fold: int
    ours: Answer
    log_ratio: float | None


@dataclass(frozen=True, slots=True)
class Compared:
    """A problem that was held out of a fold: what its time with PyTorch's operator was expected to
    be, and what it was, both as the logarithm of their ratio to that of ours."""

    fold: int
    kind: str
    expected: float
    actual: float


def held_out_answers(
    dataset: Dataset,
    folds: Sequence[Fold],
    scores: Sequence[Score],
    hyper: Hyperparameters,
    seed: int,
) -> HeldOut:
    """Answers for the test problems of each fold: those whose time with PyTorch's operator is
    known, or all of them where it was measured too seldom to learn from. Each fold's answers keep
    the margins that the other folds' problems have, of all devices.

    Args:
        dataset: what was measured.
        folds: its networks, divided.
        scores: how the model of each fold did on its test timings, fold by fold.
        hyper, seed: of what predicts PyTorch's time.
    """
    ratios = _ratios(dataset, folds, hyper, seed)
    offered = list(_offered(dataset, folds, scores, ratios, seed))
    cost = np.log([o.ours.ours_ms / o.ours.our_best_ms for o in offered])
    lost = float(cost.mean()) if len(cost) else 0.0
    return answered(offered, list(compared_elsewhere(dataset, folds, ratios, lost)))


def answered(offered: Sequence[Offered], elsewhere: Sequence[Compared] = ()) -> HeldOut:
    """`offered`, fold by fold, with PyTorch's operator in its place; `elsewhere` is what came of
    the folds' problems on other devices."""
    compared = [*_compared(offered), *elsewhere]
    found = []
    for number in sorted({o.fold for o in offered}):
        known = _margins([c for c in compared if c.fold != number])
        found += [_placed(o, known) for o in offered if o.fold == number]
    return HeldOut(tuple(found), _margins(compared))


def _compared(offered: Sequence[Offered]) -> Iterator[Compared]:
    for o in offered:
        if o.log_ratio is not None and o.ours.pytorch_ms is not None:
            actual = log(o.ours.pytorch_ms / o.ours.ours_ms)
            yield Compared(o.fold, o.ours.problem.kind, o.log_ratio, actual)


def compared_elsewhere(
    dataset: Dataset, folds: Sequence[Fold], ratios: Sequence[PytorchModel | None], lost: float
) -> Iterator[Compared]:
    """The problems on other devices that a fold holds out. Nothing was chosen for them, so ours is
    the fastest that was measured, and what a choice costs on average, `lost`, is added."""
    for other in dataset.others:
        fastest_there = fastest_ms(other.timings)
        for number, (fold, ratio) in enumerate(zip(folds, ratios, strict=True)):
            seen = {(t.device, t.problem) for t in fold.train}
            held_out = [
                (problem, ours_ms)
                for (where, problem), ours_ms in fastest_there.items()
                if problem in other.pytorch_ms and (where, problem) not in seen
            ]
            if ratio is None or not held_out:
                continue
            expected = ratio.log_ratios([problem for problem, _ in held_out], other.device).tolist()
            for (problem, ours_ms), value in zip(held_out, expected, strict=True):
                actual = log(other.pytorch_ms[problem] / ours_ms) - lost
                yield Compared(number, problem.kind, value, actual)


def _ratios(
    dataset: Dataset, folds: Sequence[Fold], hyper: Hyperparameters, seed: int
) -> list[PytorchModel | None]:
    """What predicts PyTorch's time for each fold's test problems."""
    everywhere, operation = dataset.pytorch_everywhere, dataset.operation
    fitted = (
        fit_pytorch(fold.train, everywhere, operation, dataset.device, hyper, seed)
        for fold in folds
    )
    return [None if f is None else PytorchModel(operation, Trees(f), {}) for f in fitted]


def _margins(compared: Sequence[Compared]) -> dict[str, float]:
    return margins(
        [c.kind for c in compared],
        np.array([c.expected for c in compared]),
        np.array([c.actual for c in compared]),
    )


def _placed(offered: Offered, known: Mapping[str, float]) -> Answer:
    ours, ratio = offered.ours, offered.log_ratio
    if ratio is None:
        return ours
    slowdown = (exp(ratio), exp(ratio - known.get(ours.problem.kind, inf)))
    return replace(ours, options=with_pytorch(ours.options, slowdown))


def _offered(
    dataset: Dataset,
    folds: Sequence[Fold],
    scores: Sequence[Score],
    ratios: Sequence[PytorchModel | None],
    seed: int,
) -> Iterator[Offered]:
    left, device, operation = iter(scores), dataset.device, dataset.operation
    for number, (fold, model) in enumerate(zip(folds, ratios, strict=True)):
        fitted = fit_gate(fold.train, operation, seed)
        gate = None if fitted is None else fitted.gate(operation)
        of_problem: dict[Record, list[tuple[Timings, Score]]] = {}
        for t, score in zip(fold.test, islice(left, len(fold.test)), strict=True):
            of_problem.setdefault(t.problem, []).append((t, score))
        for problem, parts in of_problem.items():
            theirs = dataset.pytorch_ms.get(problem)
            if model is None:
                yield Offered(number, _ours(problem, parts, gate, None), None)
            elif theirs is not None:
                (expected,) = model.log_ratios([problem], device).tolist()
                yield Offered(number, _ours(problem, parts, gate, theirs), expected)


def _ours(
    problem: Record,
    parts: Sequence[tuple[Timings, Score]],
    gate: Gate | None,
    theirs: float | None,
) -> Answer:
    """The answer without PyTorch's operator among the candidates."""
    # What is judged is the choice among measured configs; how sure the model is of it shows in all
    # that it would offer.
    families = [t.family for t, _ in parts]
    if gate is not None:
        (families,) = gate.open([problem], parts[0][0].device, [families])
    opened = [(t, s) for t, s in parts if t.family in families]
    timings, score = min(opened, key=lambda part: part[1].predicted_ms or inf)
    offered: Options = []
    for t, s in opened:
        rows, seconds = s.ranked or ((), ())
        first = zip(rows[:FINALISTS], seconds[:FINALISTS], strict=True)
        offered += [(float(value), Candidate(t.family, int(row))) for row, value in first]
    offered.sort(key=lambda option: (option[0], option[1].provider))
    return Answer(
        problem=problem,
        networks=timings.networks,
        options=offered,
        ours_ms=score.regret[0] * float(timings.time_ms.min()),
        our_best_ms=min(float(t.time_ms.min()) for t, _ in parts),
        pytorch_ms=theirs,
    )
