"""Batch norm in two launches a direction, or in one: configs, legality, features and launches of
``batch_norm.cu`` and ``batch_norm_one_pass.cu``. ``batch_norm.cuh`` has a drawing of the layout.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common
from confpred.families.common import Occupancy, ceil_div
from confpred.families.protocol import Array, Floats, Mask, Rows
from confpred.families.table import Described, config_columns, config_table
from confpred.problem.activation import activation_macro
from confpred.problem.conv2d import dtype_macro
from confpred.problem.device import Device
from confpred.problem.limits import ORDINARY_ERROR
from confpred.problem.norm import BATCH_NORM, BatchNorm
from confpred.problem.operation import SCRATCH, ZEROED, KernelSpec, Launch, Operation, Step

ACCESS_BYTES = 16  # most that a thread can access at once
LEAST_LANES = 8  # the smallest limit of lanes in the config tables
LEAST_BLOCKS = 66
#: Accesses of a thread under way together, by their bytes: fewer would not hide the latency of
#: device memory, more do not fit into registers.
_UNROLLS = {16: (2, 4), 8: (4, 8), 4: (8,), 2: (8,)}
REGISTERS = 65_536  # of a multiprocessor, for kernels that are compiled to fit
#: A tensor beyond this many bytes leaves the L2 cache before something else reads it, so its last
#: accesses are marked as such.
STREAM_BYTES = 2**25
#: Share of the L2 cache in which a second pass finds what the first one read last.
_L2_SHARE = 0.6
#: Times of a grid's barrier, and of a ticket and the sums of the splits.
MEET_S, _TICKET_S = 3e-6, 2e-6
_STATISTICS = (
    "mean", "invstd", "new_running_mean", "new_running_var", "running_mean", "running_var", "eps",
    "momentum",
)  # fmt: skip


class Passes(Described):
    """Base of the families of a direction that read activations by rows, batch norm's and group
    norm's: a kernel has some samples of a matrix of rows by channels.

    Attributes:
        name: name of the family.
        direction: direction of its problems.
        kernel: name of its source, with which its kernels' names begin.
        fields: of its config table; all have ``vector`` (elements of an access), ``unroll``
            (accesses under way together), ``threads`` (of a block), ``lanes`` (most accesses side
            by side of a block) and ``blocks`` (of the grid, about).
    """

    operation: Operation = BATCH_NORM
    kernel = "batch_norm"
    more_features: tuple[str, ...] = ()
    fields: tuple[str, ...]
    configs: NDArray[np.void]

    def __init__(self, name: str, direction: str) -> None:
        self.name, self.direction = name, direction
        self.feature_names: tuple[str, ...] = (
            *self.operation.feature_names, *self.fields,
            "vector_bytes", "used_lanes", "block_threads", "tiles", "at_once", "splits",
            "log_steps", "own_steps", "step_waste", "registers", "smem_bytes", "segment",
            "alignment", "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste",
            "log_in_flight", "log_partials", "kept_share", *self.more_features, "log_estimate",
        )  # fmt: skip

    def _samples(self, problem: Any) -> int:
        return 1

    def _rows(self, problem: Any) -> int:
        """Return the rows of a sample."""
        rows: int = problem.rows
        return rows

    def _tiles(self, problem: Any, t: dict[str, Array]) -> None:
        """Set the tiles of columns, and their lanes."""
        t["tiles"] = ceil_div(t["columns"], t["lanes"])
        t["used_lanes"] = ceil_div(t["columns"], t["tiles"])

    def _splits(self, t: dict[str, Array]) -> Array:
        """Return how many blocks share the rows of a sample's tile."""
        splits: Array = np.clip(t["blocks"] // (t["tiles"] * t["samples"]), 1, t["steps"])
        return splits

    def _layout(self, problem: Any, rows: Rows | slice = slice(None)) -> dict[str, Array]:
        """Return the fields of some configs, and how they cut the problem, by name."""
        t = config_columns(self.configs, rows)
        columns = ceil_div(problem.c, t["vector"])
        t["columns"], t["vector_bytes"] = columns, t["vector"] * problem.itemsize
        self._tiles(problem, t)
        t["samples"] = np.full_like(t["lanes"], self._samples(problem))
        t["at_once"] = np.maximum(t["threads"] // t["used_lanes"], 1)
        t["block_threads"] = ceil_div(t["used_lanes"] * t["at_once"], 32) * 32  # no idle warps
        t["steps"] = ceil_div(self._rows(problem), t["at_once"] * t["unroll"])
        t["splits"] = self._splits(t)
        t["grid"] = t["tiles"] * t["splits"] * t["samples"]
        t["own_steps"] = ceil_div(t["steps"], t["splits"])
        t["sum_bytes"] = (2 * t["vector"] + 1) * (t["threads"] // 2) * 4
        return t

    def _shared(self, problem: Any, t: dict[str, Array]) -> Mask:
        """Return the legal rows by the rules that both families share."""
        size, c = problem.itemsize, problem.c
        widest = min(ACCESS_BYTES // size, c & -c)  # that divides the channels
        halved = widest // 2 if widest * size == ACCESS_BYTES else widest
        unrolls = np.zeros(len(t["vector"]), np.bool_)
        for width, counts in _UNROLLS.items():
            unrolls |= (t["vector_bytes"] == width) & np.isin(t["unroll"], counts)
        legal: Mask = (
            ((t["vector"] == widest) | (t["vector"] == halved))
            & unrolls
            & (t["used_lanes"] <= t["threads"])
            & ((t["lanes"] < 2 * t["columns"]) | (t["lanes"] == LEAST_LANES))
            # Twice as many blocks as there are steps are those of half as many.
            & (
                (t["blocks"] // 2 < t["tiles"] * t["steps"] * t["samples"])
                | (t["blocks"] == LEAST_BLOCKS)
            )
            & (t["grid"] < common.MAX_INT // t["threads"])
        )
        return legal & (problem.direction == self.direction)

    def _registers(self, problem: Any, t: dict[str, Array]) -> Array:
        """Estimate the registers of a thread of the launch that has more of them."""
        accesses = (1 + problem.is_backward + problem.residual) * t["unroll"] * t["vector_bytes"]
        has_argument = problem.is_backward and problem.activation != "none"
        return accesses // 4 + (6 if has_argument else 3) * t["vector"] + 26

    def _kept(self, problem: Any, t: dict[str, Array]) -> Array:
        """Return how many steps of a block stay in shared memory."""
        return np.zeros_like(t["vector"])

    def _smem_bytes(self, problem: Any, t: dict[str, Array]) -> Array:
        kept = self._kept(problem, t) * step_bytes(problem, t)
        return t["sum_bytes"] + kept

    def _derived(self, problem: Any, device: Device, rows: Rows) -> dict[str, NDArray[Any]]:
        """Return features by name, and ``estimate`` in seconds: what crosses device memory, less
        what the second pass finds in the L2 cache or in shared memory, and the times of launches
        and of the sums' additions."""
        p, t = problem, self._layout(problem, rows)
        registers = np.minimum(self._registers(p, t), REGISTERS // t["threads"])
        smem_bytes = self._smem_bytes(p, t)
        blocks = t["grid"]
        filled = Occupancy.of(device, blocks, t["block_threads"], registers, smem_bytes)
        reads = 1 + p.is_backward
        loads = t["unroll"] * t["vector_bytes"] * reads
        in_flight = filled.resident * t["used_lanes"] * t["at_once"] * loads
        kept = np.minimum(self._kept(p, t) / t["own_steps"], 1.0)
        again = p.passes - p.tensors  # tensors that both passes read
        between = p.tensor_bytes * reads * self._running(blocks, filled)  # bytes, of both reads
        cached = np.minimum(_L2_SHARE * device.l2_bytes / between, 1.0)
        moved = p.minimum_bytes + again * p.tensor_bytes * (1.0 - kept) * (1.0 - cached / 2)
        waste = t["steps"] * t["at_once"] * t["unroll"] / self._rows(p)
        partials = 8.0 * t["splits"] * t["used_lanes"] * t["vector"]  # bytes that one block reads
        adding_s = partials / common.LAST_BLOCK_BYTES_PER_S
        seconds = common.memory_s(1, device, in_flight) * moved * np.minimum(waste, 2.0)
        return {
            **t,
            **filled.features(),
            "log_steps": np.log2(t["steps"]),
            "step_waste": waste,
            "registers": registers,
            "smem_bytes": smem_bytes,
            "segment": t["used_lanes"] * t["vector_bytes"],
            "alignment": np.full(len(blocks), min(p.itemsize * p.c & -(p.itemsize * p.c), 128)),
            "log_in_flight": np.log2(in_flight),
            "log_partials": np.log2(partials),
            "kept_share": kept,
            "estimate": seconds * np.minimum(filled.wave_waste, 2.0)
            + (adding_s + self._fixed_s(p, t)),
        }

    def _running(self, blocks: Array, filled: Occupancy) -> Array | float:
        """Return the share of the blocks that are between their first and their last read at a
        time."""
        return 1.0

    @abstractmethod
    def _fixed_s(self, problem: Any, t: dict[str, Array]) -> Floats | float:
        """Return the seconds of launches and of waiting."""

    def _sizes(self, problem: Any, t: dict[str, int]) -> dict[str, int]:
        """Return scalars of a kernel beside those of the layout."""
        return {}

    def _macros(self, problem: Any) -> tuple[tuple[str, int | str], ...]:
        """Return macros beside those that all kernels of rows have."""
        return common.macros(FROZEN=int(problem.frozen))

    def _step(
        self, p: Any, t: dict[str, int], part: str, operands: tuple[str, ...], **macros: int | str
    ) -> Step:
        """Return the step of a kernel's `part` for a problem `p`, which may be the part of the
        family's that it computes."""
        scalars = {
            "rows": self._rows(p),
            "channels": p.c,
            "lanes": t["used_lanes"],
            **{name: t[name] for name in ("tiles", "at_once", "steps", "splits")},
            **self._sizes(p, t),
        }
        defines = (
            *common.macros(**macros),
            dtype_macro(p),
            activation_macro(p.activation),
            ("HAS_RESIDUAL", int(p.residual)),
            *self._macros(p),
            ("STREAM", int(p.tensor_bytes > STREAM_BYTES)),
            *((name.upper(), t[name]) for name in ("vector", "unroll", "threads")),
            *self._config_macros(t),
            *common.agreed_macros(sum_bytes=t["sum_bytes"]),
        )
        return Step(
            KernelSpec(f"{self.kernel}.cu", f"{self.kernel}{part}", defines),
            grid=self._grid(t),
            block=(t["block_threads"], 1, 1),
            smem_bytes=t["smem_bytes"],
            operands=operands,
            scalars=scalars,
        )

    def _config_macros(self, t: dict[str, int]) -> tuple[tuple[str, int | str], ...]:
        """Return macros of a config beside those that all families have."""
        return ()

    def _grid(self, t: dict[str, int]) -> tuple[int, int, int]:
        return t["tiles"] * t["splits"], t["samples"], 1

    def _one(self, problem: Any, row: int) -> dict[str, int]:
        """Return the layout of one config, as numbers."""
        layout = self._layout(problem, np.array([row]))
        layout["kept"] = self._kept(problem, layout)
        layout["smem_bytes"] = self._smem_bytes(problem, layout)
        return common.one(layout)


def step_bytes(problem: Any, t: Any) -> Any:
    """Return the bytes of the accesses of a block's step."""
    tensors = 1 + problem.is_backward
    return tensors * t["unroll"] * t["threads"] * t["vector_bytes"]


class TwoPass(Passes):
    """``kernels/batch_norm.cu``."""

    fields = ("vector", "unroll", "threads", "lanes", "blocks")
    configs = config_table(
        fields,
        product(
            (1, 2, 4, 8),
            (2, 4, 8),
            (256, 512),
            (LEAST_LANES, 16, 32, 64, 128, 256),
            (LEAST_BLOCKS, 132, 264, 528, 1056),
        ),
    )

    def legal(self, problem: BatchNorm, device: Device) -> Mask:
        t = self._layout(problem)
        return self._shared(problem, t) & (t["sum_bytes"] <= device.smem_per_block)

    def _fixed_s(self, problem: BatchNorm, t: dict[str, Array]) -> float:
        return common.LAUNCH_S if problem.frozen else 2 * common.LAUNCH_S + _TICKET_S

    def launch(self, problem: BatchNorm, row: int) -> Launch:
        p, t = problem, self._one(problem, row)
        plain = replace(p, activation="none", residual=False)
        if not p.is_backward:
            inputs = ("in", "weight", "bias", "residual", *p.statistics, "eps")
            apply = self._part(p, t, "apply", ("out", *inputs))
            operands = ("in", *_STATISTICS, ZEROED, SCRATCH)
            statistics = self._part(plain, t, "statistics", operands)
            return _launch(p, (apply,) if p.frozen else (statistics, apply), t)
        sums = self._part(
            p, t, "sums",
            ("in_grad", "residual_grad", "weight_grad", "bias_grad", "out_grad", "in", "weight",
             "bias", "residual", *p.statistics, "eps", ZEROED, SCRATCH),
        )  # fmt: skip
        gradient = self._part(
            plain if p.residual else p, t, "gradient",
            ("in_grad", "residual_grad" if p.residual else "out_grad", "in", "weight", "bias",
             "mean", "invstd", SCRATCH),
        )  # fmt: skip
        return _launch(p, (sums,) if p.frozen else (sums, gradient), t)

    def _part(self, p: Any, t: dict[str, int], part: str, operands: tuple[str, ...]) -> Step:
        if part in ("apply", "gradient"):
            t = {**t, "smem_bytes": 0}
        return self._step(p, t, f"_{part}", operands, KERNEL=f"KERNEL_{part.upper()}")


def _launch(problem: BatchNorm, steps: tuple[Step, ...], t: dict[str, int]) -> Launch:
    """Return the launch of `steps`, with the workspaces of sums that blocks share."""
    used = {name for step in steps for name in step.operands}
    return Launch(
        steps,
        zeroed_bytes=8 * t["tiles"] if ZEROED in used else 0,
        scratch_bytes=8 * (t["splits"] + 1) * problem.c if SCRATCH in used else 0,
        error=error_of(problem),
    )


def error_of(problem: Any) -> float | None:
    """Return the error of a launch (`Launch.error`): the residual's gradient is rounded before the
    input's gradient is made of it."""
    twice = problem.residual and problem.is_backward
    return ORDINARY_ERROR[problem.dtype] if twice else None


class OnePass(Passes):
    """``kernels/batch_norm_one_pass.cu``; also ``per_sm``, how many of its blocks a multiprocessor
    holds at once, and ``kept_kb``, shared memory for the activations of a block."""

    kernel = "batch_norm_one_pass"
    fields: tuple[str, ...] = (
        "vector", "unroll", "threads", "lanes", "blocks", "per_sm", "kept_kb",
    )  # fmt: skip
    configs = config_table(
        fields,
        (
            (vector, unroll, threads, lanes, blocks, per_sm, kept_kb)
            for vector, unroll, (threads, per_sm), lanes, blocks, kept_kb in product(
                (1, 2, 4, 8),
                (2, 4, 8),
                ((512, 1), (512, 2), (1024, 1)),
                (LEAST_LANES, 16, 32, 64, 128, 256),
                (LEAST_BLOCKS, 132, 264),
                (0, 80, 184),
            )
            # Only with as many blocks as the device can hold is a second one a multiprocessor of
            # use, and two share its memory.
            if (blocks == 264) == (per_sm == 2) and kept_kb in (0, 80 if per_sm == 2 else 184)
        ),
    )

    def legal(self, problem: Any, device: Device) -> Mask:
        t = self._layout(problem)
        smem_bytes = self._smem_bytes(problem, t)
        needed = t["per_sm"] * (smem_bytes + device.smem_reserved_per_block)
        return (
            self._shared(problem, t)
            & self._computes(problem, t)
            # Blocks that wait for one another must all be running.
            & (self._waiting(t) <= t["per_sm"] * device.sm_count)
            & (t["per_sm"] * t["threads"] <= 32 * device.warps_per_sm)
            # The kernel is compiled to fit so often, and would spill.
            & (self._registers(problem, t) <= REGISTERS // (t["per_sm"] * t["threads"]) + 16)
            & (smem_bytes <= device.smem_per_block)
            & (needed <= device.smem_per_sm)
            & ((t["kept_kb"] == 0) | (self._kept(problem, t) > 0))
        )

    def _computes(self, problem: Any, t: dict[str, Array]) -> Mask | bool:
        return not problem.frozen

    def _waiting(self, t: dict[str, Array]) -> Array:
        """Return how many blocks of a launch must be running together."""
        return t["grid"]

    def _kept(self, problem: Any, t: dict[str, Array]) -> Array:
        fit = 1024 * t["kept_kb"] // step_bytes(problem, t)
        steps: Array = np.minimum(fit, t["own_steps"])
        return steps

    def _registers(self, problem: Any, t: dict[str, Array]) -> Array:
        return super()._registers(problem, t) + 8

    def _fixed_s(self, problem: Any, t: dict[str, Array]) -> Floats | float:
        return common.LAUNCH_S + MEET_S

    def launch(self, problem: Any, row: int) -> Launch:
        p, t = problem, self._one(problem, row)
        operands: tuple[str, ...] = ("out", "in", "weight", "bias", "residual", *_STATISTICS)
        if p.is_backward:
            operands = (
                "in_grad", "residual_grad", "weight_grad", "bias_grad", "out_grad", "in", "weight",
                "bias", "residual", "mean", "invstd",
            )  # fmt: skip
        return _launch(p, (self._together(p, t, (*operands, ZEROED, SCRATCH)),), t)

    def _together(self, problem: Any, t: dict[str, int], operands: tuple[str, ...]) -> Step:
        """Return the step whose blocks may wait for one another."""
        backward = problem.is_backward
        part = "_backward" if backward else ""
        step = self._step(problem, t, part, operands, BACKWARD=int(backward))
        return replace(step, cooperative=t["splits"] > 1 and not t.get("cluster"))

    def _sizes(self, problem: Any, t: dict[str, int]) -> dict[str, int]:
        return {"kept": t["kept"]}

    def _config_macros(self, t: dict[str, int]) -> tuple[tuple[str, int | str], ...]:
        return common.macros(MIN_BLOCKS=t["per_sm"])


FAMILIES = (
    TwoPass("batch_norm_two_pass", "forward"),
    TwoPass("batch_norm_two_pass_backward", "backward"),
    OnePass("batch_norm_one_pass", "forward"),
    OnePass("batch_norm_one_pass_backward", "backward"),
)
