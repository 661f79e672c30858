"""The *portfolio*: the few configs that are worth offering to the predictor.

A family's table has thousands of configs, and nearly all of them are never the best at anything.
Leaving those out costs almost no speed, makes every prediction faster, and spares the regressor the
chance of a bad mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Family
from confpred.problem.device import Device
from confpred.training.dataset import Timings

TOLERANCE = 1.01  # a config this close to a problem's best is as good as the best
ENOUGH = 150  # candidates of a problem; as one serves others too, the mean ends near 400
_UNSERVED = 2.0  # regret that a problem counts with while none of its configs is chosen


def choose_portfolio(
    timings: Sequence[Timings], family: Family, device: Device
) -> NDArray[np.bool_]:
    """Choose configs in rounds, until each problem has ``ENOUGH`` legal ones.

    Each round adds configs until each problem has a new one within ``TOLERANCE`` of the best of
    its configs that are not chosen yet. One round serves the problems at hand; the further ones
    make sure of others, for which the first choices may be illegal or ill-fitting.

    A round is greedy: the next config is the one that most lowers the mean logarithm of the regret
    of the best config of the round. That mean is a submodular function, so a config's gain never
    grows, and only the configs on top of the list need to be looked at again (Minoux's accelerated
    greedy algorithm).

    Args:
        timings: of `family` alone.

    Returns:
        A mask over the family's config table.
    """
    time = np.full((len(timings), len(family.configs)), np.inf)
    for i, t in enumerate(timings):
        time[i, t.rows] = t.time_ms
    legal = np.array([family.legal(t.problem, device) for t in timings])
    portfolio = np.zeros(len(family.configs), np.bool_)
    while np.isfinite(time).any():
        portfolio[list(_cover(time))] = True
        served = (legal & portfolio).sum(axis=1) >= ENOUGH
        time[served] = np.inf
        time[:, portfolio] = np.inf
    return portfolio


def _cover(time: NDArray[np.float64]) -> Iterator[int]:
    """Columns of `time`, the most useful first, until each row has one near its smallest value."""
    best = time.min(axis=1, keepdims=True)
    regret = np.divide(time, best, out=np.full_like(time, np.inf), where=np.isfinite(best))
    cost = np.log(np.clip(regret, TOLERANCE, _UNSERVED))
    left = np.full(len(time), np.log(_UNSERVED))
    gain = (left[:, None] - cost).sum(axis=0)  # an upper bound once `left` has fallen
    while True:
        column = int(gain.argmax())
        now = float((left - cost[:, column]).clip(0).sum())
        if now < gain[column] - 1e-12:  # an old bound: correct it, and look again
            gain[column] = now
        elif now > 1e-9:
            left = np.minimum(left, cost[:, column])
            gain[column] = 0.0
            yield column
        else:
            return
