"""An evaluation of the model beside the baselines that it has to beat: figures, tables and a plot.

A *baseline* learns from training timings and returns a *judge*, which says how its choice among a
problem's measured configs would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from confpred.problem.device import Device
from confpred.training import EVALUATION_FORMAT, Said, unsaid
from confpred.training.calibrate import Answer, FittedBounds, fit_bounds
from confpred.training.cross_validate import (
    TOPS,
    Fold,
    Score,
    cross_validate,
    regret_of,
    run_in_helpers,
    split_by_network,
)
from confpred.training.dataset import Dataset, Noise, Timings
from confpred.training.fit import Hyperparameters

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
        """Return the figures of one method, over all problems or those of one family."""
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
    """Return a baseline's scores on one fold, or why it cannot run."""
    try:
        return tuple(map(baselines()[name](fold.train, device, seed), fold.test))
    except MissingExtra as error:
        return str(error)


def folds_of(dataset: Dataset, folds: int, seed: int) -> tuple[Fold, ...]:
    """Return the networks of `dataset` in folds; what is held out of one is held out on all
    devices.

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
    """Result of `evaluate`.

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
        """Return the figures as plain data."""
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


_LARGEST_SHOWN = 4.0  # regret at the right edge of the plot


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Print the tables of `evaluation`."""
    data, judged = evaluation.dataset, evaluation.judged
    statuses = ", ".join(f"{count} {status}" for status, count in data.statuses.items())
    console.print(
        f"{data.device.key}: {data.rows} configs timed over {len(data.timings)} problems "
        f"(rows: {statuses}); {len(judged.timings)} problems judged in {len(evaluation.folds)} "
        f"folds, each by models that saw none of its layers",
        f"timing noise (interquartile range / median): {evaluation.noise[0]:.2%} median, "
        f"{evaluation.noise[1]:.2%} at the 95 % quantile",
        sep="\n",
    )
    if data.skipped:
        console.print(
            f"{data.skipped} timed rows are of configs that this version does not allow for them"
        )
    families = sorted({t.family for t in judged.timings})
    for family in families:
        summaries = {m: judged.summary(m, family) for m in judged.scores}
        console.print(_table(f"{family}: time of the choice / time of the best config", summaries))
    for method, reason in judged.missing.items():
        console.print(f"{method}: not installed ({reason})")
    if whole := evaluation.whole:
        console.print(
            _whole_table(whole.regret, whole.time),
            f"over PyTorch's own operator: {whole.speed:.3f}x, worst {whole.worst_speed:.2f}x; "
            f"slower by more than {SLOWER:.0%}: {whole.slower} of {whole.regret[CHOSEN].problems} "
            f"problems; left to it: {whole.pytorch}, of which ours is faster by more than "
            f"{SLOWER:.0%} on {whole.given_away}",
            sep="\n",
        )
    bounds = evaluation.bounds
    shares = ", ".join(f"{name} {share:.1%}" for name, share in bounds.coverage.items())
    console.print(f"answers within their bound on regret (median {bounds.median:.3f}): {shares}")


def print_sittings(noise: Noise, console: Console) -> None:
    """Print how times differ from run to run."""
    console.print(
        f"noise across {noise.runs} runs: {noise.repeated} configs were timed in more than one; "
        f"standard deviation {noise.deviation:.2%} of their time, {noise.largest:.2%} at most",
        soft_wrap=True,
    )


def _table(title: str, summaries: Mapping[str, Summary]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    columns = ("geomean", "p90", "p95", "worst", *(f"top-{k}" for k in TOPS[1:]), "configs")
    for column in columns:
        table.add_column(column, justify="right")
    for method, s in summaries.items():
        figures = (s.geomean, s.p90, s.p95, s.worst, *(s.top[str(k)] for k in TOPS[1:]))
        cells = (method, *(f"{value:.3f}" for value in figures), f"{s.candidates:.0f}")
        table.add_row(*cells, style="bold" if method == MODEL else None)
    return table


def _whole_table(summaries: Mapping[str, Summary], time: Mapping[str, float]) -> Table:
    title = "among all families and PyTorch's operator: time / time of the fastest"
    table = Table(title=title, title_justify="left")
    table.add_column("choice")
    for column in ("problems", "geomean", "p95", "worst", "all time together"):
        table.add_column(column, justify="right")
    for name, s in summaries.items():
        figures = (s.geomean, s.p95, s.worst, time[name])
        table.add_row(name, str(s.problems), *(f"{value:.3f}" for value in figures))
    return table


def plot_regret(evaluation: Evaluation, path: Path, *, replace: bool = True) -> None:
    """Write a PNG: for each method, the share of problems whose regret is at most x; `replace` as
    `write_whole` has it.

    Raises:
        StorageError: the file system refused the write.
    """
    from matplotlib.figure import Figure  # without pyplot, which looks for a display

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for method in evaluation.judged.scores:
        regret = np.sort(evaluation.judged.regret(method))
        share = np.arange(1, len(regret) + 1) / len(regret)
        axes.step(
            [1.0, *regret, _LARGEST_SHOWN],
            [0.0, *share, 1.0],
            where="post",
            label=method,
            linewidth=2.5 if method == MODEL else 1.2,
        )
    axes.set_xscale("log")
    axes.set_xlim(1.0, _LARGEST_SHOWN)
    axes.set_ylim(0.0, 1.0)
    ticks = [1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 4.0]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("regret: time of the choice / time of the best config")
    axes.set_ylabel("share of problems of held-out networks")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=150), replace=replace)


_UNSERVED = 2.0  # the regret that a fixed config is charged where it was not measured


Judge = Callable[[Timings], Score]


Baseline = Callable[[Sequence[Timings], Device, int], Judge]


def baselines() -> dict[str, Baseline]:
    """Return the baselines to compare the model with, by the name that tables show."""
    return {
        "fixed config": _fixed,
        "roofline": _estimate,
        "XGBoost, raw ms": _ancestor,
        "random": _random,
    }


def _of(timings: Sequence[Timings], device: Device) -> list[Timings]:
    """Return the timings of `device`, which is all that the baselines know."""
    return [t for t in timings if t.device == device]


def _fixed(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """One order of all configs, by mean log regret over the training problems; the first that a
    problem can use is taken. A config counts as ``_UNSERVED`` times the best where it is illegal
    or was not measured."""
    cost = {name: np.zeros(len(family.configs)) for name, family in all_families().items()}
    for t in _of(train, device):
        cost[t.family][t.rows] += np.log((t.time_ms / t.time_ms.min()).clip(max=_UNSERVED) / 2)
    return lambda t: Score(regret_of(t, np.argsort(cost[t.family][t.rows], kind="stable")), 1)


def _estimate(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """Return the family's own analytic model, which learns nothing."""

    def judge(t: Timings) -> Score:
        seconds = all_families()[t.family].estimate_s(t.problem, device, t.rows)
        order = np.argsort(seconds, kind="stable")
        return Score(regret_of(t, order), len(t.rows), float(seconds[order[0]]) * 1e3)

    return judge


def _random(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """Return the expectation over uniformly random choices without replacement."""

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
    """Return the recipe of earlier work: XGBoost's defaults on the raw sizes and config values,
    squared error on raw milliseconds."""
    try:
        import xgboost
    except ImportError:
        raise MissingExtra("xgboost", "dev") from None
    models = {}
    for name in {t.family for t in _of(train, device)}:
        own = [t for t in _of(train, device) if t.family == name]
        data = xgboost.DMatrix(
            np.concatenate([_raw_features(t) for t in own]),
            np.concatenate([t.time_ms for t in own]),
        )
        grow = {"objective": "reg:squarederror", "seed": seed, "nthread": 1}
        models[name] = xgboost.train(grow, data, num_boost_round=300)

    def judge(t: Timings) -> Score:
        expected = models[t.family].inplace_predict(_raw_features(t))
        order = np.argsort(expected, kind="stable")
        return Score(regret_of(t, order), len(t.rows))

    return judge


def _raw_features(t: Timings) -> NDArray[np.float64]:
    """Problem and config as plain numbers, one row a config of `t`."""
    sizes: list[float] = []
    for field in fields(t.problem):
        value = getattr(t.problem, field.name)
        if field.name in t.problem.CHOICES:
            sizes.append(t.problem.CHOICES[field.name].index(value))
        else:
            sizes += value if field.name in t.problem.PAIRS else (value,)
    configs = all_families()[t.family].configs[t.rows]
    columns = [configs[name] for name in configs.dtype.names or ()]
    return np.column_stack([np.broadcast_to(sizes, (len(t.rows), len(sizes))), *columns])
