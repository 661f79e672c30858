"""Families of ``kernels/grouped_rows.cu``: configs, legality, features, launch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, grouped
from confpred.families.batch import Workings
from confpred.families.common import Occupancy, ceil_div, macros
from confpred.families.grouped import Pair, describe_axes
from confpred.families.protocol import Columns, Floats, Mask
from confpred.families.table import Shaped, Table, config_table
from confpred.problem.conv2d import Problem, dtype_macro
from confpred.problem.device import Device
from confpred.problem.operation import Launch

#: (images, columns) of a block: tensor-core tiles of 16 pixels that real widths fill well.
_PIXEL_ROWS = (
    (2, 8), (4, 8),
    (1, 14), (2, 14), (4, 14),
    (1, 16), (2, 16), (4, 16),
    (1, 28), (2, 28),
    (1, 32), (2, 32),
    (1, 64),
)  # fmt: skip
#: (channels, warps along them) of blocks for layers whose channels are no multiple of 64, as in
#: many networks for small devices: blocks of 64 would be partly idle.
_ODD_CHANNELS = ((24, 3), (48, 3), (80, 5), (96, 6))
#: How many bands the output's rows are cut into; a block computes one.
_BANDS = (1, 2, 4, 8, 16, 32)
_COMPILED = ("block_n", "block_q", "block_c", "warps_c", "warps_m", "stages", "filter_shared")
_FIELDS = (*_COMPILED, "bands")


def _config_table() -> NDArray[np.void]:
    """Return the config space. Configs that are left out never won by a percent where everything
    was measured.

    Blocks of eight warps are for filters above 3x3 at width 64: their filter takes most of a
    multiprocessor's shared memory, which leaves room for one block. They come second in the table;
    blocks whose channels are no power of two come last.
    """
    few: list[tuple[int, ...]] = []
    many: list[tuple[int, ...]] = []
    odd: list[tuple[int, ...]] = []
    channels = (*itertools.product((16, 32, 64), (1, 2, 4)), *_ODD_CHANNELS)
    for pixel_row, (block_c, warps_c), warps_m, stages, filter_shared in itertools.product(
        _PIXEL_ROWS, channels, (1, 2, 4), (3, 5), (0, 1)
    ):
        block_n, block_q = pixel_row
        tiles = common.ceil_div(block_n * block_q, 16)
        warps = warps_c * warps_m
        warp_channels = block_c // warps_c
        is_odd = (block_c, warps_c) in _ODD_CHANNELS
        if is_odd and warps_m > 1:
            continue
        if tiles % warps_m or warps > 8 or (warps == 1 and tiles > 1):
            continue
        if not 8 <= warp_channels <= 32 or tiles // warps_m * warp_channels > 64:
            continue  # a warp computes one to eight tensor-core tiles of 16 pixels x 8 channels
        if warps > 4 and not is_odd and (block_c < 64 or not filter_shared):
            continue
        # These configs are legal for no filter, by the rules in `_shape`: a block has whole groups,
        # so fewer channels, or a count that is no power of two, mean narrower groups.
        if (block_c < 64 or is_odd) and (block_q == 28 or pixel_row == (4, 14)):
            continue
        if block_c < 32 and (warps_m == 4 or tiles // warps_m * warp_channels > 32):
            continue
        if warp_channels == 8 and filter_shared:
            continue
        rows = odd if is_odd else many if warps > 4 else few
        kernel = (block_n, block_q, block_c, warps_c, warps_m, stages, filter_shared)
        rows += [(*kernel, bands) for bands in _BANDS]
    return config_table(_FIELDS, few + many + odd)


_SHARED_FEATURES = (
    "log_n", "log_c", "log_p", "log_q", "r", "s", "group_width", "log_bytes",
    "log_intensity", "bfloat16", "stride_h", "stride_w", "dilation_h", "dilation_w",
    *_FIELDS,
    "threads", "warp_tiles", "warp_groups", "smem_bytes", "registers", "loads", "products",
    "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste",
    "q_waste", "n_waste", "c_waste", "halo_rows", "halo_columns", "steps", "bytes_in_flight",
    "q_tail", "n_tail", "c_tail", "row_tail", "c_tiles", "bands_cut", "band_rows",
    "log_blocks_an_sm", "rounds", "log_images_at_once", "pixel_alignment",
    "log_load_bytes", "log_products", "log_estimate",
)  # fmt: skip


class GroupedRows(Shaped):
    """One direction of ``kernels/grouped_rows.cu``."""

    configs = _config_table()
    kernel = "grouped_rows"
    kernel_fields = _COMPILED
    shared_features = _SHARED_FEATURES

    def _handles(self, problem: Problem) -> bool:
        return grouped.handles(problem)

    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        rows, columns = problem.map(describe_axes)
        return (
            (t["block_n"] * problem.map(_image_elements) <= common.MAX_INT)
            & (w.blocks <= common.MAX_INT)
            & common.well_filled(16, (t["block_n"], problem.n), (t["block_q"], columns.positions))
            & (
                (t["block_c"] < 2 * problem.c)
                | (t["block_c"] <= np.maximum(16, problem.group_width))
            )
            & (~grouped.is_odd(t["block_c"]) | grouped.fits_odd_channels(t["block_c"], problem.c))
            & common.distinct_bands(rows.positions, t["bands"])
        )

    def _cut(self, problem: Any, t: Columns) -> Workings:
        w: Any = Workings()
        rows, columns = problem.map(describe_axes)
        w.band_rows, w.bands = common.cut(rows.positions, t["bands"])
        w.n_tiles = ceil_div(problem.n, t["block_n"])
        w.q_tiles = ceil_div(columns.positions, t["block_q"])
        w.c_tiles = ceil_div(problem.c, t["block_c"])
        # Blocks that share the images of a tile: each lattice has blocks of its own.
        w.image_blocks = w.bands * w.q_tiles * w.c_tiles * (rows.out_step * columns.out_step)
        w.blocks = w.n_tiles * w.image_blocks
        return w

    def _shape(self, problem: Problem, table: Table) -> Any:
        p, (rows, columns) = problem, describe_axes(problem)
        down, up = (rows.down, columns.down), (rows.up, columns.up)
        dgrad = p.direction == "dgrad"
        return table.kept(_shape, p.group_width, p.r, p.s, down, up, dgrad, p.residual)

    def launch(self, problem: Problem, row: int) -> Launch:
        p, w = problem, self._one(problem, row)
        rows, columns = describe_axes(p)
        defines = (
            *macros(DGRAD=int(p.direction == "dgrad"), GW=p.group_width, R=p.r, S=p.s),
            *macros(STRIDE_H=max(rows.down, rows.up), STRIDE_W=max(columns.down, columns.up)),
            dtype_macro(p),
            *common.epilogue_macros(p),
            *common.config_macros(self.configs[row], _COMPILED),
            *common.agreed_macros(threads=w.threads, smem_bytes=w.smem_bytes),
        )
        scalars = {
            "n": p.n,
            "c": p.c,
            **common.image_scalars(p),
            **rows.scalars("h"),
            **columns.scalars("w"),
            "band_rows": w.band_rows * rows.up,
            **common.named(w, "bands q_tiles c_tiles"),
        }
        return Launch((self._step(defines, w.blocks, w.threads, w.smem_bytes, scalars),))

    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Estimate seconds as the largest of three times, stretched by the waste of the last wave:
        those of device memory, of the copies from L2 into shared memory with their halos, and of
        the tensor cores; plus a fixed latency for each row of a block that cannot be hidden."""
        down, across = problem.map(describe_axes)
        registers = np.minimum(w.registers, common.MAX_REGISTERS)
        occupancy = Occupancy.of(device, w.blocks, w.threads, registers, w.smem_bytes)
        first_steps = -(-(problem.r - 1) // down.up)  # before the first row of a band is finished
        steps = down.down * (w.band_rows - 1) + 1 + first_steps
        loaded = w.blocks * steps * (t["block_n"] * w.row_x * t["block_c"] * 2.0)
        products = w.blocks * steps * w.products * (w.threads // 32.0)
        seconds = common.largest(
            problem.minimum_bytes / device.dram_bytes_per_s,
            common.l2_s(loaded, device),
            common.products_s(products, device),
            # Where one filter covers the whole image, padded groups may need fewer operations than
            # are counted; but no estimate may be below the roofline.
            problem.map(device.roofline_s),
        )
        _, (height, width) = problem.map(common.image_sizes)
        at_once = np.minimum(device.sm_count * occupancy.per_sm, w.blocks) / w.image_blocks
        return {
            "log_p": np.log2(height),
            "log_q": np.log2(width),
            "registers": registers,
            **occupancy.features(),
            "q_waste": w.q_tiles * t["block_q"] / across.positions,
            "n_waste": w.n_tiles * t["block_n"] / problem.n,
            "c_waste": w.c_tiles * t["block_c"] / problem.c,
            # The remainder for the last block of each dimension, as a fraction of a whole block.
            "q_tail": across.positions % t["block_q"] / t["block_q"],
            "n_tail": problem.n % t["block_n"] / t["block_n"],
            "c_tail": problem.c % t["block_c"] / t["block_c"],
            "row_tail": (down.positions - (w.bands - 1) * w.band_rows) / w.band_rows,
            "bands_cut": w.bands,
            "log_blocks_an_sm": np.log2(occupancy.sm_blocks),
            "rounds": occupancy.rounds,
            "log_images_at_once": np.log2(at_once),
            "halo_rows": steps / (w.band_rows * down.down),
            "halo_columns": w.row_x / (t["block_q"] * across.down),
            "steps": steps,
            "bytes_in_flight": occupancy.resident * (t["stages"] - 1) * w.stage_bytes,
            "log_load_bytes": np.log2(loaded / problem.minimum_bytes),
            "log_products": np.log2(products),
            "estimate": seconds * occupancy.wave_waste
            + common.waves_s(occupancy.waves, common.WAVE_AND_LAUNCH_S, steps, common.STEP_S),
        }


def _image_elements(problem: Problem) -> int:
    """Return the elements of an image, of the input or of the output, whichever has more."""
    return problem.c * max(problem.h * problem.w, problem.p * problem.q)


def _shape(
    table: Table, group_width: int, r: int, s: int, down: Pair, up: Pair, dgrad: bool, added: bool
) -> Workings:
    (down_h, down_w), (up_h, up_w) = down, up
    width, t, w = max(8, group_width), table.columns, Workings()
    w.threads = 32 * t["warps_c"] * t["warps_m"]
    chunks = t["block_c"] // 8
    pixel_bytes = 16 * (chunks | 1)
    w.row_x = down_w * (t["block_q"] - 1) + ceil_div(s, up_w)  # input columns of an image's tile
    row_pixels = t["block_n"] * w.row_x
    w.stage_bytes = row_pixels * pixel_bytes
    pixels = t["block_n"] * t["block_q"]
    m_tiles = ceil_div(pixels, 16)
    out_bytes = up_w * m_tiles * 16 * pixel_bytes
    out_rows = up_h * (1 if down_h == 2 else 2)
    w.warp_tiles = m_tiles // t["warps_m"]
    warp_channels = t["block_c"] // t["warps_c"]
    w.warp_groups = ceil_div(warp_channels, width)
    n_tiles = warp_channels // w.warp_groups // 8
    k_steps = ceil_div(width, 16)
    # Filter columns that each parity of output columns uses; at width 8 two share an instruction.
    used = [-(-(s - parity) // up_w) for parity in range(up_w)]
    taps = sum(ceil_div(count, 2) if width == 8 else count for count in used)
    staged = (t["filter_shared"] == 1) | (group_width >= (8 if dgrad else 32))
    filter_bytes = np.where(staged, 16 * (r * s * width // 8 | 1) * t["block_c"], 0)
    ends = out_rows * out_bytes + filter_bytes
    w.smem_bytes = t["stages"] * (w.stage_bytes + (out_bytes if added else 0)) + ends
    # 16-byte copies of a thread in a step.
    w.loads = ceil_div(row_pixels * chunks, w.threads)
    stores = ceil_div(((up_w - 1) * m_tiles * 16 + pixels) * chunks, w.threads)
    live = (r - 1) // down_h + 1
    accumulators = live * up_w * w.warp_groups * w.warp_tiles * n_tiles * 4
    filter_registers = np.where(
        t["filter_shared"], 8, w.warp_groups * r * taps * k_steps * n_tiles * 2
    )
    # An estimate: accumulators, filter, fragments, offsets.
    w.registers = accumulators + filter_registers + 5 * w.warp_tiles + w.loads + stores + 32
    # Tensor-core instructions of a warp in a step.
    w.products = w.warp_groups * w.warp_tiles * n_tiles * k_steps * taps * r / down_h
    # This leaves out half of the kernels to compile; without them, the best config of a layer is
    # 0.2 % slower on average and 5 % at worst (1,257 measured layers). At width 64 a filter
    # fragment from shared memory must serve two pixel tiles to be worth its fetch, where they fit.
    wins = (
        ((t["warps_m"] < 4) & (w.warp_tiles * warp_channels <= 32) | (width >= 32))
        & ((t["warps_m"] == 1) | (warp_channels <= width))
        & (warp_channels <= 2 * width)
        & ((width < 64) | (r * s > 9) | (t["filter_shared"] == 0) | (w.warp_tiles > 1))
        & ((t["block_q"] != 28) & ((t["block_q"] != 14) | (t["block_n"] < 4)) | (width == 64))
    )
    divided = width == 64 or (width == 32 and r * s > 25)
    # The rules that do not depend on the layer's sizes or the device.
    w.fits = (
        (t["block_c"] % width == 0)
        # Warps hold whole groups or, where a group has too many accumulators, divide one in pieces
        # of at least 16 channels.
        & ((warp_channels % width == 0) | (divided & (warp_channels >= 16)))
        & ((w.threads <= 128) | ((width == 64) & (r * s > 9)) | grouped.is_odd(t["block_c"]))
        & wins
        # Registers hold small filters at no cost.
        & ((width * r * s > 16 * 9) | (t["filter_shared"] == 0))
        & ((width > 8) | (t["filter_shared"] == 0))
        & (w.loads <= 32)
        & (stores <= 32)
        & (w.registers <= common.MAX_REGISTERS)
        & (w.registers * w.threads <= Device.regs_per_sm)
    )
    return w


_EPILOGUE = ("bias", "activation", "residual")
FAMILIES = (
    GroupedRows("grouped_fprop", "fprop", ("out", "in", "filter", "bias", "residual"), _EPILOGUE),
    GroupedRows("grouped_dgrad", "dgrad", ("in_grad", "out_grad", "filter")),
)
