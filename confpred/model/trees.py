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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from confpred.concurrency import uninterrupted
from confpred.errors import ModelError
from confpred.model import tree_text

# Constants of LightGBM's c_api.h.
_DTYPE_FLOAT32 = 0
_PREDICT_RAW_SCORE = 1
_ALL = -1
_ROW_MAJOR = 1
_HEADER = re.compile(rb"tree\n(?:\w+(?:=.*)?\n)*?feature_names=(.+)\n")
# One thread: the few hundred rows of a call take less time than waking a second one.
_PARAMETERS = b"num_threads=1 verbosity=-1"
#: A call for a matrix takes 13 us before its first row, as it reads its parameters again; one for a
#: row that was prepared takes 0.6 us more a row.
_FEW_ROWS = 16
#: One ensemble at a time, as LightGBM's number of threads is set for it and set back.
_parsing = threading.Lock()
#: Where LightGBM writes how many values it wrote, which is known: one place for all calls.
_count = ctypes.byref(ctypes.c_int64())


class _Booster(NamedTuple):
    """What LightGBM made of a text: the booster, and its preparation for single rows."""

    handle: ctypes.c_void_p
    prepared: ctypes.c_void_p


class Trees:
    """A boosted ensemble of regression trees. Immutable; safe to share between threads, whose
    predictions run side by side, and to fork.

    The text is checked and parsed by the first prediction, as far as that needs it: a model has
    ensembles for every kind of layer, and a process may ask for one. To check all of a model takes
    0.1 s.

    Attributes:
        features: names of the columns of the matrix that `predict` takes.
    """

    def __init__(self, text: str | bytes, origin: str = "the text of an ensemble") -> None:
        """Take an ensemble in LightGBM's text form, which is from `origin`.

        Raises:
            ModelError: it does not begin as such a text does.
        """
        text = text.encode() if isinstance(text, str) else text
        header = _HEADER.match(text)
        if header is None:
            raise ModelError(f"{origin} is damaged: not LightGBM's text form of an ensemble")
        self.features = tuple(header[1].decode().split())
        self._text, self._origin = text, origin
        self._boosters: dict[tuple[int, int | None], _Booster] = {}

    def _booster(self, first: int, end: int | None) -> _Booster:
        """What predicts by a part of the trees, parsed when it is first needed.

        Each part has its own: LightGBM stores in the booster how many trees to use and reads that
        back without a lock, so that simultaneous calls with different numbers would use each
        other's. With one number for all calls, and no trees beyond it, they cannot.
        """
        booster = self._boosters.get((first, end))
        if booster is None:
            with _parsing:
                booster = self._boosters.get((first, end))
                if booster is None:
                    booster = self._boosters[first, end] = self._parse(first, end)
        return booster

    def check(self) -> None:
        """Check all of the text, of which a prediction checks the part that it needs.

        Raises:
            ModelError: LightGBM would read what is not there, or never end.
        """
        self._checked(0, None)

    def _checked(self, first: int, end: int | None) -> bytes:
        try:
            text = tree_text.part(self._text, first, end)
            tree_text.check(text, len(self.features))
        except ModelError as error:
            raise ModelError(f"{self._origin} is damaged: {error}") from None
        return text

    def _parse(self, first: int, end: int | None) -> _Booster:
        text = self._checked(first, end)
        library, handle, prepared = _library(), ctypes.c_void_p(), ctypes.c_void_p()
        found, most = ctypes.c_int(), ctypes.c_int()
        # One thread here too: those that OpenMP keeps are not there in a forked child, whose next
        # parallel region would wait for them for good.
        _check(library.LGBM_GetMaxThreads(ctypes.byref(most)))
        _check(library.LGBM_SetMaxThreads(1))
        try:
            _check(
                library.LGBM_BoosterLoadModelFromString(
                    text, ctypes.byref(found), ctypes.byref(handle)
                )
            )
        finally:
            _check(library.LGBM_SetMaxThreads(most))
        # Not at the end of the process, when other threads may be predicting still.
        weakref.finalize(self, library.LGBM_BoosterFree, handle).atexit = False
        _check(
            library.LGBM_BoosterPredictForMatSingleRowFastInit(
                handle,
                _PREDICT_RAW_SCORE,
                0,  # from the first tree
                _ALL,
                _DTYPE_FLOAT32,
                len(self.features),
                _PARAMETERS,
                ctypes.byref(prepared),
            )
        )
        weakref.finalize(self, library.LGBM_FastConfigFree, prepared).atexit = False
        return _Booster(handle, prepared)

    def predict(
        self, matrix: NDArray[np.float32], first: int = 0, end: int | None = None
    ) -> NDArray[np.float64]:
        """The value of each row of `matrix`: the sum of what some of the trees say (by default,
        all).

        Args:
            matrix: float32, ``(rows, len(features))``, C order.
            first: the first of these trees.
            end: the tree behind the last one; None for all from `first` on.

        Raises:
            ModelError: the matrix does not have these columns; the text is damaged; LightGBM is not
                installed, or refuses the text.
        """
        matrix = np.ascontiguousarray(matrix, np.float32)
        if matrix.ndim != 2 or matrix.shape[1] != len(self.features):
            raise ModelError(
                f"the model takes {len(self.features)} features a row; "
                f"got an array of {matrix.shape}"
            )
        values = np.empty(len(matrix), np.float64)
        with uninterrupted:
            booster = self._booster(first, end)
            row, value = _address(matrix), _address(values)
            if len(matrix) > _FEW_ROWS:
                _check(
                    _library().LGBM_BoosterPredictForMat(
                        booster.handle,
                        row,
                        _DTYPE_FLOAT32,
                        len(matrix),
                        len(self.features),
                        _ROW_MAJOR,
                        _PREDICT_RAW_SCORE,
                        0,  # from the first tree
                        _ALL,
                        _PARAMETERS,
                        _count,
                        value,
                    )
                )
                return values
            predict = _library().LGBM_BoosterPredictForMatSingleRowFast
            for _ in range(len(matrix)):
                _check(predict(booster.prepared, row, _count, value))
                row, value = row + matrix.strides[0], value + values.itemsize
        return values


def _address(array: NDArray[Any]) -> int:
    """Where the elements of `array` begin; its attribute ``ctypes`` takes three times as long."""
    found: int = array.__array_interface__["data"][0]
    return found


@cache
def _library() -> ctypes.CDLL:
    spec = find_spec("lightgbm")  # finds the package without running it
    for root in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(root).glob("*/lib_lightgbm.*")):
            library = ctypes.CDLL(str(path))
            library.LGBM_GetLastError.restype = ctypes.c_char_p
            pointer, number = ctypes.c_void_p, ctypes.c_int
            library.LGBM_BoosterPredictForMatSingleRowFast.argtypes = [pointer] * 4
            library.LGBM_BoosterPredictForMat.argtypes = [
                *(pointer, pointer, number, ctypes.c_int32, ctypes.c_int32),
                *([number] * 4),
                *(ctypes.c_char_p, pointer, pointer),
            ]
            return library
    raise ModelError("LightGBM's library is not installed: pip install lightgbm")


def _check(status: int) -> None:
    if status:
        raise ModelError(f"LightGBM: {_library().LGBM_GetLastError().decode(errors='replace')}")
