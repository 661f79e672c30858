"""Putting a trained model where predictions look for it, beside those that are there."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from confpred.errors import StorageError
from confpred.files import write_folder
from confpred.model.folder import read_files

_ATTEMPTS = 100


def publish(folder: Path, models: Path) -> Path:
    """Copy the model in `folder` to `models`, whole or not at all, under a version that is new
    there; older models stay, and the newest of a device is the one in use.

    Returns:
        The folder of the published model.

    Raises:
        ModelError: `folder` is damaged.
        StorageError: the file system refused.
    """
    read = read_files(folder)
    today = datetime.now(timezone.utc).strftime("%Y.%m.%d")
    version = f"{read.card['device']}-{today}"
    names = (version, *(f"{version}.{number}" for number in range(2, _ATTEMPTS)))
    free = next((name for name in names if not (models / name).exists()), None)
    if free is None:
        raise StorageError(f"{models} has {_ATTEMPTS} models of today")
    write_folder(models / free, read.files)
    return models / free
