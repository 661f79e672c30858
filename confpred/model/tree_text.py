"""LightGBM's text form of an ensemble: parts of it, and a check of what LightGBM trusts.

LightGBM follows what a text says wherever it leads: a feature that a row does not have is read from
behind the row, and a child that is its own ancestor is an endless loop. A text is a head, the trees
with a line for each of their fields, and the line ``end of trees``; of trees, this package's texts
have the fields that predictions need (`confpred.training.fit.boost`), and LightGBM's own have more.

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

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from confpred.errors import ModelError

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


def part(text: bytes, first: int, end: int | None) -> bytes:
    """The text of the trees from `first` to before `end` of the ensemble in `text`.

    The lengths of all trees, which LightGBM writes for parsing in parallel, are left out.

    Raises:
        ModelError: the text does not end as such a text does.
    """
    done = text.find(_END)
    if done < 0:
        raise ModelError("the text has no end of trees")

    def place(tree: int) -> int:
        found = text.find(b"\nTree=%d\n" % tree)
        return done if found < 0 else found

    lines = text[: place(0)].split(b"\n")
    head = b"\n".join(line for line in lines if not line.startswith(b"tree_sizes="))
    return head + text[place(first) : done if end is None else place(end)] + text[done:]


def check(text: bytes, features: int) -> None:
    """Check that LightGBM can evaluate the trees of a `part` for a row of so many features.

    Raises:
        ModelError: it would read what is not there, or never end; the text says which tree and
            field.
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
        found = [line for line in lines if line.startswith(name + b"=")]
        if found != [name + b"=" + value]:
            said = b" and ".join(found).decode(errors="replace") or f"no {name.decode()}"
            raise ModelError(f"the head has {said} where it needs {name.decode()}={value.decode()}")


def _fields(lines: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    """The value of each field of each tree; the trees have the same fields in the same order."""
    names = [line.partition(b"=")[0] for line in lines]
    stride = names.index(b"Tree", 1) if b"Tree" in names[1:] else len(names)
    fields: dict[bytes, list[bytes]] = {}
    for place, name in enumerate(names[:stride]):
        if name:
            if name in fields:
                raise ModelError(f"the trees have {name.decode(errors='replace')} twice")
            fields[name] = [line[len(name) + 1 :] for line in lines[place::stride]]
        if any(found != name for found in names[place::stride]):
            raise ModelError(f"not all trees have {name.decode(errors='replace')} in one place")
    for name in sorted(_NEEDED - fields.keys()):
        raise ModelError(f"the trees have no {name.decode()}")
    return fields


def _check_splits(
    fields: dict[bytes, list[bytes]], leaves: NDArray[np.int64], features: int
) -> None:
    """Check where the splits of all trees lead: to a later split of the tree, so that every way
    ends, or to a leaf that it has."""
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
    """The integers of a field of all trees, which are to be so many."""
    text = b" ".join(filter(None, fields[name]))
    signs = (b" " + text).count(b" -")  # each begins a number
    found = np.zeros(0, np.int64)
    if text and not text.strip(b"-0123456789 ") and text.count(b"-") == signs:
        found = np.fromstring(text.decode(), np.int64, sep=" ")
    if len(found) != count:
        raise ModelError(f"{name.decode()} of the trees has not {count} integers")
    return found


def _refuse_any(
    name: bytes, wrong: NDArray[np.bool_], allowed: str, tree: NDArray[np.int64] | None = None
) -> None:
    """Raise the first wrong entry of a field, with its tree."""
    if wrong.any():
        at = int(np.argmax(wrong))
        number = at if tree is None else int(tree[at])
        raise ModelError(f"tree {number} has a {name.decode()} that is not {allowed}")
