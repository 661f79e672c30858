"""Problems: sizes as PyTorch counts them, texts that round-trip, bad input named."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems

from confpred.errors import InvalidProblem
from confpred.problem.conv2d import CHOICES, LIMITS, MAX_ELEMENTS, PAIRS, Problem

BASE = {"n": 32, "c": 64, "h": 56, "w": 56, "k": 64, "r": 3, "s": 3, "padding": 1, "groups": 8}
FIELDS = tuple(field.name for field in dataclasses.fields(Problem))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(problems())
def test_text_round_trips(problem: Problem) -> None:
    assert Problem.parse(str(problem)) == problem


@given(problems())
def test_json_round_trips(problem: Problem) -> None:
    assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


@given(problems())
def test_sizes_are_those_of_pytorch(problem: Problem) -> None:
    x = torch.empty(problem.n, problem.c, problem.h, problem.w, device="meta")
    weight = torch.empty(problem.k, problem.group_width, problem.r, problem.s, device="meta")
    y = torch.nn.functional.conv2d(
        x,
        weight,
        stride=problem.stride,
        padding=problem.padding,
        dilation=problem.dilation,
        groups=problem.groups,
    )
    assert y.shape == (problem.n, problem.k, problem.p, problem.q)
    assert x.numel() == problem.input_elements
    assert weight.numel() == problem.filter_elements
    assert y.numel() == problem.output_elements
    assert problem.itemsize == getattr(torch, problem.dtype).itemsize
    assert problem.flops == 2 * y.numel() * problem.group_width * problem.r * problem.s


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize(
    "sizes",
    [
        "h=9 w=14 r=3 s=3 padding=1",
        "h=9 w=14 r=1 s=1 stride=2",
        "h=9 w=14 r=3 s=3 stride=2",
        "h=12 w=7 r=2 s=3 stride=3x2 padding=1x0",
        "h=10 w=11 r=3 s=4 stride=3",
        "h=3 w=2 r=2 s=1 stride=2x1 padding=4x3",
        "h=17 w=16 r=3 s=2 stride=2x4 padding=2x5 dilation=2x3",
        "h=2 w=9 r=2 s=3 padding=5x0 dilation=1x4",
    ],
)
def test_pixels_that_no_window_reads_are_not_counted(sizes: str, direction: str) -> None:
    problem = Problem.parse(f"n=3 c=4 k=8 groups=2 {sizes} direction={direction}")
    x = torch.zeros(3, 4, problem.h, problem.w, requires_grad=True)
    weight = torch.ones(8, problem.group_width, problem.r, problem.s)
    y = torch.nn.functional.conv2d(
        x, weight, None, problem.stride, problem.padding, problem.dilation, problem.groups
    )
    y.sum().backward()
    assert x.grad is not None
    # The gradient of a pixel that is never read is zero, but it is written.
    image = x.numel() if direction == "dgrad" else int(x.grad.count_nonzero())
    assert problem.minimum_bytes == problem.itemsize * (image + weight.numel() + y.numel())


def test_a_problem_is_a_value() -> None:
    problem = Problem(**BASE)
    assert problem == Problem.parse("n=32 c=64 h=56 w=56 k=64 r=3 s=3 padding=1x1 groups=8")
    assert hash(problem) == hash(Problem(**BASE, stride=(1, 1)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.n = 1  # type: ignore[misc]


@given(problems())
def test_a_layer_is_what_its_network_fixes(problem: Problem) -> None:
    chosen = {
        "n": problem.n + 1,
        "dtype": "float32",
        "direction": "wgrad",
        "bias": not problem.bias,
        "activation": "none",
        "residual": False,
        "deterministic": True,
    }
    assert problem.layer() == dataclasses.replace(problem, **chosen).layer()
    assert problem.layer().layer() == problem.layer()
    assert problem.layer() != dataclasses.replace(problem, h=problem.h + 100).layer()


def test_numpy_integers_become_plain_ones() -> None:
    problem = Problem(**{name: np.int32(value) for name, value in BASE.items()})
    assert problem == Problem(**BASE)
    assert type(problem.n) is int
    assert type(problem.padding[0]) is int


@pytest.mark.parametrize("name", LIMITS)
def test_limits_hold_at_both_ends(name: str) -> None:
    low, high = LIMITS[name]
    wrong = [low - 1, high + 1, 10**6000, -1, 1.0, float("nan"), float("inf"), True, "3", None, {}]
    for value in wrong + [[value] * 2 for value in wrong] + [[], [1, 1, 1], [[1], 1]]:
        with pytest.raises(InvalidProblem) as caught:
            Problem(**(BASE | {name: value}))
        assert caught.value.field == name
        assert str(caught.value).startswith((f"{name}=", f"{name} is missing"))
        assert len(str(caught.value)) < 300
    if name in PAIRS:
        with pytest.raises(InvalidProblem, match=f"{name}=") as caught:
            Problem(**(BASE | {name: (low, high + 1)}))
        assert caught.value.value == high + 1


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_named(name: str) -> None:
    for value in ("float64", "", "RELU", None, 1, ["none"], {}):
        with pytest.raises(InvalidProblem) as caught:
            Problem(**(BASE | {name: value}))
        assert caught.value.field == name
        assert all(choice in str(caught.value) for choice in CHOICES[name])


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"c": 60}, "c", "multiple of groups=8"),
        ({"k": 60}, "k", "multiple of groups=8"),
        ({"h": 1, "padding": 0}, "h", "output of at least 1"),
        ({"w": 2, "padding": [1, 0]}, "w", "output of at least 1"),
        ({"n": 65536, "h": 65536, "w": 65536}, "n", str(MAX_ELEMENTS)),
        ({"n": 16384, "h": 1024, "w": 1024, "k": 128}, "k", str(MAX_ELEMENTS)),
        ({"bias": 1}, "bias", "true or false"),
        ({"bias": "yes"}, "bias", "true or false"),
        ({"residual": 0}, "residual", "true or false"),
        ({"deterministic": None}, "deterministic", "true or false"),
        ({"direction": "dgrad", "bias": True}, "bias", "false in direction dgrad"),
        ({"direction": "dgrad", "activation": "relu"}, "activation", "none in direction dgrad"),
        ({"direction": "wgrad", "activation": "gelu"}, "activation", "none in direction wgrad"),
        ({"direction": "dgrad", "residual": True}, "residual", "false in direction dgrad"),
        ({"direction": "wgrad", "residual": True}, "residual", "false in direction wgrad"),
        ({"deterministic": True}, "deterministic", "false in direction fprop"),
        ({"direction": "dgrad", "deterministic": True}, "deterministic", "direction dgrad"),
        ({"depth": 3}, "depth", "a field among n, c, h"),
    ],
)
def test_combinations_are_named(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        Problem.from_json(BASE | changes)
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["n", "c", "h", "w", "k", "r", "s"])
def test_missing_fields_are_named(name: str) -> None:
    with pytest.raises(InvalidProblem, match="required") as caught:
        Problem.from_json({k: v for k, v in BASE.items() if k != name})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("n=32 c=64 oops", "layer"),
        ("n=32 n=32", "n"),
        ("n=1e3 c=64 h=56 w=56 k=64 r=3 s=3", "n"),
        ("n=٣ c=64 h=56 w=56 k=64 r=3 s=3", "n"),
        ("n=" + "9" * 5000 + " c=64 h=56 w=56 k=64 r=3 s=3", "n"),
        ("n=32 c=64 h=56 w=56 k=64 r=3 s=3 padding=1x", "padding"),
        ("n=32 c=64 h=56 w=56 k=64 r=3 s=3 padding=1x2x3", "padding"),
        ("n=32 c=64 h=56 w=56 k=64 r=3x3 s=3", "r"),
        ("n=32 c=64 h=56 w=56 k=64 r=3 s=3 bias=maybe", "bias"),
        ("", "n"),
    ],
)
def test_bad_words_are_named(text: str, field: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        Problem.parse(text)
    assert caught.value.field == field


@given(st.sampled_from(FIELDS), json_values)
def test_any_value_makes_a_problem_or_names_a_field(name: str, value: Any) -> None:
    refusal = None
    try:
        problem = Problem.from_json(BASE | {name: value})
    except InvalidProblem as error:
        refusal = error
    if refusal is None:
        assert Problem.parse(str(problem)) == problem
    else:
        assert refusal.field in FIELDS
        assert re.match(rf"{refusal.field}(=| is missing)", str(refusal))


@given(json_values)
def test_any_json_makes_a_problem_or_names_a_field(value: Any) -> None:
    with pytest.raises(InvalidProblem):
        Problem.from_json(value)


@given(st.text() | st.lists(st.sampled_from([*FIELDS, "=", "x", "3", " ", "-", "+"])).map("".join))
def test_any_text_makes_a_problem_or_names_a_field(text: str) -> None:
    with pytest.raises(InvalidProblem):
        Problem.parse(text)
