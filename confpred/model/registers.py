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
from confpred.families.common import Occupancy
from confpred.families.protocol import Array, Compiled, Family, Rows
from confpred.problem.conv2d import Kind
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

    def __init__(self, family: Family, text: str | bytes) -> None:
        """Take what `registers_text` gave for `family`.

        The text is trusted: check its digest first.
        """
        self._family, self._text = family, text
        names = list(family.feature_names)
        threads = "block_threads" if "block_threads" in names else "threads"
        self._registers, self._smem, self._threads, self._per_sm, self._waves = (
            names.index(name)
            for name in ("registers", "smem_bytes", threads, "blocks_per_sm", "waves")
        )
        self._occupancy = [names.index(name) for name in OCCUPANCY]
        self._of_kind = lru_cache(maxsize=_KINDS_KEPT)(self._found)
        self._measured = lru_cache(maxsize=_KINDS_KEPT)(self._row)

    def of(self, problem: Any, rows: Rows) -> NDArray[np.int16]:
        """Registers of a thread of each of `rows`; 0 where no like kernel is known."""
        found: NDArray[np.int16] = self._of_kind(Kind.of(problem))[self._kernel_of[rows]]
        return found

    def correct(
        self, columns: NDArray[np.float32], registers: NDArray[np.int16], device: Device
    ) -> None:
        """Put what is known in the place of what the family estimates.

        Args:
            columns: features of some configs, ``(len(feature_names), configs)``.
            registers: what `of` found for them.
            device: the device that the features are for.
        """
        known = registers > 0
        taken: Array = -(-registers.astype(np.int64) // _ALLOCATED) * _ALLOCATED
        per_sm = columns[self._waves].astype(np.float64) * columns[self._per_sm]
        blocks, threads, smem = (
            np.rint(column).astype(np.int64)
            for column in (
                per_sm * device.sm_count,
                columns[self._threads],
                columns[self._smem],
            )
        )
        filled = Occupancy.of(device, blocks, threads, taken.clip(1), smem).features()
        np.copyto(columns[self._registers], registers, where=known)
        for index, name in zip(self._occupancy, OCCUPANCY, strict=True):
            np.copyto(columns[index], filled[name], where=known)

    @cached_property
    def _kernel_of(self) -> Rows:
        return kernels_of(self._family)

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
            measured = self._measured(like)
            if measured is not None:
                registers = np.where(registers, registers, measured)
        return registers

    def _row(self, kind: Kind) -> NDArray[np.int16] | None:
        """Registers of each kernel that was measured for layers of `kind`, and 0 of the others;
        None where none was."""
        row = self._known.get(str(kind))
        return None if row is None else np.array(row, np.int16)


def kernels_of(family: Family) -> Rows:
    """The number of the kernel that each config of a `Compiled` family is a launch of."""
    found = np.zeros(len(family.configs), np.intp)
    fields = family.kernel_fields if isinstance(family, Compiled) else ()
    if fields:
        columns = [family.configs[name] for name in fields]
        # A tenth of the time that `numpy.unique` takes for records.
        order = np.lexsort(columns[::-1])
        differs = [np.diff(column[order]) != 0 for column in columns]
        found[order[1:]] = np.cumsum(np.any(differs, axis=0))
    return found


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
