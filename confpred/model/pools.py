"""Families that learn from each other: those with the same config table, as the directions of one
kernel have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import log2

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Family, Rows
from confpred.model.registers import Registers
from confpred.problem.device import Device
from confpred.problem.record import Record

#: The last columns of a pool: what tells its devices apart, the logarithm to base 2 of the bytes
#: that a multiprocessor reads or writes in a microsecond; and, of several families, which of them a
#: row is of.
DEVICE, _MEMBER = "log_device_bandwidth", "pool_member"


def configs_digest(family: Family) -> str:
    """Identity of a family's config table: 16 hex digits of SHA-256."""
    table = family.configs
    names = ",".join(table.dtype.names or ())
    return hashlib.sha256(names.encode() + table.tobytes()).hexdigest()[:16]


class Pool:
    """Families that share their regressors, with one matrix of features for all. Immutable.

    Attributes:
        families: in the order of their names.
        name: their names.
        feature_names: those of all its families, the device's, and, where the families are several,
            which one it is.
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

    def features(
        self,
        family: Family,
        problem: Record,
        device: Device,
        rows: Rows,
        registers: Registers | None = None,
    ) -> NDArray[np.float32]:
        """The features of one of its families; NaN in the columns that only others have.

        Args:
            family: which.
            problem: what is computed.
            device: the device that computes it.
            rows: the configs.
            registers: what is known of the family's compiled kernels.
        """
        own = family.features(problem, device, rows).T
        if registers is not None:
            registers.correct(own, registers.of(problem, rows), device)
        return self.spread(family, own, device)

    def spread(
        self, family: Family, own: NDArray[np.float32], device: Device
    ) -> NDArray[np.float32]:
        """The features `own` of one of its families, ``(len(family.feature_names), rows)``, in the
        pool's columns."""
        matrix = np.full((own.shape[1], len(self.feature_names)), np.nan, np.float32)
        matrix[:, self._columns[family.name]] = own.T
        if len(self.families) > 1:
            matrix[:, -2] = bandwidth(device)
            matrix[:, -1] = self._member[family.name]
        else:
            matrix[:, -1] = bandwidth(device)
        return matrix


def bandwidth(device: Device) -> float:
    """The feature of a device; see `DEVICE`."""
    return log2(device.dram_bytes_per_s / device.sm_count * 1e-6)


def _columns(found: list[int]) -> slice | NDArray[np.intp]:
    """Columns of a matrix; a slice where they are the first ones, which is copied faster."""
    return slice(len(found)) if found == list(range(len(found))) else np.array(found)


def pools(families: Iterable[Family]) -> tuple[Pool, ...]:
    """All of `families`, those of one operation and config table together."""
    alike: dict[tuple[str, str], list[Family]] = {}
    for family in families:
        alike.setdefault((family.operation.name, configs_digest(family)), []).append(family)
    return tuple(sorted(map(Pool, alike.values()), key=lambda pool: pool.name))
