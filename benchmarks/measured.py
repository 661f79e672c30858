"""Where the committed measurements are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
DATASETS = ROOT / "datasets"
HOLDOUT = DATASETS / "holdout"
ANCHORS = DATASETS / "anchors"


def measured(device: str, folder: Path = DATASETS) -> Path:
    """What `folder` has of a device: the folder of its parts, or one file of its name.

    A Parquet file is stored whole in every commit that changes it, so parts are added and never
    changed.
    """
    parts = folder / device
    return parts if parts.is_dir() else folder / f"{device}.parquet"


def measured_devices() -> list[str]:
    """The devices that ``datasets/`` has measurements to train on of, by name."""
    return sorted({part.parent.name for part in DATASETS.glob("*/part-*.parquet")})
