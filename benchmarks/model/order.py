"""Gain of each change of the trees that order configs, with the error of the difference.

    python -m benchmarks.model.order [--folds 5] [--out FOLDER]

Order trees learn from the committed measurements without the layers of a fold's networks, on any
device, and order the measured configs of the fold's problems, all of them candidates and without
the cascade. Every variant has the same folds, so that two of them are compared problem by problem;
the error is the standard deviation of the mean difference, by bootstrap over networks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.provenance import RESULTS, measured, provenance, write
from confpred.families.registry import all_families
from confpred.model.features import Pool, Registers, pools, registers_text
from confpred.model.trees import Trees
from confpred.training.cross_validate import split_by_network, without_networks
from confpred.training.dataset import Timings, read_dataset
from confpred.training.fit import (
    HOPELESS,
    REGRESSOR,
    Hyperparameters,
    fresh,
    grow_order,
    regrets,
    text_of,
)
from confpred.training.regret import figures as statistics

DEVICES = ("h100", "h200")
#: Features whose distance to the least among a problem's candidates is tried.
RELATIVE = ("log_estimate", "log_work", "log_load_bytes", "log_products", "waves", "wave_waste")
RESAMPLES = 2_000
HYPER = Hyperparameters()


@dataclass(frozen=True)
class Variant:
    """A way to learn.

    Attributes:
        together: whether the devices learn from each other.
        registers: whether occupancy is of the registers that the compiler gave.
        relative: whether there are features relative to the problem's other candidates.
        seeds: how many ensembles are averaged.
        within: whether differences within a problem are learned, not regrets as such.
        hyper: how the trees grow.
    """

    together: bool = True
    registers: bool = True
    relative: bool = False
    seeds: int = 1
    within: bool = True
    hyper: Hyperparameters = HYPER


#: As trees grew before decision 144.
BEFORE = replace(HYPER, trees=200, num_leaves=63, rank_trees=0)
VARIANTS: Mapping[str, Variant] = {
    "regrets as such, 200 trees of 63 leaves (before)": Variant(within=False, hyper=BEFORE),
    "regrets as such, 300 trees of 127 leaves": Variant(within=False),
    "differences within a problem, 200 trees of 63 leaves": Variant(hyper=BEFORE),
    "the same, 400 trees": Variant(hyper=replace(BEFORE, trees=400)),
    "the same, 600 trees": Variant(hyper=replace(BEFORE, trees=600)),
    "differences within a problem, 300 trees of 127 leaves": Variant(
        hyper=replace(HYPER, rank_trees=0)
    ),
    "these, and 300 trees that rank (deployed)": Variant(),
    "deployed, each device alone": Variant(together=False),
    "deployed, estimated registers": Variant(registers=False),
    "deployed, and relative features": Variant(relative=True),
    "deployed, three seeds": Variant(seeds=3),
}


def features(
    pool: Pool, timings: Sequence[Timings], tables: Mapping[str, Registers], variant: Variant
) -> list[NDArray[np.float32]]:
    """Return a matrix for each of `timings`."""
    found = []
    for t in timings:
        table = tables.get(t.family) if variant.registers else None
        matrix = pool.features(all_families()[t.family], t.problem, t.device, t.rows, table)
        if variant.relative:
            columns = [i for i, name in enumerate(pool.feature_names) if name in RELATIVE]
            few = matrix[:, columns]
            matrix = np.column_stack([matrix, few - few.min(axis=0)])
        found.append(matrix)
    return found


def grow_as_such(
    matrix: NDArray[np.float32],
    names: Sequence[str],
    timings: Sequence[Timings],
    hyper: Hyperparameters,
    seed: int,
) -> str:
    """`grow_order` with squared error of the regrets as such."""
    regret = regrets(timings)
    model = fresh(REGRESSOR, hyper, len(matrix), seed).set_params(
        n_estimators=hyper.trees, num_leaves=hyper.num_leaves
    )
    model.fit(
        matrix,
        np.log(regret.clip(max=HOPELESS)),
        sample_weight=regret**-hyper.focus,
        feature_name=list(names),
    )
    return text_of(model)


def learned(
    train: Sequence[Timings], matrices: Sequence[NDArray[np.float32]], variant: Variant
) -> list[Trees]:
    """Return the ensembles of `variant`."""
    matrix = np.concatenate(matrices)
    names = [f"column_{i}" for i in range(matrix.shape[1])]
    grow = grow_order if variant.within else grow_as_such
    seeds = range(variant.seeds)
    return [Trees(grow(matrix, names, train, variant.hyper, seed)) for seed in seeds]


def judged(
    variant: Variant, every: Sequence[Timings], held_out: Sequence[Sequence[str]]
) -> dict[tuple[str, str, str], tuple[str, float]]:
    """By device, problem and family: the first network, and the regret of the first config."""
    found = {}
    for networks in held_out:
        train = without_networks(every, networks)
        test = [t for t in every if t.networks and t.networks[0] in networks]
        for pool in pools({all_families()[t.family] for t in every}):
            mine = [t for t in train if all_families()[t.family] in pool.families]
            texts = {
                f.name: registers_text(
                    f, [(t.problem, t.rows, t.registers) for t in mine if t.family == f.name]
                )
                for f in pool.families
            }
            tables = {n: Registers(all_families()[n], x) for n, x in texts.items() if x is not None}
            asked = [t for t in test if all_families()[t.family] in pool.families]
            groups = (DEVICES,) if variant.together else tuple((name,) for name in DEVICES)
            for group in groups:
                lessons = [t for t in mine if t.device.key in group]
                questions = [t for t in asked if t.device.key in group]
                if not lessons or not questions:
                    continue
                matrices = features(pool, lessons, tables, variant)
                trees = learned(lessons, matrices, variant)
                for t, matrix in zip(
                    questions, features(pool, questions, tables, variant), strict=True
                ):
                    first = sum(each.predict(matrix) for each in trees).argmin()
                    regret = float(t.time_ms[first] / t.time_ms.min())
                    found[t.device.key, str(t.problem), t.family] = (t.networks[0], regret)
    return found


def figures(found: Mapping[Any, tuple[str, float]]) -> dict[str, float]:
    regret = np.array([value for _, value in found.values()])
    return statistics(regret, "geomean", "p95", "worst")


def difference(
    base: Mapping[Any, tuple[str, float]], other: Mapping[Any, tuple[str, float]]
) -> dict[str, float]:
    """Mean difference of the logarithms of regret in hundredths, and its error."""
    keys = sorted(base)
    networks, owner = np.unique([base[key][0] for key in keys], return_inverse=True)
    change = 100 * np.log([other[key][1] / base[key][1] for key in keys])
    sums, counts = np.bincount(owner, change), np.bincount(owner)
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(networks), (RESAMPLES, len(networks)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    return {"points": float(change.mean()), "error": float(means.std())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="default: all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    data = read_dataset([measured(key) for key in DEVICES], DEVICES[0])
    every = data.everywhere
    held_out = [fold.networks for fold in split_by_network(every, arguments.folds, seed=0)]
    base, *_ = VARIANTS
    names = list(dict.fromkeys([base, *(arguments.variant or VARIANTS)]))
    found = {}
    for name in names:
        found[name] = judged(VARIANTS[name], every, held_out)
        print(name, figures(found[name]), difference(found[base], found[name]), flush=True)
    result = {
        "data": data.digest,
        "folds": arguments.folds,
        "variants": {
            name: {
                **figures(of),
                "devices": {
                    key: figures({k: v for k, v in of.items() if k[0] == key}) for key in DEVICES
                },
                "difference": difference(found[base], of),
            }
            for name, of in found.items()
        },
        **provenance("numpy", "lightgbm", gpu=False),
    }
    print(json.dumps(result["variants"], indent=1))
    print(f"written to {write('order', result, arguments.out)}")


if __name__ == "__main__":
    main()
