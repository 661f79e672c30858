"""Helpers of tests in all folders: files that a run makes once or that find no room, closed
folders."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock


def once_a_run(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name`, which `make` has filled in this worker or in another one.

    Tests must not write to it. Where `make` fails, the next worker tries again.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the worker's own folder is in that of the run
    folder = base / "shared" / name
    folder.parent.mkdir(exist_ok=True)
    made = folder.with_suffix(".made")
    with FileLock(folder.with_suffix(".lock")):
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def python(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the Python of the tests with these words and variables of the environment."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def python_says(*words: object, **environment: str) -> str:
    """Return the standard output of such a run, which has to end well."""
    done = python(*words, **environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let no file of this process and its helpers have more bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def closed(*paths: Path) -> Iterator[None]:
    """Let nobody read or enter `paths`, not even root, who runs tests in containers."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # of this thread
    assert libc.capget(header, sets) == 0
    before, modes = sets[0], [path.stat().st_mode for path in paths]
    sets[0] &= ~0b110  # without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    for path in paths:
        path.chmod(0)
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = before
        assert libc.capset(header, sets) == 0
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode)
