"""Calls of a kernel from ranges of its sizes."""

from __future__ import annotations

import made_up_kernel
import numpy as np
import pytest

from confpred.errors import InvalidInput
from confpred.triton.problem import call_record
from confpred.triton.ranges import calls_in

CALL = made_up_kernel.FAMILY.operation.problem


def test_sizes_are_spread_by_their_logarithms() -> None:
    calls = calls_in("M=16:16384,N=1:16:1,K=4096,dtype=fp16/bfloat16", CALL, 40, 0)
    assert calls == calls_in("M=16:16384,N=1:16:1,K=4096,dtype=fp16/bfloat16", CALL, 40, 0)
    assert calls != calls_in("M=16:16384,N=1:16:1,K=4096,dtype=fp16/bfloat16", CALL, 40, 1)
    sizes = np.array([call.sizes for call in calls])
    # A quarter of the calls is in each quarter of the range's logarithm, but for rounding.
    counts = np.histogram(np.log2(sizes[:, 0]), [0, 6.5, 9, 11.5, 15])[0]
    assert (np.abs(counts - len(calls) / 4) <= 2).all()
    assert (sizes[:, 0] % 16 == 0).all()
    assert set(sizes[:, 1]) > {1, 3, 16}
    assert set(sizes[:, 2]) == {4096}
    assert {call.dtype for call in calls} == {"float16", "bfloat16"}


@pytest.mark.parametrize(
    ("ranges", "sizes"),
    [("100:100", {100}), ("3:7", {3, 4, 5, 6, 7}), ("30:34", {32}), ("64:200:64", {64, 128, 192})],
)
def test_multiples_lie_in_the_range(ranges: str, sizes: set[int]) -> None:
    assert {call.M for call in calls_in(f"M={ranges},N=8,K=8", CALL, 200, 0)} == sizes


def test_words_are_chosen_from() -> None:
    record = call_record("gated", ("M", "ACT"), {"ACT": ["relu", "gelu"]})
    assert {call.ACT for call in calls_in("M=8,ACT=relu/gelu", record, 20, 0)} == {"relu", "gelu"}


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ("M=16:8,N=8,K=8", "FROM:TO or"),
        ("M=0:8,N=8,K=8", "FROM:TO or"),
        ("M=16:32:0,N=8,K=8", "FROM:TO or"),
        ("M=a:b,N=8,K=8", "FROM:TO or"),
        ("M=8,M=16", "one range a name"),
        ("M", "one range a name"),
        ("M=8,N=8", "ranges: K is missing"),
        ("M=8,N=8,K=8,L=8", "ranges: L='?8'? is not allowed"),
    ],
)
def test_ranges_that_are_none_are_named(ranges: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        calls_in(ranges, CALL, 4, 0)
