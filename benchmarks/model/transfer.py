"""How well a model chooses on a device of which few problems were measured, or none.

    nice python -m benchmarks.model.transfer             # about nine minutes of one core
    nice python -m benchmarks.model.transfer --folds 2   # a rough look

One device gives (the H100) and one asks (the H200); then the other way round without any problem of
the asker. For each share of the asker's problems, order trees learn from all problems of the
source device and that share of the asker's, with the device's rates (`DEVICE_FEATURES`), and also
from that share alone. Both are judged as models are (`confpred.training.evaluate`): on
networks whose layers neither has seen of either device, by the time of the config that they put
first over that of the best one, both measured on the asker. The configs to choose from are those
that were measured, of the kernel families that both devices have.

Whole layers are drawn, all their problems with them; a share holds the smaller ones. With
``--draws`` the shares up to 5 % are drawn several times.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import provenance
from benchmarks.provenance import measured
from confpred.families.registry import all_families
from confpred.model.features import Pool, pools
from confpred.model.trees import Trees
from confpred.predict.predictor import distance
from confpred.training.cross_validate import split_by_network
from confpred.training.dataset import Dataset, Timings, read_dataset
from confpred.training.evaluate import Summary
from confpred.training.fit import Hyperparameters, grow_order
from confpred.training.regret import TOPS

SHARES = (0.0, 0.01, 0.05, 0.2, 1.0)
FOLDS, DRAWS = 4, 1
#: Features by which a model of several devices knows the device of a row: logarithms to base 2.
DEVICE_FEATURES = ("sm_count", "dram_bytes_per_s", "tensor_flops", "simt_flops")


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One problem and family on one device, with its features worked out once."""

    timings: Timings
    features: NDArray[np.float32]
    regret: NDArray[np.float64]


def examples_of(dataset: Dataset, members: Mapping[str, Pool]) -> list[Example]:
    """Those of the families in `members`, which names the pool of each."""
    device, found = dataset.device, []
    told = np.log2([getattr(device, name) for name in DEVICE_FEATURES]).astype(np.float32)
    for t in dataset.timings:
        if t.family in members:
            own = members[t.family].features(all_families()[t.family], t.problem, device, t.rows)
            features = np.hstack([own, np.broadcast_to(told, (len(own), len(told)))])
            found.append(Example(t, features, t.time_ms / t.time_ms.min()))
    return found


def order_of(examples: Sequence[Example], names: Sequence[str], seed: int) -> Trees | None:
    """Return the trees that a model of these examples would have; None where there are none."""
    if not examples:
        return None
    features = np.concatenate([e.features for e in examples])
    timings = [e.timings for e in examples]
    return Trees(grow_order(features, names, timings, Hyperparameters(), seed))


def regrets(order: Trees, test: Sequence[Example]) -> list[list[float]]:
    """For each example, the regret of the best of the first k configs, for each k of ``TOPS``."""
    found = []
    for example in test:
        first = np.argsort(order.predict(example.features), kind="stable")
        found.append([float(example.regret[first[:k]].min()) for k in TOPS])
    return found


def share_of(layers: Collection[str], share: float, seed: int) -> set[str]:
    """Return a random `share` of `layers`, which holds those of smaller shares."""
    shuffled = sorted(layers)
    random.Random(seed).shuffle(shuffled)
    return set(shuffled[: round(share * len(shuffled))])


def drawn(examples: Sequence[Example], share: float, seed: int) -> list[Example]:
    """Return the examples of `share` of the layers."""
    kept = share_of({str(e.timings.problem.layer()) for e in examples}, share, seed)
    return [e for e in examples if str(e.timings.problem.layer()) in kept]


def summary(found: Sequence[Sequence[float]]) -> dict[str, float]:
    s = Summary.of(np.array(found), [0])
    tops = {f"top{k}": value for k, value in s.top.items() if k != "1"}
    return {"geomean": s.geomean, "p95": s.p95, "worst": s.worst, **tops}


def curve(
    giver: Dataset, asker: Dataset, shares: Sequence[float], folds: int, draws: int, seed: int
) -> dict[str, Any]:
    """Return the figures for each share, with and without the source device's problems."""
    common = {t.family for t in giver.timings} & {t.family for t in asker.timings}
    made = pools(all_families()[name] for name in common)
    members = {family.name: pool for pool in made for family in pool.families}
    given, asked = (examples_of(dataset, members) for dataset in (giver, asker))
    of_timings = {(e.timings.problem, e.timings.family): e for e in asked}
    split = split_by_network([e.timings for e in asked], folds, seed)
    ways: dict[tuple[float, str], list[list[float]]] = {}
    rows: dict[tuple[float, str], list[int]] = {}
    for fold in split:
        held_out = {t.problem.layer() for t in fold.test}
        test = [of_timings[t.problem, t.family] for t in fold.test]
        learn = [of_timings[t.problem, t.family] for t in fold.train]
        old = [e for e in given if e.timings.problem.layer() not in held_out]
        for share in shares:
            for draw in range(draws if 0 < share <= 0.05 else 1):
                new = drawn(learn, share, seed + draw)
                for way, examples in (("both devices", old + new), ("alone", new)):
                    if way == "alone" and share == 0.0:
                        continue
                    key = (share, way)
                    rows.setdefault(key, []).append(sum(len(e.regret) for e in new))
                    for pool in made:
                        mine = {family.name for family in pool.families}
                        names = (*pool.feature_names, *DEVICE_FEATURES)
                        fit = [e for e in examples if e.timings.family in mine]
                        order = order_of(fit, names, seed)
                        judged = [e for e in test if e.timings.family in mine]
                        if order is not None:
                            ways.setdefault(key, []).extend(regrets(order, judged))
    return {
        "giver": giver.device.key,
        "asker": asker.device.key,
        "distance": distance(giver.device, asker.device),
        "families": sorted(common),
        "problems": len(asked),
        "curve": [
            {
                "share": share,
                "learned_from": way,
                "rows": round(float(np.mean(rows[share, way]))),
                **summary(found),
            }
            for (share, way), found in ways.items()
        ],
    }


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Regret over the share of the asker's problems: geometric mean, and 95 % quantile."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    there = result["there"]
    for axes, statistic in zip(panels, ("geomean", "p95"), strict=True):
        for way in ("both devices", "alone"):
            found = [row for row in there["curve"] if row["learned_from"] == way]
            places = [SHARES.index(row["share"]) for row in found]
            axes.plot(places, [row[statistic] for row in found], marker="o", label=way)
        axes.set_xticks(range(len(SHARES)), [f"{share:.0%}" for share in SHARES])
        axes.set_xlabel(f"share of the problems of the {there['asker']} that were learned from")
        axes.set_ylabel(f"regret on held-out networks, {statistic}")
        axes.set_ylim(bottom=1.0)
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, format="png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--folds", type=int, default=FOLDS)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=provenance.RESULTS)
    told = parser.parse_args()
    begun = time.monotonic()
    h100, h200 = (read_dataset([measured(key)]) for key in ("h100", "h200"))
    result = {
        "provenance": provenance.provenance("lightgbm", "numpy", gpu=False),
        "data": {dataset.device.key: dataset.digest for dataset in (h100, h200)},
        "folds": told.folds,
        "draws": told.draws,
        "seed": told.seed,
        "there": curve(h100, h200, SHARES, told.folds, told.draws, told.seed),
        "back": curve(h200, h100, (0.0, 1.0), told.folds, 1, told.seed),
    }
    for direction in ("there", "back"):
        for row in result[direction]["curve"]:
            print(direction, row)
    print(provenance.write("transfer", result, told.out), f"{time.monotonic() - begun:.0f} s")
    plot(result, told.out / "transfer.png")


if __name__ == "__main__":
    main()
