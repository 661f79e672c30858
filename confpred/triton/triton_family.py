"""A Triton kernel and its list of configs as a kernel family.

Its features are made from names. A config's field such as ``BLOCK_M``, ``BLOCK_SIZE_M``, ``TILE_M``
or ``BM`` is the tile of the key that ``M`` names, a tile that no key matches that of every key that
no tile matches. A tile that a loop of the kernel names is walked by that loop, and the others by
the grid. From this follow the number of programs, waves, padding, and the bytes of a loop's stage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from confpred.concurrency import cached_property
from confpred.errors import InvalidInput
from confpred.families.protocol import ABSENT, Rows
from confpred.problem.device import Device
from confpred.problem.operation import Launch, Operand
from confpred.problem.record import Record
from confpred.triton.problem import SIZES, KernelCall, call_record
from confpred.triton.source import Source

#: Functions of the arguments in the key and of the config's, by the name of the feature.
Functions = Mapping[str, Callable[..., float]]
#: Values of the names of a key that are texts or dtypes.
Choices = Mapping[str, Sequence[object]]
_COUNTS = ("num_warps", "num_stages", "num_ctas")
_DTYPES = tuple(SIZES)
_WARP = 32
_SPARE_REGISTERS = 32  # of a thread, beside the sums of its tile


@dataclass(frozen=True, slots=True)
class ExampleCall:
    """A call of a kernel by its author's example.

    Attributes:
        launch: launches the config of a row of the table once, and returns what Triton compiled.
        compile: compiles it into Triton's cache.
        tensors: PyTorch's tensors of the call, by argument.
        expected: returns the right contents of some of them; None where nobody knows them.
    """

    launch: Callable[[int], Any]
    compile: Callable[[int], object]
    tensors: Mapping[str, Any]
    expected: Callable[[], Mapping[str, Any]] | None = None


class TritonOperation:
    """The calls of one kernel. Its operands are known only when it is called."""

    def __init__(self, name: str, key: Sequence[str], choices: Choices | None = None) -> None:
        self.name = name
        self.problem: type[KernelCall] = call_record(name, key, choices)
        words = self.problem.WORDS
        self._integers = [name for name in key if name not in dict(words)]
        self.feature_names: tuple[str, ...] = (
            *(f"log_{name}" for name in self._integers),
            *(f"aligned_{name}" for name in self._integers),
            *(f"{name}_{word}" for name, several in words for word in several),
            *("dtype", "itemsize", "log_elements"),
        )

    def operands(self, problem: KernelCall) -> tuple[Operand, ...]:
        """Return none: an example call of the author's makes them."""
        return ()

    def features(self, problem: KernelCall, device: Device) -> NDArray[np.float32]:
        """Return logarithms of the sizes to base 2, whether they are multiples of 16, for which
        Triton compiles another kernel (``aligned``), and a column for each word of the key."""
        values = [getattr(problem, name) for name in self._integers]
        logs = np.log2(np.maximum(values, 1))
        aligned = [value % 16 == 0 for value in values]
        words = [getattr(problem, n) == word for n, several in problem.WORDS for word in several]
        dtype = _DTYPES.index(problem.dtype)
        elements = np.log2(problem.sizes).sum()
        row = (*logs, *aligned, *words, dtype, problem.itemsize, elements)
        return np.array([row], np.float32)

    def reference(self, problem: Record, output: str) -> NoReturn:
        """Raise an error: results of each config are compared with the first config's."""
        raise NotImplementedError(f"{self.name} has no reference kernel")

    def pytorch(self, problem: Record, tensors: Mapping[str, Any]) -> NoReturn:
        """Raise an error: PyTorch has no operator for the kernel, and is never timed."""
        raise NotImplementedError(f"{self.name} has no call of PyTorch's")


class TritonFamily:
    """The configs of one kernel.

    Args:
        name: of the kernel.
        key: names of the arguments that configs are chosen by.
        configs: what each config passes to the kernel, ``num_warps`` and such included.
        source: of the kernel.
        version: Triton's.
        extra: further features.
        example: makes a call for a problem, to be measured.
        choices: the values of names of the key that are texts or dtypes.

    Attributes:
        kwargs: `configs`, each once; their positions are the rows of the config table.

    Raises:
        InvalidInput: a name of the key cannot be a field of a problem, or a choice no word.
    """

    def __init__(
        self,
        name: str,
        key: Sequence[str],
        configs: Sequence[Mapping[str, Any]],
        source: Source,
        version: str,
        extra: Functions | None = None,
        example: Callable[[KernelCall], ExampleCall] | None = None,
        choices: Choices | None = None,
    ) -> None:
        self.name, self.key, self.version, self.digest = name, tuple(key), version, source.digest
        self.operation = TritonOperation(name, key, choices)
        self._extra, self._example = dict(extra or {}), example
        self._fields = tuple(dict.fromkeys(field for config in configs for field in config))
        self.kwargs, self.configs = _table(self._fields, configs)
        self._axes = axes_of(self.operation.problem.SIZES, self._tiles())
        self._looped = source.looped
        self.feature_names: tuple[str, ...] = (
            *self.operation.feature_names,
            *self._fields,
            *(f"{kind}_{size}_{tile}" for size, tile in self._axes for kind in ("tiles", "waste")),
            *_DERIVED,
            *self._extra,
        )

    @property
    def source(self) -> str:
        """Identity of the compiled code: Triton's version, and the digest of the kernel."""
        return f"triton {self.version} {self.digest}"

    @cached_property
    def rows(self) -> Mapping[tuple[Any, ...], int]:
        """The row of each config, by `config_key`."""
        return {config_key(config): row for row, config in enumerate(self.kwargs)}

    def legal(self, problem: Record, device: Device) -> NDArray[np.bool_]:
        """Return all: only compilation shows which config needs too much shared memory."""
        return np.ones(len(self.configs), np.bool_)

    def estimate_s(self, problem: KernelCall, device: Device, rows: Rows) -> NDArray[np.float64]:
        """Return the seconds of a matrix product of these sizes, with padding and last waves."""
        derived = self._derived(problem, device, rows)
        seconds: NDArray[np.float64] = device.roofline_s(problem) * (
            derived["padding"] * derived["wave_waste"]
        )
        return seconds

    def features(self, problem: KernelCall, device: Device, rows: Rows) -> NDArray[np.float32]:
        table, common = self.configs[rows], self.operation.features(problem, device)[0]
        columns = {
            **dict(zip(self.operation.feature_names, common, strict=True)),
            **{field: table[field] for field in self._fields},
            **self._derived(problem, device, rows),
        }
        sizes = {name: getattr(problem, name) for name in self.key}
        for name, function in self._extra.items():
            columns[name] = [float(function(**{**sizes, **self.kwargs[row]})) for row in rows]
        matrix = np.empty((len(rows), len(self.feature_names)), np.float32)
        for index, name in enumerate(self.feature_names):
            matrix[:, index] = columns[name]
        return matrix

    def launch(self, problem: Record, row: int) -> Launch:
        """Return the kernel's identity alone: its own call runs the config."""
        return Launch((), file=self.source)

    def example(self, problem: KernelCall) -> ExampleCall:
        """Return a call for `problem`, with inputs.

        Raises:
            InvalidInput: the kernel has no example.
        """
        if self._example is None:
            raise InvalidInput("example", None, f"a function that calls {self.name}")
        return self._example(problem)

    def _tiles(self) -> list[str]:
        """Return the fields that are sizes of tiles, by their names."""
        return [name for name in self._fields if axis_of(name) is not None]

    def _derived(
        self, problem: KernelCall, device: Device, rows: Rows
    ) -> dict[str, NDArray[np.float64]]:
        """Return how each config would run `problem`, by the rules above: sizes of a tile, of a
        loop stage's loads and of a thread's sums, and the programs that fit a multiprocessor."""
        table, columns = self.configs[rows], {}
        ones = np.ones(len(rows))
        field = {name: table[name].astype(np.float64) for name in self._fields}
        programs, iterations, padding = ones, ones, ones
        for size, tile in self._axes:
            length, step = max(getattr(problem, size), 1), np.maximum(field[tile], 1)
            tiles = np.ceil(length / step)
            waste = tiles * step / length
            columns[f"tiles_{size}_{tile}"] = np.log2(tiles)
            columns[f"waste_{size}_{tile}"] = waste
            padding = padding * waste
            if tile in self._looped:
                iterations = iterations * tiles
            else:
                programs = programs * tiles
        walked = [np.maximum(field[name], 1) for name in self._tiles() if name in self._looped]
        held = [np.maximum(field[name], 1) for name in self._tiles() if name not in self._looped]
        sums = prod(held, start=ones)
        warps, stages = (np.maximum(field.get(name, ones), 1) for name in _COUNTS[:2])
        loaded = sum(walked) * sum(held) * stages if walked and held else ones
        stage_bytes = loaded * problem.itemsize
        registers = _SPARE_REGISTERS + sums / (warps * _WARP)
        per_sm = np.minimum(
            np.minimum(device.smem_per_sm // stage_bytes, device.warps_per_sm // warps),
            device.regs_per_sm // (registers * warps * _WARP),
        ).clip(1, device.blocks_per_sm)
        waves = programs / (device.sm_count * per_sm)
        return columns | {
            "log_programs": np.log2(programs),
            "log_iterations": np.log2(iterations),
            "padding": padding,
            "log_sums_a_thread": np.log2(registers - _SPARE_REGISTERS),
            "log_stage_bytes": np.log2(stage_bytes),
            "smem_share": stage_bytes / device.smem_per_block,
            "blocks_per_sm": per_sm,
            "waves": waves,
            "wave_waste": np.ceil(waves) / waves,
        }


_DERIVED = (
    "log_programs", "log_iterations", "padding", "log_sums_a_thread", "log_stage_bytes",
    "smem_share", "blocks_per_sm", "waves", "wave_waste",
)  # fmt: skip


def axis_of(field: str) -> str | None:
    """Return the axis of a tile's field, such as ``M`` for ``BLOCK_SIZE_M``; empty where the name
    has none, and None where it is no tile."""
    name = field.upper()
    if "BLOCK" in name or "TILE" in name:
        return re.sub("BLOCK|TILE|SIZE|_", "", name)
    short = re.fullmatch("B_?([A-Z])", name)
    return short[1] if short else None


def axes_of(key: Sequence[str], tiles: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return each tile with the size that it divides; a tile whose name matches no size, with every
    size that matches no tile."""
    matched = {tile: name for tile in tiles for name in key if _matches(str(axis_of(tile)), name)}
    left = [name for name in key if name not in matched.values()] or list(key)
    pairs = ([matched[t]] if t in matched else left for t in tiles)
    return tuple((name, t) for t, names in zip(tiles, pairs, strict=True) for name in names)


def _matches(axis: str, name: str) -> bool:
    words = [*name.upper().split("_"), name.upper().replace("_", "")]
    names = {axis, f"{axis}S", f"{axis}NUMEL"}  # such as ROW of n_rows
    return bool(axis) and not names.isdisjoint(words)


def config_key(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key that identifies a config, for any order of its fields."""
    return tuple(sorted(config.items()))


def _table(
    fields: Sequence[str], configs: Sequence[Mapping[str, Any]]
) -> tuple[tuple[Mapping[str, Any], ...], NDArray[np.void]]:
    """Return the distinct configs and their table. Values that are no integers are numbered, in the
    order of their texts."""
    distinct = tuple({config_key(config): dict(config) for config in configs}.values())
    if not fields:
        raise InvalidInput("configs", list(configs), "configs with an argument of the kernel")
    columns = [_numbers([config.get(name) for config in distinct]) for name in fields]
    types = [(name, np.int32) for name in fields]
    table = np.array(list(zip(*columns, strict=True)), dtype=types)
    table.setflags(write=False)
    return distinct, table


def _numbers(values: Sequence[Any]) -> list[int]:
    if all(value is None or isinstance(value, int) for value in values):
        return [ABSENT if value is None else int(value) for value in values]
    words = sorted({repr(value) for value in values if value is not None})
    return [ABSENT if value is None else words.index(repr(value)) for value in values]
