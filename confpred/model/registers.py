"""What the compiler made of a family's kernels: the registers of a thread, and so how many blocks a
multiprocessor really holds.

A family's own features estimate registers, which is all that legality needs. The compiler's number
tells configs apart that the estimate takes for alike: at the limits where one block more fits, an
error of a few registers is one of a third of the occupancy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.errors import ModelError
from confpred.families.common import Array, Occupancy
from confpred.families.kinds import Kind
from confpred.families.protocol import Compiled, Family, Rows
from confpred.problem.device import Device

#: The features that follow from the registers of a thread.
OCCUPANCY = ("blocks_per_sm", "warps_per_sm", "waves", "wave_waste")
_ALLOCATED = 8  # a multiprocessor hands out registers of a thread by this many
_KINDS_KEPT = 512


class Registers:
    """The registers of a family's kernels, as far as they are known. Immutable; safe to share
    between threads, and to fork.

    The text is parsed by the first question: a process may ask about one family.
    """

    def __init__(self, family: Family, text: str) -> None:
        """Take what `registers_text` gave for `family`.

        The text is trusted: check its digest first.
        """
        self._text = text
        self._kernel_of = kernels_of(family)
        names = list(family.feature_names)
        threads = "block_threads" if "block_threads" in names else "threads"
        self._registers, self._smem, self._threads, self._per_sm, self._waves = (
            names.index(name)
            for name in ("registers", "smem_bytes", threads, "blocks_per_sm", "waves")
        )
        self._occupancy = [names.index(name) for name in OCCUPANCY]
        self._of_kind = lru_cache(maxsize=_KINDS_KEPT)(self._found)

    def of(self, problem: Any, rows: Rows) -> NDArray[np.int16]:
        """Registers of a thread of each of `rows`; 0 where no like kernel is known."""
        found: NDArray[np.int16] = self._of_kind(Kind.of(problem))[self._kernel_of[rows]]
        return found

    def correct(
        self, features: NDArray[np.float32], registers: NDArray[np.int16], device: Device
    ) -> None:
        """Put what is known in the place of what the family estimates, in its `features` of configs
        for which `of` found `registers`."""
        known = registers > 0
        taken: Array = -(-registers.astype(np.int64) // _ALLOCATED) * _ALLOCATED
        per_sm = features[:, self._waves].astype(np.float64) * features[:, self._per_sm]
        blocks, threads, smem = (
            np.rint(column).astype(np.int64)
            for column in (
                per_sm * device.sm_count,
                features[:, self._threads],
                features[:, self._smem],
            )
        )
        filled = Occupancy.of(device, blocks, threads, taken.clip(1), smem).features()
        columns = [(self._registers, registers)]
        columns += [(i, filled[name]) for i, name in zip(self._occupancy, OCCUPANCY, strict=True)]
        for index, column in columns:
            features[:, index] = np.where(known, column, features[:, index])

    @cached_property
    def _known(self) -> Mapping[str, list[int]]:
        found: dict[str, list[int]] = json.loads(self._text)
        kernels = int(self._kernel_of.max(initial=-1)) + 1
        if not all(len(row) == kernels for row in found.values()):
            raise ModelError("a table of registers is damaged: it is of other configs")
        return found

    def _found(self, kind: Kind) -> NDArray[np.int16]:
        """Registers of each kernel for layers of `kind`, or else of the kind most like it."""
        registers = np.zeros(int(self._kernel_of.max(initial=-1)) + 1, np.int16)
        for like in (kind, *kind.stand_ins()):
            if row := self._known.get(str(like)):
                registers = np.where(registers, registers, np.array(row, np.int16))
        return registers


def kernels_of(family: Family) -> Rows:
    """The number of the kernel that each config of a `Compiled` family is a launch of."""
    fields: Any = family.kernel_fields if isinstance(family, Compiled) else ()
    found = np.unique(family.configs[list(fields)], return_inverse=True)[1]
    return found.astype(np.intp)


def registers_text(
    family: Family, measured: Iterable[tuple[Any, Rows, Array | None]]
) -> str | None:
    """A table of the registers of a family's kernels, as text that `Registers` takes.

    Args:
        family: whose kernels.
        measured: of each problem the configs that were compiled, and their registers, 0 where that
            is not known.

    Returns:
        None where the family does not say what its kernels are compiled for, or nothing is known.
    """
    if not isinstance(family, Compiled):
        return None
    kernel_of = kernels_of(family)
    found: dict[str, Array] = {}
    for problem, rows, registers in measured:
        if registers is not None and registers.any():
            kernels = found.setdefault(
                str(Kind.of(problem)), np.zeros(int(kernel_of.max()) + 1, np.int64)
            )
            # Compilers differ by a few registers; the larger number is no matter of chance.
            np.maximum.at(kernels, kernel_of[rows], registers)
    lines = (f"{json.dumps(kind)}: {json.dumps(found[kind].tolist())}" for kind in sorted(found))
    return "{\n" + ",\n".join(lines) + "\n}\n" if found else None
