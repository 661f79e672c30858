"""The suites of dense layers of any rank: apart from all that is trained on, and of everything."""

from __future__ import annotations

from itertools import product

import pytest

from confpred.data.suites import read_suite
from confpred.problem.conv import LAYOUTS
from confpred.problem.conv2d import DIRECTIONS, DTYPES

NAMES = ("training", "holdout")
#: Channels and sizes at the end of a network on its first input.
ENDS = {
    "wan_encoder": (32, 3, 30, 52), "hunyuan_encoder": (32, 3, 32, 32), "tats": (3, 16, 128, 128),
    "gan_3d": (1, 1, 1, 1), "video_gan": (1, 1, 1, 1), "unetr": (14, 96, 96, 96),
    "swin_unetr": (14, 96, 96, 96), "wave_u_net": (1, 16_384), "wave_gan": (1024, 16),
    "jukebox": (1, 131_072), "tacotron2": (80, 900), "diffusion_policy": (10, 16),
}  # fmt: skip
#: Millions of parameters that are published: Wave-U-Net.
PUBLISHED = {"wave_u_net": 10.26}


@pytest.fixture(scope="module")
def scripts(script):
    return script("rank_dense")


@pytest.fixture(scope="module")
def shipped(repository):
    folder = repository / "datasets" / "suites" / "rank_dense"
    return {name: read_suite(folder / f"{name}.json").entries for name in NAMES}


def test_the_files_are_those_that_the_command_writes(scripts, made_again):
    assert sorted(made_again(scripts.main, "rank_dense")) == ["holdout.json", "training.json"]


def test_the_layers_of_a_network_lead_to_its_end(scripts):
    for name, network in scripts.FURTHER.items():
        _, *size = network.runs[0]
        net = network.write(size[0] if len(size) == 1 else tuple(size))
        if name in ENDS:
            assert (net.c, *net.size) == ENDS[name], name
        if name in PUBLISHED:
            own = sum(layer.problem.filter_elements for layer in net.layers) / 1e6
            assert own == pytest.approx(PUBLISHED[name], rel=0.08), name


def test_no_layer_and_no_network_of_the_holdout_is_trained_on(repository, scripts, shipped):
    folder = repository / "datasets" / "suites" / "rank"
    trained = [*shipped["training"]]
    for name in ("training", "other_training"):
        trained += read_suite(folder / f"{name}.json").entries
    held = shipped["holdout"]
    names = [{name for e in entries for name in e.networks} for entries in (trained, held)]
    shapes = [{scripts.shape(e.problem) for e in entries} for entries in (trained, held)]
    assert not names[0] & names[1]
    assert not shapes[0] & shapes[1]
    assert names[1] <= {*scripts.rank_suites.HELD_OUT, *scripts.HELD_OUT}
    kinds = {scripts.ALL[name].kind for e in shipped["training"] for name in e.networks}
    assert {scripts.ALL[name].kind for name in names[1]} == kinds
    assert len(kinds) == 9


def test_there_is_something_of_everything(shipped):
    for entries in shipped.values():
        problems = [entry.problem for entry in entries]
        assert len(problems) == len(set(problems))
        assert all(entry.networks for entry in entries)
        assert not any(p.cut or p.grouping.startswith("depthwise") for p in problems)
        assert {p.dtype for p in problems} == set(DTYPES)
        ways = {(p.rank, p.direction, p.layout) for p in problems}
        assert ways == set(product((1, 3), DIRECTIONS, LAYOUTS))
    assert (len(shipped["training"]), len(shipped["holdout"])) == (500, 70)
    assert len({name for e in shipped["training"] for name in e.networks}) > 50


def test_the_readme_counts_them(repository, scripts, shipped):
    text = " ".join((repository / "datasets" / "README.md").read_text().split())
    networks = [len({n for e in shipped[name] for n in e.networks}) for name in NAMES]
    assert f"500 dense, grouped and transposed problems of {networks[0]} networks" in text
    assert f"70 of {networks[1]} others" in text
    assert f"{len(scripts.FURTHER)} further networks" in text
