"""Old against new: both choose for networks that the new one has not seen, and are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Fewer networks or problems tell nothing.
LEAST_NETWORKS, LEAST_PROBLEMS = 3, 10
#: The chance that a model which is no better is taken for one that is.
RISK = 0.1
#: Above this ratio a choice counts as slower.
SLOWER = 1.05
_RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class Pair:
    """A hold-out problem.

    Attributes:
        network: one that it is of.
        old_ms: measured time of what runs today.
        new_ms: measured time of what the new model chooses.
    """

    network: str
    old_ms: float
    new_ms: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison comes to.

    Attributes:
        better: whether the new model is to be used.
        why: in words.
        problems, networks: how many were compared.
        ratio: geometric mean of (new time / old time); None where too little was compared.
        at_most: upper bound on that ratio at a confidence of ``1 - RISK``, over networks drawn
            anew.
        slower, faster: problems on which the new choice is more than ``SLOWER`` times as slow, or
            as fast.
    """

    better: bool
    why: str
    problems: int
    networks: int
    ratio: float | None = None
    at_most: float | None = None
    slower: int = 0
    faster: int = 0


def compare(pairs: Sequence[Pair], seed: int = 0) -> Verdict:
    """Whether the new choices are faster, by more than chance could explain.

    Networks are drawn anew as a whole, because the layers of one are alike. Whoever chooses the
    same has a ratio of one there, which is as good as measured.
    """
    names = sorted({pair.network for pair in pairs})
    counts = {"problems": len(pairs), "networks": len(names)}
    if len(pairs) < LEAST_PROBLEMS or len(names) < LEAST_NETWORKS:
        why = (
            f"too little was compared: {len(pairs)} problems of {len(names)} networks, and it takes"
            f" {LEAST_PROBLEMS} of {LEAST_NETWORKS}; a larger budget measures more"
        )
        return Verdict(False, why, **counts)
    logs = np.log([pair.new_ms / pair.old_ms for pair in pairs])
    network = np.array([names.index(pair.network) for pair in pairs])
    ratio, at_most = float(np.exp(logs.mean())), _upper(logs, network, seed)
    slower = int((logs > np.log(SLOWER)).sum())
    faster = int((logs < -np.log(SLOWER)).sum())
    better = at_most < 1.0
    if better:
        why = f"its choices take {ratio:.3f} of the time, at most {at_most:.3f}"
    elif ratio < 1.0:
        why = (
            f"its choices take {ratio:.3f} of the time, which may be chance (up to {at_most:.3f}): "
            "a larger budget tells more"
        )
    else:
        why = f"its choices are no faster: {ratio:.3f} of the time"
    why += f" ({faster} of {len(pairs)} problems faster, {slower} slower, by more than 5 %)"
    return Verdict(
        better, why, **counts, ratio=ratio, at_most=at_most, slower=slower, faster=faster
    )


def _upper(logs: NDArray[np.float64], network: NDArray[np.intp], seed: int) -> float:
    """The quantile ``1 - RISK`` of the geometric mean over networks drawn with replacement."""
    count = int(network.max()) + 1
    sums = np.bincount(network, logs, count)
    sizes = np.bincount(network, minlength=count)
    drawn = np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return float(np.exp(np.quantile(means, 1 - RISK)))
