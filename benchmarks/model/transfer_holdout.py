"""How well whole models choose on a device of which few problems were measured, by its hold-out.

    nice python -m benchmarks.model.transfer_holdout    # about four minutes of one core a row
    python -m benchmarks.model.transfer_holdout --to h100 --shares 0.05

``transfer.py`` compares order trees by the configs that happen to be measured. Here a model is
trained as `confpred train` does, of all that was measured on one device and a share of the layers
of another, and judged by the other's hold-out, of which every legal config was measured. Without
any layer of that it is the first device's model with the second one's rates in place of its own.
Families that were measured with neither it does not know, and does not choose: the H100's data has
fewer than the H200's.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.model.transfer import share_of
from benchmarks.provenance import HOLDOUT, RESULTS, measured, provenance, write
from confpred.model.folder import Model, load_model
from confpred.training.dataset import Dataset, read_dataset
from confpred.training.holdout import HeldOut, check_unseen, judge_holdout, read_holdout
from confpred.training.train import train

DEVICES = ("h100", "h200")
SHARES = (0.0, 0.05, 1.0)


def with_share(asker: Dataset, share: float, seed: int) -> Dataset:
    """`asker` with `share` of its own layers, and all of the other devices'; the only one of those
    where that leaves none."""
    kept = share_of({str(t.problem.layer()) for t in asker.timings}, share, seed)
    if not kept:
        (giver,) = asker.others
        return giver
    problems = {t.problem for t in asker.timings if str(t.problem.layer()) in kept}
    return replace(asker.restricted(problems), others=asker.others)


def judged(
    asker: Dataset,
    held: HeldOut,
    share: float,
    seed: int,
    learn: Callable[[Dataset, Path], object],
) -> dict[str, Any]:
    """Return a row of the result: what the model of `share` is worth; `learn` makes its folder."""
    known = with_share(asker, share, seed)
    with tempfile.TemporaryDirectory() as folder:
        learn(known, Path(folder) / "model")
        model: Model = load_model(Path(folder) / "model")
    checked = check_unseen(model, known, held.dataset)
    verdict = judge_holdout(replace(model, device=asker.device), held, checked, seed)
    return {
        "from": [other.device.key for other in asker.others],
        "to": asker.device.key,
        "share": share,
        "rows": known.rows if known.device == asker.device else 0,
        "problems": verdict.problems,
        "ours": asdict(verdict.ours),
        "first": dict(verdict.first),
        "whole": asdict(verdict.whole),
        "weighted": verdict.weighted,
        "slower": dict(verdict.slower),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    shares = {"type": lambda text: [float(x) for x in text.split(",")], "default": list(SHARES)}
    parser.add_argument("--to", choices=DEVICES, help="judge on this device only")
    parser.add_argument("--shares", help="of its layers, with commas", **shares)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    told = parser.parse_args()
    result = provenance("lightgbm", "numpy", gpu=False) | {
        "seed": told.seed,
        "data": {},
        "holdout": {},
        "rows": [],
    }
    for key in reversed(DEVICES) if told.to is None else (told.to,):
        asker = read_dataset([measured(name) for name in DEVICES], key)
        path = measured(key, HOLDOUT)
        held = read_holdout(read_dataset([path], key), [path])
        result["data"][key], result["holdout"][key] = asker.digest, held.dataset.digest
        for share in told.shares:
            row = judged(
                asker, held, share, told.seed, lambda d, out: train(d, out, seed=told.seed)
            )
            print(row, flush=True)
            result["rows"].append(row)
    print(write("transfer_holdout", result, told.out))


if __name__ == "__main__":
    main()
