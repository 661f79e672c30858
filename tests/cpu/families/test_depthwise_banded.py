"""The depthwise families on tensor cores: what their kernels take of a multiprocessor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import layers_of

from confpred.families.batch import ProblemBatch
from confpred.families.depthwise.depthwise_banded import most_registers
from confpred.families.protocol import Family
from confpred.families.registry import all_families
from confpred.problem.conv2d import DIRECTIONS, Problem
from confpred.problem.device import KNOWN, Device, get_device

H100 = get_device("h100")


FAMILIES = [all_families()[f"depthwise_banded_{direction}"] for direction in DIRECTIONS]


def test_a_window_of_one_tap_has_no_dilation() -> None:
    layer = "n=2 c=64 h=56 w=56 k=64 r=1 s=3 groups=64 dilation=2x1"
    assert FAMILIES[0].legal(Problem.parse(layer), H100).any()


@pytest.mark.parametrize("family", FAMILIES, ids=DIRECTIONS)
@given(data=st.data(), device=st.sampled_from(list(KNOWN.values())))
@settings(max_examples=30)
def test_legal_configs_fit_the_multiprocessor(
    family: Family, data: st.DataObject, device: Device
) -> None:
    problem = data.draw(layers_of(family, largest=40, images=40))
    rows = np.flatnonzero(family.legal(problem, device))
    tiling, configs = (
        family._workings(ProblemBatch([problem]), family.whole, rows),
        family.configs[rows],
    )
    blocks = configs["min_blocks"]
    assert (tiling.threads <= 512).all()
    assert (blocks * tiling.threads * most_registers(configs) <= device.regs_per_sm).all()
    assert (blocks * tiling.smem_bytes <= device.smem_per_sm).all()
    assert (tiling.in_items <= 16).all()  # two validity bits each, in a word
