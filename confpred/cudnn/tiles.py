"""What cuDNN's plans launch, and what follows from it for a problem.

cuDNN tells of a plan its engine and knobs, which are numbers. How it tiles the matrix product that
a convolution is stands in the name of its kernel, and a profiler sees threads, registers and shared
memory: ``tiles.csv`` has these of the plans that were seen (`datasets/plan_kernels.py`). A plan
that was not seen, or whose kernel has a name that says nothing, is described by zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from confpred.cudnn.table import read_lines, table
from confpred.families.common import Occupancy
from confpred.families.protocol import Array, Rows
from confpred.problem.conv2d import Problem, product
from confpred.problem.device import Device

FILE = Path(__file__).with_name("tiles.csv")
#: The number of a plan, and of its main kernel: rows, columns and terms of the product that a
#: block takes at a time, its threads, the registers of a thread, and its bytes of shared memory.
PLAN = "plan"
FIELDS = ("block_rows", "block_columns", "block_terms", "threads", "registers", "smem_bytes")
#: `described`, by column. Shares are of the products that tiles compute, padding included; *work*
#: is that of the multiprocessor that has most of it, over an even share of what is needed, in
#: whole sums and in sums that are cut into as many slices as fill the device; *traffic* is what
#: blocks read over what tensors hold.
NAMES = (
    *FIELDS[:3], "log_blocks", "blocks_per_sm", "log_waves", "wave_share", "tile_share",
    "channel_share", "log_steps", "log_work", "log_split_work", "log_sums", "log_traffic",
)  # fmt: skip


def tiles_of(lines: Iterable[Mapping[str, str]], plans: int) -> dict[str, Array]:
    """Each of ``FIELDS`` as an array over so many plans, 0 where nothing is known."""
    numbers = np.array([[int(line[name]) for name in (PLAN, *FIELDS)] for line in lines], np.int64)
    found = np.zeros((len(FIELDS), plans), np.int64)
    found[:, numbers[:, 0]] = numbers[:, 1:].T
    found.setflags(write=False)
    return dict(zip(FIELDS, found, strict=True))


@cache
def tiles() -> dict[str, Array]:
    """What ``tiles.csv`` holds of the plans of ``plans.csv``."""
    return tiles_of(read_lines(FILE), len(table().configs))


def described(
    problem: Problem, device: Device, known: Mapping[str, Array], rows: Rows
) -> NDArray[np.float64]:
    """What follows from the tiles of the plans `rows` for `problem`: the columns of ``NAMES``."""
    tile = {name: values[rows] for name, values in known.items()}
    found = np.zeros((len(rows), len(NAMES)))
    seen = tile["block_terms"] > 0
    if seen.any():
        some = {name: values[seen] for name, values in tile.items()}
        found[seen] = np.column_stack(_columns(problem, device, some))
    return found


def _columns(
    p: Problem, device: Device, tile: Mapping[str, Array]
) -> list[NDArray[np.float64] | Array]:
    rows, columns, terms = product(p)
    height, width, depth = (tile[name] for name in FIELDS[:3])
    blocks = -(-rows // height) * -(-columns // width) * p.groups
    occupancy = Occupancy.of(device, blocks, tile["threads"], tile["registers"], tile["smem_bytes"])
    # All gradients but the filter's sum over taps and channels, and go to the next tap with a new
    # step, so that the last channels of each tap are padded.
    taps = 1 if p.direction == "wgrad" else p.r * p.s
    steps = taps * -(-(terms // taps) // depth)
    share = rows * columns * terms * p.groups / device.sm_count
    block_work = height * width * depth / share
    places = occupancy.per_sm * device.sm_count
    slices = np.clip(places // blocks, 1, steps)
    split_waves = np.ceil(blocks * slices / places) * occupancy.per_sm
    held = p.minimum_bytes / p.itemsize
    return [
        *(height, width, depth),
        np.log(blocks),
        occupancy.per_sm,
        np.log(occupancy.waves),
        1 / occupancy.wave_waste,
        rows * columns * p.groups / (blocks * height * width),
        terms / (steps * depth),
        np.log(steps),
        np.log(occupancy.sm_blocks * block_work * steps),
        np.log(split_waves * block_work * np.ceil(steps / slices)),
        np.log1p(np.where(slices > 1, slices * rows * columns * p.groups / held, 0)),
        np.log(blocks * (height + width) * steps * depth / held),
    ]
