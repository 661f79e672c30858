"""Convolution of any rank as a problem and an operation."""

from __future__ import annotations

import contextlib
import json
import random
import time
from itertools import product
from typing import Any

import convs
import numpy as np
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import reference, reference_nd
from torch.utils._python_dispatch import TorchDispatchMode

from confpred.errors import InvalidProblem
from confpred.families.registry import all_operations, operation_named, operation_of
from confpred.problem.conv import CONV, LAYOUTS, ConvNd, kind_of
from confpred.problem.conv2d import CONVOLUTION, DIRECTIONS, Problem, places_read
from confpred.problem.device import get_device
from confpred.problem.operation import Operation
from confpred.problem.record import texts_of

conv_problems = strategies.convs()
VOLUME = {"n": 2, "c": 8, "d": 9, "h": 20, "w": 22, "k": 8, "t": 3, "r": 3, "s": 3, "groups": 8}
LINE = {"n": 2, "c": 8, "w": 22, "k": 8, "s": 3, "groups": 8}


@given(conv_problems)
def test_texts_and_json_round_trip(problem: ConvNd) -> None:
    assert ConvNd.parse(str(problem)) == problem
    assert ConvNd.from_texts(problem.to_texts()) == problem
    again = ConvNd.from_json(json.loads(json.dumps(problem.to_json())))
    assert again == problem
    assert hash(again) == hash(problem)
    assert problem.layer() == problem.layer().layer()


NAMES = st.sampled_from([*ConvNd(**LINE).to_json(), "layot", "no_such_field"])


@given(st.dictionaries(NAMES, st.integers() | st.text(max_size=9), max_size=9))
def test_any_fields_make_a_layer_or_name_one(fields: dict[str, Any]) -> None:
    kind = kind_of(fields)
    assert (
        (kind is Problem)
        or fields.keys() & {"d", "t", "rank", "layout", "cut", "layot"}
        or (fields.keys() & {"w", "s"} and not fields.keys() & {"h", "r"})
    )
    with contextlib.suppress(InvalidProblem):
        assert isinstance(kind.from_json(fields), kind)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("n=1 c=8 h=8 w=8 k=8 r=3 s=3", Problem),
        ("n=1 c=8 h=8 w=8 k=8 s=3", Problem),  # r is missing
        ("n=1 c=8 w=8 k=8 s=3", ConvNd),
        ("w=8", ConvNd),
        ("n=1 c=8", Problem),
        ("", Problem),
        ("n=1 c=8 h=8 w=8 k=8 r=3 s=3 rank=2", ConvNd),
        ("n=1 c=8 d=4 h=8 w=8 k=8 r=3 s=3", ConvNd),
        ("n=1 c=8 h=8 w=8 k=8 r=3 s=3 layouts=channels_first", ConvNd),  # which names the field
        ("n=1 c=8 h=8 w=8 k=8 r=3 s=3 depth=4", Problem),
    ],
)
def test_the_names_of_the_fields_say_which_record_it_is(words: str, kind: type) -> None:
    assert kind_of(texts_of(words)) is kind


@pytest.mark.parametrize("fields", [None, 7, [], ["d"], "d"])
def test_what_is_no_mapping_is_an_image_that_is_refused(fields: object) -> None:
    assert kind_of(fields) is Problem


def test_words_say_what_a_layer_has() -> None:
    causal = ConvNd(**LINE, rank=1, padding=2, cut=2, layout="channels_first")
    words = "n=2 c=8 w=22 k=8 s=3 rank=1 padding=2 cut=2 groups=8 layout=channels_first"
    assert str(causal) == words
    volume = ConvNd.parse("n=1 c=4 d=8 h=9 w=10 k=4 t=3 r=3 s=3 stride=1x2x2 padding=1 groups=4")
    assert (volume.stride, volume.padding) == ((1, 2, 2), (1, 1, 1))
    sizes = "n=1 c=4 d=8 h=9 w=10 k=4 t=3 r=3 s=3"
    assert str(volume) == f"{sizes} rank=3 stride=1x2x2 padding=1 groups=4"


@pytest.mark.parametrize(
    ("fields", "rank"),
    [(LINE, 1), (LINE | {"h": 4}, 2), (LINE | {"r": 1}, 2), (LINE | {"t": 1}, 3), (VOLUME, 3),
     (LINE | {"h": 4, "rank": 3}, 3)],
)  # fmt: skip
def test_the_rank_follows_from_the_sizes(fields: dict[str, Any], rank: int) -> None:
    assert ConvNd.from_json(fields).rank == rank


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_one_integer_stands_for_the_axes_of_the_rank(rank: int) -> None:
    fields = {"rank": rank, "stride": 2, "padding": [1] * rank, "dilation": (1, 1, 1)}
    problem = ConvNd.from_json(LINE | fields)
    assert problem.stride == (1,) * (3 - rank) + (2,) * rank
    assert problem.padding == (0,) * (3 - rank) + (1,) * rank
    assert replaced(problem, stride=problem.stride) == problem


def replaced(problem: ConvNd, **fields: Any) -> ConvNd:
    return ConvNd.from_json(problem.to_json() | fields)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"rank": 4}, "rank", "an integer from 1 to 3"),
        ({"rank": True}, "rank", "an integer from 1 to 3"),
        ({"rank": 1, "h": 2}, "h", "1, as rank 1 has no such axis"),
        ({"rank": 2, "t": 3}, "t", "1, as rank 2 has no such axis"),
        ({"rank": 1, "stride": [1, 2]}, "stride", "an integer, as rank is 1"),
        ({"rank": 1, "stride": [2, 1, 1]}, "stride", "an integer, as rank is 1"),
        ({"rank": 2, "padding": [1, 0, 0]}, "padding", "an integer, or 2 of them, as rank is 2"),
        ({"rank": 3, "dilation": [1, 1]}, "dilation", "an integer, or 3 of them, as rank is 3"),
        ({"stride": 0}, "stride", "an integer from 1 to 4096"),
        ({"cut": -1}, "cut", "an integer from 0 to"),
        ({"cut": 20}, "w", "large enough for an output of at least 1 (these sizes give 0)"),
        ({"s": 23}, "w", "large enough for an output of at least 1 (these sizes give 0)"),
        ({"layout": "nchw"}, "layout", "channels_last or channels_first"),
        ({"layut": "channels_last"}, "layut", "a field such as layout"),
        ({"dept": 3}, "dept", "a field among"),
        ({"c": 9}, "c", "a multiple of groups=8"),
        ({"direction": "wgrad", "activation": "relu"}, "activation", "left out in direction wgrad"),
        ({"direction": "wgrad", "residual": True}, "residual", "left out in direction wgrad"),
        ({"deterministic": True}, "deterministic", "false in direction fprop"),
        ({"n": 65536, "w": 2**24, "h": 8}, "n", "a tensor of at most"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        ConvNd.from_json(LINE | changes)
    assert caught.value.field == field
    assert words in caught.value.allowed


@given(conv_problems)
def test_sizes_are_those_of_pytorch(problem: ConvNd) -> None:
    p, own = problem, slice(3 - problem.rank, None)
    x = torch.empty(p.n, p.c, *p.input_shape[own], device="meta")
    weight = torch.empty(p.k, p.group_width, *p.filter_shape[own], device="meta")
    steps = (axes[own] for axes in (p.stride, p.padding, p.dilation))
    y = convs.CONVOLVE[p.rank - 1](x, weight, None, *steps, p.groups)
    y = y[..., : y.shape[-1] - p.cut]
    assert y.shape == (p.n, p.k, *p.output_shape[own])
    assert (p.z, p.p, p.q) == p.output_shape
    counts = (p.input_elements, p.filter_elements, p.output_elements)
    assert counts == (x.numel(), weight.numel(), y.numel())
    assert p.flops == 2 * y.numel() * p.group_width * weight[0, 0].numel()


@given(conv_problems)
def test_bytes_are_of_what_is_read_and_written(problem: ConvNd) -> None:
    read = {o.name: o.bytes for o in CONV.operands(problem)}
    if problem.direction != "dgrad":
        ones = ConvNd.from_json(
            problem.to_json() | {"direction": "dgrad", "bias": False, "residual": False}
            | {"activation": "none", "dtype": "float32", "deterministic": False}
        )  # fmt: skip
        inputs = {name: torch.ones_like(x) for name, x in convs.inputs_of(ones).items()}
        reached = (reference_nd(ones, inputs)["in_grad"] > 0).sum().item()
        read["in"] = reached * problem.itemsize
    assert problem.minimum_bytes == sum(read.values())


AXIS = st.tuples(*(st.integers(1, most) for most in (40, 6, 9)), st.integers(0, 9))


@given(AXIS, st.integers(1, 9), st.integers(0, 60))
def test_places_are_counted_one_by_one(
    axis: tuple[int, int, int, int], dilation: int, more: int
) -> None:
    outputs, taps, stride, padding = axis
    places = {
        output * stride + tap * dilation - padding
        for output, tap in product(range(outputs), range(taps))
    }
    assert places_read(more, outputs, taps, stride, padding, dilation) == sum(
        0 <= place < more for place in places
    )


def test_the_largest_problem_is_counted_at_once() -> None:
    begun = time.process_time()
    layer = ConvNd(1, 1, 2**24, 1, 4096, rank=1, stride=3, padding=2**20, dilation=4095)
    assert layer.minimum_bytes > 0
    assert time.process_time() - begun < 2


@given(conv_problems)
def test_operands_are_the_tensors_of_the_direction(problem: ConvNd) -> None:
    operands = {o.name: o for o in CONV.operands(problem)}
    assert operands[next(iter(operands))].terms, "outputs first"
    result, channels = ("in_grad", problem.c) if problem.direction == "dgrad" else ("out", None)
    if problem.residual:
        assert operands["residual"].shape == operands[result].shape
    if "bias" in operands:
        assert operands["bias"].shape == (channels or problem.k,)
    assert ("bias_grad" in operands) == (problem.bias and problem.direction == "wgrad")
    (row,) = CONV.features(problem, get_device("h100"))
    assert row.dtype == np.float32
    assert np.isfinite(row).all()
    named = dict(zip(CONV.feature_names, row.tolist(), strict=True))
    assert named["channels_first"] == (problem.layout == "channels_first")
    assert (named["rank"], named["stride_w"]) == (problem.rank, problem.stride[2])


def test_it_is_an_operation_that_files_can_name() -> None:
    problem = ConvNd.from_json(LINE)
    assert isinstance(CONV, Operation)
    assert all_operations()["conv"] is operation_named("conv") is operation_of(problem) is CONV


@given(conv_problems)
def test_pytorchs_operators_compute_the_operation(problem: ConvNd) -> None:
    problem = replaced(problem, dtype="float32")
    inputs = convs.inputs_of(problem)
    found = CONV.pytorch(problem, inputs)
    found = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
    right = reference_nd(problem, inputs)
    outputs = [o for o in CONV.operands(problem) if o.terms]
    assert len(found) == len(outputs) == len(right)
    for output, value in zip(outputs, found, strict=True):
        value = convs.as_operand(problem, value)
        assert tuple(value.shape) == output.shape == tuple(right[output.name].shape)
        torch.testing.assert_close(value.double(), right[output.name], rtol=1e-4, atol=1e-4)


def test_layers_of_one_design_are_held_out_together() -> None:
    problem = ConvNd.from_json(VOLUME | {"n": 7, "dtype": "bfloat16", "bias": True, "padding": 1})
    assert problem.layer() == replaced(problem, direction="wgrad").layer()
    assert problem.layer() != replaced(problem, layout="channels_first").layer()
    assert (problem.grouping, problem.kind) == ("depthwise 3d", "fused depthwise 3d")


@given(conv_problems)
def test_an_image_that_is_the_same_computes_the_same(problem: ConvNd) -> None:
    image = problem.as_conv2d()
    if image is None:
        return
    inputs = convs.inputs_of(problem)
    right = reference_nd(problem, inputs)
    operands = {o.name: o for o in CONVOLUTION.operands(image)}
    assert list(operands) == [o.name for o in CONV.operands(problem)]
    assert image.flops == problem.flops
    assert image.minimum_bytes == problem.minimum_bytes
    found = reference(image, {n: x.reshape(operands[n].shape) for n, x in inputs.items()})
    for name, value in found.items():
        torch.testing.assert_close(value.reshape(right[name].shape), right[name])


@pytest.mark.parametrize(
    ("fields", "image"),
    [
        (LINE, "n=2 h=1 w=22 r=1 s=3"),
        (LINE | {"h": 5, "r": 2}, "n=2 h=5 w=22 r=2 s=3"),
        (VOLUME | {"t": 1}, "n=18 h=20 w=22 r=3 s=3"),
        (VOLUME | {"r": 1, "s": 1, "padding": [1, 0, 0]}, "n=2 h=9 w=440 r=3 s=1 padding=1x0"),
        (VOLUME | {"r": 1, "s": 1}, "n=2 h=9 w=440 r=3 s=1"),
        (VOLUME, None),
        (VOLUME | {"t": 1, "padding": [1, 0, 0]}, None),
        (VOLUME | {"t": 1, "stride": [2, 1, 1]}, None),
        (LINE | {"layout": "channels_first"}, None),
        (LINE | {"cut": 1}, None),
        (LINE | {"w": 70_000}, None),
        (LINE | {"direction": "dgrad", "bias": True}, None),
    ],
)
def test_which_layers_are_images(fields: dict[str, Any], image: str | None) -> None:
    found = ConvNd.from_json(fields).as_conv2d()
    words = None if image is None else f"{image} c=8 k=8 groups=8"
    assert found == (words and CONVOLUTION.problem.parse(words))


def test_random_layers_have_everything() -> None:
    rng = random.Random(0)
    problems = [convs.random_conv(rng) for _ in range(300)]
    assert {(p.rank, p.direction, p.layout) for p in problems} == set(
        product((1, 2, 3), DIRECTIONS, LAYOUTS)
    )
    assert sum(p.as_conv2d() is not None for p in problems) > 20
    assert sum(p.cut > 0 and p.direction == "dgrad" for p in problems) > 20


class Operands(TorchDispatchMode):
    """Keeps the tensors that PyTorch's gradients are given."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.convolution_backward.default:
            self.given = args[:3]
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
def test_pytorch_copies_no_operand_before_its_gradients(direction: str, layout: str) -> None:
    """It would copy one that lies in another way, even where it reads its sizes alone."""
    problem = ConvNd(
        2, 4, 6, 4, 3, d=5, h=5, t=3, r=3, groups=4, direction=direction, layout=layout,
        dtype="float32",
    )  # fmt: skip
    with Operands() as operands:
        CONV.pytorch(problem, convs.inputs_of(problem))
    last = torch.channels_last_3d if layout == "channels_last" else torch.contiguous_format
    assert all(x.is_contiguous(memory_format=last) for x in operands.given)
