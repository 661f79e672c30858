"""``confpred.tuned`` where measurements cannot be kept, and in forked processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from shared import python
from tuned_programs import KNOWN

START = """
import os, sys, threading
import torch
from tuned_kernels import add, adding, tried
def call(size):
    x, out = torch.randn(size), torch.zeros(size)
    tried.clear()
    add(x, out)
    assert len(tried) == 16  # each config was timed
    add(x, out := torch.zeros(size))
    assert torch.equal(x, out)
"""


def run(program: str, keep: Path) -> str:
    """Run a program that has to end well, and return its log."""
    done = python("-c", START + program, **KNOWN, TUNED_KEEP=str(keep))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("prelude", "reason"),
    [
        ("", "cannot write .*: Not a directory"),
        ("sys.modules['confpred.data.parquet'] = None\n", "import of confpred.data.parquet halted"),
    ],
)
def test_measurements_that_cannot_be_kept_cost_a_line_of_the_log(
    prelude: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    log = run(prelude + "call(40); call(75)", tmp_path / "file" / "kept")
    _, *lines = log.splitlines()  # the first one is that it has no model
    assert len(lines) == 1
    assert re.match(f"adding: its times are not kept: {reason}", lines[0])


def test_a_forked_process_keeps_its_times_in_files_of_its_own(tmp_path: Path) -> None:
    program = """
call(40)
child = os.fork()
call(75 if child else 100)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    run(program, tmp_path)
    assert len([*tmp_path.glob("rows-*.parquet")]) == 3


def test_a_kernel_whose_source_is_gone_is_tuned_by_trials(tmp_path: Path) -> None:
    program = """
from confpred.triton import source
# A stand-in for a file that went after Triton had read it.
def gone(function):
    raise OSError("could not get source code")
source.inspect = type("inspect", (), {**vars(source.inspect), "getsource": gone})
call(40)
"""
    reason, _ = run(program, tmp_path).splitlines()  # and it has no model
    assert reason.endswith("its source cannot be read (could not get source code)")
    assert not [*tmp_path.iterdir()]
