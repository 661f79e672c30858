"""Whole answers for networks held out: what a user would have got, and what came of it.

A fold's models choose for the layers that they have not seen. PyTorch's operator takes its place
among the candidates by the margins that the other folds' problems have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log

import numpy as np

from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.registry import operation_of
from confpred.model.gate import Gate
from confpred.model.pytorch_ratio import PytorchModel, with_pytorch
from confpred.model.rank import Options
from confpred.model.trees import Trees
from confpred.problem.device import Device
from confpred.problem.record import Record
from confpred.training.dataset import Dataset, Timings
from confpred.training.fit import Hyperparameters, fit_families
from confpred.training.gate import fit_gate
from confpred.training.helpers import run_in_helpers
from confpred.training.methods import At, Score, best_ms, family_models, score
from confpred.training.pytorch import Times, fit_pytorch, margins
from confpred.training.split import Fold
from confpred.training.steps import Said, unsaid

CROSS_VALIDATING = "cross-validating by network"


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """An answer for a problem, of models that saw none of its layer.

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
class Offered:
    """A problem that a fold holds out, before PyTorch's operator has its place.

    Attributes:
        fold: number of the fold.
        device: where it was measured.
        ours: the answer without PyTorch's operator.
        ahead: how many times as long the answer takes, which was measured, as the best of all legal
            configs is expected to.
        log_ratio: expected logarithm of (PyTorch's time / ours); None where nothing is known.
    """

    fold: int
    device: Device
    ours: Answer
    ahead: float
    log_ratio: float | None


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """The problems of the device that were held out.

    Attributes:
        answers: of each: of those whose time with PyTorch's operator is known, or of all where it
            was measured too seldom to learn from.
        margins: of the regressor of PyTorch's time, by kind of problem, by all that was held out on
            any device (`confpred.training.pytorch.margins`).
    """

    answers: tuple[Answer, ...]
    margins: Mapping[str, float]


def cross_validate(
    dataset: Dataset, folds: Sequence[Fold], hyper: Hyperparameters, seed: int, say: Said = unsaid
) -> tuple[tuple[Score, ...], HeldOut]:
    """Let a model learn from each fold's training part and choose for the other part.

    Folds run side by side, a process for each core, as each learns in one thread.

    Returns:
        The scores of each fold's test timings, fold by fold, and the whole answers.

    Raises:
        ConfpredError: see `run_in_helpers`.
    """
    say(CROSS_VALIDATING, 0, len(folds))
    found = run_in_helpers(
        _of_fold,
        [
            (number, fold, dataset.pytorch_everywhere, dataset.device, hyper, seed)
            for number, fold in enumerate(folds)
        ],
        lambda done: say(CROSS_VALIDATING, done, len(folds)),
    )
    scores = tuple(each for of_fold, _ in found for each in of_fold)
    return scores, answered([each for _, offered in found for each in offered], dataset.device)


def _of_fold(
    number: int, fold: Fold, pytorch_ms: Times, device: Device, hyper: Hyperparameters, seed: int
) -> tuple[list[Score], list[Offered]]:
    models = family_models(fit_families(fold.train, device, hyper, seed))
    operation = operation_of(fold.train[0].problem)
    fitted = fit_gate([t for t in fold.train if t.family in models], operation, seed)
    gate = None if fitted is None else fitted.gate(operation)
    ours_ms = best_ms(models, fold.train, pytorch_ms.keys())
    text = fit_pytorch(ours_ms, pytorch_ms, operation, device, hyper, seed)
    ratio = None if text is None else PytorchModel(operation, Trees(text), {})
    scores = [score(models[t.family], t) for t in fold.test]
    judged: dict[At, list[tuple[Timings, Score]]] = {}
    for t, found in zip(fold.test, scores, strict=True):
        judged.setdefault((t.device, t.problem), []).append((t, found))
    for t in fold.elsewhere if ratio is not None else ():
        if (t.device, t.problem) in pytorch_ms and t.family in models:
            found = score(models[t.family], t)
            judged.setdefault((t.device, t.problem), []).append((t, found))
    return scores, list(_offered(number, judged, pytorch_ms, ratio, gate))


def _offered(
    number: int,
    judged: Mapping[At, Sequence[tuple[Timings, Score]]],
    pytorch_ms: Times,
    ratio: PytorchModel | None,
    gate: Gate | None,
) -> Iterator[Offered]:
    for (device, problem), parts in judged.items():
        theirs, expected = pytorch_ms.get((device, problem)), None
        if ratio is not None:
            if theirs is None:
                continue
            (expected,) = ratio.log_ratios([problem], device).tolist()
        names = [t.family for t, _ in parts]
        if gate is not None:
            (names,) = gate.open([problem], device, [names])
        opened = [(t, found) for t, found in parts if t.family in names]
        timings, best = min(opened, key=lambda part: part[1].predicted_ms or inf)
        options = sorted(
            (seconds, Candidate(t.family, row))
            for t, found in opened
            if found.ranked is not None
            for row, seconds in zip(*(each.tolist() for each in found.ranked), strict=True)
        )
        answer = Answer(
            problem=problem,
            networks=timings.networks,
            options=options,
            ours_ms=best.regret[0] * float(timings.time_ms.min()),
            our_best_ms=min(float(t.time_ms.min()) for t, _ in parts),
            pytorch_ms=None if ratio is None else theirs,
        )
        yield Offered(number, device, answer, best.ahead, expected)


def answered(offered: Sequence[Offered], device: Device) -> HeldOut:
    """The problems of `device` among `offered`, with PyTorch's operator in its place."""
    numbers = sorted({each.fold for each in offered})
    known = {n: _margins([each for each in offered if each.fold != n]) for n in numbers}
    answers = (_placed(o, known[o.fold]) for o in offered if o.device == device)
    return HeldOut(tuple(answers), _margins(offered))


def _margins(offered: Sequence[Offered]) -> dict[str, float]:
    known = [
        (o.ours.problem.kind, o.log_ratio, log(o.ours.pytorch_ms * o.ahead / o.ours.ours_ms))
        for o in offered
        if o.log_ratio is not None and o.ours.pytorch_ms is not None
    ]
    kinds, expected, actual = zip(*known, strict=True) if known else ((), (), ())
    return margins(kinds, np.array(expected), np.array(actual))


def _placed(offered: Offered, known: Mapping[str, float]) -> Answer:
    ours, ratio = offered.ours, offered.log_ratio
    if ratio is None:
        return ours
    slowdown = (exp(ratio), exp(ratio - known.get(ours.problem.kind, inf)))
    return replace(ours, options=with_pytorch(ours.options, slowdown))
