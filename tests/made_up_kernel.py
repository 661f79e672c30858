"""A Triton kernel's family without Triton, and made-up measurements of it: times are smooth in the
features, with a little noise. ``CONFPRED_FAMILIES=made_up_kernel`` makes it known."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np

from confpred.data.measurements import Measurement, Run
from confpred.data.parquet import write_rows
from confpred.measure.timing import Outcome
from confpred.problem.device import get_device
from confpred.triton.problem import KernelCall
from confpred.triton.source import Source
from confpred.triton.triton_family import TritonFamily

DEVICE = get_device("h100")
CONFIGS = [
    {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}
    for m, n, k, warps, stages in product((32, 64, 128), (32, 64, 128), (32, 64), (4, 8), (2, 3))
]
FAMILY = TritonFamily(
    *("product", ("M", "N", "K"), CONFIGS, Source("0" * 16, frozenset({"K", "BLOCK_K"})), "3.0"),
    extra={"ratio": lambda M, N, BLOCK_M, BLOCK_N, **_: M * BLOCK_N / (N * BLOCK_M)},  # noqa: N803
)
_RUN = Run("made-up", DEVICE.key, DEVICE.product, "0", "13.0", "test")


def calls(count: int, seed: int = 0) -> list[KernelCall]:
    """Return random calls, the same for a seed."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.uniform(5, 12, (count, 3))).astype(int).tolist()
    return [FAMILY.operation.problem(*row, "float16") for row in sizes]


def true_ms(call: KernelCall) -> np.ndarray:
    """Return the times of all configs without noise."""
    every = np.arange(len(CONFIGS))
    columns = dict(zip(FAMILY.feature_names, FAMILY.features(call, DEVICE, every).T, strict=True))
    bend = 0.15 * np.abs(columns["log_sums_a_thread"] - 5) + 0.2 * np.abs(
        columns["log_stage_bytes"] - 15
    )
    return 2e-3 + 1e3 * FAMILY.estimate_s(call, DEVICE, every) * np.exp(bend)


def write_measurements(path: str, count: int = 30) -> None:
    """Write measurements of all configs of some calls, a network each."""
    rng, rows = np.random.default_rng(1), []
    for call in calls(count):
        for row, ms in enumerate(true_ms(call) * np.exp(rng.normal(0, 0.01, len(CONFIGS)))):
            outcome = Outcome(row, "ok", float(ms), 0.01 * float(ms), 20)
            names = (str(call.layer()),)
            when = "2026-11-27T00:00:00Z"
            of = Measurement(call, names, FAMILY.name, FAMILY.source, _RUN, outcome, when)
            rows.append(of.to_row())
    write_rows(rows, FAMILY.operation, Path(path))
