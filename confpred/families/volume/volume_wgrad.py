"""Depthwise convolution of volumes, gradient of the filter and of the bias: configs, legality,
features and launches of ``volume_wgrad.cu``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, depthwise, volume
from confpred.families.common import Occupancy, ceil_div
from confpred.families.protocol import Array, Mask, Rows
from confpred.families.table import Described, config_columns, config_table, crossed
from confpred.problem.conv import CONV, ConvNd
from confpred.problem.conv2d import dtype_macro
from confpred.problem.device import Device
from confpred.problem.operation import Launch

_COMPILED = ("vec", "tile_p", "tile_q", "plane_each", "plane_ahead")
_FIELDS = (*_COMPILED, "lanes_c", "threads", "bands", "splits")
_TILES = ((1, 4), (1, 8), (2, 4), (4, 4))
_MOST_SUMS = 128  # of a thread: more would leave too few registers for the sliding window
_MOST_BLOCKS = 16  # of a multiprocessor


def _config_table() -> NDArray[np.void]:
    rows = crossed(
        (1, 2, 4), _TILES, (0, 1), (0, 1), (volume.LEAST_LANES, 32), (128, 256), (1, 4),
        (1, 16, 64, 128, 256, 512),
    )  # fmt: skip
    vec, tile_p, tile_q, plane_each, plane_ahead, lanes_c = rows.T[:6]
    outputs = vec * tile_p * tile_q
    # More leave no registers for the sums; nor does loading far ahead, with all of a filter.
    kept = (outputs <= 16) & ((outputs <= 8) | (np.minimum(1 - plane_each, plane_ahead) == 0))
    # One block has all of a channel only in small layers, whose blocks are few as it is.
    kept &= (rows[:, -1] > 1) | (lanes_c == volume.LEAST_LANES)
    return config_table(_FIELDS, rows[kept])


class VolumeWgrad(Described):
    """``kernels/volume_wgrad.cu``."""

    operation = CONV
    name = "volume_wgrad"
    configs = _config_table()
    feature_names = (
        *CONV.feature_names, *_FIELDS,
        "lanes", "c_tiles", "tiles_at_once", "block_threads", "block_t", "in_h", "in_x", "sums",
        "registers", "smem_bytes", "blocks_per_sm", "warps_per_sm", "log_blocks", "waves",
        "wave_waste", "place_waste", "band_planes", "bands_cut", "halo_planes", "halo_rows",
        "halo_columns", "rounds", "round_waste", "steps", "run_bytes", "bytes_in_flight", "work",
        "log_work", "log_load_bytes", "log_sum_bytes", "log_estimate",
    )  # fmt: skip

    def legal(self, problem: ConvNd, device: Device) -> Mask:
        p = problem
        if p.direction != "wgrad" or not volume.handles(p):
            return np.zeros(len(self.configs), np.bool_)
        t = self._layout(p)
        splits, at_once = t["splits"], t["tiles_at_once"]
        half = ceil_div(p.z, np.maximum(t["bands"] // 4, 1))  # of the next lower count of bands
        legal: Mask = (
            volume.accessible(t["vec"], p)
            & t["distinct_lanes"]
            & ((t["plane_each"] == 0) | (p.t > 1))
            # A tile twice as large as the image does the work of a smaller one, slower.
            & ((t["tile_p"] < 2 * p.p) | (t["tile_p"] == 1))
            & ((t["tile_q"] < 2 * p.q) | (t["tile_q"] == 4))
            # A band of one plane would read all of a filter's planes for it.
            & ((t["bands"] == 1) | ((t["band_planes"] >= min(2, p.t)) & (t["band_planes"] < half)))
            & (np.maximum(t["in_h"], t["in_x"]) <= volume.ROW_WORD)
            & (t["sums"] <= _MOST_SUMS)
            & (t["registers"] <= common.MOST_ESTIMATED_REGISTERS)
            & (t["smem_bytes"] <= device.smem_per_block)
            & (t["lanes"] * t["plane_groups"] <= t["threads"])
            # Blocks that share a channel's sums: enough for half of the device and not too many, as
            # far as there are tiles for their threads; and the kernel can count them.
            & (np.maximum(t["blocks"], t["tiles"] + splits * t["threads"]) <= common.MAX_INT)
            & (
                (splits == 1)
                | (
                    (splits * at_once < 2 * t["tiles"])
                    & (t["blocks"] <= _MOST_BLOCKS * device.sm_count)
                )
            )
            & ((2 * t["blocks"] >= device.sm_count) | (2 * splits * at_once >= t["tiles"]))
        )
        return legal & (p.filter_elements + p.k <= common.MAX_INT)

    def launch(self, problem: ConvNd, row: int) -> Launch:
        p = problem
        t = common.one(self._layout(p, np.array([row])))
        defines = (
            *volume.axis_macros(
                window=p.filter_shape, stride=p.stride, dilation=volume.dilation(p)
            ),
            dtype_macro(p),
            ("HAS_BIAS", int(p.bias)),
            ("REPEAT", t["repeat"]),
            ("MAX_REGISTERS", t["max_registers"]),
            *common.config_macros(self.configs[row], _COMPILED),
            *common.agreed_macros(
                **{
                    name: t[name]
                    for name in ("plane_groups", "depth", "in_h", "in_x", "thread_floats")
                }
            ),
        )
        scalars = {
            **common.named(p, "k"),
            "multiplier": p.k // p.c,
            **common.named(p, "d h w z p q"),
            **volume.axis_scalars(pad=p.padding),
            "band_planes": t["band_planes"],
            "bands": t["bands_cut"],
            **{name: t[name] for name in ("p_tiles", "q_tiles", "tiles", "c_tiles")},
            "lanes_c": t["lanes"],
            **{name: t[name] for name in ("tiles_at_once", "splits")},
        }
        return depthwise.wgrad_launch(self.name, p, defines, t["block_threads"], t, scalars)

    def _layout(self, problem: ConvNd, rows: Rows | slice = slice(None)) -> dict[str, Array]:
        """Return the fields of some configs, how they cut the problem, and the resources and the
        work of a thread, by name."""
        p = problem
        t = config_columns(self.configs, rows)
        volume.shared_lanes(p, t)
        vec, tile_p, tile_q = t["vec"], t["tile_p"], t["tile_q"]
        (stride_d, stride_h, stride_w), dilation = p.stride, volume.dilation(p)
        t["block_t"] = np.where(t["plane_each"], 1, p.t)
        t["plane_groups"] = p.t // t["block_t"]
        t["depth"] = dilation[0] * (t["block_t"] - 1) // stride_d + 1  # gradient planes at once
        t["in_h"] = stride_h * (tile_p - 1) + dilation[1] * (p.r - 1) + 1
        t["in_x"] = stride_w * (tile_q - 1) + dilation[2] * (p.s - 1) + 1
        t["sums"] = t["block_t"] * p.r * p.s * vec  # of a thread
        t["thread_floats"] = p.s * vec  # the sums that it leaves in shared memory at a time
        lanes = t["lanes"] * t["plane_groups"]
        t["tiles_at_once"] = np.maximum(t["threads"] // lanes, 1)
        t["block_threads"] = ceil_div(lanes * t["tiles_at_once"], 32) * 32
        t["smem_bytes"] = t["thread_floats"] * t["block_threads"] * 4
        t["band_planes"], t["bands_cut"] = common.cut(p.z, t["bands"])
        t["p_tiles"], t["q_tiles"] = ceil_div(p.p, tile_p), ceil_div(p.q, tile_q)
        t["tiles"] = p.n * t["bands_cut"] * t["p_tiles"] * t["q_tiles"]  # of each channel
        t["blocks"] = t["c_tiles"] * t["splits"]
        outputs, loaded = tile_p * tile_q * vec, t["in_x"] * vec // t["repeat"]
        step_rows = stride_d * t["in_h"]
        packed = p.itemsize / 4
        t["registers"] = (  # an estimate
            t["sums"]
            + outputs * (t["depth"] + packed)
            + loaded * (1 + packed * np.where(t["plane_ahead"], step_rows, 1))
            + p.bias * vec
            + 36
        ).astype(np.int64)
        t["max_registers"] = volume.bound(t["registers"])
        # Instructions that a thread issues in one step: products, conversions, the filter's slide,
        # loads and their addresses, and others.
        t["thread_step"] = (
            t["sums"] * tile_p * tile_q
            + step_rows * (loaded + 5 * t["in_x"])
            + (t["depth"] + 1) * outputs
            + 4 * tile_p * tile_q
            + 30
        )
        return t

    def _derived(self, problem: ConvNd, device: Device, rows: Rows) -> dict[str, NDArray[Any]]:
        """Return features by name, and ``estimate`` in seconds: the larger of the times of device
        memory and of the instructions, stretched by the waste of the last wave and of the threads'
        last tile; plus a fixed latency for each step that cannot be hidden, and the time of the
        reduction."""
        p = problem
        t = self._layout(p, rows)
        filled = Occupancy.of(
            device, t["blocks"], t["block_threads"], t["max_registers"], t["smem_bytes"]
        )
        ideal_rounds = t["tiles"] / (t["splits"] * t["tiles_at_once"])
        rounds = np.ceil(ideal_rounds)
        steps = t["band_planes"] + t["depth"] - 1
        places = t["tile_p"] * t["tile_q"]
        loaded = t["in_x"] * (t["vec"] // t["repeat"]) * p.itemsize  # bytes of a row
        step_bytes = p.stride[0] * t["in_h"] * loaded + places * t["vec"] * p.itemsize
        ahead = np.where(t["plane_ahead"], step_bytes, loaded + places * t["vec"] * p.itemsize)
        threads = t["blocks"] * t["block_threads"]
        instructions = threads * rounds * steps * t["thread_step"]
        seconds = common.largest(
            device.roofline_s(p),
            common.instructions_s(instructions, device, issued=1.0),
        )
        sum_bytes = 4.0 * p.filter_elements * t["splits"]
        reduction = np.where(t["splits"] == 1, common.DIRECT, common.TWO_KERNELS)
        step_s = common.DEPTHWISE_WGRAD_STEP_S
        return {
            **t,
            **filled.features(),
            "place_waste": t["p_tiles"] * t["q_tiles"] * places / (p.p * p.q),
            "halo_planes": steps / t["band_planes"],
            "halo_rows": t["in_h"] / (p.stride[1] * t["tile_p"]),
            "halo_columns": t["in_x"] / (p.stride[2] * t["tile_q"]),
            "rounds": rounds,
            "round_waste": rounds / ideal_rounds,
            "steps": steps,
            "run_bytes": t["lanes"] * t["vec"] * p.itemsize,
            "bytes_in_flight": filled.resident * t["block_threads"] * ahead,
            "work": t["thread_step"] / (places * t["vec"]),
            "log_work": np.log2(instructions),
            "log_load_bytes": np.log2(threads * rounds * steps * step_bytes / p.minimum_bytes),
            "log_sum_bytes": np.log2(sum_bytes),
            "estimate": seconds * filled.wave_waste
            + common.waves_s(filled.waves, common.WAVE_AND_LAUNCH_S, rounds * steps, step_s)
            + common.depthwise_adding_s(reduction, sum_bytes, device),
        }


FAMILY = VolumeWgrad()
