"""The layers that a choice cost most, with what was measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from confpred.families.protocol import Candidate
from confpred.families.registry import config_words
from confpred.report.judged import Evaluated, JudgedLayer
from confpred.training.dataset import Dataset, Timings

_FASTEST = 5  # configs that are told of beside the choice


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured config of a layer.

    Attributes:
        rank: 1 for the fastest that was measured.
        config: in words.
        time_ms: milliseconds.
        spread: interquartile range of the time over the time.
        chosen: whether this is what was chosen.
    """

    rank: int
    config: str
    time_ms: float
    spread: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class WorstLayer:
    """A layer, and what was measured of it.

    Attributes:
        evaluation: name of the evaluation.
        layer: as it was judged.
        floor_share: the part of the roofline that its best config reaches.
        measured: the fastest configs, and the chosen one; empty without the measurements.
        count: how many configs were measured; 0 without the measurements.
        pytorch_ms: time of PyTorch's operator, milliseconds, where it was measured.
    """

    evaluation: str
    layer: JudgedLayer
    floor_share: float
    measured: tuple[Measured, ...]
    count: int
    pytorch_ms: float | None


def worst_layers(evaluated: Evaluated, dataset: Dataset | None, count: int) -> list[WorstLayer]:
    """The `count` layers with the largest regret, the worst first."""
    ordered = sorted(evaluated.layers, key=lambda layer: (-layer.regret, str(layer.problem)))
    of_layer = {} if dataset is None else {(t.problem, t.family): t for t in dataset.timings}
    found = []
    for layer in ordered[:count]:
        timings = of_layer.get((layer.problem, layer.family))
        found.append(
            WorstLayer(
                evaluation=evaluated.name,
                layer=layer,
                floor_share=evaluated.device.roofline_s(layer.problem) * 1e3 / layer.best_ms,
                measured=() if timings is None else tuple(_measured(layer, timings)),
                count=0 if timings is None else len(timings.rows),
                pytorch_ms=dataset.pytorch_ms.get(layer.problem) if dataset else None,
            )
        )
    return found


def _measured(layer: JudgedLayer, timings: Timings) -> Sequence[Measured]:
    """The fastest configs, and the one whose time is that of the choice: an evaluation names the
    time and not the config, and two configs hardly have the same to the bit."""
    chosen = int(np.abs(timings.time_ms - layer.regret * layer.best_ms).argmin())
    order = np.argsort(timings.time_ms, kind="stable").tolist()
    shown = order[:_FASTEST]
    if chosen not in shown:
        shown = [*shown, chosen]
    return [
        Measured(
            rank=order.index(i) + 1,
            config=config_words(Candidate(timings.family, int(timings.rows[i]))),
            time_ms=float(timings.time_ms[i]),
            spread=float(timings.spread_ms[i] / timings.time_ms[i]),
            chosen=i == chosen,
        )
        for i in shown
    ]
