"""Whole answers for networks held out: what a user would have got, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from confpred.families.candidate import PYTORCH_OPERATOR, Candidate
from confpred.model.cascade import FINALISTS
from confpred.model.deciding import Options, fastest, with_pytorch
from confpred.model.gate import Gate
from confpred.model.ranking import PytorchModel
from confpred.model.trees import Trees
from confpred.problem.record import Record
from confpred.training.dataset import Dataset, Timings
from confpred.training.fit import Hyperparameters
from confpred.training.gate import fit_gate
from confpred.training.methods import Score
from confpred.training.pytorch import fit_pytorch
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


def answers(
    dataset: Dataset,
    folds: Sequence[Fold],
    scores: Sequence[Score],
    hyper: Hyperparameters,
    seed: int,
) -> tuple[Answer, ...]:
    """Answers for the test problems of each fold: those whose time with PyTorch's operator is
    known, or all of them where it was measured too seldom to learn from.

    Args:
        dataset: what was measured.
        folds: its networks, divided.
        scores: how the model of each fold did on its test timings, fold by fold.
        hyper, seed: of what predicts PyTorch's time.
    """
    found: list[Answer] = []
    left = iter(scores)
    for fold in folds:
        pytorch = _pytorch(fold, dataset, hyper, seed)
        fitted = fit_gate(fold.train, dataset.operation, dataset.device, seed)
        gate = None if fitted is None else fitted.gate(dataset.operation)
        of_problem: dict[Record, list[tuple[Timings, Score]]] = {}
        for t, score in zip(fold.test, islice(left, len(fold.test)), strict=True):
            of_problem.setdefault(t.problem, []).append((t, score))
        for problem, parts in of_problem.items():
            theirs = dataset.pytorch_ms.get(problem)
            if pytorch is None:
                found.append(_answer(problem, parts, gate, None, None))
            elif theirs is not None:
                slowdown = pytorch.slowdown(problem, dataset.device)
                found.append(_answer(problem, parts, gate, slowdown, theirs))
    return tuple(found)


def _pytorch(
    fold: Fold, dataset: Dataset, hyper: Hyperparameters, seed: int
) -> PytorchModel | None:
    fitted = fit_pytorch(
        fold.train, dataset.pytorch_everywhere, dataset.operation, dataset.device, hyper, seed
    )
    if fitted is None:
        return None
    return PytorchModel(dataset.operation, Trees(fitted.ratio), fitted.margin)


def _answer(
    problem: Record,
    parts: Sequence[tuple[Timings, Score]],
    gate: Gate | None,
    slowdown: tuple[float, float] | None,
    theirs: float | None,
) -> Answer:
    # What is judged is the choice among measured configs; how sure the model is of it shows in all
    # that it would offer.
    families = [t.family for t, _ in parts]
    if gate is not None:
        (families,) = gate.open([problem], parts[0][0].device, [families])
    opened = [(t, s) for t, s in parts if t.family in families]
    timings, score = min(opened, key=lambda part: part[1].predicted_ms or inf)
    offered = fastest({t.family: s.ranked for t, s in opened if s.ranked is not None}, FINALISTS)
    return Answer(
        problem=problem,
        networks=timings.networks,
        options=with_pytorch(offered, slowdown),
        ours_ms=score.regret[0] * float(timings.time_ms.min()),
        our_best_ms=min(float(t.time_ms.min()) for t, _ in parts),
        pytorch_ms=theirs,
    )
