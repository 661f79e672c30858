"""A new generation is loaded and asked in a process of its own before any worker is told of it.

Trees are evaluated by native code. A text that makes it crash, in spite of all checks, ends the
process of the trial and none that answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import numpy as np

from confpred.concurrency import end_with
from confpred.errors import ConfpredError
from confpred.model.trees import Trees

from . import generations
from .child import command
from .publishing import MODELS

#: Seconds that a trial may take.
_LONGEST_S = 120.0
#: What is asked of all trees: one row at a time, and many, which LightGBM does in other ways.
_VALUES = (0.0, float("nan"), 1e30, -1e30)
_ROWS = (1, 32)


async def refusal(folder: Path) -> str:
    """Try the generation in `folder`: why it is refused, or nothing if it is not."""
    names = sorted(path.name for path in folder.glob(f"{MODELS}/*"))
    tried = f"a process that tried {' and '.join(names)}"
    words = (*command("trial"), str(folder), str(os.getpid()))
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return f"{tried} cannot be started: {error.strerror or error}"
    try:
        said, _ = await asyncio.wait_for(process.communicate(), _LONGEST_S)
    except asyncio.TimeoutError:
        return f"{tried} was not done within {_LONGEST_S:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    status = await process.wait()
    if status == 0:
        return ""
    if status < 0:
        return f"{tried} ended by {signal.Signals(-status).name}"
    lines = said.decode(errors="replace").splitlines()  # LightGBM's may be before the last
    return lines[-1] if lines else f"{tried} failed, as the log says"


def main() -> None:
    """Load the generation that the command line names, and ask all that it knows; with 1, and the
    reason on standard output, if that fails."""
    folder, parent = sys.argv[1:]
    end_with(int(parent))
    logging.disable()  # a worker that loads it says the same
    try:
        loaded = generations.load(Path(folder))
        for model in loaded.predictor.models.values():
            for trees in model.ensembles():
                _ask(trees)
    except (ConfpredError, OSError) as error:
        print(error)
        sys.exit(1)


def _ask(trees: Trees) -> None:
    for count in _ROWS:
        for value in _VALUES:
            trees.predict(np.full((count, len(trees.features)), value, np.float32))
