"""Cross-validation by network: a model is judged on networks that it was not trained on.

Networks share layers, and a suite has a layer at several batches, dtypes, epilogues and directions.
So every problem that has the same *layer* as a problem of a held-out network is held out of
training. The margins of PyTorch's operator are those of the other folds' problems.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from math import exp, inf, log
from typing import Any, TypeVar

import numpy as np
from joblib import Parallel, cpu_count, delayed
from numpy.typing import NDArray
from sklearn.model_selection import GroupKFold

from confpred.concurrency import end_with, stops_held
from confpred.errors import ConfpredError, DataError, InvalidInput, StorageError, nearest
from confpred.families.protocol import Candidate
from confpred.families.registry import operation_of
from confpred.files import raising
from confpred.model.features import Registers
from confpred.model.rank import FamilyModel, Gate, Options, PytorchModel, with_pytorch
from confpred.model.trees import Trees
from confpred.problem.device import Device
from confpred.problem.record import Record
from confpred.training import Said, unsaid
from confpred.training.calibrate import Answer, Times, fit_gate, fit_pytorch, margins
from confpred.training.dataset import Dataset, Timings
from confpred.training.fit import Fitted, Hyperparameters, fit_families, learnable
from confpred.training.regret import TOPS


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """One split of the networks.

    Over all folds, each problem that some network has is judged once: in the fold that holds out
    the first of its networks.
    """

    networks: tuple[str, ...]  # held out: each is the first network of a problem to judge
    train: tuple[Timings, ...]  # without any layer of those networks, of other devices too
    test: tuple[Timings, ...]  # to judge by, of families that can be learned from `train`
    elsewhere: tuple[Timings, ...]  # of other devices, held out of `train` too; the same families


#: A device and a problem on it.
At = tuple[Device, Record]
CROSS_VALIDATING = "cross-validating by network"
_T = TypeVar("_T")


def without_networks(timings: Sequence[Timings], networks: Collection[str]) -> tuple[Timings, ...]:
    """Return the timings of problems that share no layer with any of `networks`."""
    held_out = {t.problem.layer() for t in timings if not set(networks).isdisjoint(t.networks)}
    return tuple(t for t in timings if t.problem.layer() not in held_out)


def part_of(
    dataset: Dataset, families: Collection[str], problems: int | None, seed: int
) -> Dataset:
    """Return the part of `dataset` of some `families` (default: all) and of at most `problems`
    problems, which `seed` chooses; None takes all problems.

    Raises:
        InvalidInput: the data has no family of a name in `families`.
    """
    measured = sorted({t.family for t in dataset.everywhere})
    for name in families:
        if name not in measured:
            raise InvalidInput("family", name, nearest(name, measured))
    if families:
        dataset = dataset.of_families(families)
    every = sorted({t.problem for t in dataset.timings}, key=str)
    if problems is None or problems >= len(every):
        return dataset
    return dataset.restricted(set(random.Random(seed).sample(every, problems)))


def split_by_network(
    timings: Sequence[Timings], folds: int, seed: int, others: Sequence[Timings] = ()
) -> tuple[Fold, ...]:
    """Divide the networks into `folds` parts of about as many problems each.

    Joining networks that share a layer would leave one group of most of them: 512 of the 659 that
    are measured. So a problem is judged with the first of its networks, and the layers of a fold's
    networks are left out of the fold's training. `seed` orders networks of equal size; `others` are
    timings of other devices, to train on only.

    Raises:
        DataError: the problems are judged with fewer than two networks, or with no family that two
            of them share.
    """
    judged = [t for t in timings if t.networks]
    first = [t.networks[0] for t in judged]
    names = sorted(set(first))
    if len(names) < 2:
        raise DataError(
            f"splitting by network needs problems of at least 2 networks; found {len(names)}"
        )
    dealt = dict(zip(names, np.random.default_rng(seed).permutation(len(names)), strict=True))
    parts = GroupKFold(min(folds, len(names))).split(judged, groups=[dealt[name] for name in first])
    made = tuple(_fold([judged[i] for i in part], timings, others) for _, part in parts)
    if not any(fold.test for fold in made):
        raise DataError("splitting by network needs a family that problems of 2 networks have")
    return made


def _fold(part: Sequence[Timings], timings: Sequence[Timings], others: Sequence[Timings]) -> Fold:
    """Return the fold that judges by `part` of `timings`; `others` are of other devices."""
    networks = sorted({t.networks[0] for t in part})
    train = without_networks([*timings, *others], networks)
    learnt, layers = learnable(train, part[0].device), {t.problem.layer() for t in train}
    return Fold(
        networks=tuple(networks),
        train=train,
        test=tuple(t for t in part if t.family in learnt),  # after a short run perhaps not all
        elsewhere=tuple(
            t for t in others if t.family in learnt and t.problem.layer() not in layers
        ),
    )


@dataclass(frozen=True, slots=True)
class Score:
    """Result of a method on one problem, and the times that the model expected."""

    regret: tuple[float, ...]  # for each k of ``TOPS``, of the best of the first k choices
    candidates: int  # configs that it chose from
    seconds: float = inf  # expected time of its first choice
    #: The finalists among all legal configs, measured or not, best first, with their expected
    #: seconds.
    ranked: Options = field(default_factory=list)
    #: How many times as long its first choice among the measured configs is expected to take as the
    #: first of `ranked`.
    ahead: float = 1.0


def family_models(fitted: Sequence[Fitted]) -> dict[str, FamilyModel]:
    """Return the fitted models, which predict through the code of saved ones."""
    models = {}
    for f in fitted:
        order, time = Trees(f.order), Trees(f.time)
        for family in f.pool.families:
            text = f.registers.get(family.name)
            registers = None if text is None else Registers(family, text)
            models[family.name] = FamilyModel(family, f.pool, order, time, registers)
    return models


def score(model: FamilyModel, t: Timings) -> Score:
    """Return how the model does on a problem, choosing among the configs that were measured."""
    rows, seconds = model.rank(t.problem, t.device, t.rows)
    legal = model.legal(t.problem, t.device)
    if not len(legal):  # the family is less exact than is allowed where nobody sets limits
        legal = t.rows
    ranked, all_seconds = (values.tolist() for values in model.rank(t.problem, t.device, legal))
    place = ranked.index(rows[0]) if rows[0] in ranked else -1  # no better than the last finalist
    return Score(
        regret=regret_of(t, np.searchsorted(t.rows, rows)),
        candidates=len(t.rows),
        seconds=float(seconds[0]),
        ranked=[(s, Candidate(t.family, row)) for s, row in zip(all_seconds, ranked, strict=True)],
        ahead=all_seconds[place] / all_seconds[0],
    )


def best_ms(
    models: Mapping[str, FamilyModel], timings: Sequence[Timings], at: Collection[At]
) -> dict[At, float]:
    """Return the milliseconds of confpred's best config for the problems `at`, among all of their
    families.

    Often the best one is not among the few that were measured. So the fastest measured time is
    divided by how far ahead of the measured configs the model's first choice is.
    """
    fastest_ms: dict[At, float] = {}
    for t in timings:
        where = t.device, t.problem
        if where in at and t.family in models:
            ms = float(t.time_ms.min()) / score(models[t.family], t).ahead
            fastest_ms[where] = min(fastest_ms.get(where, np.inf), ms)
    return fastest_ms


def regret_of(t: Timings, order: NDArray[np.intp]) -> tuple[float, ...]:
    """Return the regret of the best of the first k of `order`, which are positions in `t`, for each
    k of ``TOPS``."""
    best = t.time_ms.min()
    return tuple(float(t.time_ms[order[:k]].min() / best) for k in TOPS)


@dataclass(frozen=True, slots=True, eq=False)
class Offered:
    """A held-out problem with its answer, before PyTorch's operator is placed in it."""

    fold: int
    device: Device
    ours: Answer  # the answer without PyTorch's operator
    ahead: float  # see `Score`; of the family that `ours` chose
    log_ratio: float | None  # expected log(PyTorch's time / confpred's); None without a regressor


@dataclass(frozen=True, slots=True, eq=False)
class CrossValidation:
    """The answers for the device's held-out problems, and the margins of PyTorch's operator."""

    #: An answer for each problem with a time of PyTorch's operator, or for every problem if that
    #: was measured too seldom to learn from.
    answers: tuple[Answer, ...]
    #: Margins of the regressor of PyTorch's time, by kind of problem, from all that was held out
    #: on any device (`confpred.training.calibrate.margins`).
    margins: Mapping[str, float]


def cross_validate(
    dataset: Dataset, folds: Sequence[Fold], hyper: Hyperparameters, seed: int, say: Said = unsaid
) -> tuple[tuple[Score, ...], CrossValidation]:
    """Train a model on each fold's training part, and choose configs for the test part.

    Folds run side by side, a process for each core, as each learns in one thread.

    Args:
        dataset: has the times of PyTorch's operator, and the device to choose on.
        folds: how the networks are split (`split_by_network`).
        hyper: how the trees grow.
        seed: seed of the trees.
        say: called with how many folds are done.

    Returns:
        The scores of each fold's test timings, fold by fold, and the answers among all families.

    Raises:
        ConfpredError: see `run_in_helpers`.
    """
    common = (dataset.pytorch_everywhere, dataset.device, hyper, seed)
    calls = [(number, fold, *common) for number, fold in enumerate(folds)]
    results = run_in_helpers(_of_fold, calls, CROSS_VALIDATING, say)
    scores = tuple(score for of_fold, _ in results for score in of_fold)
    return scores, answered([o for _, offered in results for o in offered], dataset.device)


def _of_fold(
    number: int, fold: Fold, pytorch_ms: Times, device: Device, hyper: Hyperparameters, seed: int
) -> tuple[list[Score], list[Offered]]:
    """Train on the fold with this `number`, and return the scores of its test timings, and its
    answers, those on other devices included; arguments are as of `cross_validate`."""
    models = family_models(fit_families(fold.train, device, hyper, seed))
    operation = operation_of(fold.train[0].problem)
    fitted = fit_gate([t for t in fold.train if t.family in models], operation, seed)
    gate = None if fitted is None else Gate(operation, fitted.families, Trees(fitted.lag))
    ours_ms = best_ms(models, fold.train, pytorch_ms.keys())
    text = fit_pytorch(ours_ms, pytorch_ms, operation, device, hyper, seed)
    ratio = None if text is None else PytorchModel(operation, Trees(text), {})
    scores = [score(models[t.family], t) for t in fold.test]
    judged = defaultdict(list)
    for t, scored in zip(fold.test, scores, strict=True):
        judged[t.device, t.problem].append((t, scored))
    for t in fold.elsewhere if ratio is not None else ():
        if (t.device, t.problem) in pytorch_ms and t.family in models:
            judged[t.device, t.problem].append((t, score(models[t.family], t)))
    return scores, list(_offered(number, judged, pytorch_ms, ratio, gate))


def _offered(
    number: int,
    judged: Mapping[At, Sequence[tuple[Timings, Score]]],
    pytorch_ms: Times,
    ratio: PytorchModel | None,
    gate: Gate | None,
) -> Iterator[Offered]:
    """Yield the answers of a fold.

    Args:
        number: the fold's number.
        judged: the timings of each problem on a device, and their scores, by family.
        pytorch_ms: times of PyTorch's operator.
        ratio: model of its times; with one, problems that it was not timed for have no answer.
        gate: leaves out families that are not expected to win. The answer's regret includes its
            mistakes, as `our_best_ms` is of all families.
    """
    for (device, problem), by_family in judged.items():
        pytorch_time, log_ratio = pytorch_ms.get((device, problem)), None
        if ratio is not None:
            if pytorch_time is None:
                continue
            (log_ratio,) = ratio.log_ratios([problem], device).tolist()
        names = [timings.family for timings, _ in by_family]
        if gate is not None:
            (names,) = gate.open([problem], device, [names])
        open_families = [pair for pair in by_family if pair[0].family in names]
        timings, chosen = min(open_families, key=lambda pair: pair[1].seconds)
        answer = Answer(
            problem=problem,
            networks=timings.networks,
            options=sorted(option for _, scored in open_families for option in scored.ranked),
            ours_ms=chosen.regret[0] * float(timings.time_ms.min()),
            our_best_ms=min(float(t.time_ms.min()) for t, _ in by_family),
            pytorch_ms=None if ratio is None else pytorch_time,
        )
        yield Offered(number, device, answer, chosen.ahead, log_ratio)


def answered(offered: Sequence[Offered], device: Device) -> CrossValidation:
    """Put PyTorch's operator in the answers of `offered`, and return those of `device`."""
    numbers = sorted({o.fold for o in offered})
    margins_without = {n: _margins([o for o in offered if o.fold != n]) for n in numbers}
    answers = (_answer(o, margins_without[o.fold]) for o in offered if o.device == device)
    return CrossValidation(tuple(answers), _margins(offered))


def _margins(offered: Sequence[Offered]) -> dict[str, float]:
    """Return the margins of PyTorch's operator from the problems that it was timed for. A measured
    first choice counts as if the best legal config had been measured, too: `ahead` times as fast.
    """
    compared = [
        (o.ours.problem.kind, o.log_ratio, log(o.ours.pytorch_ms * o.ahead / o.ours.ours_ms))
        for o in offered
        if o.log_ratio is not None and o.ours.pytorch_ms is not None
    ]
    kinds, expected, actual = zip(*compared, strict=True) if compared else ((), (), ())
    return margins(kinds, np.array(expected), np.array(actual))


def _answer(offered: Offered, by_kind: Mapping[str, float]) -> Answer:
    """Return the answer with PyTorch's operator among its options, by the margin of its kind."""
    ours, ratio = offered.ours, offered.log_ratio
    if ratio is None:
        return ours
    slowdown = (exp(ratio), exp(ratio - by_kind.get(ours.problem.kind, inf)))
    return replace(ours, options=with_pytorch(ours.options, slowdown))


def run_in_helpers(
    function: Callable[..., _T], calls: Sequence[tuple[Any, ...]], step: str, say: Said
) -> list[_T]:
    """Return ``function(*arguments)`` for the arguments of each of `calls`, in their order,
    computed side by side in processes that end with this one; `say` is called with how many are
    done.

    Raises:
        StorageError: the disk has no room for what the processes share.
        ConfpredError: a process was killed. Errors of `function` are raised too.
    """
    say(step, 0, len(calls))
    count = min(cpu_count(), len(calls))
    how: dict[str, Any] = {"return_as": "generator", "initializer": end_with}
    try:
        with (
            raising(StorageError, "write what processes share"),
            Parallel(count, **how, initargs=(os.getpid(),)) as parallel,
        ):
            with stops_held():  # until the processes run, and leave Ctrl-C to this one
                list(parallel(delayed(int)() for _ in range(count)))
            results: list[_T] = []
            for result in parallel(delayed(function)(*arguments) for arguments in calls):
                results.append(result)
                say(step, len(results), len(calls))
    except BrokenProcessPool as error:
        raise ConfpredError(
            "a helper process was killed, which the system does where memory runs out"
        ) from error
    return results
