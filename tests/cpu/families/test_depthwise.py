"""The depthwise families: which layers they take, and how the kernel knows a layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import layers_of

from confpred.families.batch import ProblemBatch
from confpred.families.depthwise.depthwise import _describe_axes
from confpred.families.depthwise.depthwise_banded import most_registers
from confpred.families.protocol import Family
from confpred.families.registry import all_families
from confpred.problem.conv2d import DIRECTIONS, Problem
from confpred.problem.device import KNOWN, Device, get_device

H100 = get_device("h100")


IMAGES = st.sampled_from([all_families()[f"depthwise_{d}"] for d in ("fprop", "dgrad")])


@pytest.mark.parametrize("multiplier", [2, 3, 4, 6])
def test_a_channel_multiplier_is_forward_only(multiplier: int) -> None:
    layer = f"n=4 c=24 h=14 w=14 k={24 * multiplier} r=3 s=3 groups=24 padding=1"
    for direction in DIRECTIONS:
        family = all_families()[f"depthwise_{direction}"]
        legal = family.legal(Problem.parse(f"{layer} direction={direction}"), H100)
        assert legal.any() == (direction == "fprop")


@given(IMAGES.flatmap(lambda family: layers_of(family, largest=40, images=9)))
@settings(max_examples=60)
def test_the_axes_describe_the_convolution(problem: Problem) -> None:
    """Input and output meet at the same taps in the kernel's equation as in the definition."""
    problem = replace(problem, bias=False, residual=False, activation="none")
    sizes = ((problem.h, problem.p, problem.r), (problem.w, problem.q, problem.s))
    for axis, (size, result, window), stride, pad, dilation in zip(
        _describe_axes(problem),
        sizes,
        problem.stride,
        problem.padding,
        problem.dilation,
        strict=True,
    ):
        x, o, tap = np.ogrid[:size, :result, :window]
        expected = x == o * stride - pad + tap * dilation
        if problem.direction == "dgrad":  # the axis goes from output to input, the window turned
            expected = expected.transpose(1, 0, 2)[:, :, ::-1]
        i, o, tap = np.ogrid[: axis.size_in, : axis.size_out, : axis.window]
        found = axis.up * (i + axis.origin) == axis.down * (o + axis.shift) + axis.dilation * tap
        assert (found == expected).all()
        assert 0 <= axis.shift < axis.up or axis.shift == 0


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_vectors_leave_no_channel_over(direction: str) -> None:
    family = all_families()[f"depthwise_{direction}"]
    layer = f"n=4 c=10 h=14 w=14 k=10 r=3 s=3 groups=10 padding=1 direction={direction}"
    legal = family.legal(Problem.parse(layer), H100)
    assert legal.any()
    assert (10 % family.configs["vec"][legal] == 0).all()


BANDED = [all_families()[f"depthwise_banded_{direction}"] for direction in DIRECTIONS]


def test_a_window_of_one_tap_has_no_dilation() -> None:
    layer = "n=2 c=64 h=56 w=56 k=64 r=1 s=3 groups=64 dilation=2x1"
    assert BANDED[0].legal(Problem.parse(layer), H100).any()


@pytest.mark.parametrize("family", BANDED, ids=DIRECTIONS)
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
