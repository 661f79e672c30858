"""Plans on a GPU: what is recorded is what ran, and a start repeats it."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shared import python_says
from torch import nn

import confpred
from confpred.cuda import compiler
from confpred.cuda.compiler import compiled_files
from confpred.errors import InvalidInput
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.predict.plan import plan_of, read_plan, write_plan
from confpred.predict.predictor import Predictor
from confpred.problem.device import Device

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    confpred.use_predictor(Predictor.load())
    yield
    confpred.use_predictor(Predictor({}))
    for bundle in compiler._opened:
        compiler.close_kernels(bundle)


def step(channels: int = 512, requires_grad: bool = True) -> torch.Tensor:
    """Return a depthwise layer with a bias, forward and backward, so large that its kernels are
    worth what they cost the host."""
    torch.manual_seed(0)
    x = torch.randn(32, channels, 28, 28, device="cuda", dtype=torch.half)
    x = x.contiguous(memory_format=LAST).requires_grad_(requires_grad)
    weight = torch.randn(channels, 1, 5, 5, device="cuda", dtype=torch.half) / 5
    bias = torch.randn(channels, device="cuda", dtype=torch.half)
    for tensor in (weight, bias):
        tensor.requires_grad_(requires_grad)
    out = confpred.conv2d(x, weight, bias, padding=2, groups=channels)
    if requires_grad:
        out.backward(torch.ones_like(out))
    return out.detach()


def test_what_ran_is_recorded_and_repeated(tmp_path: Path, device: Device) -> None:
    path, again = tmp_path / "plan.json", tmp_path / "again.json"
    before = step()  # shapes that are known already are recorded too
    with confpred.record_plan(path):
        step()
    plan = read_plan(path, device)
    assert plan.choices[0].problem.direction == "fprop"
    assert {c.problem.direction for c in plan.choices} == {"fprop", "dgrad", "wgrad"}
    expected = Predictor.load().choose_many([c.problem for c in plan.choices], device)
    assert [c.candidate for c in plan.choices] == [c.candidate for c in expected]
    confpred.use_predictor(Predictor.load(plan=path, device=device))
    with confpred.record_plan(again):
        assert torch.equal(step(), before)
    assert {c.source for c in read_plan(again).choices} == {"pinned"}
    assert [c.candidate for c in read_plan(again).choices] == [c.candidate for c in plan.choices]


def test_a_plan_is_followed_where_a_model_would_choose_otherwise(
    tmp_path: Path, device: Device
) -> None:
    path = tmp_path / "plan.json"
    with confpred.record_plan(path):
        ours = step(requires_grad=False)
    (choice,) = read_plan(path).choices
    assert choice.family is not None, "the model is expected to choose a kernel of ours here"
    other = [
        c
        for c in Predictor.load().rank(choice.problem, device, 8)
        if c.candidate != choice.candidate
    ]
    for candidate in (other[0].candidate, PYTORCH_OPERATOR):
        replaced = plan_of([confpred.Choice(choice.problem, device.key, "pinned", candidate)])
        write_plan(path, replaced)
        confpred.use_predictor(Predictor.load(plan=path, device=device))
        with confpred.record_plan(tmp_path / "followed.json"):
            torch.testing.assert_close(step(requires_grad=False), ours, rtol=4e-3, atol=4e-3)
        assert read_plan(tmp_path / "followed.json").choices[0].candidate == candidate


def test_a_recording_without_a_cuda_call_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="none was seen"), confpred.record_plan(tmp_path / "p"):
        confpred.conv2d(torch.randn(1, 8, 5, 5), torch.randn(8, 1, 3, 3), groups=8)
    assert list(tmp_path.iterdir()) == []


def test_the_whole_process_follows_a_plan(tmp_path: Path, device: Device) -> None:
    path = tmp_path / "plan.json"
    layer = nn.Conv2d(512, 512, 5, padding=2, groups=512).cuda().half().to(memory_format=LAST)
    x = torch.randn(32, 512, 28, 28, device="cuda", dtype=torch.half).to(memory_format=LAST)
    with confpred.enabled(), confpred.record_plan(path), torch.no_grad():
        expected = layer(x)
    with confpred.enabled(plan=path), torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=4e-3, atol=4e-3)
    other = "h100" if device.key != "h100" else "h200"
    path.write_text(path.read_text().replace(f'"device": "{device.key}"', f'"device": "{other}"'))
    with (
        pytest.raises(InvalidInput, match=f"device='{other}'"),
        confpred.enabled(plan=path),
    ):
        pytest.fail("a plan for another device was followed")


_START = """
    import sys

    import torch
    from torch import nn

    import confpred
    from confpred.cuda import compiler

    def refuse(*_):
        sys.exit("the compiler is asked")

    compiler._compile = refuse
    confpred.use_plan(sys.argv[1])
    torch.manual_seed(0)
    layer = nn.Conv2d(64, 64, 5, padding=2, groups=64).cuda().half().eval()
    layer = layer.to(memory_format=torch.channels_last)
    x = torch.randn(32, 64, 28, 28, device="cuda", dtype=torch.half)
    x = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        ours = confpred.conv2d(x, layer.weight, layer.bias, padding=2, groups=64)
        torch.testing.assert_close(ours, layer(x), rtol=4e-3, atol=4e-3)
    print("as PyTorch's")
"""


def test_a_start_with_kernels_asks_no_compiler(tmp_path: Path, device: Device) -> None:
    layer = nn.Conv2d(64, 64, 5, padding=2, groups=64).half()
    images = torch.randn(32, 64, 28, 28, dtype=torch.half)
    plan = confpred.prepare(layer, images, tmp_path / "made")
    assert plan.devices == (device,)
    assert any(choice.family is not None for choice in plan.choices)
    (tmp_path / "made").rename(tmp_path / "moved")
    cache = {"CONFPRED_CACHE_DIR": str(tmp_path / "cache")}
    said = python_says("-c", textwrap.dedent(_START), tmp_path / "moved", **cache)
    assert said == "as PyTorch's\n"
    assert not (tmp_path / "cache").exists()


def test_a_plan_with_kernels_for_another_device_is_refused(tmp_path: Path, device: Device) -> None:
    path = tmp_path / "plan.json"
    with confpred.record_plan(path):
        step(requires_grad=False)
    other = "h100" if device.key != "h100" else "a100"
    path.write_text(path.read_text().replace(f'"device": "{device.key}"', f'"device": "{other}"'))
    try:
        plan = read_plan(path)
    except InvalidInput:  # a config that the other device has no place for
        pytest.skip(f"the config that was chosen is not legal on {other}")
    write_plan(tmp_path / "folder", plan, kernels=compiled_files(plan.specs(), plan.arch))
    with pytest.raises(InvalidInput, match=f"device='{other}'"):
        confpred.use_plan(tmp_path / "folder")


def test_the_pages_example_runs_as_shown(tmp_path: Path, device: Device) -> None:
    page = Path(__file__).parents[2] / "docs" / "plans.md"
    (text,) = re.findall(
        r"^<!-- run: gpu -->\n```python\n(.*?)^```$",
        page.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    text = text.replace('device="h100"', f'device="{device.key}"')
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert read_plan(tmp_path / "plan.json", device).choices
