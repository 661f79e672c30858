"""Small pure functions that families of convolution kernels share: for config tables, blocks,
features and macros.

`Occupancy` and the vectorised functions take and return arrays over the rows of a config table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from confpred.concurrency import Recent
from confpred.families.protocol import Rows
from confpred.families.several import each, once
from confpred.problem.conv2d import ACTIVATIONS, Problem
from confpred.problem.device import Device

Array = NDArray[np.int64]
_Count = TypeVar("_Count", int, Array)
_Found = TypeVar("_Found")

MAX_REGISTERS = 255  # a thread cannot have more
#: Kernels hardly spill up to this many estimated registers of a thread. It is less than
#: MAX_REGISTERS, because the estimates err.
MOST_ESTIMATED_REGISTERS = 232
#: How the blocks that share sums of a filter's gradient add them up; the names and numbers are
#: those of ``common.cuh``.
DIRECT, TWO_KERNELS, LAST_BLOCK, ATOMIC = range(4)
#: How much a table keeps of what was worked out of it, or up to twice as much.
_KEPT = 256
MAX_INT = 2**31 - 1  # kernels count, and address within a block's images, in 32 bits


def crossed(*parts: Sequence[int] | Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """The rows of ``itertools.product(*parts)``, those of tuples as their numbers; every process
    that loads the families makes their tables, and this takes a tenth of the time."""
    columns = [np.array(part, np.int32).reshape(len(part), -1) for part in parts]
    places = np.indices([len(part) for part in parts]).reshape(len(parts), -1)
    return np.hstack([part[place] for part, place in zip(columns, places, strict=True)])


def config_table(
    fields: Sequence[str], rows: Iterable[Iterable[int]] | NDArray[np.int32]
) -> NDArray[np.void]:
    """A read-only config table; the values of `rows` are in the order of `fields`."""
    if not isinstance(rows, np.ndarray):
        # Number by number takes a quarter of the time that a record by record takes.
        rows = np.fromiter(itertools.chain.from_iterable(rows), np.int32)
    numbers = rows.reshape(-1, len(fields))
    configs = numbers.view([(name, np.int32) for name in fields]).reshape(-1)
    configs.setflags(write=False)
    return configs


def config_columns(configs: NDArray[np.void], rows: Rows | slice = slice(None)) -> dict[str, Array]:
    """The fields of some rows by name, contiguous and wide enough for products of sizes."""
    names: Any = configs.dtype.names
    return {name: configs[name][rows].astype(np.int64) for name in names}


def columns_at(columns: Mapping[str, Array], rows: Rows | slice) -> dict[str, Array]:
    """Some rows of the columns of a config table."""
    return {name: column[rows] for name, column in columns.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A part of a family's config table, or all of it.

    Attributes:
        rows: which rows of the config table, rising.
        columns: their fields by name.
        kinds: some of the fields as they differ, and which of these each row has (`by`).
        known: what was worked out of it lately (`kept`).
    """

    rows: Rows
    columns: Mapping[str, Array]
    kinds: dict[tuple[str, ...], tuple[dict[str, Array], Rows]] = field(default_factory=dict)
    known: Recent[tuple[Any, ...], Any] = field(default_factory=lambda: Recent(_KEPT))

    @classmethod
    def of(cls, configs: NDArray[np.void], rows: Rows | None = None) -> Table:
        """Those `rows` of `configs`; by default, all."""
        rows = np.arange(len(configs)) if rows is None else rows
        return cls(rows, config_columns(configs, rows))

    def at(self, places: Rows) -> dict[str, Array]:
        """The fields of some of its rows, which are counted from 0."""
        return columns_at(self.columns, places)

    def by(
        self, names: tuple[str, ...], rule: Callable[[Mapping[str, Array]], NDArray[np.bool_]]
    ) -> NDArray[np.bool_]:
        """What a `rule` that needs only the fields `names` says of each row. It is asked once for
        all rows that have the same, of which there are few kinds."""
        if names not in self.kinds:
            values = np.stack([self.columns[name] for name in names])
            kinds, of_row = np.unique(values, axis=1, return_inverse=True)
            self.kinds[names] = (dict(zip(names, kinds, strict=True)), of_row.reshape(-1))
        t, of_row = self.kinds[names]
        found: NDArray[np.bool_] = rule(t)[..., of_row]
        return found

    def kept(self, find: Callable[..., _Found], **asked: Hashable) -> _Found:
        """Return `find(self, **asked)`, and keep it as long as this table: what a model needs goes
        with the model."""
        key = (find, *asked.values())
        found: _Found | None = self.known.get(key)
        if found is None:
            found = find(self, **asked)
            self.known.put(key, found)
        return found


def config_macros(config: np.void, fields: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Those `fields` of a config that its kernel is compiled for, named in capitals."""
    return tuple((name.upper(), int(config[name])) for name in fields)


def epilogue_macros(problem: Problem) -> tuple[tuple[str, int | str], ...]:
    """Macros for what is done with an image's sums before they are stored (``common.cuh``)."""
    return (
        ("ACTIVATION", f"ACTIVATION_{problem.activation.upper()}"),
        ("HAS_BIAS", int(problem.bias)),
        ("HAS_RESIDUAL", int(problem.residual)),
    )


def agreed_macros(**sizes: int | np.integer[Any]) -> tuple[tuple[str, int], ...]:
    """Macros ``HOST_...`` for what a launch counts on and its kernel works out for itself too, such
    as the threads of a block and its shared memory. The kernel asserts that both come to the same
    value, so that a difference is a compile error. The sizes must follow from the other macros, or
    there would be more kernels than those tell apart."""
    return tuple((f"HOST_{name.upper()}", int(size)) for name, size in sizes.items())


def ceil_div(size: Any, piece: Any) -> Any:
    """How many pieces `size` takes; of integers, of which `piece` is positive. Floats divide arrays
    in half of the time, and without an error: below 2^53 no quotient is rounded to a whole number
    that it is not."""
    if isinstance(size, np.ndarray) or isinstance(piece, np.ndarray):
        return np.ceil(size / piece).astype(np.int64)
    return -(-size // piece)


def cut(size: _Count | int, pieces: _Count) -> tuple[_Count, _Count]:
    """The size of a piece, and how many pieces there are, when `size` is cut into about `pieces`:
    the size is rounded up, so fewer may do."""
    piece = ceil_div(size, pieces)
    return piece, ceil_div(size, piece)


def allowed(reduction: Array, problem: Any) -> NDArray[np.bool_]:
    """Which ways to add up sums serve a `problem` that may have to be deterministic."""
    found: NDArray[np.bool_] = (reduction != ATOMIC) | np.logical_not(problem.deterministic)
    return found


def distinct_bands(size: int, bands: Array) -> NDArray[np.bool_]:
    """Which counts of bands are worth offering for `size` rows. A band has at least two rows, as a
    band of one row would read a whole window to make it; and half as many bands must be larger
    ones, or the launch would be the same."""
    rows = ceil_div(size, bands)
    result: NDArray[np.bool_] = (bands == 1) | (
        (rows >= 2) & (rows < ceil_div(size, np.maximum(bands // 2, 1)))
    )
    return result


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How the blocks of each config fill a device.

    Attributes:
        threads: threads of a block.
        blocks: blocks of the launch.
        per_sm: blocks that a multiprocessor holds at once.
        sm_blocks: blocks of the multiprocessor that gets the most.
        waves: how often the whole device is filled; a fraction.
        wave_waste: whole waves over `waves`.
        resident: blocks that a multiprocessor holds in the first wave, on average over the device.
            Where there are fewer blocks than places it is less than `per_sm`, and the blocks draw
            on only a part of the device's rates.
    """

    threads: Array
    blocks: Array
    per_sm: Array
    sm_blocks: NDArray[np.float64]
    waves: NDArray[np.float64]
    wave_waste: NDArray[np.float64]
    resident: NDArray[np.float64]

    @classmethod
    def of(
        cls, device: Device, blocks: Array, threads: Array, registers: Array, smem_bytes: Array
    ) -> Occupancy:
        """How `device` is filled by `blocks` of `threads`, with so many `registers` a thread and so
        many bytes of shared memory a block."""
        smem = smem_bytes + device.smem_reserved_per_block
        per_sm = np.minimum(
            np.minimum(device.smem_per_sm // smem, device.regs_per_sm // (threads * registers)),
            np.minimum(device.warps_per_sm * 32 // threads, device.blocks_per_sm),
        )
        per_sm = np.maximum(per_sm, 1)
        waves = blocks / (device.sm_count * per_sm)
        return cls(
            threads=threads,
            blocks=blocks,
            per_sm=per_sm,
            sm_blocks=np.ceil(blocks / device.sm_count),
            waves=waves,
            wave_waste=np.ceil(waves) / waves,
            resident=np.minimum(waves, 1.0) * per_sm,
        )

    @property
    def rounds(self) -> NDArray[np.float64]:
        """How often the multiprocessor with the most blocks is filled; a fraction."""
        return self.sm_blocks / np.minimum(self.sm_blocks, self.per_sm)

    def features(self) -> dict[str, NDArray[Any]]:
        """The features by name. Logarithms are to base 2."""
        return {
            "blocks_per_sm": self.per_sm,
            "warps_per_sm": self.resident * self.threads / 32,
            "log_blocks": np.log2(self.blocks),
            "waves": self.waves,
            "wave_waste": self.wave_waste,
        }


def problem_features(problem: Problem) -> dict[str, Any]:
    """The features of `problem` by name; a family lists those that vary among its problems.
    Logarithms are to base 2."""
    p = problem
    intensity = each(_intensity, p)  # of integers that may be too large for an array
    sizes = (p.n, p.c, p.k, p.p, p.q, p.minimum_bytes, intensity)
    n, c, k, height, width, moved, intense = _log2(sizes)
    return {
        "log_n": n,
        "log_c": c,
        "log_k": k,
        "log_p": height,
        "log_q": width,
        "r": p.r,
        "s": p.s,
        "stride_h": p.stride[0],
        "stride_w": p.stride[1],
        "dilation_h": p.dilation[0],
        "dilation_w": p.dilation[1],
        "group_width": p.group_width,
        "multiplier": p.k // p.c,
        "itemsize": p.itemsize,
        "bfloat16": p.dtype == "bfloat16",
        "bias": p.bias,
        "activation": each(_activation, p),
        "residual": p.residual,
        "log_bytes": moved,
        "log_intensity": intense,
        # Rows of pixels that do not begin at a cache line are read and written in pieces.
        "pixel_alignment": np.gcd(p.itemsize * p.k, 128),
    }


def _log2(values: Sequence[Any]) -> Sequence[Any]:
    """The logarithm of each of `values`, at once where they are numbers."""
    if any(isinstance(value, np.ndarray) for value in values):
        return [np.log2(value) for value in values]
    found: Sequence[Any] = np.log2(np.array(values, np.float64)).tolist()
    return found


def _intensity(problem: Problem) -> float:
    return problem.flops / problem.minimum_bytes


def _activation(problem: Problem) -> int:
    return ACTIVATIONS.index(problem.activation)


def feature_columns(
    names: Sequence[str],
    problem: Any,
    device: Device,
    t: Mapping[str, Array],
    derived: Mapping[str, NDArray[Any]],
) -> NDArray[np.float32]:
    """The features called `names` for some rows of a config table: the problem's, the configs'
    fields, the derived ones, and ``log_estimate``; an array ``(len(names), rows)``.

    Args:
        names: of the features, in order.
        problem: the layer, or several with one for each config.
        device: the device that the estimate is for.
        t: the fields of the configs.
        derived: features that follow from problem and config together, and ``estimate``, in
            seconds. A derived feature takes the place of a problem's feature of the same name.
    """
    columns: dict[str, Any] = {
        **once(problem_features, problem),
        **t,
        **derived,
        "log_estimate": np.log2(derived["estimate"] / each(device.roofline_s, problem)),
    }
    matrix = np.empty((len(names), len(derived["estimate"])), np.float32)
    for row, name in zip(matrix, names, strict=True):
        row[:] = columns[name]
    return matrix
