"""What a server is to answer by: models and a plan that belong together, known by their digest.

The supervisor copies them from where the operator keeps them to a folder of its own, once each time
that they change: a generation. All workers load that copy, one that starts later too. So they
answer alike whatever becomes of the originals, and a digest names the very bytes that answer.

    <digest>/models/<version>/   a model folder, one for each device
    <digest>/plan.json           the plan, if there is one
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from confpred.errors import DataError, ModelError
from confpred.files import write_folder
from confpred.model.card import read_files
from confpred.model.folder import model_folders, shipped_models
from confpred.predict.plan import plan_file

from .settings import Settings

MODELS, PLAN = "models", "plan.json"


def publish(settings: Settings, home: Path) -> Path:
    """Copy the models and the plan of `settings` to a folder in `home`, named by their digest.

    Nothing is copied that is there already.

    Raises:
        ModelError: a model is missing, or damaged, or its trees are.
        DataError: the plan cannot be read.
        StorageError: there is no room for the copy.
    """
    source = shipped_models() if settings.model is None else Path(settings.model)
    folders = model_folders(source)
    if not folders and settings.model is not None:
        raise ModelError(f"{source} holds no model folder")
    files: dict[str, bytes] = {}
    known, models = {}, []
    for device, path in folders.items():
        read = read_files(path)
        version = path.resolve().name
        known[device] = (version, read.digest)
        models.append((path, read))
        files |= {f"{MODELS}/{version}/{name}": text for name, text in read.files.items()}
    plan = _read_plan(settings.plan)
    if plan is not None:
        files[PLAN] = plan
    published = home / digest_of(known, plan)
    if not published.exists():
        for path, read in models:
            read.check_trees(path)
        write_folder(published, files)
    return published


def fingerprint(settings: Settings) -> str:
    """What changes when a file of the models or the plan does; cheap, as no file is read."""
    source = shipped_models() if settings.model is None else Path(settings.model)
    found = []
    for path in sorted((*source.glob("*"), *source.glob("*/*"), *_named(settings.plan))):
        try:
            status = path.stat()
        except OSError:  # gone since it was listed
            continue
        found.append((str(path), status.st_size, status.st_mtime_ns, status.st_ino))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def digest_of(models: Mapping[str, tuple[str, str]], plan: bytes | None) -> str:
    """The digest of a generation, of its models' names and digests by device and the text of its
    plan; answers tell the names."""
    parts = [models, None if plan is None else hashlib.sha256(plan).hexdigest()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def give_back() -> None:
    """Have the C library return the 30 MB that `publish` took, which glibc keeps for its thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _named(plan: str | None) -> list[Path]:
    return [] if plan is None else [plan_file(Path(plan))]


def _read_plan(path: str | None) -> bytes | None:
    try:
        return None if path is None else plan_file(Path(path)).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
