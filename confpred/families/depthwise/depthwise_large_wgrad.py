"""Depthwise convolution with a large filter, gradient of the filter and of the bias: configs,
legality, features and launches of ``depthwise_large_wgrad.cu``.

The layers are those of ``depthwise_large.py``. The accumulators of a warp are the whole filter of a
channel, S rounded up to 16 and R to 8: 32 in a thread for 31x31, 112 for 51x51.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, depthwise
from confpred.families.batch import Workings
from confpred.families.common import Occupancy, ceil_div, macros
from confpred.families.depthwise import depthwise_large as large
from confpred.families.protocol import Columns, Floats, Mask
from confpred.families.table import Table, config_table, crossed
from confpred.problem.conv2d import Problem, dtype_macro, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.operation import Launch

_COMPILED = ("vec", "block_c", "units", "part", "min_blocks")
_FIELDS = (*_COMPILED, "bands", "splits", "reduction")


def _config_table() -> NDArray[np.void]:
    # Sums are added up by a second kernel: with as many elements, atomic additions take longer.
    reductions = [
        pair
        for pair in depthwise.reductions((4, 8, 16, 32, 64, 128))
        if pair[1] != common.ATOMIC
    ]  # fmt: skip
    rows = crossed(
        large.VECTORS, (8, 16), (1, 2, 4, 7, 8), (4, 8), (1, 2, 3), (1, 2, 4), reductions
    )
    return config_table(_FIELDS, rows[(rows[:, 1] == 8) | (rows[:, 4] == 1)])


def _rows_met(problem: Problem) -> int:
    """Return the input rows that a tile of all gradient rows walks down."""
    p, above = problem, problem.padding[0]
    first = 0 if p.bias else max(above, 0)
    return max(min(p.p + p.r - 1, p.h + above), p.p * p.bias) - first


class DepthwiseLargeWgrad(large.Large):
    """``kernels/depthwise_large_wgrad.cu``."""

    configs = _config_table()
    kernel = "depthwise_large_wgrad"
    kernel_fields = _COMPILED
    shared_features = (
        "log_n", "log_c", "log_p", "log_q", "r", "s", "bfloat16", "bias", "log_bytes",
        "log_intensity",
        *_FIELDS,
        "threads", "registers", "smem_bytes", "products", "blocks_per_sm", "warps_per_sm",
        "log_blocks", "waves", "wave_waste", "q_waste", "c_waste", "bands_cut", "band_rows",
        "halo_rows", "halo_columns", "rounds", "round_waste", "steps", "pixel_alignment",
        "log_work", "log_products", "log_load_bytes", "log_sum_bytes", "log_estimate",
    )  # fmt: skip

    def _cheap_rules(self, problem: Any, device: Device, table: Table) -> Mask:
        def narrow(t: Columns) -> Mask:
            columns = ceil_div(problem.q, 8 * t["units"]) * t["units"]
            wasteful = 4 * columns > 5 * ceil_div(problem.q, 8)
            return (t["units"] == 1) | np.logical_not(wasteful)

        return (
            table.by(("units",), narrow)
            & table.by(("bands",), lambda t: common.distinct_bands(problem.p, t["bands"]))
            & super()._cheap_rules(problem, device, table)
        )

    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        splits = t["splits"]
        rules: Mask = (
            (np.maximum(w.blocks, w.tiles + splits) <= common.MAX_INT)
            # Each block has a tile. There are blocks enough for half of the device, and no more
            # than eight to a multiprocessor, as far as there are tiles for them.
            & (splits <= w.tiles)
            & ((splits == 1) | (w.blocks <= 8 * device.sm_count))
            & ((2 * w.blocks >= device.sm_count) | (4 * splits > w.tiles) | (splits == 128))
        )
        return rules

    def launch(self, problem: Problem, row: int) -> Launch:
        p, t, w = problem, self.configs[row], self._one(problem, row)
        splits, reduction = int(t["splits"]), int(t["reduction"])
        defines = (
            *macros(R=p.r, S=p.s),
            dtype_macro(p),
            ("HAS_BIAS", int(p.bias)),
            *common.config_macros(t, _COMPILED),
            *common.agreed_macros(**common.named(w, "threads smem_bytes")),
        )
        scalars = {
            **kernel_sizes(p, "n c h w p q pad_h pad_w"),
            **common.named(w, "band_rows bands q_tiles c_tiles tiles"),
            "splits": splits,
            "reduction": reduction,
        }
        step = self._step(defines, w.blocks, w.threads, w.smem_bytes, scalars)
        return depthwise.with_sums(step, p, splits, reduction)

    def _cut(self, problem: Any, t: Columns) -> Workings:
        w: Any = Workings()
        w.band_rows, w.bands = common.cut(problem.p, t["bands"])
        w.q_tiles = ceil_div(problem.q, 8 * t["units"])
        w.c_tiles = ceil_div(problem.c, t["block_c"])
        w.tiles = problem.n * w.bands * w.q_tiles  # of each channel
        w.blocks = w.c_tiles * t["splits"]
        return w

    @staticmethod
    def _block(table: Table, r: int, s: int, bias: bool) -> Workings:
        t, w = table.columns, Workings()
        units, part = t["units"], t["part"]
        tiles_s, tiles_r = ceil_div(s, 16), ceil_div(r, 8)
        w.threads = 32 * t["block_c"]
        w.operands = (units + 1) // 2 + tiles_s - 1  # of the input row
        w.ring_rows = 8 * tiles_r + part - 1
        in_bytes = part * 8 * (w.operands + 1) * 4
        grad_bytes = w.ring_rows * 16 * (units | 1)
        w.smem_bytes = large.plane_bytes(t, in_bytes) + large.plane_bytes(t, grad_bytes)
        w.products = units / 2 * (tiles_s * tiles_r + bias)  # of a warp and input row
        # ldmatrix instructions of four matrices, and other words from shared memory.
        w.loads = (units + 1) // 2 * (tiles_r / 2) * 10 + 4 * w.operands * 1.5
        # Fitted to what the assembler reports of 31 kernels.
        w.registers = 4.2 * tiles_s * tiles_r + 1.5 * tiles_r + 3 * bias + 60
        w.registers = w.registers + 14 * (t["block_c"] == 16)
        return w

    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Estimate seconds as that of `DepthwiseLarge`, for the multiprocessor with the most blocks
        and a block with the most tiles, plus the time of the reduction."""
        registers = np.minimum(w.registers, large.most_registers(t))
        occupancy = Occupancy.of(device, w.blocks, w.threads, registers, w.smem_bytes)
        ideal_rounds = w.tiles / t["splits"]
        rounds = np.ceil(ideal_rounds)
        met = problem.map(_rows_met)
        steps = np.where(w.bands == 1, np.maximum(met, 1), w.band_rows + problem.r - 1)
        parts = ceil_div(steps, t["part"])
        pairs = steps * (8 * (w.operands + 1) + 4 * t["units"]) + w.ring_rows * 4 * t["units"]
        fullest = occupancy.sm_blocks * device.sm_count * w.threads / 32
        products = rounds * steps * w.products
        work = products + rounds * (steps * (w.loads + 12) + pairs / (8 * 32) * 45 + parts * 30)
        work += common.BLOCK_INSTRUCTIONS
        load_bytes = w.blocks * rounds * pairs * 2 * t["block_c"] * problem.itemsize
        seconds = common.largest(
            problem.map(device.roofline_s),  # although rows of padding are left out
            common.l2_s(load_bytes * (16 // t["block_c"]), device),
            common.products_s(fullest * products, device),
            common.instructions_s(fullest * work * 32, device),
        )
        sum_bytes = 4.0 * problem.filter_elements * t["splits"]
        return {
            **occupancy.features(),
            "q_waste": w.q_tiles * 8 * t["units"] / problem.q,
            "c_waste": w.c_tiles * t["block_c"] / problem.c,
            "bands_cut": w.bands,
            "halo_rows": steps / w.band_rows,
            "halo_columns": 2 * (w.operands + 1) / t["units"],
            "rounds": rounds,
            "round_waste": rounds / ideal_rounds,
            "steps": steps,
            "log_work": np.log2(w.blocks * (w.threads / 32) * work),
            "log_products": np.log2(w.blocks * (w.threads / 32) * products),
            "log_load_bytes": np.log2(load_bytes / problem.minimum_bytes),
            "log_sum_bytes": np.log2(sum_bytes),
            "estimate": seconds
            + common.LAUNCH_S
            + common.waves_s(occupancy.waves, common.WAVE_S, rounds * parts, common.LOAD_S)
            + common.depthwise_adding_s(t["reduction"], sum_bytes, device),
        }


FAMILIES = (DepthwiseLargeWgrad("depthwise_large_wgrad", "wgrad", depthwise.WGRAD_OPERANDS),)
