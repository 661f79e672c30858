"""The suites of dense volumes of few channels: layers that the kernels serve, in each direction,
apart from what is held out, and those of more channels that were drawn with them."""

from __future__ import annotations

from itertools import product

import pytest
from layers import DENSE_VOLUMES, H100

from confpred.data.suites import read_suite
from confpred.problem.conv2d import DIRECTIONS

NAMES = ("training", "holdout")
PLANS = tuple(f"plans_{name}" for name in NAMES)  # of the layers that no kernel serves
#: Channels and sizes at the end of a network on its first input.
ENDS = {
    "attention_unet": (3, 96, 160, 160), "seg_resnet_8": (3, 224, 224, 144),
    "narrow_latents": (1, 96, 96, 64), "gc_net": (1, 192, 256, 512), "gwc_net": (32, 48, 64, 128),
    "mvs_net": (1, 192, 128, 160), "voxel_net": (64, 2, 400, 352),
    "voxel_morph": (3, 160, 192, 224), "psm_net": (32, 48, 64, 128),
    "res_enc_unet": (3, 112, 160, 128), "brain_age": (256, 10, 12, 10),
}  # fmt: skip


@pytest.fixture(scope="module")
def scripts(script):
    return script("few_channels")


@pytest.fixture(scope="module")
def shipped(repository):
    folder = repository / "datasets" / "suites" / "few_channels"
    return {name: read_suite(folder / f"{name}.json").entries for name in (*NAMES, *PLANS)}


def test_the_files_are_those_that_the_command_writes(scripts, made_again):
    names = {f"{name}.json" for name in (*NAMES, *PLANS)}
    assert {*made_again(scripts.main, "few_channels")} == names


def test_the_layers_of_a_network_lead_to_its_end(scripts):
    for name, end in ENDS.items():
        network = scripts.FURTHER[name]
        net = network.write(network.runs[0][1:])
        assert (net.c, *net.size) == end, name


def test_no_layer_and_no_network_of_the_holdout_is_trained_on(repository, scripts, shipped):
    pairs = zip(NAMES, PLANS, strict=True)
    trained, held = ([e for name in pair for e in shipped[name]] for pair in pairs)
    for name in ("rank/other_training", "rank_dense/training"):
        trained += read_suite(repository / "datasets" / "suites" / f"{name}.json").entries
    names = [{name for e in entries for name in e.networks} for entries in (trained, held)]
    shapes = [{scripts.shape(e.problem) for e in entries} for entries in (trained, held)]
    assert not names[0] & names[1]
    assert not shapes[0] & shapes[1]


def test_kernels_serve_all_of_them_in_each_direction(shipped):
    every = set(product(DIRECTIONS, ("float16", "bfloat16")))
    for name in NAMES:
        entries = shipped[name]
        problems = [entry.problem for entry in entries]
        assert len(problems) == len(set(problems))
        served = {
            p: [n for n, f in DENSE_VOLUMES.items() if f.legal(p, H100).any()] for p in problems
        }
        assert all(served.values())
        ways = {(p.direction, p.dtype) for p in problems}
        assert ways == every - ({("fprop", "float16")} if name == "holdout" else set())
        assert {p.activation != "none" for p in problems if p.direction == "fprop"} == {True, False}
    assert (len(shipped["training"]), len(shipped["holdout"])) == (63, 18)


def test_no_kernel_serves_the_layers_that_plans_compute(shipped):
    for name, count in zip(PLANS, (97, 30), strict=True):
        problems = {entry.problem for entry in shipped[name]}
        assert len(problems) == len(shipped[name]) == count
        assert {p.direction for p in problems} == {*DIRECTIONS}
        assert not any(f.legal(p, H100).any() for p in problems for f in DENSE_VOLUMES.values())


def test_the_readme_counts_them(repository, scripts, shipped):
    text = " ".join((repository / "datasets" / "README.md").read_text().split())
    networks = [len({n for e in shipped[name] for n in e.networks}) for name in NAMES]
    assert f"63 problems of {networks[0]} networks to train on, and 18 of {networks[1]}" in text
    assert f"{len(scripts.FURTHER)} further networks of medical volumes" in text
