"""GPU tests skip, and say why, where the driver reports no CUDA device; nowhere else."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from confpred.cuda import driver
from confpred.problem.device import Device


def _share_gpus(worker: str) -> None:
    """Let the workers of a run in several processes, `gw0` and so on, take the GPUs in turns, or
    those that ``CUDA_VISIBLE_DEVICES`` names, none where it is empty."""
    # Not asked of the driver, which looks at the variable once, when it starts.
    try:
        listed = subprocess.check_output(["nvidia-smi", "--list-gpus"], text=True).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return
    every = ",".join(map(str, range(len(listed))))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker[2:]) % len(gpus)]


if "PYTEST_XDIST_WORKER" in os.environ:
    _share_gpus(os.environ["PYTEST_XDIST_WORKER"])
    # Several workers a core, each with a thread a core, would spend their time in turns.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def _cuda_devices() -> int:
    """How many devices the CUDA driver reports.

    Asked of the driver itself, so that a GPU machine with a broken installation fails its tests
    instead of skipping them.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _cuda_devices():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: the driver reports none"))


@pytest.fixture(scope="session")
def device() -> Device:
    """Return the description of the GPU that the tests run on."""
    return driver.device_of(0)
