"""Small pure functions that families of convolution kernels share: blocks, features, macros and
analytic costs.

The vectorised functions take and return arrays over the rows of a config table.

Costs are in seconds, bytes, and operations per second. Their constants are round assumptions about
the GPUs of `confpred.problem.device`, not measurements, unless something else is said: an estimate
has to put configs in order where no model is trained, and a trained model, which has it as a
feature, corrects it. Features and models depend on every bit of the constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Array, Floats, Mask
from confpred.problem.activation import activation_feature, activation_macro
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem, dtype_macro
from confpred.problem.device import Device
from confpred.problem.operation import KernelSpec, Step

_Count = TypeVar("_Count", int, Array)

MAX_REGISTERS = 255  # a thread cannot have more
#: Kernels hardly spill up to this many estimated registers of a thread. It is less than
#: MAX_REGISTERS, because the estimates err.
MOST_ESTIMATED_REGISTERS = 232
#: How the blocks that share sums of a filter's gradient add them up; the names and numbers are
#: those of ``common.cuh``.
DIRECT, TWO_KERNELS, LAST_BLOCK, ATOMIC = range(4)
#: Threads of a block of the kernels that add up sums.
SUM_THREADS = 256
MAX_INT = 2**31 - 1  # kernels count, and address within a block's images, in 32 bits


def macros(**values: int | str) -> tuple[tuple[str, int | str], ...]:
    """Return macro definitions in the order given."""
    return tuple(values.items())


def config_macros(config: np.void, fields: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Return the macros of some `fields` of a config, named in capitals."""
    return tuple((name.upper(), int(config[name])) for name in fields)


def epilogue_macros(problem: Problem | ConvNd) -> tuple[tuple[str, int | str], ...]:
    """Return the macros of the operations on an image's sums before they are stored
    (``common.cuh``)."""
    flags = macros(HAS_BIAS=int(problem.bias), HAS_RESIDUAL=int(problem.residual))
    return (activation_macro(problem.activation), *flags)


def agreed_macros(**sizes: Any) -> tuple[tuple[str, int], ...]:
    """Return macros ``HOST_...`` of sizes that host and kernel both compute, such as a block's
    threads and its shared memory. The kernel asserts that both are equal, so that a difference is a
    compile error. The sizes must follow from the other macros; else there would be more kernels
    than those distinguish."""
    return tuple((f"HOST_{name.upper()}", int(size)) for name, size in sizes.items())


def one(layout: Mapping[str, Any]) -> dict[str, int]:
    """Return the layout of one config, as numbers."""
    return {name: int(value[0]) for name, value in layout.items()}


def named(record: Any, names: str) -> dict[str, Any]:
    """Return some fields of a record by name; `names` has blanks between them."""
    return {name: getattr(record, name) for name in names.split()}


def kernel_step(
    name: str,
    operands: tuple[str, ...],
    defines: tuple[tuple[str, Any], ...],
    blocks: Any,
    threads: Any,
    smem_bytes: Any,
    scalars: Mapping[str, Any],
) -> Step:
    """Return the step of the kernel `name` in ``name.cu``, with a grid of one dimension."""
    return Step(
        KernelSpec(f"{name}.cu", name, defines),
        grid=(int(blocks), 1, 1),
        block=(int(threads), 1, 1),
        smem_bytes=int(smem_bytes),
        operands=operands,
        scalars={name: int(value) for name, value in scalars.items()},
    )


def sum_step(
    name: str,
    problem: Problem | ConvNd,
    elements: int,
    columns: int,
    thread_bytes: int,
    scalars: Mapping[str, int],
) -> Step:
    """Return the step of the kernel `name`, which adds up the sums of a filter's gradient that
    blocks have left in scratch memory: `elements` sums, `columns` of them by a block, with
    `thread_bytes` of shared memory for each of its threads."""
    smem_bytes = thread_bytes * SUM_THREADS
    agreed = agreed_macros(threads=SUM_THREADS, smem_bytes=smem_bytes, columns=columns)
    operands = ("filter_grad", "bias_grad", "scratch")
    defines, blocks = (dtype_macro(problem), *agreed), ceil_div(elements, columns)
    return kernel_step(name, operands, defines, blocks, SUM_THREADS, smem_bytes, scalars)


def image_sizes(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return height and width of the image that a kernel reads, and of the one that it writes."""
    image, output = (problem.h, problem.w), (problem.p, problem.q)
    return (image, output) if problem.direction == "fprop" else (output, image)


def image_scalars(problem: Problem) -> dict[str, int]:
    """Return `image_sizes` by the names that kernels have for them."""
    (h, w), (p, q) = image_sizes(problem)
    return {"h": h, "w": w, "p": p, "q": q}


def ceil_div(size: Any, piece: Any) -> Any:
    """Return how many parts `size` takes; for integers, of which `piece` is positive. Floats
    divide arrays in half of the time, and without an error: below 2^53 no quotient is rounded to a
    whole number that it is not."""
    if isinstance(size, np.ndarray) or isinstance(piece, np.ndarray):
        return np.ceil(size / piece).astype(np.int64)
    return -(-size // piece)


def cut(size: _Count | int, pieces: _Count) -> tuple[_Count, _Count]:
    """Return the size of a part, and how many parts there are, when `size` is cut into about
    `pieces`: the size is rounded up, so fewer may do."""
    piece = ceil_div(size, pieces)
    return piece, ceil_div(size, piece)


def largest(*values: Any) -> Any:
    """Return the largest of some values, element by element."""
    return reduce(np.maximum, values)


def allowed(reduction: Array, problem: Any) -> Mask:
    """Return the ways to add up sums that are legal for a `problem`, which may have to be
    deterministic."""
    return (reduction != ATOMIC) | np.logical_not(problem.deterministic)


def distinct_bands(size: int, bands: Array) -> Mask:
    """Return which counts of bands to offer for `size` rows. A band has at least two rows, because
    a band of one row would read a whole filter to make it; and half as many bands must be larger
    ones, or the launch would be the same."""
    rows = ceil_div(size, bands)
    return (bands == 1) | ((rows >= 2) & (rows < ceil_div(size, np.maximum(bands // 2, 1))))


def well_filled(least: int, *tiles: tuple[Any, Any]) -> Mask:
    """Return which tiles to offer, from pairs of a tile's size along an axis and the size that it
    covers there. A tile twice as large as what it covers does the work of a smaller one, slower;
    the smallest tiles, of at most `least` outputs, are always offered."""
    filled: Mask = reduce(np.logical_and, (size < 2 * covered for size, covered in tiles))
    return filled | (reduce(np.multiply, (size for size, _ in tiles)) <= least)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How the blocks of each config fill a device.

    Attributes:
        threads: threads of a block.
        blocks: blocks of the launch.
        per_sm: blocks that a multiprocessor holds at once.
        sm_blocks: blocks of the multiprocessor that gets the most.
        waves: how often the whole device is filled; a fraction.
        wave_waste: whole waves over `waves`.
        resident: blocks that a multiprocessor holds in the first wave, on average over the device.
            Where there are fewer blocks than slots it is less than `per_sm`, and the blocks draw
            on only a part of the device's rates.
    """

    threads: Array
    blocks: Array
    per_sm: Array
    sm_blocks: Floats
    waves: Floats
    wave_waste: Floats
    resident: Floats

    @classmethod
    def of(
        cls, device: Device, blocks: Array, threads: Array, registers: Array, smem_bytes: Array
    ) -> Occupancy:
        """Return how `blocks` fill `device`: blocks of `threads`, each with so many `registers` a
        thread and `smem_bytes` of shared memory."""
        smem = smem_bytes + device.smem_reserved_per_block
        per_sm = np.minimum(
            np.minimum(device.smem_per_sm // smem, device.regs_per_sm // (threads * registers)),
            np.minimum(device.warps_per_sm * 32 // threads, device.blocks_per_sm),
        )
        per_sm = np.maximum(per_sm, 1)
        waves = blocks / (device.sm_count * per_sm)
        return cls(
            threads=threads,
            blocks=blocks,
            per_sm=per_sm,
            sm_blocks=np.ceil(blocks / device.sm_count),
            waves=waves,
            wave_waste=np.ceil(waves) / waves,
            resident=np.minimum(waves, 1.0) * per_sm,
        )

    @property
    def rounds(self) -> Floats:
        """How often the multiprocessor with the most blocks is filled; a fraction."""
        return self.sm_blocks / np.minimum(self.sm_blocks, self.per_sm)

    def features(self) -> dict[str, NDArray[Any]]:
        """Return the features by name. Logarithms are to base 2."""
        return {
            "blocks_per_sm": self.per_sm,
            "warps_per_sm": self.resident * self.threads / 32,
            "log_blocks": np.log2(self.blocks),
            "waves": self.waves,
            "wave_waste": self.wave_waste,
        }


def problem_features(problem: Any) -> dict[str, Any]:
    """Return the features of a problem batch by name; a family lists those that vary among its
    problems. Logarithms are to base 2."""
    p = problem
    # A ratio of integers, which may be too large for an array.
    intensity = p.map(lambda one: one.flops / one.minimum_bytes)
    sizes = (p.n, p.c, p.k, p.p, p.q, p.minimum_bytes, intensity)
    names = ("log_n", "log_c", "log_k", "log_p", "log_q", "log_bytes", "log_intensity")
    return {
        **dict(zip(names, _log2(sizes), strict=True)),
        "r": p.r,
        "s": p.s,
        "stride_h": p.stride[0],
        "stride_w": p.stride[1],
        "dilation_h": p.dilation[0],
        "dilation_w": p.dilation[1],
        "group_width": p.group_width,
        "multiplier": p.k // p.c,
        "itemsize": p.itemsize,
        "bfloat16": p.dtype == "bfloat16",
        "bias": p.bias,
        "activation": p.map(lambda one: activation_feature(one.activation)),
        "residual": p.residual,
        # Rows of pixels that do not begin at a cache line are read and written in pieces.
        "pixel_alignment": np.gcd(p.itemsize * p.k, 128),
    }


def _log2(values: tuple[Any, ...]) -> list[Any]:
    """Return the logarithm of each of `values`, at once where they are numbers."""
    if any(isinstance(value, np.ndarray) for value in values):
        return [np.log2(value) for value in values]
    logarithms: list[Any] = np.log2(np.array(values, np.float64)).tolist()
    return logarithms


#: Operations of one product of the tensor cores, ``mma.m16n8k16``: 16 x 8 sums of 16 products, each
#: with an addition.
PRODUCT_FLOPS = 4096
#: Share of the tensor cores' rate that ``mma.sync`` reaches; the full rate needs instructions of
#: sm_90 that the kernels do not use.
MMA_SYNC = 0.5
#: Share of its issue rate that a multiprocessor reaches, as instructions wait for one another.
ISSUED = 0.6
#: Instructions of a thread (or of a warp, for all its threads) before the first step and after the
#: last one.
BLOCK_INSTRUCTIONS = 300
#: The rate of L2 as a multiple of that of device memory.
L2_RATE = 2
#: Latency of a load from device memory while many others are under way.
LOAD_S = 0.8e-6
#: Time of a launch where its waves are counted separately, and of each of these waves.
LAUNCH_S, WAVE_S = 2e-6, 1.5e-6
#: Time of each wave where the launch is included in it.
WAVE_AND_LAUNCH_S = 2e-6
#: Time of a step that cannot be hidden behind other blocks. First for the kernels on tensor cores,
#: whose blocks wait at a barrier; then for the depthwise kernels without tensor cores: those that
#: compute an image, and those of the filter's gradient, which load two images.
STEP_S, DEPTHWISE_STEP_S, DEPTHWISE_WGRAD_STEP_S = 2e-7, 1.5e-7, 3e-7
#: Time to add up the blocks' sums of a depthwise filter gradient: with a second kernel, and in any
#: other way.
DEPTHWISE_SECOND_KERNEL_S, DEPTHWISE_ADDING_S = 3e-6, 1e-6
#: For the grouped filter gradient, by the way in which blocks add up their sums: the time, and how
#: often the sums pass through device memory.
GROUPED_ADDING_S = np.array((0.0, 2e-6, 1e-6, 1e-6))
GROUPED_ADDING_PASSES = np.array((0.0, 2.0, 1.0, 1.0))
#: Bandwidth of a single block, for when the last block adds up all sums of its tile.
LAST_BLOCK_BYTES_PER_S = 50e9


def memory_s(moved: int, device: Device, in_flight: Any) -> Floats:
    """Return the time of device memory for `moved` bytes while each multiprocessor has `in_flight`
    bytes under way; too few of them bound the rate."""
    rate = np.minimum(device.dram_bytes_per_s, device.sm_count * in_flight / LOAD_S)
    return moved / rate


def l2_s(loaded: Any, device: Device) -> Floats:
    """Return the time of L2 for `loaded` bytes; a halo that blocks share counts for each of
    them."""
    return loaded / (L2_RATE * device.dram_bytes_per_s)


def products_s(products: Any, device: Device) -> Floats:
    """Return the time of the tensor cores for so many `products`."""
    return products * PRODUCT_FLOPS / (MMA_SYNC * device.tensor_flops)


def instructions_s(instructions: Any, device: Device, issued: float = ISSUED) -> Floats:
    """Return the time to issue so many `instructions` of threads; `device.simt_flops` counts a
    multiply-add as two operations."""
    return instructions / (issued * device.simt_flops / 2)


def waves_s(waves: Floats, wave_s: float, steps: Any, step_s: float) -> Floats:
    """Return the time that cannot be hidden: `wave_s` for each wave and `step_s` for each step of
    its blocks."""
    return np.ceil(waves) * (wave_s + steps * step_s)


def depthwise_adding_s(reduction: Array, sum_bytes: Any, device: Device) -> Floats:
    """Return the time to add up the sums of a depthwise filter gradient's blocks: a second kernel
    reads all that the first one has written; atomic additions happen in L2."""
    second = DEPTHWISE_SECOND_KERNEL_S + 2 * sum_bytes / device.dram_bytes_per_s
    return np.where(reduction == TWO_KERNELS, second, DEPTHWISE_ADDING_S)
