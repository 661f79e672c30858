"""The families of depthwise 1-D convolution: what they serve, and how tiles read rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import numpy as np
import pytest
from layers import ARCHITECTURES, H100
from ptxas import ARCHS, resources

from confpred.families import line
from confpred.families.registry import all_families
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import DIRECTIONS, DTYPES

#: Layers of networks: short causal convolutions, a speech encoder's, a separator's, a strided one.
LAYERS = (
    "n=1 c=4096 w=4096 k=4096 s=4 padding=3 cut=3 groups=4096",
    "n=16 c=512 w=500 k=512 s=31 padding=15 groups=512",
    "n=4 c=512 w=3200 k=512 s=3 padding=128 dilation=128 groups=512",
    "n=16 c=256 w=1001 k=256 s=5 stride=2 padding=2 groups=256",
    "n=2 c=64 w=48 k=64 s=64 padding=32 groups=64",
)


def layer(text: str, direction: str = "fprop", dtype: str = "float16") -> ConvNd:
    return ConvNd.parse(f"{text} layout=channels_first direction={direction} dtype={dtype}")


@pytest.mark.parametrize(("text", "direction", "dtype"), [*product(LAYERS, DIRECTIONS, DTYPES)])
def test_layers_of_networks_have_configs_of_few_kernels(
    text: str, direction: str, dtype: str
) -> None:
    problem, family = layer(text, direction, dtype), all_families()[f"line_{direction}"]
    for device in ARCHITECTURES.values():
        rows = np.flatnonzero(family.legal(problem, device))
        launches = [family.launch(problem, int(row)) for row in rows]
        assert len(rows) >= 3
        assert len({launch.steps[0].kernel for launch in launches}) <= 3
        steps = [repr(launch.steps) for launch in launches]
        assert len(set(steps)) == len(steps)  # no two configs are the same launch
        assert np.isfinite(family.features(problem, device, rows)).all()


@pytest.mark.parametrize("change", [
    {"layout": "channels_last"}, {"groups": 64}, {"stride": 3}, {"s": 65},
    {"dilation": 512, "padding": 9000},
])  # fmt: skip
def test_other_layers_have_none(change: dict[str, object]) -> None:
    problem = ConvNd(rank=1, n=2, c=128, w=20_000, k=128, s=31, groups=128, layout="channels_first")
    family = all_families()["line_fprop"]
    assert family.legal(problem, H100).any()
    assert not family.legal(replace(problem, **change), H100).any()


def test_a_multiplier_has_no_gradient_of_the_input() -> None:
    problem = ConvNd(
        rank=1, n=2, c=8, w=64, k=16, s=3, groups=8, direction="dgrad", layout="channels_first"
    )
    assert not all_families()["line_dgrad"].legal(problem, H100).any()


@pytest.mark.parametrize(
    ("direction", "stride", "padding", "dilation"),
    [*product(("fprop", "dgrad"), (1, 2, 4), (0, 1, 5, 9), (1, 3))],
)
def test_windows_hold_what_outputs_read(
    direction: str, stride: int, padding: int, dilation: int
) -> None:
    """Every input of every output lies in its tile's window, at an access that is aligned."""
    taps, tile = 5, np.array([4, 8, 16])
    problem = ConvNd(
        rank=1, n=1, c=2, w=64, k=2, s=taps, stride=stride, padding=padding, dilation=dilation,
        groups=2, direction=direction, layout="channels_first",
    )  # fmt: skip
    up, down, pad, width, _ = line.axis(problem)
    found = line.windows(problem, tile)
    for i, size in enumerate(tile.tolist()):
        vec, phase = int(found["in_vec"][i]), int(found["phase"][i])
        assert 0 <= phase < up * vec
        assert found["first"][i] % vec == 0
        assert width % vec == 0
        for o0, j, s in product((0, size, 3 * size), range(size), range(taps)):
            reached = down * (o0 + j) + dilation * s - pad
            if reached % up == 0:
                place = reached // up - (down * o0 // up + int(found["first"][i]))
                assert place == (down * j + dilation * s + phase) // up
                assert 0 <= place < int(found["vectors"][i]) * vec
        assert (down * size // up) % vec == 0


@pytest.mark.slow(reason="the compiler takes seconds")
@pytest.mark.parametrize(
    ("text", "direction", "arch"),
    [(*layer, arch) for layer, arch in zip(product(LAYERS, DIRECTIONS), cycle((*ARCHS, ARCHS[1])))],
)
def test_registers_are_near_the_estimate_and_do_not_spill(
    text: str, direction: str, arch: str
) -> None:
    problem, family = layer(text, direction), all_families()[f"line_{direction}"]
    rows = np.flatnonzero(family.legal(problem, H100))
    kernels = {family.launch(problem, int(row)).steps[0].kernel: int(row) for row in rows}
    for kernel, row in kernels.items():
        registers, stack = resources(kernel, arch)
        names = list(family.feature_names)
        estimate = family.features(problem, H100, np.array([row]))[0, names.index("registers")]
        assert stack <= (0 if arch == H100.arch else 64)
        assert 0.5 * estimate <= registers + 8 <= 1.5 * estimate + 8


def test_the_sums_of_several_blocks_need_memory_of_any_content() -> None:
    family = all_families()["line_wgrad"]
    problem = replace(layer(LAYERS[1], "wgrad"), bias=True, deterministic=True)
    rows = np.flatnonzero(family.legal(problem, H100))
    for row in rows:
        launch, splits = family.launch(problem, int(row)), int(family.configs[row]["splits"])
        assert launch.zeroed_bytes == 0
        assert launch.scratch_bytes == (4 * splits * 512 * 32 if splits > 1 else 0)
