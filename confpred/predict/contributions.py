"""Why one config is expected to be faster than another: the difference, shared among its causes.

A model's trees say that one config of a family takes, say, 1.08 times as long as another for a
problem. Both are rows of features, and what the trees see is the difference of the rows. The
features that differ are put together by what they tell, such as how many blocks fit on a
multiprocessor, and the logarithm of the ratio is shared among these groups by their Shapley values:
the mean, over all orders in which the groups can be exchanged one by one, of what exchanging one of
them changes. The shares add up to the whole exactly. They need the trees' answers alone, none of
the counts and inner values that LightGBM's own explanations take and a model's files leave out.

A row whose groups are of two configs is mostly no config that exists; what trees say of it is what
they learned of those features from others. That is so of all explanations of this kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Candidate
from confpred.families.registry import config_words
from confpred.model.rank import FamilyModel
from confpred.problem.device import Device
from confpred.problem.record import Record

#: What features tell, by patterns of their names; the first that matches counts. A family's own
#: config fields come before these, and what no pattern names after them. The exact shares of g
#: groups take 2^g predictions, so there are to be few.
THEMES = {
    "occupancy": r"(blocks|warps)_per_sm|registers|smem_bytes|(block_)?threads|bytes_in_flight",
    "waves": r"waves|wave_waste|log_blocks.*|rounds|round_waste|steps|.*at_once",
    "wasted work": r".*_waste|.*_tail|bands_cut",
    "memory access": r"halo.*|log_(load|filter|sum)_bytes|run_bytes|pixel_alignment|loads|in_x",
    "work": r".*products|(log_)?work|band_.*|.*_items|.*_tiles|warp_groups|lanes|block_r|parts|sums"
    "|slice_rows|k_blocks|in_turn",
    "estimate": r"log_estimate",
}
CONFIG, OTHER = "config", "other"


@dataclass(frozen=True, slots=True)
class Contribution:
    """One cause of the difference between two configs.

    Attributes:
        theme: what the features tell: ``config`` for the config's own fields, or ``occupancy``,
            ``waves``, ``wasted work``, ``memory access``, ``work``, ``estimate`` and ``other``.
        ratio: the factor on the time of the other config over that of the chosen one: above 1 it
            speaks for the chosen one. The factors of all causes multiply to the whole ratio.
        features: the values that differ, of the chosen config and of the other, by name.
    """

    theme: str
    ratio: float
    features: Mapping[str, tuple[float, float]]

    def to_json(self) -> dict[str, Any]:
        return {
            "theme": self.theme,
            "ratio": self.ratio,
            "features": [
                {"name": name, "chosen": chosen, "other": other}
                for name, (chosen, other) in self.features.items()
            ],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two configs of a family, and why the model prefers one.

    Attributes:
        other: what the chosen config is compared with.
        ratio: expected time of the other over that of the chosen; below 1 where the model itself
            would prefer the other, as it may where the choice was measured or pinned.
        contributions: the causes, the one with the largest effect first.
    """

    other: Candidate
    ratio: float
    contributions: tuple[Contribution, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "provider": self.other.provider,
            "config": config_words(self.other),
            "ratio": self.ratio,
            "contributions": [contribution.to_json() for contribution in self.contributions],
        }


def middling(learned: FamilyModel, problem: Record, device: Device) -> Candidate:
    """The config in the middle of the order in which the model puts the legal ones; of the
    two in the middle, the faster one. There is to be a legal one."""
    rows = learned.legal(problem, device)
    cost = learned.order.predict(learned.features(problem, device, rows))
    row = rows[np.lexsort((rows, cost))[(len(rows) - 1) // 2]]
    return Candidate(learned.family.name, int(row))


def compare(
    learned: FamilyModel, problem: Record, device: Device, chosen: Candidate, other: Candidate
) -> Comparison:
    """Why `chosen` is expected to be faster than `other`; both are of the family of `learned`."""
    rows = np.array([chosen.config_id, other.config_id], np.intp)
    ours, theirs = learned.features(problem, device, rows)
    names = learned.pool.feature_names
    differ = [i for i in range(len(names)) if _differ(ours[i], theirs[i])]
    groups: dict[str, list[int]] = {}
    for i in differ:
        groups.setdefault(theme_of(names[i], learned.family.configs.dtype.names or ()), []).append(
            i
        )
    shares, whole = _shapley(learned, ours, theirs, list(groups.values()))
    contributions = [
        Contribution(
            theme, math.exp(share), {names[i]: (float(ours[i]), float(theirs[i])) for i in columns}
        )
        for (theme, columns), share in zip(groups.items(), shares, strict=True)
    ]
    contributions.sort(key=lambda c: -abs(math.log(c.ratio)))
    return Comparison(other, math.exp(whole), tuple(contributions))


def _differ(one: np.float32, other: np.float32) -> bool:
    return bool(one != other) and not (np.isnan(one) and np.isnan(other))


def theme_of(name: str, config_fields: Sequence[str]) -> str:
    """What the feature `name` tells, of a family whose configs have `config_fields`."""
    if name in config_fields:
        return CONFIG
    return next((t for t, pattern in _patterns() if pattern.fullmatch(name)), OTHER)


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((theme, re.compile(pattern)) for theme, pattern in THEMES.items())


def _shapley(
    learned: FamilyModel,
    ours: NDArray[np.float32],
    theirs: NDArray[np.float32],
    groups: Sequence[Sequence[int]],
) -> tuple[list[float], float]:
    """What exchanging each group of columns of `ours` for those of `theirs` adds to the cost, and
    what exchanging all does."""
    count = len(groups)
    mixed = np.tile(
        ours, (2**count, 1)
    )  # bit g of a row's number: whether it has group g of theirs
    exchanged = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    for group, columns in enumerate(groups):
        rows = np.flatnonzero(exchanged[:, group])
        mixed[np.ix_(rows, np.array(columns))] = theirs[list(columns)]
    cost = learned.order.predict(mixed)
    sizes = exchanged.sum(axis=1)
    shares = []
    for group in range(count):
        without = np.flatnonzero(exchanged[:, group] == 0)
        weights = [1 / (count * math.comb(count - 1, size)) for size in sizes[without].tolist()]
        shares.append(float((cost[without + 2**group] - cost[without]) @ weights))
    return shares, float(cost[-1] - cost[0])
