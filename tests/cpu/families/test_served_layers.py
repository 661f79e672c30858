"""Which layers each family has configs for, how many, and of how few kernels."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layers import ARCHITECTURES, CONVOLUTIONS, H100, WIDTHS
from strategies import layers_of, problems_of

from confpred.families.protocol import Family, config_dict
from confpred.problem.conv2d import DIRECTIONS, Problem
from confpred.problem.device import Device

FAMILIES = CONVOLUTIONS
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
BANDED = [f"depthwise_banded_{direction}" for direction in DIRECTIONS]
LARGE = [f"depthwise_large_{direction}" for direction in DIRECTIONS]
MULTIPLIED = [f"depthwise_multiplied_{direction}" for direction in DIRECTIONS[1:]]
DEPTHWISE = [f"depthwise_{direction}" for direction in DIRECTIONS]
DENSE = ["dense_fprop", "dense_dgrad"]
GROUPED = ["grouped_fprop", "grouped_dgrad", "grouped_wgrad"]


def parsed(layer: str, family: Family) -> Problem:
    """Return the layer of the family's direction; a later word stands in for an earlier one."""
    words = dict(word.split("=") for word in f"direction={family.direction} {layer}".split())
    return Problem.parse(" ".join(f"{name}={value}" for name, value in words.items()))


#: Families, how many configs at least and kernels at least and at most, and layers of networks.
TYPICAL = [
    (
        GROUPED[:2],
        (100, 1, 120),
        [
            "n=32 c=64 h=64 w=64 k=64 r=3 s=3 groups=8 padding=1",
            "n=128 c=1024 h=16 w=16 k=1024 r=3 s=3 groups=128 padding=1",
            "n=32 c=256 h=28 w=28 k=256 r=3 s=3 groups=16 padding=1",
            "n=64 c=512 h=28 w=28 k=512 r=3 s=3 groups=16 padding=1",
            "n=32 c=448 h=28 w=28 k=448 r=3 s=3 groups=7 padding=1",
            "n=32 c=144 h=56 w=56 k=144 r=3 s=3 groups=144 padding=1",
            "n=32 c=96 h=56 w=56 k=96 r=7 s=7 groups=96 padding=3 dtype=bfloat16",
            "n=32 c=144 h=56 w=56 k=144 r=5 s=5 groups=144 padding=2 stride=2",
            "n=32 c=128 h=56 w=56 k=128 r=3 s=3 groups=16 padding=2 dilation=2",
        ],
    ),
    (
        GROUPED[2:],
        (200, 1, 100),
        [
            "n=128 c=144 h=56 w=56 k=144 r=3 s=3 groups=144 padding=1",
            "n=64 c=96 h=112 w=112 k=96 r=3 s=3 groups=96 padding=1 stride=2",
            "n=128 c=672 h=14 w=14 k=672 r=5 s=5 groups=672 padding=2",
            "n=32 c=1152 h=7 w=7 k=1152 r=5 s=5 groups=1152 padding=2 bias=true",
            "n=128 c=384 h=14 w=14 k=384 r=7 s=7 groups=384 padding=3 bias=true",
            "n=32 c=64 h=64 w=64 k=64 r=3 s=3 groups=8 padding=1 dtype=bfloat16",
            "n=64 c=256 h=28 w=28 k=256 r=3 s=3 groups=16 padding=1 deterministic=true",
            "n=64 c=512 h=14 w=14 k=512 r=3 s=3 groups=16 padding=1",
            "n=64 c=512 h=14 w=14 k=512 r=3 s=3 groups=8 padding=1",
        ],
    ),
    (
        DEPTHWISE,
        (150, 5, 60),
        [
            "n=128 c=144 h=56 w=56 k=144 r=3 s=3 groups=144 padding=1",
            "n=32 c=240 h=28 w=28 k=240 r=5 s=5 groups=240 padding=2 stride=2 dtype=bfloat16",
            "n=64 c=192 h=28 w=28 k=192 r=7 s=7 groups=192 padding=3 dtype=float32",
            "n=128 c=960 h=7 w=7 k=960 r=3 s=3 groups=960 padding=1",
        ],
    ),
    (
        BANDED,
        (30, 3, 250),
        [
            "n=128 c=768 h=7 w=7 k=768 r=7 s=7 groups=768 padding=3",
            "n=64 c=384 h=14 w=14 k=384 r=7 s=7 groups=384 padding=3 dtype=bfloat16",
            "n=32 c=96 h=56 w=56 k=96 r=7 s=7 groups=96 padding=3",
            "n=128 c=144 h=56 w=56 k=144 r=3 s=3 groups=144 padding=1",
            "n=32 c=240 h=28 w=28 k=240 r=5 s=5 groups=240 padding=2 dtype=bfloat16",
        ],
    ),
    (
        MULTIPLIED,
        (8, 2, 4),
        [
            "n=64 c=64 h=64 w=64 k=128 r=7 s=7 stride=2 padding=3 groups=64",
            "n=64 c=256 h=16 w=16 k=512 r=3 s=3 stride=2 padding=1 groups=256 dtype=bfloat16",
            "n=32 c=96 h=56 w=56 k=192 r=2 s=2 stride=2 groups=96",
        ],
    ),
    (
        LARGE,
        (10, 4, 200),
        [
            "n=8 c=128 h=56 w=56 k=128 r=31 s=31 padding=15 groups=128",
            "n=32 c=512 h=14 w=14 k=512 r=27 s=27 padding=13 groups=512",
            "n=64 c=1024 h=7 w=7 k=1024 r=13 s=13 padding=6 groups=1024 dtype=bfloat16",
            "n=64 c=124 h=56 w=56 k=124 r=51 s=5 padding=25x2 groups=124",
            "n=64 c=499 h=14 w=14 k=499 r=5 s=47 padding=2x23 groups=499",
        ],
    ),
]
#: Layers without a config: families, a layer that they serve, and changes of it.
OTHER = [
    (
        DENSE,
        "n=1 c=8 h=56 w=56 k=8 r=3 s=3 padding=1",
        ["groups=2", "stride=3", "dilation=2", "r=8 padding=4", "c=12", "h=46341 w=46341"],
    ),
    (
        GROUPED,
        "n=32 c=128 h=56 w=56 k=128 r=3 s=3 groups=16",
        [
            *("stride=3", "dilation=1x3", "groups=1", "c=60 k=60 groups=15", "k=256"),
            *("r=8 padding=4", "s=9 padding=4", "dtype=float32"),
        ],
    ),
    (
        DEPTHWISE,
        "n=2 c=64 h=56 w=56 k=64 r=3 s=3 groups=64",
        ["groups=32", "stride=3", "dilation=1x3", "r=12", "h=20000 w=20000"],
    ),
    (
        BANDED,
        "n=2 c=64 h=56 w=56 k=64 r=3 s=3 groups=64",
        [
            *("groups=32", "k=128", "stride=2", "stride=1x2", "dilation=2", "r=12"),
            *("c=60 k=60 groups=60", "dtype=float32", "h=20000 w=20000"),
        ],
    ),
    (
        MULTIPLIED,
        "n=2 c=64 h=56 w=56 k=128 r=3 s=3 groups=64",
        ["k=64", "k=640", "c=128 k=128", "stride=3", "dilation=2", "r=12", "h=20000 w=20000"],
    ),
    (
        LARGE,
        "n=2 c=64 h=56 w=56 k=64 r=31 s=5 padding=15x2 groups=64",
        [
            *("groups=32", "k=128", "stride=2", "stride=1x2", "dilation=2x1", "r=11 padding=5x2"),
            "dtype=float32",
        ],
    ),
]


@pytest.mark.parametrize(
    ("name", "least", "few", "many", "layer"),
    [
        (name, *bounds, layer)
        for names, bounds, layers in TYPICAL
        for name, layer in product(names, layers)
    ],
)
@pytest.mark.parametrize("device", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_typical_layers_have_many_configs_of_few_kernels(
    name: str, least: int, few: int, many: int, layer: str, device: Device
) -> None:
    family = FAMILIES[name]
    problem = parsed(layer, family)
    rows = np.flatnonzero(family.legal(problem, device))
    assert len(rows) >= least
    # Rows that share these fields share their kernel (`test_one_kernel_serves_every_size`).
    _, first = np.unique(family.configs[list(family.kernel_fields)][rows], return_index=True)
    kernels = {family.launch(problem, int(row)).steps[0].kernel for row in rows[first]}
    assert few <= len(kernels) <= many


@pytest.mark.parametrize(
    ("name", "layer", "change"),
    [
        (name, layer, change)
        for names, layer, changes in OTHER
        for name in names
        for change in changes
    ],
)
def test_other_layers_have_none(name: str, layer: str, change: str) -> None:
    family = FAMILIES[name]
    assert family.legal(parsed(layer, family), H100).any()
    assert not family.legal(parsed(f"{layer} {change}", family), H100).any()
    turned = {"fprop": "dgrad", "dgrad": "wgrad", "wgrad": "fprop"}[family.direction]
    assert not family.legal(parsed(f"{layer} direction={turned}", family), H100).any()


@pytest.mark.parametrize("name", [*GROUPED[:2], *BANDED, *LARGE])
@given(data=st.data())
def test_every_layer_has_a_config(name: str, data: st.DataObject) -> None:
    """Save those whose filter fits neither in registers nor in shared memory."""
    problem = data.draw(layers_of(FAMILIES[name]))
    assume(problem.group_width * problem.r * problem.s <= 32 * 7 * 7)
    assert FAMILIES[name].legal(problem, H100).any()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_window_and_size_of_image_has_a_filter_gradient(width: int) -> None:
    layer = f"n=64 c=128 k=128 groups={128 // width}"
    sizes = [f"h={size} w={size} r=3 s=3 padding=1" for size in range(2, 129)]
    windows = ((3, 3), (5, 5), (1, 7), (7, 7))
    sizes += [f"h=28 w=28 r={r} s={s} padding={r // 2}x{s // 2}" for r, s in windows]
    family = FAMILIES["grouped_wgrad"]
    for size in sizes:
        assert family.legal(parsed(f"{layer} {size}", family), H100).any(), size


@pytest.mark.parametrize(
    "layer",
    [
        "n=4 c=31 h=14 w=9 k=31 r=3 s=3 groups=31 padding=1",
        "n=4 c=32 h=30 w=30 k=32 r=11 s=11 groups=32 padding=5",
        "n=4 c=32 h=30 w=30 k=32 r=1 s=11 groups=32 dilation=2",
        "n=1 c=3 h=5 w=1 k=3 r=5 s=1 groups=3 dtype=float32",
    ],
)
@pytest.mark.parametrize("name", DEPTHWISE)
def test_unusual_depthwise_layers_have_some(layer: str, name: str) -> None:
    assert FAMILIES[name].legal(parsed(layer, FAMILIES[name]), H100).any()


@every_family
@given(data=st.data())
@settings(max_examples=25)
def test_one_kernel_serves_every_size(family: Family, data: st.DataObject) -> None:
    """Sizes, padding, and fields of a config such as bands and splits are launch arguments: they do
    not enter the compiled kernel."""
    layers = problems_of if family.name.startswith("dense") else layers_of
    problem = data.draw(layers(family))
    rows = np.flatnonzero(family.legal(problem, H100)).tolist()
    assume(rows)
    row = data.draw(st.sampled_from(rows))
    source = family.launch(problem, row).steps[0].kernel
    # Two more, so that what an input gradient must know of the sizes' parity stays the same.
    larger = {"n": problem.n + 1, "h": problem.h + 2, "w": problem.w + 2}
    padding = [size + 2 for size in problem.padding]
    other = Problem.from_json({**problem.to_json(), **larger, "padding": padding})
    assert family.launch(other, row).steps[0].kernel == source
    config = config_dict(family, row)
    alike = np.ones(len(family.configs), np.bool_)
    for name in family.kernel_fields:
        alike &= family.configs[name] == config[name]
    for same in np.flatnonzero(alike)[::7]:
        assert family.launch(problem, int(same)).steps[0].kernel == source
