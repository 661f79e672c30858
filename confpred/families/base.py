"""What a kernel family is: data and a few pure functions.

A family is one module of this package that defines ``FAMILY``, and one CUDA source in ``kernels/``.
`confpred.families.all_families` finds it; nothing else is edited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from confpred.device import Device
from confpred.problem import Problem

Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """All that decides a compiled kernel, save the compiler and the target.

    Attributes:
        file: name of the CUDA source in ``kernels/``.
        entry: name of the ``extern "C"`` kernel in it.
        defines: macro definitions, ``(name, value)`` in a fixed order.
    """

    file: str
    entry: str
    defines: tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """How to launch a compiled kernel.

    The kernel's parameters are the output, input, filter and bias pointers (bias may be null),
    then `scalars` as 32-bit integers.

    Attributes:
        grid, block: CUDA grid and block dimensions.
        smem_bytes: dynamic shared memory of one block.
        scalars: the layer's sizes, in the order of the kernel's parameters.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    scalars: tuple[int, ...]


@runtime_checkable
class Family(Protocol):
    """One parametrised kernel. Every method is pure, and vectorised over the config table.

    Attributes:
        name: unique, also the module's name.
        configs: the whole config space, a structured array of integer fields; a config is known
            by its row everywhere (the table's digest is in measurements and model cards).
        feature_names: the columns of `features`.
    """

    @property
    def name(self) -> str: ...
    @property
    def configs(self) -> NDArray[np.void]: ...
    @property
    def feature_names(self) -> tuple[str, ...]: ...

    def legal(self, problem: Problem, device: Device) -> NDArray[np.bool_]:
        """Which rows of `configs` compute `problem` correctly on `device`; all False if none."""
        ...

    def estimate_s(self, problem: Problem, device: Device, rows: Rows) -> NDArray[np.float64]:
        """Seconds that an analytic model expects of each row; used where no model is trained."""
        ...

    def features(self, problem: Problem, device: Device, rows: Rows) -> NDArray[np.float32]:
        """The ``(len(rows), len(feature_names))`` matrix that the regressor is fed."""
        ...

    def source(self, problem: Problem, row: int) -> KernelSource:
        """The kernel that serves `problem` with config `row`."""
        ...

    def launch(self, problem: Problem, row: int) -> Launch:
        """How to launch that kernel."""
        ...

    def workspace_bytes(self, problem: Problem, row: int) -> int:
        """Device memory that a launch needs beside its operands."""
        ...


def config_dict(family: Family, row: int) -> dict[str, int]:
    """Config `row` as field names and plain integers."""
    fields: Any = family.configs.dtype.names
    return {name: int(family.configs[name][row]) for name in fields}
