"""The suites of convolutions of any rank: made from written networks, and apart in them."""

from __future__ import annotations

from itertools import product

import pytest

from confpred.data.measurements import problem_of_row
from confpred.data.parquet import problem_columns
from confpred.data.suites import Entry, Suite, read_suite, write_suite
from confpred.problem.conv import CONV, LAYOUTS, ConvNd
from confpred.problem.conv2d import DIRECTIONS, DTYPES

NAMES = ("training", "holdout", "other_training", "other_holdout")
#: Millions of parameters that are published for networks of hardly anything but convolutions, and
#: of classifiers without their last product.
PUBLISHED = {
    "quartznet_5x5": 6.7, "quartznet_15x5": 18.9, "citrinet_256": 9.8, "citrinet_1024": 142,
    "conv_tasnet": 5.1, "hifi_gan_v1": 13.92, "hifi_gan_v2": 0.92,
    "hifi_gan_v3": 1.46, "big_vgan_base": 14.0, "big_vgan": 112, "mel_gan": 4.26,
    "univ_net_c32": 14.86, "dac_44khz": 76, "unet_3d": 19.07, "nn_unet": 31.2,
    "seg_resnet": 18.8, "med_next_s_3": 5.6, "med_next_b_5": 11.0, "med_next_m_3": 17.6,
    "med_next_l_5": 63.0, "c3d": 27.7, "i3d": 12.7, "s3d": 8.3, "r3d_18": 33.2, "mc3_18": 11.5,
    "r2plus1d_18": 31.3, "slow_fast_r50": 33.6, "ir_csn_50": 12.3, "mobile_net_v2_3d": 2.36,
}  # fmt: skip
#: Channels and sizes at the end of a network on its first input, as its publication has them.
ENDS = {
    "wav2vec2_base": (768, 499), "whisper_large": (1280, 1500), "quartznet_15x5": (29, 800),
    "citrinet_1024": (1024, 100), "contextnet_l": (1280, 125), "conv_tasnet": (1, 32_000),
    "hifi_gan_v1": (1, 32 * 256), "big_vgan": (1, 32 * 256), "encodec_24khz": (1, 24_000),
    "dac_44khz": (1, 44_032), "demucs": (8, 169_300), "ecg_resnet": (320, 16),
    "mamba_1_4b": (4096, 4096), "unet_3d": (3, 64, 128, 128), "med_next_l_5": (3, 128, 128, 128),
    "c3d": (512, 1, 4, 4), "i3d": (400, 8, 7, 7), "slow_fast_r50": (2048, 8, 7, 7),
    "x3d_m": (432, 16, 7, 7), "movi_net_a0": (104, 50, 6, 6), "wan_decoder": (3, 4, 480, 832),
    "hunyuan_decoder": (3, 20, 256, 256), "svd_decoder": (3, 14, 576, 1024),
}  # fmt: skip


@pytest.fixture(scope="module")
def scripts(script):
    return script("rank_suites")


@pytest.fixture(scope="module")
def written(scripts):
    """Return each network on its first input."""
    found = {}
    for name, network in scripts.NETWORKS.items():
        _, *size = network.runs[0]
        found[name] = network.write(size[0] if len(size) == 1 else tuple(size))
    return found


@pytest.fixture(scope="module")
def shipped(repository):
    folder = repository / "datasets" / "suites" / "rank"
    return {name: read_suite(folder / f"{name}.json").entries for name in NAMES}


def test_the_files_are_those_that_the_command_writes(scripts, made_again):
    made = made_again(scripts.main, "rank")
    assert sorted(made) == sorted(f"{name}.json" for name in NAMES)
    assert sum(map(len, made.values())) < 600_000


def test_the_written_networks_have_the_published_sizes(written):
    for name, millions in PUBLISHED.items():
        own = sum(layer.problem.filter_elements for layer in written[name].layers) / 1e6
        assert own == pytest.approx(millions, rel=0.08), name


def test_the_layers_of_a_network_lead_to_its_end(written):
    for name, end in ENDS.items():
        assert (written[name].c, *written[name].size) == end, name


def test_networks_are_many_and_of_all_kinds(scripts):
    kinds = {network.kind for network in scripts.NETWORKS.values()}
    assert len(kinds) == 9
    assert len(scripts.NETWORKS) > 100
    assert all(network.source and network.runs for network in scripts.NETWORKS.values())
    held = set(scripts.HELD_OUT)
    assert 4 * len(held) >= len(scripts.NETWORKS)
    assert {scripts.NETWORKS[name].kind for name in held} == kinds


def test_no_layer_and_no_network_of_a_holdout_is_trained_on(scripts, shipped):
    trained, held = (
        [e for n in NAMES if n.endswith(part) for e in shipped[n]]
        for part in ("training", "holdout")
    )
    names = [{name for e in entries for name in e.networks} for entries in (trained, held)]
    shapes = [{scripts.shape(e.problem) for e in entries} for entries in (trained, held)]
    assert not names[0] & names[1]
    assert not shapes[0] & shapes[1]
    assert names[1] <= set(scripts.HELD_OUT)


def test_there_is_something_of_everything(scripts, shipped):
    for name, entries in shipped.items():
        problems = [entry.problem for entry in entries]
        assert len(problems) == len(set(problems)) >= 120
        ways = {(p.rank, p.direction) for p in problems}
        assert ways == set(product((1, 3), DIRECTIONS))
        assert {p.dtype for p in problems} == set(DTYPES)
        assert {p.bias for p in problems} == {True, False}
        assert all(scripts.is_depthwise(p) != name.startswith("other") for p in problems)
        assert max(p.minimum_bytes for p in problems) <= scripts.MOST_BYTES
        assert all(entry.networks for entry in entries) or name == "training"
    depthwise = [entry.problem for entry in shipped["training"]]
    assert {p.layout for p in depthwise if p.rank == 1} == set(LAYOUTS)
    assert sum(p.cut > 0 for p in depthwise) > 100
    assert sum(p.activation == "silu" and p.cut > 0 for p in depthwise) > 20
    assert sum(p.minimum_bytes > 16e6 for p in depthwise) > 300
    transposed = [e.problem for e in shipped["other_training"] if e.problem.direction == "dgrad"]
    assert sum(p.bias for p in transposed) > 10


def test_the_readme_counts_them(repository, scripts, shipped):
    text = " ".join((repository / "datasets" / "README.md").read_text().split())
    training, holdout, other, other_holdout = (len(shipped[name]) for name in NAMES)
    networks = [len({n for e in shipped[name] for n in e.networks}) for name in NAMES]
    assert f"{len(scripts.NETWORKS)} networks of {9} kinds, {len(scripts.HELD_OUT)} of them" in text
    assert (
        f"{training} depthwise problems to train on, of {networks[0]} networks, and {holdout} of "
        f"{networks[1]} others"
    ) in text
    assert f"{other} and {other_holdout} dense, grouped and transposed" in text


def test_a_suite_and_a_table_hold_layers_of_any_rank(tmp_path):
    layers = (
        ConvNd(2, 8, 9, 8, 3, rank=1, stride=2, padding=2, cut=1, groups=8, layout=LAYOUTS[1]),
        ConvNd(1, 4, 9, 4, 3, d=5, h=7, t=3, r=3, stride=(1, 2, 2), padding=1, bias=True),
    )
    suite = Suite("rank", tuple(Entry(layer, ("a",)) for layer in layers))
    write_suite(suite, tmp_path / "suite.json")
    assert read_suite(tmp_path / "suite.json") == suite
    for layer in layers:
        columns = problem_columns(CONV)
        values = layer.to_json()
        row = {n: values[n] for n in values if not isinstance(values[n], list)}
        row |= {f"{n}_{a}": v for n in ConvNd.TUPLES for a, v in zip("dhw", values[n], strict=True)}
        assert row.keys() == {*columns}
        assert problem_of_row(row, ConvNd) == layer
