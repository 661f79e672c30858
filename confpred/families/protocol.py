"""What a kernel family is: data and a few pure functions.

A family is one module that defines ``FAMILY``, and one CUDA source.
`confpred.families.registry.all_families` finds those of this package and those of plug-ins; nothing
else is edited.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from confpred.problem.device import Device
from confpred.problem.operation import Launch, Operation

Rows = NDArray[np.intp]
#: The value of a field that a config does not have.
ABSENT = -2


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

    def legal(self, problem: Any, device: Device) -> NDArray[np.bool_]:
        """Which rows of `configs` compute `problem` correctly on `device`; all False if none."""
        ...

    def estimate_s(self, problem: Any, device: Device, rows: Rows) -> NDArray[np.float64]:
        """Seconds that an analytic model expects of each row; used where no model is trained."""
        ...

    def features(self, problem: Any, device: Device, rows: Rows) -> NDArray[np.float32]:
        """The ``(len(rows), len(feature_names))`` matrix that the regressor is fed."""
        ...

    def launch(self, problem: Any, row: int) -> Launch:
        """How config `row` computes `problem`: kernels, grids, arguments, workspace."""
        ...


@runtime_checkable
class Batched(Protocol):
    """A family that answers for several problems at once, with the same
    results to the bit as `Family.legal` and `Family.features` (`confpred.families.tabled`).

    Attributes:
        feature_names: as of a `Family`.
        whole: the config table, prepared for the other methods.

    A ``problem`` is one, or `confpred.families.several.Several` of them.
    """

    @property
    def feature_names(self) -> tuple[str, ...]: ...
    @property
    def whole(self) -> Any: ...

    def serves(self, problem: Any) -> bool:
        """Whether some config may compute one problem, as far as that depends on no config."""
        ...

    def offered(self, problem: Any, device: Device, table: Any) -> tuple[Any, Rows, Any]:
        """Which rows of `table`, counted from 0, compute a problem that the family `serves`.

        Returns:
            The problem, or where they are several the problem of each pair; the rows, rising for
            each problem; and what was worked out of them for `described`.
        """
        ...

    def described(
        self, problem: Any, device: Device, table: Any, at: Rows, workings: Any
    ) -> NDArray[np.float32]:
        """The features of what `offered` returned, as formulas give them: a column of ``features``
        is a row here, ``(len(feature_names), rows)``."""
        ...


@runtime_checkable
class Lister(Protocol):
    """A family whose candidates a library lists, problem by problem.

    `Family.legal` says which configs the library has offered for problems of the same kind, which
    takes no library; one that it does not offer for the very problem cannot be launched.
    """

    def listed(self, problem: Any, device: Device) -> NDArray[np.bool_]:
        """Which rows of `configs` the library that is installed here offers for `problem`.

        Raises:
            MissingExtra: it is not installed.
        """
        ...


@runtime_checkable
class Compiled(Protocol):
    """A family that says what its kernels are compiled for, so that what the compiler made of one
    is known for all configs and layers that share it. Its problems are `Problem` records, and its
    features tell by ``registers`` and `confpred.model.features.OCCUPANCY` how a config fills a
    device.

    Attributes:
        kernel_fields: names of the config's fields that a kernel is compiled for, beside what the
            problem's `confpred.families.kinds.Kind` has.
    """

    @property
    def kernel_fields(self) -> tuple[str, ...]: ...


def config_dict(family: Family, row: int) -> dict[str, int]:
    """Config `row` as field names and plain integers, less what is ``ABSENT``."""
    fields: Any = family.configs.dtype.names
    found = {name: int(family.configs[name][row]) for name in fields}
    return {name: value for name, value in found.items() if value != ABSENT}
