"""The protocol of a kernel family: data and a few pure functions, in a module that
`confpred.families.registry` finds, and one CUDA source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from confpred.problem.device import Device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.operation import Launch, Operation

Rows = NDArray[np.intp]
Array = NDArray[np.int64]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]
#: Fields of some configs by name.
Columns = Mapping[str, Array]
#: The value of a field that a config does not have.
ABSENT = -2
#: The provider that calls PyTorch's own operator.
PYTORCH = "pytorch"


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A config of a *provider*.

    Attributes:
        provider: who computes: the name of a kernel family, or ``PYTORCH``.
        config_id: the provider's own number for the config: a row of a family's config table, or 0
            for PyTorch's operator.
    """

    provider: str
    config_id: int = 0


PYTORCH_OPERATOR = Candidate(PYTORCH)


@runtime_checkable
class Family(Protocol):
    """One parametrised kernel. Every method is pure, and vectorised over the config table where it
    answers for several rows. A ``problem`` is a record of the family's operation.

    Attributes:
        name: unique.
        operation: what the kernel computes.
        configs: the whole config space, a structured array of integer fields; everywhere a config
            is identified by its row (measurements and model cards hold the digest of these
            configs).
        feature_names: the columns of `features`.
    """

    @property
    def name(self) -> str: ...
    @property
    def operation(self) -> Operation: ...
    @property
    def configs(self) -> NDArray[np.void]: ...
    @property
    def feature_names(self) -> tuple[str, ...]: ...

    def legal(self, problem: Any, device: Device) -> Mask:
        """Return the rows of `configs` that compute `problem` correctly on `device`, as a mask; all
        False if none do."""

    def estimate_s(self, problem: Any, device: Device, rows: Rows) -> Floats:
        """Return the seconds of each row by an analytic model, for families without a trained
        model."""

    def features(self, problem: Any, device: Device, rows: Rows) -> NDArray[np.float32]:
        """Return the ``(len(rows), len(feature_names))`` matrix of the regressor's inputs."""

    def launch(self, problem: Any, row: int) -> Launch:
        """Return how config `row` computes `problem`: kernels, grids, arguments, workspace."""


@runtime_checkable
class Batched(Protocol):
    """A family that computes several problems at once, with the same results to the bit as
    `Family.legal` and `Family.features` (`confpred.families.table`). A ``problem`` is one problem,
    or a `confpred.families.batch.ProblemBatch` of them.

    Attributes:
        feature_names: see `Family`.
        whole: the config table, prepared for the other methods.
    """

    @property
    def feature_names(self) -> tuple[str, ...]: ...
    @property
    def whole(self) -> Any: ...

    def serves(self, problem: Any) -> bool:
        """Return whether some config may compute the problem, by the rules that need no config."""

    def offered(self, problem: Any, device: Device, table: Any) -> tuple[Any, Rows, Any]:
        """Return the rows of `table`, numbered from 0, that compute a problem which the family
        `serves`.

        Returns:
            The problem or, of several, the problem of each pair; the rows, ascending for each
            problem; and the workings of these rows, for `described`.
        """

    def described(
        self, problem: Any, device: Device, table: Any, at: Rows, workings: Any
    ) -> NDArray[np.float32]:
        """Return the features of the pairs that `offered` returned, transposed: a feature is a row,
        ``(len(feature_names), rows)``."""


@runtime_checkable
class LibraryFamily(Protocol):
    """A family whose candidates a library lists, problem by problem.

    `Family.legal` needs no library: it returns the configs that the library has offered for
    problems of the same kind. A config that the library does not offer for this very problem cannot
    be launched.
    """

    def listed(self, problem: Any, device: Device) -> Mask:
        """Return the rows of `configs` that the installed library offers for `problem`, as a mask.

        Raises:
            MissingExtra: the library is not installed.
        """


@runtime_checkable
class CompiledFamily(Protocol):
    """A family that names the fields its kernels are compiled for, so that the registers of one
    compiled kernel hold for all configs and layers that share it. Its problems are `Problem`
    records, and its features ``registers`` and `confpred.model.features.OCCUPANCY` describe how a
    config fills a device.

    Attributes:
        kernel_fields: names of the config's fields that a kernel is compiled for, beside the
            fields of `confpred.problem.conv2d.Kind`.
    """

    @property
    def kernel_fields(self) -> tuple[str, ...]: ...


def config_dict(family: Family, row: int) -> dict[str, int]:
    """Return config `row` as field names and plain integers, without the fields that are
    ``ABSENT``."""
    fields: Any = family.configs.dtype.names
    pairs = zip(fields, family.configs[row].tolist(), strict=True)
    return {name: value for name, value in pairs if value != ABSENT}


@runtime_checkable
class Bounded(Protocol):
    """A family with a method that tests its configs against limits, because its launches take long
    to lay out, do not tell, or are less exact than PyTorch's operator."""

    def allowed(self, problem: Any, rows: Rows, limits: Limits) -> Mask:
        """Return a mask over `rows`, which are legal for `problem`."""


def is_free(family: Family) -> bool:
    """Return whether all configs may run under no limits, so that none needs to be tested: the
    family is not `Bounded`, or is a library's, whose plans are as exact as PyTorch's operator."""
    return isinstance(family, LibraryFamily) or not isinstance(family, Bounded)


def within(
    family: Family, problem: Any, rows: Rows, limits: Limits, count: int | None = None
) -> Rows:
    """Return the rows among `rows` that keep within `limits`: all of them, or the first `count`. No
    more launches are laid out than that takes."""
    if limits == UNLIMITED and is_free(family):
        return rows[:count]
    if isinstance(family, Bounded):
        return rows[family.allowed(problem, rows, limits)][:count]
    kept = (row for row in rows if limits.allow(problem, family.launch(problem, int(row))))
    return np.fromiter(islice(kept, count), np.intp)
