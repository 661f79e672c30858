"""One function on many arguments, in a process for each core."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from joblib import Parallel, cpu_count, delayed

from confpred.concurrency import end_with, stops_held
from confpred.errors import ConfpredError, StorageError

_T = TypeVar("_T")


def run_in_helpers(
    function: Callable[..., _T],
    arguments: Sequence[tuple[Any, ...]],
    done: Callable[[int], None] = lambda count: None,
) -> list[_T]:
    """``function(*a)`` for each `a` of `arguments`, in their order, side by side in processes that
    end with this one.

    Args:
        function: what to call; it and its arguments can be pickled.
        arguments: of each call.
        done: called with how many results are there, each time that there is one more.

    Raises:
        StorageError: the disk has no room for what the processes share.
        ConfpredError: a process was killed. What `function` raises is raised too.
    """
    count = min(cpu_count(), len(arguments))
    try:
        with Parallel(
            count, return_as="generator", initializer=end_with, initargs=(os.getpid(),)
        ) as parallel:
            with stops_held():  # until the processes run, and leave them to this one
                list(parallel(delayed(int)() for _ in range(count)))
            found: list[_T] = []
            for result in parallel(delayed(function)(*each) for each in arguments):
                found.append(result)
                done(len(found))
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"cannot write what processes share: {reason}") from error
    except BrokenProcessPool as error:
        raise ConfpredError(
            "a helper process was killed, which the system does where memory runs out"
        ) from error
    return found
