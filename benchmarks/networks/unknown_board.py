"""How much of the shipped model's gain tuning brings where every learned model is hidden.

    python -m benchmarks.networks.unknown_board --out runs/unknown    # about 25 minutes
    python -m benchmarks.networks.unknown_board --networks fastvit_sa12 --budget 380

Each network has a process of its own, as in `benchmarks.networks.networks`: inference by PyTorch's
Inductor, by `confpred.optimize` with the shipped model, and with ``tune=60`` and ``tune=15`` on a
GPU of another name, where no operation has a model and nothing is compiled or kept yet. All are
timed in turns. The *share of the gain* of a way is

    log(Inductor's time / time of the way) / log(Inductor's time / time with the model)

so 1 is all of it, and 0 or less is none. With ``--part`` the way ``part tune=60`` has the model
that `benchmarks.model.partitions` has learned on a part of a GPU as the only one. A network that
the model makes less than 3 % faster has no share; in the geometric mean a share below 0.01 counts
as 0.01. It is of GPU time, and of wall time.

Two further processes then run first steps, with the model and with the answers that ``tune=60``
kept; the extra seconds of a second process are the difference. A network whose rows are all in the
file in ``--out`` is left out. With ``--cache``, which keeps the answers, so is each process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.networks.networks import BROAD, INFERENCE, KEY, run, some
from benchmarks.provenance import RESULTS

NETWORKS = (
    "fastvit_sa12", "mobilenetv4_conv_medium", "seresnext50_32x4d", "inception_next_tiny",
    "regnety_016",
)  # fmt: skip
#: Ways without a model, and their seconds of tuning; the last is in a process that finds answers.
UNKNOWN = {"tune=60": 60, "tune=15": 15, "part tune=60": 60, "second tune=60": 60}
WAYS = ("eager", "compile", "optimize", "tune=60", "tune=15")
OF_PART = ("part tune=60",)
#: Ways in processes of their own, whose first steps count.
SECOND = ("second optimize", "second tune=60")
LEAST_GAIN, LEAST_SHARE = 1.03, 0.01
#: Ratios of times in the rows, by the clock.
CLOCKS = {"gpu": "graph_over_compile", "wall": "over_compile"}
#: For the processes of a network: the folder of caches, one for each way, and that of the model of
#: a part of a GPU.
CACHE, PART = "UNKNOWN_BOARD_CACHE", "UNKNOWN_BOARD_PART"
#: In the folder of a part's model: the description of the part.
DESCRIPTION = "device.json"


@contextmanager
def models_hidden(folder: Path, part: Path | None = None) -> Iterator[Any]:
    """Let the GPU be one that no model knows in the block, which gets its description; `folder` is
    its user's cache. The model in `part` is the only one, if there is any."""
    from confpred.cuda import driver
    from confpred.families.registry import all_operations
    from confpred.model.folder import load_model
    from confpred.predict.predictor import Predictor
    from confpred.problem import device as devices
    from confpred.problem.conv2d import CONVOLUTION
    from confpred.pytorch.run import choosing
    from confpred.sampler import run as sampler

    board = replace(driver.device_of(0), key="unknown-board", product="NVIDIA Unknown")
    named = [patch.object(module, "device_of", lambda _: board) for module in (driver, sampler)]
    with patch.dict(os.environ, CONFPRED_CACHE_DIR=str(folder)), named[0], named[1]:
        devices.remember(driver.describe(0)[1], asdict(board))
        for operation in all_operations():
            choosing.use_predictor(Predictor({}), operation)
        if part is not None:
            whole = json.loads((part / DESCRIPTION).read_text())
            devices.remember(driver.describe(0)[1], whole)
            model = load_model(part / whole["key"])
            choosing.use_predictor(Predictor({whole["key"]: model}), CONVOLUTION.name)
        try:
            yield board
        finally:
            choosing._predictors.clear()
            choosing.forget()


def without_models(way: str) -> Callable[[Any], Any]:
    """Return the way that captures by `optimize` on a GPU that no model knows; what is kept counts
    in a second process alone."""

    def start(model: Any) -> Any:
        import confpred

        # A second process finds what the first one has kept.
        folder = Path(os.environ[CACHE], way.removeprefix("second "))
        part = Path(os.environ[PART]) if way in OF_PART else None
        forward, is_captured = confpred.optimize(model, tune=UNKNOWN[way]), False
        if way not in SECOND:
            shutil.rmtree(folder, ignore_errors=True)

        def call(*inputs: Any) -> Any:
            nonlocal is_captured
            if is_captured:
                return forward(*inputs)
            is_captured = True
            with models_hidden(folder, part):
                return forward(*inputs)

        return call

    return start


def share(over_inductor: float, with_model: float) -> float | None:
    """Return the share of the model's gain; None where that is too small to be divided by. Both
    are Inductor's time over another one."""
    if with_model < LEAST_GAIN:
        return None
    return math.log(over_inductor) / math.log(with_model)


def summed(result: dict[str, Any]) -> dict[str, Any]:
    """Return `result` with what its rows say of each network, and the means."""
    rows = {(row["network"], row["way"]): row for row in result["rows"] if "error" not in row}
    networks: dict[str, dict[str, Any]] = {}
    for network in dict.fromkeys(row["network"] for row in result["rows"]):
        own = {way: row for (name, way), row in rows.items() if name == network}
        facts: dict[str, Any] = {"first_s": {way: row["first_s"] for way, row in own.items()}}
        for clock, field in CLOCKS.items():
            over = {way: own[way].get(field) for way in (*WAYS, *OF_PART) if way in own}
            model = over.get("optimize")
            facts[f"{clock}_over_compile"] = over
            facts[f"{clock}_share"] = {
                way: share(over[way], model)
                for way in UNKNOWN
                if model is not None and over.get(way) is not None
            }
        if set(SECOND) <= own.keys():
            model_s, kept_s = (own[way]["first_s"] for way in SECOND)
            facts["second_extra_s"] = kept_s - model_s
        networks[network] = facts
    shares = {
        f"{clock}_share": {
            way: statistics.geometric_mean(max(s, LEAST_SHARE) for s in found)
            for way in UNKNOWN
            if (found := [s for s in _each(networks, f"{clock}_share", way) if s is not None])
        }
        for clock in CLOCKS
    }
    extra = [f["second_extra_s"] for f in networks.values() if "second_extra_s" in f]
    means = shares | {"second_extra_s": max(extra, default=None)}
    return result | {"networks": networks, "summary": means}


def _each(networks: dict[str, dict[str, Any]], fact: str, way: str) -> Iterator[float | None]:
    return (facts[fact].get(way) for facts in networks.values())


def tasks_of(told: argparse.Namespace, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a task a process: the ways of each network in one, first steps in two others."""
    known = {tuple(row[k] for k in KEY) for row in result.get("rows", ()) if "error" not in row}
    tasks = []
    for network in told.networks:
        batch = next(batch for mode, batch in BROAD[network].steps if mode == INFERENCE)
        where = {"network": network, "mode": INFERENCE, "batch": batch}
        own = where | {"shape": BROAD[network].shape, "device": told.device}
        own["environment"] = {CACHE: str(told.folder / network)}
        own["environment"] |= {PART: str(told.part)} if told.part else {}
        compared = (*WAYS, *(OF_PART if told.part else ()))
        processes = [compared, *((way,) for way in SECOND)]
        missing = [w for w in processes if not {(*where.values(), way) for way in w} <= known]
        for ways in missing if told.cache or not missing else processes:
            rounds, turn_s = (told.rounds, 0.05) if ways == compared else (1, 0.001)
            tasks.append(own | {"ways": list(ways), "rounds": rounds, "turn_s": turn_s})
    return tasks


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    allowed = [n for n, kind in BROAD.items() if INFERENCE in dict(kind.steps)]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", type=some(allowed), default=list(NETWORKS))
    parser.add_argument("--budget", type=float, default=86400, help="seconds; then nothing starts")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cache", type=Path, help="a folder of this script alone")
    parser.add_argument("--part", type=lambda p: Path(p).resolve(), help="a learned model's folder")
    parser.add_argument("--out", type=Path, default=RESULTS, help="as in benchmarks/results/h100")
    parser.set_defaults(device="cuda", gpus=1, first=False, compiled=False)
    return parser.parse_args(words)


def main() -> None:
    told = parsed()
    with tempfile.TemporaryDirectory() as folder:
        told.folder = (told.cache or Path(folder)).resolve()
        run("unknown_board", tasks_of, told, summed)


if __name__ == "__main__":
    main()
