"""Cross-validation by network, and the figures that it comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.errors import MissingExtra
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.problem.device import Device
from confpred.training import EVALUATION_FORMAT
from confpred.training.answers import Answer, cross_validate
from confpred.training.bounds import FittedBounds, fit_bounds
from confpred.training.dataset import Dataset, Timings
from confpred.training.fit import Hyperparameters
from confpred.training.helpers import run_in_helpers
from confpred.training.methods import TOPS, Score, baselines
from confpred.training.split import Fold, split_by_network
from confpred.training.steps import Said, unsaid

MODEL = "model"
CHOSEN = "the predicted fastest"
JUDGING_BASELINES = "judging the baselines"
SLOWER = 0.05


@dataclass(frozen=True, slots=True)
class Summary:
    """A method's regret over the judged problems: time of its choice / time of the best config.

    Attributes:
        geomean, p90, p95, worst: of the first choice.
        top: geometric mean of the best of the first k choices, by k.
        candidates: mean number of configs chosen from.
    """

    problems: int
    geomean: float
    p90: float
    p95: float
    worst: float
    top: Mapping[str, float]
    candidates: float

    @classmethod
    def of(cls, regret: NDArray[np.float64], candidates: Sequence[int]) -> Summary:
        """Summarise regrets of shape ``(problems, len(TOPS))``."""
        first = regret[:, 0]
        mean = np.exp(np.log(regret).mean(axis=0))
        return cls(
            problems=len(regret),
            geomean=float(mean[0]),
            p90=float(np.quantile(first, 0.90)),
            p95=float(np.quantile(first, 0.95)),
            worst=float(first.max()),
            top={str(k): float(value) for k, value in zip(TOPS, mean, strict=True)},
            candidates=float(np.mean(candidates)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """Every judged problem, with each method's score on it, in one order."""

    timings: tuple[Timings, ...]
    scores: Mapping[str, tuple[Score, ...]]
    missing: Mapping[str, str]  # methods that could not run, and why

    def summary(self, method: str, family: str | None = None) -> Summary:
        """The figures of one method, over all problems or those of one family."""
        scores = [
            score
            for t, score in zip(self.timings, self.scores[method], strict=True)
            if family in (None, t.family)
        ]
        return Summary.of(np.array([s.regret for s in scores]), [s.candidates for s in scores])

    def regret(self, method: str) -> NDArray[np.float64]:
        """Regret of the method's first choice on each problem."""
        return np.array([score.regret[0] for score in self.scores[method]])


def judge_baselines(
    folds: Sequence[Fold], device: Device, seed: int, say: Said = unsaid
) -> tuple[dict[str, tuple[Score, ...]], dict[str, str]]:
    """Let each baseline learn from each fold's training part and judge it on the other part, side
    by side in processes.

    Returns:
        The scores by baseline, fold by fold; and why those that are missing could not run.

    Raises:
        ConfpredError: see `run_in_helpers`.
    """
    pairs = [(name, fold) for name in baselines() for fold in folds]
    say(JUDGING_BASELINES, 0, len(pairs))
    parts = run_in_helpers(
        _judge_fold,
        [(name, fold, device, seed) for name, fold in pairs],
        lambda done: say(JUDGING_BASELINES, done, len(pairs)),
    )
    scores: dict[str, tuple[Score, ...]] = {}
    missing: dict[str, str] = {}
    for (name, _), part in zip(pairs, parts, strict=True):
        if isinstance(part, str):
            missing[name] = part
        else:
            scores[name] = scores.get(name, ()) + part
    return scores, missing


def _judge_fold(name: str, fold: Fold, device: Device, seed: int) -> tuple[Score, ...] | str:
    """A baseline's scores on one fold, or why it cannot run."""
    try:
        return tuple(map(baselines()[name](fold.train, device, seed), fold.test))
    except MissingExtra as error:
        return str(error)


def folds_of(dataset: Dataset, folds: int, seed: int) -> tuple[Fold, ...]:
    """The networks of `dataset` in folds; what is held out of one is held out on all devices.

    Raises:
        DataError: the data cannot be split by network.
    """
    others = [t for other in dataset.others for t in other.timings]
    return split_by_network(dataset.timings, folds, seed, others)


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """The whole choice, among all families and PyTorch's own operator, whose times in the data are
    those of cuDNN's benchmark mode (`confpred.measure.pytorch`).

    Attributes:
        regret: regret against the best of all measured times: of the choice, and of always choosing
            one side.
        time: the times of all problems together, over those of the best: of the same. Large layers
            count for more here, as they do in a network.
        speed, worst_speed: PyTorch's time over that of the choice: geometric mean, and least.
        slower: problems on which the choice is slower than PyTorch's by more than ``SLOWER``.
        pytorch: problems left to PyTorch's operator.
        given_away: of these, problems on which our choice is faster by more than ``SLOWER``.
    """

    regret: Mapping[str, Summary]
    time: Mapping[str, float]
    speed: float
    worst_speed: float
    slower: int
    pytorch: int
    given_away: int


def whole(found: Sequence[Answer]) -> Whole | None:
    """How the answers `found` do; None where PyTorch's operator is no candidate."""
    both = [(a, a.pytorch_ms) for a in found if a.pytorch_ms is not None]
    if not both:
        return None
    ours, best = (np.array([getattr(a, n) for a, _ in both]) for n in ("ours_ms", "best_ms"))
    theirs = np.array([ms for _, ms in both])
    left = np.array([a.chosen == PYTORCH_OPERATOR for a, _ in both])
    times = {
        CHOSEN: np.where(left, theirs, ours),
        "always ours": ours,
        "always PyTorch's": theirs,
    }
    speed = theirs / times[CHOSEN]
    return Whole(
        regret={
            name: Summary.of(np.repeat((ms / best)[:, None], len(TOPS), axis=1), [2])
            for name, ms in times.items()
        },
        time={name: float(ms.sum() / best.sum()) for name, ms in times.items()},
        speed=float(np.exp(np.log(speed).mean())),
        worst_speed=float(speed.min()),
        slower=int((speed < 1 / (1 + SLOWER)).sum()),
        pytorch=int(left.sum()),
        given_away=int((left & (theirs > (1 + SLOWER) * ours)).sum()),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """What `evaluate` finds.

    Attributes:
        judged: problems and scores.
        whole: the choice that a user gets; None where PyTorch's own operator was not measured.
        bounds: the bound on an answer's regret, and how often it held.
        noise: median and 95 % quantile of a timing's interquartile range over its median.
    """

    dataset: Dataset
    folds: tuple[Fold, ...]
    seed: int
    judged: Judged
    whole: Whole | None
    bounds: FittedBounds
    noise: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        judged, names = self.judged, sorted({t.family for t in self.judged.timings})
        return {
            "format": EVALUATION_FORMAT,
            "device": self.dataset.device.key,
            "data": self.dataset.digest,
            "other_devices": [other.device.key for other in self.dataset.others],
            "rows": self.dataset.rows,
            "problems": len(self.dataset.timings),
            "statuses": dict(self.dataset.statuses),
            "seed": self.seed,
            "folds": [
                {"networks": fold.networks, "train": len(fold.train), "test": len(fold.test)}
                for fold in self.folds
            ],
            "noise": {"median": self.noise[0], "p95": self.noise[1]},
            "methods": {m: asdict(judged.summary(m)) for m in judged.scores},
            "families": {
                family: {m: asdict(judged.summary(m, family)) for m in judged.scores}
                for family in names
            },
            "missing": dict(judged.missing),
            "whole": self.whole and asdict(self.whole),
            "bounds": {"coverage": self.bounds.coverage, "median": self.bounds.median},
            "judged": [
                {
                    "problem": str(t.problem),
                    "networks": t.networks,
                    "family": t.family,
                    "oracle_ms": float(t.time_ms.min()),
                    "regret": score.regret[0],
                    "candidates": score.candidates,
                }
                for t, score in zip(judged.timings, judged.scores[MODEL], strict=True)
            ],
        }


def evaluate(
    dataset: Dataset, hyper: Hyperparameters, folds: int, seed: int, say: Said = unsaid
) -> Evaluation:
    """Judge the model and every baseline on networks that they did not learn from.

    Raises:
        DataError: the data cannot be split by network.
    """
    split = folds_of(dataset, folds, seed)
    scores, held_out = cross_validate(dataset, split, hyper, seed, say)
    others, missing = judge_baselines(split, dataset.device, seed, say)
    timings = tuple(t for fold in split for t in fold.test)
    spread = np.concatenate([t.spread_ms / t.time_ms for t in dataset.timings])
    return Evaluation(
        dataset=dataset,
        folds=split,
        seed=seed,
        judged=Judged(timings, {MODEL: scores, **others}, missing),
        whole=whole(held_out.answers),
        bounds=fit_bounds(held_out.answers, dataset, seed),
        noise=(float(np.nanmedian(spread)), float(np.nanquantile(spread, 0.95))),
    )
