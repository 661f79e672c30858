"""The depthwise families whose result is an image: configs, legality, features and launches of
``depthwise.cu``, for the forward direction and for the gradient of the input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, depthwise
from confpred.families.batch import each, picked
from confpred.families.common import Occupancy
from confpred.families.depthwise import Lanes
from confpred.families.protocol import Array
from confpred.families.table import Table, Tiled, config_table, crossed
from confpred.problem.conv2d import Problem, dtype_macro
from confpred.problem.device import Device
from confpred.problem.operation import Launch

_COMPILED = ("vec", "tile_q", "filter_shared", "min_blocks", "prefetch")
_FIELDS = (*_COMPILED, "lanes_c", "threads", "bands")


def _config_table() -> NDArray[np.void]:
    rows = crossed(
        (1, 2, 4),
        (2, 4, 7, 8),
        (0, 1),
        (1, 2),
        (1, 2, 4),
        (depthwise.LEAST_LANES, 32, 64),
        (128, 256),
        (1, 2, 4, 8, 16),
    )
    vec, _, filter_shared, _, prefetch = rows.T[:5]
    # Sharing pays from 24 taps on, loading so far ahead up to 12: no window has both.
    kept = (vec != 1) | (filter_shared != 1) | (prefetch != 4)
    return config_table(_FIELDS, rows[kept])


_SHARED = (
    "log_n", "log_k", "log_p", "log_q", "r", "s", "stride_h", "stride_w",
    "dilation_h", "dilation_w", "itemsize", "log_bytes", "log_intensity",
    *_FIELDS,
    "lanes", "c_tiles", "tiles_at_once", "block_threads", "in_x", "registers", "smem_bytes",
    "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste", "q_waste",
    "band_groups", "bands_cut", "row_tail", "halo_rows", "halo_columns", "steps",
    "lane_waste", "run_bytes", "pixel_alignment", "bytes_in_flight", "work", "log_work",
    "log_load_bytes", "log_estimate",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension of the image as ``depthwise.cu`` sees it: input ``i`` meets output ``o`` at tap
    ``r`` where ``up * (i + origin) = down * (o + shift) + dilation * r``."""

    size_in: int
    size_out: int
    window: int
    up: int
    down: int
    dilation: int
    origin: int
    shift: int

    @property
    def groups(self) -> int:
        """Groups of `up` outputs."""
        found: int = common.ceil_div(self.size_out + self.shift, self.up)
        return found


def _axes(problem: Problem) -> tuple[_Axis, _Axis]:
    """Return the vertical axis and the horizontal one."""
    p = problem
    sizes = ((p.h, p.p, p.r), (p.w, p.q, p.s))
    axes = []
    for (size, result, window), stride, pad, dilation in zip(
        sizes, p.stride, p.padding, depthwise.dilation(p), strict=True
    ):
        if p.direction == "fprop":
            axes.append(_Axis(size, result, window, 1, stride, dilation, pad, 0))
        else:
            # The window is turned round, so what was a distance to the left is one to the right.
            pad = dilation * (window - 1) - pad
            shift = -pad % stride
            origin = (pad + shift) // stride
            axes.append(_Axis(result, size, window, stride, 1, dilation, origin, shift))
    return axes[0], axes[1]


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Tiles, resources and work of some configs on one problem; arrays over these configs."""

    repeat: Array
    in_x: Array  # input columns of a tile
    depth: Any  # an integer, or one for each config; groups of accumulators
    pitch: Array  # floats of shared memory that the filters of a lane take
    registers: Array  # an estimate
    smem_bytes: Array
    lanes: Lanes
    band_groups: Array
    bands: Array
    q_tiles: Array
    blocks: Array
    work: Array  # instructions that a thread issues in one step


_CONFIGS = _config_table()
_WHOLE = Table.of(_CONFIGS)


class DepthwiseImage(Tiled):
    """One direction of ``kernels/depthwise.cu``."""

    configs = _CONFIGS
    whole = _WHOLE
    kernel_fields = _COMPILED
    shared_features = _SHARED

    def _handles(self, problem: Problem) -> bool:
        return depthwise.handles(problem) and (self.direction == "fprop" or problem.k <= problem.c)

    def _first(self, problem: Any, device: Device, table: Table) -> NDArray[np.bool_]:
        vertical, horizontal = each(_axes, problem)
        taps, width = problem.r * problem.s, horizontal.size_out
        return (
            table.by(
                ("vec", "filter_shared", "lanes_c"),
                lambda t: (
                    depthwise.accessible(t["vec"], problem)
                    & depthwise.distinct_lanes(problem.k // t["vec"], t["lanes_c"])
                    # Registers hold small filters at no cost; large ones need shared memory.
                    & np.where(t["filter_shared"], taps * t["vec"] >= 24, taps * t["vec"] <= 100)
                ),
            )
            & table.by(
                ("tile_q", "prefetch"),
                lambda t: (
                    depthwise.worth_loading_ahead(t["prefetch"], taps)
                    & (t["tile_q"] % horizontal.up == 0)
                    # A tile twice as wide as the image does the work of a smaller one, slower.
                    & ((t["tile_q"] < 2 * width) | (t["tile_q"] == 2))
                ),
            )
            & table.by(("bands",), lambda t: common.distinct_bands(vertical.groups, t["bands"]))
        )

    def _tiled_rules(
        self, problem: Any, device: Device, t: Mapping[str, Array], tiling: _Tiling
    ) -> NDArray[np.bool_]:
        tiles = tiling.blocks * tiling.lanes.tiles_at_once
        return (
            (tiling.in_x <= depthwise.MAX_COLUMNS)
            & (tiling.registers <= common.MOST_ESTIMATED_REGISTERS)
            # Bounding the registers so that two blocks fit changes nothing where a thread needs
            # few, and makes it spill where it needs many.
            & ((t["min_blocks"] == 1) | ((tiling.registers > 100) & (tiling.registers <= 132)))
            & (tiling.smem_bytes <= device.smem_per_block)
            & (np.maximum(tiling.blocks, tiles) <= common.MAX_INT)
        )

    def launch(self, problem: Problem, row: int) -> Launch:
        p, tiling = problem, picked(self._cut_for(problem, row), 0)
        vertical, horizontal = _axes(p)
        defines = (
            ("R", p.r),
            ("S", p.s),
            ("UP_H", vertical.up),
            ("UP_W", horizontal.up),
            ("DOWN_H", vertical.down),
            ("DOWN_W", horizontal.down),
            ("DILATION_H", vertical.dilation),
            ("DILATION_W", horizontal.dilation),
            ("FLIP", int(self.direction == "dgrad")),
            dtype_macro(p),
            *common.epilogue_macros(p),
            ("REPEAT", int(tiling.repeat)),
            *common.config_macros(self.configs[row], _COMPILED),
            *common.agreed_macros(
                max_threads=depthwise.MAX_THREADS,
                **common.named(tiling, "in_x depth"),
                filter_pitch=tiling.pitch,
            ),
        )
        scalars = {
            "n": p.n,
            "k": p.k,
            "multiplier": p.k // p.c,
            "h": vertical.size_in,
            "w": horizontal.size_in,
            "p": vertical.size_out,
            "q": horizontal.size_out,
            "origin_h": vertical.origin,
            "origin_w": horizontal.origin,
            "shift_h": vertical.shift,
            "shift_w": horizontal.shift,
            **common.named(tiling, "band_groups bands q_tiles"),
            **common.named(tiling.lanes, "c_tiles lanes_c tiles_at_once"),
        }
        blocks, threads, smem_bytes = tiling.blocks, tiling.lanes.threads, tiling.smem_bytes
        step = common.kernel_step(
            "depthwise", defines, blocks, threads, smem_bytes, self.operands, scalars
        )
        return Launch((step,))

    def _tiling(self, problem: Any, t: Mapping[str, Array]) -> _Tiling:
        vertical, horizontal = each(_axes, problem)
        vec, tile_q = t["vec"], t["tile_q"]
        repeat = np.minimum(vec, problem.k // problem.c)
        taps = problem.r * problem.s
        reach = vertical.dilation * (vertical.window - 1) + (vertical.up - 1) * vertical.down
        depth = reach // (vertical.up * vertical.down) + 1
        width = horizontal.down * (tile_q - 1) + horizontal.dilation * (horizontal.window - 1)
        in_x = width // horizontal.up + 1
        access = np.minimum(vec, 4)
        pitch = (taps * vec // access | 1) * access
        lanes = Lanes.of(common.ceil_div(problem.k, vec), t["lanes_c"], t["threads"])
        band_groups, bands = common.cut(vertical.groups, t["bands"])
        q_tiles = common.ceil_div(horizontal.size_out + horizontal.shift, tile_q)
        outputs = vertical.up * tile_q * vec
        inputs = vertical.down * in_x * vec // repeat
        packed = problem.itemsize / 4
        registers = (
            depth * outputs
            + inputs * (1 + packed * t["prefetch"])
            # Unrolled steps share what they read of the filter, so that it stays in registers.
            + np.where(t["filter_shared"] & (t["prefetch"] == 1), 4, taps) * vec
            + outputs * packed * problem.residual
            + 28
        ).astype(np.int64)
        # The terms are products, conversions, addresses, loads of the filter, stores, and the rest.
        products = taps * outputs // (vertical.up * horizontal.up)
        work = (
            products
            + inputs
            + 4 * vertical.down * in_x
            + t["filter_shared"] * taps * common.ceil_div(vec, 4)
            + 2 * outputs
            + 30
        )
        tiles = problem.n * bands * q_tiles
        return _Tiling(
            repeat=repeat,
            in_x=in_x,
            depth=depth,
            pitch=pitch,
            registers=registers,
            smem_bytes=lanes.lanes_c * pitch * 4,
            lanes=lanes,
            band_groups=band_groups,
            bands=bands,
            q_tiles=q_tiles,
            blocks=common.ceil_div(tiles, lanes.tiles_at_once) * lanes.c_tiles,
            work=work,
        )

    def _derived(
        self, problem: Any, device: Device, t: Mapping[str, Array], workings: _Tiling
    ) -> dict[str, NDArray[np.float64]]:
        """Estimate seconds as the larger of two times, plus a latency for each wave and step: the
        time of device memory, whose rate is bounded where too little is in flight, and the time of
        the instructions of the multiprocessor with the most blocks."""
        vertical, horizontal = each(_axes, problem)
        tiling = workings
        lanes = tiling.lanes
        registers = np.minimum(
            tiling.registers, np.where(t["min_blocks"] == 2, 128, common.MAX_REGISTERS)
        )
        occupancy = Occupancy.of(device, tiling.blocks, lanes.threads, registers, tiling.smem_bytes)
        steps = tiling.band_groups + tiling.depth - 1
        load_bytes = vertical.down * tiling.in_x * (t["vec"] // tiling.repeat) * problem.itemsize
        threads = tiling.blocks * lanes.threads
        in_flight = occupancy.resident * lanes.threads * load_bytes * t["prefetch"]
        # Steps whose input rows are padding only finish output rows.
        computed = np.minimum(steps, common.ceil_div(vertical.size_in, vertical.down))
        thread_work = computed * tiling.work + (steps - computed) * 0.25 * tiling.work
        thread_work += common.BLOCK_INSTRUCTIONS
        fullest = occupancy.sm_blocks * device.sm_count * lanes.threads
        seconds = np.maximum(
            common.memory_s(problem.minimum_bytes, device, in_flight),
            common.instructions_s(fullest * thread_work, device),
        )
        return {
            **lanes.features(),
            **common.named(tiling, "in_x registers smem_bytes band_groups"),
            **occupancy.features(),
            "q_waste": tiling.q_tiles * t["tile_q"] / horizontal.size_out,
            "bands_cut": tiling.bands,
            # What is left for the last band, as a fraction of a whole band.
            "row_tail": (vertical.groups - (tiling.bands - 1) * tiling.band_groups)
            / tiling.band_groups,
            "halo_rows": steps / tiling.band_groups,
            "halo_columns": tiling.in_x * horizontal.up / (horizontal.down * t["tile_q"]),
            "steps": steps,
            "lane_waste": lanes.threads / (lanes.lanes_c * lanes.tiles_at_once),
            "run_bytes": lanes.lanes_c * t["vec"] * problem.itemsize,
            "bytes_in_flight": in_flight,
            "work": tiling.work / (vertical.up * t["tile_q"] * t["vec"]),
            "log_work": np.log2(threads * thread_work),
            "log_load_bytes": np.log2(threads * steps * load_bytes / problem.minimum_bytes),
            "estimate": seconds
            + common.LAUNCH_S
            + common.waves_s(occupancy.waves, common.WAVE_S, steps, common.DEPTHWISE_STEP_S),
        }


_EPILOGUE = ("multiplier", "bias", "residual", "activation")
FAMILIES = (
    DepthwiseImage("depthwise_fprop", "fprop", depthwise.FPROP_OPERANDS, _EPILOGUE),
    DepthwiseImage("depthwise_dgrad", "dgrad", depthwise.DGRAD_OPERANDS),
)
