"""Which GPUs to sample on, and what their rows record about them."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from pathlib import Path

import confpred
from confpred.cuda.compiler import nvrtc_version
from confpred.cuda.driver import describe, device_count, device_of
from confpred.data.measurements import Run
from confpred.errors import InvalidInput, LaunchError


def find_gpus(gpus: str) -> dict[int, Run]:
    """CUDA device -> what the rows of one run share there; each GPU has a run id of its own.

    Args:
        gpus: ``all``, or CUDA device numbers such as ``0,1``.

    Raises:
        MissingExtra: the CUDA packages are not installed.
        LaunchError: there is no GPU.
        InvalidInput: a number names no GPU.
        UnknownDevice: a GPU cannot be described (`confpred.cuda.driver.device_of`).
    """
    cuda = nvrtc_version()
    count = device_count()
    if not count:
        raise LaunchError("sampling needs an NVIDIA GPU, and no CUDA device can be used here")
    if gpus == "all":
        ordinals = list(range(count))
    elif re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", gpus):
        ordinals = sorted({int(number) for number in gpus.split(",")})
    else:
        raise InvalidInput("gpus", gpus, "all, or CUDA device numbers such as 0,1")
    if ordinals[-1] >= count:
        raise InvalidInput("gpus", gpus, f"CUDA device numbers from 0 to {count - 1}")
    run_id, project = secrets.token_hex(4), _project()
    runs = {}
    for ordinal in ordinals:
        name, driver = describe(ordinal)
        sitting = run_id if len(ordinals) == 1 else f"{run_id}-{ordinal}"
        runs[ordinal] = Run(sitting, device_of(ordinal).key, name, driver, cuda, project)
    return runs


def _project() -> str:
    """The version and the commit: ``$CONFPRED_COMMIT``, or that of the checkout if this is one."""
    if commit := os.environ.get("CONFPRED_COMMIT"):
        return f"{confpred.__version__}+{commit}"
    folder = Path(confpred.__file__).parent
    git = ["git", "-C", str(folder)]
    try:
        # A package installed into some other project's checkout is not tracked there.
        for command in (
            ["ls-files", "--error-unmatch", "__init__.py"],
            ["rev-parse", "--short=10", "HEAD"],
        ):
            done = subprocess.run([*git, *command], capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return confpred.__version__
    return f"{confpred.__version__}+{done.stdout.strip()}"
