"""The features that a model's trees take, and the check that the model was trained on the same.

Trees identify a feature by its column alone, and would predict wrong values if its formula or the
order of an enumeration changed. So a model's card holds a digest of the features of a few examples.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.concurrency import cached_property
from confpred.errors import ModelError
from confpred.families.batch import ProblemBatch
from confpred.families.common import Occupancy
from confpred.families.protocol import Array, Batched, CompiledFamily, Family, Rows
from confpred.model.card import FeatureDigest
from confpred.problem.conv2d import Kind
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.problem.record import Record

_ROWS = 4  # configs of an example


def examples_of(problems: Iterable[Record]) -> list[Record]:
    """Return a few of `problems` that together have every text and truth value of all of them,
    because the features number these values."""
    chosen: list[Record] = []
    met: set[tuple[str, object]] = set()
    for problem in sorted(set(problems), key=str):
        values = {
            (field.name, value)
            for field in dataclasses.fields(problem)
            if isinstance(value := getattr(problem, field.name), (str, bool))
        }
        if not values <= met:
            met |= values
            chosen.append(problem)
    return chosen


def operation_features(
    operation: Operation, problems: Sequence[Record], device: Device
) -> NDArray[np.float32]:
    """Return the features of each problem that all its kernels share, a row each."""
    asked: Any = operation  # hashable, though its protocol does not say so
    rows = [_operation_features(asked, problem, device) for problem in problems]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


@lru_cache(maxsize=256)
def _operation_features(operation: Any, problem: Record, device: Device) -> NDArray[np.float32]:
    features: NDArray[np.float32] = operation.features(problem, device)
    features.setflags(write=False)
    return features


def family_card(
    family: Family, device: Device, examples: Sequence[tuple[Record, Sequence[int]]]
) -> FeatureDigest:
    """Return the card's digest of a family's features on `device`, for `examples`: problems, and
    legal rows of the config table for each."""
    listed = [
        {"problem": str(problem), "rows": list(rows[:: -(-len(rows) // _ROWS)])}
        for problem, rows in examples
    ]
    return FeatureDigest(listed, _digest(family, device, listed))


def operation_card(
    operation: Operation, device: Device, examples: Sequence[Record]
) -> FeatureDigest:
    """Return the card's digest of the features that PyTorch's time is predicted from."""
    listed = [*map(str, examples)]
    return FeatureDigest(listed, _digest(operation, device, listed))


def check_features(
    folder: Path, whose: Family | Operation, device: Device, card: FeatureDigest
) -> None:
    """Check that the features of a family or operation have the digest that the model in `folder`
    was trained with.

    Raises:
        ModelError: they do not.
    """
    digest = _digest(whose, device, card.examples)
    if digest != card.digest:
        raise ModelError(
            f"{folder}: the features of {whose.name} are computed otherwise than when the model was"
            f" trained (their digest is {digest}, and was {card.digest}): train it again"
        )


def _digest(whose: Family | Operation, device: Device, examples: Sequence[Any]) -> str:
    """Return 16 hex digits of the SHA-256 of the features, rounded to five digits because the last
    bits of a logarithm depend on the processor."""
    state = hashlib.sha256()
    for matrix in _matrices(whose, device, examples):
        state.update(("%.5g " * matrix.size % tuple(matrix.ravel().tolist())).encode())
    return state.hexdigest()[:16]


def _matrices(
    whose: Family | Operation, device: Device, examples: Sequence[Any]
) -> Iterator[NDArray[np.float32]]:
    """Yield the features of `examples` as a card lists them."""
    if not isinstance(whose, Family):
        yield from (whose.features(whose.problem.parse(words), device) for words in examples)
        return
    problems = [whose.operation.problem.parse(entry["problem"]) for entry in examples]
    rows = [np.array(entry["rows"], np.intp) for entry in examples]
    if isinstance(whose, Batched) and problems:  # the same matrices, one below the other
        index = np.repeat(np.arange(len(rows)), [len(own) for own in rows])
        yield whose.features(ProblemBatch(problems).at(index), device, np.concatenate(rows))
        return
    yield from (whose.features(p, device, own) for p, own in zip(problems, rows, strict=True))


#: The features that follow from the registers of a thread.
OCCUPANCY = ("blocks_per_sm", "warps_per_sm", "waves", "wave_waste")
_ALLOCATED = 8  # a multiprocessor hands out registers of a thread by this many
_KINDS_KEPT = 512


class Registers:
    """The registers of a family's compiled kernels, which replace the family's estimates: where one
    block more or less fits a multiprocessor, an error of a few registers changes the occupancy by a
    third. Immutable; safe to share between threads, and to fork."""

    def __init__(self, family: Family, text: str | bytes) -> None:
        """Take the text that `registers_text` returned for `family`; it is parsed at the first
        use."""
        self._family, self._text = family, text
        self._at = at = {name: place for place, name in enumerate(family.feature_names)}
        self._threads = at["block_threads" if "block_threads" in at else "threads"]
        self._of_kind = lru_cache(maxsize=_KINDS_KEPT)(self._look_up)

    def of(self, problem: Any, rows: Rows) -> NDArray[np.int16]:
        """Return the registers of a thread for each of `rows`; 0 if no similar kernel was
        compiled."""
        registers: NDArray[np.int16] = self._of_kind(Kind.of(problem))[self._kernel_of[rows]]
        return registers

    def correct(
        self, columns: NDArray[np.float32], registers: NDArray[np.int16], device: Device
    ) -> None:
        """Replace the family's estimates in `columns`, the features of some configs,
        ``(len(feature_names), configs)``, by the `registers` that `of` returned for them."""
        compiled = registers > 0
        taken: Array = -(-registers.astype(np.int64) // _ALLOCATED) * _ALLOCATED
        at = self._at
        per_sm = columns[at["waves"]].astype(np.float64) * columns[at["blocks_per_sm"]]
        sizes = (per_sm * device.sm_count, columns[self._threads], columns[at["smem_bytes"]])
        blocks, threads, smem = (np.rint(column).astype(np.int64) for column in sizes)
        filled = Occupancy.of(device, blocks, threads, taken.clip(1), smem).features()
        np.copyto(columns[at["registers"]], registers, where=compiled)
        for name in OCCUPANCY:
            np.copyto(columns[at[name]], filled[name], where=compiled)

    @cached_property
    def _kernel_of(self) -> Rows:
        return kernels_of(self._family)

    @cached_property
    def _table(self) -> Mapping[str, list[int]]:
        table: dict[str, list[int]] = json.loads(self._text)
        kernels = int(self._kernel_of.max(initial=-1)) + 1
        if not all(len(row) == kernels for row in table.values()):
            raise ModelError("a table of registers is damaged: it is of other configs")
        return table

    def _look_up(self, kind: Kind) -> NDArray[np.int16]:
        """Return the registers of each kernel for `kind`, or for the most similar kind that was
        compiled."""
        count = int(self._kernel_of.max(initial=-1)) + 1
        registers: NDArray[np.int16] = np.zeros(count, np.int16)
        for like in (kind, *kind.stand_ins()):
            if (row := self._table.get(str(like))) is not None:
                registers = np.where(registers, registers, np.array(row, np.int16))
        return registers


def kernels_of(family: Family) -> Rows:
    """Return the number of the kernel that each config of a `CompiledFamily` launches."""
    numbers = np.zeros(len(family.configs), np.intp)
    fields = family.kernel_fields if isinstance(family, CompiledFamily) else ()
    if fields:
        columns = [family.configs[name] for name in fields]
        # A tenth of the time that `numpy.unique` takes for records.
        order = np.lexsort(columns[::-1])
        differs = [np.diff(column[order]) != 0 for column in columns]
        numbers[order[1:]] = np.cumsum(np.any(differs, axis=0))
    return numbers


def registers_text(
    family: Family, measured: Iterable[tuple[Any, Rows, Array | None]]
) -> str | None:
    """Return a table of the registers of a family's kernels, as text for `Registers`; None if the
    family is not `CompiledFamily`, or no kernel's registers were recorded.

    `measured` has each problem with the configs that were compiled, and their registers or 0.
    """
    if not isinstance(family, CompiledFamily):
        return None
    kernel_of = kernels_of(family)
    table: dict[str, Array] = {}
    for problem, rows, registers in measured:
        if registers is not None and registers.any():
            none = np.zeros(int(kernel_of.max()) + 1, np.int64)
            kernels = table.setdefault(str(Kind.of(problem)), none)
            # Compilers differ by a few registers; the maximum does not depend on the rows' order.
            np.maximum.at(kernels, kernel_of[rows], registers)
    lines = (f"{json.dumps(kind)}: {json.dumps(of.tolist())}" for kind, of in sorted(table.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n" if table else None


#: The last columns of a pool: the logarithm to base 2 of the bytes that a multiprocessor of the
#: device reads or writes in a microsecond; and, of several families, which of them a row is of.
DEVICE, _MEMBER = "log_device_bandwidth", "pool_member"


def configs_digest(family: Family) -> str:
    """Return the identity of a family's config table: 16 hex digits of SHA-256."""
    table = family.configs
    names = ",".join(table.dtype.names or ())
    return hashlib.sha256(names.encode() + table.tobytes()).hexdigest()[:16]


class Pool:
    """Families that share their regressors, with one matrix of features for all. Immutable.

    Attributes:
        families: in the order of their names.
        name: their names.
        feature_names: those of all its families, the device's and, of several families, the number
            of the row's family.
    """

    def __init__(self, families: Iterable[Family]) -> None:
        self.families = tuple(sorted(families, key=lambda family: family.name))
        self.name = "+".join(family.name for family in self.families)
        names = list(dict.fromkeys(n for family in self.families for n in family.feature_names))
        self._columns = {
            family.name: _columns([names.index(n) for n in family.feature_names])
            for family in self.families
        }
        self._member = {family.name: i for i, family in enumerate(self.families)}
        several = (_MEMBER,) if len(self.families) > 1 else ()
        self.feature_names = (*names, DEVICE, *several)
        self._device = len(names)

    def features(
        self,
        family: Family,
        problem: Record,
        device: Device,
        rows: Rows,
        registers: Registers | None = None,
    ) -> NDArray[np.float32]:
        """Return the features of the configs `rows` of one of the pool's families, a row each; NaN
        in columns that the family lacks. `registers` are those of the family's compiled kernels."""
        own = family.features(problem, device, rows).T
        if registers is not None:
            registers.correct(own, registers.of(problem, rows), device)
        return self.spread(family, own, device)

    def spread(
        self, family: Family, own: NDArray[np.float32], device: Device
    ) -> NDArray[np.float32]:
        """Return the features `own` of one of its families, ``(len(family.feature_names), rows)``,
        in the pool's columns."""
        matrix = np.full((own.shape[1], len(self.feature_names)), np.nan, np.float32)
        matrix[:, self._columns[family.name]] = own.T
        matrix[:, self._device] = bandwidth(device)
        if len(self.families) > 1:
            matrix[:, -1] = self._member[family.name]
        return matrix


def bandwidth(device: Device) -> float:
    """Return the feature of a device; see `DEVICE`."""
    return log2(device.dram_bytes_per_s / device.sm_count * 1e-6)


def _columns(columns: list[int]) -> slice | NDArray[np.intp]:
    """Return an index of some columns of a matrix; a slice if they are the first ones, which is
    copied faster."""
    return slice(len(columns)) if columns == list(range(len(columns))) else np.array(columns)


def pools(families: Iterable[Family]) -> tuple[Pool, ...]:
    """Return all of `families` in pools: those of one operation and config table together."""
    alike: dict[tuple[str, str], list[Family]] = {}
    for family in families:
        alike.setdefault((family.operation.name, configs_digest(family)), []).append(family)
    return tuple(sorted(map(Pool, alike.values()), key=lambda pool: pool.name))
