"""A *measurement*: one config of one problem, tried on one device, a row of the data files.

``datasets/README.md`` describes the columns for readers of the files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from confpred.families.protocol import Candidate
from confpred.families.registry import config_words
from confpred.measure.timing import Outcome
from confpred.problem.record import Record

_R = TypeVar("_R", bound=Record)


@dataclass(frozen=True, slots=True)
class Run:
    """Columns that all measurements of one sampler run on one device share.

    Attributes:
        run_id: random identifier of the run.
        device, device_name: key of the device (``h100``), and its name as the driver reports it.
        driver, cuda: versions of the driver, and of the NVRTC that compiled the kernels.
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
    """One row of the data files.

    Attributes:
        problem: the layer that was computed.
        networks: networks that have the problem; empty for coverage problems.
        provider: provider of the candidate.
        source_digest: see `confpred.sampler.tasks.Task`.
        run: the columns that all rows of the run share.
        outcome: the result; each of its fields is a column.
        time: time of the measurement, UTC, ISO 8601.
    """

    problem: Record
    networks: tuple[str, ...]
    provider: str
    source_digest: str
    run: Run
    outcome: Outcome
    time: str

    @property
    def candidate(self) -> Candidate:
        """The config that was measured."""
        return Candidate(self.provider, self.outcome.config_id)

    def to_row(self) -> dict[str, Any]:
        """Return a flat dictionary of column values: pairs become ``_h`` and ``_w`` columns."""
        values = (getattr(self.problem, field.name) for field in dataclasses.fields(self.problem))
        members = (m for v in values for m in (v if isinstance(v, tuple) else (v,)))
        row: dict[str, Any] = dict(zip(self.problem.column_types(), members, strict=True))
        row["networks"] = ",".join(self.networks)
        row["family"] = self.provider
        row["config"] = config_words(self.candidate)
        own = {"source_digest": self.source_digest, "time": self.time}
        own |= dataclasses.asdict(self.outcome)
        row |= {name: own[name] for name in OWN_COLUMNS}
        return row | dataclasses.asdict(self.run)


#: Columns between those of the problem and those of the run: name -> type.
OWN_COLUMNS = {
    "source_digest": "str",
    "cudnn": "str",
    "cudnn_mode": "str",
    **{f.name: str(f.type) for f in dataclasses.fields(Outcome) if f.name != "config_id"},
    "time": "str",
}


def problem_of_row(row: Mapping[str, Any], kind: type[_R]) -> _R:
    """Return the problem of class `kind` in a flat row.

    Raises:
        InvalidProblem: the row's values describe no problem.
    """
    fields: dict[str, Any] = {}
    for name, type_ in ((field.name, str(field.type)) for field in dataclasses.fields(kind)):
        if name in kind.TUPLES:
            fields[name] = tuple(int(row[f"{name}_{axis}"]) for axis in kind.TUPLES[name])
        else:
            fields[name] = {"int": int, "bool": bool}.get(type_, str)(row[name])
    return kind(**fields)
