"""A *measurement*: one config of one problem, tried on one device. The row of every data file.

``datasets/README.md`` is the column dictionary for readers of the Parquet files; this record is
its source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from confpred.families.protocol import Candidate
from confpred.families.registry import config_words
from confpred.measure.timing import Status
from confpred.problem.record import Record

_R = TypeVar("_R", bound=Record)


@dataclass(frozen=True, slots=True)
class Run:
    """What all measurements of one sampler run on one device share.

    Attributes:
        run_id: random identifier of the run.
        device: key of the device (``h100``).
        device_name: as the driver reports it.
        driver: driver version.
        cuda: NVRTC version that compiled the kernels.
        project: confpred's version and, where known, its commit.
    """

    run_id: str
    device: str
    device_name: str
    driver: str
    cuda: str
    project: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row.

    Attributes:
        problem: what was computed.
        networks: names of the networks that the problem comes from; empty for coverage problems.
        candidate: what computed it; the columns ``family`` and ``config`` hold its provider and its
            config in words.
        source_digest: identity of the kernel (`confpred.families.kernel_text.source_digest`); for a
            library's plan the library and its version; for PyTorch's operator the kernel
            that follows it, or empty.
        cudnn, cudnn_mode: for PyTorch's operator, the version of cuDNN and how it chooses its
            algorithms: ``benchmark`` or ``heuristics``. Empty for another provider.
        run: what the run's rows share.
        status: what became of it; the fields below hold 0 or NaN where they do not apply.
        time_ms: median time of one launch, milliseconds.
        spread_ms: interquartile range of that time, milliseconds.
        samples: timed graph replays behind the median.
        registers: of one thread, as compiled.
        local_bytes: local memory of one thread (spills and stack), as compiled.
        smem_bytes: dynamic shared memory of one block.
        error: ||out - reference|| / ||reference|| against a float32 reference.
        sm_clock_mhz: multiprocessor clock seen while the problem was measured.
        message: the error text of a failure.
        time: when, UTC, ISO 8601.
    """

    problem: Record
    networks: tuple[str, ...]
    candidate: Candidate
    source_digest: str
    cudnn: str
    cudnn_mode: str
    run: Run
    status: Status
    time_ms: float
    spread_ms: float
    samples: int
    registers: int
    local_bytes: int
    smem_bytes: int
    error: float
    sm_clock_mhz: int
    message: str
    time: str

    def to_row(self) -> dict[str, Any]:
        """A flat dictionary of column values: pairs become ``_h`` and ``_w`` columns."""
        row: dict[str, Any] = {}
        for field in dataclasses.fields(self.problem):
            value = getattr(self.problem, field.name)
            if field.name in self.problem.PAIRS:
                row[f"{field.name}_h"], row[f"{field.name}_w"] = value
            else:
                row[field.name] = value
        row["networks"] = ",".join(self.networks)
        row["family"] = self.candidate.provider
        row["config"] = config_words(self.candidate)
        row |= {name: getattr(self, name) for name in OWN_COLUMNS}
        return row | dataclasses.asdict(self.run)


#: Fields of a measurement that become a column as they are, in order.
OWN_COLUMNS = tuple(
    field.name
    for field in dataclasses.fields(Measurement)
    if field.name not in ("problem", "networks", "candidate", "run")
)


def problem_of_row(row: Mapping[str, Any], kind: type[_R]) -> _R:
    """The problem of class `kind` in a flat row.

    Raises:
        InvalidProblem: the row's values describe none.
    """
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name in kind.PAIRS:
            fields[field.name] = (int(row[f"{field.name}_h"]), int(row[f"{field.name}_w"]))
        elif field.type == "int":
            fields[field.name] = int(row[field.name])
        elif field.type == "bool":
            fields[field.name] = bool(row[field.name])
        else:
            fields[field.name] = str(row[field.name])
    return kind(**fields)
