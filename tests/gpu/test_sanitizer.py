"""NVIDIA's compute-sanitizer over a sample of configs: no stray access, no race."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer")
SCRIPT = Path(__file__).with_name("launch_sample.py")


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on the PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_a_sample_of_configs_is_clean(tool: str) -> None:
    result = subprocess.run(
        [str(SANITIZER), "--tool", tool, "--error-exitcode", "9", sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "launched" in result.stdout
