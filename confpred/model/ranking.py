"""One family's part of a choice: candidates -> features -> cost -> compare."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Family, Rows
from confpred.model.pools import DEVICE, Pool, bandwidth
from confpred.model.registers import Registers
from confpred.model.trees import Trees
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.problem.record import Record

#: The first trees correct the most, so they pick the finalists that the whole ensemble then orders:
#: a fifth of the work, and nearly always the same winner (`benchmarks/predict_latency.py` counts
#: the exceptions, and tells what they cost).
PREFIX_TREES = 20
FINALISTS = 32


@dataclass(frozen=True, slots=True)
class FamilyModel:
    """What a model has learned of one kernel family.

    Attributes:
        family: the kernel family.
        pool: the families that it shares `order` and `time` with.
        order: regressor of log(time / time of the problem's best config), from the pool's
            features. It need not know how fast a layer is, only what makes one config slower than
            another, and orders them better than `time` does.
        time: regressor of log(time / roofline time), from the same features.
        portfolio: mask over the family's config table: the configs worth offering.
        registers: what is known of the family's compiled kernels, or None.
    """

    family: Family
    pool: Pool
    order: Trees
    time: Trees
    portfolio: NDArray[np.bool_]
    registers: Registers | None = None

    def candidates(self, problem: Record, device: Device) -> Rows:
        """Configs worth comparing: the portfolio's legal ones, or all legal ones if it has none."""
        legal = self.family.legal(problem, device)
        offered = np.flatnonzero(legal & self.portfolio)
        return offered if len(offered) else np.flatnonzero(legal)

    def features(self, problem: Record, device: Device, rows: Rows) -> NDArray[np.float32]:
        """What `order` and `time` are fed."""
        return self.pool.features(self.family, problem, device, rows, self.registers)

    def rank(self, problem: Record, device: Device, rows: Rows) -> tuple[Rows, NDArray[np.float64]]:
        """The best ``FINALISTS`` of `rows`, or fewer, and their predicted seconds, rising.

        The best one's time is what `time` says; the others' follow by the ratios of `order`.
        """
        features = self.features(problem, device, rows)
        if len(rows) > FINALISTS:
            kept = np.argsort(self.order.predict(features, PREFIX_TREES), kind="stable")[:FINALISTS]
            rows, features = rows[kept], features[kept]
        cost = self.order.predict(features)
        ranked = np.lexsort((rows, cost))
        rows, features, cost = rows[ranked], features[ranked], cost[ranked]
        best = self.time.predict(features[:1])
        return rows, np.exp(best + cost - cost[:1]) * device.roofline_s(problem)


@dataclass(frozen=True, slots=True)
class PytorchModel:
    """What a model has learned of PyTorch's own operator, which has no configs.

    Attributes:
        operation: what it computes.
        ratio: regressor of log(its time / time of our fastest config), from `pytorch_features`; it
            does not tell large ratios apart, as nothing depends on that
            (`confpred.training.pytorch`).
        margin: by how much that logarithm may be too large, as calibrated on layers that the
            regressor was not trained on.
    """

    operation: Operation
    ratio: Trees
    margin: float

    def slowdown(self, problem: Record, device: Device) -> tuple[float, float]:
        """How many times as long as our fastest config it takes: expected, and at least."""
        features = pytorch_features(self.operation, problem, device)
        ratio = float(self.ratio.predict(features)[0])
        return exp(ratio), exp(ratio - self.margin)


def pytorch_feature_names(operation: Operation) -> tuple[str, ...]:
    """The columns of `pytorch_features`."""
    return (*operation.feature_names, DEVICE)


def pytorch_features(operation: Operation, problem: Record, device: Device) -> NDArray[np.float32]:
    """The features of `problem` alone, and the device's, as a matrix of one row."""
    return np.append(operation.features(problem, device), np.float32(bandwidth(device)))[None, :]


def rank_by_estimate(
    family: Family, problem: Record, device: Device
) -> tuple[Rows, NDArray[np.float64]]:
    """All legal configs and their seconds by the family's analytic estimate, rising."""
    rows = np.flatnonzero(family.legal(problem, device))
    seconds = family.estimate_s(problem, device, rows)
    order = np.argsort(seconds, kind="stable")
    return rows[order], seconds[order]
