"""Whole answers for networks held out: what a user would have got, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from confpred.families.candidate import PYTORCH_OPERATOR, Candidate
from confpred.model.deciding import Options, Ranked, fastest, with_pytorch
from confpred.model.ranking import PytorchModel
from confpred.model.trees import Trees
from confpred.problem.record import Record
from confpred.training.dataset import Dataset, Timings
from confpred.training.fit import Hyperparameters
from confpred.training.methods import Score
from confpred.training.pytorch import fit_pytorch
from confpred.training.split import Fold

_MOST = 32  # choices of a family, as of an answer


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What models that saw none of a problem's layers answer.

    Attributes:
        problem: what was asked.
        networks: the networks that have it, sorted.
        options: all candidates in the order of the answer, with their expected seconds.
        ours_ms: measured time of the first candidate of ours.
        our_best_ms: time of the fastest measured config of all families.
        pytorch_ms: measured time of PyTorch's operator.
    """

    problem: Record
    networks: tuple[str, ...]
    options: Options
    ours_ms: float
    our_best_ms: float
    pytorch_ms: float

    @property
    def chosen(self) -> Candidate:
        """What comes first."""
        return self.options[0][1]

    @property
    def time_ms(self) -> float:
        """Measured time of what comes first."""
        return self.pytorch_ms if self.chosen == PYTORCH_OPERATOR else self.ours_ms

    @property
    def best_ms(self) -> float:
        """Time of the fastest of all that was measured."""
        return min(self.our_best_ms, self.pytorch_ms)

    @property
    def regret(self) -> float:
        return self.time_ms / self.best_ms


def answers(
    dataset: Dataset,
    folds: Sequence[Fold],
    scores: Mapping[int, Sequence[Score]],
    hyper: Hyperparameters,
    seed: int,
) -> tuple[Answer, ...]:
    """Answers for the problems of each fold whose time with PyTorch's operator is known; none where
    it was measured too seldom to learn from.

    Args:
        dataset: what was measured.
        folds: its networks, divided.
        scores: by the position of a fold, how its model did on each of its test timings.
        hyper, seed: of what predicts PyTorch's time.
    """
    found: list[Answer] = []
    for position, fold in enumerate(folds):
        fitted = fit_pytorch(
            fold.train, dataset.pytorch_everywhere, dataset.operation, dataset.device, hyper, seed
        )
        if fitted is None:
            return ()
        pytorch = PytorchModel(dataset.operation, Trees(fitted.ratio), fitted.margin)
        of_problem: dict[Record, list[tuple[Timings, Score]]] = {}
        for t, score in zip(fold.test, scores[position], strict=True):
            of_problem.setdefault(t.problem, []).append((t, score))
        for problem, parts in of_problem.items():
            theirs = dataset.pytorch_ms.get(problem)
            if theirs is not None:
                slowdown = pytorch.slowdown(problem, dataset.device)
                found.append(_answer(problem, parts, slowdown, theirs))
    return tuple(found)


def _answer(
    problem: Record,
    parts: Sequence[tuple[Timings, Score]],
    slowdown: tuple[float, float],
    theirs: float,
) -> Answer:
    ranked: Ranked = {t.family: s.ranked for t, s in parts if s.ranked is not None}
    ours = fastest(ranked, _MOST)
    first = ours[0][1]
    times = {t.family: (t, s) for t, s in parts}
    timings, score = times[first.provider]
    return Answer(
        problem=problem,
        networks=timings.networks,
        options=with_pytorch(ours, slowdown),
        ours_ms=score.regret[0] * float(timings.time_ms.min()),
        our_best_ms=min(float(t.time_ms.min()) for t, _ in parts),
        pytorch_ms=theirs,
    )
