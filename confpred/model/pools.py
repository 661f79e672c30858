"""Families that learn from each other: those with the same config table, as the directions of one
kernel have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Family, Rows
from confpred.problem.device import Device
from confpred.problem.record import Record

#: The last column of a pool of several families: which of them a row is of.
_MEMBER = "pool_member"


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
        feature_names: those of all its families, and, where they are several, which one it is.
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
        self.feature_names = (*names, _MEMBER) if len(self.families) > 1 else tuple(names)

    def features(
        self, family: Family, problem: Record, device: Device, rows: Rows
    ) -> NDArray[np.float32]:
        """The features of one of its families; NaN in the columns that only others have."""
        return self.spread(family, family.features(problem, device, rows))

    def spread(self, family: Family, own: NDArray[np.float32]) -> NDArray[np.float32]:
        """The features `own` of one of its families in the pool's columns."""
        if len(self.families) == 1:
            return own
        matrix = np.full((len(own), len(self.feature_names)), np.nan, np.float32)
        matrix[:, self._columns[family.name]] = own
        matrix[:, -1] = self._member[family.name]
        return matrix


def _columns(found: list[int]) -> slice | NDArray[np.intp]:
    """Columns of a matrix; a slice where they are the first ones, which is copied faster."""
    return slice(len(found)) if found == list(range(len(found))) else np.array(found)


def pools(families: Iterable[Family]) -> tuple[Pool, ...]:
    """All of `families`, those of one operation and config table together."""
    alike: dict[tuple[str, str], list[Family]] = {}
    for family in families:
        alike.setdefault((family.operation.name, configs_digest(family)), []).append(family)
    return tuple(sorted(map(Pool, alike.values()), key=lambda pool: pool.name))
