"""NVIDIA's compute-sanitizer over a sample of each family's configs: no stray access, no race, no
read of memory that nobody wrote."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from layers import CONVOLUTIONS, NORMS, OTHER_RANKS
from slow import slow_but

SANITIZER = shutil.which("compute-sanitizer")
SCRIPT = Path(__file__).with_name("launch_sample.py")


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on the PATH")
@pytest.mark.parametrize(
    "tool", slow_but(["memcheck"], ["memcheck", "racecheck", "initcheck"], "three times as long")
)
@pytest.mark.parametrize("family", [*CONVOLUTIONS, *NORMS, *OTHER_RANKS])
def test_a_sample_of_configs_is_clean(family: str, tool: str) -> None:
    options = ("--tool", tool, "--error-exitcode", "9")
    result = subprocess.run(
        [str(SANITIZER), *options, sys.executable, str(SCRIPT), family],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "launched" in result.stdout
