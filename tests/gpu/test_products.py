"""Launches with matrix products on a GPU: im2col in every direction, and chains of linear layers by
each of their families, against float64."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from shared import python_says

import confpred
from confpred.families.protocol import Candidate, Family, config_dict
from confpred.launch.assignment import Assignment
from confpred.measure.kernels import check, measure
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import ACTIVATIONS, DTYPES, Problem
from confpred.problem.device import Device
from confpred.problem.linear_chain import LINEAR_CHAIN, LinearChain
from confpred.problem.precision import matmul_tf32
from confpred.products import epilogue, im2col, ordinary_error, strassen
from confpred.pytorch.linear_chain import operands
from confpred.pytorch.run import choosing
from confpred.pytorch.run.loading import ready_launch

CHAINS = {"epilogue": epilogue.FAMILY, "strassen": strassen.FAMILY}
MOST = 8  # configs of a problem
WIDTHS = (17, 64, 100, 128, 333, 512)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def random_convolution(rng: random.Random, direction: str, dtype: str) -> Problem:
    r, groups = rng.choice((1, 2, 3, 5)), rng.choice((1, 1, 2, 4))
    others: dict[str, object] = {}
    if direction == "fprop":
        others = {
            "bias": rng.random() < 0.5,
            "residual": rng.random() < 0.3,
            "activation": rng.choice(ACTIVATIONS),
        }
    return Problem(
        n=rng.randint(1, 9),
        c=groups * rng.choice((1, 3, 8, 16, 60)),
        h=rng.randint(10, 40),
        w=rng.randint(10, 40),
        k=groups * rng.choice((1, 5, 16, 64)),
        r=r,
        s=r,
        padding=rng.randint(0, 2),
        stride=(rng.choice((1, 2)), rng.choice((1, 3))),
        dilation=rng.choice((1, 2)),
        groups=groups,
        dtype=dtype,
        direction=direction,
        **others,  # type: ignore[arg-type]
    )


def some(family: Family, problem: object, device: Device, rng: random.Random) -> list[int]:
    rows = np.flatnonzero(family.legal(problem, device)).tolist()
    return rng.sample(rows, min(MOST, len(rows)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_im2col_is_correct(direction: str, dtype: str, seed: int, device: Device) -> None:
    """On poisoned outputs and scratch, against the float64 reference."""
    rng = random.Random(f"{direction} {dtype} {seed}")
    problem = random_convolution(rng, direction, dtype)
    rows = some(im2col.FAMILY, problem, device, rng)
    outcomes = check(problem, im2col.FAMILY, rows, ordinal=0)
    assert [o for o in outcomes if o.status != "ok"] == [], problem


def test_im2col_is_timed_like_kernels(device: Device) -> None:
    problem = Problem(8, 64, 32, 32, 64, 3, 3, padding=1, dtype="float32")
    rows = np.flatnonzero(im2col.FAMILY.legal(problem, device)).tolist()
    outcomes = measure(problem, im2col.FAMILY, rows, ordinal=0, seed=0, report=lambda _row: None)
    assert [o for o in outcomes if o.status != "ok" or not 0 < o.time_ms < 1000] == []
    loop, together = (
        next(o for o in outcomes if config_dict(im2col.FAMILY, o.config_id) == wanted)
        for wanted in (
            {"samples": 1, "batched": 0, "tf32": 0},
            {"samples": im2col.ALL, "batched": 0, "tf32": 0},
        )
    )
    assert together.time_ms < loop.time_ms


@pytest.mark.parametrize("row", range(3))
def test_im2col_runs_on_pytorchs_tensors_streams_and_graphs(row: int, device: Device) -> None:
    problem = Problem(6, 32, 14, 14, 48, 3, 3, padding=1, bias=True, activation="relu")
    layout = {"memory_format": torch.channels_last}
    x = torch.randn(6, 32, 14, 14, device="cuda").half().contiguous(**layout)
    weight = torch.randn(48, 32, 3, 3, device="cuda").half().div(17).contiguous(**layout)
    bias = torch.randn(48, device="cuda").half()
    right = F.conv2d(x.double(), weight.double(), bias.double(), padding=1).relu()
    config = int(np.flatnonzero(im2col.FAMILY.legal(problem, device))[row])
    ready = ready_launch(Assignment(problem, Candidate(im2col.FAMILY.name, config)), 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (out,) = ready.run(x, weight, bias, None)
        graph = torch.cuda.CUDAGraph()
        side.synchronize()
        with torch.cuda.graph(graph, stream=side):
            (captured,) = ready.run(x, weight, bias, None)
        captured.fill_(float("nan"))
        graph.replay()
    side.synchronize()
    for found in (out, captured):
        assert found.is_contiguous(**layout)
        assert (found.double() - right).norm() < 1e-3 * right.norm()


def random_chain(rng: random.Random, precision: str, **fixed: object) -> LinearChain:
    layers = rng.choice((1, 2, 3, 4, 8))
    outputs = rng.choice(WIDTHS)
    fields = {
        "batch": rng.choice((2, 3, 31, 64, 129)),
        "inputs": rng.choice(WIDTHS),
        "hidden": outputs if layers == 1 else rng.choice(WIDTHS),
        "outputs": outputs,
        "layers": layers,
        "dtype": "float32" if precision == "tf32" else precision,
        "tf32": precision == "tf32",
        "activation": rng.choice(("relu", "relu", *ACTIVATIONS)),
        "bias": rng.random() < 0.8,
        "last": rng.random() < 0.5,
    }
    return LinearChain(**(fields | fixed))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("precision", [*DTYPES, "tf32"])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_within_the_stated_error(
    name: str, precision: str, seed: int, device: Device
) -> None:
    """Odd and even sizes, on poisoned outputs and scratch."""
    rng, family = random.Random(f"{name} {precision} {seed}"), CHAINS[name]
    relu = {"activation": "relu", "bias": True} if name == "epilogue" else {}
    problem = random_chain(rng, precision, **relu)
    rows = some(family, problem, device, rng)
    assert rows
    outcomes = check(problem, family, rows, ordinal=0)
    assert [o for o in outcomes if o.status != "ok"] == [], problem


@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_timed_like_kernels(name: str, device: Device) -> None:
    problem, family = LinearChain(64, 256, 256, 256, 3), CHAINS[name]
    rows = np.flatnonzero(family.legal(problem, device)).tolist()
    outcomes = measure(problem, family, rows, ordinal=0, seed=0, report=lambda _row: None)
    assert all(o.status == "ok" and 0 < o.time_ms < 10 for o in outcomes), outcomes


def tensors_of(problem: LinearChain) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    made = {
        o.name: (torch.rand(o.shape, device="cuda") * 2 - 1)
        .mul_(o.scale)
        .to(getattr(torch, o.dtype))
        for o in LINEAR_CHAIN.operands(problem)
        if not o.terms
    }
    layers = range(problem.layers)
    return made["in"], [made[f"weight{i}"] for i in layers], [made[f"bias{i}"] for i in layers]


def right_of(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> torch.Tensor:
    out = x.double()
    for weight, bias in zip(weights, biases, strict=True):
        out = torch.relu(out @ weight.double().T + bias.double())
    return out


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def run_of(problem: LinearChain, family: Family, config: int) -> Callable[..., torch.Tensor]:
    """Return a function that computes `problem` from an input, weights and biases."""
    ready = ready_launch(Assignment(problem, Candidate(family.name, config)), 0)

    def run(
        x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
    ) -> torch.Tensor:
        (out,) = ready.run(x, *operands(weights, biases))
        return out

    return run


def test_weights_that_change_are_seen() -> None:
    problem = LinearChain(32, 128, 128, 128, 3)
    x, weights, biases = tensors_of(problem)
    run = run_of(problem, strassen.FAMILY, strassen.ALL)
    bound = strassen.error_of(problem)
    assert error(run(x, weights, biases), right_of(x, weights, biases)) < bound
    weights[1].mul_(-0.5)  # as an optimizer does
    assert error(run(x, weights, biases), right_of(x, weights, biases)) < bound
    weights[1].data.mul_(-0.5)  # which PyTorch does not count
    assert error(run(x, weights, biases), right_of(x, weights, biases)) < bound
    weights[2].data = weights[2].data.flip(0)  # other memory
    assert error(run(x, weights, biases), right_of(x, weights, biases)) < bound
    weights[0] = torch.zeros_like(weights[0])  # another tensor, perhaps where a former one was
    assert error(run(x, weights, biases), right_of(x, weights, biases)) < bound
    with torch.inference_mode():
        weights[0] = torch.ones_like(weights[0]) / 128
        assert error(run(x, weights, biases), right_of(x, weights, biases)) < bound


def test_two_streams_share_nothing() -> None:
    problem = LinearChain(256, 2048, 2048, 2048, 2)
    x, weights, biases = tensors_of(problem)
    run = run_of(problem, strassen.FAMILY, strassen.ALL)
    right = right_of(x, weights, biases)
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(50_000_000)
        run(x, weights, biases)
    with torch.cuda.stream(second):
        out = run(x, weights, biases)
    second.synchronize()
    assert error(out, right) < strassen.error_of(problem)


@pytest.mark.parametrize("name", CHAINS)
def test_a_graph_of_a_chain_sees_other_inputs_and_weights(name: str) -> None:
    problem = LinearChain(33, 100, 128, 77, 3)
    x, weights, biases = tensors_of(problem)
    run = run_of(problem, CHAINS[name], 0)
    run(x, weights, biases)  # loads cuBLAS
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, weights, biases)
    x.copy_(torch.rand_like(x))
    weights[0].mul_(-0.5)
    out.fill_(float("nan"))
    graph.replay()
    bound = max(strassen.error_of(problem), ordinary_error(problem))
    assert error(out, right_of(x, weights, biases)) < bound
    again = run(x, weights, biases)  # outside of the graph
    assert error(again, right_of(x, weights, biases)) < bound


@pytest.mark.parametrize("tf32", [False, True])
def test_pytorchs_switch_decides_on_tf32(tf32: bool) -> None:
    problem = LinearChain(256, 512, 512, 512, 1, dtype="float32", tf32=tf32)
    x, weights, biases = tensors_of(problem)
    run = run_of(problem, epilogue.FAMILY, 0)
    with matmul_tf32(not tf32):  # the launch has its own, and puts it back
        found = error(run(x, weights, biases), right_of(x, weights, biases))
        assert torch.backends.cuda.matmul.allow_tf32 is not tf32
    assert found < 1e-3
    assert (found > 1e-5) == tf32


PROGRAM = """
import json, sys, torch
import confpred
from confpred.pytorch.run import choosing
predictor = confpred.Predictor.load(plan=sys.argv[1])
confpred.use_predictor(predictor, operation="linear_chain")
torch.manual_seed(0)
x = torch.rand(48, 256, device="cuda").half()
weights = [torch.randn(256, 256, device="cuda").half() / 16 for _ in range(4)]
biases = [torch.rand(256, device="cuda").half() for _ in range(4)]
right = x.double()
for weight, bias in zip(weights, biases):
    right = torch.relu(right @ weight.double().T + bias.double())
found = {}
for name, bound in (("default", None), ("bounded", 0.01)):
    seen = []
    with choosing.watch_choices(seen.append):
        out = confpred.linear_chain(x, weights, biases, max_error=bound)
    found[name] = (seen[0].provider, float((out.double() - right).norm() / right.norm()))
batched = confpred.linear_chain(x.view(6, 8, 256), weights, biases, max_error=0.01)
found["same"] = bool(torch.equal(batched.view(48, 256), out))
weights[0].requires_grad_()
confpred.linear_chain(x, weights, biases, max_error=0.01).sum().backward()
found["gradient"] = float(weights[0].grad.abs().sum())
print(json.dumps(found))
"""


def test_a_bound_lets_a_pinned_strassen_run(device: Device, tmp_path: Path) -> None:
    problem = LinearChain(48, 256, 256, 256, 4)
    pin = {
        "device": device.key,
        "problem": problem.to_json(),
        "provider": "linear_strassen",
        "config": {"inner": 0},
    }
    pins = tmp_path / "pins.json"
    content = {"format": "confpred-pins/1", "operation": "linear_chain", "pins": [pin]}
    pins.write_text(json.dumps(content))
    found = json.loads(python_says("-c", PROGRAM, pins).splitlines()[-1])
    assert found["bounded"][0] == "linear_strassen"
    assert found["bounded"][1] < strassen.error_of(problem)
    assert found["default"][0] != "linear_strassen"
    assert found["default"][1] < ordinary_error(problem)
    assert found["same"]
    assert found["gradient"] > 0


def test_without_a_model_pytorchs_own_runs() -> None:
    x, weights, biases = tensors_of(LinearChain(32, 128, 128, 128, 3))
    own = x
    for weight, bias in zip(weights, biases, strict=True):
        own = F.relu(F.linear(own, weight, bias))
    shipped = choosing.current_predictor("linear_chain")
    confpred.use_predictor(Predictor({}), operation="linear_chain")
    try:
        assert torch.equal(confpred.linear_chain(x, weights, biases), own)
    finally:
        confpred.use_predictor(shipped, operation="linear_chain")
