"""A *choice*: the answer to "which kernel for this problem on this device".

A caller accepts predictions whose bound on regret is at most `max_regret`; PyTorch's own operator
runs where one is refused. A pinned or measured choice needs no bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from confpred.errors import InvalidInput
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.registry import config_of, family_named
from confpred.problem.record import Record

MAX_TOP = 32  # choices that one answer may have
#: Shortest expected time of a launch, milliseconds: the fastest of 820,000 that were measured took
#: 0.0019.
LAUNCH_MS = 0.0018
CONFIDENCE = 0.95  # with which a bound on the regret is calibrated to hold
Source = Literal["pinned", "measured", "predicted", "transferred", "heuristic", "fallback"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer, and where it comes from.

    Attributes:
        problem: what was asked.
        device: key of the device it was asked for.
        source: ``pinned`` (by the user), ``measured`` (this problem is in the training data),
            ``predicted`` (the model), ``transferred`` (the model of another device, as this one has
            none), ``heuristic`` (no model covers a legal family) or ``fallback`` (no kernel is
            legal, or none that the caller accepts: `confpred.predict.choice`).
        candidate: what to launch; PyTorch's own operator is one too.
        predicted_ms: expected time of one launch, milliseconds; None for ``fallback``.
        pytorch_ms: expected time of PyTorch's own operator, milliseconds; None where no model
            predicts it.
        regret_bound: with 95 % confidence the choice is at most this many times as slow as the best
            config, PyTorch's operator included, as calibrated on networks that the model was not
            trained on; None without a calibration: out of distribution (`extrapolated`), or for a
            guess (`is_guess`).
        model: version of the model that answered, or None.
        extrapolated: whether the problem is out of distribution: its sizes or its kind are outside
            those that the model was trained on.
        donor: key of the source device, whose model made a ``transferred`` choice; else None.
        is_near: whether that has the architecture of `device` (`confpred.problem.device.is_near`).
        server: address of the service that answered, or None; it does not count for equality.
    """

    problem: Record
    device: str
    source: Source
    candidate: Candidate = PYTORCH_OPERATOR
    predicted_ms: float | None = None
    regret_bound: float | None = None
    model: str | None = None
    extrapolated: bool = False
    pytorch_ms: float | None = None
    donor: str | None = None
    is_near: bool = False
    server: str | None = field(default=None, compare=False)

    @property
    def provider(self) -> str:
        """The kernel family, or ``pytorch``."""
        return self.candidate.provider

    @property
    def family(self) -> str | None:
        """The kernel family; None where another provider is chosen, such as PyTorch's operator."""
        return None if family_named(self.provider) is None else self.provider

    @property
    def config_id(self) -> int | None:
        """Row of the family's config table; None where no family is chosen."""
        return None if self.family is None else self.candidate.config_id

    @property
    def config(self) -> Mapping[str, int] | None:
        """That row by field name; None where no family is chosen."""
        return None if self.family is None else config_of(self.candidate)

    @property
    def confidence(self) -> float | None:
        """Probability that `regret_bound` holds; None where there is no bound."""
        return None if self.regret_bound is None else CONFIDENCE

    @property
    def measured_on(self) -> str | None:
        """Key of the device whose measurements the choice is from; None if it is from none."""
        if self.source == "transferred":
            return self.donor
        return self.device if self.source in ("predicted", "measured") else None

    @property
    def is_guess(self) -> bool:
        """Whether the device has no model of such problems."""
        return self.source in ("transferred", "heuristic")

    @property
    def is_launched(self) -> bool:
        """Whether PyTorch's operator is replaced: not on a guess from another architecture."""
        return self.is_near or not self.is_guess

    def to_json(self) -> dict[str, Any]:
        """Return the one JSON form of a choice, printed by the CLI and sent by the service."""
        return {
            "problem": self.problem.to_json(),
            "device": self.device,
            "source": self.source,
            "provider": self.provider,
            "family": self.family,
            "config_id": self.config_id,
            "config": None if self.config is None else dict(self.config),
            "predicted_ms": self.predicted_ms,
            "pytorch_ms": self.pytorch_ms,
            "regret_bound": self.regret_bound,
            "confidence": self.confidence,
            "measured_on": self.measured_on,
            "extrapolated": self.extrapolated,
            "model": self.model,
        }


def launch_ms(seconds: float) -> float:
    """Return a predicted time in milliseconds, at least a launch's."""
    return max(seconds * 1e3, LAUNCH_MS)


def check_top(top: object) -> int:
    """Return `top`.

    Raises:
        InvalidInput: it is not an integer from 1 to ``MAX_TOP``.
    """
    if not isinstance(top, int) or isinstance(top, bool) or not 1 <= top <= MAX_TOP:
        raise InvalidInput("top", top, f"an integer from 1 to {MAX_TOP}")
    return top


def answers_json(answers: Iterable[Iterable[Choice]]) -> str:
    """Return the choices of several problems as the CLI prints and the service sends them."""
    return joined_json(map(answer_json, answers))


def answer_json(choices: Iterable[Choice]) -> str:
    """Return the choices of one problem, a part of `answers_json`."""
    plain = [choice.to_json() for choice in choices]
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)


def joined_json(answers: Iterable[str]) -> str:
    """Return the `answers_json` of several problems from the `answer_json` of each."""
    return f'{{"choices":[{",".join(answers)}]}}'


def check_max_regret(value: object) -> float | None:
    """Return `value` as a float, or None.

    Raises:
        InvalidInput: it is neither None nor a number of at least 1.
    """
    if value is None:
        return None
    if type(value) not in (int, float) or not 1 <= value <= 1e300:  # type: ignore[operator]
        raise InvalidInput("max_regret", value, "a number of at least 1, or none")
    return float(value)  # type: ignore[arg-type]


def is_trusted(choice: Choice, max_regret: float | None) -> bool:
    """Return whether a caller that accepts `max_regret` (None: any) takes `choice`."""
    if max_regret is None or choice.candidate == PYTORCH_OPERATOR:
        return True
    if not (choice.source == "predicted" or choice.is_guess):
        return True
    return choice.regret_bound is not None and choice.regret_bound <= max_regret


def with_fallback(choices: Sequence[Choice], max_regret: float | None) -> list[Choice]:
    """Return `choices`, best first; where a caller that accepts `max_regret` does not take the
    first one, PyTorch's own operator precedes it, as a ``fallback``, and the last is left out."""
    first = choices[0]
    if is_trusted(first, max_regret):
        return list(choices)
    fallback = Choice(
        *(first.problem, first.device, "fallback"),
        extrapolated=first.extrapolated,
        pytorch_ms=first.pytorch_ms,
        server=first.server,
    )
    # The bound is of a first choice alone.
    kernels = [replace(c, regret_bound=None) for c in choices if c.candidate != PYTORCH_OPERATOR]
    return [fallback, *kernels][: len(choices)]
