"""What became of a candidate that was tried on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Status = Literal["ok", "illegal", "compile_error", "launch_error", "wrong_result", "timeout"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one config; the fields mean what `confpred.data.measurements.Measurement`
    says.

    Attributes:
        config_id: the provider's number of the config.
        cudnn, cudnn_mode: of PyTorch's own operator.
    """

    config_id: int
    status: Status
    time_ms: float = float("nan")
    spread_ms: float = float("nan")
    samples: int = 0
    registers: int = 0
    local_bytes: int = 0
    smem_bytes: int = 0
    error: float = float("nan")
    sm_clock_mhz: int = 0
    message: str = ""
    cudnn: str = ""
    cudnn_mode: str = ""
