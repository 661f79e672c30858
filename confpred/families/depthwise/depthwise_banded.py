"""The depthwise families on tensor cores whose result is an image: configs, legality, features and
launches of ``depthwise_banded.cu``, for the forward direction and for the gradient of the input.
The parts that ``depthwise_banded_wgrad.py`` shares are here too.

They serve layers of group width 1, unit stride and dilation, as many filters as channels, filters
up to 11x11, any padding, float16 and bfloat16, and a multiple of 8 channels; the ordinary depthwise
families serve the others.

An output of an R x S filter takes 16 R multiply-adds of the tensor cores (24 R from S = 10 on), as
the zeros of the band are multiplied too; ordinary arithmetic takes R S. For a 7x7 filter, that is
112 of the at least 1,024 that a multiprocessor does in a clock, against 49 of 128: 0.11 clocks
against 0.38. The memory of an H100 needs 0.3 clocks for the output's 4 bytes. The kernels are then
bound by instructions, most of which move pixels into planes and out of them, and by requests to L2:
with runs of 16 channels the requests are of 32 bytes, half of what a slice could answer, so wider
blocks win where registers allow them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, depthwise
from confpred.families.batch import Workings
from confpred.families.common import Occupancy, ceil_div, macros
from confpred.families.protocol import Array, Columns, Floats, Mask
from confpred.families.table import Shaped, Table, config_table, crossed
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


# ``depthwise_banded.cuh`` works all of this out from its macros too, and the kernels assert that
# the threads, the runs and the shared memory of a block are the same. `t` has the columns of some
# configs.


def threads_of(t: Columns) -> Array:
    """Return the threads of a block."""
    return t["block_c"] // t["warp_c"] * (t["strips"] // t["warp_strips"]) * 32


def runs(t: Columns) -> Array:
    """Return the runs of a block."""
    return t["strips"] // t["run"]


def items(t: Columns, columns: Array) -> Array:
    """Return the items that a thread copies in a step, for `columns` of a run; an item is two
    pixels of 8 channels."""
    pairs = t["rows"] * runs(t) * (t["block_c"] // 8) * ceil_div(columns, 2)
    return ceil_div(pairs, threads_of(t))


def buffer_bytes(t: Columns, units: Array, spare: int) -> Array:
    """Return the bytes of shared memory for the rows of a step: `units` eights of columns for each
    run and, if strips are idle, one eight more for each of them and `spare` others."""
    pitch = np.where(t["run"] == 1, units | 1, units)
    idle = t["strips"] % t["run"]
    eights = runs(t) * pitch + np.where(idle > 0, idle + spare, 0)
    return t["rows"] * (t["block_c"] * 16 * eights + 128)


def stage_bytes(t: Columns, copied: Array) -> Array:
    """Return the bytes of shared memory for copies ahead: `copied` items of each thread and
    step."""
    return t["stages"] * copied * threads_of(t) * 32


def most_registers(t: Columns) -> Array:
    """Return the registers that a thread can have if a multiprocessor is to hold ``min_blocks``
    blocks."""
    share = Device.regs_per_sm // (threads_of(t) * t["min_blocks"]) // 8 * 8
    return np.minimum(share, common.MAX_REGISTERS)


def fits(t: Columns, w: Any, device: Device) -> Mask:
    """Return which configs, of blocks `w`, a multiprocessor has room for, with as many blocks as
    each of them asks for.

    With a bound on registers an eighth below what it would take, the compiler spills few or none;
    where it would take fewer anyway, the bound changes nothing.
    """
    most, blocks = most_registers(t), t["min_blocks"]
    return (
        (w.registers <= 1.15 * most)
        & ((blocks == 1) | (w.registers > 0.95 * most))
        & (w.smem_bytes <= device.smem_per_block)
        & (blocks * (w.smem_bytes + device.smem_reserved_per_block) <= device.smem_per_sm)
        & (blocks * w.threads <= 32 * device.warps_per_sm)
        & (blocks <= device.blocks_per_sm)
    )


def block(t: Columns, s: int) -> Any:
    """Return the workings of a block for filters of width `s`: its threads, the input columns of a
    run, and what a step copies."""
    w: Any = Workings()
    w.threads = threads_of(t)
    w.in_x = 8 * t["run"] + s - 1
    w.in_items, w.out_items = items(t, w.in_x), items(t, 8 * t["run"])
    return w


def _padded_image(problem: Problem) -> int:
    """Return the most elements that offsets in an image may count, padding included."""
    p = problem
    return p.c * (max(p.h, p.p) + 256) * (max(p.w, p.q) + 256)


def cut(problem: Any, t: Columns, height: Any, width: Any) -> Any:
    """Return the workings of how configs cut an image of this `height` and `width`."""
    w: Any = Workings()
    w.runs = runs(t)  # of a block
    w.band_rows, w.bands = common.cut(height, t["bands"])
    w.q_tiles = ceil_div(width, 8 * t["run"])
    w.c_tiles = ceil_div(problem.c, t["block_c"])
    w.all_runs = problem.n * w.bands * w.q_tiles
    w.tiles = ceil_div(w.all_runs, w.runs)
    return w


def suited(t: Columns, channels: Any, width: Any) -> Mask:
    """Return which kernels are not meant for a larger layer: a block has less than twice the
    layer's `channels`, or the fewest that there are, and at most a quarter more columns are
    computed than the `width` that is cut into runs. Larger blocks do the work of smaller ones, only
    more slowly."""
    columns = ceil_div(width, 8 * t["run"]) * t["run"]
    return ((4 * columns <= 5 * ceil_div(width, 8)) | (t["run"] == 1)) & (
        (t["block_c"] < 2 * channels) | (t["block_c"] == 16)
    )


def rules(problem: Any, t: Columns, w: Any, splits: Any = 1) -> Mask:
    """Return which configs can count the offsets from a block's first image in 32 bits, padding
    included, and are less than twice as large as what they cover, or the smallest."""
    images = ceil_div(w.runs, w.q_tiles * w.bands) + 1
    return (
        (images * problem.map(_padded_image) <= common.MAX_INT)
        & (np.maximum(w.blocks, w.all_runs + splits * t["strips"]) <= common.MAX_INT)
        & ((w.runs < 2 * w.all_runs) | (t["strips"] == 16))
        & ((t["rows"] < 2 * w.band_rows) | (t["rows"] == 1))
    )


def features(problem: Any, t: Columns, w: Any, width: Any, walked: Any) -> dict[str, Any]:
    """Return features of the cut; a block walks over `walked` input rows of a band."""
    return {
        "q_waste": w.q_tiles * t["run"] * 8 / width,
        "c_waste": w.c_tiles * t["block_c"] / problem.c,
        "strip_waste": w.tiles * t["strips"] / (w.all_runs * t["run"]),
        "bands_cut": w.bands,
        "halo_rows": walked / w.band_rows,
        "halo_columns": w.in_x / (8 * t["run"]),
        "run_bytes": t["block_c"] * problem.itemsize,
    }


_SHARED = (
    "log_n", "log_k", "log_p", "log_q", "r", "s", "bfloat16", "log_bytes", "log_intensity",
    *_FIELDS,
    "threads", "registers", "smem_bytes", "in_items", "out_items", "products",
    "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste", "q_waste", "c_waste",
    "strip_waste", "band_rows", "bands_cut", "row_tail", "halo_rows", "halo_columns", "steps",
    "run_bytes", "pixel_alignment", "bytes_in_flight", "log_work", "log_load_bytes",
    "log_estimate",
)  # fmt: skip


def padding_read(problem: Problem) -> tuple[int, int]:
    """Return the padding of what the kernel reads. It is negative where an input gradient leaves
    the border of the output's gradient unread."""
    p = problem
    if p.direction == "fprop":
        return p.padding
    return p.r - 1 - p.padding[0], p.s - 1 - p.padding[1]


def _above(problem: Problem) -> int:
    """Return the rows of padding above the image that a filter meets."""
    return min(max(padding_read(problem)[0], 0), problem.r - 1)


class Banded(Shaped):
    """Base of the families whose blocks walk over bands of an image, in strips."""

    kernel_fields = COMPILED

    def _handles(self, problem: Problem) -> bool:
        return (
            problem.dtype != "float32"
            and depthwise.handles(problem)
            and problem.stride == (1, 1)
            and depthwise.dilation(problem) == (1, 1)
            and problem.k == problem.c
            and problem.c % 8 == 0  # copies are of 16 bytes
        )

    @abstractmethod
    def _walked(self, problem: Any) -> tuple[Any, Any]:
        """Return height and width of the image that blocks walk over."""

    @staticmethod
    @abstractmethod
    def _block(table: Table, r: int, s: int, bias: bool, residual: bool) -> Workings:
        """Return the `_shape` for problems of this filter and epilogue."""

    def _shape(self, problem: Problem, table: Table) -> Workings:
        return table.kept(self._block, problem.r, problem.s, problem.bias, problem.residual)

    def _cheap_rules(self, problem: Any, device: Device, table: Table) -> Mask:
        height, width = self._walked(problem)
        return (
            table.by(("block_c", "run"), lambda t: suited(t, problem.c, width))
            & table.by(("bands",), lambda t: common.distinct_bands(height, t["bands"]))
            & problem.each_row(lambda p: fits(table.columns, self._shape(p, table), device))
        )


class DepthwiseBanded(Banded):
    """One direction of ``kernels/depthwise_banded.cu``."""

    configs = _config_table()
    kernel = "depthwise_banded"
    shared_features = _SHARED

    def _walked(self, problem: Any) -> tuple[Any, Any]:
        height, width = problem.map(common.image_sizes)[1]
        return height, width

    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        return rules(problem, t, w)

    def launch(self, problem: Problem, row: int) -> Launch:
        p, w = problem, self._one(problem, row)
        defines = (
            *macros(R=p.r, S=p.s, FLIP=int(self.direction == "dgrad")),
            dtype_macro(p),
            *common.epilogue_macros(p),
            *common.config_macros(self.configs[row], COMPILED),
            *common.agreed_macros(**common.named(w, "threads runs smem_bytes")),
        )
        scalars = {
            "n": p.n,
            "c": p.c,
            **common.image_scalars(p),
            **dict(zip(("pad_h", "pad_w"), padding_read(p), strict=True)),
            **common.named(w, "band_rows bands q_tiles c_tiles"),
        }
        return Launch((self._step(defines, w.blocks, w.threads, w.smem_bytes, scalars),))

    def _cut(self, problem: Any, t: Columns) -> Workings:
        w = cut(problem, t, *self._walked(problem))
        w.blocks = w.tiles * w.c_tiles
        return w

    @staticmethod
    def _block(table: Table, r: int, s: int, bias: bool, residual: bool) -> Workings:
        t, span = table.columns, (s + 14) // 8
        w, run = block(t, s), t["run"]
        planes = buffer_bytes(t, run + span - 1, span - 1) + buffer_bytes(t, run, 0)
        w.smem_bytes = 2 * planes + stage_bytes(t, w.in_items) + t["block_c"] * r * s * 2
        warp_tiles = t["warp_strips"] // 16
        fragments = t["warp_c"] * warp_tiles * t["rows"]  # of a warp and step
        # Tensor-core instructions of a warp and step.
        w.products = fragments * r * (1 if span < 3 else 2)
        w.registers = (  # fitted to what the assembler reports of 96 kernels
            t["warp_c"] * (r * (span + 4 * warp_tiles) + warp_tiles)
            + 3 * w.in_items
            + (13 + 8 * residual) * w.out_items
            + 29
        )
        # Instructions that a warp issues in a step.
        w.work = w.products + fragments * 14 + w.in_items * 28 + w.out_items * 28 + 20
        return w

    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Estimate seconds as the largest of three times, plus a latency for each wave and step:
        the time of device memory, whose rate is bounded where too little is in flight, and the
        times of the tensor cores and of the instructions of the multiprocessor with the most
        blocks."""
        (in_height, _), (height, width) = problem.map(common.image_sizes)
        registers = np.minimum(w.registers, most_registers(t))
        occupancy = Occupancy.of(device, w.blocks, w.threads, registers, w.smem_bytes)
        # With one band, rows of padding above the image are left out; those below it only finish
        # the rows above them.
        whole, above = w.bands == 1, problem.map(_above)
        walked = w.band_rows + problem.r - 1 - whole * above
        steps = ceil_div(walked, t["rows"])
        lowest = in_height + problem.map(padding_read)[0] - above
        inside = np.where(whole, np.minimum(lowest, walked), walked)
        computed = np.minimum(ceil_div(inside, t["rows"]), steps)
        step_bytes = t["rows"] * w.runs * w.in_x * t["block_c"] * problem.itemsize
        in_flight = occupancy.resident * step_bytes
        fullest = occupancy.sm_blocks * device.sm_count * w.threads / 32
        block_work = computed * w.work + (steps - computed) * 0.5 * w.work
        block_work += common.BLOCK_INSTRUCTIONS
        seconds = common.largest(
            common.memory_s(problem.minimum_bytes, device, in_flight),
            common.products_s(fullest * computed * w.products, device),
            common.instructions_s(fullest * block_work * 32, device),
        )
        return {
            "log_p": np.log2(height),
            "log_q": np.log2(width),
            **occupancy.features(),
            **features(problem, t, w, width, walked),
            # The rows that are left for the last band, as a fraction of a whole band.
            "row_tail": (height - (w.bands - 1) * w.band_rows) / w.band_rows,
            "steps": steps,
            "bytes_in_flight": in_flight,
            "log_work": np.log2(w.blocks * (w.threads / 32) * block_work),
            "log_load_bytes": np.log2(w.blocks * computed * step_bytes / problem.minimum_bytes),
            "estimate": seconds
            + common.LAUNCH_S
            + common.waves_s(occupancy.waves, common.WAVE_S, steps, common.STEP_S),
        }


_EPILOGUE = ("bias", "residual", "activation")
FAMILIES = (
    DepthwiseBanded("depthwise_banded_fprop", "fprop", depthwise.FPROP_OPERANDS, _EPILOGUE),
    DepthwiseBanded("depthwise_banded_dgrad", "dgrad", depthwise.DGRAD_OPERANDS),
)
