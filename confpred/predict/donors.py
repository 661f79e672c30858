"""Answers for a device that has no model: those of the model of the nearest other device.

What a model has learned are ratios: of a config's time to the best config's, and of that to the
roofline. Its features are of the problem, the config, and of how both fill the device. So it is
asked with the description of the device at hand, which also decides what is legal; only what it
learned is another device's. `benchmarks/model/transfer.py` measures what that costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from confpred.model.folder import Model
from confpred.problem.device import KNOWN, Device


def distance(one: Device, other: Device) -> float:
    """How unlike two devices are: the largest ratio among their sizes and rates, in doublings."""
    pairs = (
        (one.sm_count, other.sm_count),
        (one.smem_per_sm, other.smem_per_sm),
        (one.warps_per_sm, other.warps_per_sm),
        (one.dram_bytes_per_s, other.dram_bytes_per_s),
        (one.tensor_flops, other.tensor_flops),
        (one.simt_flops, other.simt_flops),
    )
    return max(abs(math.log2(a / b)) for a, b in pairs)


def donor_for(models: Mapping[str, Model], device: Device, problem: type) -> Model | None:
    """The model that is to answer for `device`, which has none: of those of `models` (by device
    key) that know problems of the class `problem`, the nearest device's; None if none does."""
    described = {key: KNOWN.get(key) or models[key].device for key in models}
    for key in sorted(described, key=lambda key: (distance(described[key], device), key)):
        if models[key].operation.problem is problem:
            return models[key]
    return None
