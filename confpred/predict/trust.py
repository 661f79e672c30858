"""What a caller accepts: `max_regret`, the largest bound on regret that a prediction may have.

What is pinned or measured needs no bound, and PyTorch's own operator is what runs otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from confpred.errors import InvalidInput
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.predict.choice import Choice


def check_max_regret(value: object) -> float | None:
    """`value` itself.

    Raises:
        InvalidInput: it is neither None nor a number of at least 1.
    """
    if value is None:
        return None
    if type(value) not in (int, float) or not 1 <= value < math.inf:  # type: ignore[operator]
        raise InvalidInput("max_regret", value, "a number of at least 1, or none")
    return float(value)  # type: ignore[arg-type]


def is_trusted(choice: Choice, max_regret: float | None) -> bool:
    """Whether a caller that accepts `max_regret` takes `choice`; one that accepts None takes
    all."""
    if max_regret is None or not (choice.source == "predicted" or choice.is_guess):
        return True
    if choice.candidate == PYTORCH_OPERATOR:
        return True
    return choice.regret_bound is not None and choice.regret_bound <= max_regret


def within(choices: Sequence[Choice], max_regret: float | None) -> list[Choice]:
    """`choices`, best first, of which the first is to be launched: where a caller that accepts
    `max_regret` does not take it, PyTorch's own operator comes before it, as a ``fallback``, and as
    many choices follow as there were."""
    first = choices[0]
    if is_trusted(first, max_regret):
        return list(choices)
    theirs = replace(
        first,
        source="fallback",
        candidate=PYTORCH_OPERATOR,
        predicted_ms=None,
        regret_bound=None,
        model=None,
        donor=None,
    )
    # The bound is of a first choice alone.
    rest = [replace(c, regret_bound=None) for c in choices if c.candidate != PYTORCH_OPERATOR]
    return [theirs, *rest][: len(choices)]
