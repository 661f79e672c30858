"""Softmax of the rows of a matrix: an operation that is no convolution, and a kernel family for it.
``docs/adding-a-kernel.md`` walks through this file; ``softmax.cu`` is the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Rows
from confpred.problem.device import Device
from confpred.problem.operation import REFERENCE, KernelSpec, Launch, Operand, Step
from confpred.problem.record import Record

if TYPE_CHECKING:
    import torch

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class SoftmaxProblem(Record):
    """Softmax of each row of a matrix, or its logarithm.

    Attributes:
        rows, columns: of the matrix; for the scores of attention N * heads * queries and keys, for
            a classifier N and classes.
        dtype: of both tensors; sums are in float32.
        log: the result is the logarithm of softmax, as a loss needs it.
    """

    LIMITS: ClassVar[Mapping[str, tuple[int, int]]] = {"rows": (1, 2**24), "columns": (8, 2**18)}
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {"dtype": DTYPES}

    rows: int
    columns: int
    dtype: str = "float16"
    log: bool = False

    @property
    def minimum_bytes(self) -> int:
        return 2 * self.itemsize * self.rows * self.columns

    @property
    def flops(self) -> int:
        return 4 * self.rows * self.columns

    def layer(self) -> SoftmaxProblem:
        """Return the columns: rows are a batch of images or tokens, which a user chooses."""
        return replace(self, rows=1, dtype="float16", log=False)


class Softmax:
    """Operands: ``out`` and ``in`` (rows, columns)."""

    name = "softmax"
    problem: type[Record] = SoftmaxProblem
    feature_names: tuple[str, ...] = ("log_rows", "log_columns", "dtype", "log", "log_bytes")

    def operands(self, problem: SoftmaxProblem) -> tuple[Operand, ...]:
        shape, dtype = (problem.rows, problem.columns), problem.dtype
        # Inputs from -8 to 8: some results of a long row are then far above the error bound.
        return Operand("out", shape, dtype, terms=1), Operand("in", shape, dtype, scale=8.0)

    def features(self, problem: SoftmaxProblem, device: Device) -> NDArray[np.float32]:
        """Logarithms are to base 2."""
        p = problem
        log_rows, log_columns, log_bytes = np.log2((p.rows, p.columns, p.minimum_bytes))
        row = (log_rows, log_columns, DTYPES.index(p.dtype), p.log, log_bytes)
        return np.array([row], np.float32)

    def reference(self, problem: SoftmaxProblem, output: str) -> Step:
        return Step(
            KernelSpec("softmax.cu", "reference_softmax", _defines(problem)),
            grid=(-(-problem.rows // 64), 1, 1),
            block=(64, 1, 1),
            smem_bytes=0,
            operands=(REFERENCE, "in"),
            scalars={"rows": problem.rows, "columns": problem.columns},
        )

    def pytorch(self, problem: SoftmaxProblem, tensors: Mapping[str, torch.Tensor]) -> Any:
        x = tensors["in"]
        return x.log_softmax(-1) if problem.log else x.softmax(-1)


def _defines(problem: SoftmaxProblem) -> tuple[tuple[str, int | str], ...]:
    return ("DTYPE", f"DTYPE_{problem.dtype.upper()}"), ("LOG", int(problem.log))


#: (threads of a row, rows of a block): two sizes of block where a warp or less has a row.
_THREADS = (
    (8, 16), (8, 64), (16, 8), (16, 32), (32, 4), (32, 16), (128, 1), (512, 1), (1024, 1)
)  # fmt: skip
_FIELDS = ("row_threads", "block_rows", "vector", "pieces")


def _config_table() -> NDArray[np.void]:
    rows = [
        (row_threads, block_rows, vector, pieces)
        for (row_threads, block_rows), vector, pieces in product(
            _THREADS, (1, 4, 8), (0, 1, 2, 3, 4, 8)
        )
        # Few threads would read a row twice for long; 1 to 3 single elements are too few to keep.
        if (row_threads >= 32 or pieces > 0) and (vector > 1 or pieces in (0, 4, 8))
    ]
    table = np.array(rows, dtype=[(name, np.int32) for name in _FIELDS])
    table.setflags(write=False)
    return table


class SoftmaxFamily:
    """See ``softmax.cu``."""

    name = "softmax"
    operation = Softmax()
    configs = _config_table()
    feature_names: tuple[str, ...] = (
        "log_rows", "log_columns", "dtype", "log", "log_bytes",
        *_FIELDS,
        "threads", "registers", "vector_bytes", "used", "log_blocks", "waves", "wave_waste",
        "log_bytes_in_flight", "log_estimate",
    )  # fmt: skip

    def legal(self, problem: SoftmaxProblem, device: Device) -> NDArray[np.bool_]:
        t = self.configs
        held = t["row_threads"] * t["vector"] * t["pieces"]
        legal: NDArray[np.bool_] = (
            # A thread accesses at most 16 bytes at once, at a multiple of their size.
            (t["vector"] * problem.itemsize <= 16)
            & (problem.columns % t["vector"] == 0)
            # The registers of a row hold it, and less than half of them are idle: more threads or
            # pieces do the work of fewer, slower. The smallest configs serve shorter rows.
            & (
                (t["pieces"] == 0)
                | ((held >= problem.columns) & ((held < 2 * problem.columns) | (held <= 32)))
            )
        )
        return legal

    def estimate_s(
        self, problem: SoftmaxProblem, device: Device, rows: Rows
    ) -> NDArray[np.float64]:
        return self._derived(problem, device, rows)["estimate"]

    def features(self, problem: SoftmaxProblem, device: Device, rows: Rows) -> NDArray[np.float32]:
        derived = self._derived(problem, device, rows)
        of_problem = self.operation.features(problem, device)[0]
        columns = {
            **dict(zip(self.operation.feature_names, of_problem, strict=True)),
            **{field: self.configs[field][rows] for field in _FIELDS},
            **derived,
            "log_estimate": np.log2(derived["estimate"] / device.roofline_s(problem)),
        }
        matrix = np.empty((len(rows), len(self.feature_names)), np.float32)
        for index, feature in enumerate(self.feature_names):
            matrix[:, index] = columns[feature]
        return matrix

    def _derived(
        self, problem: SoftmaxProblem, device: Device, rows: Rows
    ) -> dict[str, NDArray[np.float64]]:
        """How each config would run `problem`: the derived features, and the estimated seconds.

        The estimate is the larger of two times: the bytes over the copy bandwidth, and over what
        the loads in flight sustain at a latency of a microsecond; stretched by the waste of the
        last wave, plus a fixed time for each wave. A row that is read twice comes from L2 the
        second time, which costs half.
        """
        t = self.configs[rows]
        threads = t["row_threads"] * t["block_rows"]
        vector_bytes = t["vector"] * problem.itemsize
        registers = 32 + t["pieces"] * vector_bytes // 4
        per_sm = np.minimum(
            np.minimum(device.warps_per_sm * 32 // threads, device.blocks_per_sm),
            device.regs_per_sm // (threads * registers),
        )
        blocks = -(-problem.rows // t["block_rows"].astype(np.int64))
        waves = blocks / (device.sm_count * per_sm)
        loads = np.where(t["pieces"] == 0, 4, t["pieces"])  # the loop is unrolled four times
        held = np.maximum(t["row_threads"] * t["vector"] * loads, problem.columns)
        in_flight = np.minimum(blocks, device.sm_count * per_sm) * threads * loads * vector_bytes
        moved = problem.minimum_bytes * np.where(t["pieces"] == 0, 1.25, 1.0)
        seconds = np.maximum(moved / device.dram_bytes_per_s, moved * 1e-6 / in_flight)
        wave_waste = np.ceil(waves) / waves
        return {
            "threads": threads,
            "registers": registers,
            "vector_bytes": vector_bytes,
            "used": problem.columns / held,
            "log_blocks": np.log2(blocks),
            "waves": waves,
            "wave_waste": wave_waste,
            "log_bytes_in_flight": np.log2(in_flight),
            "estimate": seconds * np.minimum(wave_waste, 2.0) + np.ceil(waves) * 1e-6,
        }

    def launch(self, problem: SoftmaxProblem, row: int) -> Launch:
        row_threads, block_rows, vector, pieces = (int(x) for x in self.configs[row])
        defines = (
            *_defines(problem),
            ("ROW_THREADS", row_threads),
            ("VECTOR", vector),
            ("PIECES", pieces),
        )
        step = Step(
            KernelSpec("softmax.cu", "softmax", defines),
            grid=(-(-problem.rows // block_rows), 1, 1),
            block=(row_threads, block_rows, 1),
            smem_bytes=0,
            operands=("out", "in"),
            scalars={"rows": problem.rows, "columns": problem.columns},
        )
        return Launch((step,))


FAMILY = SoftmaxFamily()
