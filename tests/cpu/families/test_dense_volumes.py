"""The families of dense convolution of volumes: which layers they take, and how launches cover
them."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from layers import DENSE_VOLUMES as FAMILIES
from layers import H100
from ptxas import ARCHS, resources
from volume_layers import DENSE, legal_rows, parsed

from confpred.families.protocol import Family, config_dict
from confpred.problem.conv2d import DTYPES
from confpred.problem.device import KNOWN

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.mark.parametrize("words", DENSE)
@every_family
def test_layers_of_networks_and_unusual_ones_have_configs(family: Family, words: str) -> None:
    assert family.legal(parsed(family, words), H100).any()


@every_family
def test_narrow_layers_have_configs_on_every_board(family: Family) -> None:
    for device in KNOWN.values():
        assert family.legal(parsed(family, "c=16 k=32"), device).any(), device.key


@every_family
def test_the_channels_that_stay_in_shared_memory_are_few(family: Family) -> None:
    """Those of the result may be many, but of a filter's gradient."""
    direction = family.name.rpartition("_")[2]
    for c, k in ((24, 256), (256, 24)):
        legal = family.legal(parsed(family, f"c={c} k={k}"), H100)
        assert legal.any() == (direction == ("fprop" if c < k else "dgrad"))


@every_family
def test_layers_that_plans_win_have_none(family: Family) -> None:
    is_wgrad = family.name.endswith("wgrad")
    for c, k, few in ((24, 64, True), (32, 32, is_wgrad), (32, 64, is_wgrad), (40, 40, False)):
        for words in (f"c={c} k={k} stride=2", f"c={k} k={c} stride=2"):
            problem = parsed(family, words)
            assert family.legal(problem, H100).any() == few, words
    assert family.legal(parsed(family, "c=40 k=32"), H100).any()  # plans pad 40 channels


@every_family
def test_nearly_every_config_serves_some_layer(family: Family) -> None:
    met = np.zeros(len(family.configs), np.bool_)
    channels = ((8, 8), (16, 16), (32, 32), (24, 48), (48, 24), (32, 64), (64, 32), (8, 32))
    windows = ("", "t=2 r=2 s=2 stride=2 padding=0", "t=3 r=1 s=1 padding=1x0x0")
    for (c, k), side, n, window in product(channels, (7, 14, 28, 96), (1, 8), windows):
        words = f"n={n} c={c} k={k} d={side} h={side} w={side} {window}"
        met |= family.legal(parsed(family, words), H100)
    assert met.mean() > 0.98, [config_dict(family, row) for row in np.flatnonzero(~met)[:9]]


@every_family
def test_one_kernel_serves_every_size(family: Family) -> None:
    """Sizes, padding and batch are launch arguments; so are bands and splits, and the channels
    that are not summed over."""
    rng = random.Random(family.name)
    problem = parsed(family, "")
    channels = {"fprop": "k=48", "dgrad": "c=48", "wgrad": "c=24 k=64"}[problem.direction]
    other = parsed(family, f"n=7 d=30 h=40 w=52 padding=2x3x0 {channels}")
    rows = sorted(set(legal_rows(family, problem)) & set(legal_rows(family, other)))
    for row in rng.sample(rows, 20):
        kernel = family.launch(problem, row).steps[0].kernel
        assert family.launch(other, row).steps[0].kernel == kernel


@pytest.mark.slow(reason="five compiles a family and target")
@pytest.mark.parametrize("arch", ARCHS)
@every_family
def test_a_sample_compiles_and_hardly_spills(family: Family, arch: str) -> None:
    rng = random.Random(f"{family.name} {arch}")
    # The limits of sm_121 are those of sm_120.
    device = next(d for d in KNOWN.values() if d.arch[:5] == arch[:5])
    for words in rng.sample(DENSE, 5):
        problem = parsed(family, f"dtype={rng.choice(DTYPES[:2])} {words}")
        kernel = family.launch(problem, rng.choice(legal_rows(family, problem, device))).kernels[0]
        registers, stack = resources(kernel, arch)
        assert 8 <= registers <= 255
        assert stack <= 64, kernel
