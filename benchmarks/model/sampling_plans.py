"""Which configs are worth measuring? Ways to sample, compared on measurements that exist.

    python -m benchmarks.model.sampling_plans [--folds N] [--families NAME ...] [--out FOLDER]

The H100's data has 80 random configs a problem and family. Each plan keeps some of them in the
training part of a fold, a model learns from those alone, and chooses among all that was measured of
the problems of held-out networks. Their fastest config is the oracle, the same for all plans, so
differences are paired; their standard error is that of the mean over problems.

``20 + 20`` keeps 20 random configs and, of the others, the 20 that a model orders first which has
learned from the 20 random ones: a second round. It can pick among the 60 others that were measured
alone, of several hundred legal ones, so what it would pick freely is not known. Halved plans have
half the problems, and so as many rows as a plan of half the configs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.provenance import RESULTS, measured, provenance, write
from confpred.problem.device import Device
from confpred.training.cross_validate import family_models, split_by_network
from confpred.training.dataset import Timings, read_dataset
from confpred.training.fit import Hyperparameters, fit_families

DATA = measured("h100")
#: The order among configs is what is compared; it needs no model of their times.
HYPER = Hyperparameters(time_trees=1)
RANDOM, PICKED = 20, 20
BASE = "80 random"


def kept(t: Timings, positions: NDArray[np.intp]) -> Timings:
    """`t` with the configs at `positions` alone."""
    order = np.sort(positions)
    columns = {name: getattr(t, name)[order] for name in ("rows", "time_ms", "spread_ms")}
    return replace(t, **columns)


def random_part(timings: Sequence[Timings], count: int, seed: int) -> list[Timings]:
    """Return a random choice of `count` configs of each."""
    generator = np.random.default_rng(seed)
    return [kept(t, generator.permutation(len(t.rows))[:count]) for t in timings]


def picked_part(timings: Sequence[Timings], device: Device, seed: int) -> list[Timings]:
    """``RANDOM`` random configs of each, and the ``PICKED`` others that a model of those picks."""
    first = random_part(timings, RANDOM, seed)
    models = family_models(fit_families(first, device, HYPER, seed))
    both = []
    for t, known in zip(timings, first, strict=True):
        others = np.setdiff1d(t.rows, known.rows)
        chosen = known.rows
        if len(others):
            ranked, _ = models[t.family].rank(t.problem, device, others)
            chosen = np.concatenate([chosen, ranked[:PICKED]])
        both.append(kept(t, np.searchsorted(t.rows, chosen)))
    return both


def half(timings: Sequence[Timings], seed: int) -> list[Timings]:
    """All timings of half the layers."""
    layers = sorted({str(t.problem.layer()) for t in timings})
    chosen = np.random.default_rng(seed).permutation(layers)[: len(layers) // 2]
    return [t for t in timings if str(t.problem.layer()) in set(chosen.tolist())]


def plans(timings: Sequence[Timings], device: Device, seed: int) -> Mapping[str, Sequence[Timings]]:
    """Return the part of the training data that each plan measures."""
    return {
        BASE: timings,
        "40 random": random_part(timings, RANDOM + PICKED, seed),
        "20 random + 20 picked": picked_part(timings, device, seed),
        "20 random": random_part(timings, RANDOM, seed),
        "80 random, half the problems": half(timings, seed),
    }


def log_regrets(
    train: Sequence[Timings], test: Sequence[Timings], device: Device, seed: int
) -> NDArray[np.float64]:
    """Logarithm of the regret of the first choice on each of `test`."""
    models = family_models(fit_families(train, device, HYPER, seed))
    found = []
    for t in test:
        (first, *_), _ = models[t.family].rank(t.problem, device, t.rows)
        found.append(np.log(t.time_ms[np.searchsorted(t.rows, first)] / t.time_ms.min()))
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--families", nargs="*", help="these kernel families only")
    parser.add_argument("--out", type=Path, default=RESULTS / "h100")
    arguments = parser.parse_args()
    dataset = read_dataset([arguments.data])
    wanted = set(arguments.families or {t.family for t in dataset.timings})
    timings = [t for t in dataset.timings if t.family in wanted]
    rows: dict[str, int] = {}
    regrets: dict[str, list[NDArray[np.float64]]] = {}
    for seed, fold in enumerate(split_by_network(timings, arguments.folds, 0)):
        for name, train in plans(fold.train, dataset.device, seed).items():
            rows[name] = rows.get(name, 0) + sum(len(t.rows) for t in train)
            found = log_regrets(train, fold.test, dataset.device, seed)
            regrets.setdefault(name, []).append(found)
            print(f"fold {seed}: {name}: {np.exp(found.mean()):.4f}", flush=True)
    base = np.concatenate(regrets[BASE])
    result = provenance("numpy", "lightgbm", gpu=False) | {
        "data": dataset.digest,
        "families": sorted(wanted),
        "folds": arguments.folds,
        "problems": len(base),
        "plans": {
            name: _figures(np.concatenate(parts), base, rows[name] // arguments.folds)
            for name, parts in regrets.items()
        },
    }
    print(f"written: {write('sampling_plans', result, arguments.out)}")


def _figures(
    logs: NDArray[np.float64], base: NDArray[np.float64], rows: int
) -> dict[str, float | int]:
    """`rows` of training a fold; the difference from ``BASE`` is in percent of time."""
    difference = 100 * (logs - base)
    return {
        "rows": rows,
        "geomean": float(np.exp(logs.mean())),
        "p95": float(np.exp(np.quantile(logs, 0.95))),
        "worst": float(np.exp(logs.max())),
        "difference_percent": float(difference.mean()),
        "standard_error_percent": float(difference.std(ddof=1) / np.sqrt(len(logs))),
    }


if __name__ == "__main__":
    main()
