"""A model judged on networks that it was not trained on, against every possible choice.

Cross-validation (`confpred.training.evaluate`) compares a choice with the fastest of the few
configs that were measured of a problem. The measurements of a *hold-out* have every legal config of
every family, and PyTorch's operator in both modes of cuDNN, so that regret is against the true
optimum. The whole answer is judged as a user gets it, through `Predictor`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from rich.console import Console

from confpred.data.measurements import problem_of_row
from confpred.data.parquet import problem_columns, read
from confpred.errors import DataError
from confpred.families.protocol import PYTORCH, PYTORCH_OPERATOR, Candidate, Rows
from confpred.families.registry import all_families
from confpred.model.folder import Model
from confpred.model.rank import Pairs
from confpred.predict.choice import Choice
from confpred.predict.predictor import Predictor
from confpred.problem.record import Record
from confpred.training import Said, unsaid
from confpred.training.cross_validate import without_networks
from confpred.training.dataset import Dataset, Timings, by_problem, data_files, times_of
from confpred.training.evaluate import figures_table
from confpred.training.regret import TOPS, Spread, geomean, of_tops

SLOWER = 1.05  # an answer this many times as slow as PyTorch's operator is too slow
#: Configs of a family that the thinned oracles have, as many as earlier sampling measured.
THINNED = (20, 40, 48, 80)
_DRAWS = 5  # thinned oracles of each size, whose figures are averaged
_WORST = 20  # problems that a verdict names
BENCHMARK, HEURISTICS, EITHER = "benchmark", "heuristics", "the faster of both"
NEW, RESIZED = "networks that are new", "networks at another size"
CHOOSING, THINNING = "choosing for the hold-out's layers", "judging by fewer configs"


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """The measurements of a hold-out."""

    dataset: Dataset  # timings of confpred kernels; PyTorch's are in `pytorch_ms` instead
    pytorch_ms: Mapping[str, Mapping[Record, float]]  # medians, by mode of cuDNN and problem
    #: Number of runs that measured each problem; times of one run compare better.
    sittings: Mapping[Record, int]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often the regret of answers is within their bound."""

    problems: int  # answers that carry a bound
    covered: float  # share of them whose regret is within it
    median: float  # of the bounds

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Coverage:
        """Return the coverage of regrets by their bounds, at least one of each."""
        regret, bound = np.array(pairs).T
        return cls(len(pairs), float((regret <= bound).mean()), float(np.median(bound)))


@dataclass(frozen=True, slots=True, eq=False)
class HoldoutVerdict:
    """Result of `judge_holdout`."""

    model: str  # version of the model
    checked: str  # in words, the evidence that the model was not trained on the layers
    problems: int
    networks: int
    configs: int  # configs that were timed
    complete: float  # share of the legal configs of all problems that were timed
    sittings: int  # problems that took more than one run
    ours: Spread  # of the model's first config, against the best config of all families
    families: Mapping[str, Spread]  # the same against the best of the chosen family, by family
    #: `ours` by whether the problem's networks are new, or known in training at another size of the
    #: input, which the name has after an ``@``.
    origins: Mapping[str, Spread]
    first: Mapping[str, float]  # by k: geometric mean of the best of the first k configs
    whole: Spread  # of the whole answer, PyTorch's operator among the candidates
    whole_first: Mapping[str, float]  # by k: as `first`, of the whole ranking
    weighted: float  # time of all answers over the time of the best, in sum
    pytorch: int  # problems left to PyTorch's operator
    wrongly_pytorch: int  # ... on which the best config is more than ``SLOWER`` times as fast
    #: PyTorch's time over that of the answer, geometric mean, by mode of cuDNN.
    speed: Mapping[str, float]
    #: Answers that are more than ``SLOWER`` times as slow as PyTorch's operator, by mode;
    #: ``EITHER`` is the faster mode of each problem.
    slower: Mapping[str, int]
    bounds: Mapping[str, Coverage]  # of ``all``, and by the provider of the answer
    unmeasured: int  # first choices that could not be timed; the next one counts instead
    #: By k, geometric mean and 95 % quantile of `ours` if only k random configs of each family were
    #: measured, and chosen among.
    thinned: Mapping[str, tuple[float, float]]
    #: The problems of the largest whole regret, with networks, that regret and the answer.
    worst: Sequence[tuple[str, str, float, str]]


@dataclass(frozen=True, slots=True)
class _Ranked:
    """All times of one problem, and the model's ranking of it."""

    problem: Record
    networks: tuple[str, ...]
    ours: tuple[Timings, ...]
    times: Mapping[Candidate, float]  # that of PyTorch in cuDNN's benchmark mode, the default here
    pytorch: Mapping[str, float]
    ranking: tuple[Choice, ...]


def read_holdout(dataset: Dataset, paths: Sequence[Path]) -> HeldOut:
    """Return the hold-out in `paths`: its `dataset`, and what that leaves out: PyTorch's times by
    mode, and the number of runs."""
    operation = dataset.operation
    keys = problem_columns(operation)
    wanted = [*keys, "family", "status", "device", "cudnn_mode", "time_ms", "run_id"]
    pytorch: dict[str, dict[Record, list[float]]] = {
        mode: defaultdict(list) for mode in (BENCHMARK, HEURISTICS)
    }
    runs: dict[Record, set[str]] = defaultdict(set)
    for file in data_files(paths):
        table = read(file, operation, wanted)
        table = table.filter(pc.field("device") == dataset.device.key)
        theirs = table.filter((pc.field("family") == PYTORCH) & (pc.field("status") == "ok"))
        for row in theirs.to_pylist():
            problem = problem_of_row(row, operation.problem)
            pytorch[row["cudnn_mode"] or BENCHMARK][problem].append(row["time_ms"])
        for row in table.group_by(keys).aggregate([("run_id", "distinct")]).to_pylist():
            runs[problem_of_row(row, operation.problem)].update(row["run_id_distinct"])
    return HeldOut(
        dataset,
        {m: {p: float(np.median(ms)) for p, ms in of.items()} for m, of in pytorch.items()},
        {problem: len(ids) for problem, ids in runs.items()},
    )


def without_holdout(dataset: Dataset, holdout: Dataset) -> Dataset:
    """Return `dataset` without the networks of `holdout`, and without any layer of it."""
    networks = {name for t in holdout.timings for name in t.networks}
    layers = {t.problem.layer() for t in holdout.timings}
    everywhere = without_networks(dataset.everywhere, networks)
    kept = dataset.restricted({t.problem for t in everywhere if t.problem.layer() not in layers})
    if not kept.timings:
        raise DataError("the hold-out shares a network or a layer with all of the training data")
    return kept


def check_unseen(model: Model, trained_on: Dataset, holdout: Dataset) -> str:
    """Check that `model` was trained on no network and no layer of `holdout`, and return the
    evidence in words. `trained_on` is the model's training data; its digest is compared with the
    card's.

    Raises:
        DataError: the model was trained on one of them.
    """
    facts = model.card.data
    timings = without_networks(trained_on.everywhere, facts.excluded_networks)
    learned = trained_on.restricted({t.problem for t in timings})
    kind = model.operation.problem
    seen = {kind.parse(text).layer() for text in model.measured}
    networks: set[str] = set()
    checked = "the problems that the model has the best configs of"
    if learned.digest == facts.digest:
        seen |= {t.problem.layer() for t in timings}
        networks = {name for t in timings for name in t.networks}
        checked = "all that the model was trained on"
    shared = [t for t in holdout.timings if t.problem.layer() in seen]
    named = sorted(networks & {name for t in holdout.timings for name in t.networks})
    if shared or named:
        what = f"network {named[0]}" if named else f"the layer of {shared[0].problem}"
        raise DataError(f"model {model.version} has seen {what} of the hold-out")
    return checked


def judge_holdout(
    model: Model, held: HeldOut, checked: str, seed: int, say: Said = unsaid
) -> HoldoutVerdict:
    """Judge `model` by `held`, whose layers it was not trained on by the evidence `checked`
    (`check_unseen`); `seed` draws the thinned oracles.

    Raises:
        DataError: the hold-out is of another device or operation than the model.
    """
    data = held.dataset
    if data.device != model.device or data.operation is not model.operation:
        raise DataError(
            f"the hold-out is of {data.operation.name} on {data.device.key}; model "
            f"{model.version} is for {model.operation.name} on {model.device.key}"
        )
    measured = _measured(model, held, say)
    judged = [one for m in measured if (one := _judge(m)) is not None]
    if not judged:
        raise DataError("no answer of the model was measured in the hold-out")
    families, origins, bounds = defaultdict(list), defaultdict(list), defaultdict(list)
    speed: dict[str, list[float]] = {mode: [] for mode in (BENCHMARK, HEURISTICS, EITHER)}
    for j in judged:
        families[j.family].append(j.in_family)
        resized = all("@" in name for name in j.measured.networks)
        origins[RESIZED if resized else NEW].append(j.ours[0])
        for name in ("all", j.answer.provider) if j.bound is not None else ():
            bounds[name].append((j.whole[0], j.bound or 0.0))
        for mode, times in j.speed.items():
            speed[mode].append(times)
    left = [j for j in judged if j.answer == PYTORCH_OPERATOR]
    legal = (all_families()[t.family].legal(t.problem, data.device) for t in data.timings)
    return HoldoutVerdict(
        model=model.version,
        checked=checked,
        problems=len(measured),
        networks=len({name for m in measured for name in m.networks}),
        configs=data.rows,
        complete=data.rows / sum(int(mask.sum()) for mask in legal),
        sittings=sum(held.sittings[m.problem] > 1 for m in measured),
        ours=Spread.of([j.ours[0] for j in judged]),
        families={name: Spread.of(regrets) for name, regrets in sorted(families.items())},
        origins={name: Spread.of(regrets) for name, regrets in sorted(origins.items())},
        first=of_tops([j.ours for j in judged]),
        whole=Spread.of([j.whole[0] for j in judged]),
        whole_first=of_tops([j.whole for j in judged]),
        weighted=sum(j.time_ms for j in judged) / sum(j.time_ms / j.whole[0] for j in judged),
        pytorch=len(left),
        wrongly_pytorch=sum(j.time_ms > SLOWER * j.best_ours_ms for j in left),
        speed={mode: geomean(times) for mode, times in speed.items() if times},
        slower={mode: sum(x < 1 / SLOWER for x in times) for mode, times in speed.items()},
        bounds={name: Coverage.of(pairs) for name, pairs in sorted(bounds.items())},
        unmeasured=sum(j.unmeasured for j in judged) + len(measured) - len(judged),
        thinned=_thinned(model, measured, seed, say),
        worst=[
            (str(j.measured.problem), ",".join(j.measured.networks), j.whole[0], j.answer.provider)
            for j in sorted(judged, key=lambda j: -j.whole[0])[:_WORST]
        ],
    )


@dataclass(frozen=True, slots=True)
class _Judged:
    """The answer to one problem."""

    measured: _Ranked
    answer: Candidate  # the first choice that was measured
    time_ms: float
    #: Regret of the best of the first k, for each k of ``TOPS``, of confpred's configs alone ...
    ours: tuple[float, ...]
    whole: tuple[float, ...]  # ... and of all candidates
    family: str  # family of the first config
    in_family: float  # its regret against the best of that family
    best_ours_ms: float
    speed: Mapping[str, float]  # PyTorch's time over that of the answer, by mode of cuDNN
    bound: float | None
    unmeasured: bool  # whether the first choice could not be timed


def _judge(m: _Ranked) -> _Judged | None:
    """Return the judged answer; None if no choice of the model was measured."""
    timed = [choice for choice in m.ranking if choice.candidate in m.times]
    our_times = {c: ms for c, ms in m.times.items() if c != PYTORCH_OPERATOR}
    ours = [c.candidate for c in timed if c.candidate in our_times]
    if not ours:
        return None
    best, best_ours = min(m.times.values()), min(our_times.values())
    answer, family = timed[0].candidate, ours[0].provider
    theirs = {**m.pytorch, EITHER: min(m.pytorch.values())} if m.pytorch else {}
    time_ms = m.times[answer]
    return _Judged(
        measured=m,
        answer=answer,
        time_ms=time_ms,
        ours=tuple(min(our_times[c] for c in ours[:k]) / best_ours for k in TOPS),
        whole=tuple(min(m.times[c.candidate] for c in timed[:k]) / best for k in TOPS),
        family=family,
        in_family=our_times[ours[0]]
        / min(ms for c, ms in our_times.items() if c.provider == family),
        best_ours_ms=best_ours,
        # PyTorch's operator is not faster than itself in another mode.
        speed={
            mode: 1.0 if answer == PYTORCH_OPERATOR else ms / time_ms for mode, ms in theirs.items()
        },
        bound=timed[0].regret_bound,
        unmeasured=timed[0] != m.ranking[0],
    )


def _measured(model: Model, held: HeldOut, say: Said) -> list[_Ranked]:
    """Return each problem of the hold-out with the model's answers, computed without the model's
    measured configs."""
    predictor = Predictor({model.device.key: replace(model, measured={})})
    together, measured = by_problem(held.dataset.timings), list[_Ranked]()
    for problem, parts in together.items():
        pytorch = {mode: of[problem] for mode, of in held.pytorch_ms.items() if problem in of}
        times = times_of(parts, pytorch.get(BENCHMARK, min(pytorch.values(), default=None)))
        say(CHOOSING, len(measured), len(together))
        ranking = tuple(predictor.rank(problem, model.device, max(TOPS) + 1))
        measured.append(_Ranked(problem, parts[0].networks, tuple(parts), times, pytorch, ranking))
    say(CHOOSING, len(measured), len(together))
    return measured


def _thinned(
    model: Model, measured: Sequence[_Ranked], seed: int, say: Said
) -> dict[str, tuple[float, float]]:
    """Return the regret of a choice among few random configs, against the best of these, as if only
    they had been measured."""
    generator = np.random.default_rng(seed)
    counts = [k for k in THINNED for _ in range(_DRAWS)]
    draws = [
        [[_drawn(generator, len(t.rows), k) for t in m.ours] for m in measured] for k in counts
    ]
    regret = np.empty((len(counts), len(measured)))
    for place, m in enumerate(measured):
        say(THINNING, place, len(measured))
        regret[:, place] = _thinned_regrets(model, m, [draw[place] for draw in draws])
    say(THINNING, len(measured), len(measured))
    figures = np.array([(geomean(row), np.quantile(row, 0.95)) for row in regret])
    means = figures.reshape(len(THINNED), _DRAWS, 2).mean(axis=1).tolist()
    return {str(k): (mean, p95) for k, (mean, p95) in zip(THINNED, means, strict=True)}


def _drawn(generator: np.random.Generator, count: int, k: int) -> Rows:
    """Return `k` of the first `count` numbers, or all, ascending."""
    return np.sort(generator.choice(count, k, replace=False)) if k < count else np.arange(count)


def _thinned_regrets(
    model: Model, measured: _Ranked, draws: Sequence[Sequence[Rows]]
) -> NDArray[np.float64]:
    """Return the regret of the choice among the configs of each of `draws`, which has some by
    family."""
    count = len(draws)
    chosen_s, chosen_ms = np.full(count, np.inf), np.full(count, np.nan)
    best_ms = np.full(count, np.inf)
    for place, t in enumerate(measured.ours):
        kept = [draw[place] for draw in draws]
        best_ms = np.minimum(best_ms, [t.time_ms[rows].min() for rows in kept])
        learned = model.families.get(t.family)
        if learned is None:
            continue
        features = learned.features(measured.problem, model.device, t.rows)
        every, bounds = np.concatenate(kept), [0, *accumulate(map(len, kept))]
        pairs = Pairs([*range(count)], bounds, t.rows[every], features[every])
        ranked = learned.rank_pairs(pairs, [measured.problem] * count, model.device)
        for draw, (rows, seconds) in ranked.items():
            if seconds[0] < chosen_s[draw]:
                chosen_s[draw] = seconds[0]
                chosen_ms[draw] = t.time_ms[np.searchsorted(t.rows, rows[0])]
    return np.where(np.isfinite(chosen_s), chosen_ms / best_ms, 1.0)


def print_verdict(verdict: HoldoutVerdict, console: Console) -> None:
    """Print the results of a hold-out."""
    v = verdict
    console.print(
        f"hold-out: {v.problems} problems of {v.networks} networks, {v.configs} configs timed, "
        f"{v.complete:.1%} of the legal ones; {v.sittings} problems took more than one run",
        f"model {v.model}, which has seen none of the layers, by {v.checked}",
        sep="\n",
        soft_wrap=True,
    )
    of_families = {f"{name}, among its own": s for name, s in v.families.items()}
    of_origins = {f"confpred, {name}": s for name, s in v.origins.items()}
    spreads = {"confpred": v.ours, **of_origins, "whole": v.whole, **of_families}
    heads = ("problems", "geomean", "p95", "worst", "efficiency", "p10", "min", "> 10 % off")
    rows = {name: [*astuple(s)[:-1], f"{s.far:.1%}"] for name, s in spreads.items()}
    title = "time of the answer / time of the fastest"
    console.print(figures_table(title, ("answer", *heads), rows))
    lines = [
        f"best of the first 3 / 8: confpred {v.first['3']:.3f} / {v.first['8']:.3f}, whole "
        f"{v.whole_first['3']:.3f} / {v.whole_first['8']:.3f}; weighted by time {v.weighted:.3f}",
        f"left to PyTorch's operator: {v.pytorch}; confpred is more than 5 % faster on "
        f"{v.wrongly_pytorch} of them",
        *(
            f"over PyTorch's operator ({mode}): {speed:.3f}x; slower by more than 5 %: "
            f"{v.slower[mode]}"
            for mode, speed in v.speed.items()
        ),
        *(
            f"bound on regret, {name}: holds for {b.covered:.1%} of {b.problems}, median "
            f"{b.median:.3f}"
            for name, b in v.bounds.items()
        ),
        *(
            f"with {k} random configs a family as the oracle, confpred would seem {mean:.3f}, p95 "
            f"{p95:.3f}"
            for k, (mean, p95) in v.thinned.items()
        ),
    ]
    if v.unmeasured:
        lines.append(f"first choices that could not be timed: {v.unmeasured}")
    console.print(*lines, sep="\n", soft_wrap=True)
