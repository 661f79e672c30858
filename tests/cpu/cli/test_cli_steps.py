"""Progress: lines in a log, a bar in a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

PROGRAM = """
import time
from confpred.cli.learn import show_steps
with show_steps() as say:
    for done in range(4):
        say("reading", done, 3)
    say("fitting", 0, 2)
    time.sleep(2.1)
    say("fitting", 1, 2)
    say("fitting", 2, 2)
"""
COMMAND = [sys.executable, "-c", PROGRAM]


def test_a_log_has_a_line_where_a_step_begins_and_every_two_seconds() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == ["[0s] reading", "[0s] fitting", "[2s] fitting: 1 of 2"]


def test_a_terminal_has_a_bar_for_each_step() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(COMMAND, stderr=theirs, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:  # Linux says so where the other side is closed
            pass
    os.close(ours)
    assert process.returncode == 0
    last = shown.decode().replace("\r", "").split("\n")[-3:-1]
    for line, step, count in zip(last, ("reading", "fitting"), ("3/3", "2/2"), strict=True):
        assert step in line
        assert count in line
