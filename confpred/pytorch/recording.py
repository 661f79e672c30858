"""Recording the choices that PyTorch's calls make, as a plan."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confpred.errors import InvalidInput
from confpred.forks import uninterrupted
from confpred.predict.choice import Choice
from confpred.predict.plans import plan_of, write_plan
from confpred.pytorch import choosing

_recording: set[Path] = set()
_lock = threading.Lock()


@contextmanager
def record_plan(path: str | Path) -> Iterator[None]:
    """Record every choice that is made inside the block, by any thread, and write them to `path`
    as a plan when it ends.

    What was chosen before is chosen anew, so that a network that has run already is recorded
    whole; kernels that are compiled stay compiled. The file appears whole or not at all, and not
    where the block raises. Of ranks that record the same network, the last one writes the file that
    stays, which is the same.

    ::

        with confpred.enabled(), confpred.record_plan("plan.json"):
            loss(model(x)).backward()

    Raises:
        InvalidInput: another recording to the same file is under way; or, when the block ends, no
            convolution was seen on a CUDA device, or they were on devices of several kinds.
        StorageError: the file system refused the write.
    """
    target = Path(path).resolve()
    with uninterrupted, _lock:
        if target in _recording:
            raise InvalidInput("path", str(path), "a file that no other recording is to write")
        _recording.add(target)
    seen: list[Choice] = []  # a list takes what several threads append
    try:
        with choosing.watch_choices(seen.append):
            yield
        if not seen:
            allowed = "a block in which a convolution runs on a CUDA device; none was seen"
            raise InvalidInput("path", str(path), allowed)
        write_plan(target, plan_of(seen))
    finally:
        with uninterrupted, _lock:
            _recording.discard(target)
