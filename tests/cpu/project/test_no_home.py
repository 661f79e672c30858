"""A user without a home directory, as containers have them, has no folders of his own either."""

from __future__ import annotations

import os
import subprocess
import sys

NOBODY = """
import os, pwd, sys
def nobody(uid): raise KeyError(uid)
pwd.getpwuid = nobody
from confpred.cli import main
"""
LAYER = "n=32 c=64 h=56 w=56 k=64 r=3 s=3 padding=1 groups=8"


def run_homeless(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    gone = ("HOME", "USER", "LOGNAME", "CONFPRED_CACHE_DIR", "CONFPRED_MODELS_DIR")
    known = {n: v for n, v in os.environ.items() if n not in gone and not n.startswith("XDG_")}
    return subprocess.run(
        [sys.executable, "-c", NOBODY + program, *words],
        check=False,
        capture_output=True,
        text=True,
        env=known,
    )


def test_a_user_without_a_home_is_answered() -> None:
    done = run_homeless("main()", "predict", "--device", "h100", "--layer", LAYER)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "grouped_fprop" in done.stdout
    done = run_homeless("main()", "models", "list")
    assert done.returncode == 0, done.stderr
    program = "from confpred import Predictor; print([*Predictor.load().models])"
    assert "h100" in run_homeless(program).stdout


def test_what_needs_a_folder_of_the_user_says_so() -> None:
    program = (
        "from confpred.cuda.cache import KernelCache, default_folder\n"
        "cache = KernelCache(default_folder())\n"
        "assert cache.get('a' * 64) is None; cache.put('a' * 64, b'x')\n"
        "from confpred.problem.device import recall; assert recall('h900') is None\n"
        "from confpred.retraining.retrain import default_folder, open_session, save\n"
        "save(default_folder('h100'), open_session(default_folder('h100'), None))\n"
    )
    done = run_homeless(program)
    assert "is not writable (cannot write /dev/null/no home directory" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("confpred.errors.StorageError: cannot write /dev/null/no home")
