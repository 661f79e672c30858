"""Where and when a result was measured; stored in every file of ``benchmarks/results/``."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
DATASETS = ROOT / "datasets"
HOLDOUT = DATASETS / "holdout"
ANCHORS = DATASETS / "anchors"
CHAINS = DATASETS / "chains"
NORMS = DATASETS / "norm"
RANKS, GROUPS = DATASETS / "rank", DATASETS / "group_norm"
DENSE_RANKS = DATASETS / "rank_dense"


def _commit() -> str:
    """Return the commit that is measured; ``$CONFPRED_COMMIT`` where the checkout has no
    history."""
    given = os.environ.get("CONFPRED_COMMIT")
    if given:
        return given
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def folder_of(out: Path | None) -> Path:
    """Return `out`, or the folder for results of CUDA device 0."""
    if out is not None:
        return out
    from confpred.cuda import driver

    return RESULTS / driver.device_of(0).key


def is_published(out: Path) -> bool:
    """Return whether `out` is where results are published, in which no trial is written."""
    return RESULTS.resolve() in (out.resolve(), *out.resolve().parents)


def provenance(*packages: str, gpu: bool) -> dict[str, Any]:
    """Date, commit, machine and the versions of `packages`; with `gpu`, device and driver too."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": _commit(),
        "python": platform.python_version(),
        "processor": _processor(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
    if gpu:
        from confpred.cuda.compiler import nvrtc_version
        from confpred.cuda.driver import describe

        facts["device"], facts["driver"] = describe(0)
        facts["nvrtc"] = nvrtc_version()
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"{name}, {os.cpu_count()} cores"


def write(name: str, result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write ``folder/name.json`` whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)
    return path


def measured(device: str, folder: Path = DATASETS) -> Path:
    """Return the measurements of a device in `folder`: the folder of its parts, or one file of its
    name.

    A Parquet file is stored whole in every commit that changes it, so parts are added and never
    changed.
    """
    parts = folder / device
    return parts if parts.is_dir() else folder / f"{device}.parquet"


def measured_devices(folder: Path = DATASETS) -> list[str]:
    """Return the devices that `folder` has measurements of, by name."""
    return sorted({part.parent.name for part in folder.glob("*/part-*.parquet")})
