"""Depthwise convolution on tensor cores, gradient of the filter and of the bias: configs, legality,
features and launches of ``depthwise_banded_wgrad.cu``.

The layers are those of ``depthwise_banded.py`` with filters up to 9 wide. An output pixel takes
16 R multiply-adds of the tensor cores, as in the forward direction; a channel of a warp has 4 R
accumulators in registers, and 2 R fragments of the gradient for each 16 strips.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, depthwise
from confpred.families.batch import Workings
from confpred.families.common import Occupancy, ceil_div, macros
from confpred.families.depthwise import depthwise_banded as banded
from confpred.families.protocol import Columns, Floats, Mask
from confpred.families.table import Table, config_table, crossed
from confpred.problem.conv2d import Problem, dtype_macro, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.operation import Launch

_FIELDS = (*banded.COMPILED, "bands", "splits", "reduction")
_VARYING_FIELDS = tuple(name for name in _FIELDS if name != "stages")
_MAX_WIDTH = 9  # of a filter: a diagonal has eight elements
_STAGES = 2  # more were not faster, and take shared memory that other blocks could have


# Decided by the launch, not the kernel: bands, splits and the reduction.
_LAUNCHES = tuple(
    (bands, *reduction)
    for bands in (1, 4, 16)
    for reduction in depthwise.reductions((4, 8, 16, 32, 64, 128))
)


def _config_table() -> NDArray[np.void]:
    rows = crossed(banded.TILES, (1, 2), (_STAGES,), (1, 2), _LAUNCHES)
    return config_table(_FIELDS, rows)


def _lowest_row(problem: Problem) -> int:
    """Return the lowest input row that a block has to walk to."""
    return max(problem.h + problem.padding[0], problem.p * problem.bias)


class DepthwiseBandedWgrad(banded.Banded):
    """``kernels/depthwise_banded_wgrad.cu``."""

    configs = _config_table()
    kernel = "depthwise_banded_wgrad"
    shared_features = (
        "log_n", "log_c", "log_p", "log_q", "r", "s", "bfloat16", "bias", "log_bytes",
        "log_intensity",
        *_VARYING_FIELDS,
        "threads", "registers", "smem_bytes", "in_items", "grad_items", "products",
        "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste", "q_waste",
        "c_waste", "strip_waste", "band_rows", "bands_cut", "halo_rows", "halo_columns",
        "rounds", "round_waste", "steps", "run_bytes", "pixel_alignment", "bytes_in_flight",
        "log_work", "log_load_bytes", "log_sum_bytes", "log_estimate",
    )  # fmt: skip

    def _handles(self, problem: Problem) -> bool:
        return (
            super()._handles(problem)
            and problem.s <= _MAX_WIDTH
            and problem.filter_elements + problem.c <= common.MAX_INT
        )

    def _walked(self, problem: Any) -> tuple[Any, Any]:
        return problem.p, problem.q

    def _cheap_rules(self, problem: Any, device: Device, table: Table) -> Mask:
        added = table.by(("reduction",), lambda t: common.allowed(t["reduction"], problem))
        return added & super()._cheap_rules(problem, device, table)

    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        splits = t["splits"]
        return (
            banded.rules(problem, t, w, splits)
            # Each block has a tile. There are blocks enough for half of the device, and no more
            # than eight to a multiprocessor, as far as there are tiles for them.
            & (splits <= w.tiles)
            & ((splits == 1) | (w.blocks <= 8 * device.sm_count))
            & ((2 * w.blocks >= device.sm_count) | (4 * splits > w.tiles))
        )

    def _sizes(self, problem: Problem, w: Any) -> dict[str, int]:
        """Return the kernel's scalars that say where its blocks walk."""
        return {
            **kernel_sizes(problem, "n c h w p q pad_h pad_w"),
            **common.named(w, "band_rows bands q_tiles c_tiles tiles"),
        }

    def launch(self, problem: Problem, row: int) -> Launch:
        p, t, w = problem, self.configs[row], self._one(problem, row)
        splits, reduction = int(t["splits"]), int(t["reduction"])
        defines = (
            *macros(R=p.r, S=p.s),
            dtype_macro(p),
            ("HAS_BIAS", int(p.bias)),
            *common.config_macros(t, banded.COMPILED),
            *common.agreed_macros(**common.named(w, "threads runs smem_bytes")),
        )
        scalars = {**self._sizes(p, w), "splits": splits, "reduction": reduction}
        step = self._step(defines, w.blocks, w.threads, w.smem_bytes, scalars)
        return depthwise.with_sums(step, p, splits, reduction, int(w.c_tiles))

    def _cut(self, problem: Any, t: Columns) -> Workings:
        w = banded.cut(problem, t, *self._walked(problem))
        w.blocks = w.c_tiles * t["splits"]
        return w

    @staticmethod
    def _block(table: Table, r: int, s: int, bias: bool, residual: bool) -> Workings:
        t = table.columns
        w, run, warp_c = banded.block(t, s), t["run"], t["warp_c"]
        w.grad_items = w.out_items
        planes = 2 * (banded.buffer_bytes(t, run + 1, 1) + banded.buffer_bytes(t, run, 0))
        planes += banded.stage_bytes(t, w.in_items + w.grad_items)
        sums = t["strips"] // t["warp_strips"] * t["block_c"] * (r * s + bias)
        w.smem_bytes = np.maximum(planes, w.threads // 32 * 16 * 9 * 4 + 4 * sums)
        warp_tiles = t["warp_strips"] // 16
        fragments = warp_c * warp_tiles * t["rows"]
        w.products = fragments * (r + bias)  # tensor-core instructions of a warp and step
        w.registers = (  # fitted to what the assembler reports of 96 kernels
            warp_c * (r * (4 + 2 * warp_tiles) + warp_tiles + 4 * bias)
            + 4 * w.in_items
            + 16 * w.grad_items
            + 49
        )
        # Instructions that a warp issues in a step: products, fragments with the filter's slide,
        # copies, and others.
        copies = 28 * (w.in_items + w.grad_items)
        w.work = w.products + fragments * (4 + 2 * r) + copies + 20
        return w

    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Estimate seconds as that of `DepthwiseBanded`, for the multiprocessor with the most
        blocks and a block with the most tiles, plus the time of the reduction."""
        registers = np.minimum(w.registers, banded.most_registers(t))
        occupancy = Occupancy.of(device, w.blocks, w.threads, registers, w.smem_bytes)
        ideal_rounds = w.tiles / t["splits"]
        rounds = np.ceil(ideal_rounds)
        walked = w.band_rows + problem.r - 1
        lowest = np.minimum(walked, problem.map(_lowest_row))
        walked = np.where(w.bands == 1, lowest, walked)
        steps = ceil_div(walked, t["rows"])
        pixels = w.in_x + 8 * t["run"]
        step_bytes = t["rows"] * w.runs * pixels * t["block_c"] * problem.itemsize
        in_flight = occupancy.resident * step_bytes
        fullest = occupancy.sm_blocks * device.sm_count * w.threads / 32 * rounds * steps
        seconds = common.largest(
            common.memory_s(problem.minimum_bytes, device, in_flight),
            common.products_s(fullest * w.products, device),
            common.instructions_s(fullest * w.work * 32, device),
        )
        sum_bytes = 4.0 * problem.filter_elements * t["splits"]
        loaded = w.blocks * rounds * steps * step_bytes
        return {
            **occupancy.features(),
            **banded.features(problem, t, w, problem.q, walked),
            "rounds": rounds,
            "round_waste": rounds / ideal_rounds,
            "steps": steps,
            "bytes_in_flight": in_flight,
            "log_work": np.log2(w.blocks * (w.threads / 32) * rounds * steps * w.work),
            "log_load_bytes": np.log2(loaded / problem.minimum_bytes),
            "log_sum_bytes": np.log2(sum_bytes),
            "estimate": seconds
            + common.LAUNCH_S
            + common.waves_s(occupancy.waves, common.WAVE_S, rounds * steps, common.STEP_S)
            + common.depthwise_adding_s(t["reduction"], sum_bytes, device),
        }


FAMILIES = (DepthwiseBandedWgrad("depthwise_banded_wgrad", "wgrad", depthwise.WGRAD_OPERANDS),)
