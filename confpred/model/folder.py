"""A trained model: one folder of text files, and no pickles.

    card.json            description (`confpred.model.card`), and the SHA-256 of every other file
    <pool>.order.txt     LightGBM's text form of the regressor that orders the configs of a family,
                         or of several that learn from each other (`confpred.model.features.Pool`)
    <family>.taught.txt  the same for one family, trained again with uploads
    <pool>.time.txt      the same for the regressor of their times
    gate.txt             the same for how far each family's best config is behind the best of all
    pytorch.txt          the same for how PyTorch's own operator compares with the best config
    bound.txt            the same for the median of an answer's regret
    <family>.registers.json  registers of the family's compiled kernels, where they are known
    measured.json        the best measured config of each problem in the data

A model is checked against its card and this version's families, so that a damaged or foreign folder
is an error and never a wrong answer. Models that ship are checked part by part, because a cold
`confpred predict` needs one family of twelve; trees are checked at their first use. A kernel that
has changed since is only a warning: the order of its configs is likely to hold.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

import confpred.models
from confpred.concurrency import Later, uninterrupted
from confpred.errors import DataError, ModelError, StorageError
from confpred.families.kernel_text import identity_of
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate, Family
from confpred.families.registry import family_named, operation_named
from confpred.files import raising, user_folder, whole_in, write_folder
from confpred.model.bounds import Bounds, Range, signal_names
from confpred.model.card import (
    CARD,
    Card,
    FamilyCard,
    card_of,
    checked_file,
    read_card,
    read_files,
    refusing,
)
from confpred.model.features import Pool, Registers, check_features, configs_digest
from confpred.model.rank import FAMILY, FamilyModel, Gate, PytorchModel, pytorch_feature_names
from confpred.model.trees import Trees
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.device import KNOWN, Device, device_from, get_device, introduce
from confpred.problem.operation import Operation
from confpred.problem.record import Record

log = logging.getLogger(__name__)

MEASURED = "measured.json"
ORDER_TREES, TIME_TREES, PYTORCH_TREES = "{}.order.txt", "{}.time.txt", "pytorch.txt"
TAUGHT_TREES = "{}.taught.txt"
#: Names of the files of a model beside its card.
FILES = re.compile(
    r"(gate|pytorch|bound)\.txt|measured\.json|[a-z0-9_+]+\.(order\.txt|time\.txt|taught\.txt|registers\.json)"
)
REGISTERS, BOUND_TREES = "{}.registers.json", "bound.txt"
GATE_TREES = "gate.txt"
_VERSIONS_A_DAY = 100
_DIRECTION = re.compile(r"\bdirection=(\w+)")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest measured candidate for a problem, and its milliseconds."""

    candidate: Candidate
    time_ms: float


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A model folder.

    Attributes:
        version: the folder's name.
        digest: SHA-256 of the card, and so of everything in the folder, in hexadecimal: two folders
            with one digest hold one model, whatever they are called.
        device: device that it was trained for.
        operation: operation that its families compute.
        families: model of each kernel family, by the family's name.
        gate: model of which families can win; None if it was not trained.
        pytorch: model of PyTorch's operator; None if it was not trained.
        measured: the best measured config of each problem in the training data, by the problem's
            words (``str(problem)``).
        bounds: model of the regret of its answers.
        card: the model's card.
    """

    version: str
    digest: str
    device: Device
    operation: Operation
    families: Mapping[str, FamilyModel]
    gate: Gate | None
    pytorch: PytorchModel | None
    measured: Mapping[str, Best]
    bounds: Bounds
    card: Card

    @property
    def stale(self) -> tuple[str, ...]:
        """Return a sentence for each kernel that has changed since the model was trained."""
        texts = (_stale(entry) for entry in self.card.families.values())
        return tuple(dict.fromkeys(text for text in texts if text))

    def families_for(self, problems: Sequence[Record]) -> Mapping[str, FamilyModel]:
        """Return the families that were measured on problems such as `problems`."""
        families = self.families
        return families.for_problems(problems) if isinstance(families, _Families) else families

    def ensembles(self) -> list[Trees]:
        """Return all trees of the model; those that families share, once."""
        families = self.families.values()
        trees = [t for f in families for t in (f.order, f.time, f.taught) if t is not None]
        trees += [] if self.gate is None else [self.gate.lag]
        trees += [] if self.pytorch is None else [self.pytorch.ratio]
        return list(dict.fromkeys([*trees, self.bounds.quantile]))


def load_model(folder: Path, *, in_parts: bool = False) -> Model:
    """Read and check a model `folder`. With `in_parts`, families and measurements are read and
    checked at their first use, which may then raise a ModelError.

    Raises:
        ModelError: a file is missing, damaged or foreign, or the model was trained for other
            features or configs than this version has; the message names the file and the reason.
    """
    read = card_of(folder)
    with refusing(folder):
        model = _load(folder, read.card, read.digest)
    if not in_parts:
        dict(model.families), dict(model.measured)
    return model


def models_in(folder: Path) -> list[Path]:
    """Return the model folders in `folder`, by name: those with a card that are whole and that the
    system shows.

    Raises:
        ModelError: the system refuses to show `folder`.
    """
    with raising(ModelError, f"read {folder}"):
        # `Path.exists` raises an error in a folder that may not be entered.
        return [path for path in whole_in(folder) if os.path.exists(path / CARD)]


def model_folders(folder: Path, *, skip_damaged: bool = False) -> dict[str, Path]:
    """Return the model folder for each device, by the device's key: `folder` itself where it is
    one, else the newest in it for each device.

    Raises:
        ModelError: a card is damaged, unless that is only to be logged; or the system refuses to
            show `folder`.
    """
    newest: dict[str, tuple[str, Path]] = {}
    for path in [folder] if os.path.exists(folder / CARD) else models_in(folder):
        try:
            _, card = read_card(path)
        except ModelError as error:
            if not skip_damaged:
                raise
            log.warning("%s: not used", error)
            continue
        device, created = str(card.get("device")), str(card.get("created"))
        newest[device] = max(newest.get(device, ("", path)), (created, path))
    return {device: path for device, (_, path) in newest.items()}


def shipped_models(operation: str = CONVOLUTION.name) -> Path:
    """Return the folder of the models of `operation` that ship with the package; it is missing
    where none do."""
    folder = Path(confpred.models.__path__[0])
    return folder if operation == CONVOLUTION.name else folder / operation


def other_shipped_models() -> list[Path]:
    """Return the folders of the models of all operations but convolution that ship."""
    return [path for folder in whole_in(shipped_models()) for path in models_in(folder)]


def users_models() -> Path:
    """Return the folder of the models that `confpred retrain` makes on this user's GPUs:
    ``$CONFPRED_MODELS_DIR``, or one in the user's data folder as the operating system names it."""
    chosen = os.environ.get("CONFPRED_MODELS_DIR")
    return Path(chosen) if chosen else user_folder("data") / "models"


def publish(folder: Path, models: Path) -> Path:
    """Copy the model in `folder` to `models`, whole or not at all, under a version that is new
    there; older models stay, and the newest of a device is in use. Returns the new folder.

    Raises:
        ModelError: `folder` is damaged.
        StorageError: the file system refused.
    """
    read = read_files(folder)
    version = f"{read.card.device}-{datetime.now(timezone.utc):%Y.%m.%d}"
    names = (version, *(f"{version}.{number}" for number in range(2, _VERSIONS_A_DAY)))
    free = next((name for name in names if not os.path.lexists(models / name)), None)
    if free is None:
        raise StorageError(f"{models} has {_VERSIONS_A_DAY} models of today")
    write_folder(models / free, read.files)
    return models / free


class _LazyMapping(Mapping[str, _Value]):
    """Values that are loaded when they are first asked for. Safe to share between threads."""

    def __init__(self, names: Mapping[str, object]) -> None:
        self._names = names
        self._values: dict[str, _Value] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> _Value:
        if name not in self._values:
            if name not in self._names:
                raise KeyError(name)
            with uninterrupted, self._lock:
                if name not in self._values:
                    self._values |= self._load(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _load(self, name: str) -> dict[str, _Value]:
        """Load the value of a name, and maybe others that come along."""
        raise NotImplementedError


class NewestModels(_LazyMapping[Model]):
    """The newest model in a folder of model folders for each device, by the device's key.

    Raises:
        ModelError: a card is damaged; on access, the model of that device is damaged.
    """

    def __init__(self, folder: Path | None = None, operation: str = CONVOLUTION.name) -> None:
        """Take the models in `folder`; or, for None, those of `operation` that ship with the
        package. For convolutions, those that `confpred retrain` made for this user come first, if
        this version can use them."""
        self._shipped = folder is None
        self._folders = model_folders(shipped_models(operation) if folder is None else folder)
        own = folder is None and operation == CONVOLUTION.name
        self._first = _users_folders() if own else {}
        #: Folder of the model of each device.
        self.paths = {**self._folders, **self._first}
        super().__init__(self.paths)

    def _load(self, name: str) -> dict[str, Model]:
        """Load the user's model if this version can use it, else that of the folder."""
        first, second = self._first.get(name), self._folders.get(name)
        try:
            if first is not None:
                return {name: load_model(first)}
        except ModelError as error:
            if second is None:
                raise
            log.warning("%s; the model that ships with the package is used instead", error)
        return {name: load_model(second or Path(), in_parts=self._shipped)}


def _users_folders() -> dict[str, Path]:
    """Return the newest of `users_models` for each device, without damaged ones."""
    try:
        return model_folders(users_models(), skip_damaged=True)
    except ModelError as error:
        log.warning("%s: not used", error)
        return {}


class _Families(_LazyMapping[FamilyModel]):
    """The families of a model; those of a pool are loaded together."""

    def __init__(self, folder: Path, card: Card, operation: Operation, device: Device) -> None:
        super().__init__(card.families)
        self._folder, self._card, self._device = folder, card, device
        usual = {field.name: field.default for field in fields(operation.problem)}
        # The examples have every direction that was measured (`features.examples_of`).
        self._measured_on = {
            name: {
                (grouping, match[1] if match else usual.get("direction"))
                for match in map(_DIRECTION.search, (e["problem"] for e in entry.features.examples))
                for grouping in entry.groupings
            }
            for name, entry in card.families.items()
        }

    def for_problems(self, problems: Sequence[Record]) -> dict[str, FamilyModel]:
        kinds = {(p.grouping, getattr(p, "direction", None)) for p in problems}
        return {n: self[n] for n, own in self._measured_on.items() if not own.isdisjoint(kinds)}

    def _load(self, name: str) -> dict[str, FamilyModel]:
        with refusing(self._folder):
            return self._of_pool(self._card.families[name].pool)

    def _of_pool(self, name: str) -> dict[str, FamilyModel]:
        folder, card = self._folder, self._card
        entries = {n: entry for n, entry in card.families.items() if entry.pool == name}
        pool = Pool([_family(folder, n) for n in entries])
        if pool.name != name:
            raise ValueError(f"pool {name!r} is of {pool.name}")
        order, time = (
            _trees(folder, card, file.format(name), pool.feature_names)
            for file in (ORDER_TREES, TIME_TREES)
        )
        models = {}
        for family in pool.families:
            entry, own = entries[family.name], TAUGHT_TREES.format(family.name)
            taught = _trees(folder, card, own, pool.feature_names) if own in card.files else None
            if entry.configs != configs_digest(family):
                raise ModelError(
                    f"{folder} was trained for other configs of {family.name}: train it again"
                )
            check_features(folder, family, self._device, entry.features)
            table = REGISTERS.format(family.name)
            registers = None
            if table in card.files:
                registers = Registers(family, checked_file(folder, card, table))
            groupings = frozenset(entry.groupings)
            models[family.name] = FamilyModel(
                family, pool, order, time, registers, groupings, taught
            )
            if text := _stale(entry):
                log.warning("model %s: %s", folder.resolve().name, text)
        return models


def _load(folder: Path, card: Card, digest: str) -> Model:
    operation, device = operation_named(card.operation), _device(card)
    families = _Families(folder, card, operation, device)
    gate = None
    if GATE_TREES in card.files:
        if card.gate is None or not set(card.gate.families) <= card.families.keys():
            raise ValueError("the gate is for families that the model does not know")
        lag = _trees(folder, card, GATE_TREES, (*operation.feature_names, FAMILY))
        check_features(folder, operation, device, card.gate.features)
        gate = Gate(operation, tuple(card.gate.families), lag)
    pytorch = None
    if PYTORCH_TREES in card.files:
        if card.pytorch is None:
            raise ValueError("pytorch is missing")
        for kind, margin in card.pytorch.margins.items():
            if margin < 0:
                raise ValueError(f"pytorch.margins.{kind} is {margin!r}, not at least 0")
        if {"grouped", "wide grouped"} & card.pytorch.margins.keys() == {"grouped"}:
            log.info(
                "%s leaves groups of multiples of 64 channels to PyTorch: train it anew", folder
            )
        ratio = _trees(folder, card, PYTORCH_TREES, pytorch_feature_names(operation))
        check_features(folder, operation, device, card.pytorch.features)
        pytorch = PytorchModel(operation, ratio, card.pytorch.margins)
    return Model(
        version=folder.resolve().name,
        digest=digest,
        device=device,
        operation=operation,
        families=families,
        gate=gate,
        pytorch=pytorch,
        measured=Later(partial(_measured, folder, card)),
        bounds=_bounds(folder, card, operation),
        card=card,
    )


def _bounds(folder: Path, card: Card, operation: Operation) -> Bounds:
    count, ranges = len(pytorch_feature_names(operation)), {}
    for name in card.bounds.offsets:
        entry = card.bounds.ranges[name]
        least, largest = (np.array(entry[side], np.float32) for side in ("least", "largest"))
        if not least.shape == largest.shape == (count,):
            raise ValueError(f"the range of {name} is not of {count} features")
        ranges[name] = Range(least, largest)
    quantile = _trees(folder, card, BOUND_TREES, signal_names(operation))
    return Bounds(operation, quantile, card.bounds.offsets, ranges)


def _device(card: Card) -> Device:
    """Return the device of the table; if it is not there, the device that the card describes."""
    if card.device in KNOWN or card.board is None:
        return get_device(card.device)
    try:
        device = device_from(card.board)
    except DataError as error:
        raise ValueError(str(error)) from error
    introduce(device)
    return device


def _family(folder: Path, name: str) -> Family:
    family = family_named(name)
    if family is None:
        raise ModelError(f"{folder} is for kernel family {name!r}, which is not installed")
    return family


def _trees(folder: Path, card: Card, name: str, features: tuple[str, ...]) -> Trees:
    trees = Trees(checked_file(folder, card, name), str(folder / name))
    if trees.features != features:
        raise ModelError(f"{folder / name} was trained on other features: train it again")
    return trees


def _stale(entry: FamilyCard) -> str:
    """Return a sentence if a family's kernel has changed since it was measured; empty if it has
    not."""
    try:
        current = identity_of(entry.source)
    except OSError:
        current = "gone"
    if current in entry.source_digests:
        return ""
    trained = " and ".join(entry.source_digests)
    return f"{entry.source} is {current}; the measurements are of {trained}"


def _measured(folder: Path, card: Card) -> dict[str, Best]:
    path = folder / MEASURED
    with refusing(folder):
        try:
            entries = json.loads(checked_file(folder, card, MEASURED))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not JSON: {error}") from error
        counts = {PYTORCH_OPERATOR.provider: 1}
        best = {}
        for entry in entries:
            name, row = entry["provider"], entry["config_id"]
            if name not in counts:
                counts[name] = len(_family(folder, name).configs)
            if type(row) is not int or not 0 <= row < counts[name]:
                raise ModelError(f"{path} is damaged: {name} has no config {row!r}")
            time_ms = entry["time_ms"]
            if type(time_ms) is not float or not 0.0 <= time_ms < math.inf:
                raise ValueError(f"time_ms is {time_ms!r}, not a number of at least 0")
            best[str(entry["problem"])] = Best(Candidate(name, row), time_ms)
        return best
