"""How plans tile: what is read off their kernels, and what follows from it for a problem."""

from __future__ import annotations

import csv
from math import ceil, log
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from confpred.cudnn import family
from confpred.cudnn.table import table
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device

H200 = get_device("h200")
AHEAD = (
    "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x32x64_stage5"
    "_warpsize2x2x1_g1_tensor16x8x16_execute_kernel__5x_cudnn"
)


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repository / "datasets"))
    import plan_kernels

    return plan_kernels


def event(name: str, us: float, *, threads: int = 128) -> dict[str, Any]:
    given = {"block": [threads, 1, 1], "registers per thread": 90, "shared memory": 4096}
    return {"name": name, "dur": us, "args": given}


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        (AHEAD, (64, 32, 64)),
        (
            "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816fprop_optimized_f16_256x64"
            "_32x4_nhwc_align8>(cutlass_tensorop_f16_s16816fprop_optimized_f16_256x64_32x4_nhwc)",
            (256, 64, 32),
        ),
        (
            "_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11"
            "ImplicitGemmMultistageINS_4gemm9GemmShapeILi64ELi128ELi16EEENS4_52Conv2dWgrad",
            (64, 128, 16),
        ),
        ("nvjet_sm90_hsh_64x16_64x13_1x4_h_bz_NNT", (64, 16, 64)),
        ("cudnn_generated_fort_native_sm80_convFwd_pointwise_knob_21_128x64x32_4_0", (128, 64, 32)),
        ("void cudnn::detail::dgrad_alg1_engine<__half, 128, 6, 7, 3, 3, 5, false, true>", None),
        ("wgrad2d_shmem_tiling", None),
    ],
)
def test_names_of_kernels_say_how_they_tile(
    script: ModuleType, name: str, tile: tuple[int, ...] | None
) -> None:
    assert script.tile_of(name) == tile


def test_a_plan_is_its_longest_kernel_with_a_tile(script: ModuleType) -> None:
    longer = event(AHEAD.replace("64x32x64", "128x64x32"), 5.0, threads=256)
    plain = event("void nhwcToNchwKernel<float>", 9.0)
    found = script.lines_of([(7, [plain, longer, event(AHEAD, 3.0)]), (8, [plain])])
    expected = (128, 64, 32, 256, 90, 4096)
    assert found == {7: dict(zip(family.TILE_FIELDS, expected, strict=True))}


def test_the_table_that_is_written_is_the_one_that_is_read(script: ModuleType) -> None:
    new = script.lines_of([(2, [event(AHEAD, 1.0)]), (0, [event(AHEAD, 1.0, threads=64)])])
    read = family.tiles_of(csv.DictReader(script.table_text(new).splitlines()), 4)
    assert read["threads"].tolist() == [64, 0, 128, 0]
    assert read["block_terms"].tolist() == [64, 0, 64, 0]


def test_the_table_is_of_plans_that_there_are() -> None:
    with open(family.TILES_FILE, newline="", encoding="ascii") as lines:
        plans = [int(line[family.PLAN]) for line in csv.DictReader(lines)]
    assert plans == sorted(set(plans))
    assert plans[-1] < len(table().configs)
    known = family.tiles()
    assert all((values[plans] > 0).all() for name, values in known.items() if name != "smem_bytes")


def test_what_follows_from_a_tile() -> None:
    problem = Problem(2, 40, 30, 30, 96, 3, 3, padding=1)
    values = (128, 64, 32, 128, 128, 48 * 1024)
    known = {name: np.array([0, v]) for name, v in zip(family.TILE_FIELDS, values, strict=True)}
    nothing, found = family.describe_tiles(problem, H200, known, np.array([0, 1]))
    assert not nothing.any()
    of = dict(zip(family.TILE_NAMES, found.tolist(), strict=True))
    rows, columns, terms = 2 * 30 * 30, 96, 9 * 40
    blocks = ceil(rows / 128) * ceil(columns / 64)  # 30, on 132 multiprocessors
    assert blocks == 30
    per_sm = 228 // (48 + 1)  # shared memory is what limits it
    assert of["blocks_per_sm"] == per_sm
    assert of["log_blocks"] == pytest.approx(log(30))
    assert of["log_waves"] == pytest.approx(log(30 / (132 * per_sm)))
    assert of["wave_share"] == pytest.approx(30 / (132 * per_sm))
    assert of["tile_share"] == pytest.approx(rows * columns / (30 * 128 * 64))
    steps = 9 * 2  # 40 channels of a tap are two steps of 32
    assert of["log_steps"] == pytest.approx(log(steps))
    assert of["channel_share"] == pytest.approx(40 / 64)
    even = rows * columns * terms / 132
    assert of["log_work"] == pytest.approx(log(128 * 64 * 32 * steps / even))
    slices = 132 * per_sm // 30  # 17, each of two steps at most
    split = ceil(30 * slices / (132 * per_sm)) * per_sm * 128 * 64 * 32 * ceil(steps / slices)
    assert of["log_split_work"] == pytest.approx(log(split / even))
    held = problem.minimum_bytes / 2
    assert of["log_sums"] == pytest.approx(log(1 + slices * rows * columns / held))
    assert of["log_traffic"] == pytest.approx(log(30 * (128 + 64) * steps * 32 / held))


def test_sums_of_a_filters_gradient_run_on_across_taps() -> None:
    problem = Problem(1, 8, 9, 9, 8, 3, 3, padding=1, direction="wgrad")
    known = {name: np.array([64]) for name in family.TILE_FIELDS}
    (found,) = family.describe_tiles(problem, H200, known, np.array([0]))
    assert found[family.TILE_NAMES.index("log_steps")] == pytest.approx(log(2))  # 81 pixels
