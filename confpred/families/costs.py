"""Constants and formulas of the analytic costs that several families share.

Units are seconds, bytes, and operations per second. The constants are round assumptions about the
GPUs of `confpred.problem.device`, not measurements, unless something else is said: an estimate has
to put configs in order where no model is trained, and a trained model, which has it as a feature,
corrects it. Features and models depend on every bit of the constants.

Counts and bytes that are given as arguments may be arrays over configs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families.common import TWO_KERNELS, Array
from confpred.problem.device import Device

_Floats = NDArray[np.float64]

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


def memory_s(moved: int, device: Device, in_flight: Any) -> _Floats:
    """Time of device memory for `moved` bytes while each multiprocessor has `in_flight` bytes under
    way; too few of them bound the rate."""
    rate = np.minimum(device.dram_bytes_per_s, device.sm_count * in_flight / LOAD_S)
    found: _Floats = moved / rate
    return found


def l2_s(loaded: Any, device: Device) -> _Floats:
    """Time of L2 for `loaded` bytes; a halo that blocks share counts for each of them."""
    found: _Floats = loaded / (L2_RATE * device.dram_bytes_per_s)
    return found


def products_s(products: Any, device: Device) -> _Floats:
    """Time of the tensor cores for so many `products` of them."""
    found: _Floats = products * PRODUCT_FLOPS / (MMA_SYNC * device.tensor_flops)
    return found


def instructions_s(instructions: Any, device: Device, issued: float = ISSUED) -> _Floats:
    """Time to issue so many `instructions` of threads; `device.simt_flops` counts a multiply-add as
    two operations."""
    found: _Floats = instructions / (issued * device.simt_flops / 2)
    return found


def waves_s(waves: _Floats, wave_s: float, steps: Any, step_s: float) -> _Floats:
    """Time that cannot be hidden: `wave_s` for each wave and `step_s` for each step of its
    blocks."""
    found: _Floats = np.ceil(waves) * (wave_s + steps * step_s)
    return found


def depthwise_adding_s(reduction: Array, sum_bytes: Any, device: Device) -> _Floats:
    """Time to add up the sums of a depthwise filter gradient's blocks: a second kernel reads all
    that the first one has written; atomic additions happen in L2."""
    second = DEPTHWISE_SECOND_KERNEL_S + 2 * sum_bytes / device.dram_bytes_per_s
    found: _Floats = np.where(reduction == TWO_KERNELS, second, DEPTHWISE_ADDING_S)
    return found
