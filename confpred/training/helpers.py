"""One function on many arguments, in a process for each core."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from joblib import Parallel, cpu_count, delayed

from confpred.errors import ConfpredError, StorageError
from confpred.processes import end_with, stops_held

_T = TypeVar("_T")


def run_in_helpers(function: Callable[..., _T], arguments: Sequence[tuple[Any, ...]]) -> list[_T]:
    """``function(*a)`` for each `a` of `arguments`, in their order, side by side in processes that
    end with this one.

    Raises:
        StorageError: the disk has no room for what the processes share.
        ConfpredError: a process was killed. What `function` raises is raised too.
    """
    count = min(cpu_count(), len(arguments))
    try:
        with Parallel(count, initializer=end_with, initargs=(os.getpid(),)) as parallel:
            with stops_held():  # until the processes run, and leave them to this one
                parallel(delayed(int)() for _ in range(count))
            done: list[_T] = parallel(delayed(function)(*each) for each in arguments)
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"cannot write what processes share: {reason}") from error
    except BrokenProcessPool as error:
        raise ConfpredError(
            "a helper process was killed, which the system does where memory runs out"
        ) from error
    return done
