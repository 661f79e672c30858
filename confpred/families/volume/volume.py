"""The families of depthwise convolution whose result is a volume: configs, legality, features and
launches of ``volume.cu``, for the forward direction and for the gradient of the input.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, volume
from confpred.families.common import Occupancy, ceil_div
from confpred.families.depthwise import DepthwiseAxis
from confpred.families.protocol import Array, Mask, Rows
from confpred.families.table import Described, config_columns, config_table, crossed
from confpred.problem.conv import CONV, ConvNd
from confpred.problem.conv2d import dtype_macro
from confpred.problem.device import Device
from confpred.problem.operation import KernelSpec, Launch, Step

_COMPILED = ("vec", "tile_p", "tile_q", "filter_shared", "plane_ahead")
_FIELDS = (*_COMPILED, "lanes_c", "threads", "bands")
_TILES = ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (4, 4))
_SECTOR = 32  # bytes that the caches move as a whole: of a run of channels, some for nothing
#: Most multiply-adds of a thread's step, which are all unrolled: more take long to compile and do
#: not fit the instruction cache.
_MOST_PRODUCTS = 4096


def _config_table() -> NDArray[np.void]:
    rows = crossed(
        (1, 2, 4, 8), _TILES, (0, 1), (0, 1), (volume.LEAST_LANES, 16, 32), (128, 256), (1, 2, 4, 8)
    )
    vec, tile_p, tile_q = rows.T[:3]
    outputs = vec * tile_p * tile_q
    # More leave no registers for a filter of several planes, fewer share too little of what is
    # loaded.
    return config_table(_FIELDS, rows[(outputs <= 32) & ((outputs >= 4) | (vec == 1))])


def _describe_axes(problem: ConvNd) -> tuple[DepthwiseAxis, ...]:
    p = problem
    axes = zip(
        p.input_shape, p.output_shape, p.filter_shape, p.stride, p.padding, volume.dilation(p),
        strict=True,
    )  # fmt: skip
    return tuple(DepthwiseAxis.of(p.direction, *sizes) for sizes in axes)


class Volume(Described):
    """One direction of ``kernels/volume.cu``."""

    operation = CONV
    configs = _config_table()

    def __init__(self, name: str, direction: str, operands: tuple[str, ...]) -> None:
        self.name, self.direction, self.operands = name, direction, operands
        self.feature_names: tuple[str, ...] = (
            *CONV.feature_names, *_FIELDS,
            "lanes", "c_tiles", "block_p", "block_q", "block_threads", "in_h", "in_x", "registers",
            "smem_bytes", "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste",
            "place_waste", "band_groups", "bands_cut", "halo_planes", "halo_rows", "halo_columns",
            "steps", "run_bytes", "sector_waste", "bytes_in_flight", "work", "log_work",
            "log_load_bytes", "log_estimate",
        )  # fmt: skip

    def legal(self, problem: ConvNd, device: Device) -> Mask:
        p = problem
        served = volume.handles(p) and (self.direction == "fprop" or p.k == p.c)
        if p.direction != self.direction or not served:
            return np.zeros(len(self.configs), np.bool_)
        t, (deep, down, across) = self._layout(p), _describe_axes(p)
        rows = ceil_div(deep.groups, t["bands"])
        half = ceil_div(deep.groups, np.maximum(t["bands"] // 2, 1))
        held = p.taps * t["vec"]
        legal: Mask = (
            volume.accessible(t["vec"], p)
            & t["distinct_lanes"]
            # Registers hold small filters at no cost; large ones need shared memory.
            & np.where(t["filter_shared"], held >= 24, held <= 100)
            & (t["tile_p"] % down.up == 0)
            & (t["tile_q"] % across.up == 0)
            # A tile twice as large as the image does the work of a smaller one, slower.
            & ((t["tile_p"] < 2 * down.size_out) | (t["tile_p"] <= 2))
            & ((t["tile_q"] < 2 * across.size_out) | (t["tile_q"] == 2))
            # So does a block of more threads that are not used.
            & ((t["threads"] == 128) | (t["block_threads"] > 128))
            # A band of one plane would read all of a filter's planes for it; and half as many bands
            # must be larger ones, or the launch would be the same.
            & ((t["bands"] == 1) | ((rows >= min(2, p.t)) & (rows < half)))
            & (np.maximum(t["in_h"], t["in_x"]) <= volume.ROW_WORD)
            & (t["products"] <= _MOST_PRODUCTS)
            & (t["registers"] <= common.MOST_ESTIMATED_REGISTERS)
            & (t["smem_bytes"] <= device.smem_per_block)
            & (t["grid_x"] <= common.MAX_INT)
        )
        return legal

    def launch(self, problem: ConvNd, row: int) -> Launch:
        p, axes = problem, _describe_axes(problem)
        t = common.one(self._layout(p, np.array([row])))
        defines: tuple[tuple[str, int | str], ...] = (
            *volume.axis_macros(
                window=p.filter_shape,
                up=tuple(axis.up for axis in axes),
                down=tuple(axis.down for axis in axes),
                dilation=tuple(axis.dilation for axis in axes),
            ),
            ("FLIP", int(self.direction == "dgrad")),
            dtype_macro(p),
            *common.epilogue_macros(p),
            ("REPEAT", t["repeat"]),
            ("MAX_REGISTERS", t["max_registers"]),
            *common.config_macros(self.configs[row], _COMPILED),
            *common.agreed_macros(
                depth=t["depth"], in_h=t["in_h"], in_x=t["in_x"], filter_pitch=t["pitch"]
            ),
        )
        sizes = (axis.size_in for axis in axes)
        results = (axis.size_out for axis in axes)
        scalars = {
            "k": p.k,
            "multiplier": p.k // p.c,
            **dict(zip(volume.AXES, sizes, strict=True)),
            **dict(zip("zpq", results, strict=True)),
            **volume.axis_scalars(
                origin=tuple(axis.origin for axis in axes),
                shift=tuple(axis.shift for axis in axes),
            ),
            **{name: t[name] for name in ("band_groups", "q_blocks", "c_tiles")},
            "lanes_c": t["lanes"],
            "block_p": t["block_p"],
            "block_q": t["block_q"],
        }
        step = Step(
            KernelSpec("volume.cu", "volume", defines),
            grid=(t["grid_x"], t["bands_cut"], p.n),
            block=(t["block_threads"], 1, 1),
            smem_bytes=t["smem_bytes"],
            operands=self.operands,
            scalars=scalars,
        )
        return Launch((step,))

    def _layout(self, problem: ConvNd, rows: Rows | slice = slice(None)) -> dict[str, Array]:
        """Return the fields of some configs, how they cut the problem, and the resources and the
        work of a thread, by name."""
        p, (deep, down, across) = problem, _describe_axes(problem)
        t = config_columns(self.configs, rows)
        volume.shared_lanes(p, t)
        vec, tile_p, tile_q = t["vec"], t["tile_p"], t["tile_q"]
        p_tiles, q_tiles = down.pieces(tile_p), across.pieces(tile_q)
        # The tiles of a block are about a square, as then their threads share most; but they reach
        # farther down where the image is narrow.
        at_once = np.maximum(t["threads"] // t["lanes"], 1)
        square = np.maximum(np.sqrt(at_once * tile_q // tile_p).astype(np.int64), 1)
        wide = np.minimum(at_once // np.minimum(np.minimum(square, at_once), p_tiles), q_tiles)
        t["q_blocks"] = ceil_div(q_tiles, wide)
        t["block_q"] = ceil_div(q_tiles, t["q_blocks"])
        p_blocks = ceil_div(p_tiles, np.minimum(at_once // t["block_q"], p_tiles))
        t["block_p"] = ceil_div(p_tiles, p_blocks)
        used = t["lanes"] * t["block_q"] * t["block_p"]
        t["block_threads"] = ceil_div(used, 32) * 32
        t["grid_x"] = t["c_tiles"] * t["q_blocks"] * p_blocks
        t["band_groups"], t["bands_cut"] = common.cut(deep.groups, t["bands"])
        period = deep.up * deep.down
        reach = deep.dilation * (deep.window - 1) + (deep.up - 1) * deep.down
        t["depth"] = np.full_like(vec, reach // period + 1)  # groups of accumulators
        t["in_h"], t["in_x"] = down.reach(tile_p), across.reach(tile_q)
        access = np.minimum(vec, 4)
        t["pitch"] = (p.taps * vec // access | 1) * access  # floats that the filters of a lane take
        t["smem_bytes"] = t["lanes"] * t["pitch"] * 4
        outputs, loaded = deep.up * tile_p * tile_q * vec, t["in_x"] * vec // t["repeat"]
        step_rows = deep.down * t["in_h"]
        packed = p.itemsize / 4
        t["products"] = p.taps * outputs // (deep.up * down.up * across.up)
        t["registers"] = (  # an estimate
            t["depth"] * outputs
            + loaded * (1 + packed * np.where(t["plane_ahead"], step_rows, 1))
            + np.where(t["filter_shared"], 4, p.taps) * vec
            + outputs * packed * p.residual
            + 34
        ).astype(np.int64)
        t["max_registers"] = volume.bound(t["registers"])
        # Instructions that a thread issues in one step: products, conversions, loads and their
        # addresses, loads of the filter, stores, and others.
        t["thread_step"] = (
            t["products"]
            + step_rows * (loaded + 5 * t["in_x"])
            + t["filter_shared"] * p.taps * ceil_div(vec, 4)
            + 2 * outputs
            + 40
        )
        return t

    def _derived(self, problem: ConvNd, device: Device, rows: Rows) -> dict[str, NDArray[Any]]:
        """Return features by name, and ``estimate`` in seconds: the largest of the times of device
        memory, whose rate is bounded where too little is in flight, of L2, and of the instructions
        of the multiprocessor with the most blocks; plus a latency for each wave and step."""
        p, (deep, down, across) = problem, _describe_axes(problem)
        t = self._layout(p, rows)
        blocks = t["grid_x"] * t["bands_cut"] * p.n
        threads = t["block_threads"]  # in whole warps
        filled = Occupancy.of(device, blocks, threads, t["max_registers"], t["smem_bytes"])
        steps = t["band_groups"] + t["depth"] - 1
        # Bytes that a block loads in a step; neighbouring tiles meet in the L1 cache.
        block_rows = down.reach(t["block_p"] * t["tile_p"])
        block_pixels = deep.down * block_rows * across.reach(t["block_q"] * t["tile_q"])
        step_bytes = block_pixels * t["lanes"] * t["vec"] // t["repeat"] * p.itemsize
        ahead = step_bytes / np.where(t["plane_ahead"], 1, deep.down * t["in_h"])
        in_flight = filled.resident * ahead
        # Steps whose input planes are padding only finish output planes.
        computed = np.minimum(steps, ceil_div(deep.size_in, deep.down))
        load_bytes = blocks * computed * step_bytes
        work = (computed + 0.25 * (steps - computed)) * t["thread_step"] + common.BLOCK_INSTRUCTIONS
        fullest = filled.sm_blocks * device.sm_count * threads
        seconds = common.largest(
            common.memory_s(p.minimum_bytes, device, in_flight),
            common.l2_s(load_bytes, device),
            common.instructions_s(fullest * work, device),
            device.roofline_s(p),
        )
        places = down.size_out * across.size_out
        run = t["lanes"] * t["vec"] * p.itemsize
        covered = t["grid_x"] // t["c_tiles"] * t["block_p"] * t["block_q"]
        return {
            **t,
            **filled.features(),
            "place_waste": covered * t["tile_p"] * t["tile_q"] / places,
            "halo_planes": steps / t["band_groups"],
            "halo_rows": t["in_h"] * down.up / (down.down * t["tile_p"]),
            "halo_columns": t["in_x"] * across.up / (across.down * t["tile_q"]),
            "steps": steps,
            "run_bytes": run,
            "sector_waste": 1 + (_SECTOR - np.gcd(run, np.gcd(p.c * p.itemsize, _SECTOR))) / run,
            "bytes_in_flight": in_flight,
            "work": t["thread_step"] / (deep.up * t["tile_p"] * t["tile_q"] * t["vec"]),
            "log_work": np.log2(blocks * threads * work),
            "log_load_bytes": np.log2(load_bytes / p.minimum_bytes),
            "estimate": seconds
            + common.LAUNCH_S
            + common.waves_s(filled.waves, common.WAVE_S, steps, common.DEPTHWISE_STEP_S),
        }


_EPILOGUE = ("filter", "bias", "residual")
FAMILIES = (
    Volume("volume_fprop", "fprop", ("out", "in", *_EPILOGUE)),
    Volume("volume_dgrad", "dgrad", ("in_grad", "out_grad", *_EPILOGUE)),
)
