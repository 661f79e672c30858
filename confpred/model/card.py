"""A model's card: the record that training writes as ``card.json``, and that loading checks the
model against."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from confpred.errors import ConfpredError, DataError, ModelError
from confpred.files import parse_json, raising
from confpred.model.trees import Trees

CARD, FORMAT = "card.json", "confpred-model/5"
#: Signature of the card, which has the digests of all other files, by ``ssh-keygen -Y sign -n
#: confpred -f KEY card.json``; a model may have one.
SIGNATURE, SIGNED_FOR = "card.json.sig", "confpred"
#: Format of reports on a model's drift (`confpred.retraining.drift`); a server shows them.
DRIFT_FORMAT = "confpred-drift/1"
_OTHER_FORMAT = re.compile(rb'"format": ?"(confpred-model/[0-9]+)"')
TREES = ".txt"  # ends the names of all of these, and of no other file
_NAMES = {"driver": "the driver", "cudnn": "cuDNN"}


@dataclass(frozen=True, slots=True)
class FeatureDigest:
    """Digest of the features of a few `examples` (`confpred.model.features`), which are problems in
    words; for a family ``{"problem": words, "rows": rows}``, with rows of its config table."""

    examples: list[Any]
    digest: str


@dataclass(frozen=True, slots=True)
class DataCard:
    """The measurements that a model was trained on.

    Attributes:
        digest: digest of all timings.
        rows, problems, networks: how many there are of the model's device.
        excluded_networks: networks whose layers were held out.
        other_devices: rows of each other device that was learned from.
        statuses: rows by status.
    """

    digest: str
    rows: int
    problems: int
    networks: int
    excluded_networks: list[str]
    other_devices: Mapping[str, int]
    statuses: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class FamilyCard:
    """A kernel family of a model.

    Attributes:
        devices: keys of the devices that it was measured on; older cards have none.
        source, source_digests: its CUDA file, and the digests of the versions that were measured.
        configs: digest of its config table.
        groupings: kinds of problems that it was measured on: ``dense``, ``depthwise``, ``grouped``.
        features: digest of its features.
        pool: name of the pool of families that it shares its trees with.
    """

    devices: list[str] = field(default_factory=list, kw_only=True)
    source: str
    source_digests: list[str]
    configs: str
    groupings: list[str]
    features: FeatureDigest
    pool: str


@dataclass(frozen=True, slots=True)
class GateCard:
    """The families that the gate was trained on, in their order, and the digest of its features."""

    families: list[str]
    features: FeatureDigest


@dataclass(frozen=True, slots=True)
class PytorchCard:
    """PyTorch's operator: the margin of each kind of problem, and the digest of the ratio's
    features."""

    margins: Mapping[str, float]
    features: FeatureDigest


@dataclass(frozen=True, slots=True)
class BoundsCard:
    """The bound on regret: by provider its offset, and the ``least`` and ``largest`` value of each
    feature of its problems; the share of held-out answers within their bound, of ``all`` and by
    provider; and the median of their bounds."""

    offsets: Mapping[str, float]
    ranges: Mapping[str, Any]
    coverage: Mapping[str, float] = field(default_factory=dict)
    median: float | None = None


@dataclass(frozen=True, slots=True)
class Card:
    """Content of ``card.json``.

    Attributes:
        operation: name of the operation that the families compute.
        device: key of the device that the model is for.
        board: description of a device that is in no table.
        created, seed: date and time, and seed of the training.
        data, families, gate, pytorch, bounds: see their classes; None if it was not trained.
        hyperparameters: how the trees grew.
        measured_with: versions of ``driver`` and ``cudnn`` that the times were measured with.
        metrics: regret on held-out networks.
        libraries: versions that trained the model.
        files: SHA-256 of every other file of the folder.
        content: content of the file.
    """

    operation: str
    device: str
    families: Mapping[str, FamilyCard]
    bounds: BoundsCard
    files: Mapping[str, str]
    data: DataCard
    created: str = ""
    seed: int = 0
    gate: GateCard | None = None
    pytorch: PytorchCard | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    measured_with: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    board: Mapping[str, Any] | None = None
    content: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        content = {"format": FORMAT, **asdict(self)}
        del content["content"]
        if self.board is None:
            del content["board"]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Card:
        """Read the content of a file.

        Raises:
            ValueError: a field is missing or of another type; the message names it.
        """
        card: Card = _read(cls, {**content, "content": content}, "")
        for name in card.files:
            if Path(name).name != name:
                raise ValueError(f"files has {name!r}, which is no file beside it")
        if not re.fullmatch(r"[\w-][\w.-]{0,99}", card.device):
            raise ValueError(f"device is {card.device!r}, which is no key of a device")
        return card

    def changes(self, **now: str) -> tuple[str, ...]:
        """Return a sentence for each of the versions `now` (``driver``, ``cudnn``) that the model
        was not measured with; one that is empty or was not recorded counts as the same."""
        return tuple(
            f"{_NAMES[name]} is {version}, and the model's measurements are of "
            f"{' and '.join(before)}"
            for name, version in now.items()
            if version and (before := self.measured_with.get(name)) and version not in before
        )


_SHAPES: Mapping[Any, tuple[str, Callable[[Any], bool]]] = {
    list: ("a list", lambda value: isinstance(value, list)),
    Mapping: ("an object", lambda value: isinstance(value, Mapping)),
    float: ("a number", lambda value: type(value) in (int, float) and abs(value) < 1e300),
    str: ("a text", lambda value: type(value) is str),
    int: ("an integer", lambda value: type(value) is int),
}


def _read(kind: Any, value: Any, where: str) -> Any:
    """Return `value` as the type `kind`; `where` it is in the card is named in errors."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _read(arguments[0], value, where)
    shape = Mapping if is_dataclass(kind) else origin or kind
    if shape in _SHAPES:
        words, is_right = _SHAPES[shape]
        if not is_right(value):
            raise ValueError(f"{where} is {value!r}, not {words}")
    if origin is list:
        return [_read(arguments[0], item, where) for item in value]
    if origin is Mapping:
        return {name: _read(arguments[1], value[name], f"{where}.{name}") for name in value}
    if not is_dataclass(kind):
        return value
    hints, values = get_type_hints(kind), {}
    for entry in fields(kind):
        name = f"{where}.{entry.name}".lstrip(".")
        if entry.name in value:
            values[entry.name] = _read(hints[entry.name], value[entry.name], name)
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ValueError(f"{name} is missing")
    return kind(**values)  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The bytes of a model folder: `files` by name, the card and its signature included, and
    `Model.digest`."""

    digest: str
    card: Card
    files: Mapping[str, bytes]

    def check_trees(self, folder: Path) -> None:
        """Check all trees of the model in `folder`.

        Raises:
            ModelError: a text would make LightGBM read out of bounds or loop for ever.
        """
        for name, text in self.files.items():
            if name.endswith(TREES):
                Trees(text, str(folder / name)).check()


def read_files(folder: Path) -> ModelFiles:
    """Read a model folder, without checking its trees.

    Raises:
        ModelError: a file is missing, or not what the card says.
    """
    read = card_of(folder)
    files = {name: checked_file(folder, read.card, name) for name in read.card.files}
    if os.path.exists(folder / SIGNATURE):
        files[SIGNATURE] = _read_bytes(folder / SIGNATURE)
    return replace(read, files={**read.files, **files})


def card_of(folder: Path) -> ModelFiles:
    """Read the card of a model folder, and none of its other files; raises as `read_files` does."""
    text, content = read_card(folder)
    with refusing(folder):
        return ModelFiles(hashlib.sha256(text).hexdigest(), Card.from_json(content), {CARD: text})


def read_card(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the card's text and its content."""
    path = folder / CARD
    text = _read_bytes(path)
    other = _OTHER_FORMAT.search(text)
    if other is not None and (written := other[1].decode()) != FORMAT:
        raise ModelError(f"{path} is of {written}, and this version reads {FORMAT}: train it again")
    try:
        return text, parse_json(text, path, "a model card", FORMAT)
    except DataError as error:
        raise ModelError(str(error)) from error


def _read_bytes(path: Path) -> bytes:
    with raising(ModelError, f"read {path}"):
        return path.read_bytes()


def checked_file(folder: Path, card: Card, name: str) -> bytes:
    """Return a file's content, after checking it against the digest on the card."""
    digest, text = card.files[name], _read_bytes(folder / name)
    if hashlib.sha256(text).hexdigest() != digest:
        raise ModelError(f"{folder / name} is damaged: its SHA-256 is not the card's")
    return text


def signed_by(folder: Path, signers: Path) -> str:
    """Return who signed the card in a folder: one of `signers`, a file of allowed signers of
    ``ssh-keygen``, for the namespace ``confpred``.

    Raises:
        ModelError: none of them signed it, or ssh-keygen cannot be run.
    """
    signature = folder / SIGNATURE
    if not os.path.exists(signature):
        raise ModelError(f"{folder} is not signed: it has no {SIGNATURE}")

    def asked(what: str, *words: str) -> str:
        command = ["ssh-keygen", "-Y", what, *words, "-s", str(signature), "-f", str(signers)]
        card = _read_bytes(folder / CARD)
        return subprocess.run(command, capture_output=True, input=card, check=True).stdout.decode()

    try:
        name = asked("find-principals").split("\n")[0]
        asked("verify", "-I", name, "-n", SIGNED_FOR)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode(errors="replace").strip() or error
        raise ModelError(f"{folder} is not signed by one of {signers}: {said}") from error
    return name


@contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """Raise a ModelError about a folder if its content cannot be used."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, ConfpredError):
            raise ModelError(f"{folder}: {error}") from error
        raise ModelError(f"{folder / CARD} is damaged: {error!r}") from error
