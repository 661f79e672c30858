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

import numpy as np
from numpy.typing import NDArray

from confpred.errors import ModelError

# Constants of LightGBM's c_api.h.
_DTYPE_FLOAT32 = 0
_PREDICT_RAW_SCORE = 1
_ALL = -1
_HEADER = re.compile(r"tree\n(?:\w+(?:=.*)?\n)*?feature_names=(.+)\n")
# One thread: the few hundred rows of a call take less time than waking a second one.
_PARAMETERS = b"num_threads=1 verbosity=-1"


class Trees:
    """A boosted ensemble of regression trees. Immutable; safe to share between threads.

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
        self._text: str | None = text
        self._handle: ctypes.c_void_p | None = None
        # Guards the parsing and each prediction. LightGBM stores in the booster how many trees to
        # use and reads that back under a lock that readers share, so that simultaneous calls with
        # different numbers would use each other's.
        self._lock = threading.Lock()

    def _parse(self, text: str) -> None:
        library, handle = _library(), ctypes.c_void_p()
        trees, features = ctypes.c_int(), ctypes.c_int()
        _check(
            library.LGBM_BoosterLoadModelFromString(
                text.encode(), ctypes.byref(trees), ctypes.byref(handle)
            )
        )
        weakref.finalize(self, library.LGBM_BoosterFree, handle)
        _check(library.LGBM_BoosterGetNumFeature(handle, ctypes.byref(features)))
        if features.value != len(self.features):
            raise ModelError(f"{features.value} features, of which {len(self.features)} have names")
        self._handle, self._text = handle, None

    def predict(self, matrix: NDArray[np.float32], trees: int = _ALL) -> NDArray[np.float64]:
        """The value of each row of `matrix`, by the first `trees` trees (by default, all).

        Args:
            matrix: float32, ``(rows, len(features))``, C order.

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
        with self._lock:
            if self._text is not None:
                self._parse(self._text)
            _check(
                _library().LGBM_BoosterPredictForMat(
                    self._handle,
                    ctypes.c_void_p(matrix.ctypes.data),
                    _DTYPE_FLOAT32,
                    ctypes.c_int32(len(matrix)),
                    ctypes.c_int32(len(self.features)),
                    1,  # row-major
                    _PREDICT_RAW_SCORE,
                    0,  # from the first tree
                    trees,
                    _PARAMETERS,
                    ctypes.byref(ctypes.c_int64()),
                    ctypes.c_void_p(values.ctypes.data),
                )
            )
        return values


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
