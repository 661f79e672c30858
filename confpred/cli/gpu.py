"""The GPU that a command measures on, as `retrain` and `drift` name it."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING

from confpred.errors import InvalidInput, MissingExtra

if TYPE_CHECKING:
    from confpred.data.measurements import Run
    from confpred.problem.device import Device


def parse_ordinal(text: str) -> int:
    """The CUDA device number in ``cuda:0`` or ``0``.

    Raises:
        InvalidInput: the text is no such name.
    """
    match = re.fullmatch(r"(?:cuda:)?([0-9]{1,4})", text.strip())
    if match is None:
        raise InvalidInput("device", text, "a GPU of this machine, such as cuda:0")
    return int(match[1])


def find_gpu(text: str) -> tuple[dict[int, Run], Device]:
    """The GPU that `text` names: what its rows share, by its number, and its description.

    Raises:
        MissingExtra: the packages of the extra ``gpu`` are not installed.
        InvalidInput, LaunchError, UnknownDevice: see `confpred.sampler.gpus.find_gpus`.
    """
    ordinal = parse_ordinal(text)
    try:
        import rich  # noqa: F401 -- a missing package is reported before any work

        from confpred.cuda.driver import device_of
        from confpred.sampler.gpus import find_gpus
    except ImportError as error:
        raise MissingExtra(str(error.name), "gpu") from error
    return find_gpus(str(ordinal)), device_of(ordinal)


def check_pytorch(wanted: bool) -> None:
    """Check that PyTorch is installed where its operator is to be timed.

    Raises:
        MissingExtra: it is not.
    """
    if wanted and find_spec("torch") is None:
        raise MissingExtra("torch (or --no-pytorch)", "gpu")


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))
