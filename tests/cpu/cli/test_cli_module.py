"""`python -m confpred` is the `confpred` command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "words",
    [
        ("--version",),
        ("predict", "--device", "h100", "--layer", "n=8 c=64 h=28 w=28 k=64 r=3 s=3 groups=8"),
        ("predict", "--device", "h9", "--layer", "n=8 c=64 h=28 w=28 k=64 r=3 s=3"),
    ],
    ids=["version", "answer", "refusal"],
)
def test_it_says_what_the_command_says(words: tuple[str, ...]) -> None:
    program = Path(sys.executable).with_name("confpred")
    one, other = (
        subprocess.run([*command, *words], capture_output=True, text=True)
        for command in ((program,), (sys.executable, "-m", "confpred"))
    )
    assert one.stdout.replace("confpred,", "") == other.stdout.replace("python -m confpred,", "")
    assert (one.returncode, one.stderr) == (other.returncode, other.stderr)
    assert one.stdout or one.stderr
