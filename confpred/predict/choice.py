"""A *choice*: the answer to "which kernel for this problem on this device"."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from confpred.errors import InvalidInput
from confpred.problem.record import Record

MAX_TOP = 32  # choices that one answer may have
Source = Literal["plan", "measured", "predicted", "heuristic", "fallback"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer, and where it comes from.

    Attributes:
        problem: what was asked.
        device: key of the device it was asked for.
        source: ``plan`` (pinned by the user), ``measured`` (this problem is in the training data),
            ``predicted`` (the model), ``heuristic`` (no model for this device, or for any of the
            families that are legal) or ``fallback`` (no kernel is legal).
        family: the kernel family, or None for PyTorch's own operator.
        config_id: row of the family's config table, or None.
        config: that row by field name, or None.
        predicted_ms: expected time of one launch, milliseconds; None for ``fallback``.
        regret_bound: with 95 % confidence the choice is at most this many times as slow as the best
            config, as calibrated on networks that the model was not trained on; None where
            nothing was calibrated.
        model: version of the model that answered, or None.
    """

    problem: Record
    device: str
    source: Source
    family: str | None = None
    config_id: int | None = None
    config: Mapping[str, int] | None = None
    predicted_ms: float | None = None
    regret_bound: float | None = None
    model: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The one JSON form of a choice, printed by the CLI and sent by the service."""
        return {
            "problem": self.problem.to_json(),
            "device": self.device,
            "source": self.source,
            "family": self.family,
            "config_id": self.config_id,
            "config": None if self.config is None else dict(self.config),
            "predicted_ms": self.predicted_ms,
            "regret_bound": self.regret_bound,
            "model": self.model,
        }


def check_top(top: object) -> int:
    """`top` itself.

    Raises:
        InvalidInput: it is not an integer from 1 to ``MAX_TOP``.
    """
    if not isinstance(top, int) or isinstance(top, bool) or not 1 <= top <= MAX_TOP:
        raise InvalidInput("top", top, f"an integer from 1 to {MAX_TOP}")
    return top


def answers_json(answers: Iterable[Sequence[Choice]]) -> str:
    """The choices of several problems as the CLI prints and the service sends them."""
    plain = {"choices": [[choice.to_json() for choice in choices] for choices in answers]}
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)
