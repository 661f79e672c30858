"""The depthwise families on tensor cores whose result is an image: configs, legality, features and
launches of ``depthwise_banded.cu``, for the forward direction and for the gradient of the input.
The parts that ``banded_wgrad.py`` shares are here too.

They serve layers of group width 1, unit stride and dilation, as many filters as channels, windows
up to 11x11, any padding, float16 and bfloat16, and a multiple of 8 channels; the ordinary depthwise
families serve the others.

An output of an R x S window takes 16 R multiply-adds of the tensor cores (24 R from S = 10 on), as
the zeros of the band are multiplied too; ordinary arithmetic takes R S. For a 7x7 window, that is
112 of the at least 1,024 that a multiprocessor does in a clock, against 49 of 128: 0.11 clocks
against 0.38. The memory of an H100 needs 0.3 clocks for the output's 4 bytes. The kernels are then
bound by instructions, most of which move pixels into planes and out of them, and by requests to L2:
with runs of 16 channels the requests are of 32 bytes, half of what a slice could answer, so wider
blocks win where registers allow them.
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
from confpred.families.protocol import Array
from confpred.families.table import Table, Tiled, config_table, crossed
from confpred.problem.conv2d import Problem, dtype_macro
from confpred.problem.device import Device
from confpred.problem.operation import Launch

COMPILED = (
    "block_c", "warp_c", "strips", "warp_strips", "run",
    "rows", "stages", "min_blocks",
)  # fmt: skip
_FIELDS = (*COMPILED, "bands")

#: The shapes of blocks: (channels of a block, channels of a warp, strips of a block, strips of a
#: warp). Other shapes that fit, such as those of more strips, were hardly ever among the fastest of
#: 25 layers (130 random configs each, H200).
BLOCKS = (
    (16, 1, 16, 16), (16, 1, 32, 32), (16, 2, 16, 16), (16, 2, 32, 32),
    (16, 4, 16, 16), (16, 4, 32, 16), (32, 2, 16, 16), (32, 2, 32, 32),
    (32, 4, 16, 16), (32, 4, 32, 16), (64, 4, 16, 16),
)  # fmt: skip
#: The same shapes, each with the strips of a run that leave at most an eighth of a block's strips
#: idle.
TILES = tuple(
    (*block, run)
    for block in BLOCKS
    for run in (1, 2, 3, 4, 5, 7, 8)
    if block[2] % run <= block[2] // 8
)
_BANDS = (1, 2, 4, 8, 16)


def _config_table() -> NDArray[np.void]:
    rows = crossed(TILES, (1, 2), (2, 4), (1, 2, 3), _BANDS)
    return config_table(_FIELDS, rows)


_CONFIGS = _config_table()
_WHOLE = Table.of(_CONFIGS)


def handles(problem: Problem) -> bool:
    """Whether `problem` is a layer that the kernels compute, whatever its direction."""
    return (
        problem.dtype != "float32"
        and depthwise.handles(problem)
        and problem.stride == (1, 1)
        and depthwise.dilation(problem) == (1, 1)
        and problem.k == problem.c
        and problem.c % 8 == 0  # copies are of 16 bytes
    )


# ``depthwise_banded.cuh`` works all of this out from its macros too, and the kernels assert that
# the threads, the runs and the shared memory of a block are the same. `t` has the columns of some
# configs.


def threads_of(t: Mapping[str, Array]) -> Array:
    """Threads of a block."""
    return t["block_c"] // t["warp_c"] * (t["strips"] // t["warp_strips"]) * 32


def runs(t: Mapping[str, Array]) -> Array:
    """Return the runs of a block."""
    return t["strips"] // t["run"]


def items(t: Mapping[str, Array], columns: Array) -> Array:
    """Items that a thread copies in a step, for `columns` of a run; an item is two pixels of 8
    channels."""
    pairs = t["rows"] * runs(t) * (t["block_c"] // 8) * common.ceil_div(columns, 2)
    return common.ceil_div(pairs, threads_of(t))


def buffer_bytes(t: Mapping[str, Array], units: Array, spare: int) -> Array:
    """Bytes of shared memory for the rows of a step: `units` eights of columns for each run and, if
    strips are idle, one eight more for each of them and `spare` others."""
    pitch = np.where(t["run"] == 1, units | 1, units)
    idle = t["strips"] % t["run"]
    eights = runs(t) * pitch + np.where(idle > 0, idle + spare, 0)
    return t["rows"] * (t["block_c"] * 16 * eights + 128)


def stage_bytes(t: Mapping[str, Array], copied: Array) -> Array:
    """Bytes of shared memory for what is copied ahead: `copied` items of each thread and step."""
    return t["stages"] * copied * threads_of(t) * 32


def most_registers(t: Mapping[str, Array]) -> Array:
    """Return the registers that a thread can have if a multiprocessor is to hold ``min_blocks``
    blocks."""
    share = Device.regs_per_sm // (threads_of(t) * t["min_blocks"]) // 8 * 8
    return np.minimum(share, common.MAX_REGISTERS)


def fits(
    t: Mapping[str, Array], registers: Array, smem_bytes: Array, device: Device
) -> NDArray[np.bool_]:
    """Which configs a multiprocessor has room for, with as many blocks as each of them asks for.

    With a bound on registers an eighth below what it would take, the compiler spills few or none;
    where it would take fewer anyway, the bound changes nothing.
    """
    most, blocks = most_registers(t), t["min_blocks"]
    return (
        (registers <= 1.15 * most)
        & ((blocks == 1) | (registers > 0.95 * most))
        & (smem_bytes <= device.smem_per_block)
        & (blocks * (smem_bytes + device.smem_reserved_per_block) <= device.smem_per_sm)
        & (blocks * threads_of(t) <= 32 * device.warps_per_sm)
        & (blocks <= device.blocks_per_sm)
    )


def _padded_image(problem: Problem) -> int:
    """Most elements that offsets in an image may count, padding included."""
    p = problem
    return p.c * (max(p.h, p.p) + 256) * (max(p.w, p.q) + 256)


def addressable(t: Mapping[str, Array], problem: Any, image_runs: Array) -> NDArray[np.bool_]:
    """Which configs can count the offsets from a block's first image in 32 bits, padding included.

    Args:
        t: the configs.
        problem: the layer, or that of each config.
        image_runs: how many runs an image has.
    """
    images = common.ceil_div(runs(t), image_runs) + 1
    return images * each(_padded_image, problem) <= common.MAX_INT


def suited(t: Mapping[str, Array], channels: Any, width: Any) -> NDArray[np.bool_]:
    """Which kernels are not meant for a larger layer: a block has less than twice the layer's
    channels, or the fewest that there are, and at most a quarter more columns are computed than
    necessary. Larger blocks do the work of smaller ones, only more slowly.

    Args:
        t: configs.
        channels: the layer's channels.
        width: the columns that are cut into runs.
    """
    columns = common.ceil_div(width, 8 * t["run"]) * t["run"]
    return ((4 * columns <= 5 * common.ceil_div(width, 8)) | (t["run"] == 1)) & (
        (t["block_c"] < 2 * channels) | (t["block_c"] == 16)
    )


def not_oversized(t: Mapping[str, Array], all_runs: Array, band_rows: Array) -> NDArray[np.bool_]:
    """Which configs are less than twice as large as what they cover, or the smallest.

    Args:
        t: the configs.
        all_runs: runs of all images together.
        band_rows: rows of a band.
    """
    return ((runs(t) < 2 * all_runs) | (t["strips"] == 16)) & (
        (t["rows"] < 2 * band_rows) | (t["rows"] == 1)
    )


_SHARED = (
    "log_n", "log_k", "log_p", "log_q", "r", "s", "bfloat16", "log_bytes", "log_intensity",
    *_FIELDS,
    "threads", "registers", "smem_bytes", "in_items", "out_items", "products",
    "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste", "q_waste", "c_waste",
    "strip_waste", "band_rows", "bands_cut", "row_tail", "halo_rows", "halo_columns", "steps",
    "run_bytes", "pixel_alignment", "bytes_in_flight", "log_work", "log_load_bytes",
    "log_estimate",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Image:
    """A layer as ``depthwise_banded.cu`` sees it: what it reads, what it writes, and the padding,
    which is negative where an input gradient leaves the border of the output's gradient unread."""

    size_in: tuple[int, int]
    size_out: tuple[int, int]
    padding: tuple[int, int]


def _image(problem: Problem) -> _Image:
    p = problem
    if p.direction == "fprop":
        return _Image((p.h, p.w), (p.p, p.q), p.padding)
    turned = (p.r - 1 - p.padding[0], p.s - 1 - p.padding[1])
    return _Image((p.p, p.q), (p.h, p.w), turned)


def _above(problem: Problem) -> int:
    """Rows of padding above the image that a window meets."""
    return min(max(_image(problem).padding[0], 0), problem.r - 1)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Tiles, resources and work of some configs on one problem; arrays over these configs."""

    threads: Array
    runs: Array  # of a block
    registers: Array  # an estimate of what the compiler would take
    smem_bytes: Array
    in_items: Array  # items (pairs of pixels of 8 channels) that a thread loads in a step
    out_items: Array  # items that it stores in a step
    products: Array  # tensor-core instructions of a warp and step
    work: Array  # instructions that a warp issues in a step
    in_x: Array  # input columns of a run
    band_rows: Array
    bands: Array
    q_tiles: Array
    c_tiles: Array
    tiles: Array

    @property
    def blocks(self) -> Array:
        return self.tiles * self.c_tiles


class DepthwiseBanded(Tiled):
    """One direction of ``kernels/depthwise_banded.cu``."""

    configs = _CONFIGS
    whole = _WHOLE
    kernel_fields = COMPILED
    shared_features = _SHARED

    def _handles(self, problem: Problem) -> bool:
        return handles(problem)

    def _first(self, problem: Any, device: Device, table: Table) -> NDArray[np.bool_]:
        height, width = each(_image, problem).size_out
        return table.by(("block_c", "run"), lambda t: suited(t, problem.c, width)) & table.by(
            ("bands",), lambda t: common.distinct_bands(height, t["bands"])
        )

    def _tiled_rules(
        self, problem: Any, device: Device, t: Mapping[str, Array], tiling: _Tiling
    ) -> NDArray[np.bool_]:
        all_runs = problem.n * tiling.bands * tiling.q_tiles
        return (
            fits(t, tiling.registers, tiling.smem_bytes, device)
            & addressable(t, problem, tiling.q_tiles * tiling.bands)
            & (np.maximum(tiling.blocks, all_runs + t["strips"]) <= common.MAX_INT)
            & not_oversized(t, all_runs, tiling.band_rows)
        )

    def launch(self, problem: Problem, row: int) -> Launch:
        p, tiling, image = problem, picked(self._cut_for(problem, row), 0), _image(problem)
        defines = (
            ("R", p.r),
            ("S", p.s),
            ("FLIP", int(self.direction == "dgrad")),
            dtype_macro(p),
            *common.epilogue_macros(p),
            *common.config_macros(self.configs[row], COMPILED),
            *common.agreed_macros(**common.named(tiling, "threads runs smem_bytes")),
        )
        scalars = {
            "n": p.n,
            "c": p.c,
            "h": image.size_in[0],
            "w": image.size_in[1],
            "p": image.size_out[0],
            "q": image.size_out[1],
            "pad_h": image.padding[0],
            "pad_w": image.padding[1],
            **common.named(tiling, "band_rows bands q_tiles c_tiles"),
        }
        blocks, threads, smem_bytes = tiling.blocks, tiling.threads, tiling.smem_bytes
        step = common.kernel_step(
            "depthwise_banded", defines, blocks, threads, smem_bytes, self.operands, scalars
        )
        return Launch((step,))

    def _tiling(self, problem: Any, t: Mapping[str, Array]) -> _Tiling:
        r, s, run = problem.r, problem.s, t["run"]
        height, width = each(_image, problem).size_out
        threads = threads_of(t)
        span = (s + 14) // 8
        in_x = 8 * run + s - 1
        band_rows, bands = common.cut(height, t["bands"])
        q_tiles = common.ceil_div(width, 8 * run)
        in_items, out_items = items(t, in_x), items(t, 8 * run)
        warp_tiles = t["warp_strips"] // 16
        fragments = t["warp_c"] * warp_tiles * t["rows"]  # of a warp and step
        products = fragments * r * np.where(span < 3, 1, 2)
        registers = (  # fitted to what the assembler reports of 96 kernels
            t["warp_c"] * (r * (span + 4 * warp_tiles) + warp_tiles)
            + 3 * in_items
            + (13 + 8 * problem.residual) * out_items
            + 29
        )
        work = products + fragments * 14 + in_items * 28 + out_items * 28 + 20
        return _Tiling(
            threads=threads,
            runs=runs(t),
            registers=registers,
            smem_bytes=2 * (buffer_bytes(t, run + span - 1, span - 1) + buffer_bytes(t, run, 0))
            + stage_bytes(t, in_items)
            + t["block_c"] * r * s * 2,
            in_items=in_items,
            out_items=out_items,
            products=products,
            work=work,
            in_x=in_x,
            band_rows=band_rows,
            bands=bands,
            q_tiles=q_tiles,
            c_tiles=common.ceil_div(problem.c, t["block_c"]),
            tiles=common.ceil_div(problem.n * bands * q_tiles, runs(t)),
        )

    def _derived(
        self, problem: Any, device: Device, t: Mapping[str, Array], workings: _Tiling
    ) -> dict[str, NDArray[np.float64]]:
        """Estimate seconds as the largest of three times, plus a latency for each wave and step:
        the time of device memory, whose rate is bounded where too little is in flight, and the
        times of the tensor cores and of the instructions of the multiprocessor with the most
        blocks."""
        tiling = workings
        image = each(_image, problem)
        (height, width), size_in = image.size_out, image.size_in
        registers = np.minimum(tiling.registers, most_registers(t))
        occupancy = Occupancy.of(
            device, tiling.blocks, tiling.threads, registers, tiling.smem_bytes
        )
        # With one band, rows of padding above the image are left out; those below it only finish
        # the rows above them.
        whole, above = tiling.bands == 1, each(_above, problem)
        walked = tiling.band_rows + problem.r - 1 - whole * above
        steps = common.ceil_div(walked, t["rows"])
        inside = np.where(whole, np.minimum(size_in[0] + image.padding[0] - above, walked), walked)
        computed = np.minimum(common.ceil_div(inside, t["rows"]), steps)
        step_bytes = t["rows"] * runs(t) * tiling.in_x * t["block_c"] * problem.itemsize
        in_flight = occupancy.resident * step_bytes
        fullest = occupancy.sm_blocks * device.sm_count * tiling.threads / 32
        block_work = computed * tiling.work + (steps - computed) * 0.5 * tiling.work
        block_work += common.BLOCK_INSTRUCTIONS
        seconds = np.maximum(
            common.memory_s(problem.minimum_bytes, device, in_flight),
            np.maximum(
                common.products_s(fullest * computed * tiling.products, device),
                common.instructions_s(fullest * block_work * 32, device),
            ),
        )
        all_runs = problem.n * tiling.bands * tiling.q_tiles
        return {
            "log_p": np.log2(height),
            "log_q": np.log2(width),
            **common.named(tiling, "threads registers smem_bytes in_items out_items products"),
            **occupancy.features(),
            "q_waste": tiling.q_tiles * t["run"] * 8 / width,
            "c_waste": tiling.c_tiles * t["block_c"] / problem.c,
            "strip_waste": tiling.tiles * t["strips"] / (all_runs * t["run"]),
            "band_rows": tiling.band_rows,
            "bands_cut": tiling.bands,
            # The rows that are left for the last band, as a fraction of a whole band.
            "row_tail": (height - (tiling.bands - 1) * tiling.band_rows) / tiling.band_rows,
            "halo_rows": walked / tiling.band_rows,
            "halo_columns": tiling.in_x / (8 * t["run"]),
            "steps": steps,
            "run_bytes": t["block_c"] * problem.itemsize,
            "bytes_in_flight": in_flight,
            "log_work": np.log2(tiling.blocks * (tiling.threads / 32) * block_work),
            "log_load_bytes": np.log2(
                tiling.blocks * computed * step_bytes / problem.minimum_bytes
            ),
            "estimate": seconds
            + common.LAUNCH_S
            + common.waves_s(occupancy.waves, common.WAVE_S, steps, common.STEP_S),
        }


_EPILOGUE = ("bias", "residual", "activation")
FAMILIES = (
    DepthwiseBanded("depthwise_banded_fprop", "fprop", depthwise.FPROP_OPERANDS, _EPILOGUE),
    DepthwiseBanded("depthwise_banded_dgrad", "dgrad", depthwise.DGRAD_OPERANDS),
)
