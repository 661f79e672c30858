"""Records of calls: made from the key's names, checked, read, and sent to other processes."""

from __future__ import annotations

import pickle

import pytest

from confpred.data.measurements import problem_of_row
from confpred.errors import InvalidInput, InvalidProblem
from confpred.problem.device import get_device
from confpred.triton.problem import call_record, leading, word_of

CALL = call_record("product", ("M", "N", "K"))


def test_one_kernel_and_key_have_one_record() -> None:
    assert call_record("product", ["M", "N", "K"]) is CALL
    assert call_record("other", ("M", "N", "K")) is not CALL
    assert call_record("product", ("M", "K", "N")) is not CALL


def test_a_call_is_read_as_any_problem_is() -> None:
    call = CALL(M=1, N=2**31 - 1, K=0)
    assert call == CALL.parse(str(call)) == CALL.from_json(call.to_json())
    assert str(CALL.parse("M=1 N=2 K=3 dtype=bf16")) == "M=1 N=2 K=3 dtype=bfloat16"
    assert problem_of_row(call.to_json(), CALL) == call
    assert pickle.loads(pickle.dumps(call)) == call  # noqa: S301 -- of this test
    assert type(pickle.loads(pickle.dumps(call))) is CALL  # noqa: S301


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("M=1 N=2", "K is missing"),
        ("M=-1 N=2 K=3", "M=-1 is not allowed"),
        ("M=1 N=2 K=3 dtype=float17", "dtype='float17' is not allowed"),
        ("M=1 N=2 K=3 L=4", "a field"),
    ],
)
def test_what_is_no_call_is_refused(words: str, said: str) -> None:
    with pytest.raises(InvalidProblem, match=said):
        CALL.from_json({**CALL.parse(words).to_json()})


@pytest.mark.parametrize("name", ["dtype", "flops", "layer"])
def test_a_key_may_not_hide_a_member(name: str) -> None:
    with pytest.raises(InvalidInput, match="rename the argument"):
        call_record("product", (name,))


def test_the_first_tensor_of_floating_point_leads() -> None:
    assert leading(["int32", "float8_e5m2", "float32"]) == "float8_e5m2"
    assert leading(["int8", "uint8"]) == "int8"
    call = CALL(M=8, N=8, K=8, dtype="float32")
    assert (call.itemsize, call.layer()) == (4, CALL(M=8, N=8, K=8))


def test_names_of_a_key_may_have_words_or_be_strides() -> None:
    key, choices = ("M", "stride_m", "ACT", "out"), {"ACT": ["relu", None], "out": ["fp16", "int8"]}
    record = call_record("gated", key, choices)
    call = record(M=8, stride_m=512, ACT="none", out="int8", dtype="float32")
    assert call == record.parse(str(call)) == record.from_json(call.to_json())
    assert pickle.loads(pickle.dumps(call)) == call  # noqa: S301 -- of this test
    assert problem_of_row(call.to_json(), record) == call
    assert call.sizes == (8,)
    with pytest.raises(InvalidProblem, match="ACT='tanh' is not allowed; allowed: relu or none"):
        record(M=8, stride_m=512, ACT="tanh")
    for wrong in ({"ACT": ["a b"]}, {"ACT": []}, {"ACTIVATION": ["relu"]}):
        with pytest.raises(InvalidInput, match="choices="):
            call_record("gated", key, wrong)


def test_dtypes_are_words_by_the_names_of_pytorch() -> None:
    import torch
    import triton.language as tl

    words = [word_of(value) for value in (torch.bfloat16, tl.bfloat16, "half", tl.int8, "GELU")]
    assert words == ["bfloat16", "bfloat16", "float16", "int8", "gelu"]


def test_the_scale_is_that_of_a_product_or_of_a_matrix() -> None:
    call = CALL(M=2, N=3, K=5)
    assert (call.flops, call.minimum_bytes) == (2 * 30, 2 * (6 + 10 + 15))
    norm = call_record("norm", ("rows", "columns"))(rows=4, columns=8, dtype="float32")
    assert norm.minimum_bytes == 4 * 32
    assert call_record("fill", ("size",))(size=16).minimum_bytes == 2 * 16
    assert get_device("h100").roofline_s(CALL(M=0, N=0, K=0)) > 0
