"""What comes first of all candidates: the families' own orders, and PyTorch's operator in them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from confpred.families.candidate import PYTORCH_OPERATOR, Candidate
from confpred.families.protocol import Rows

Ranked = Mapping[str, tuple[Rows, NDArray[np.float64]]]
Options = list[tuple[float, Candidate]]


def fastest(ranked: Ranked, most: int) -> Options:
    """The first `most` rows of each family in one order, with their seconds; `ranked` holds each
    family's rows and their rising seconds."""
    return sorted(
        (value, Candidate(name, row))
        for name, (rows, seconds) in ranked.items()
        for row, value in zip(rows[:most].tolist(), seconds[:most].tolist(), strict=True)
    )


def with_pytorch(
    options: Options, slowdown: tuple[float, float] | None, fastest_s: float | None = None
) -> Options:
    """`options`, which are ours, and among them PyTorch's own operator, before those that do not
    beat it even if its time is overestimated.

    Args:
        options: fastest first.
        slowdown: how many times as long as our fastest config PyTorch's takes: expected, and at
            least (`confpred.model.ranking.PytorchModel`); None where that is not known.
        fastest_s: seconds of our fastest config, where that is not among `options`.
    """
    if not options or slowdown is None:
        return options
    best = options[0][0] if fastest_s is None else fastest_s
    expected, least = (best * times for times in slowdown)
    place = sum(seconds <= least for seconds, _ in options)
    return [*options[:place], (expected, PYTORCH_OPERATOR), *options[place:]]
