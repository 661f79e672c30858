"""Norms over groups of channels in one launch a direction: configs, legality, features and launches
of ``group_norm.cu``. ``group_norm.cuh`` has a drawing of the layout, which is batch norm's with
whole groups in a tile.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from confpred.families import common
from confpred.families.common import Occupancy, ceil_div
from confpred.families.norm import batch_norm
from confpred.families.norm.batch_norm import LEAST_BLOCKS, LEAST_LANES
from confpred.families.protocol import Array, Floats, Mask
from confpred.families.table import config_table
from confpred.problem.device import Device
from confpred.problem.limits import ORDINARY_ERROR
from confpred.problem.norm_of_groups import NORM, Norm, norm_macros
from confpred.problem.operation import SCRATCH, ZEROED, Launch

_MOST_SAMPLES = 65_535  # of a launch: CUDA counts them in 16 bits
_MOST_LANES = 256
#: Most rows of a thread, which adds them up one after the other. With 8,100 on an H200 deviations
#: were off by more than the sampler allows; no faster config has more than these.
_MOST_ROWS = 2048
_CLUSTERS = (2, 4, 8)  # blocks; every GPU that has clusters has these
_CLUSTER_S = 1e-6  # that a cluster's blocks wait for one another
#: (threads of a block, blocks of a multiprocessor, memory of a block for what it keeps, in KiB).
_BLOCKS = ((256, 4, 40), (512, 1, 80), (512, 1, 184), (512, 2, 80), (1024, 1, 184))


def error_of(problem: Norm) -> float | None:
    """Return the error of a launch (`Launch.error`): gradients are differences, and single elements
    of them may be as small as what was rounded."""
    return ORDINARY_ERROR[problem.dtype] if problem.is_backward else None


class GroupNorm(batch_norm.OnePass):
    """``kernels/group_norm.cu``, with batch norm's fields of a config, and ``cluster``: 0, or how
    many blocks that share a sample's tile are a cluster."""

    operation = NORM
    kernel = "group_norm"
    more_features = ("samples", "tile_groups")
    fields = (*batch_norm.OnePass.fields, "cluster")
    configs = config_table(
        fields,
        [
            (vector, unroll, threads, lanes, blocks, per_sm, kept_kb, cluster)
            for vector, unroll, lanes in product(
                (1, 2, 4, 8), (4, 8), (4, LEAST_LANES, 16, 32, 64, 128, _MOST_LANES)
            )
            for threads, per_sm, kept_kb in _BLOCKS
            for blocks, cluster in (
                (LEAST_BLOCKS, 0),
                (132 * per_sm, 0),
                *((LEAST_BLOCKS, cluster) for cluster in _CLUSTERS),
            )
        ],
    )

    def _samples(self, problem: Norm) -> int:
        return problem.n

    def _rows(self, problem: Norm) -> int:
        return problem.p

    def _tiles(self, problem: Norm, t: dict[str, Array]) -> None:
        super()._tiles(problem, t)
        unit = problem.width // np.gcd(problem.width, t["vector"])  # lanes of whole groups
        t["used_lanes"] = ceil_div(t["used_lanes"], unit) * unit
        t["tiles"] = ceil_div(t["columns"], t["used_lanes"])
        t["tile_groups"] = t["used_lanes"] * t["vector"] // problem.width

    def _splits(self, t: dict[str, Array]) -> Array:
        splits: Array = np.where(t["cluster"] > 0, t["cluster"], super()._splits(t))
        return splits

    def _smem_bytes(self, problem: Norm, t: dict[str, Array]) -> Array:
        shown = ceil_div(2 * t["vector"] * t["used_lanes"], 4) * 16
        return super()._smem_bytes(problem, t) + np.where(t["cluster"] > 0, shown, 0)

    def _waiting(self, t: dict[str, Array]) -> Array:
        waits = (t["splits"] > 1) & (t["cluster"] == 0)
        return np.where(waits, t["grid"], 0)

    def _running(self, blocks: Array, filled: Occupancy) -> Array | float:
        return np.minimum(1.0 / filled.waves, 1.0)

    def _fixed_s(self, problem: Norm, t: dict[str, Array]) -> Floats:
        waiting = np.where(t["cluster"] > 0, _CLUSTER_S, batch_norm.MEET_S)
        return common.LAUNCH_S + np.where(t["splits"] > 1, waiting, 0.0)

    def legal(self, problem: Norm, device: Device) -> Mask:
        t = self._layout(problem)
        alone = t["splits"] == 1
        # Two kinds of blocks of 512 threads have a multiprocessor for themselves: the one that
        # keeps less is for rows that fit, and for GPUs of less shared memory.
        few = t["own_steps"] * batch_norm.step_bytes(problem, t) <= 1024 * 80
        few_enough = few | (device.smem_per_block < 1024 * 184)
        kept = np.where(t["kept_kb"] == 80, few_enough, ~few)
        return (
            super().legal(problem, device)
            & (kept | (t["threads"] != 512) | (t["per_sm"] != 1))
            # Where a tile of a sample has one block anyway, the blocks asked for say nothing.
            & (~alone | (t["blocks"] == LEAST_BLOCKS))
            & ((t["cluster"] == 0) | (device.has_clusters & (t["cluster"] <= t["steps"])))
        )

    def _computes(self, problem: Norm, t: dict[str, Array]) -> Mask:
        # `row_norm` reads the rows that are its own once.
        served = problem.centred and not (problem.is_trivial or problem.is_of_rows)
        legal: Mask = (
            ((t["used_lanes"] <= t["lanes"]) | (t["lanes"] == _MOST_LANES))
            & (t["used_lanes"] <= t["threads"] // 2)  # groups meet where a block's sums do
            & (t["samples"] <= _MOST_SAMPLES)
            & (t["own_steps"] * t["unroll"] <= _MOST_ROWS)
        )
        return legal & served

    def _macros(self, problem: Norm) -> tuple[tuple[str, int | str], ...]:
        return (("FROZEN", 0), *norm_macros(problem)[1:])

    def _config_macros(self, t: dict[str, int]) -> tuple[tuple[str, int | str], ...]:
        return (*super()._config_macros(t), ("CLUSTER", t["cluster"]))

    def _sizes(self, problem: Norm, t: dict[str, int]) -> dict[str, int]:
        return {"width": problem.width, "samples": problem.n, **super()._sizes(problem, t)}

    def _grid(self, t: dict[str, int]) -> tuple[int, int, int]:
        if t["cluster"]:
            return t["tiles"], t["samples"], t["cluster"]
        return super()._grid(t)

    def launch(self, problem: Norm, row: int) -> Launch:
        """Return the launch. Blocks of a tile, and samples, share sums in the workspaces."""
        p, t = problem, self._one(problem, row)
        inputs = ("in", "weight", "bias", "residual", "mean", "invstd")
        operands: tuple[str, ...] = ("out", *inputs, "eps", ZEROED, SCRATCH)
        if p.is_backward:
            gradients = ("in_grad", "residual_grad", "weight_grad", "bias_grad", "out_grad")
            operands = (*gradients, *inputs, ZEROED, SCRATCH)
        return Launch(
            (self._together(p, t, operands),),
            zeroed_bytes=4 * (2 * p.n + 1) * t["tiles"],
            scratch_bytes=8 * p.n * (t["splits"] + 2) * p.c,
            error=error_of(p),
        )


FAMILIES = (GroupNorm("group_norm", "forward"), GroupNorm("group_norm_backward", "backward"))
