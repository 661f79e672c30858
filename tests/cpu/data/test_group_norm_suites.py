"""The suites of group, instance, layer and RMS norm: made from the written networks, and apart."""

from __future__ import annotations

from collections import Counter

import pytest
import timm_networks
import torch
from torch import nn

from confpred.data.suites import read_suite
from confpred.problem.device import get_device
from confpred.problem.norm import DIRECTIONS
from confpred.problem.norm_of_groups import AFFINE

GROUPINGS = {"group norm", "instance norm", "layer norm", "RMS norm"}


@pytest.fixture(scope="module")
def shipped(repository):
    folder = repository / "datasets" / "suites" / "group_norm"
    return {name: read_suite(folder / f"{name}.json").entries for name in ("training", "holdout")}


def test_the_files_are_those_that_the_command_writes(script, made_again):
    made = made_again(script("group_norm_suites").main, "group_norm")
    assert sorted(made) == ["holdout.json", "training.json"]


def test_the_holdout_shares_no_layer_and_no_network(script, shipped):
    training, holdout = shipped.values()
    names = [{name for entry in entries for name in entry.networks} for entries in shipped.values()]
    assert not names[0] & names[1]
    assert len(names[0]) >= 60
    assert len(names[1]) >= 15
    assert not {e.problem.layer() for e in training} & {e.problem.layer() for e in holdout}
    networks = script("group_norm_networks").NETWORKS
    kinds = {networks[name].kind for name in names[1]}
    assert kinds == {network.kind for network in networks.values()}


@pytest.mark.parametrize("name", ["training", "holdout"])
def test_there_is_something_of_everything(shipped, name):
    problems = [entry.problem for entry in shipped[name]]
    assert len(problems) == len(set(problems)) >= 70
    assert {p.kind for p in problems} == {f"{d} {g}" for d in DIRECTIONS for g in GROUPINGS}
    for field, values in {
        "affine": AFFINE, "adaptive": (True, False), "residual": (True, False),
        "dtype": ("float16", "bfloat16", "float32"), "weights": ("float16", "bfloat16", "float32"),
    }.items():  # fmt: skip
        assert {getattr(p, field) for p in problems} == set(values)
    directions = Counter(p.direction for p in problems)
    assert 0.5 < directions["forward"] / len(problems) < 0.65
    sizes = sorted(p.tensor_bytes for p in problems)
    assert sizes[0] >= 100_000
    assert sizes[-1] <= 768 * 2**20
    fast = get_device("h100").l2_bytes
    assert sum(size > fast for size in sizes) > len(sizes) // 8


def test_coverage_has_what_networks_lack(shipped):
    problems = [entry.problem for entry in shipped["training"] if not entry.networks]
    assert len(problems) >= 30
    assert sum(p.c % 8 > 0 for p in problems) >= 10
    assert any(p.width == 1 for p in problems)
    assert any(p.groups % 2 and p.groups > 1 for p in problems)
    assert any(p.p == 1 < p.groups for p in problems)


def test_norms_of_known_networks(script):
    """Groups, pixels and what follows, as the publications have them."""
    networks = script("group_norm_networks").NETWORKS

    def layers(name, *size):
        found = networks[name].write(size).layers
        return {(x.n, x.p, x.c, x.groups, x.activation, x.residual, x.adaptive) for x in found}

    decoder = layers("kl_decoder", 64, 64)
    assert (1, 512 * 512, 256, 32, "silu", False, False) in decoder
    assert (1, 64 * 64, 512, 32, "none", False, False) in decoder
    assert (1, 64 * 64, 960, 32, "silu", False, False) in layers("sd_v1_unet", 64, 64)
    assert (1, 8 * 8, 768, 32, "silu", False, True) in layers("adm_64", 64, 64)
    assert (1, 64 * 64, 256, 256, "none", True, False) in layers("cycle_gan", 256, 256)
    assert (1, 14 * 14, 1024, 32, "relu", True, False) in layers("gn_resnet", 224, 224)
    assert (56 * 56, 1, 96, 1, "none", False, False) in layers("convnext_tiny", 224, 224)
    assert (9, 352 * 640, 512, 1, "silu", False, False) in layers("cosmos_decoder", 5, 176, 320)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gn_resnet", "resnet50_gn"),
        ("gn_efficientnet", "efficientnet_b0_g8_gn"),
        ("bit_r50x1", "resnetv2_50x1_bit"),
        ("poolformer_s12", "poolformer_s12"),
    ],
)
def test_written_networks_have_the_group_norms_of_timm(script, name, model):
    found = set()

    def note(norm, inputs, _):
        (_, c, h, w) = inputs[0].shape
        found.add((h * w, c, norm.num_groups))

    with torch.device("meta"), torch.no_grad():
        network = timm_networks.timm().create_model(model).eval()
        for norm in network.modules():
            if isinstance(norm, nn.GroupNorm):
                norm.register_forward_hook(note)
        network(torch.empty(1, 3, 224, 224))
    written = script("group_norm_networks").NETWORKS[name].write((224, 224)).layers
    assert {(x.p, x.c, x.groups) for x in written} == found
