"""While enabled: graphs, kernels that are not compiled yet, measured choices, several processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from layers_on_gpu import LAST, LAYERS, capture, close, make_layer, ours_first, pytorch_refused
from torch import nn

import confpred
from confpred.errors import InvalidInput
from confpred.predict.plans import read_plan
from confpred.predict.predictor import Predictor
from confpred.problem.device import Device
from confpred.pytorch import verify

conv2d = F.conv2d  # PyTorch's own


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    confpred.use_predictor(Predictor({}))
    assert F.conv2d is conv2d


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_training_step_is_captured_and_sees_new_weights(name, autocast) -> None:
    kwargs, channels = LAYERS[name]
    dtype = torch.float32 if autocast else torch.float16
    given = [t.requires_grad_() for t in make_layer(kwargs, channels, dtype)]

    def step() -> tuple[torch.Tensor, ...]:
        with torch.autocast("cuda", torch.float16, enabled=autocast):
            out = F.conv2d(*given, **kwargs)
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), given)

    with ours_first(), confpred.enabled(wait=True), pytorch_refused():
        graph, captured = capture(step)
        for seed in range(3):
            with torch.no_grad():
                for t, new in zip(given, make_layer(kwargs, channels, dtype, seed), strict=True):
                    t.copy_(new + 0.05)
            graph.replay()
            exact = [t.detach().double().requires_grad_() for t in given]
            out = conv2d(*exact, **kwargs)
            right = (out.detach(), *torch.autograd.grad(out.square().sum(), exact))
            for mine, theirs in zip(captured, right, strict=True):
                close(mine, theirs, 1e-2)


def run(program: str, *arguments: object, cache: Path) -> str:
    """What `program` prints, started with an empty cache of kernels."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(Path(__file__).parent)]
        + [str(argument) for argument in arguments],
        env=os.environ | {"CONFPRED_CACHE_DIR": str(cache), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_START = """
    import sys
    import torch
    import torch.nn.functional as F
    import confpred
    sys.path.insert(0, sys.argv[1])
    from layers_on_gpu import LAYERS, SHAPE, OursFirst, close, make_layer, pytorch_refused
    from confpred.pytorch import choosing, kernels
    conv2d = F.conv2d
    confpred.use_predictor(OursFirst())
"""

_CAPTURE = """
    kwargs, channels = LAYERS["depthwise"]
    x, weight, bias = make_layer(SHAPE, 64)
    other = make_layer(kwargs, channels)
    confpred.enable(wait=len(sys.argv) > 2)
    with torch.no_grad():
        F.conv2d(*other, **kwargs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytorch_refused(), torch.cuda.graph(graph):
            out = F.conv2d(x, weight, bias, **SHAPE)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            close(out, conv2d(x.double(), weight.double(), bias.double(), **SHAPE))
    print("right")
"""


@pytest.mark.parametrize("wait", [[], ["wait"]], ids=["background", "wait"])
def test_a_graph_may_meet_a_kernel_that_is_not_compiled(wait, tmp_path: Path) -> None:
    assert run(_START + _CAPTURE, *wait, cache=tmp_path) == "right\n"


_BACKGROUND = """
    kwargs, channels = LAYERS["width 8"]

    def wait():
        for futures in (choosing._chosen, kernels._compiling):
            for future in list(futures.values()):
                future.result(120)

    given = make_layer(kwargs, channels)
    theirs = conv2d(*given, **kwargs)
    confpred.enable()
    with torch.no_grad():
        first = F.conv2d(*given, **kwargs)
        assert torch.equal(first, theirs), "PyTorch's bits at first"
        wait()  # for the choice
        assert torch.equal(F.conv2d(*given, **kwargs), theirs), "PyTorch's bits while it compiles"
        wait()
        with pytorch_refused():
            for _ in range(3):
                close(F.conv2d(*given, **kwargs), conv2d(*(t.double() for t in given), **kwargs))
    leaves = [t.requires_grad_() for t in given]
    for _ in range(4):  # from PyTorch's operator to ours, right at each step
        loss = F.conv2d(*leaves, **kwargs).float().square().sum()
        mine = torch.autograd.grad(loss, leaves)
        exact = [t.detach().double().requires_grad_() for t in given]
        right = torch.autograd.grad(conv2d(*exact, **kwargs).square().sum(), exact)
        for a, b in zip(mine, right):
            close(a, b)
        wait()
    with pytorch_refused():
        torch.autograd.grad(F.conv2d(*leaves, **kwargs).sum(), leaves)
    print("right")
"""


def test_kernels_compile_while_pytorch_serves(tmp_path: Path) -> None:
    assert run(_START + _BACKGROUND, cache=tmp_path) == "right\n"
    assert list(tmp_path.rglob("*.cubin"))


_FORK = """
    import os
    given = make_layer(SHAPE, 64)
    confpred.enable(wait=True)
    F.conv2d(*given, **SHAPE)
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        x, weight = torch.randn(2, 8, 9, 9), torch.randn(8, 2, 3, 3)
        same = torch.equal(F.conv2d(x, weight, groups=4), conv2d(x, weight, groups=4))
        try:
            F.conv2d(*given, **SHAPE)
        except Exception:  # CUDA does not survive a fork, and PyTorch says so
            os._exit(0 if same else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    close(F.conv2d(*given, **SHAPE), conv2d(*(t.double() for t in given), **SHAPE))
    print("right")
"""


def test_a_fork_after_use(tmp_path: Path) -> None:
    assert run(_START + _FORK, cache=tmp_path) == "right\n"


def depthwise() -> tuple[nn.Conv2d, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Conv2d(64, 64, 5, padding=2, groups=64).cuda().half().to(memory_format=LAST)
    x = torch.randn(32, 64, 28, 28, device="cuda").half().to(memory_format=LAST)
    return module, x.requires_grad_()


def test_measured_choices_are_kept_and_not_measured_again(
    tmp_path: Path, device: Device, monkeypatch
) -> None:
    confpred.use_predictor(Predictor.load())
    path = tmp_path / "plan.json"
    module, x = depthwise()
    exact = module.weight.detach().double(), module.bias.detach().double()
    right = conv2d(x.detach().double(), *exact, padding=2, groups=64)

    def step() -> None:
        out = module(x)
        close(out.detach(), right)
        out.sum().backward()

    with confpred.enabled(wait=True, verify=3, plan=path):
        step()
    plan = read_plan(path, device)
    assert {choice.problem.direction for choice in plan.choices} == {"fprop", "dgrad", "wgrad"}
    assert {choice.source for choice in plan.choices} == {"measured"}
    assert all(choice.predicted_ms > 0 for choice in plan.choices)
    measure = verify.interleaved
    monkeypatch.setattr(verify, "interleaved", lambda _: pytest.fail("measured again"))
    with confpred.enabled(wait=True, verify=3, plan=path):
        step()
    monkeypatch.setattr(verify, "interleaved", measure)
    with confpred.enabled(wait=True, verify=3, plan=path), torch.no_grad():
        module(x[:16])
    after = read_plan(path, device)
    assert len(after.choices) == len(plan.choices) + 1
    assert {c.problem: c.candidate for c in plan.choices}.items() <= {
        c.problem: c.candidate for c in after.choices
    }.items()
    with confpred.enabled(wait=True, verify=3, verify_budget_s=1e-9, plan=path), torch.no_grad():
        module(x[:8])  # is measured, as nothing is spent yet
        module(x[:4])
    assert len(read_plan(path, device).choices) == len(after.choices) + 1


def test_a_plan_for_another_device_enables_nothing(tmp_path: Path, device: Device) -> None:
    confpred.use_predictor(Predictor.load())
    path = tmp_path / "plan.json"
    module, x = depthwise()
    with confpred.enabled(wait=True), confpred.record_plan(path), torch.no_grad():
        module(x)
    other = "h100" if device.key != "h100" else "h200"
    path.write_text(path.read_text().replace(f'"device": "{device.key}"', f'"device": "{other}"'))
    with pytest.raises(InvalidInput, match=other):
        confpred.enable(plan=path)
    assert F.conv2d is conv2d


_RANK = """
    import copy
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    rank, meeting = int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1, groups=8), nn.SiLU(),
        nn.Conv2d(64, 64, 3, padding=1, groups=64),
    ).cuda().to(memory_format=torch.channels_last)
    exact = copy.deepcopy(model).double()
    images = torch.randn(8, 64, 28, 28, device="cuda").to(memory_format=torch.channels_last)
    confpred.enable(wait=True)
    parallel = DistributedDataParallel(model, device_ids=[0])
    for _ in range(2):
        parallel.zero_grad()
        exact.zero_grad()
        with torch.autocast("cuda", torch.float16), pytorch_refused():
            out = parallel(images[4 * rank : 4 * rank + 4])
            (out.float().square().sum() / 4).backward()
        (exact(images.double()).square().sum() / 8).backward()
        for mine, theirs in zip(model.parameters(), exact.parameters()):
            close(mine.grad, theirs.grad, 1e-2)
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), exact.parameters()):
                mine.mul_(0.9)
                theirs.mul_(0.9)
    dist.barrier()
    dist.destroy_process_group()
    print("right")
"""


def test_two_processes_train_together(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(_START + _RANK), str(Path(__file__).parent)]
    environment = os.environ | {
        "CONFPRED_CACHE_DIR": str(tmp_path / "cache"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        found = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in found] == ["right\n"] * 2, found
