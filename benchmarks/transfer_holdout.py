"""How well whole models choose on a device of which few problems were measured, by its hold-out.

    nice python benchmarks/transfer_holdout.py            # about four minutes of one core a share
    python benchmarks/transfer_holdout.py --shares 0.05   # only with a twentieth of the problems

``transfer.py`` compares order trees by the configs that happen to be measured. Here a model is
trained as `confpred train` does, of all that was measured on the H100 and a share of the layers of
the H200, and judged by the H200's hold-out, of which every legal config was measured. Without any
layer of the H200 it is the H100's model with the H200's rates in place of its own. What it does not
know, such as families that were never measured on the H100, it does not choose.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from provenance import RESULTS, provenance, write
from transfer import DATASETS, share_of

from confpred.model.folder import Model, load_model
from confpred.training.dataset import Dataset, read_dataset
from confpred.training.holdout import HeldOut, check_unseen, judge_holdout, read_holdout
from confpred.training.train import train

GIVER, ASKER = "h100", "h200"
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
    """A row: what the model of `share` is worth; `learn` makes its folder."""
    known = with_share(asker, share, seed)
    with tempfile.TemporaryDirectory() as folder:
        learn(known, Path(folder) / "model")
        model: Model = load_model(Path(folder) / "model")
    checked = check_unseen(model, known, held.dataset)
    verdict = judge_holdout(replace(model, device=asker.device), held, checked, seed)
    return {
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
    parser.add_argument("--shares", help="of the H200's layers, with commas", **shares)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    told = parser.parse_args()
    asker = read_dataset([DATASETS / f"{key}.parquet" for key in (GIVER, ASKER)], ASKER)
    path = DATASETS / "holdout" / f"{ASKER}.parquet"
    held = read_holdout(read_dataset([path], ASKER), [path])
    result = provenance("lightgbm", "numpy", gpu=False) | {
        "data": {each.device.key: each.digest for each in (asker, *asker.others)},
        "holdout": held.dataset.digest,
        "seed": told.seed,
        "rows": [],
    }
    for share in told.shares:
        row = judged(asker, held, share, told.seed, lambda d, out: train(d, out, seed=told.seed))
        print(row, flush=True)
        result["rows"].append(row)
    print(write("transfer_holdout", result, told.out))


if __name__ == "__main__":
    main()
