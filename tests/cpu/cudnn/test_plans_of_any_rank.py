"""cuDNN's plans for layers of any rank, without cuDNN: tensors, kinds and legality."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confpred.cudnn import family, plans
from confpred.cudnn.family import FAMILY, FAMILY_ND, largest_error
from confpred.cudnn.plans import Graph, tensor_layout
from confpred.cudnn.table import kind_of, table, table_nd
from confpred.families.protocol import Family, LibraryFamily, config_dict
from confpred.families.registry import families_of, family_named, kernels_of
from confpred.problem.conv import CONV, LAYOUTS, ConvNd
from confpred.problem.conv2d import CONVOLUTION, Problem, product
from confpred.problem.device import get_device

H100 = get_device("h100")
LAST, FIRST = LAYOUTS
LINE = ConvNd(2, 6, 9, 4, 3, rank=1, stride=2, padding=1, bias=True)
IMAGE = ConvNd(2, 6, 9, 4, 3, h=8, r=2, rank=2, stride=(1, 2), padding=(0, 1))
VOLUME = ConvNd(2, 6, 9, 4, 3, d=7, h=8, t=1, r=2, stride=(1, 1, 2), padding=(0, 0, 1))
DECODER = ConvNd(1, 96, 416, 96, 3, d=9, h=240, t=3, r=3, padding=1)


@pytest.mark.parametrize(
    ("problem", "sizes", "strides"),
    [
        (LINE, [2, 6, 1, 9], [54, 1, 54, 6]),
        (replace(LINE, layout=FIRST), [2, 6, 1, 9], [54, 9, 9, 1]),
        (IMAGE, [2, 6, 8, 9], [432, 1, 54, 6]),
        (replace(IMAGE, layout=FIRST), [2, 6, 8, 9], [432, 72, 9, 1]),
        (VOLUME, [2, 6, 7, 8, 9], [3024, 1, 432, 54, 6]),
        (replace(VOLUME, layout=FIRST), [2, 6, 7, 8, 9], [3024, 504, 72, 9, 1]),
        (Problem(2, 6, 8, 9, 4, 2, 3), [2, 6, 8, 9], [432, 1, 54, 6]),
    ],
)
def test_tensors_are_described_channels_second(
    problem: Problem | ConvNd, sizes: list[int], strides: list[int]
) -> None:
    operation: Any = CONV if isinstance(problem, ConvNd) else CONVOLUTION
    operands = {operand.name: operand for operand in operation.operands(problem)}
    assert tensor_layout(problem, operands["in"]) == (sizes, strides)
    for operand in operands.values():
        dims, steps = tensor_layout(problem, operand)
        assert sum((d - 1) * s for d, s in zip(dims, steps, strict=True)) == operand.elements - 1
    bias = replace(operands["filter"], name="bias", shape=(4,))
    assert tensor_layout(problem, bias)[0] == [1, 4, *[1] * (len(sizes) - 2)]


class Noting:
    """cuDNN's front end and an operation graph of its, which note what is asked for."""

    cudnnGraphNotSupportedError = NotImplementedError  # noqa: N815

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def pygraph(self, **_: Any) -> Noting:
        return self

    def get_execution_plan_count(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        if name in ("data_type", "heur_mode", "HALF", "FLOAT", "A", "B", "FALLBACK"):
            return self

        def note(*values: Any, **named: Any) -> Noting:
            self.asked.append((name, {**named, "values": values}))
            return self

        return note


@pytest.mark.parametrize(
    ("problem", "stride", "padding"),
    [(LINE, [1, 2], [0, 1]), (IMAGE, [1, 2], [0, 1]), (VOLUME, [1, 1, 2], [0, 0, 1])],
)
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_a_graph_has_the_axes_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
    problem: ConvNd,
    stride: list[int],
    padding: list[int],
    direction: str,
) -> None:
    noting = Noting()
    monkeypatch.setattr(plans, "front_end", lambda: noting)
    Graph(replace(problem, direction=direction, bias=False))
    asked = dict(noting.asked)
    layer = asked[f"conv_{direction}"]
    assert (layer["stride"], layer["padding"], layer["dilation"]) == (
        stride, padding, [1] * len(stride),
    )  # fmt: skip
    (made,) = asked["set_dim"]["values"]
    assert len(made) == len(stride) + 2


def test_a_transposed_layer_is_an_input_gradient_with_an_epilogue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient's sizes do not follow from its operands, so they are told before it is read."""
    noting = Noting()
    monkeypatch.setattr(plans, "front_end", lambda: noting)
    Graph(ConvNd(1, 8, 16, 8, 4, rank=1, stride=2, padding=1, direction="dgrad", bias=True,
                 activation="relu"))  # fmt: skip
    calls = [name for name, _ in noting.asked if name.startswith(("conv", "set_dim", "add", "rel"))]
    assert calls == ["conv_dgrad", "set_dim", "add", "relu", "set_dim"]


def test_kinds_of_layers_of_any_rank_are_their_own() -> None:
    fused = replace(VOLUME, bias=True, activation="relu", residual=True)
    expected = "fprop float16 dense 3d window channels_last stride bias residual relu"
    assert kind_of(fused) == expected
    assert kind_of(replace(LINE, s=1, layout=FIRST)) == (
        "fprop float16 dense 1d 1x1 channels_first stride bias"
    )
    assert not table().kinds.keys() & table_nd().kinds.keys()
    assert all(kind.split()[3] in ("1d", "3d") for kind in table_nd().kinds)
    in_two = Problem(8, 64, 56, 56, 64, 3, 3, padding=1)
    same = ConvNd(8, 64, 56, 64, 3, h=56, r=3, padding=1, rank=2)
    assert kind_of(in_two) != kind_of(same)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_plans_of_a_kind_are_described_and_launched(
    direction: str, dtype: str, layout: str
) -> None:
    changes = {"direction": direction, "dtype": dtype, "layout": layout}
    line = ConvNd(16, 256, 4096, 256, 7, rank=1, padding=9, dilation=3)
    for problem in (replace(DECODER, **changes), replace(line, **changes)):
        rows = np.flatnonzero(FAMILY_ND.legal(problem, H100))
        assert len(rows) > 9
        features = FAMILY_ND.features(problem, H100, rows)
        assert features.shape == (len(rows), len(FAMILY_ND.feature_names))
        assert np.isfinite(features).all()
        assert (FAMILY_ND.estimate_s(problem, H100, rows) > 0).all()
        for row in rows[:10].tolist():
            plan = FAMILY_ND.launch(problem, row).plan
            assert plan is not None
            assert plan.source == "cudnn 9.19"
            assert {"release": 919, **plan.config} == config_dict(FAMILY_ND, row)
            assert plan.error == largest_error(problem, tf32=plan.tf32)


@pytest.mark.parametrize(
    "changes", [{"dtype": "float32"}, {"groups": 4}, {"c": 92}, {"k": 3}, {"c": 96}]
)
def test_plans_that_mislead_are_not_offered(changes: dict[str, Any]) -> None:
    assert FAMILY_ND.legal(replace(DECODER, **changes), H100).any() == (changes == {"c": 96})


def test_epilogues_have_plans_and_what_cudnn_cannot_do_has_none() -> None:
    def count(problem: ConvNd) -> int:
        return int(FAMILY_ND.legal(problem, H100).sum())

    fused = replace(DECODER, bias=True, activation="relu")
    assert count(fused) > 20
    assert count(replace(fused, residual=True)) > 20
    assert count(replace(DECODER, direction="wgrad", bias=True)) == 0
    causal = ConvNd(4, 64, 400, 64, 3, rank=1, padding=2)
    assert count(causal) > 20
    assert count(replace(causal, cut=2)) == 0
    loose = replace(DECODER, direction="wgrad")
    strict = replace(loose, deterministic=True)
    assert 0 < count(strict) <= count(loose)
    assert table_nd().notes["repeatable"][FAMILY_ND.legal(strict, H100)].all()


def test_they_are_measured_where_they_are_asked_for_by_name() -> None:
    assert isinstance(FAMILY_ND, Family)
    assert isinstance(FAMILY_ND, LibraryFamily)
    assert family_named("cudnn_nd") is FAMILY_ND
    assert FAMILY_ND.name in families_of(DECODER)
    assert FAMILY_ND.name not in kernels_of(DECODER)
    assert list(families_of(Problem(1, 8, 8, 8, 8, 3, 3))).count("cudnn_nd") == 0


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_a_tile_means_the_same_in_any_rank(direction: str) -> None:
    layer = ConvNd(4, 48, 40, 96, 3, h=30, r=3, padding=1, rank=2, direction=direction)
    same = layer.as_conv2d()
    assert same is not None
    assert product(layer) == product(same)
    known = {name: np.array([64]) for name in family.TILE_FIELDS}
    rows = np.array([0])
    described = [family.describe_tiles(p, H100, known, rows) for p in (layer, same)]
    assert (described[0] == described[1]).all()


def test_tiles_are_those_of_the_same_engine_and_knobs() -> None:
    tiles, tiles_nd = family.tiles(), family.tiles_nd()
    seen = np.flatnonzero(tiles_nd["block_rows"])
    assert len(seen) > 300
    numbers = {config: row for row, config in enumerate(FAMILY.configs.tolist())}
    for row in seen[:50].tolist():
        alike = numbers[FAMILY_ND.configs[row].item()]
        assert all(tiles_nd[name][row] == tiles[name][alike] for name in tiles)


def test_a_layer_is_asked_for_in_all_its_kinds(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repository / "datasets"))
    import cudnn_plans

    found = list(cudnn_plans.variants(replace(DECODER, deterministic=False)))
    assert len({kind_of(problem) for problem in found}) == len(found) == 42
    assert {kind_of(problem) for problem in found} <= table_nd().kinds.keys()
