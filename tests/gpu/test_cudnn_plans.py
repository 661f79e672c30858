"""cuDNN's plans on a GPU: each that is offered computes what it should, and can be captured."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from confpred.cuda import driver
from confpred.cuda.cache import KernelCache
from confpred.cudnn import plans as plans_module
from confpred.cudnn.family import FAMILY, FAMILY_ND, CudnnPlans
from confpred.cudnn.plans import Graph, Plans, _handle
from confpred.errors import LaunchError
from confpred.measure.kernels import check, measure
from confpred.problem.conv import LAYOUTS, ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device
from confpred.problem.operation import SCRATCH

pytestmark = pytest.mark.skipif(
    find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend, an optional extra"
)
MOST = 12  # plans of a problem
EPILOGUES = (
    {},
    {"bias": True, "activation": "relu"},
    {"bias": True, "residual": True, "activation": "relu"},
    {"bias": True, "activation": "silu"},
)


def random_problem(rng: random.Random, direction: str, dtype: str, **others: object) -> Problem:
    r = rng.choice((1, 3, 3, 5))
    groups = rng.choice((1, 1, 1, 4))
    size = {"h": rng.randint(r, 40), "w": rng.randint(r, 40)}
    return Problem(
        n=rng.randint(1, 8),
        c=groups * rng.choice((8, 16, 24, 64)),
        k=groups * rng.choice((8, 16, 40, 64)),
        r=r,
        s=r,
        padding=r // 2,
        stride=rng.choice((1, 1, 2)),
        groups=groups,
        direction=direction,
        dtype=dtype,
        **size,
        **others,  # type: ignore[arg-type]
    )


def listed(
    problem: Problem | ConvNd, device: Device, rng: random.Random, family: CudnnPlans = FAMILY
) -> list[int]:
    rows = np.flatnonzero(family.listed(problem, device)).tolist()
    return rng.sample(rows, min(MOST, len(rows)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_plans_that_are_offered_are_correct(
    direction: str, dtype: str, seed: int, device: Device
) -> None:
    rng = random.Random(f"{direction} {dtype} {seed}")
    epilogue = EPILOGUES[seed] if direction == "fprop" else {}
    problem = random_problem(rng, direction, dtype, **epilogue)
    rows = listed(problem, device, rng)
    outcomes = check(problem, FAMILY, rows, ordinal=0)
    assert not [o for o in outcomes if o.status == "wrong_result"], outcomes
    if rows:
        assert any(o.status == "ok" for o in outcomes), outcomes


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_plans_of_any_rank_are_correct(
    direction: str, dtype: str, layout: str, rank: int, device: Device
) -> None:
    rng = random.Random(f"{direction} {dtype} {layout} {rank}")
    sizes = {"d": rng.randint(3, 12), "t": rng.choice((1, 3)), "h": 14, "r": 3} if rank == 3 else {}
    epilogue = EPILOGUES[rng.randrange(3)] if direction == "fprop" else {}
    problem = ConvNd(
        n=2, c=rng.choice((8, 24, 64)), w=rng.randint(9, 60), k=rng.choice((8, 40, 64)), s=3,
        rank=rank, stride=rng.choice((1, 2)), padding=1, layout=layout, dtype=dtype,
        direction=direction, **sizes, **epilogue,
    )  # fmt: skip
    rows = listed(problem, device, rng, FAMILY_ND)
    assert rows
    outcomes = check(problem, FAMILY_ND, rows, ordinal=0)
    assert not [o for o in outcomes if o.status == "wrong_result"], outcomes
    assert any(o.status == "ok" for o in outcomes), outcomes


def test_a_plan_that_only_slow_heuristics_offer_is_correct(device: Device) -> None:
    layer = Problem(2, 256, 34, 34, 256, 3, 3, padding=1, groups=2, direction="dgrad")
    rows = np.flatnonzero(FAMILY.listed(layer, device))
    driver.make_current(0)
    usual = Graph(layer, plans_module.USUAL, handle=_handle(0))
    rare = [int(row) for row in rows if usual.place(FAMILY._dict(row)) is None]
    assert rare
    assert {o.status for o in check(layer, FAMILY, rare, ordinal=0)} == {"ok"}


def test_what_is_listed_without_a_gpu_is_offered_on_it(device: Device) -> None:
    problem = Problem(8, 64, 56, 56, 64, 3, 3, padding=1)
    on_paper = set(Graph.without_gpu(problem, device).names)
    driver.make_current(0)
    here = set(Graph(problem, handle=_handle(0, 0)).names)
    assert len(on_paper & here) >= 0.9 * len(here)


def test_plans_are_timed_like_kernels(device: Device) -> None:
    problem = Problem(32, 64, 56, 56, 64, 3, 3, padding=1, bias=True, activation="relu")
    rows = np.flatnonzero(FAMILY.listed(problem, device))[:8].tolist()
    outcomes = measure(problem, FAMILY, rows, ordinal=0, seed=0, report=lambda _row: None)
    timed = [o for o in outcomes if o.status == "ok"]
    assert all(o.time_ms > 0 for o in timed)
    assert min(o.time_ms for o in timed) < 10
    assert all(o.samples > 1 for o in timed if o.time_ms < 5)  # others may be hopeless


def test_a_plan_runs_on_pytorchs_tensors_and_stream(device: Device) -> None:
    problem = Problem(4, 32, 20, 20, 48, 3, 3, padding=1, bias=True, activation="relu")
    layout = {"memory_format": torch.channels_last}
    x = torch.randn(4, 32, 20, 20, device="cuda").half().contiguous(**layout)
    weight = torch.randn(48, 32, 3, 3, device="cuda").half().div(17).contiguous(**layout)
    bias = torch.randn(48, device="cuda").half()
    expected = torch.conv2d(x.double(), weight.double(), bias.double(), padding=1).relu()
    plans = Plans(problem, 0)
    done = 0
    for row in np.flatnonzero(FAMILY.listed(problem, device)):
        plan = FAMILY.launch(problem, int(row)).plan
        assert plan is not None
        try:
            built = plans.build(plan)
        except LaunchError:
            continue
        out = torch.full_like(expected, float("nan"), dtype=torch.half).contiguous(**layout)
        scratch = torch.empty(max(1, built.workspace_bytes), dtype=torch.uint8, device="cuda")
        names = ("out", "in", "filter", "bias", SCRATCH)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        tensors = (out, x, weight, bias, scratch)
        built.bind(names)(side.cuda_stream, [t.data_ptr() for t in tensors])
        side.synchronize()
        torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
        done += 1
    assert done


def test_a_plan_that_is_slow_to_build_is_kept(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan from the cache computes the same; one that is damaged is built again."""
    monkeypatch.setattr(plans_module, "_SLOW_S", 0.0)
    problem = Problem(2, 32, 20, 20, 32, 3, 3, padding=1, bias=True, activation="silu")
    rows = [int(row) for row in np.flatnonzero(FAMILY.listed(problem, device))]
    assert rows
    kernel_cache = KernelCache(tmp_path)
    names = ("out", "in", "filter", "bias", SCRATCH)
    x, weight = (torch.randn(*s, device="cuda").half() for s in ((2, 20, 20, 32), (32, 3, 3, 32)))
    bias = torch.randn(32, device="cuda").half()

    def computed(plans: Plans, row: int) -> torch.Tensor:
        built = plans.build(FAMILY.launch(problem, row).plan)
        out = torch.full((2, 20, 20, 32), float("nan"), device="cuda", dtype=torch.half)
        scratch = torch.empty(max(1, built.workspace_bytes), dtype=torch.uint8, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        tensors = (out, x, weight, bias, scratch)
        built.bind(names)(stream, [t.data_ptr() for t in tensors])
        torch.cuda.synchronize()
        return out

    for row in rows:
        try:
            first = computed(Plans(problem, 0, kernel_cache), row)
        except LaunchError:
            continue
        break
    (entry,) = tmp_path.rglob("*.cubin")
    again = Plans(problem, 0, kernel_cache)
    assert torch.equal(computed(again, row), first)
    assert not again._offered  # cuDNN was not asked what it offers
    entry.write_bytes(b"damaged")
    assert torch.equal(computed(Plans(problem, 0, kernel_cache), row), first)
