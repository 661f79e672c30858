"""Options of a captured network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from confpred.errors import InvalidInput, nearest
from confpred.problem.limits import UNLIMITED, Limits
from confpred.pytorch.run.choosing import Constraints

NETWORK = "network"  # of the option `verify`


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the backend, the keys of ``torch.compile(..., options={...})``.

    Attributes:
        inductor: let Inductor compile PyTorch's operators: fewer passes over memory, for a first
            step that takes as long as that of ``torch.compile``. None: on a GPU, where Triton and a
            C compiler are installed.
        graphs: replay captured graphs as CUDA graphs.
        freeze: compute once what depends on parameters and buffers alone, such as folded filters.
            For networks whose weights are not written any more: a write is not seen.
        verify: time so many of the best predictions and PyTorch's operator for each layer, and take
            the fastest; 0 trusts the predictions. ``"network"``: time each captured graph with
            confpred's choices and without, and keep the faster; a graph compiles twice.
        max_regret: take a prediction only where the bound on its regret is at most this.
        limits: every choice keeps within them.
        tune: measure layers whose answers are guesses, for at most so many seconds of a network,
            and keep the answers (`confpred.pytorch.run.tuning`); 0 measures nothing. Answers that
            were kept before are used in any case. None: 60 on a GPU that no model knows, else 0.

    Raises:
        InvalidInput: a value is not allowed.
    """

    inductor: bool | None = None
    graphs: bool = True
    freeze: bool = False
    verify: int | str = 0
    max_regret: float | None = None
    limits: Limits = UNLIMITED
    tune: float | None = None

    def __post_init__(self) -> None:
        for name, more in (("inductor", ", or None"), ("graphs", ""), ("freeze", "")):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (more and value is None):
                raise InvalidInput(name, value, f"True or False{more}")
        counted = type(self.verify) is int and 0 <= self.verify <= 8
        if not counted and self.verify != NETWORK:
            raise InvalidInput("verify", self.verify, f"an integer from 0 to 8, or {NETWORK!r}")
        tune = self.tune
        if tune is not None and not (type(tune) in (int, float) and 0 <= tune < math.inf):
            raise InvalidInput("tune", tune, "seconds, or None")
        _ = self.constraints

    def __getattr__(self, name: str) -> None:
        """Return None for an option that a pickle of an earlier version lacks."""
        if name != "tune":
            raise AttributeError(name)

    @property
    def constraints(self) -> Constraints:
        return Constraints(self.limits, self.max_regret)

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Options:
        """Return the options that a dictionary names."""
        names = [f.name for f in fields(cls)]
        for name in options or {}:
            if name not in names:
                raise InvalidInput("options", name, nearest(name, names))
        return cls(**(options or {}))
