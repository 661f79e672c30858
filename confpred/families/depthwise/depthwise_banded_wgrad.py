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
from confpred.families.batch import each, narrowed, picked
from confpred.families.common import Occupancy
from confpred.families.depthwise import depthwise_banded as banded
from confpred.families.protocol import Array, Rows
from confpred.families.table import Table, Tabled, config_table, crossed
from confpred.problem.conv2d import CONVOLUTION, Problem, dtype_macro, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.operation import KernelSpec, Launch, Step

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
    """The lowest input row that a block has to walk to."""
    return max(problem.h + problem.padding[0], problem.p * problem.bias)


class DepthwiseBandedWgrad(Tabled):
    """See the module's docstring and ``kernels/depthwise_banded_wgrad.cu``."""

    name = "depthwise_banded_wgrad"
    operation = CONVOLUTION
    configs = _CONFIGS
    whole = _WHOLE
    kernel_fields = banded.COMPILED
    feature_names: tuple[str, ...] = (
        "log_n", "log_c", "log_p", "log_q", "r", "s", "bfloat16", "bias", "log_bytes",
        "log_intensity",
        *_VARYING_FIELDS,
        "threads", "registers", "smem_bytes", "in_items", "grad_items", "products",
        "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste", "q_waste",
        "c_waste", "strip_waste", "band_rows", "bands_cut", "halo_rows", "halo_columns",
        "rounds", "round_waste", "steps", "run_bytes", "pixel_alignment", "bytes_in_flight",
        "log_work", "log_load_bytes", "log_sum_bytes", "log_estimate",
    )  # fmt: skip

    def serves(self, problem: Problem) -> bool:
        return (
            problem.direction == "wgrad"
            and banded.handles(problem)
            and problem.s <= _MAX_WIDTH
            and problem.filter_elements + problem.c <= common.MAX_INT
        )

    def offered(self, problem: Any, device: Device, table: Table) -> tuple[Any, Rows, Any]:
        # What needs no tiling is checked first, so that most rows never need one.
        first = (
            table.by(("block_c", "run"), lambda t: banded.suited(t, problem.c, problem.q))
            & table.by(("bands",), lambda t: common.distinct_bands(problem.p, t["bands"]))
            & table.by(("reduction",), lambda t: common.allowed(t["reduction"], problem))
        )
        problem, at = narrowed(problem, np.arange(len(table.rows)), first)
        t = table.at(at)
        tiling = self._tiling(problem, t)
        all_runs, splits = problem.n * tiling.bands * tiling.q_tiles, t["splits"]
        legal = (
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
        problem, at = narrowed(problem, at, legal)
        return problem, at, picked(tiling, legal)

    def _workings(self, problem: Any, table: Table, at: Rows) -> _Tiling:
        return self._tiling(problem, table.at(at))

    def launch(self, problem: Problem, row: int) -> Launch:
        t = self.configs[row]
        tiling = self._tiling(problem, _WHOLE.at(np.array([row])))
        splits, reduction = int(t["splits"]), int(t["reduction"])
        spec = KernelSpec(
            file="depthwise_banded_wgrad.cu",
            entry="depthwise_banded_wgrad",
            defines=(
                ("R", problem.r),
                ("S", problem.s),
                dtype_macro(problem),
                ("HAS_BIAS", int(problem.bias)),
                *common.config_macros(t, banded.COMPILED),
                *common.agreed_macros(
                    threads=tiling.threads[0], runs=tiling.runs[0], smem_bytes=tiling.smem_bytes[0]
                ),
            ),
        )
        step = Step(
            spec,
            grid=(int(tiling.blocks[0]), 1, 1),
            block=(int(tiling.threads[0]), 1, 1),
            smem_bytes=int(tiling.smem_bytes[0]),
            operands=depthwise.WGRAD_OPERANDS,
            scalars={
                **kernel_sizes(problem, "n c h w p q pad_h pad_w"),
                "band_rows": int(tiling.band_rows[0]),
                "bands": int(tiling.bands[0]),
                "q_tiles": int(tiling.q_tiles[0]),
                "c_tiles": int(tiling.c_tiles[0]),
                "tiles": int(tiling.tiles[0]),
                "splits": splits,
                "reduction": reduction,
            },
        )
        return depthwise.with_sums(step, problem, splits, reduction, int(tiling.c_tiles[0]))

    def _tiling(self, problem: Any, t: Mapping[str, Array]) -> _Tiling:
        """How `problem` is cut into blocks, and what a block takes and does. The kernel works some
        of this out from its macros too, and asserts that both agree (see `launch`)."""
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
        """How each config would run `problem`: the derived features, and the estimated seconds.

        The estimate is that of `DepthwiseBanded`, for the multiprocessor with the most blocks and a
        block with the most tiles, plus the time of the reduction.
        """
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
            "threads": tiling.threads,
            "registers": tiling.registers,
            "smem_bytes": tiling.smem_bytes,
            "in_items": tiling.in_items,
            "grad_items": tiling.grad_items,
            "products": tiling.products,
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


FAMILIES = (DepthwiseBandedWgrad(),)
