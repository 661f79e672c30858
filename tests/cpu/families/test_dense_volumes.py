"""The families of dense convolution of volumes: which layers they take, and how launches cover
them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from layers import DENSE_VOLUMES as FAMILIES
from layers import H100, random_legal_conv
from ptxas import ARCHS, resources

from confpred.families.protocol import Family, config_dict
from confpred.families.registry import families_of, family_named
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import DTYPES
from confpred.problem.device import KNOWN, Device

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
#: A layer, and what makes it another one, of which no family has a config.
LAYER = "rank=3 n=2 c=24 d=48 h=48 w=48 k=24 t=3 r=3 s=3 padding=1"
REFUSED = (
    "layout=channels_first", "dtype=float32", "groups=2", "c=36", "k=36", "stride=3",
    "dilation=1x1x2", "t=8", "s=8", "c=40 k=40", "t=7 r=7 s=7 padding=3",
    "n=1 c=8 k=8 d=3 h=46341 w=46341", "rank=2 d=1 t=1", "rank=1 d=1 t=1 h=1 r=1",
)  # fmt: skip
#: Layers of networks, and some that are unlike these.
SERVED = (
    "c=16 k=16 d=96 h=96 w=96",
    "c=8 k=8 d=128 h=128 w=128 dtype=bfloat16",
    "c=24 k=64 stride=2",
    "c=24 k=48 stride=1x2x2",
    "t=2 r=2 s=2 stride=2 padding=0 c=64 k=24",
    "t=4 r=4 s=4 stride=2 c=24 k=64",
    "t=5 r=5 s=5 padding=2 c=16 k=16",
    "t=3 r=1 s=1 padding=1x0x0 stride=2x1x1",
    "t=1 dilation=2x1x1 padding=0x1x1",
    "cut=3",
    "d=3 h=5 w=7 padding=4",
    "d=1 h=1 w=1",
)


def parsed(family: Family, words: str) -> ConvNd:
    """Return `LAYER` in the family's direction, with other `words`."""
    given = f"{LAYER} direction={family.name.rpartition('_')[2]} {words}".split()
    fields = dict(word.split("=") for word in given)
    if fields["rank"] != "3":
        fields["padding"] = "0"
    return ConvNd.parse(" ".join(f"{name}={value}" for name, value in fields.items()))


def legal_rows(family: Family, problem: ConvNd, device: Device = H100) -> list[int]:
    return np.flatnonzero(family.legal(problem, device)).tolist()


@every_family
def test_a_family_is_found_by_name_and_problem(family: Family) -> None:
    assert family_named(family.name) is family
    assert families_of(parsed(family, ""))[family.name] is family
    assert len(np.unique(family.configs)) == len(family.configs) <= 2300
    assert len(set(family.feature_names)) == len(family.feature_names)


@pytest.mark.parametrize("words", SERVED)
@every_family
def test_layers_of_networks_and_unusual_ones_have_configs(family: Family, words: str) -> None:
    assert family.legal(parsed(family, words), H100).any()


@every_family
def test_narrow_layers_have_configs_on_every_board(family: Family) -> None:
    for device in KNOWN.values():
        assert family.legal(parsed(family, "c=16 k=32"), device).any(), device.key


@pytest.mark.parametrize("words", REFUSED)
@every_family
def test_other_layers_have_none(family: Family, words: str) -> None:
    if words.startswith("t=7") and family.name.endswith("wgrad"):
        words = "t=7 r=7 s=7 padding=3 groups=24"  # it need not hold the filter
    assert not family.legal(parsed(family, words), H100).any()
    other = {"fprop": "dgrad", "dgrad": "wgrad", "wgrad": "fprop"}
    direction = other[parsed(family, "").direction]
    assert not family.legal(parsed(family, f"direction={direction}"), H100).any()


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


@pytest.mark.parametrize("words", SERVED)
@every_family
def test_no_two_configs_of_a_layer_are_the_same_launch(family: Family, words: str) -> None:
    problem = parsed(family, words)
    seen: dict[object, int] = {}
    for row in legal_rows(family, problem):
        steps = family.launch(problem, row).steps
        key = tuple((s.kernel, s.grid, s.block, tuple(s.scalars.items())) for s in steps)
        assert key not in seen, (config_dict(family, row), config_dict(family, seen[key]))
        seen[key] = row


@every_family
def test_features_and_estimates_are_finite_and_no_promise(family: Family) -> None:
    rng = random.Random(family.name)
    matrices = []
    for device in KNOWN.values():
        problem = random_legal_conv(rng, family, device)
        problem = replace(problem, n=rng.choice((1, 64)))
        rows = np.flatnonzero(family.legal(problem, device))
        matrix = family.features(problem, device, rows)
        assert matrix.shape == (len(rows), len(family.feature_names))
        assert matrix.dtype == np.float32
        assert np.isfinite(matrix).all()
        assert (family.estimate_s(problem, device, rows) >= device.roofline_s(problem)).all()
        some = rng.sample(range(len(rows)), min(5, len(rows)))
        assert np.array_equal(family.features(problem, device, rows[some]), matrix[some])
        matrices.append(matrix)
    spans = np.ptp(np.concatenate(matrices), axis=0)
    constant = {n for n, span in zip(family.feature_names, spans, strict=True) if not span}
    allowed = {"direction", "rank", "channels_first", "groups", "log_groups", "deterministic"}
    allowed |= {f"dilation_{axis}" for axis in "dhw"} | {"activation", "residual"}
    assert constant <= allowed


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
    for words in rng.sample(SERVED, 5):
        problem = parsed(family, f"dtype={rng.choice(DTYPES[:2])} {words}")
        kernel = family.launch(problem, rng.choice(legal_rows(family, problem, device))).kernels[0]
        registers, stack = resources(kernel, arch)
        assert 8 <= registers <= 255
        assert stack <= 64, kernel
