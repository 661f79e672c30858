"""Gradient of a grouped convolution's filter, with that of the bias from the same sweep: configs,
legality, features and launch of ``grouped_wgrad.cu``.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, grouped
from confpred.families.batch import Workings
from confpred.families.common import ATOMIC, DIRECT, LAST_BLOCK, TWO_KERNELS, Occupancy, ceil_div
from confpred.families.grouped import Window, flush_steps, window_of
from confpred.families.protocol import Array, Columns, Floats, Mask
from confpred.families.table import Shaped, Table, config_table
from confpred.problem.conv2d import Problem, dtype_macro, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.operation import Launch

MAX_THREADS = 512

_SUM_COLUMNS = 128  # elements a block of ``grouped_wgrad_sum.cu``
#: With more partial sums than this, the last block alone would be the slowest way of all.
_MAX_LAST_BLOCK_PARTS = 32

#: (images, output columns) of a block: tensor-core tiles of 16 pixels that real widths fill well.
#: Narrow images are padded to 8 or 16 columns, for a tile's rows to lie one after another.
_PIXEL_ROWS = (
    (2, 8), (4, 8), (8, 8),
    (1, 16), (2, 16), (4, 16),
    (1, 28), (2, 28),
    (1, 32), (2, 32),
    (1, 56), (1, 64),
)  # fmt: skip
#: How many slices the rows of all images are cut into.
_SPLITS = (1, *itertools.chain.from_iterable((2 << i, 3 << i) for i in range(8)))
#: (gradient channels of a block, of a warp) where 64 does not divide the layer's channels.
_ODD_CHANNELS = ((24, 8), (48, 16), (80, 16), (96, 16))
_COMPILED = ("block_n", "block_q", "block_k", "warp_k", "warps_m", "stages")
_FIELDS = (*_COMPILED, "splits", "reduction")


def _launches(whole: bool) -> list[tuple[int, int]]:
    """Return each count of slices with each way to add up their sums; `whole` where one slice has
    all of a sum."""
    return [
        (splits, reduction)
        for splits, reduction in itertools.product(_SPLITS, range(4))
        if not (reduction == DIRECT and splits > 1)
        and not (reduction != DIRECT and splits == 1 and whole)
        and not (reduction == LAST_BLOCK and splits > _MAX_LAST_BLOCK_PARTS)
    ]


_LAUNCHES = (_launches(False), _launches(True))


def _config_table() -> NDArray[np.void]:
    even = itertools.product(
        _PIXEL_ROWS, itertools.product((8, 16, 32, 64), (8, 16)), (1, 2), (3, 5)
    )
    odd = itertools.product(_PIXEL_ROWS, _ODD_CHANNELS, (1,), (3, 5))
    rows: list[tuple[int, ...]] = []
    for (block_n, block_q), (block_k, warp_k), warps_m, stages in (*even, *odd):
        tiles = ceil_div(block_n * block_q, 16)
        if tiles % warps_m or tiles // warps_m > 4 or warp_k > block_k:
            continue
        if not 512 <= block_n * block_q * max(16, block_k) <= 4096:
            continue
        kernel = (block_n, block_q, block_k, warp_k, warps_m, stages)
        # Where one tile is as wide as the image, one block has a whole sum.
        rows += [(*kernel, *launch) for launch in _LAUNCHES[block_n > 1 and block_q > 8]]
    return config_table(_FIELDS, rows)


#: The next smaller count of slices, indexed by the count; 1 for 1.
_FEWER = np.ones(_SPLITS[-1] + 1, np.int64)
_FEWER[list(_SPLITS[1:])] = _SPLITS[:-1]


class GroupedWgrad(Shaped):
    """``kernels/grouped_wgrad.cu``."""

    configs = _config_table()
    kernel = "grouped_wgrad"
    kernel_fields = _COMPILED
    shared_features = (
        "log_n", "log_c", "log_p", "log_q", "r", "s", "group_width", "log_bytes",
        "stride_h", "stride_w", "dilation_h", "dilation_w",
        "log_intensity", "bfloat16", "bias",
        *_FIELDS,
        "threads", "warp_tiles", "smem_bytes", "registers", "loads", "products",
        "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste",
        "q_waste", "n_waste", "k_waste", "halo_rows", "halo_columns", "steps", "bytes_in_flight",
        "q_tail", "n_tail", "k_tail", "slice_tail", "k_tiles", "q_tiles", "slice_rows", "parts",
        "log_blocks_an_sm", "rounds", "pixel_alignment", "log_sum_bytes",
        "log_load_bytes", "log_products", "log_estimate",
    )  # fmt: skip

    def _handles(self, problem: Problem) -> bool:
        return grouped.handles(problem) and _elements(problem) <= common.MAX_INT

    def _cheap_rules(self, problem: Any, device: Device, table: Table) -> Mask:
        return (
            super()._cheap_rules(problem, device, table)
            & table.by(("block_n", "block_q", "block_k"), lambda t: _suited(t, problem))
            & table.by(("reduction",), lambda t: common.allowed(t["reduction"], problem))
        )

    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        # Columns to the right of the image are addressed, though not read.
        reach = 2 * grouped.MAX_STEP * (t["block_q"] + grouped.MAX_WINDOW)
        height, width = problem.map(_image_size)
        offset = t["block_n"] * (problem.c * height) * (width + reach)
        parts, blocks, reduction = w.parts, w.blocks, t["reduction"]
        return (
            (offset <= common.MAX_INT)
            & (blocks <= common.MAX_INT)
            & _few_idle_columns(problem.q, w.q_tiles * t["block_q"])
            & (~grouped.is_odd(t["block_k"]) | grouped.fits_odd_channels(t["block_k"], problem.c))
            # A count of slices that makes them as high as the next smaller count does is the same
            # launch again; slices lower than two filters read more halo than rows.
            & (
                (t["splits"] == 1)
                | (
                    (w.slice_rows >= 2 * problem.r)
                    & (w.slice_rows < ceil_div(w.rows, _FEWER[t["splits"]]))
                    # More blocks than keep the device busy only cost their start and end.
                    & (blocks <= 16 * device.sm_count)
                )
            )
            # There are blocks for at least half of the device, unless so few are done soon.
            & ((2 * blocks >= device.sm_count) | (w.slice_rows <= 64))
            & ((reduction == DIRECT) == (parts == 1))
            & ((reduction != LAST_BLOCK) | (parts <= _MAX_LAST_BLOCK_PARTS))
            # Partial sums of more bytes than the layer would take longer than the layer.
            & (4 * parts * _elements(problem) <= np.maximum(problem.minimum_bytes, 2**20))
        )

    def _cut(self, problem: Any, t: Columns) -> Workings:
        w: Any = Workings()
        phases = problem.map(window_of).vertical.dilation
        # Gradient rows of all the images together, images of a tile counted once.
        w.rows = ceil_div(problem.n, t["block_n"]) * (phases * ceil_div(problem.p, phases))
        w.slice_rows, w.slices = common.cut(w.rows, t["splits"])
        w.q_tiles = ceil_div(problem.q, t["block_q"])
        w.k_tiles = ceil_div(problem.c, t["block_k"])
        w.parts = w.q_tiles * w.slices  # blocks that sum the same tile of the filter
        w.blocks = w.k_tiles * w.parts
        return w

    def _shape(self, problem: Problem, table: Table) -> Any:
        return table.kept(_shape, window_of(problem))

    def launch(self, problem: Problem, row: int) -> Launch:
        p, config, w = problem, self.configs[row], self._one(problem, row)
        window = window_of(p)
        vertical, horizontal = window.vertical, window.horizontal
        reduction, parts, elements = int(config["reduction"]), int(w.parts), _elements(p)
        defines = (
            *common.macros(GW=p.group_width, R=p.r, S=p.s, STRIDE_H=vertical.stride),
            *common.macros(STRIDE_W=horizontal.stride, DILATION_W=horizontal.dilation),
            dtype_macro(p),
            ("HAS_BIAS", int(p.bias)),
            *common.config_macros(config, _COMPILED),
            *common.agreed_macros(threads=w.threads, smem_bytes=w.smem_bytes),
        )
        scalars = {
            **kernel_sizes(p, "n c h w p q pad_h pad_w"),
            "row_step": vertical.step * vertical.dilation,
            "column_step": horizontal.step,
            "phases": vertical.dilation,
            "phase_step": p.stride[0],
            "rows": ceil_div(p.p, vertical.dilation),
            "flush": flush_steps(p),
            **common.named(w, "slice_rows slices q_tiles k_tiles"),
            "reduction": reduction,
        }
        sweep = self._step(defines, w.blocks, w.threads, w.smem_bytes, scalars)
        scratch = 4 * parts * elements if reduction in (TWO_KERNELS, LAST_BLOCK) else 0
        tickets = 16 * ceil_div(int(w.k_tiles), 4) if reduction in (LAST_BLOCK, ATOMIC) else 0
        sums = 4 * elements if reduction == ATOMIC else 0
        if reduction != TWO_KERNELS:
            return Launch((sweep,), zeroed_bytes=tickets + sums, scratch_bytes=scratch)
        sizes = {"parts": parts, "elements": elements, "taps": p.r * p.s}
        sizes |= {"channels": p.c, "group_width": p.group_width}
        add = common.sum_step("grouped_wgrad_sum", p, elements, _SUM_COLUMNS, 16, sizes)
        return Launch((sweep, add), scratch_bytes=scratch)

    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Estimate seconds as the largest of three times, stretched by the waste of the last wave
        or, in the first, of the multiprocessors with fewer blocks than others: those of device
        memory, of the copies from L2 into shared memory with their halos, and of the tensor cores;
        plus a fixed latency for each row of a block that cannot be hidden, and the time to add the
        blocks' sums."""
        window, slice_rows, reduction = problem.map(window_of), w.slice_rows, t["reduction"]
        registers = np.minimum(w.registers, common.MAX_REGISTERS)
        occupancy = Occupancy.of(device, w.blocks, w.threads, registers, w.smem_bytes)
        stretch = np.where(
            occupancy.waves <= 1,
            occupancy.sm_blocks * device.sm_count / w.blocks,
            occupancy.wave_waste,
        )
        lattice_rows = ceil_div(problem.p, window.vertical.dilation)
        flush = np.maximum(1.0, slice_rows / lattice_rows) * problem.map(flush_steps)
        steps = slice_rows + flush
        loaded = w.blocks * slice_rows * (w.stage_bytes + 0.0)
        products = w.blocks * steps * (w.threads / 32) * w.products
        sum_bytes = np.where(reduction == DIRECT, 0, 4.0 * w.parts * _elements(problem))
        seconds = common.largest(
            problem.minimum_bytes / device.dram_bytes_per_s,
            common.l2_s(loaded, device),
            common.products_s(products, device),
        )
        # The last block alone reads all parts of its tile.
        alone = sum_bytes / w.k_tiles / common.LAST_BLOCK_BYTES_PER_S
        adding = (
            common.GROUPED_ADDING_S[reduction]
            + common.GROUPED_ADDING_PASSES[reduction] * sum_bytes / device.dram_bytes_per_s
            + np.where(reduction == LAST_BLOCK, alone, 0.0)
        )
        return {
            "registers": registers,
            **occupancy.features(),
            "q_waste": w.q_tiles * t["block_q"] / problem.q,
            "n_waste": ceil_div(problem.n, t["block_n"]) * t["block_n"] / problem.n,
            "k_waste": w.k_tiles * t["block_k"] / problem.c,
            # The remainder for the last block of each dimension, as a fraction of a whole block.
            "q_tail": problem.q % t["block_q"] / t["block_q"],
            "n_tail": problem.n % t["block_n"] / t["block_n"],
            "k_tail": problem.c % t["block_k"] / t["block_k"],
            "slice_tail": (w.rows - (w.slices - 1) * slice_rows) / slice_rows,
            "log_blocks_an_sm": np.log2(occupancy.sm_blocks),
            "rounds": occupancy.rounds,
            "halo_rows": steps / slice_rows,
            "halo_columns": 1 + (window.s - 1) * window.horizontal.dilation / t["block_q"],
            "steps": steps,
            "bytes_in_flight": occupancy.resident * (t["stages"] - 1) * w.stage_bytes,
            "log_sum_bytes": np.log2(1 + sum_bytes),
            "log_load_bytes": np.log2(loaded / problem.minimum_bytes),
            "log_products": np.log2(products),
            "estimate": seconds * stretch
            + common.waves_s(occupancy.waves, common.WAVE_AND_LAUNCH_S, steps, common.STEP_S)
            + adding,
        }


def _image_size(problem: Problem) -> tuple[int, int]:
    """Return height and width of the input or of the output, whichever is larger."""
    return max(problem.h, problem.p), max(problem.w, problem.q)


def _suited(t: Columns, problem: Any) -> Mask:
    """Return the blocks that are not too large for `problem`, as a mask."""
    return (
        # A tile twice as large as what it covers does the work of a smaller tile, slower; and
        # images share a tile only where one alone does not fill it, or is narrow.
        ((t["block_q"] < 2 * problem.q) | (t["block_q"] == 8))
        & ((t["block_n"] < 2 * problem.n) | (t["block_n"] * t["block_q"] <= 16))
        & (
            (t["block_n"] == 1)
            | (t["block_q"] >= problem.q)
            | ((t["block_q"] == 8) & (problem.q <= 16))
        )
        # A block of 16 pixels a step waits more than it computes.
        & ((t["block_n"] * t["block_q"] > 16) | (problem.n * problem.q <= 28))
        & ((t["block_k"] < 2 * problem.c) | (t["block_k"] == 16))
    )


def _few_idle_columns(q: Any, padded: Array) -> Mask:
    """Return which tiles, with `padded` columns together, leave few of them idle, or no more than
    the smallest tiles that suit a wide image: for 33 to 40 columns all tiles leave many."""
    least = np.minimum(ceil_div(q, 28) * 28, ceil_div(q, 32) * 32)
    return (padded < 1.2 * q + 8) | (padded == least)


def _elements(problem: Any) -> Any:
    """Return how many float32 sums the blocks leave together, with one block for each tile of the
    filter."""
    return problem.filter_elements + problem.k * problem.bias


def _shape(table: Table, window: Window) -> Workings:
    t, w = table.columns, Workings()
    width, r, s = window.group_width, window.r, window.s
    narrow = width <= 8
    live = ceil_div(r, window.vertical.stride)
    block_c = np.maximum(t["block_k"], width)
    warps_s = 2 if not narrow and r * s > 27 else 1
    warps = t["block_k"] // t["warp_k"] * (1 if narrow else width // 16) * warps_s * t["warps_m"]
    w.threads = 32 * warps
    m = t["block_n"] * t["block_q"]
    m_tiles = ceil_div(m, 16)
    w.warp_tiles = m_tiles // t["warps_m"]
    row_x = (t["block_q"] - 1) * window.horizontal.stride
    row_x += (s - 1) * window.horizontal.dilation + 1
    in_chunks, grad_chunks = block_c // 8, t["block_k"] // 8
    in_bytes = window.vertical.stride * t["block_n"] * row_x * 16 * (in_chunks | 1)
    w.stage_bytes = in_bytes + m_tiles * 16 * 16 * (grad_chunks | 1)
    sums_bytes = 4 * t["block_k"] * (r * s * width + window.bias)
    w.smem_bytes = np.maximum(t["stages"] * w.stage_bytes, sums_bytes)
    some = np.maximum(w.threads, 1)  # a width that is no whole tile has no legal config
    in_loads = ceil_div(t["block_n"] * row_x * in_chunks, some)
    grad_loads = ceil_div(m * grad_chunks, some)
    w.loads = window.vertical.stride * in_loads + grad_loads  # copies of a thread in a step
    warp_n = t["warp_k"] // 8
    if narrow:  # products of a gradient tile: pairs of taps; the last tap's pairs of rows
        tap_products = r * (s // 2) + s % 2 * window.vertical.stride * ((live + 1) // 2)
    else:
        tap_products = r * ceil_div(s, warps_s)
    # Tensor-core instructions of a warp in a step.
    w.products = w.warp_tiles * warp_n * (tap_products + window.bias)
    accumulators = 4 * warp_n * (tap_products + window.bias)
    gradient = 2 * live * w.warp_tiles * warp_n
    # An estimate: accumulators, gradient rows, fragments, offsets.
    w.registers = accumulators + gradient + 2 * w.warp_tiles + in_loads + grad_loads + 48
    w.fits = (
        (narrow | (width % t["warp_k"] == 0))
        & (~grouped.is_odd(t["block_k"]) | (t["block_k"] % width == 0))
        # Blocks of 8 channels, which read a whole group of input, are for filters whose sums are
        # too many for larger blocks.
        & ((t["block_k"] > 8) | (width * r * s > 9 * 64))
        & (w.threads >= 64)
        & (w.threads <= MAX_THREADS)
        & (in_loads <= 16)
        & (grad_loads <= 16)
        & (w.registers <= common.MOST_ESTIMATED_REGISTERS)
        & (w.registers * w.threads <= Device.regs_per_sm)
    )
    return w


_OPERANDS = ("filter_grad", "bias_grad", "out_grad", "in", "scratch", "zeroed")
FAMILIES = (GroupedWgrad("grouped_wgrad", "wgrad", _OPERANDS),)
