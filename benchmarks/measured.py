"""Where the committed measurements are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
DATASETS = ROOT / "datasets"
HOLDOUT = DATASETS / "holdout"


def measured(device: str, folder: Path = DATASETS) -> list[Path]:
    """The files with a device's rows: one of its name, and what later draws have added beside it.

    A Parquet file is stored whole in every commit that changes it, so rows that come later are a
    file of their own, such as ``h200_further.parquet``.
    """
    return [folder / f"{device}.parquet", *sorted(folder.glob(f"{device}_*.parquet"))]
