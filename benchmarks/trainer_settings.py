"""Compare settings of the trainer by cross-validation over networks, as decisions 167 to 170 did.

    python benchmarks/trainer_settings.py --device h100 [--problems 400] [--setting "..."]

Each setting trains on the committed measurements without the layers of a fold's networks, and
answers for these. The folds are the same for all settings. A line says how far the order's choices
are from the best measured config, and how far the whole answers are, PyTorch's operator among them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from measured import measured

from confpred.training import calibrate
from confpred.training.cross_validate import cross_validate, part_of
from confpred.training.dataset import Dataset, read_dataset
from confpred.training.evaluate import CHOSEN, Summary, folds_of, whole
from confpred.training.fit import Hyperparameters

DEVICES = ("h100", "h200")
HYPER = Hyperparameters()


@dataclass(frozen=True)
class Setting:
    """How the trees grow, and how much a loss against PyTorch's operator weighs."""

    hyper: Hyperparameters = HYPER
    caution: float = calibrate.CAUTION


SETTINGS: Mapping[str, Setting] = {
    "deployed": Setting(),
    "no trees that rank": Setting(replace(HYPER, rank_trees=0)),
    "rank weight 0.01": Setting(replace(HYPER, rank_weight=0.01)),
    "rank weight 0.05": Setting(replace(HYPER, rank_weight=0.05)),
    "time by 200 trees of 31 leaves": Setting(replace(HYPER, time_trees=200, time_leaves=31)),
    "caution 1": Setting(caution=1.0),
    "caution 5": Setting(caution=5.0),
}


def judged(dataset: Dataset, setting: Setting, folds: int, seed: int) -> str:
    """Return the figures of one setting in words."""
    calibrate.CAUTION = setting.caution  # margins are fitted in this process
    split = folds_of(dataset, folds, seed)
    scores, held_out = cross_validate(dataset, split, setting.hyper, seed)
    order = Summary.of(np.array([s.regret for s in scores]), [s.candidates for s in scores])
    text = f"order {order.geomean:.4f}, p95 {order.p95:.3f}, best of 3 {order.top['3']:.4f}"
    if (found := whole(held_out.answers)) is not None:
        answers = found.regret[CHOSEN]
        text += (
            f"; whole {answers.geomean:.4f}, p95 {answers.p95:.3f}, by time "
            f"{found.time[CHOSEN]:.4f}; left to PyTorch {found.pytorch}, wrongly "
            f"{found.given_away}; slower than PyTorch {found.slower} of {answers.problems}"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0])
    parser.add_argument("--problems", type=int, help="learn from so many; default: all")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="default: all")
    arguments = parser.parse_args()
    data = read_dataset([measured(key) for key in DEVICES], arguments.device)
    data = part_of(data, (), arguments.problems, arguments.seed)
    for name in arguments.setting or SETTINGS:
        found = judged(data, SETTINGS[name], arguments.folds, arguments.seed)
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main()
