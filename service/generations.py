"""Generations: models and a plan that answer together, identified by their digest.

Each time that the operator's models or plan change, the supervisor copies them to a folder of its
own: a generation. All workers load that copy, also those that start later. So they give the same
answers even if the originals change, and the digest identifies the exact bytes in use.

    <digest>/models/<version>/   a model folder, one for each device
    <digest>/plan.json           the plan, if there is one

A new generation is loaded and tried in a process of its own before any worker loads it, because
native code evaluates the trees: a text that makes it crash, in spite of all checks, ends that
process and no worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np

from confpred.concurrency import end_with
from confpred.errors import ConfpredError, DataError, ModelError
from confpred.files import raising, write_folder
from confpred.model.card import CARD, ModelFiles, card_of, read_card, read_files, signed_by
from confpred.model.folder import Model, model_folders, models_in, shipped_models
from confpred.predict.plan import plan_file
from confpred.predict.predictor import Predictor
from confpred.problem.conv import CONV
from confpred.problem.device import KNOWN

from . import Settings
from .child import command
from .requests import RequestError, shorten
from .schema import EXAMPLE

MODELS, PLAN = "models", "plan.json"
#: Operations whose models are those of this version of confpred, not of a generation.
FURTHER = (CONV.name,)
#: Folders in the exchange's folder: models that a retraining published, and those withdrawn; and
#: how many published models of a device are kept.
PUBLISHED, WITHDRAWN, KEPT = "models", "withdrawn", 5
#: The reply header that names the models: ``h100=<digest>, h200=<digest>``.
MODEL_HEADER = "x-confpred-model"
_LEAST_DIGITS = 8  # of a digest that a request names
#: Most seconds of a trial.
_LONGEST_S = 120.0
#: Rows to try all trees with: one at a time and many, which LightGBM evaluates by different code.
_VALUES = (0.0, float("nan"), 1e30, -1e30)
_ROWS = (1, 32)


def published(folder: Path) -> list[tuple[Path, ModelFiles]]:
    """Return the models that an exchange in `folder` has published, from their cards alone, the
    newest first."""
    models = []
    for path in models_in(folder / PUBLISHED):
        with contextlib.suppress(ModelError):  # it was just removed, or is no model
            models.append((path, card_of(path)))
    return sorted(models, key=lambda model: model[1].card.created, reverse=True)


def newest_models(settings: Settings) -> dict[str, Path]:
    """Return the newest model folder for each device, among the operator's and those that a
    retraining has published.

    Raises:
        ModelError: a card is damaged.
    """
    newest = model_folders(shipped_models() if settings.model is None else Path(settings.model))
    if settings.exchange is None:
        return newest
    for path, read in reversed(published(Path(settings.exchange))):
        own = newest.get(read.card.device)
        if own is None or str(read_card(own)[1].get("created")) < read.card.created:
            newest[read.card.device] = path
    return newest


def withdraw(settings: Settings, generation: Path | None) -> bool:
    """Withdraw published models, so that no reload loads them again: those newer than the models of
    the generation in a folder; without a generation, the newest. Return whether there were any."""
    if settings.exchange is None:
        return False
    folder, passed, gone = Path(settings.exchange), set(), 0
    cards = () if generation is None else generation.glob(f"{PUBLISHED}/*/{CARD}")
    digests = {hashlib.sha256(card.read_bytes()).hexdigest() for card in cards}
    for path, read in published(folder)[: 1 if generation is None else None]:
        if read.digest in digests:
            passed.add(read.card.device)
        if read.card.device not in passed:
            set_aside(path)
            gone += 1
    return gone > 0


def set_aside(model: Path) -> None:
    """Withdraw a published model, so that no reload loads it again."""
    name = f"{model.name}-{secrets.token_hex(4)}"
    os.replace(model, model.parents[1] / WITHDRAWN / name)


def publish(settings: Settings, home: Path) -> Path:
    """Copy the models and the plan of `settings` to a folder in `home`, named by their digest,
    unless it is there already.

    Raises:
        ModelError, DataError: a model, its trees or the plan are missing or damaged.
        StorageError: there is no room for the copy.
    """
    folders = newest_models(settings)
    if not folders and settings.model is not None:
        raise ModelError(f"{settings.model} holds no model folder")
    models = {device: (path, read_files(path)) for device, path in folders.items()}
    for path in folders.values() if settings.model is not None else ():
        if settings.exchange is not None and path.parent == Path(settings.exchange, PUBLISHED):
            continue  # the service's own
        if settings.signed_by is not None:
            signed_by(path, Path(settings.signed_by))
    versions: dict[str, tuple[str, str]] = {}
    files: dict[str, bytes] = {}
    for device, (path, read) in models.items():
        version = path.resolve().name
        versions[device] = (version, read.digest)
        files |= {f"{MODELS}/{version}/{name}": text for name, text in read.files.items()}
    plan = None
    if settings.plan is not None:
        with raising(DataError, f"read {settings.plan}"):
            plan = files[PLAN] = plan_file(Path(settings.plan)).read_bytes()
    published = home / digest_of(versions, plan)
    if not published.exists():
        for path, read in models.values():
            read.check_trees(path)
        write_folder(published, files)
    return published


def give_back() -> None:
    """Have the C library return the 30 MB of `publish`, which glibc keeps for its thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def fingerprint(settings: Settings) -> str:
    """Return a digest that changes with the files of models and plan, without reading them."""
    sources = [shipped_models() if settings.model is None else Path(settings.model)]
    sources += [] if settings.exchange is None else [Path(settings.exchange, PUBLISHED)]
    plan = [] if settings.plan is None else [plan_file(Path(settings.plan))]
    stamps: list[Any] = []
    inside = (path for source in sources for depth in ("*", "*/*") for path in source.glob(depth))
    for path in sorted((*inside, *plan)):
        try:
            status = path.stat()
        except OSError:  # gone since it was listed
            continue
        stamps.append((str(path), status.st_size, status.st_mtime_ns, status.st_ino))
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()


def digest_of(models: Mapping[str, tuple[str, str]], plan: bytes | None) -> str:
    """Return the digest of a generation: of its models' names (which are in answers) and digests by
    device, and of its plan's text."""
    parts = [models, None if plan is None else hashlib.sha256(plan).hexdigest()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """Loaded models and plan: the predictor that uses them, and the digest in its replies.

    Two servers with one digest and one version of confpred give the same answers.
    """

    digest: str
    predictor: Predictor
    headers: Mapping[str, str]
    folder: Path | None = None  # folder that it was loaded from, if `publish` wrote one

    def model_of(self, device: str) -> Model | None:
        return self.predictor.models.get(device)

    def log_fields(self, device: str, sources: Mapping[str, int]) -> dict[str, Any]:
        """Return the log's fields of a reply for `device` whose choices came from `sources`."""
        model = self.model_of(device)
        return {
            "device": device,
            "problems": sum(sources.values()),
            "sources": sources,
            "generation": self.digest,
            "model": None if model is None else model.digest,
        }

    def has(self, version: str) -> bool:
        """Return whether it or one of its models is called `version`, by name or by digest."""
        models = self.predictor.models.values()
        digests = (self.digest, *(model.digest for model in models))
        return version in (model.version for model in models) or (
            len(version) >= _LEAST_DIGITS and any(d.startswith(version) for d in digests)
        )


def of(predictor: Predictor, plan: bytes | None = None) -> Generation:
    """Return the generation of `predictor`, whose plan has the text `plan`. Its tables are made, so
    that no client waits for them."""
    for device in (*predictor.models, next(iter(KNOWN))):
        predictor.choose(EXAMPLE, device)
    models = {device: (m.version, m.digest) for device, m in predictor.models.items()}
    named = ", ".join(f"{device}={models[device][1]}" for device in sorted(models))
    return Generation(digest_of(models, plan), predictor, {MODEL_HEADER: named or "none"})


def load(folder: Path) -> Generation:
    """Return the generation that `publish` wrote to `folder`.

    Raises:
        ModelError, DataError, InvalidInput: the folder is damaged, or this version of confpred
            cannot use a model in it.
    """
    if not folder.is_dir():
        raise ModelError(f"cannot read {folder}: it is gone")
    models, plan = (path if path.exists() else None for path in (folder / MODELS, folder / PLAN))
    predictor = Predictor.load(models, plan=plan, further=FURTHER)
    generation = of(predictor, None if plan is None else plan.read_bytes())
    if generation.digest != folder.name:
        raise ModelError(f"{folder} is damaged: it is {generation.digest}")
    return replace(generation, folder=folder)


class Loaded:
    """Generations that one process has loaded, one of which is current."""

    def __init__(self, current: Generation, others: Iterable[Generation] = ()) -> None:
        self.current = current
        self._all = {generation.digest: generation for generation in (*others, current)}

    @property
    def others(self) -> list[Generation]:
        """Generations that answer only requests that name them, the latest first."""
        return [g for g in reversed(self._all.values()) if g is not self.current]

    def add(self, generation: Generation) -> None:
        self._all[generation.digest] = generation

    def __contains__(self, digest: str) -> bool:
        return digest in self._all

    def switch(self, digest: str, keep: Iterable[str]) -> None:
        """Make the generation of `digest` current, and forget all that are not in `keep`."""
        current = self._all[digest]
        self._all = {kept: self._all[kept] for kept in keep if kept in self._all}
        self._all[digest] = self.current = current

    def folder_of(self, digest: str) -> Path | None:
        """Return the folder of the loaded model with this digest, if there is one."""
        for generation in self._all.values():
            for model in generation.predictor.models.values():
                if model.digest == digest and generation.folder is not None:
                    return generation.folder / MODELS / model.version
        return None

    def find(self, version: str) -> Generation:
        """Return the generation that has `version`: the current one, or else the latest.

        Raises:
            RequestError: no loaded generation has it.
        """
        for generation in (self.current, *self.others):
            if generation.has(version):
                return generation
        names = {m.version for g in self._all.values() for m in g.predictor.models.values()}
        allowed = f"the name or digest of a model that /v1/models lists: {', '.join(sorted(names))}"
        version = shorten(version)
        message = f"version {version!r} is not loaded"
        raise RequestError(404, "version_not_loaded", message, "version", version, allowed)


async def refusal(folder: Path) -> str:
    """Try the generation in `folder`; return the reason why it is refused, or an empty text."""
    names = sorted(path.name for path in folder.glob(f"{MODELS}/*"))
    tried = f"a process that tried {' and '.join(names)}"
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    words = command("generations", str(folder), str(os.getpid()))
    try:
        process = await asyncio.create_subprocess_exec(*words, stdin=nothing, stdout=pipe)
    except OSError as error:
        return f"{tried} cannot be started: {error.strerror or error}"
    try:
        said, _ = await asyncio.wait_for(process.communicate(), _LONGEST_S)
    except asyncio.TimeoutError:
        return f"{tried} was not done within {_LONGEST_S:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    status = await process.wait()
    if status <= 0:
        return f"{tried} ended by {signal.Signals(-status).name}" if status else ""
    lines = said.decode(errors="replace").splitlines()  # LightGBM's may be before the last
    return lines[-1] if lines else f"{tried} failed, as the log says"


def main() -> None:
    """Load the generation that the command line names, and evaluate all of its trees. If that
    fails, print the reason and end with 1."""
    folder, parent = sys.argv[1:]
    end_with(int(parent))
    logging.disable()  # a worker that loads it logs the same
    try:
        loaded = load(Path(folder))
        ensembles = (model.ensembles() for model in loaded.predictor.models.values())
        for trees, count, value in product(chain(*ensembles), _ROWS, _VALUES):
            trees.predict(np.full((count, len(trees.features)), value, np.float32))
    except (ConfpredError, OSError) as error:
        print(error)
        sys.exit(1)
