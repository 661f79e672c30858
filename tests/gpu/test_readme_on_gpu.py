"""The programs of the README and docs/pytorch.md for a GPU, run as shown."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from confpred.problem.device import Device

_CHECK = """
import torch.nn.functional as F

expected = torch.relu(F.conv2d(x.double(), weight.double(), padding=1, groups=16))
assert y.is_cuda
assert y.dtype == torch.half
assert y.shape == expected.shape
assert y.is_contiguous(memory_format=torch.channels_last)
difference = torch.linalg.norm(y.double() - expected) / torch.linalg.norm(expected)
assert difference < 1e-3, difference
"""


_NETWORK = """
import torch, confpred
torch.manual_seed(0)
layers = torch.nn.Conv2d(64, 64, 7, padding=3, groups=64), torch.nn.BatchNorm2d(64), torch.nn.ReLU()
model = torch.nn.Sequential(*layers).cuda().half().eval()
images = torch.randn(32, 64, 28, 28, device="cuda").half().to(memory_format=torch.channels_last)
with torch.no_grad():
    expected = model.double()(images.double())
model.half()
"""
_COMPARED = """
for _ in range(3):  # captured, recorded, replayed
    with torch.no_grad():
        y = model(images)
    difference = torch.linalg.norm(y.double() - expected) / torch.linalg.norm(expected)
    assert difference < 5e-3, difference
"""


def block(repository: Path, mark: str, page: str = "README.md") -> str:
    """Return the block of code under that comment."""
    text = (repository / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^<!-- {mark} -->\n```\w+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return str(found)


def run(program: str, *words: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_call_is_right(repository: Path, tmp_path: Path, device: Device) -> None:
    run(block(repository, "run: gpu", "docs/pytorch.md") + _CHECK, folder=tmp_path)


def test_a_network_computes_the_same(repository: Path, tmp_path: Path, device: Device) -> None:
    run(_NETWORK + block(repository, "run: optimize") + _COMPARED, folder=tmp_path)


@pytest.mark.parametrize("mark", ["run: enabled", "run: optimize"])
def test_the_page_runs(repository: Path, tmp_path: Path, device: Device, mark: str) -> None:
    run(block(repository, mark, "docs/pytorch.md"), folder=tmp_path)


@pytest.mark.timeout(600)
def test_sampling_runs(repository: Path, tmp_path: Path, device: Device) -> None:
    """On the four problems of the smoke suite, with few configs of each."""
    line = block(repository, "run: retrain").splitlines()[0]
    program, *words = shlex.split(line, comments=True)
    assert program == "confpred"
    suites = tmp_path / "datasets" / "suites"
    suites.mkdir(parents=True)
    shutil.copy(repository / "datasets" / "suites" / "smoke.json", suites / "fprop.json")
    main = "from confpred.cli import main; main()"
    run(main, *words, "--configs", "4", folder=tmp_path)
    assert list((tmp_path / "runs" / "mine").glob("*.parquet"))
