"""An evaluation of the model beside the baselines that it has to beat: figures, tables and a plot.

A *baseline* is trained on timings and returns a *judge*, a function that returns the regret of the
baseline's choice among a problem's measured configs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from confpred.errors import MissingExtra
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.families.registry import all_families
from confpred.files import write_whole
from confpred.model.card import BoundsCard
from confpred.problem.device import Device
from confpred.training import EVALUATION_FORMAT, Said, unsaid
from confpred.training.calibrate import Answer, fit_bounds
from confpred.training.cross_validate import (
    Fold,
    Score,
    cross_validate,
    regret_of,
    run_in_helpers,
    split_by_network,
)
from confpred.training.dataset import Dataset, RunNoise, Timings
from confpred.training.fit import Hyperparameters
from confpred.training.regret import TOPS, figures, geomean, of_tops
from confpred.training.tuning_lists import TUNING_BASELINES, Baseline, Judge, average_order
from confpred.triton.problem import KernelCall

MODEL = "model"
CHOSEN = "the predicted fastest"
JUDGING_BASELINES = "judging the baselines"
SLOWER = 0.05
_TICKS = (1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 4.0)  # of regret in the plot


@dataclass(frozen=True, slots=True)
class Summary:
    """A method's regret over the judged problems: time of its choice / time of the best config."""

    problems: int
    geomean: float  # this and the next three: of the first choice
    p90: float
    p95: float
    worst: float
    top: Mapping[str, float]  # by k: geometric mean of the best of the first k choices
    candidates: float  # mean number of configs to choose from

    @classmethod
    def of(cls, regret: NDArray[np.float64], candidates: Sequence[int]) -> Summary:
        """Summarise regrets of shape ``(problems, len(TOPS))``."""
        first = figures(regret[:, 0], "geomean", "p90", "p95", "worst")
        return cls(**first, top=of_tops(regret), candidates=float(np.mean(candidates)))

    @classmethod
    def of_scores(cls, scores: Iterable[Score]) -> Summary:
        """Summarise the scores of a method, one a problem."""
        regrets, candidates = zip(*((s.regret, s.candidates) for s in scores), strict=True)
        return cls.of(np.array(regrets), candidates)


def judge_baselines(
    folds: Sequence[Fold], device: Device, seed: int, say: Said = unsaid
) -> tuple[dict[str, tuple[Score, ...]], dict[str, str]]:
    """Train each baseline on each fold's training part and judge it on the test part, side by side
    in processes.

    Returns:
        The scores by baseline, fold by fold; and the reason for each baseline that could not run.

    Raises:
        ConfpredError: see `run_in_helpers`.
    """
    tuned = TUNING_BASELINES if isinstance(folds[0].train[0].problem, KernelCall) else ()
    pairs = [(name, fold) for name in (*baselines(), *tuned) for fold in folds]
    calls = [(name, fold, device, seed) for name, fold in pairs]
    parts = run_in_helpers(_judge_fold, calls, JUDGING_BASELINES, say)
    scores: dict[str, tuple[Score, ...]] = {}
    missing = {}
    for (name, _), part in zip(pairs, parts, strict=True):
        if isinstance(part, str):
            missing[name] = part
        else:
            scores[name] = scores.get(name, ()) + part
    return scores, missing


def _judge_fold(name: str, fold: Fold, device: Device, seed: int) -> tuple[Score, ...] | str:
    """Return a baseline's scores on one fold, or the reason why it cannot run."""
    measured = {t.family for t in fold.train if t.device == device}
    own = [t for t in fold.train if t.device == device or t.family not in measured]
    try:
        baseline = {**baselines(), **TUNING_BASELINES}[name]
        return tuple(map(baseline(own, device, seed), fold.test))
    except MissingExtra as error:
        return str(error)


def folds_of(dataset: Dataset, folds: int, seed: int) -> tuple[Fold, ...]:
    """Split the networks of `dataset` into folds; layers held out are held out on all devices.

    Raises:
        DataError: the data cannot be split by network.
    """
    others = [t for other in dataset.others for t in other.timings]
    return split_by_network(dataset.timings, folds, seed, others)


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """Results of the choice among all families and PyTorch's operator, whose times in the data are
    those of cuDNN's benchmark mode (`confpred.measure.pytorch`).
    """

    #: Regret against the best of all measured times: of the choice, of always choosing confpred's
    #: config, and of always choosing PyTorch's operator.
    regret: Mapping[str, Summary]
    #: The same of the times of all problems together, where large layers count for more, as in a
    #: network.
    time: Mapping[str, float]
    speed: float  # PyTorch's time over that of the choice: geometric mean ...
    worst_speed: float  # ... and least
    slower: int  # problems on which the choice is slower than PyTorch's by more than ``SLOWER``
    pytorch: int  # problems left to PyTorch's operator
    given_away: int  # ... on which confpred's config is faster by more than ``SLOWER``


def whole(answers: Sequence[Answer]) -> Whole | None:
    """Return the results over those of `answers` that have a time of PyTorch's operator; None if
    none has."""
    timed = [a for a in answers if a.pytorch_ms is not None]
    if not timed:
        return None
    ours, best, theirs = (
        np.array([getattr(a, name) for a in timed]) for name in ("ours_ms", "best_ms", "pytorch_ms")
    )
    left_to_pytorch = np.array([a.chosen == PYTORCH_OPERATOR for a in timed])
    times = {
        CHOSEN: np.where(left_to_pytorch, theirs, ours),
        "always ours": ours,
        "always PyTorch's": theirs,
    }
    speed = theirs / times[CHOSEN]
    return Whole(
        # One choice of two: it counts as the best of the first k for every k.
        regret={
            name: Summary.of(np.repeat((ms / best)[:, None], len(TOPS), axis=1), [2])
            for name, ms in times.items()
        },
        time={name: float(ms.sum() / best.sum()) for name, ms in times.items()},
        speed=geomean(speed),
        worst_speed=float(speed.min()),
        slower=int((speed < 1 / (1 + SLOWER)).sum()),
        pytorch=int(left_to_pytorch.sum()),
        given_away=int((left_to_pytorch & (theirs > (1 + SLOWER) * ours)).sum()),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Result of `evaluate`."""

    dataset: Dataset
    folds: tuple[Fold, ...]
    seed: int
    timings: tuple[Timings, ...]  # every judged problem
    scores: Mapping[str, tuple[Score, ...]]  # by method, on each of them
    missing: Mapping[str, str]  # methods that could not run, and the reasons
    whole: Whole | None  # of the choice that a user gets, if PyTorch's operator was measured
    bounds: BoundsCard  # bounds on an answer's regret, and how often they held
    noise: tuple[float, float]  # median and 95 % quantile of interquartile range over median

    @property
    def families(self) -> list[str]:
        """Names of the judged families, sorted."""
        return sorted({t.family for t in self.timings})

    def summaries(self, family: str | None = None) -> dict[str, Summary]:
        """Return the figures of each method, over all problems or those of one family."""
        return {
            method: Summary.of_scores(
                score
                for t, score in zip(self.timings, scores, strict=True)
                if family in (None, t.family)
            )
            for method, scores in self.scores.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        data = self.dataset
        return {
            "format": EVALUATION_FORMAT,
            "device": data.device.key,
            "data": data.digest,
            "other_devices": [other.device.key for other in data.others],
            "rows": data.rows,
            "problems": len(data.timings),
            "statuses": dict(data.statuses),
            "seed": self.seed,
            "folds": [
                {"networks": fold.networks, "train": len(fold.train), "test": len(fold.test)}
                for fold in self.folds
            ],
            "noise": dict(zip(("median", "p95"), self.noise, strict=True)),
            "methods": _plain(self.summaries()),
            "families": {family: _plain(self.summaries(family)) for family in self.families},
            "missing": dict(self.missing),
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
                for t, score in zip(self.timings, self.scores[MODEL], strict=True)
            ],
        }


def _plain(summaries: Mapping[str, Summary]) -> dict[str, Any]:
    return {method: asdict(summary) for method, summary in summaries.items()}


def evaluate(
    dataset: Dataset, hyper: Hyperparameters, folds: int, seed: int, say: Said = unsaid
) -> Evaluation:
    """Judge the model and every baseline on networks that they were not trained on.

    Raises:
        DataError: the data cannot be split by network.
    """
    split = folds_of(dataset, folds, seed)
    scores, held_out = cross_validate(dataset, split, hyper, seed, say)
    others, missing = judge_baselines(split, dataset.device, seed, say)
    spread = np.concatenate([t.spread_ms / t.time_ms for t in dataset.timings])
    return Evaluation(
        dataset=dataset,
        folds=split,
        seed=seed,
        timings=tuple(t for fold in split for t in fold.test),
        scores={MODEL: scores, **others},
        missing=missing,
        whole=whole(held_out.answers),
        bounds=fit_bounds(held_out.answers, dataset, seed)[1],
        noise=(float(np.nanmedian(spread)), float(np.nanquantile(spread, 0.95))),
    )


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Print the tables of `evaluation`."""
    data, noise = evaluation.dataset, evaluation.noise
    statuses = ", ".join(f"{count} {status}" for status, count in data.statuses.items())
    console.print(
        f"{data.device.key}: {data.rows} configs timed over {len(data.timings)} problems "
        f"(rows: {statuses}); {len(evaluation.timings)} problems judged in "
        f"{len(evaluation.folds)} folds, each by models that saw none of its layers",
        f"timing noise (interquartile range / median): {noise[0]:.2%} median, {noise[1]:.2%} at "
        f"the 95 % quantile",
        sep="\n",
    )
    if data.skipped:
        console.print(
            f"{data.skipped} timed rows are of configs that this version does not allow for them"
        )
    tops = [str(k) for k in TOPS[1:]]
    heads = ("method", "geomean", "p90", "p95", "worst", *(f"top-{k}" for k in tops), "configs")
    for family in evaluation.families:
        rows = {
            method: (s.geomean, s.p90, s.p95, s.worst, *map(s.top.get, tops), f"{s.candidates:.0f}")
            for method, s in evaluation.summaries(family).items()
        }
        table = figures_table(
            f"{family}: time of the choice / time of the best config", heads, rows
        )
        table.columns[0].no_wrap = True
        console.print(table)
    for method, reason in evaluation.missing.items():
        console.print(f"{method}: not installed ({reason})")
    if whole := evaluation.whole:
        console.print(
            figures_table(
                "among all families and PyTorch's operator: time / time of the fastest",
                ("choice", "problems", "geomean", "p95", "worst", "all time together"),
                {
                    name: (s.problems, s.geomean, s.p95, s.worst, whole.time[name])
                    for name, s in whole.regret.items()
                },
            ),
            f"over PyTorch's own operator: {whole.speed:.3f}x, worst {whole.worst_speed:.2f}x; "
            f"slower by more than {SLOWER:.0%}: {whole.slower} of {whole.regret[CHOSEN].problems} "
            f"problems; left to it: {whole.pytorch}, of which confpred is faster by more than "
            f"{SLOWER:.0%} on {whole.given_away}",
            sep="\n",
        )
    bounds = evaluation.bounds
    shares = ", ".join(f"{name} {share:.1%}" for name, share in bounds.coverage.items())
    console.print(f"answers within their bound on regret (median {bounds.median:.3f}): {shares}")


def print_noise(noise: RunNoise, console: Console) -> None:
    """Print how much times differ from run to run."""
    console.print(
        f"noise across {noise.runs} runs: {noise.repeated} configs were timed in more than one; "
        f"standard deviation {noise.deviation:.2%} of their time, {noise.largest:.2%} at most",
        soft_wrap=True,
    )


def figures_table(title: str, heads: Sequence[str], rows: Mapping[str, Sequence[object]]) -> Table:
    """Return a table with a name and its figures in each row; the row of the model is bold."""
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right" if table.columns else "left")
    for name, row in rows.items():
        cells = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in row)
        table.add_row(name, *cells, style="bold" if name == MODEL else None)
    return table


def plot_regret(evaluation: Evaluation, path: Path, *, replace: bool = True) -> None:
    """Write a PNG: for each method, the share of problems whose regret is at most x; for `replace`,
    see `write_whole`.

    Raises:
        StorageError: the file system refused the write.
    """
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    draw_regrets(
        axes,
        (
            ([s.regret[0] for s in scores], {"label": m, "linewidth": 2.5 if m == MODEL else 1.2})
            for m, scores in evaluation.scores.items()
        ),
        _TICKS,
    )
    axes.set_xlabel("regret: time of the choice / time of the best config")
    axes.set_ylabel("share of problems of held-out networks")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=150), replace=replace)


def draw_regrets(
    axes: Any,
    curves: Iterable[tuple[Sequence[float], Mapping[str, Any]]],
    ticks: Sequence[float],
) -> None:
    """Draw, for each of `curves` (some regrets, and the options of their line), the share of
    regrets that are at most x, up to the last of `ticks`."""
    for regrets, options in curves:
        rising = np.sort(regrets)
        share = np.arange(1, len(rising) + 1) / len(rising)
        end = max(ticks[-1], float(rising[-1]))
        axes.step([1.0, *rising, end], [0.0, *share, 1.0], where="post", **options)
    axes.set_xscale("log")
    axes.set_xlim(1.0, ticks[-1])
    axes.set_ylim(0.0, 1.0)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def baselines() -> dict[str, Baseline]:
    """Return the baselines to compare the model with, by the name that tables show; each learns
    from timings of one device."""
    return {
        "fixed config": _fixed,
        "roofline": _estimate,
        "XGBoost, raw ms": _ancestor,
        "random": _random,
    }


def _fixed(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """Return a judge of one fixed order of all configs; the first config that is legal for a
    problem is chosen."""
    order = average_order(train)
    return lambda t: Score(regret_of(t, order(t)), 1)


def _estimate(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """Return a judge of the family's own analytic model, which is not trained."""
    return lambda t: _by_time(t, all_families()[t.family].estimate_s(t.problem, device, t.rows))


def _by_time(t: Timings, expected: NDArray[np.floating[Any]]) -> Score:
    return Score(regret_of(t, np.argsort(expected, kind="stable")), len(t.rows))


def _random(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """Return a judge of the expectation over uniformly random choices without replacement."""

    def judge(t: Timings) -> Score:
        times, count = np.sort(t.time_ms), len(t.rows)
        expected = []
        for top in TOPS:
            k = min(top, count)  # the i-th best leads if the other k - 1 are among the worse ones
            chance = [comb(count - i - 1, k - 1) / comb(count, k) for i in range(count)]
            expected.append(float(times @ chance / times[0]))
        return Score(tuple(expected), count)

    return judge


def _ancestor(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """Return a judge of the recipe of earlier work: XGBoost's defaults on the raw sizes and config
    values, squared error on raw milliseconds."""
    try:
        import xgboost
    except ImportError:
        raise MissingExtra("xgboost", "dev") from None
    models = {}
    for name in {t.family for t in train}:
        own = [t for t in train if t.family == name]
        model = xgboost.XGBRegressor(n_estimators=300, random_state=seed, n_jobs=1)
        times = np.concatenate([t.time_ms for t in own])
        models[name] = model.fit(np.concatenate([_raw_features(t) for t in own]), times)
    return lambda t: _by_time(t, models[t.family].predict(_raw_features(t)))


def _raw_features(t: Timings) -> NDArray[np.float64]:
    """Return problem and config as plain numbers, one row a config of `t`."""
    sizes: list[float] = []
    for field in fields(t.problem):
        value = getattr(t.problem, field.name)
        if field.name in t.problem.CHOICES:
            choices = t.problem.CHOICES[field.name]
            sizes.append(choices.index(value) if value in choices else len(choices))
        else:
            sizes += value if field.name in t.problem.TUPLES else (value,)
    configs = all_families()[t.family].configs[t.rows]
    columns = [configs[name] for name in configs.dtype.names or ()]
    return np.column_stack([np.broadcast_to(sizes, (len(t.rows), len(sizes))), *columns])
