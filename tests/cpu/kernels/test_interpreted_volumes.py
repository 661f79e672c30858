"""Kernels of convolution of volumes, depthwise and dense, interpreted on the CPU, against PyTorch
in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import cycle, product

import numpy as np
import pytest
import torch
from layers import DENSE_VOLUMES, H100, VOLUMES, random_legal_conv
from ptx.launch import interpret
from references import outside, random_inputs, reference_nd, some_rows
from slow import slow_but

from confpred.families.protocol import Family, config_dict
from confpred.problem.activation import ACTIVATIONS
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import DTYPES

KERNELS, CONFIGS = 2, 2  # of a problem, and of a kernel
IMAGES = ("volume_fprop", "dense_volume_fprop", "volume_dgrad", "dense_volume_dgrad")
FAMILIES = {**VOLUMES, **DENSE_VOLUMES}
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def check(family: Family, problem: ConvNd, rows: list[int], arch: str = H100.arch) -> None:
    assert rows, problem
    inputs = random_inputs(family, problem, 0)
    outputs = [o for o in family.operation.operands(problem) if o.terms]
    right = reference_nd(problem, inputs)
    for row in rows:
        wrong = outside(outputs, interpret(family, problem, row, inputs, arch), right)
        assert not wrong, f"{wrong}: {problem} {config_dict(family, row)}"


def layer_of(family: Family, **fields: object) -> ConvNd:
    """Return a small layer of 3x3x3 taps, of the family's direction; a dense one has no dilation,
    and 16 bits."""
    if dense := family.name in DENSE_VOLUMES:
        fields["dilation"] = 1
        if fields.get("dtype") == "float32":
            fields["dtype"] = "float16"
    usual = {"n": 2, "c": 8, "d": 5, "h": 6, "w": 9, "t": 3, "r": 3, "s": 3, "padding": (1, 1, 1)}
    usual |= {"direction": family.name.rpartition("_")[2]} | fields
    usual |= {"k": usual.get("k", usual["c"]), "groups": 1 if dense else usual["c"]}
    return ConvNd(**usual)


@pytest.mark.parametrize("seed", slow_but((5,), range(6), "seconds a problem"))
@every_family
def test_random_configs_of_a_random_problem_are_correct(family: Family, seed: int) -> None:
    rng = random.Random(f"{family.name} {seed}")
    problem = random_legal_conv(rng, family, H100)
    rows = some_rows(family, problem, H100, rng, KERNELS, CONFIGS)
    check(family, problem, rows, ("sm_80", H100.arch)[seed % 2])


@pytest.mark.parametrize(
    ("steps", "dtype"),
    slow_but(
        [((2, 1, 2, 1), "float16")],
        [(s, DTYPES[sum(s) % 3]) for s in product((1, 2), repeat=4) if sum(s) % 2 == 0],
        "they differ in numbers",
    ),
)
@every_family
def test_every_pair_of_steps_is_right(
    family: Family, steps: tuple[int, int, int, int], dtype: str
) -> None:
    """Strides along depth and width, dilations along depth and height; padding of each parity."""
    rng = random.Random(f"{family.name} {steps}")
    problem = layer_of(
        family, stride=(steps[0], rng.choice((1, 2)), steps[1]), d=7, h=8,
        dilation=(steps[2], steps[3], rng.choice((1, 2))), dtype=dtype,
        padding=tuple(rng.randint(0, 3) for _ in range(3)),
    )  # fmt: skip
    check(family, problem, some_rows(family, problem, H100, rng, KERNELS, 1))


@pytest.mark.parametrize(
    ("activation", "name"), [*zip(ACTIVATIONS, cycle(IMAGES)), ("silu", IMAGES[3])]
)
def test_every_epilogue_is_right(name: str, activation: str) -> None:
    problem = layer_of(FAMILIES[name], activation=activation, bias=True, residual=True)
    rows = np.flatnonzero(FAMILIES[name].legal(problem, H100)).tolist()
    check(FAMILIES[name], problem, rows[:1])


@pytest.mark.parametrize(("name", "multiplier"), [("volume_fprop", 2), ("volume_wgrad", 3)])
def test_filters_that_share_an_input_channel_are_right(name: str, multiplier: int) -> None:
    family, rng = FAMILIES[name], random.Random(multiplier)
    problem = layer_of(family, c=6, k=6 * multiplier, bias=True)
    check(family, problem, some_rows(family, problem, H100, rng, KERNELS, 1))


@pytest.mark.slow(reason="every kernel of a layer is compiled and interpreted")
@pytest.mark.parametrize(("name", "dtype"), list(zip(FAMILIES, cycle(DTYPES))))
def test_every_kernel_of_a_small_layer_is_right(name: str, dtype: str) -> None:
    """A dense layer has more of them, of which these are a part."""
    family, most = FAMILIES[name], 60 if name in DENSE_VOLUMES else 1000
    problem = layer_of(family, dtype=dtype, bias=True)
    check(family, problem, some_rows(family, problem, H100, random.Random(dtype), most, 1))


@pytest.mark.slow(reason="hundreds of launches")
@every_family
def test_every_config_of_a_kernel_is_right(family: Family) -> None:
    """Bands, splits, lanes and threads are arguments of one kernel."""
    c = 24 if family.name in DENSE_VOLUMES else 20
    problem = layer_of(family, n=1, c=c, d=9, h=13, w=9, stride=(1, 2, 1))
    check(family, problem, some_rows(family, problem, H100, random.Random(0), 1, 1000))


@every_family
def test_a_wrong_result_is_seen(family: Family) -> None:
    """The result of any other input, and a single changed element, are noticed."""
    problem = layer_of(family, n=1)
    row = int(np.flatnonzero(family.legal(problem, H100))[0])
    inputs = random_inputs(family, problem, 0)
    outputs = [o for o in family.operation.operands(problem) if o.terms]
    results = interpret(family, problem, row, inputs, H100.arch)
    assert not outside(outputs, results, reference_nd(problem, inputs))
    for name, tensor in inputs.items():
        for axis in (1, 2, 3, 4) if name != "filter" else (0, 1, 2, 3):
            other = inputs | {name: tensor.flip(axis)}
            assert outside(outputs, results, reference_nd(problem, other)), (name, axis)
    results[outputs[0].name].view(-1)[0] += 1
    assert outside(outputs, results, reference_nd(problem, inputs)) == {outputs[0].name: 1}


@pytest.mark.parametrize("name", ["volume_wgrad", "dense_volume_wgrad"])
def test_sums_do_not_depend_on_the_blocks_that_run_together(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, rng = FAMILIES[name], random.Random(4)
    problem = replace(layer_of(family, d=8, h=14, w=14, bias=True), deterministic=True)
    legal = family.legal(problem, H100)
    assert (legal == family.legal(replace(problem, deterministic=False), H100)).all()
    shared = np.flatnonzero(legal & (family.configs["splits"] > 1)).tolist()
    inputs = random_inputs(family, problem, 0)
    for row in rng.sample(shared, 2):
        together = interpret(family, problem, row, inputs, H100.arch)
        with monkeypatch.context() as patch:
            patch.setattr("ptx.launch.THREADS", 512)  # a few blocks at a time
            apart = interpret(family, problem, row, inputs, H100.arch)
        for name, result in together.items():
            assert np.array_equal(result.view(torch.uint8), apart[name].view(torch.uint8))
