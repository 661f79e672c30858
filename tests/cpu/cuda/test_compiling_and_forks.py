"""Processes that are forked while NVRTC compiles in threads, and compile themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from layers import first_kernel
from shared import python

from confpred.families.registry import all_families

# On the code before, three of eight children waited for good for a lock inside NVRTC.
_PROGRAM = """
import os, sys, threading, time
from pathlib import Path
from confpred.cuda.cache import KernelCache
from confpred.cuda.compiler import compile_kernel
from confpred.problem.operation import KernelSpec

kernel = {kernel!r}
folder = Path(sys.argv[1])
def compile_into(name):
    assert not compile_kernel(kernel, "sm_90a", KernelCache(folder / name)).cached
compile_into("first")
stop = threading.Event()
def keep_compiling(name):
    count = 0
    while not stop.is_set():
        compile_into(f"{{name}}.{{count}}")
        count += 1
threads = [threading.Thread(target=keep_compiling, args=(i,)) for i in range(2)]
for thread in threads:
    thread.start()
hung = 0
for turn in range(6):
    time.sleep(0.05 + 0.03 * turn)
    child = os.fork()
    if child == 0:
        compile_into(f"child {{turn}}")
        os._exit(0)
    until = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            hung += 1
            break
        time.sleep(0.01)
    if hung:
        break
stop.set()
for thread in threads:
    thread.join()
print(hung, "hung")
"""


@pytest.mark.slow(reason="it forks again and again beside compiles")
def test_no_child_hangs_that_was_forked_while_threads_compile(tmp_path: Path) -> None:
    kernel = first_kernel(all_families()["grouped_fprop"])
    program = _PROGRAM.format(kernel=kernel)
    done = python("-c", program, tmp_path)
    assert (done.stdout, done.stderr) == ("0 hung\n", "")
