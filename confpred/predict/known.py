"""Which devices are known, and what is known of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from confpred.model.folder import Model
from confpred.problem.device import KNOWN, Device


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A device and what its model knows; a device without one has None and nothing there.

    Attributes:
        device: its description.
        model: version of its model.
        operation: what that model chooses for, such as ``conv2d``.
        families: the kernel families and libraries that it knows.
        layers: the kinds of layers that were measured: ``dense``, ``depthwise``, ``grouped``; empty
            for another operation, which has no such kinds.
        rows, problems, networks: how much it was trained on: measurements of this device, and the
            problems and networks that these are of.
        driver, cudnn: versions that the measurements were made with.
    """

    device: Device
    model: str | None = None
    operation: str | None = None
    families: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    rows: int | None = None
    problems: int | None = None
    networks: int | None = None
    driver: tuple[str, ...] = ()
    cudnn: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the one JSON form, printed by ``confpred devices --json``."""
        return dataclasses.asdict(self)


def known_devices(models: Mapping[str, Model]) -> list[KnownDevice]:
    """Return the boards of the table and the devices that only a model describes, those with a
    model first.

    Raises:
        ModelError: a model is damaged.
    """
    learned = [_of(model) for model in models.values()]
    has_one = {known.device.key for known in learned}
    return learned + [KnownDevice(device) for key, device in KNOWN.items() if key not in has_one]


def _of(model: Model) -> KnownDevice:
    card = model.card
    data, made_with = card.get("data", {}), card.get("measured_with", {})
    groupings = {g for entry in card["families"].values() for g in entry.get("groupings") or ()}
    return KnownDevice(
        model.device,
        model.version,
        model.operation.name,
        tuple(model.families),
        tuple(sorted(groupings)),
        *(data.get(name) for name in ("rows", "problems", "networks")),
        *(tuple(made_with.get(name, ())) for name in ("driver", "cudnn")),
    )
