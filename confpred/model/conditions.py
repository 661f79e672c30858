"""What has changed since a model's measurements: kernels, the driver, cuDNN."""

from __future__ import annotations

from collections.abc import Sequence

from confpred.model.folder import Model

_NAMES = {"driver": "the driver", "cudnn": "cuDNN"}


def changes(model: Model, **now: str) -> tuple[str, ...]:
    """In words, which of the versions `now` (``driver``, ``cudnn``) are none that `model` was
    measured with; a version that is not known here (empty) or was not recorded counts as the same.
    """
    recorded = model.card.get("measured_with", {})
    return tuple(
        f"{_NAMES[name]} is {version}, and the model's measurements are of {_spoken(before)}"
        for name, version in now.items()
        if version and (before := recorded.get(name)) and version not in before
    )


def _spoken(versions: Sequence[str]) -> str:
    return " and ".join(versions)
