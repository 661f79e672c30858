"""The gain of a model for six Triton kernels, over the ways that people have without one.

    confpred plus the packages of published.py, without their dependencies but einops; on a GPU:
    python -m benchmarks.triton.six_kernels --sample runs [--only states] [--budget 55s]
    then anywhere with the same packages:
    python -m benchmarks.triton.six_kernels --judge runs [--out FOLDER]

All configs of ``PROBLEMS`` shapes of each kernel are measured as ``confpred sample`` does, a kernel
for as long as the budget. Each is judged as by ``confpred evaluate``: by models and baselines that
learned from the shapes of the other folds. A regret is the time of the choice over that of the best
config; ``first three`` is of the best of the first three choices. Where a file beside this one has
rows of another GPU, each GPU's shapes are judged by a model of the other's, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import RESULTS, provenance
from confpred.files import write_json

KERNELS = Path(__file__).with_name("published.py")
PROBLEMS, FOLDS, SEED = 40, 5, 0
#: Where a list of the ten best configs, or the nearest shape, must be beaten.
RIVALS = ("nearest measured shape", "ten configs, all tried")


def sample(folder: Path, only: list[str], budget: str) -> None:
    """Measure the kernels into a folder each, and say how long each took. All are compiled side by
    side first: their first problems are measured into a folder that is thrown away."""
    sys.path.insert(0, str(KERNELS.parent))
    import published

    def command(name: str, into: Path, budget: str) -> list[str]:
        ranges = ("--ranges", published.RANGES[name], "--problems", PROBLEMS, "--seed", SEED)
        words = (f"{KERNELS}:{name}", *ranges, "--budget", budget, "--out", into / name)
        return [sys.executable, "-m", "confpred", "sample", *map(str, words)]

    names = [name for name in published.RANGES if not only or name in only]
    with tempfile.TemporaryDirectory() as first:
        compiling = [subprocess.Popen(command(name, Path(first), "25s")) for name in names]
        for process in compiling:
            process.wait()
    for name in names:
        began = time.monotonic()
        subprocess.run(command(name, folder, budget), check=False)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def judge(folder: Path) -> dict[str, Any]:
    """Return the table of each kernel in a folder of measurements, and of all of them."""
    import pyarrow.parquet as pq

    from confpred.training.dataset import read_dataset
    from confpred.training.evaluate import evaluate
    from confpred.training.fit import usual

    kernels: dict[str, Any] = {}
    for runs in sorted(path for path in folder.iterdir() if path.is_dir()):
        dataset = read_dataset([runs])
        found = evaluate(dataset, usual(dataset.operation), FOLDS, SEED)
        rows = pq.read_table(runs, columns=["time", "driver", "project"])
        kernels[runs.name] = {
            "device": found.dataset.device.key,
            "problems": len(found.timings),
            "configs": round(float(np.mean([len(t.rows) for t in found.timings])), 1),
            "statuses": dict(found.dataset.statuses),
            "source": found.dataset.kernels[runs.name][0],
            **{name: max(rows[name].to_pylist()) for name in ("time", "driver", "project")},
            "methods": {
                method: {
                    "geomean": round(summary.geomean, 4),
                    "p95": round(summary.p95, 4),
                    "first three": round(summary.top["3"], 4),
                }
                for method, summary in found.summaries().items()
            },
        }
        print(runs.name, json.dumps(kernels[runs.name]["methods"]), flush=True)
    return {"kernels": kernels, "all": overall(kernels)}


def overall(kernels: dict[str, Any]) -> dict[str, Any]:
    """Return geometric means over the kernels: of regrets, and of the rivals' over the model's."""

    def mean(method: str, figure: str = "geomean") -> float:
        logs = [np.log(kernel["methods"][method][figure]) for kernel in kernels.values()]
        return float(np.exp(np.mean(logs)))

    gains = {f"over {rival}": round(mean(rival) / mean("model"), 4) for rival in RIVALS}
    regret = {"geomean": mean("model"), "first three": mean("model", "first three")}
    return {name: round(value, 4) for name, value in regret.items()} | gains


def transfer(folder: Path) -> dict[str, Any]:
    """Return, by kernel and pair of GPUs, the figures of a model of the first GPU on the second,
    for shapes that neither measured."""
    from benchmarks.model.transfer import curve
    from confpred.training.dataset import read_dataset

    rows: dict[str, Any] = {}
    for file in sorted(KERNELS.parent.glob("*.parquet")):
        name = file.stem.partition("-")[0]
        if not (folder / name).is_dir():
            continue
        pair = read_dataset([file]), read_dataset([folder / name])
        for giver, asker in (pair, pair[::-1]):
            if giver.device != asker.device:
                figures = curve(giver, asker, (0.0,), FOLDS, 1, SEED)["curve"][0]
                devices = f"{giver.device.key} to {asker.device.key}"
                rows.setdefault(name, {})[devices] = figures
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sample", type=Path, help="folder of new measurements; needs a GPU")
    parser.add_argument("--judge", type=Path, help="folder of measurements")
    parser.add_argument("--only", nargs="*", default=[], help="names of kernels")
    parser.add_argument("--budget", default="55s", help="to measure one kernel")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.sample is not None:
        sample(options.sample, options.only, options.budget)
    if options.judge is not None:
        paths = filter(None, [str(KERNELS.parent), os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for processes that judge folds
        os.environ.setdefault("CONFPRED_FAMILIES", "published")
        sys.path.insert(0, str(KERNELS.parent))
        facts = {"provenance": provenance("torch", "triton", "lightgbm", gpu=False)}
        judged = judge(options.judge) | {"transfer": transfer(options.judge)}
        write_json(options.out / "triton.json", facts | judged)


if __name__ == "__main__":
    main()
