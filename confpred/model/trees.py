"""Gradient-boosted trees, evaluated by LightGBM's own library through its C API.

``import lightgbm`` costs 0.2 to 1 s; its shared library loads in a few milliseconds, and gives the
same answers to the bit.

LightGBM trusts the text: a damaged one can make it read out of bounds or loop for ever. So a text
is checked before it is parsed. It is a head, the trees with a line for each of their fields, and
the line ``end of trees``. A model's texts have the fields that predictions need
(`confpred.training.fit.text_of`); LightGBM's own have more.

    Tree=0
    num_leaves=4
    num_cat=0                 splits by categories; none here
    split_feature=31 2 7      of each split
    threshold=12.9 2 5.5
    decision_type=2 2 8       which way a missing number goes; odd for a category
    left_child=1 -1 -3        a later split, or -1 - leaf
    right_child=2 -2 -4
    leaf_value=0.1 0 0.2 -0.3
    is_linear=0               leaves that are linear models; none here
    shrinkage=0.08
"""

from __future__ import annotations

import ctypes
import re
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.concurrency import uninterrupted
from confpred.errors import ModelError

# Constants of LightGBM's c_api.h.
_DTYPE_FLOAT32 = 0
_RAW_OF_ALL = (1, 0, -1)  # C_API_PREDICT_RAW_SCORE, from the first tree to the last
_ROW_MAJOR = 1
_HEADER = re.compile(rb"tree\n(?:\w+(?:=.*)?\n)*?feature_names=(.+)\n")
# One thread: the few hundred rows of a call take less time than waking a second one.
_PARAMETERS = b"num_threads=1 verbosity=-1"
#: One ensemble at a time, as LightGBM's number of threads is set for it and set back.
_parsing = threading.Lock()
#: Where LightGBM writes the number of values, which nobody reads: one buffer for all calls.
_count = ctypes.byref(ctypes.c_int64())


class Trees:
    """A boosted ensemble of regression trees. Immutable; safe to share between threads, whose
    predictions run side by side, and to fork.

    The first prediction checks and parses the trees that it needs; to check all trees of a model
    takes 0.1 s.

    Attributes:
        features: names of the columns of the matrix that `predict` takes.
    """

    def __init__(self, text: str | bytes, origin: str = "the text of an ensemble") -> None:
        """Take an ensemble in LightGBM's text form, which is from `origin`.

        Raises:
            ModelError: the text does not begin as that form does.
        """
        text = text.encode() if isinstance(text, str) else text
        header = _HEADER.match(text)
        if header is None:
            raise ModelError(f"{origin} is damaged: not LightGBM's text form of an ensemble")
        self.features = tuple(header[1].decode().split())
        self._text, self._origin = text, origin
        self._boosters: dict[tuple[int, int | None], ctypes.c_void_p] = {}

    def _booster(self, first: int, end: int | None) -> ctypes.c_void_p:
        # Each part has its own: LightGBM stores in the booster how many trees to use and reads that
        # back without a lock, so that simultaneous calls would use each other's number.
        if (first, end) not in self._boosters:
            with _parsing:
                if (first, end) not in self._boosters:
                    self._boosters[first, end] = self._parse(first, end)
        return self._boosters[first, end]

    def check(self, first: int = 0, end: int | None = None) -> bytes:
        """Check the text, or the part that a prediction needs, and return it.

        Raises:
            ModelError: the text would make LightGBM read out of bounds or loop for ever.
        """
        try:
            text = part_of_text(self._text, first, end)
            check_text(text, len(self.features))
        except ModelError as error:
            raise ModelError(f"{self._origin} is damaged: {error}") from None
        return text

    def _parse(self, first: int, end: int | None) -> ctypes.c_void_p:
        text = self.check(first, end)
        library, handle = _library(), ctypes.c_void_p()
        count, most = ctypes.c_int(), ctypes.c_int()
        # One thread here too: those that OpenMP keeps are not there in a forked child, whose next
        # parallel region would wait for them for good.
        _check(library.LGBM_GetMaxThreads(ctypes.byref(most)))
        _check(library.LGBM_SetMaxThreads(1))
        try:
            load = library.LGBM_BoosterLoadModelFromString
            _check(load(text, ctypes.byref(count), ctypes.byref(handle)))
        finally:
            _check(library.LGBM_SetMaxThreads(most))
        # Not at the end of the process, when other threads may be predicting still.
        weakref.finalize(self, library.LGBM_BoosterFree, handle).atexit = False
        return handle

    def predict(
        self, matrix: NDArray[np.float32], first: int = 0, end: int | None = None
    ) -> NDArray[np.float64]:
        """Return the value of each row of `matrix`: the sum of the outputs of some trees (default:
        all).

        Args:
            matrix: float32, ``(rows, len(features))``.
            first: the first of these trees.
            end: the tree after the last one; None for all from `first` on.

        Raises:
            ModelError: the matrix does not have these columns; the text is damaged; LightGBM is not
                installed, or refuses the text.
        """
        matrix = np.ascontiguousarray(matrix, np.float32)
        if matrix.ndim != 2 or matrix.shape[1] != len(self.features):
            takes = f"the model takes {len(self.features)} features a row"
            raise ModelError(f"{takes}; got an array of {matrix.shape}")
        values = np.empty(len(matrix), np.float64)
        shape = (_DTYPE_FLOAT32, *matrix.shape, _ROW_MAJOR)
        with uninterrupted:
            booster, predict = self._booster(first, end), _library().LGBM_BoosterPredictForMat
            outputs = (_count, _address(values))
            _check(predict(booster, _address(matrix), *shape, *_RAW_OF_ALL, _PARAMETERS, *outputs))
        return values


def _address(array: NDArray[Any]) -> int:
    """Return the address of an array's first element; its attribute ``ctypes`` takes three times as
    long."""
    address: int = array.__array_interface__["data"][0]
    return address


@cache
def _library() -> ctypes.CDLL:
    spec = find_spec("lightgbm")  # finds the package without running it
    for root in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(root).glob("*/lib_lightgbm.*")):
            library = ctypes.CDLL(str(path))
            library.LGBM_GetLastError.restype = ctypes.c_char_p
            pointer, number = ctypes.c_void_p, ctypes.c_int
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


_END = b"\nend of trees\n"
#: Lines of a head that say how large LightGBM's arrays and answers are.
_ONE = (b"num_class", b"num_tree_per_iteration")
_NUMBERS = (b"Tree", b"num_leaves", b"num_cat", b"is_linear", b"shrinkage")
_NEEDED = {
    *_NUMBERS,
    *(b"split_feature", b"threshold", b"decision_type", b"left_child", b"right_child"),
    b"leaf_value",
}
_CATEGORY = 1  # a bit of a decision type
_KINDS = frozenset(b"%d" % kind for kind in range(0, 16, 2))  # without it


def part_of_text(text: bytes, first: int, end: int | None) -> bytes:
    """Return the text of the trees from `first` to before `end` of the ensemble in `text`, without
    the lengths of all trees, which LightGBM writes for parsing in parallel.

    Raises:
        ModelError: the text does not end as such a text does.
    """
    done = text.find(_END)
    if done < 0:
        raise ModelError("the text has no end of trees")

    def place(tree: int) -> int:
        start = text.find(b"\nTree=%d\n" % tree)
        return done if start < 0 else start

    lines = text[: place(0)].split(b"\n")
    head = b"\n".join(line for line in lines if not line.startswith(b"tree_sizes="))
    return head + text[place(first) : done if end is None else place(end)] + text[done:]


def check_text(text: bytes, features: int) -> None:
    """Check that LightGBM can evaluate the trees of a `part` for a row of so many features.

    Raises:
        ModelError: it would read out of bounds or loop for ever; the message names the tree and
            the field.
    """
    start, done = text.find(b"\nTree="), text.find(_END)
    _check_head(text[: done if start < 0 else start].split(b"\n"), features)
    if start < 0:
        return
    fields = _fields(text[start + 1 : done].rstrip(b"\n").split(b"\n"))
    trees = len(fields[b"Tree"])
    leaves = _integers(b"num_leaves", fields, trees)
    for name in (b"num_cat", b"is_linear"):
        _refuse_any(name, _integers(name, fields, trees) != 0, "0")
    _refuse_any(b"num_leaves", leaves < 1, "1 or more")
    for name, lines in fields.items():
        if name not in _NUMBERS:
            counts = np.array([len(line) and 1 + line.count(b" ") for line in lines])
            expected = leaves if name.startswith(b"leaf_") else leaves - 1
            # LightGBM reads nothing of a tree without splits but its leaf.
            wrong = (counts != expected) & ((leaves > 1) | (name == b"leaf_value"))
            _refuse_any(name, wrong, "a number for each of the tree's splits or leaves")
    _check_splits(fields, leaves, features)


def _check_head(lines: Sequence[bytes], features: int) -> None:
    wanted = {**dict.fromkeys(_ONE, b"1"), b"max_feature_idx": b"%d" % (features - 1)}
    for name, value in wanted.items():
        entries = [line for line in lines if line.startswith(name + b"=")]
        if entries != [name + b"=" + value]:
            said = b" and ".join(entries).decode(errors="replace") or f"no {name.decode()}"
            raise ModelError(f"the head has {said} where it needs {name.decode()}={value.decode()}")


def _fields(lines: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    """Return the value of each field of each tree; all have the same fields in one order."""
    names = [line.partition(b"=")[0] for line in lines]
    stride = names.index(b"Tree", 1) if b"Tree" in names[1:] else len(names)
    fields: dict[bytes, list[bytes]] = {}
    for place, name in enumerate(names[:stride]):
        if name:
            if name in fields:
                raise ModelError(f"the trees have {name.decode(errors='replace')} twice")
            fields[name] = [line[len(name) + 1 :] for line in lines[place::stride]]
        if any(other != name for other in names[place::stride]):
            raise ModelError(f"not all trees have {name.decode(errors='replace')} at one position")
    for name in sorted(_NEEDED - fields.keys()):
        raise ModelError(f"the trees have no {name.decode()}")
    return fields


def _check_splits(
    fields: dict[bytes, list[bytes]], leaves: NDArray[np.int64], features: int
) -> None:
    """Check that every split leads to a later split or a leaf of its tree."""
    splits = leaves - 1
    tree = np.repeat(np.arange(len(leaves)), splits)
    first = np.repeat(np.cumsum(splits) - splits, splits)
    own, last, leaf = np.arange(len(tree)) - first, splits[tree], -leaves[tree]
    feature = _integers(b"split_feature", fields, len(tree))
    outside = (feature < 0) | (feature >= features)
    _refuse_any(b"split_feature", outside, f"0 to {features - 1}", tree)
    for name in (b"left_child", b"right_child"):
        child = _integers(name, fields, len(tree))
        inside = (child >= leaf) & (child < last) & ((child < 0) | (child > own))
        _refuse_any(name, ~inside, "a later split or a leaf of the tree", tree)
    kinds = set(b" ".join(fields[b"decision_type"]).split(b" "))
    if not kinds <= _KINDS:
        decision = _integers(b"decision_type", fields, len(tree))
        _refuse_any(b"decision_type", decision & _CATEGORY != 0, "an even number", tree)


def _integers(name: bytes, fields: dict[bytes, list[bytes]], count: int) -> NDArray[np.int64]:
    """Return the `count` integers of a field of all trees."""
    text = b" ".join(filter(None, fields[name]))
    signs = (b" " + text).count(b" -")  # each begins a number
    integers: NDArray[np.int64] = np.zeros(0, np.int64)
    if text and not text.strip(b"-0123456789 ") and text.count(b"-") == signs:
        integers = np.fromstring(text.decode(), np.int64, sep=" ")
    if len(integers) != count:
        raise ModelError(f"{name.decode()} of the trees has not {count} integers")
    return integers


def _refuse_any(
    name: bytes, wrong: NDArray[np.bool_], allowed: str, tree: NDArray[np.int64] | None = None
) -> None:
    """Raise the first wrong entry of a field, with its tree."""
    if wrong.any():
        at = int(np.argmax(wrong))
        number = at if tree is None else int(tree[at])
        raise ModelError(f"tree {number} has a {name.decode()} that is not {allowed}")
