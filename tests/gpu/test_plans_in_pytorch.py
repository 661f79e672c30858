"""Dense layers inside PyTorch by cuDNN's plans: training, captures, compiled programs, settings."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hazards.programs import capture
from layers_on_gpu import LAST, PlansFirst, close, launched_plans
from shared import python_says
from torch import nn

import confpred
from confpred.cudnn.family import FAMILY, largest_error
from confpred.cudnn.plans import BuiltPlan
from confpred.measure.kernels import check
from confpred.predict.choice import Choice
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device
from confpred.problem.limits import Limits
from confpred.pytorch.backend import confpred as confpred_backend

pytestmark = pytest.mark.skipif(
    find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend, an optional extra"
)
conv2d = F.conv2d  # PyTorch's own
#: A bound between the errors of sums of some thousand products in float32, which are below 1e-5,
#: and those of plans that round to TF32, which are above 1.8e-4 and below 1e-3 (`datasets/`).
EXACT_ERROR, TF32_ERROR = 6e-5, 1e-3


@pytest.fixture(autouse=True)
def launched() -> Iterator[list[BuiltPlan]]:
    """cuDNN's plans serve every layer that they can."""
    with launched_plans() as found:
        yield found
    torch.backends.cudnn.allow_tf32 = True


def made(dtype: torch.dtype = torch.float16, seed: int = 0) -> list[torch.Tensor]:
    """Input, filter and bias of a dense layer."""
    torch.manual_seed(seed)
    x, weight = torch.randn(4, 64, 29, 28, device="cuda"), torch.randn(96, 64, 3, 3, device="cuda")
    bias = torch.randn(96, device="cuda")
    return [
        x.to(dtype).to(memory_format=LAST),
        (weight / 24).to(dtype).to(memory_format=LAST),
        bias.to(dtype),
    ]


def out_grad_for(out: torch.Tensor) -> torch.Tensor:
    """Return the same values for every dtype, without rounding."""
    torch.manual_seed(1)
    return (torch.randint(-8, 9, out.shape, device="cuda") / 8).to(out.dtype).to(memory_format=LAST)


def step(
    given: list[torch.Tensor], conv: Callable[..., torch.Tensor] | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the output and all gradients."""
    leaves = [t.detach().requires_grad_() for t in given]
    out = (conv or confpred.conv2d)(*leaves, padding=1)
    return out.detach(), *torch.autograd.grad(out, leaves, out_grad_for(out))


def exactly(given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return step([t.double() for t in given], conv2d)


def off(a: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error in the 2-norm."""
    return ((a.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_all_gradients_of_a_layer_with_a_bias(dtype, launched) -> None:
    given = made(dtype)
    for _ in range(2):
        launched.clear()
        found = step(given)
        assert len(launched) == 3  # the bias is summed by PyTorch
        for mine, exact in zip(found, exactly(given), strict=True):
            assert off(mine, exact) < {torch.bfloat16: 1e-2}.get(dtype, 2e-3)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_training_step_is_captured(autocast, launched) -> None:
    """The gradients of a dense layer with a bias, in autograd's own thread."""
    given = [t.requires_grad_() for t in made(torch.float32 if autocast else torch.float16)]

    def train() -> tuple[torch.Tensor, ...]:
        with torch.autocast("cuda", torch.float16, enabled=autocast):
            out = confpred.conv2d(*given, padding=1)
        return out.detach(), *torch.autograd.grad(out, given, grad)

    grad = out_grad_for(exactly(given)[0]).half()
    graph, captured = capture(train)
    assert launched
    for seed in range(3):
        with torch.no_grad():
            for t, new in zip(given, made(seed=seed), strict=True):
                t.copy_(new)
        graph.replay()
        for mine, exact in zip(captured, exactly(given), strict=True):
            close(mine, exact, 1e-2)


_CAPTURE = """
    import sys
    import torch
    import torch.nn.functional as F
    sys.path.insert(0, sys.argv[1])
    import confpred
    from layers_on_gpu import LAST, close, launched_plans
    conv2d = F.conv2d
    activation = sys.argv[2]
    x = torch.randn(4, 64, 29, 28, device="cuda").half().to(memory_format=LAST)
    weight = torch.randn(64, 64, 3, 3, device="cuda").half().to(memory_format=LAST) / 24
    bias = torch.randn(64, device="cuda").half()
    side = torch.cuda.Stream()
    with launched_plans() as launched, torch.no_grad():
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = confpred.conv2d(x, weight, bias, padding=1, activation=activation)
        assert len(launched) == 1, launched
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            right = conv2d(x.double(), weight.double(), bias.double(), padding=1)
            close(out, getattr(F, activation)(right))
    print("right")
"""


@pytest.mark.parametrize("activation", ["relu", "silu"])  # ready in cuDNN, and compiled by it
def test_a_process_whose_first_plan_is_met_in_a_capture(activation: str, tmp_path: Path) -> None:
    """The handle, the plan and its kernels are made while the graph is captured."""
    words = ("-c", textwrap.dedent(_CAPTURE), Path(__file__).parent, activation)
    assert python_says(*words, CONFPRED_CACHE_DIR=str(tmp_path)) == "right\n"


def test_a_shape_that_is_new_to_a_capture(launched) -> None:
    """In a process that has launched plans before."""
    given = made()
    with torch.no_grad():
        confpred.conv2d(*given, padding=1)
        x = given[0][:3].clone(memory_format=LAST)
        launched.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = confpred.conv2d(x, *given[1:], padding=1)
        assert len(launched) == 1
        x.copy_(torch.randn_like(x))
        graph.replay()
        close(out, conv2d(*(t.double() for t in (x, *given[1:])), padding=1))


def set_allow_tf32(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allowed


def set_precision(allowed: bool) -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32" if allowed else "ieee"


@pytest.mark.parametrize("turn", [set_allow_tf32, set_precision])
def test_the_switch_for_tf32_is_followed(turn, launched) -> None:
    """Turned between two steps, and between the two passes of one."""
    if turn is set_precision and not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("PyTorch has had this switch since 2.9")
    given = made(torch.float32)
    exact = exactly(given)
    try:
        for allowed in (True, False, True, False, True):
            turn(allowed)
            launched.clear()
            found = step(given)
            assert len(launched) == 3
            for mine, right in list(zip(found, exact, strict=True))[:3]:
                assert off(mine, right) <= (TF32_ERROR if allowed else EXACT_ERROR)
                assert (off(mine, right) > EXACT_ERROR) is allowed
        leaves = [t.detach().requires_grad_() for t in given]
        out = confpred.conv2d(*leaves, padding=1)
        turn(False)
        found = torch.autograd.grad(out, leaves, out_grad_for(out))
        for mine, right in zip(found, exact[1:], strict=True):
            assert off(mine, right) <= EXACT_ERROR
    finally:
        turn(True)
        if turn is set_precision:
            torch.backends.cudnn.rnn.fp32_precision = "tf32"


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("seed", range(3))
def test_how_exact_plans_in_float32_are(direction: str, seed: int, device: Device) -> None:
    """As exact as they tell; and those that do not round to TF32 far more than those that do."""
    rng = random.Random(f"{direction} {seed}")
    problem = Problem(
        rng.randint(1, 4), rng.choice((16, 64)), 20, rng.randint(9, 30), rng.choice((16, 40)), 3, 3,
        padding=1, stride=rng.choice((1, 2)), dtype="float32", direction=direction,
    )  # fmt: skip
    rows = np.flatnonzero(FAMILY.listed(problem, device)).tolist()
    rows = rng.sample(rows, min(16, len(rows)))
    tf32 = {row: FAMILY.launch(problem, row).tf32 for row in rows}
    exact = FAMILY.allowed(problem, np.array(rows), Limits(tf32=False))
    assert exact.tolist() == [not tf32[row] for row in rows]
    for outcome in check(problem, FAMILY, rows, ordinal=0):
        if outcome.status == "ok":
            told = largest_error(problem, tf32=tf32[outcome.config_id])
            assert outcome.error <= told, outcome
            assert (outcome.error > EXACT_ERROR) is tf32[outcome.config_id], outcome


@pytest.mark.parametrize("switch", ["algorithms", "cudnn"])
def test_gradients_repeat_to_the_bit_where_they_have_to(switch, launched, monkeypatch) -> None:
    given = made()
    step(given)  # what is found without the switch
    if switch == "cudnn":
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    try:
        torch.use_deterministic_algorithms(switch == "algorithms", warn_only=True)
        launched.clear()
        first = step(given)
        assert len(launched) == 3
        for _ in range(20):
            assert all(map(torch.equal, step(given), first))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_limit_of_the_workspace_is_kept(launched) -> None:
    given = made()
    exact = exactly(given)
    step(given)
    launched.clear()
    limits = Limits(workspace_bytes=2**16)
    found = step(given, lambda *layer, **more: confpred.conv2d(*layer, limits=limits, **more))
    for mine, right in zip(found, exact, strict=True):
        assert off(mine, right) < 2e-3
    assert all(built.workspace_bytes <= 2**16 for built in launched)
    step(given)
    assert launched


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(16, 64, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(64, 32, 1),
    )
    return nn.Sequential(*layers).cuda().to(memory_format=LAST)


def images(batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 16, 33, 31, device="cuda").half().to(memory_format=LAST)


@pytest.mark.parametrize("graphs", [False, True])
def test_an_optimized_network_trains_by_plans_for_any_batch(graphs, launched) -> None:
    model, exact = network().half(), network().double()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    confpred.optimize(model, graphs=graphs)
    for batch in (4, 6, 12):
        given = images(batch)
        torch._dynamo.mark_dynamic(given, 0)
        model.zero_grad(), exact.zero_grad()
        launched.clear()
        out = model(given)
        out.float().square().sum().backward()
        assert len(launched) >= 8  # nobody asks for the gradient of the image
        right = exact(given.double())
        right.square().sum().backward()
        close(out.detach(), right.detach(), 2e-2)
        for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            assert (mine.grad.double() - theirs.grad).norm() <= 5e-2 * theirs.grad.norm() + 1e-2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("graphs", [False, True])
def test_an_optimized_network_has_its_epilogues_in_plans(graphs, launched) -> None:
    """Also where it becomes a CUDA graph, in whose pool nothing may stay."""
    model, counts = network().half().eval(), []
    torch._dynamo.reset()
    confpred.optimize(model, graphs=graphs)
    with torch.inference_mode():
        for _ in range(5):
            x = images()
            exact = network().double().eval()(x.double())
            launched.clear()
            close(model(x), exact, 2e-2)
            counts.append(len(launched))
    assert counts[0] >= 3
    assert counts[-1] == (0 if graphs else 3)  # a replay


class Guessing(PlansFirst):
    """A predictor that knows of plans and has none to offer."""

    def rank(self, *given: Any, **named: Any) -> list[Choice]:
        return Predictor({}).rank(*given, **named)


def test_a_program_from_the_disk_is_of_who_would_make_it_now(launched) -> None:
    """Inductor takes a program that it has made before without asking who chooses."""
    from torch._inductor.utils import fresh_cache

    model, x = network().half().eval(), images()
    exact = network().double().eval()(x.double())
    with fresh_cache(), torch.inference_mode():
        for predictor, plans in ((Guessing(), 0), (PlansFirst(), 3), (Guessing(), 0)):
            confpred.use_predictor(predictor)
            torch._dynamo.reset()
            options = {"inductor": True, "graphs": False}
            compiled = torch.compile(
                model, fullgraph=True, backend=confpred_backend, options=options
            )
            close(compiled(x), exact, 2e-2)
            launched.clear()
            close(compiled(x), exact, 2e-2)
            assert len(launched) == plans
