"""Gradient-boosted trees, evaluated by LightGBM's own library through its C API.

``import lightgbm`` costs 0.2 s, and 1 s where scikit-learn and pandas are installed, as it imports
both: too much for a process that only asks for one prediction. Its shared library loads in a few
milliseconds, and gives the same answers to the bit.
"""

from __future__ import annotations

import ctypes
import re
import threading
import weakref
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.errors import ModelError
from confpred.forks import uninterrupted

# Constants of LightGBM's c_api.h.
_DTYPE_FLOAT32 = 0
_PREDICT_RAW_SCORE = 1
_ALL = -1
_HEADER = re.compile(r"tree\n(?:\w+(?:=.*)?\n)*?feature_names=(.+)\n")
# One thread: the few hundred rows of a call take less time than waking a second one.
_PARAMETERS = b"num_threads=1 verbosity=-1"
#: One ensemble at a time, as LightGBM's number of threads is set for it and set back.
_parsing = threading.Lock()
#: Where LightGBM writes how many values it wrote, which is known: one place for all calls.
_count = ctypes.byref(ctypes.c_int64())


class Trees:
    """A boosted ensemble of regression trees. Immutable; safe to share between threads, whose
    predictions run side by side, and to fork.

    The text is parsed by the first prediction: a model has ensembles for every kind of layer, and a
    process may ask for one.

    Attributes:
        features: names of the columns of the matrix that `predict` takes.
    """

    def __init__(self, text: str) -> None:
        """Take an ensemble in LightGBM's text form.

        The library trusts the text: check its digest first.

        Raises:
            ModelError: it does not begin as such a text does.
        """
        header = _HEADER.match(text)
        if header is None:
            raise ModelError("not LightGBM's text form of an ensemble")
        self.features = tuple(header[1].split())
        self._text = text
        self._boosters: dict[int, ctypes.c_void_p] = {}

    def _booster(self, trees: int) -> ctypes.c_void_p:
        """What predicts by the first `trees` trees, parsed when it is first needed.

        Each number has its own: LightGBM stores in the booster how many trees to use and reads that
        back without a lock, so that simultaneous calls with different numbers would use each
        other's. With one number for all calls, and no trees beyond it, they cannot.
        """
        booster = self._boosters.get(trees)
        if booster is None:
            with _parsing:
                booster = self._boosters.get(trees)
                if booster is None:
                    booster = self._boosters[trees] = self._parse(trees)
        return booster

    def _parse(self, trees: int) -> ctypes.c_void_p:
        library, handle = _library(), ctypes.c_void_p()
        found, features, most = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        text = self._text if trees == _ALL else _first(self._text, trees)
        # One thread here too: those that OpenMP keeps are not there in a forked child, whose next
        # parallel region would wait for them for good.
        _check(library.LGBM_GetMaxThreads(ctypes.byref(most)))
        _check(library.LGBM_SetMaxThreads(1))
        try:
            _check(
                library.LGBM_BoosterLoadModelFromString(
                    text.encode(), ctypes.byref(found), ctypes.byref(handle)
                )
            )
        finally:
            _check(library.LGBM_SetMaxThreads(most))
        # Not at the end of the process, when other threads may be predicting still.
        weakref.finalize(self, library.LGBM_BoosterFree, handle).atexit = False
        _check(library.LGBM_BoosterGetNumFeature(handle, ctypes.byref(features)))
        if features.value != len(self.features):
            raise ModelError(f"{features.value} features, of which {len(self.features)} have names")
        return handle

    def predict(self, matrix: NDArray[np.float32], trees: int = _ALL) -> NDArray[np.float64]:
        """The value of each row of `matrix`, by the first `trees` trees (by default, all).

        Args:
            matrix: float32, ``(rows, len(features))``, C order.
            trees: at least 1.

        Raises:
            ModelError: the matrix does not have these columns; LightGBM is not installed, or
                refuses the text.
        """
        matrix = np.ascontiguousarray(matrix, np.float32)
        if matrix.ndim != 2 or matrix.shape[1] != len(self.features):
            raise ModelError(
                f"the model takes {len(self.features)} features a row; "
                f"got an array of {matrix.shape}"
            )
        values = np.empty(len(matrix), np.float64)
        with uninterrupted:
            _check(
                _library().LGBM_BoosterPredictForMat(
                    self._booster(trees),
                    _address(matrix),
                    _DTYPE_FLOAT32,
                    len(matrix),
                    len(self.features),
                    1,  # row-major
                    _PREDICT_RAW_SCORE,
                    0,  # from the first tree
                    _ALL,
                    _PARAMETERS,
                    _count,
                    _address(values),
                )
            )
        return values


def _address(array: NDArray[Any]) -> ctypes.c_void_p:
    """Where the elements of `array` begin; its attribute ``ctypes`` takes three times as long."""
    return ctypes.c_void_p(array.__array_interface__["data"][0])


def _first(text: str, trees: int) -> str:
    """The text of the first `trees` trees of the ensemble in `text`."""
    head, rest = text.split("\nTree=0\n", 1)
    # The lengths of all trees, which LightGBM writes for parsing in parallel, may be left out.
    head = "\n".join(line for line in head.split("\n") if not line.startswith("tree_sizes="))
    kept = rest.partition(f"\nTree={trees}\n")[0].partition("\nend of trees\n")[0]
    return f"{head}\nTree=0\n{kept}\nend of trees\n"


@cache
def _library() -> ctypes.CDLL:
    spec = find_spec("lightgbm")  # finds the package without running it
    for root in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(root).glob("*/lib_lightgbm.*")):
            library = ctypes.CDLL(str(path))
            library.LGBM_GetLastError.restype = ctypes.c_char_p
            return library
    raise ModelError("LightGBM's library is not installed: pip install lightgbm")


def _check(status: int) -> None:
    if status:
        raise ModelError(f"LightGBM: {_library().LGBM_GetLastError().decode(errors='replace')}")
