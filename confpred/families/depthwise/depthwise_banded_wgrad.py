"""Depthwise convolution on tensor cores, gradient of the filter and of the bias: configs, legality,
features and launches of ``depthwise_banded_wgrad.cu``.

The layers are those of ``banded.py`` with windows up to 9 wide. An output pixel takes 16 R
multiply-adds of the tensor cores, as in the forward direction; a channel of a warp has 4 R
accumulators in registers, and 2 R fragments of the gradient for each 16 strips.
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
from confpred.families.depthwise import depthwise_banded as banded
from confpred.families.protocol import Array
from confpred.families.table import Table, Tiled, config_table, crossed
from confpred.problem.conv2d import Problem, dtype_macro, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.operation import Launch

_FIELDS = (*banded.COMPILED, "bands", "splits", "reduction")
_VARYING_FIELDS = tuple(name for name in _FIELDS if name != "stages")
_MAX_WIDTH = 9  # of a window: a diagonal has eight elements
_STAGES = 2  # more were not faster, and take shared memory that other blocks could have


# What the launch decides, not the kernel: bands, splits and the reduction.
_LAUNCHES = tuple(
    (bands, *reduction)
    for bands in (1, 4, 16)
    for reduction in depthwise.reductions((4, 8, 16, 32, 64, 128))
)


def _config_table() -> NDArray[np.void]:
    rows = crossed(banded.TILES, (1, 2), (_STAGES,), (1, 2), _LAUNCHES)
    return config_table(_FIELDS, rows)


_CONFIGS = _config_table()
_WHOLE = Table.of(_CONFIGS)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Tiles, resources and work of some configs on one problem; arrays over these configs."""

    threads: Array
    runs: Array  # of a block
    registers: Array  # an estimate of what the compiler would take
    smem_bytes: Array
    in_items: Array  # items (pairs of pixels of 8 channels) that a thread loads in a step
    grad_items: Array
    products: Array  # tensor-core instructions of a warp and step
    work: Array  # instructions that a warp issues in a step
    in_x: Array  # input columns of a run
    band_rows: Array
    bands: Array
    q_tiles: Array
    c_tiles: Array
    tiles: Array
    blocks: Array


def _lowest_row(problem: Problem) -> int:
    """Return the lowest input row that a block has to walk to."""
    return max(problem.h + problem.padding[0], problem.p * problem.bias)


class DepthwiseBandedWgrad(Tiled):
    """``kernels/depthwise_banded_wgrad.cu``."""

    configs = _CONFIGS
    whole = _WHOLE
    kernel_fields = banded.COMPILED
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
            banded.handles(problem)
            and problem.s <= _MAX_WIDTH
            and problem.filter_elements + problem.c <= common.MAX_INT
        )

    def _first(self, problem: Any, device: Device, table: Table) -> NDArray[np.bool_]:
        return (
            table.by(("block_c", "run"), lambda t: banded.suited(t, problem.c, problem.q))
            & table.by(("bands",), lambda t: common.distinct_bands(problem.p, t["bands"]))
            & table.by(("reduction",), lambda t: common.allowed(t["reduction"], problem))
        )

    def _tiled_rules(
        self, problem: Any, device: Device, t: Mapping[str, Array], tiling: _Tiling
    ) -> NDArray[np.bool_]:
        all_runs, splits = problem.n * tiling.bands * tiling.q_tiles, t["splits"]
        return (
            banded.fits(t, tiling.registers, tiling.smem_bytes, device)
            & banded.addressable(t, problem, tiling.q_tiles * tiling.bands)
            & (np.maximum(tiling.blocks, all_runs + splits * t["strips"]) <= common.MAX_INT)
            & banded.not_oversized(t, all_runs, tiling.band_rows)
            # Each block has a tile. There are blocks enough for half of the device, and no more
            # than eight to a multiprocessor, as far as there are tiles for them.
            & (splits <= tiling.tiles)
            & ((splits == 1) | (tiling.blocks <= 8 * device.sm_count))
            & ((2 * tiling.blocks >= device.sm_count) | (4 * splits > tiling.tiles))
        )

    def launch(self, problem: Problem, row: int) -> Launch:
        p, t, tiling = problem, self.configs[row], picked(self._cut_for(problem, row), 0)
        splits, reduction = int(t["splits"]), int(t["reduction"])
        defines = (
            ("R", p.r),
            ("S", p.s),
            dtype_macro(p),
            ("HAS_BIAS", int(p.bias)),
            *common.config_macros(t, banded.COMPILED),
            *common.agreed_macros(**common.named(tiling, "threads runs smem_bytes")),
        )
        scalars = {
            **kernel_sizes(p, "n c h w p q pad_h pad_w"),
            **common.named(tiling, "band_rows bands q_tiles c_tiles tiles"),
            "splits": splits,
            "reduction": reduction,
        }
        blocks, threads, smem_bytes = tiling.blocks, tiling.threads, tiling.smem_bytes
        step = common.kernel_step(
            "depthwise_banded_wgrad", defines, blocks, threads, smem_bytes, self.operands, scalars
        )
        return depthwise.with_sums(step, p, splits, reduction, int(tiling.c_tiles))

    def _tiling(self, problem: Any, t: Mapping[str, Array]) -> _Tiling:
        r, run, warp_c = problem.r, t["run"], t["warp_c"]
        threads = banded.threads_of(t)
        in_x = 8 * run + problem.s - 1
        band_rows, bands = common.cut(problem.p, t["bands"])
        q_tiles = common.ceil_div(problem.q, 8 * run)
        c_tiles = common.ceil_div(problem.c, t["block_c"])
        in_items, grad_items = banded.items(t, in_x), banded.items(t, 8 * run)
        planes = 2 * (banded.buffer_bytes(t, run + 1, 1) + banded.buffer_bytes(t, run, 0))
        planes += banded.stage_bytes(t, in_items + grad_items)
        sums = t["strips"] // t["warp_strips"] * t["block_c"] * (r * problem.s + problem.bias)
        warp_tiles = t["warp_strips"] // 16
        fragments = warp_c * warp_tiles * t["rows"]
        products = fragments * (r + problem.bias)
        registers = (  # fitted to what the assembler reports of 96 kernels
            warp_c * (r * (4 + 2 * warp_tiles) + warp_tiles + 4 * problem.bias)
            + 4 * in_items
            + 16 * grad_items
            + 49
        )
        # The terms are products, fragments with the window's slide, copies, and the rest.
        work = products + fragments * (4 + 2 * r) + 28 * (in_items + grad_items) + 20
        return _Tiling(
            threads=threads,
            runs=banded.runs(t),
            registers=registers,
            smem_bytes=np.maximum(planes, threads // 32 * 16 * 9 * 4 + 4 * sums),
            in_items=in_items,
            grad_items=grad_items,
            products=products,
            work=work,
            in_x=in_x,
            band_rows=band_rows,
            bands=bands,
            q_tiles=q_tiles,
            c_tiles=c_tiles,
            tiles=common.ceil_div(problem.n * bands * q_tiles, banded.runs(t)),
            blocks=c_tiles * t["splits"],
        )

    def _derived(
        self, problem: Any, device: Device, t: Mapping[str, Array], workings: _Tiling
    ) -> dict[str, NDArray[np.float64]]:
        """Estimate seconds as that of `DepthwiseBanded`, for the multiprocessor with the most
        blocks and a block with the most tiles, plus the time of the reduction."""
        tiling = workings
        registers = np.minimum(tiling.registers, banded.most_registers(t))
        occupancy = Occupancy.of(
            device, tiling.blocks, tiling.threads, registers, tiling.smem_bytes
        )
        ideal_rounds = tiling.tiles / t["splits"]
        rounds = np.ceil(ideal_rounds)
        walked = tiling.band_rows + problem.r - 1
        whole = each(_lowest_row, problem)
        walked = np.where(tiling.bands == 1, np.minimum(walked, whole), walked)
        steps = common.ceil_div(walked, t["rows"])
        pixels = tiling.in_x + 8 * t["run"]
        step_bytes = t["rows"] * banded.runs(t) * pixels * t["block_c"] * problem.itemsize
        in_flight = occupancy.resident * step_bytes
        fullest = occupancy.sm_blocks * device.sm_count * tiling.threads / 32 * rounds * steps
        seconds = np.maximum(
            common.memory_s(problem.minimum_bytes, device, in_flight),
            np.maximum(
                common.products_s(fullest * tiling.products, device),
                common.instructions_s(fullest * tiling.work * 32, device),
            ),
        )
        sum_bytes = 4.0 * problem.filter_elements * t["splits"]
        all_runs = problem.n * tiling.bands * tiling.q_tiles
        return {
            **common.named(tiling, "threads registers smem_bytes in_items grad_items products"),
            **occupancy.features(),
            "q_waste": tiling.q_tiles * t["run"] * 8 / problem.q,
            "c_waste": tiling.c_tiles * t["block_c"] / problem.c,
            "strip_waste": tiling.tiles * t["strips"] / (all_runs * t["run"]),
            "band_rows": tiling.band_rows,
            "bands_cut": tiling.bands,
            "halo_rows": walked / tiling.band_rows,
            "halo_columns": tiling.in_x / (8 * t["run"]),
            "rounds": rounds,
            "round_waste": rounds / ideal_rounds,
            "steps": steps,
            "run_bytes": t["block_c"] * problem.itemsize,
            "bytes_in_flight": in_flight,
            "log_work": np.log2(
                tiling.blocks * (tiling.threads / 32) * rounds * steps * tiling.work
            ),
            "log_load_bytes": np.log2(
                tiling.blocks * rounds * steps * step_bytes / problem.minimum_bytes
            ),
            "log_sum_bytes": np.log2(sum_bytes),
            "estimate": seconds
            + common.LAUNCH_S
            + common.waves_s(occupancy.waves, common.WAVE_S, rounds * steps, common.STEP_S)
            + common.depthwise_adding_s(t["reduction"], sum_bytes, device),
        }


FAMILIES = (DepthwiseBandedWgrad("depthwise_banded_wgrad", "wgrad", depthwise.WGRAD_OPERANDS),)
