"""The *portfolio*: the few configs that are worth offering to the predictor.

A family's table has thousands of configs, and nearly all of them are never the best at anything.
Leaving those out costs almost no speed, makes every prediction faster, and spares the regressor the
chance of a bad mistake.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from confpred.device import Device
from confpred.families.base import Family
from confpred.training.data import Timings

TOLERANCE = 1.005  # a config this close to a problem's best is as good as the best
MAX_CANDIDATES = 200  # portfolio configs that are legal for the median problem
_UNSERVED = 2.0  # what a problem counts for while the portfolio has none of its measured configs


def choose_portfolio(
    timings: Sequence[Timings], family: Family, device: Device
) -> NDArray[np.bool_]:
    """Choose configs until each problem has one within ``TOLERANCE`` of its best measured one.

    Greedy: the next config is the one that most lowers the mean logarithm of the regret of the best
    config in the portfolio; that mean is a submodular function, so a config's gain never grows, and
    only the configs on top of the list need to be looked at again (Minoux's accelerated greedy
    algorithm). It stops early where the median problem has ``MAX_CANDIDATES`` legal configs.

    Args:
        timings: of `family` alone.

    Returns:
        A mask over the family's config table.
    """
    regret = np.full((len(timings), len(family.configs)), np.inf)
    for i, t in enumerate(timings):
        regret[i, t.rows] = t.time_ms / t.time_ms.min()
    cost = np.log(np.clip(regret, TOLERANCE, _UNSERVED))
    legal = np.array([family.legal(t.problem, device) for t in timings])
    left = np.full(len(timings), np.log(_UNSERVED))
    gain = (left[:, None] - cost).sum(axis=0)  # an upper bound once `left` has fallen
    portfolio = np.zeros(len(family.configs), np.bool_)
    candidates = np.zeros(len(timings))
    while np.median(candidates) < MAX_CANDIDATES:
        best = int(gain.argmax())
        now = float((left - cost[:, best]).clip(0).sum())
        if now < gain[best] - 1e-12:  # an old bound: correct it, and look again
            gain[best] = now
            continue
        if now <= 1e-9:
            break
        portfolio[best] = True
        left = np.minimum(left, cost[:, best])
        candidates += legal[:, best]
        gain[best] = 0.0
    return portfolio
