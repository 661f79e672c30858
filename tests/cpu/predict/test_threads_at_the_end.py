"""Threads that are at work when the main thread has ended: other ones can be started no more."""

from __future__ import annotations

from pathlib import Path

import pytest
from sampler_rows import LAYER, ROW, fill
from shared import python

_PROGRAM = """
import sys, threading, time
from pathlib import Path
{setup}
def work():
    threading.main_thread().join()
    for i in range(3):
        {call}
        print("done", flush=True)
threading.Thread(target=work, daemon={daemon}).start()
threading.Thread(target=time.sleep, args=(0.5,)).start()  # which the program waits for
"""
_COMPILING = """
from confpred.cuda import compiler
from confpred.launch import runner
# Stand-ins for a compiler, where it was imported too.
compiler.compile_kernel = runner.compile_kernel = lambda spec, *_: spec
runner._submitted(7, "sm_90a")
"""
_READING = """
from confpred.data.parquet import read_shards
from confpred.problem.conv2d import CONVOLUTION
"""
_ASKING = f"""
from confpred.client.served import ServedPredictor
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
class Client:  # of a service that always answers
    def choose_many(self, problems, device):
        return [Choice(problem, device.key, "pinned", PYTORCH_OPERATOR) for problem in problems]
problem = Problem.parse("{LAYER}")
predictor = ServedPredictor(Client(), {{}}, 0.05)
"""
CALLS = {
    "a kernel": (_COMPILING, "assert runner._submitted(i, 'sm_90a').result() == i"),
    "kernels": (_COMPILING, "assert compiler.compile_all([i], 'sm_90a') == {i: i}"),
    "measurements": (
        _READING,
        "assert read_shards(Path(sys.argv[1]), CONVOLUTION, ['time_ms']).num_rows == 1",
    ),
    "a service": (_ASKING, "assert predictor.choose(problem, 'h100').source == 'pinned'"),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("daemon", [False, True])
def test_what_a_thread_still_does_ends_well(kind: str, daemon: bool, tmp_path: Path) -> None:
    fill(tmp_path, [ROW])
    setup, call = CALLS[kind]
    done = python("-c", _PROGRAM.format(setup=setup, call=call, daemon=daemon), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert daemon or done.stdout == "done\n" * 3
