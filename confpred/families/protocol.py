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
        """Which rows of `configs` compute `problem` correctly on `device`; all False if none."""

    def estimate_s(self, problem: Any, device: Device, rows: Rows) -> Floats:
        """Seconds that an analytic model expects of each row; used where no model is trained."""

    def features(self, problem: Any, device: Device, rows: Rows) -> NDArray[np.float32]:
        """Return the ``(len(rows), len(feature_names))`` matrix that the regressor is fed."""

    def launch(self, problem: Any, row: int) -> Launch:
        """How config `row` computes `problem`: kernels, grids, arguments, workspace."""


@runtime_checkable
class Batched(Protocol):
    """A family that answers for several problems at once, with the same results to the bit as
    `Family.legal` and `Family.features` (`confpred.families.table`). A ``problem`` is one, or
    `confpred.families.batch.ProblemBatch` of them.

    Attributes:
        feature_names: as of a `Family`.
        whole: the config table, prepared for the other methods.
    """

    @property
    def feature_names(self) -> tuple[str, ...]: ...
    @property
    def whole(self) -> Any: ...

    def serves(self, problem: Any) -> bool:
        """Whether some config may compute one problem, as far as that depends on no config."""

    def offered(self, problem: Any, device: Device, table: Any) -> tuple[Any, Rows, Any]:
        """Which rows of `table`, counted from 0, compute a problem that the family `serves`.

        Returns:
            The problem, or where they are several the problem of each pair; the rows, rising for
            each problem; and what was worked out of them for `described`.
        """

    def described(
        self, problem: Any, device: Device, table: Any, at: Rows, workings: Any
    ) -> NDArray[np.float32]:
        """Return the features of what `offered` returned, as formulas give them: a column of
        ``features`` is a row here, ``(len(feature_names), rows)``."""


@runtime_checkable
class LibraryFamily(Protocol):
    """A family whose candidates a library lists, problem by problem.

    `Family.legal` says which configs the library has offered for problems of the same kind, which
    takes no library; one that it does not offer for the very problem cannot be launched.
    """

    def listed(self, problem: Any, device: Device) -> Mask:
        """Which rows of `configs` the library that is installed here offers for `problem`.

        Raises:
            MissingExtra: it is not installed.
        """


@runtime_checkable
class Compiled(Protocol):
    """A family that says what its kernels are compiled for, so that what the compiler made of one
    is known for all configs and layers that share it. Its problems are `Problem` records, and its
    features tell by ``registers`` and `confpred.model.features.OCCUPANCY` how a config fills a
    device.

    Attributes:
        kernel_fields: names of the config's fields that a kernel is compiled for, beside what the
            problem's `confpred.problem.conv2d.Kind` has.
    """

    @property
    def kernel_fields(self) -> tuple[str, ...]: ...


def config_dict(family: Family, row: int) -> dict[str, int]:
    """Config `row` as field names and plain integers, less what is ``ABSENT``."""
    fields: Any = family.configs.dtype.names
    pairs = zip(fields, family.configs[row].tolist(), strict=True)
    return {name: value for name, value in pairs if value != ABSENT}


@runtime_checkable
class Bounded(Protocol):
    """A family that says itself which of its configs keep within limits: one whose launches take
    long to lay out, do not tell, or are less exact than PyTorch's own operator."""

    def allowed(self, problem: Any, rows: Rows, limits: Limits) -> Mask:
        """Return a mask over `rows`, which are legal for `problem`."""


def is_free(family: Family) -> bool:
    """Whether all of its configs may run where nothing is limited, which need not be looked into:
    it is not `Bounded`, or a library's, whose plans are as exact as PyTorch's operator."""
    return isinstance(family, LibraryFamily) or not isinstance(family, Bounded)


def within(
    family: Family, problem: Any, rows: Rows, limits: Limits, count: int | None = None
) -> Rows:
    """Those of `rows` that keep within `limits`: all, or the first `count` of them. Launches are
    laid out until these are found."""
    if limits == UNLIMITED and is_free(family):
        return rows[:count]
    if isinstance(family, Bounded):
        return rows[family.allowed(problem, rows, limits)][:count]
    kept = (row for row in rows if limits.allow(problem, family.launch(problem, int(row))))
    return np.fromiter(islice(kept, count), np.intp)
