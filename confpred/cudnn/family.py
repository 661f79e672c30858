"""cuDNN's plans as two families, ``cudnn`` of two-dimensional layers and ``cudnn_nd`` of layers of
any rank: which of them may serve a problem, and how they are described.

They are sampled on request alone: ``confpred sample --family cudnn``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from confpred.cudnn.table import (
    ENGINE,
    KNOBS,
    NOTES,
    RELEASE,
    PlanTable,
    kind_of,
    read_lines,
    release_text,
    table,
    table_nd,
)
from confpred.errors import LaunchError
from confpred.families.common import Occupancy
from confpred.families.protocol import ABSENT, Array, Columns, Floats, Mask, Rows
from confpred.families.registry import operation_of
from confpred.problem.conv import CONV, ConvNd
from confpred.problem.conv2d import CONVOLUTION, Problem, product
from confpred.problem.device import Device
from confpred.problem.limits import Limits
from confpred.problem.operation import Launch, LibraryPlan, Operation

# Tiles. cuDNN names a plan by the numbers of its engine and knobs. The name of its kernel has the
# tile of the matrix product, and a profiler reports threads, registers and shared memory:
# ``tiles.csv`` has these of the plans that were profiled (`datasets/plan_kernels.py`). Features of
# other plans, and of those whose kernel's name has no tile, are zeros.

TILES_FILE = Path(__file__).with_name("tiles.csv")
#: The number of a plan, and of its main kernel: rows, columns and terms of the product that a
#: block takes at a time, its threads, the registers of a thread, and its bytes of shared memory.
PLAN = "plan"
TILE_FIELDS = ("block_rows", "block_columns", "block_terms", "threads", "registers", "smem_bytes")
#: Columns of `describe_tiles`. Shares are of the products that tiles compute, padding included;
#: *work* is that of the multiprocessor that has most of it, over an even share of the work needed,
#: in whole sums and in sums that are cut into as many slices as fill the device; *traffic* is the
#: bytes that blocks read over the bytes of the tensors.
TILE_NAMES = (
    *TILE_FIELDS[:3], "log_blocks", "blocks_per_sm", "log_waves", "wave_share", "tile_share",
    "channel_share", "log_steps", "log_work", "log_split_work", "log_sums", "log_traffic",
)  # fmt: skip


def tiles_of(lines: Iterable[Mapping[str, str]], plans: int) -> dict[str, Array]:
    """Return each of ``TILE_FIELDS`` as an array over so many plans, 0 where nothing is known."""
    names = (PLAN, *TILE_FIELDS)
    numbers = np.array([[int(line[name]) for name in names] for line in lines], np.int64)
    table = np.zeros((len(TILE_FIELDS), plans), np.int64)
    table[:, numbers[:, 0]] = numbers[:, 1:].T
    table.setflags(write=False)
    return dict(zip(TILE_FIELDS, table, strict=True))


@cache
def tiles() -> dict[str, Array]:
    """Return the contents of ``tiles.csv`` for the plans of ``plans.csv``."""
    return tiles_of(read_lines(TILES_FILE), len(table().configs))


@cache
def tiles_nd() -> dict[str, Array]:
    """Return the tiles of the plans of ``plans_nd.csv``: those of the same engine and knobs."""
    numbers = {config: row for row, config in enumerate(table().configs.tolist())}
    rows = np.array([numbers.get(config, -1) for config in table_nd().configs.tolist()])
    return {name: np.where(rows < 0, 0, values[rows]) for name, values in tiles().items()}


def describe_tiles(problem: Problem | ConvNd, device: Device, tiles: Columns, rows: Rows) -> Floats:
    """Return the features of `problem` under the tiles of plans `rows`: columns ``TILE_NAMES``."""
    tile = {name: values[rows] for name, values in tiles.items()}
    columns = np.zeros((len(rows), len(TILE_NAMES)))
    seen = tile["block_terms"] > 0
    if seen.any():
        some = {name: values[seen] for name, values in tile.items()}
        columns[seen] = np.column_stack(_columns(problem, device, some))
    return columns


def _columns(p: Problem | ConvNd, device: Device, tile: Columns) -> list[Floats | Array]:
    rows, columns, terms = product(p)
    height, width, depth = (tile[name] for name in TILE_FIELDS[:3])
    blocks = -(-rows // height) * -(-columns // width) * p.groups
    occupancy = Occupancy.of(device, blocks, tile["threads"], tile["registers"], tile["smem_bytes"])
    # All gradients but the filter's sum over taps and channels, and go to the next tap with a new
    # step, so that the last channels of each tap are padded.
    taps = 1 if p.direction == "wgrad" else p.taps
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


#: Expected time of an unknown plan over the roofline.
_GUESS = 2.0
_DESCRIBED = (ENGINE, *KNOBS)
#: Engines by direction whose results are not as exact as an ordinary kernel's: gradients whose
#: partial sums are rounded to the tensors' 16 bits (20, 47), or are off by more for some layers. Of
#: the plans of dense layers in ``datasets/``, 76 of the 103 filter gradients of 20 and 47 in 16
#: bits failed the check against float64, and 46 of the 26,459 of engines not named here.
_INEXACT = frozenset({("dgrad", 2), ("wgrad", 17), ("wgrad", 20), ("wgrad", 47), ("wgrad", 62)})
#: Engines by direction that took at least 1.29 times as long as the fastest candidate, most of them
#: ten times, for every layer with groups in ``datasets/``.
_SLOW_IN_GROUPS = {"fprop": (0, 1, 11, 28, 35, 46, 67), "dgrad": (0, 1), "wgrad": (0, 1, 37, 39)}
#: Largest error of the plans that are offered: the relative error in the 2-norm, against float64,
#: and its growth with the root of the number of products that an element sums. Engines cut off bits
#: of partial sums, and some cut inputs off to TF32 in place of rounding them. A test holds the
#: plans in ``datasets/`` against it, those too that failed the check. From the H200's 52,048, of
#: sums of up to two million products, the nearest of each kind are at 0.76, 0.59, 0.82 and 0.89 of
#: it. Most are far below, but filter gradients of a million pixels are off by up to 2.4e-3 in
#: float16, 1.8e-5 in float32 and 3.0e-3 in TF32.
_ERROR = {"float16": 5e-4, "bfloat16": 4e-3, "float32": 2e-6, "tf32": 8e-4}
_ERROR_A_ROOT = {"float16": 2e-6, "bfloat16": 0.0, "float32": 2e-8, "tf32": 2.5e-6}


def largest_error(problem: Problem | ConvNd, *, tf32: bool) -> float:
    """Return the largest known error of a plan for `problem`, with or without rounding to TF32."""
    kind = "tf32" if tf32 else problem.dtype
    terms = max(operand.terms for operand in operation_of(problem).operands(problem))
    return float(_ERROR[kind] + _ERROR_A_ROOT[kind] * terms**0.5)


def may_have_plans(problem: Problem | ConvNd) -> bool:
    """Return whether plans are offered for layers like `problem`.

    Two-dimensional ones with groups need wide ones: of 90 others in ``datasets/``, plans were over
    5 % faster than all for two. Those of another rank are dense, of 16 bits and of channels in
    eights: of the others there, plans lose more by wrong predictions than they win.
    """
    if isinstance(problem, Problem):
        return problem.grouping != "grouped" or problem.has_wide_groups
    return problem.groups == 1 and problem.itemsize == 2 and not (problem.c % 8 or problem.k % 8)


class CudnnPlans:
    """The plans for the problems of one operation, from a file of them and of their tiles."""

    def __init__(
        self,
        name: str,
        operation: Operation,
        table: Callable[[], PlanTable],
        tiles: Callable[[], Mapping[str, Array]],
    ) -> None:
        self.name, self.operation, self._table, self._tiles = name, operation, table, tiles
        self.feature_names = (*operation.feature_names, *_DESCRIBED, *NOTES, *TILE_NAMES)

    @property
    def configs(self) -> NDArray[np.void]:
        return self._table().configs

    def legal(self, problem: Problem | ConvNd, device: Device) -> Mask:
        """Return the plans that cuDNN has offered for problems of the same kind.

        None computes the gradients of filter and bias together. Inexact engines are left out, and
        slow ones of layers with groups. Only a filter's gradient may differ from call to call, and
        only if the problem allows it.
        """
        plans = self._table()
        offered = plans.kinds.get(kind_of(problem))
        if offered is None or not may_have_plans(problem):
            return np.zeros(len(plans.configs), np.bool_)
        left_out = [engine for direction, engine in _INEXACT if direction == problem.direction]
        left_out += _SLOW_IN_GROUPS[problem.direction] if 1 < problem.groups < problem.c else ()
        offered = offered & ~np.isin(plans.configs[ENGINE], left_out)
        may_differ = problem.direction == "wgrad" and not problem.deterministic
        return offered if may_differ else offered & plans.notes["repeatable"]

    def listed(self, problem: Problem | ConvNd, device: Device) -> Mask:
        mask: Mask = self.legal(problem, device).copy()
        if not mask.any():
            return mask
        from confpred.cudnn.plans import Graph, release

        mask &= self.configs[RELEASE] == release()
        try:
            graph = Graph.without_gpu(problem, device)
        except LaunchError:  # nothing is offered here, as without a driver for most activations
            return np.zeros_like(mask)
        for row in np.flatnonzero(mask):
            mask[row] = graph.place(self._dict(row)) is not None
        return mask

    def allowed(self, problem: Problem | ConvNd, rows: Rows, limits: Limits) -> Mask:
        """Return the plans within `limits`; a workspace is limited when the plan is built."""
        notes = self._table().notes
        core = notes["tensor_core"][rows] & (problem.dtype == "float32")
        mask: Mask = notes["repeatable"][rows] | (not limits.deterministic)
        mask &= ~core | limits.tf32
        if limits.max_error is None:
            return mask
        exact, rounded = (largest_error(problem, tf32=tf32) for tf32 in (False, True))
        return mask & (np.where(core, rounded, exact) <= limits.max_error)

    def estimate_s(self, problem: Problem | ConvNd, device: Device, rows: Rows) -> Floats:
        return np.full(len(rows), _GUESS * device.roofline_s(problem))

    def features(
        self, problem: Problem | ConvNd, device: Device, rows: Rows
    ) -> NDArray[np.float32]:
        plans = self._table()
        own = [plans.configs[name][rows] for name in _DESCRIBED]
        own += [plans.notes[name][rows] for name in NOTES]
        shared = np.repeat(self.operation.features(problem, device), len(rows), axis=0)
        tiled = describe_tiles(problem, device, self._tiles(), rows)
        return np.column_stack([shared, *own, tiled]).astype(np.float32)

    def launch(self, problem: Problem | ConvNd, row: int) -> Launch:
        plans = self._table()
        release = release_text(int(plans.configs[RELEASE][row]))
        tf32 = bool(plans.notes["tensor_core"][row]) and problem.dtype == "float32"
        error = largest_error(problem, tf32=tf32)
        return Launch((), plan=LibraryPlan("cudnn", release, self._dict(row), tf32, error))

    def _dict(self, row: int | np.intp) -> dict[str, int]:
        config = self.configs[row]
        return {name: int(config[name]) for name in _DESCRIBED if config[name] != ABSENT}


FAMILIES = FAMILY, FAMILY_ND = (
    CudnnPlans("cudnn", CONVOLUTION, table, tiles),
    CudnnPlans("cudnn_nd", CONV, table_nd, tiles_nd),
)
