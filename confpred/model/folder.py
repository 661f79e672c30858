"""A trained model: one folder of text files, and no pickles.

    card.json            what it is: format, device, data, kernels, features, metrics,
                         and the SHA-256 of every other file
    <pool>.order.txt     LightGBM's text form of the regressor that orders the configs of a family,
                         or of several that learn from each other (`confpred.model.pools`)
    <pool>.time.txt      the same for the regressor of their times
    gate.txt             the same for how far each family's best config is behind the best of all,
                         where enough problems were measured with several families
    pytorch.txt          the same for how PyTorch's own operator compares with ours, where enough of
                         it was measured
    <family>.registers.json  registers of the family's compiled kernels, where they are known
    bound.txt            the same for the median of an answer's regret
    measured.json        the best measured config of each problem in the data

Reading a folder checks all that prediction relies on, so that a damaged or foreign folder is an
error here and never a wrong answer later. Trees alone are checked when they are first asked, as a
process asks few of them, or by `ModelFiles.check_trees`. A kernel that has changed since is only a
warning: the model's order of its configs is likely to hold.

The card has the digests of all other files, so its own digest, `sha256sum card.json`, is what the
model is known by: two folders with one digest hold one model, whatever they are called.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

import confpred.models
from confpred.concurrency import uninterrupted
from confpred.errors import ConfpredError, DataError, ModelError, StorageError
from confpred.families.kernel_text import identity_of
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate, Family
from confpred.families.registry import all_families, all_operations
from confpred.files import parse_json, write_folder
from confpred.model.bounds import Bounds, Range, signal_names
from confpred.model.features import Pool, Registers, check_family, check_operation, configs_digest
from confpred.model.rank import FAMILY, FamilyModel, Gate, PytorchModel, pytorch_feature_names
from confpred.model.trees import Trees
from confpred.problem.device import KNOWN, Device, device_from, get_device, introduce
from confpred.problem.operation import Operation

log = logging.getLogger(__name__)

FORMAT = "confpred-model/5"
_OTHER_FORMAT = re.compile(rb'"format": ?"(confpred-model/[0-9]+)"')
CARD, MEASURED = "card.json", "measured.json"
ORDER_TREES, TIME_TREES, PYTORCH_TREES = "{}.order.txt", "{}.time.txt", "pytorch.txt"
TREES = ".txt"  # ends the names of all of these, and of no other file
REGISTERS, BOUND_TREES = "{}.registers.json", "bound.txt"
GATE_TREES = "gate.txt"


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest measured way to compute a problem.

    Attributes:
        candidate: what was the fastest.
        time_ms: its measured time, milliseconds.
    """

    candidate: Candidate
    time_ms: float


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A model folder, read and checked.

    Attributes:
        version: the folder's name.
        digest: SHA-256 of the card, and so of everything in the folder, in hexadecimal.
        device: what it was trained for.
        operation: what its families compute.
        families: what was learned of each kernel family, by name.
        gate: which of the families can win, or None if that was not learned.
        pytorch: what was learned of PyTorch's own operator, or None.
        measured: the best measured config of each problem in the training data, by the problem's
            words (``str(problem)``), as most of them are never asked for.
        bounds: what was learned of the regret of its answers.
        stale: in words, what has changed since the model was trained.
        card: the content of ``card.json``.
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
    stale: tuple[str, ...]
    card: Mapping[str, Any]

    def ensembles(self) -> list[Trees]:
        """All its trees, those that families share once."""
        found = [trees for each in self.families.values() for trees in (each.order, each.time)]
        found += [] if self.gate is None else [self.gate.lag]
        found += [] if self.pytorch is None else [self.pytorch.ratio]
        return list(dict.fromkeys([*found, self.bounds.quantile]))


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The bytes of a model folder, of which each file is what the card says.

    Attributes:
        digest: as `Model.digest`.
        card: the content of ``card.json``.
        files: every file by its name, the card included.
    """

    digest: str
    card: Mapping[str, Any]
    files: Mapping[str, bytes]

    def check_trees(self, folder: Path) -> None:
        """Check all trees of the model in `folder`; it takes 0.1 s.

        Raises:
            ModelError: LightGBM would read what is not there, or never end.
        """
        for name, text in self.files.items():
            if name.endswith(TREES):
                Trees(text, str(folder / name)).check()


def read_files(folder: Path) -> ModelFiles:
    """Read a model folder, without a look at what its trees say.

    Raises:
        ModelError: a file is missing, or not what the card says.
    """
    text, card = _read_card(folder)
    files = {CARD: text}
    try:
        for name, digest in card["files"].items():
            if Path(name).name != name:
                raise ModelError(f"{folder / CARD} names {name!r}, which is no file beside it")
            files[name] = _read(folder / name)
            if hashlib.sha256(files[name]).hexdigest() != digest:
                raise ModelError(f"{folder / name} is damaged: its SHA-256 is not the card's")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{folder / CARD} is damaged: {error!r}") from error
    return ModelFiles(hashlib.sha256(text).hexdigest(), card, files)


def load_model(folder: Path) -> Model:
    """Read and check a model folder.

    Raises:
        ModelError: a file is missing, damaged or foreign, or the model was trained for other
            features or configs than this version has; the text names the file and the reason.
    """
    read = read_files(folder)
    try:
        model = _load(folder, read)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, ConfpredError):
            raise ModelError(f"{folder}: {error}") from error
        raise ModelError(f"{folder / CARD} is damaged: {error!r}") from error
    for note in model.stale:
        log.warning("model %s: %s", model.version, note)
    return model


def model_folders(folder: Path) -> dict[str, Path]:
    """The model folder for each device, by the device's key: `folder` itself where it is one, else
    the newest in it for each device.

    Raises:
        ModelError: a card is damaged.
    """
    found = [folder / CARD] if (folder / CARD).exists() else sorted(folder.glob(f"*/{CARD}"))
    newest: dict[str, tuple[str, Path]] = {}
    for path in found:
        _, card = _read_card(path.parent)
        device, created = str(card.get("device")), str(card.get("created"))
        newest[device] = max(newest.get(device, ("", path.parent)), (created, path.parent))
    return {device: path for device, (_, path) in newest.items()}


def shipped_models() -> Path:
    """The folder of the models that ship with the package."""
    return Path(confpred.models.__path__[0])


def users_models() -> Path:
    """The folder of the models that `confpred retrain` makes on this user's GPUs:
    ``$CONFPRED_MODELS_DIR``, or one in the user's data folder as the operating system names it."""
    chosen = os.environ.get("CONFPRED_MODELS_DIR")
    return Path(chosen) if chosen else Path(platformdirs.user_data_dir("confpred")) / "models"


class NewestModels(Mapping[str, Model]):
    """The newest model in a folder of model folders for each device, by the device's key.

    Each is loaded when it is first asked for, as a process mostly asks about one device. Safe to
    share between threads.

    Raises:
        ModelError: a card is damaged; on access, the model of that device is.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Of `folder`; or of those that `confpred retrain` made for this user, and of the models
        that ship with the package for devices that have none of these, or none that this version
        can use."""
        self._folders = model_folders(shipped_models() if folder is None else folder)
        self._first = _users_folders() if folder is None else {}
        self._loaded: dict[str, Model] = {}
        self._lock = threading.Lock()

    def __getitem__(self, device: str) -> Model:
        loaded = self._loaded.get(device)
        if loaded is not None:
            return loaded
        first, folder = self._first.get(device), self._folders.get(device)
        if first is None and folder is None:
            raise KeyError(device)
        with uninterrupted, self._lock:
            if device not in self._loaded:
                self._loaded[device] = _load_first(first, folder)
            return self._loaded[device]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._folders, **self._first})

    def __len__(self) -> int:
        return len({**self._folders, **self._first})


def _users_folders() -> dict[str, Path]:
    """The newest of `users_models` for each device; a damaged folder of theirs stops nobody."""
    try:
        return model_folders(users_models())
    except ModelError as error:
        log.warning("%s: not used", error)
        return {}


def _load_first(first: Path | None, second: Path | None) -> Model:
    """The model in the folder `first` if this version can use it, else that in `second`."""
    if first is None or second is None:
        return load_model(first or second or Path())
    try:
        return load_model(first)
    except ModelError as error:
        log.warning("%s; the model that ships with the package is used instead", error)
        return load_model(second)


def _read_card(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The card's text and its content."""
    text = _read(folder / CARD)
    other = _OTHER_FORMAT.search(text)
    if other is not None and other[1].decode() != FORMAT:
        raise ModelError(
            f"{folder / CARD} is of {other[1].decode()}, and this version reads {FORMAT}: train it "
            "again"
        )
    try:
        return text, parse_json(text, folder / CARD, "a model card", FORMAT)
    except DataError as error:
        raise ModelError(str(error)) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def _parse(path: Path, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error


def _load(folder: Path, read: ModelFiles) -> Model:
    card, files = read.card, read.files
    if card["operation"] not in all_operations():
        raise ModelError(f"{folder} is for operation {card['operation']!r}, which no family has")
    operation, device = all_operations()[card["operation"]], _device(card)
    members: dict[str, list[Family]] = {}
    for name, entry in card["families"].items():
        if name not in all_families():
            raise ModelError(f"{folder} is for kernel family {name!r}, which is not installed")
        members.setdefault(entry["pool"], []).append(all_families()[name])
    families, stale = {}, []
    for name, together in members.items():
        pool = Pool(together)
        if pool.name != name:
            raise ValueError(f"pool {name!r} is of {pool.name}")
        order, time = (
            _trees(folder, files, file.format(name), pool.feature_names)
            for file in (ORDER_TREES, TIME_TREES)
        )
        for family in pool.families:
            entry = card["families"][family.name]
            if entry["configs"] != configs_digest(family):
                raise ModelError(
                    f"{folder} was trained for other configs of {family.name}: train it again"
                )
            check_family(folder, family, device, entry["features"])
            registers = None
            if (table := REGISTERS.format(family.name)) in files:
                registers = Registers(family, files[table])
            groupings = frozenset(map(str, entry["groupings"]))
            families[family.name] = FamilyModel(family, pool, order, time, registers, groupings)
            stale += _stale(entry["source"], entry["source_digests"])
    gate = None
    if GATE_TREES in files:
        entry = card["gate"]
        lag = _trees(folder, files, GATE_TREES, (*operation.feature_names, FAMILY))
        check_operation(folder, operation, device, entry["features"])
        gate = Gate(operation, _known(entry["families"], families), lag)
    pytorch = None
    if PYTORCH_TREES in files:
        ratio = _trees(folder, files, PYTORCH_TREES, pytorch_feature_names(operation))
        margins = {
            str(kind): _number("margin", margin, least=0.0)
            for kind, margin in card["pytorch"]["margins"].items()
        }
        check_operation(folder, operation, device, card["pytorch"]["features"])
        pytorch = PytorchModel(operation, ratio, margins)
    return Model(
        version=folder.resolve().name,
        digest=read.digest,
        device=device,
        operation=operation,
        families=families,
        gate=gate,
        pytorch=pytorch,
        measured=_measured(folder / MEASURED, files[MEASURED]),
        bounds=_bounds(folder, files, card["bounds"], operation),
        stale=tuple(stale),
        card=card,
    )


def _bounds(
    folder: Path, files: Mapping[str, bytes], card: Mapping[str, Any], operation: Operation
) -> Bounds:
    offsets = {
        name: _number("offset", value, least=-math.inf) for name, value in card["offsets"].items()
    }
    count, ranges = len(pytorch_feature_names(operation)), {}
    for name in offsets:
        entry = card["ranges"][name]
        least, largest = (np.array(entry[side], np.float32) for side in ("least", "largest"))
        if not least.shape == largest.shape == (count,):
            raise ValueError(f"the range of {name} is not of {count} features")
        ranges[name] = Range(least, largest)
    return Bounds(
        operation=operation,
        quantile=_trees(folder, files, BOUND_TREES, signal_names(operation)),
        offsets=offsets,
        ranges=ranges,
    )


def _device(card: Mapping[str, Any]) -> Device:
    """The device of the table; of another one the card has the description that it learned by."""
    key, board = card["device"], card.get("board")
    if key in KNOWN or board is None:
        return get_device(key)
    try:
        device = device_from(board)
    except DataError as error:
        raise ValueError(str(error)) from error
    introduce(device)
    return device


def _trees(folder: Path, files: Mapping[str, bytes], name: str, features: tuple[str, ...]) -> Trees:
    trees = Trees(files[name], str(folder / name))
    if trees.features != features:
        raise ModelError(f"{folder / name} was trained on other features: train it again")
    return trees


def _stale(source: str, trained: list[str]) -> list[str]:
    try:
        current = identity_of(source)
    except OSError:
        current = "gone"
    if current in trained:
        return []
    return [f"{source} is {current}; the measurements are of {' and '.join(trained)}"]


def _measured(path: Path, content: bytes) -> dict[str, Best]:
    best = {}
    for entry in _parse(path, content):
        candidate = Candidate(entry["provider"], entry["config_id"])
        if candidate != PYTORCH_OPERATOR:
            _row(path, candidate.config_id, all_families()[candidate.provider])
        time_ms = _number("time_ms", entry["time_ms"], least=0.0)
        best[str(entry["problem"])] = Best(candidate, time_ms)
    return best


def _row(path: Path, value: object, family: Family) -> int:
    if type(value) is not int or not 0 <= value < len(family.configs):
        raise ModelError(f"{path} is damaged: {family.name} has no config {value!r}")
    return value


def _known(names: object, families: Mapping[str, FamilyModel]) -> tuple[str, ...]:
    if not isinstance(names, list) or not set(names) <= families.keys():
        raise ValueError(f"the gate is for {names!r}, not all of which the model knows")
    return tuple(names)


def _number(name: str, value: object, least: float) -> float:
    if not isinstance(value, float) or not least <= value < math.inf or math.isinf(value):
        raise ValueError(f"{name} is {value!r}, not a number of at least {least:g}")
    return value


_NAMES = {"driver": "the driver", "cudnn": "cuDNN"}


def changes(model: Model, **now: str) -> tuple[str, ...]:
    """In words, which of the versions `now` (``driver``, ``cudnn``) are none that `model` was
    measured with; a version that is not known here (empty) or was not recorded counts as the same.
    """
    recorded = model.card.get("measured_with", {})
    return tuple(
        f"{_NAMES[name]} is {version}, and the model's measurements are of {_spoken(before)}"
        for name, version in now.items()
        if version and (before := recorded.get(name)) and version not in before
    )


def _spoken(versions: Sequence[str]) -> str:
    return " and ".join(versions)


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


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A device and what its model knows; a device without one has None and nothing there.

    Attributes:
        device: its description.
        model: version of its model.
        operation: what that model chooses for, such as ``conv2d``.
        families: the kernel families and libraries that it knows.
        layers: the kinds of layers that were measured: ``dense``, ``depthwise``, ``grouped``; empty
            for another operation, which has no such kinds.
        rows, problems, networks: how much it was trained on: measurements of this device, and the
            problems and networks that these are of.
        driver, cudnn: versions that the measurements were made with.
    """

    device: Device
    model: str | None = None
    operation: str | None = None
    families: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    rows: int | None = None
    problems: int | None = None
    networks: int | None = None
    driver: tuple[str, ...] = ()
    cudnn: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the one JSON form, printed by ``confpred devices --json``."""
        return dataclasses.asdict(self)


def known_devices(models: Mapping[str, Model]) -> list[KnownDevice]:
    """Return the boards of the table and the devices that only a model describes, those with a
    model first.

    Raises:
        ModelError: a model is damaged.
    """
    learned = [_of(model) for model in models.values()]
    has_one = {known.device.key for known in learned}
    return learned + [KnownDevice(device) for key, device in KNOWN.items() if key not in has_one]


def _of(model: Model) -> KnownDevice:
    card = model.card
    data, made_with = card.get("data", {}), card.get("measured_with", {})
    groupings = {g for entry in card["families"].values() for g in entry.get("groupings") or ()}
    return KnownDevice(
        model.device,
        model.version,
        model.operation.name,
        tuple(model.families),
        tuple(sorted(groupings)),
        *(data.get(name) for name in ("rows", "problems", "networks")),
        *(tuple(made_with.get(name, ())) for name in ("driver", "cudnn")),
    )
