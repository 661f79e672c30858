"""Layer norm and RMS norm of the channels of a pixel, in one pass over the rows: configs, legality,
features and launches of ``row_norm.cu``, ``row_norm_backward.cu`` and ``row_norm_sum.cu``.
``row_norm.cuh`` has a drawing of the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common
from confpred.families.common import Occupancy, ceil_div
from confpred.families.norm.batch_norm import ACCESS_BYTES, REGISTERS, STREAM_BYTES
from confpred.families.norm.group_norm import error_of
from confpred.families.protocol import Array, Floats, Mask, Rows
from confpred.families.table import Described, config_columns, config_table
from confpred.problem.activation import activation_macro
from confpred.problem.conv2d import dtype_macro
from confpred.problem.device import Device
from confpred.problem.norm_of_groups import AFFINE, NORM, Norm, norm_macros
from confpred.problem.operation import SCRATCH, Launch
from confpred.problem.record import ITEMSIZES

_FIELDS = ("lanes", "vector", "threads", "blocks", "ahead")
_LANES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
_MOST_CHANNELS, _MOST_ACCESSES = 8192, 8  # of a row, and of a thread to it
#: Time in which a thread that does not read ahead has no load under way, between the last load of a
#: row and the first one of the next: of rows of one warp, and of several, which meet at barriers.
_WARP_IDLE_S, _BLOCK_IDLE_S = 4e-7, 8e-7
#: Time of an element of a thread's last row, while other threads have nothing more to do.
_ELEMENT_S = 1e-8
#: Instructions to an element of a row, forward and backward.
_INSTRUCTIONS = (14, 20)
#: Threads and elements of a block of ``row_norm_sum.cu``, and the time of its launch and loads.
_SUM_THREADS, _SUM_COLUMNS, _SUM_S = 1024, 32, 3e-6
_FORWARD = ("out", "mean", "invstd", "in", "weight", "bias", "residual", "eps")
_BACKWARD = (
    "in_grad", "residual_grad", "out_grad", "in", "weight", "bias", "residual", "mean", "invstd",
    SCRATCH,
)  # fmt: skip


class RowNorm(Described):
    """The family of one direction.

    Attributes:
        name: name of the family.
        direction: direction of its problems.
        configs: ``lanes`` (threads of a row), ``vector`` (elements of an access), ``threads`` (of a
            block), ``blocks`` (of the grid, which goes around the rows; 0: as many as there are
            rows for) and ``ahead`` (whether a thread reads the next row before it ends one).
    """

    operation = NORM

    def __init__(self, name: str, direction: str, configs: NDArray[np.void]) -> None:
        self.name, self.direction, self.configs = name, direction, configs
        self._least_threads = int(configs["threads"].min())
        self._least_blocks = int(configs["blocks"].min())
        self.feature_names: tuple[str, ...] = (
            *NORM.feature_names, *_FIELDS,
            "vector_bytes", "accesses", "elements", "at_once", "used", "own_rows", "row_waste",
            "registers", "smem_bytes", "segment", "alignment", "blocks_per_sm", "warps_per_sm",
            "log_blocks", "waves", "wave_waste", "log_in_flight",
            *(("log_partials",) if direction == "backward" else ()), "log_estimate",
        )  # fmt: skip

    def _layout(self, problem: Norm, rows: Rows | slice = slice(None)) -> dict[str, Array]:
        """Return the fields of some configs, and how they cut the problem, by name."""
        p, t = problem, config_columns(self.configs, rows)
        t["vector_bytes"] = t["vector"] * p.itemsize
        t["accesses"] = ceil_div(p.c, t["vector"] * t["lanes"])
        t["elements"] = t["accesses"] * t["vector"]
        t["covered"] = t["lanes"] * t["elements"]  # channels, and those of idle lanes
        t["at_once"] = t["threads"] // t["lanes"]
        t["rounds"] = ceil_div(p.rows, t["at_once"])
        t["grid"] = np.minimum(np.where(t["blocks"] > 0, t["blocks"], t["rounds"]), t["rounds"])
        t["own_rows"] = ceil_div(t["rounds"], t["grid"])
        # Two sums of each warp, twice. The gradients that all but the first threads hand over, at
        # least a warp and a row of them, have the same memory.
        handed = (t["threads"] // np.maximum(t["lanes"], 32) - 1) * t["lanes"] * t["vector"]
        t["smem_bytes"] = 4 * np.maximum(4 * (t["threads"] // 32), handed if _sums(p) else 0)
        return t

    def legal(self, problem: Norm, device: Device) -> Mask:
        p, t = problem, self._layout(problem)
        widest = min(ACCESS_BYTES // p.itemsize, p.c & -p.c)  # that divides the channels
        covered_by_wide = t["lanes"] * 2 * t["vector"] * ((t["accesses"] + 1) // 2)
        is_half = (2 * t["vector"] == widest) & (t["accesses"] > 1)
        registers = self._registers(p, t)
        most = np.where(t["blocks"] > 0, t["rounds"] * (1 + p.is_backward), common.MAX_INT)
        legal: Mask = (
            # Half as wide accesses are of use where they leave fewer lanes idle.
            ((t["vector"] == widest) | (is_half & (t["covered"] < covered_by_wide)))
            & (t["accesses"] <= _MOST_ACCESSES)
            & ((3 * t["covered"] <= 4 * p.c) | (t["lanes"] == _LANES[0]))
            & (registers <= common.MOST_ESTIMATED_REGISTERS)
            # The kernel is compiled to fit a block, and would spill.
            & (registers <= REGISTERS // t["threads"] + 12)
            # Twice as many threads as all rows need are those of half as many, and so are blocks.
            & (
                (t["at_once"] < 2 * p.rows)
                | (t["threads"] == np.maximum(t["lanes"], self._least_threads))
            )
            & ((t["blocks"] < most) | (t["blocks"] == self._least_blocks))
            & ((t["ahead"] == 0) | (t["blocks"] < t["rounds"]))
            & (t["smem_bytes"] <= device.smem_per_block)
        )
        served = p.is_of_rows and not (p.is_trivial or p.adaptive) and p.direction == self.direction
        return legal & (served and p.c <= _MOST_CHANNELS)

    def _registers(self, problem: Norm, t: dict[str, Array]) -> Array:
        """Estimate the registers of a thread, by what the compiler made of some layers' kernels."""
        p, vectors = problem, AFFINE.index(problem.affine)
        weight = ITEMSIZES[p.weights] / 4
        an_element = np.where(t["blocks"] > 0, vectors, vectors / 2) * weight + 1
        if p.is_backward:
            an_element = np.full(len(an_element), 2 + _sums(p) + weight * (vectors > 0))
        an_element += ((p.activation != "none") + p.residual) / 2
        loads = t["ahead"] * _reads(p) * p.itemsize / 4
        registers: Array = ((an_element + loads) * t["elements"] + 18).astype(np.int64)
        return registers

    def _derived(self, problem: Norm, device: Device, rows: Rows) -> dict[str, NDArray[Any]]:
        """Return features by name, and ``estimate`` in seconds: what crosses device memory, as fast
        as the bytes under way let it, or the instructions, and the time of what comes after."""
        p, t = problem, self._layout(problem, rows)
        registers = np.minimum(self._registers(p, t), REGISTERS // t["threads"])
        filled = Occupancy.of(device, t["grid"], t["threads"], registers, t["smem_bytes"])
        in_flight = filled.resident * t["at_once"] * p.c * p.itemsize * _reads(p)
        idle_s = np.where(t["lanes"] <= 32, _WARP_IDLE_S, _BLOCK_IDLE_S) * (t["ahead"] == 0)
        busy = common.LOAD_S / (common.LOAD_S + idle_s)
        partials = 4 * _sums(p) * p.c * t["grid"]  # bytes, written and read
        waste = t["own_rows"] * t["grid"] / t["rounds"]
        waves = np.where(filled.waves > 1, filled.wave_waste, 1.0)
        moved = p.minimum_bytes * np.minimum(waste * waves, 2.0) + 2 * partials
        instructions = p.rows * t["covered"] * _INSTRUCTIONS[p.is_backward]
        seconds: Floats = np.maximum(
            common.memory_s(1, device, in_flight * busy) * moved,
            common.instructions_s(instructions, device),
        )
        after_s = t["elements"] * _ELEMENT_S + (_SUM_S if _sums(p) else 0.0)
        return {
            **t,
            **filled.features(),
            "used": p.c / t["covered"],
            "row_waste": waste,
            "registers": registers,
            "segment": t["lanes"] * t["vector_bytes"],
            "alignment": np.full(len(waste), min(p.itemsize * p.c & -(p.itemsize * p.c), 128)),
            "log_in_flight": np.log2(in_flight),
            "log_partials": np.log2(np.maximum(partials, 1)),
            "estimate": seconds + common.LAUNCH_S + after_s,
        }

    def launch(self, problem: Norm, row: int) -> Launch:
        p, t = problem, common.one(self._layout(problem, np.array([row])))
        defines = (
            dtype_macro(p),
            activation_macro(p.activation),
            *norm_macros(p),
            *common.macros(
                AFFINE=AFFINE.index(p.affine),
                HAS_RESIDUAL=int(p.residual),
                STREAM=int(p.tensor_bytes > STREAM_BYTES),
            ),
            *((name.upper(), t[name]) for name in ("lanes", "vector", "accesses", "threads")),
            *common.macros(
                FULL=int(t["covered"] == p.c), AHEAD=t["ahead"], HELD=int(t["blocks"] > 0)
            ),
            *common.agreed_macros(smem_bytes=t["smem_bytes"]),
        )
        name = "row_norm_backward" if p.is_backward else "row_norm"
        operands = _BACKWARD if p.is_backward else _FORWARD
        sizes = {"rows": p.rows, "channels": p.c}
        shape = (t["grid"], t["threads"], t["smem_bytes"])
        step = common.kernel_step(name, operands, defines, *shape, sizes)
        if not _sums(p):
            return Launch((step,), error=error_of(p))
        elements = _sums(p) * p.c
        agreed = common.agreed_macros(threads=_SUM_THREADS, columns=_SUM_COLUMNS)
        adding = common.kernel_step(
            "row_norm_sum",
            ("weight_grad", "bias_grad", SCRATCH),
            (("DTYPE", f"DTYPE_{p.weights.upper()}"), *agreed),
            ceil_div(elements, _SUM_COLUMNS),
            _SUM_THREADS,
            0,
            {"channels": p.c, "elements": elements, "blocks": t["grid"]},
        )
        scratch_bytes = 4 * elements * t["grid"]
        return Launch((step, adding), scratch_bytes=scratch_bytes, error=error_of(p))


def _sums(p: Norm) -> int:
    """Return how many vectors of gradients the rows are added up for."""
    return AFFINE.index(p.affine) * p.is_backward


def _reads(p: Norm) -> int:
    """Return how many tensors are read."""
    return 1 + p.is_backward + p.residual


def _table(blocks: Mapping[int, tuple[int, ...]]) -> NDArray[np.void]:
    """Return the config table of a direction, given the ``blocks`` for each count of threads. Rows
    of few lanes are offered with the two smallest of these counts, others have a block each."""
    return config_table(
        _FIELDS,
        (
            (lanes, vector, threads, count, ahead)
            for lanes in _LANES
            for threads in blocks
            if lanes == threads or (lanes < threads and threads in sorted(blocks)[:2])
            for vector in (1, 2, 4, 8)
            for count in blocks[threads]
            for ahead in ((0, 1) if count else (0,))
        ),
    )


FAMILIES = (
    RowNorm(
        "row_norm",
        "forward",
        _table({128: (0, 528, 1056), 256: (0, 264, 528), 512: (0, 132, 264), 1024: (0, 132)}),
    ),
    RowNorm(
        "row_norm_backward",
        "backward",
        _table({256: (132, 264, 528), 512: (132, 264), 1024: (132,)}),
    ),
)
