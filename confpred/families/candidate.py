"""A *candidate*: one way to compute a problem, identified in the same way everywhere.

Answers, plans, models, the sampler's tasks and measurements all identify it by this record; how a
measurement file spells its config is `confpred.families.registry.config_words`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The provider that calls PyTorch's own operator.
PYTORCH = "pytorch"


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A config of a *provider*.

    Attributes:
        provider: who computes: the name of a kernel family, or ``PYTORCH``.
        config_id: the provider's own number for the config. A family's is the row of its config
            table. PyTorch's operator has one way, number 0. A provider may also list its candidates
            problem by problem; then it numbers them as it likes, as long as a number always means
            the same.
    """

    provider: str
    config_id: int = 0


PYTORCH_OPERATOR = Candidate(PYTORCH)
