"""im2col: its kernels interpreted and its products by PyTorch, on the CPU, against float64."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from layers import H100
from programs import CpuProgram, run_program
from ptx.text import PtxError
from ptxas import ARCHS, resources
from references import outside, random_inputs, reference

from confpred.families.protocol import Family, config_dict
from confpred.problem.conv2d import ACTIVATIONS, DTYPES, Problem
from confpred.problem.operation import SCRATCH, Launch, Product
from confpred.products.im2col import ALL, FAMILY


def rows_of(problem: Problem) -> list[int]:
    return np.flatnonzero(FAMILY.legal(problem, H100)).tolist()


def random_problem(rng: random.Random, direction: str) -> Problem:
    r, s = rng.choice(((1, 1), (3, 3), (2, 4), (5, 1)))
    groups = rng.choice((1, 1, 2, 3))
    dtype = rng.choice(DTYPES) if direction == "fprop" else "float32"
    epilogue: dict[str, object] = {}
    if direction == "fprop" and rng.random() < 0.6:
        epilogue = {
            "bias": rng.random() < 0.6,
            "residual": rng.random() < 0.4,
            "activation": rng.choice(ACTIVATIONS),
        }
    return Problem(
        n=rng.randint(1, 5),
        c=groups * rng.choice((1, 3, 4, 8, 12)),
        h=rng.randint(9, 11),
        w=rng.randint(7, 12),
        k=groups * rng.choice((1, 5, 8)),
        r=r,
        s=s,
        stride=(rng.choice((1, 2)), rng.choice((1, 3))),
        padding=(rng.randint(0, 2), rng.randint(0, 2)),
        dilation=(rng.choice((1, 2)), 1),
        groups=groups,
        dtype=dtype,
        direction=direction,
        **epilogue,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_random_configs_are_correct(direction: str, seed: int) -> None:
    rng = random.Random(f"{direction} {seed}")
    problem = random_problem(rng, direction)
    inputs = random_inputs(FAMILY, problem, seed)
    expected = reference(problem, inputs)
    outputs = [o for o in FAMILY.operation.operands(problem) if o.terms]
    rows = rows_of(problem)
    assert rows
    for row in rng.sample(rows, min(4, len(rows))):
        results = run_program(FAMILY, problem, row, inputs, ("sm_80", H100.arch)[seed % 2])
        launch = FAMILY.launch(problem, row)
        told = f"{problem} {config_dict(FAMILY, row)}"
        if launch.error is None:
            assert not outside(outputs, results, expected), told
        else:
            difference = results["out"].double() - expected["out"]
            assert difference.norm() <= launch.error * expected["out"].norm(), told


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_a_window_of_one_pixel_needs_no_copy(direction: str, dtype: str) -> None:
    problem = Problem(3, 16, 5, 7, 24, 1, 1, groups=2, direction=direction, dtype=dtype)
    (row, *others) = rows_of(problem)
    assert not others or dtype == "float32"  # with TF32
    launch = FAMILY.launch(problem, row)
    assert launch.scratch_bytes == 0
    assert launch.steps == ()
    assert launch.source == "im2col.cu"
    inputs = random_inputs(FAMILY, problem, 0)
    outputs = [o for o in FAMILY.operation.operands(problem) if o.terms]
    results = run_program(FAMILY, problem, row, inputs, H100.arch)
    assert not outside(outputs, results, reference(problem, inputs))


def chunks(launch: Launch) -> Iterator[int]:
    """Samples that each copy is of."""
    return (step.scalars["images"] for step in launch.steps if step.kernel.entry == "im2col")


def test_a_config_is_the_samples_a_chunk() -> None:
    problem = Problem(10, 16, 16, 16, 16, 3, 3, padding=1)
    found = {}
    for row in rows_of(problem):
        config = config_dict(FAMILY, row)
        if not config["batched"]:
            launch = FAMILY.launch(problem, row)
            found[config["samples"]] = list(chunks(launch))
            assert sum(isinstance(part, Product) for part in launch.program) == len(launch.steps)
    assert found == {ALL: [10], 1: [1] * 10, 2: [2] * 5, 4: [4, 4, 2], 8: [8, 2]}


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_the_workspace_is_stated_exactly(direction: str) -> None:
    """A byte less is not enough, and the family and its launches say the same."""
    problem = Problem(
        5, 6, 7, 8, 4, 3, 3, padding=1, groups=2, direction=direction, dtype="float32"
    )
    inputs = random_inputs(FAMILY, problem, 0)
    stated = FAMILY.workspace_bytes(problem)
    for row in rows_of(problem):
        config, launch = config_dict(FAMILY, row), FAMILY.launch(problem, row)
        samples = config["samples"] or 5
        assert stated[row] == launch.workspace_bytes == samples * 7 * 8 * 6 * 9 * 4
        shapes = {o.name: torch.Size(o.shape) for o in FAMILY.operation.operands(problem)[:1]}
        program = CpuProgram(launch, inputs, shapes, H100.arch)
        program.run()
        written = program._watched[SCRATCH].written
        assert written is not None
        assert (written[: launch.scratch_bytes] == 255).all()  # all of it is used


def test_half_precision_is_refused_where_sums_would_be_rounded_twice() -> None:
    sizes = (4, 8, 9, 9, 8, 3, 3)
    assert not rows_of(Problem(*sizes, direction="dgrad"))
    (row,) = rows_of(Problem(*sizes, direction="wgrad"))
    assert config_dict(FAMILY, row)["samples"] == ALL
    assert not rows_of(Problem(*sizes, direction="wgrad", bias=True, dtype="float32"))


def test_tf32_is_a_config_of_float32_alone() -> None:
    sizes = (4, 8, 9, 9, 8, 3, 3)
    for dtype in DTYPES:
        problem = Problem(*sizes, dtype=dtype)
        flags = {bool(FAMILY.configs["tf32"][row]) for row in rows_of(problem)}
        assert flags == ({False, True} if dtype == "float32" else {False})
        for row in rows_of(problem):
            assert FAMILY.launch(problem, row).tf32 == FAMILY.configs["tf32"][row]


def test_a_product_of_what_was_never_written_is_seen() -> None:
    problem = Problem(2, 4, 5, 5, 4, 3, 3, dtype="float32")
    launch = FAMILY.launch(problem, rows_of(problem)[0])
    without = Launch.of_program(
        [part for part in launch.program if isinstance(part, Product)],
        scratch_bytes=launch.scratch_bytes,
    )
    inputs = random_inputs(FAMILY, problem, 0)
    program = CpuProgram(without, inputs, {"out": torch.Size((2, 3, 3, 4))}, H100.arch)
    with pytest.raises(PtxError, match="scratch is multiplied where nothing was written"):
        program.run()


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_configs_are_described(direction: str) -> None:
    problem = Problem(8, 64, 56, 56, 64, 3, 3, padding=1, direction=direction, dtype="float32")
    assert isinstance(FAMILY, Family)
    rows = np.array(rows_of(problem))
    features = FAMILY.features(problem, H100, rows)
    assert features.shape == (len(rows), len(FAMILY.feature_names))
    assert features.dtype == np.float32
    assert np.isfinite(features).all()
    assert len(set(FAMILY.feature_names)) == len(FAMILY.feature_names)
    assert (FAMILY.estimate_s(problem, H100, rows) >= H100.roofline_s(problem) / 20).all()


def test_samples_compile_and_do_not_spill() -> None:
    """As `tests/cpu/kernels/test_kernels_compile.py` has it for families that are not plug-ins."""
    rng, kernels = random.Random(0), {}
    for direction in ("fprop", "dgrad", "wgrad"):
        for _ in range(12):
            problem = random_problem(rng, direction)
            rows = rows_of(problem)
            if rows:
                launch = FAMILY.launch(problem, rng.choice(rows))
                kernels.update(dict.fromkeys(k for k in launch.kernels if k.file == "im2col.cu"))
    assert {kernel.entry for kernel in kernels} == {"im2col", "col2im"}
    for kernel in list(kernels)[:4]:
        for arch in ARCHS:
            registers, stack_bytes = resources(kernel, arch)
            assert registers <= 128
            assert stack_bytes == 0 or arch != H100.arch, kernel
