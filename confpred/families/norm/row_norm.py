"""Layer norm and RMS norm of the channels of a pixel, in one pass over the rows: configs, legality,
features and launches of ``row_norm.cu``, ``row_norm_backward.cu`` and ``row_norm_sum.cu``.
``row_norm.cuh`` has a drawing of the layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common
from confpred.families.common import Occupancy, ceil_div
from confpred.families.protocol import Array, Mask, Rows
from confpred.families.table import Described, config_columns, config_table
from confpred.problem.activation import activation_macro
from confpred.problem.conv2d import dtype_macro
from confpred.problem.device import Device
from confpred.problem.group_norm import AFFINE, NORM, Norm, weights_macros
from confpred.problem.operation import SCRATCH, Launch, Step

_FIELDS = ("lanes", "vector", "threads", "blocks", "ahead")
_LANES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
_VECTORS = (1, 2, 4, 8)
_MOST_CHANNELS = 8192
_MOST_ACCESSES = 8  # of a thread to a row, in registers
_ACCESS_BYTES = 16  # most that a thread can access at once
_REGISTERS = 65_536  # of a multiprocessor, for kernels that are compiled to fit
#: A tensor beyond this many bytes leaves the L2 cache before something else reads it.
_STREAM_BYTES = 2**25
#: Time from the last load of a row to its first store, in which a thread that does not read ahead
#: has no load under way: of rows of one warp, and of several, which meet at barriers.
_WARP_SUM_S, _BLOCK_SUM_S = 4e-7, 8e-7
#: Threads and elements of a block of ``row_norm_sum.cu``, and the time of its launch and loads.
_SUM_THREADS, _SUM_COLUMNS, _SUM_S = 1024, 32, 3e-6


class RowNorm(Described):
    """The family of one direction.

    Attributes:
        name, direction: of the family, and of its problems.
        configs: ``lanes`` (threads of a row), ``vector`` (elements of an access), ``threads`` (of a
            block), ``blocks`` (of the grid, which goes around the rows; 0: as many as there are
            rows for) and ``ahead`` (whether a thread reads the next row before it ends one).
    """

    operation = NORM

    def __init__(self, name: str, direction: str, configs: NDArray[np.void]) -> None:
        self.name, self.direction, self.configs = name, direction, configs
        self._least_threads = int(configs["threads"].min())
        self._least_blocks = int(configs["blocks"].min())
        own = ("log_partials",) if direction == "backward" else ()
        self.feature_names: tuple[str, ...] = (
            *NORM.feature_names, *_FIELDS,
            "vector_bytes", "accesses", "elements", "at_once", "used", "log_grid_rows", "own_rows",
            "row_waste", "registers", "smem_bytes", "segment", "alignment", "blocks_per_sm",
            "warps_per_sm", "log_blocks", "waves", "wave_waste", "log_in_flight", *own,
            "log_estimate",
        )  # fmt: skip

    def _layout(self, problem: Norm, rows: Rows | slice = slice(None)) -> dict[str, Array]:
        """Return the fields of some configs, and how they cut the problem, by name."""
        p, t = problem, config_columns(self.configs, rows)
        t["accesses"] = _accesses(p.c, t["vector"], t["lanes"])
        t["vector_bytes"], t["elements"] = t["vector"] * p.itemsize, t["accesses"] * t["vector"]
        t["covered"] = t["lanes"] * t["elements"]  # channels, and those of idle lanes
        t["at_once"] = t["threads"] // t["lanes"]
        t["rounds"] = ceil_div(p.rows, t["at_once"])  # blocks, if each has one round of rows
        t["grid"] = np.minimum(np.where(t["blocks"] == 0, t["rounds"], t["blocks"]), t["rounds"])
        t["own_rows"] = ceil_div(t["rounds"], t["grid"])
        # Two sums of each warp, twice; or the gradients that all threads but the first ones,
        # a warp or a row of them, hand over.
        handed = (t["threads"] // np.maximum(t["lanes"], 32) - 1) * t["lanes"] * t["vector"]
        sums = 4 * (t["threads"] // 32)
        t["smem_bytes"] = 4 * np.maximum(sums, handed if _sums(p) else 0)
        return t

    def legal(self, problem: Norm, device: Device) -> Mask:
        p, t = problem, self._layout(problem)
        widest = min(_ACCESS_BYTES // p.itemsize, p.c & -p.c)  # that divides the channels
        wide = t["lanes"] * 2 * t["vector"]
        covered_by_wide = wide * _accesses(p.c, 2 * t["vector"], t["lanes"])
        legal: Mask = (
            # Half as wide accesses are of use where they leave fewer lanes idle.
            (
                (t["vector"] == widest)
                | ((2 * t["vector"] == widest) & (t["covered"] < covered_by_wide))
            )
            & (t["accesses"] <= _MOST_ACCESSES)
            & ((3 * t["covered"] <= 4 * p.c) | (t["lanes"] == _LANES[0]))
            & (self._registers(p, t) <= common.MOST_ESTIMATED_REGISTERS)
            # The kernel is compiled to fit a block, and would spill.
            & (self._registers(p, t) <= _REGISTERS // t["threads"] + 8)
            # Twice as many threads as all rows need are those of half as many, and so are blocks.
            & (
                (t["at_once"] < 2 * p.rows)
                | (t["threads"] == np.maximum(t["lanes"], self._least_threads))
            )
            & ((t["blocks"] < 2 * t["rounds"]) | (t["blocks"] == self._least_blocks))
            & ((t["ahead"] == 0) | (t["blocks"] < t["rounds"]))
            & (t["smem_bytes"] <= device.smem_per_block)
        )
        served = (p.p, p.groups, p.adaptive, p.direction) == (1, 1, False, self.direction)
        return legal & (served and p.c <= _MOST_CHANNELS)

    def _registers(self, problem: Norm, t: dict[str, Array]) -> Array:
        """Estimate the registers of a thread."""
        p, elements, raw = problem, t["elements"], t["elements"] * problem.itemsize // 4
        tensors = 1 + p.is_backward + p.residual
        ahead = t["ahead"] * tensors * raw
        if p.is_backward:
            return (2 + _sums(p)) * elements + ahead + 34
        held = np.where(t["blocks"] > 0, AFFINE.index(p.affine), 0) * elements
        return elements + p.residual * raw + held + ahead + 24

    def _derived(self, problem: Norm, device: Device, rows: Rows) -> dict[str, NDArray[Any]]:
        """Return features by name, and ``estimate`` in seconds: what crosses device memory, as fast
        as the bytes under way let it, and the times of launches and of adding up gradients."""
        p, t = problem, self._layout(problem, rows)
        registers = np.minimum(self._registers(p, t), _REGISTERS // t["threads"])
        filled = Occupancy.of(device, t["grid"], t["threads"], registers, t["smem_bytes"])
        reads = 1 + p.is_backward + p.residual
        in_flight = filled.resident * t["at_once"] * p.c * p.itemsize * reads
        idle_s = np.where(t["lanes"] <= 32, _WARP_SUM_S, _BLOCK_SUM_S)
        busy = common.LOAD_S / (common.LOAD_S + np.where(t["ahead"] > 0, 0.0, idle_s))
        partials = 4 * _sums(p) * p.c * t["grid"]
        waste = np.minimum(t["own_rows"] * t["grid"] / t["rounds"], 2.0)
        waves = np.where(t["blocks"] == 0, np.minimum(filled.wave_waste, 2.0), 1.0)
        moved = p.minimum_bytes * waste * waves + 2 * partials
        adding_s = _SUM_S if _sums(p) else 0.0
        return {
            **t,
            **filled.features(),
            "used": p.c / t["covered"],
            "log_grid_rows": np.log2(t["grid"] * t["at_once"]),
            "row_waste": waste,
            "registers": registers,
            "segment": t["lanes"] * t["vector_bytes"],
            "alignment": np.full(len(waste), min(p.itemsize * p.c & -(p.itemsize * p.c), 128)),
            "log_in_flight": np.log2(in_flight),
            "log_partials": np.log2(np.maximum(partials, 1)),
            "estimate": common.memory_s(1, device, in_flight * busy) * moved
            + common.LAUNCH_S + adding_s,
        }  # fmt: skip

    def launch(self, problem: Norm, row: int) -> Launch:
        p, t = problem, common.one(self._layout(problem, np.array([row])))
        sums = _sums(p)
        name, operands = (
            "row_norm",
            ("out", "mean", "invstd", "in", "weight", "bias", "residual", "eps"),
        )
        if p.is_backward:
            name = "row_norm_backward"
            operands = (
                "in_grad",
                "residual_grad",
                "out_grad",
                "in",
                "weight",
                "bias",
                "residual",
                "mean",
                "invstd",
                SCRATCH,
            )
        defines = (
            dtype_macro(p),
            activation_macro(p.activation),
            *weights_macros(p),
            ("AFFINE", AFFINE.index(p.affine)),
            ("CENTRED", int(p.centred)),
            ("HAS_RESIDUAL", int(p.residual)),
            ("STREAM", int(p.tensor_bytes > _STREAM_BYTES)),
            *(() if p.is_backward else common.macros(HELD=int(t["blocks"] > 0))),
            *(
                (field.upper(), t[field])
                for field in ("lanes", "accesses", "vector", "threads", "ahead")
            ),
            *common.agreed_macros(smem_bytes=t["smem_bytes"]),
        )
        step = common.kernel_step(
            name,
            operands,
            defines,
            t["grid"],
            t["threads"],
            t["smem_bytes"],
            {"rows": p.rows, "channels": p.c},
        )
        if not sums:
            return Launch((step,))
        return Launch((step, _sum_step(p, t["grid"])), scratch_bytes=4 * sums * p.c * t["grid"])


def _accesses(channels: int, vector: Array, lanes: Array) -> Array:
    """Return how many accesses a thread has to a row."""
    found: Array = ceil_div(channels, vector * lanes)
    return found


def _sums(p: Norm) -> int:
    """How many vectors of gradients the rows are added up for."""
    return AFFINE.index(p.affine) * p.is_backward


def _sum_step(p: Norm, blocks: int) -> Step:
    """Return the step that adds up the gradients of weight and bias of so many `blocks`."""
    elements = _sums(p) * p.c
    agreed = common.agreed_macros(threads=_SUM_THREADS, columns=_SUM_COLUMNS)
    return common.kernel_step(
        "row_norm_sum",
        ("weight_grad", "bias_grad", SCRATCH),
        (("DTYPE", f"DTYPE_{p.weights.upper()}"), *agreed),
        ceil_div(elements, _SUM_COLUMNS),
        _SUM_THREADS,
        0,
        {"channels": p.c, "elements": elements, "blocks": blocks},
    )


def _table(threads: tuple[int, ...], grids: Iterable[tuple[int, int, int]]) -> NDArray[np.void]:
    """Return the config table of a direction.

    Args:
        threads: of a block whose rows have fewer lanes; a block has one row of more lanes.
        grids: most threads of a block, and the ``blocks`` and ``ahead`` that blocks of so many
            threads are offered with.
    """
    shapes = sorted({(lanes, max(lanes, count)) for lanes in _LANES for count in threads})
    return config_table(
        _FIELDS,
        (
            (lanes, vector, count, blocks, ahead)
            for (lanes, count), vector, (most, blocks, ahead) in product(shapes, _VECTORS, grids)
            if count <= most
        ),
    )


FAMILIES = (
    RowNorm(
        "row_norm",
        "forward",
        _table((128, 256), [(1024, 0, 0), (256, 1056, 0), *product((1024,), (264, 528), (0, 1))]),
    ),
    RowNorm(
        "row_norm_backward",
        "backward",
        _table(
            (256, 512),
            [
                (most, blocks, ahead)
                for most, blocks in ((1024, 132), (512, 264), (256, 528))
                for ahead in (0, 1)
            ],
        ),
    ),
)
