"""A Triton kernel as a family: its config table, features from names, source, and the registry."""

from __future__ import annotations

from collections.abc import Sequence

import made_up_kernel
import numpy as np
import pytest
from made_up_kernel import CONFIGS, DEVICE, FAMILY
from shared import python_says

from confpred.errors import InvalidInput
from confpred.families.protocol import config_dict
from confpred.measure.contract import check_family
from confpred.triton.source import Source, source_of
from confpred.triton.triton_family import TritonFamily, axes_of, axis_of

NO_LOOPS = Source("1" * 16, frozenset())
SCALE = 2


def features(family: TritonFamily, words: str, row: int = 0) -> dict[str, float]:
    call = family.operation.problem.parse(words)
    return dict(
        zip(family.feature_names, family.features(call, DEVICE, np.array([row]))[0], strict=True)
    )


def test_the_family_keeps_the_protocol() -> None:
    report = check_family(FAMILY, DEVICE)
    assert report.breaches == ()
    assert report.problems > 0


def test_each_config_has_a_row() -> None:
    assert len(FAMILY.configs) == len(CONFIGS) == 72
    assert config_dict(FAMILY, 5) == CONFIGS[5]
    again = TritonFamily("again", ("M",), [*CONFIGS, CONFIGS[0]], NO_LOOPS, "3.0")
    assert len(again.configs) == 72


def test_values_that_are_no_integers_are_numbered() -> None:
    configs = [{"MODE": "b", "maxnreg": 64}, {"MODE": "a", "FAST": True}]
    family = TritonFamily("modes", ("M",), configs, NO_LOOPS, "3.0")
    assert config_dict(family, 0) == {"MODE": 1, "maxnreg": 64}
    assert config_dict(family, 1) == {"MODE": 0, "FAST": 1}
    with pytest.raises(InvalidInput, match="with an argument"):
        TritonFamily("none", ("M",), [{}], NO_LOOPS, "3.0")


@pytest.mark.parametrize(
    ("field", "axis"),
    [("BLOCK_SIZE_M", "M"), ("BLOCK_M", "M"), ("TILE_N", "N"), ("BK", "K"), ("XBLOCK", "X"),
     ("BLOCK_SIZE", ""), ("GROUP_SIZE_M", None), ("num_warps", None)],
)  # fmt: skip
def test_tiles_are_known_by_their_names(field: str, axis: str | None) -> None:
    assert axis_of(field) == axis


@pytest.mark.parametrize(
    ("key", "tiles", "axes"),
    [
        (("M", "N"), ("BLOCK_N", "BLOCK_M"), (("N", "BLOCK_N"), ("M", "BLOCK_M"))),
        (("n_rows", "n_cols"), ("BLOCK",), (("n_rows", "BLOCK"), ("n_cols", "BLOCK"))),
        (("N_CTX",), ("BLOCK_M", "BLOCK_N"), (("N_CTX", "BLOCK_M"), ("N_CTX", "BLOCK_N"))),
        (("xnumel",), ("XBLOCK",), (("xnumel", "XBLOCK"),)),
        (("n_rows", "K"), ("BLOCK_ROW",), (("n_rows", "BLOCK_ROW"),)),
        (("M",), (), ()),
    ],
)
def test_a_tile_divides_the_size_of_its_name(
    key: Sequence[str], tiles: Sequence[str], axes: Sequence[tuple[str, str]]
) -> None:
    assert axes_of(key, tiles) == axes


def test_features_follow_from_names_and_sizes() -> None:
    # Tiles of 32 x 32, and steps of 32 in K, in 2 stages of 4 warps.
    found = features(FAMILY, "M=100 N=128 K=320")
    assert found["log_programs"] == 4  # 4 x 4 tiles; K is walked by the loop
    assert found["log_iterations"] == pytest.approx(np.log2(10))
    assert found["waste_M_BLOCK_M"] == found["padding"] == pytest.approx(1.28)
    assert found["log_stage_bytes"] == np.log2(2 * 2 * 32 * (32 + 32))
    assert found["log_sums_a_thread"] == 3  # 1,024 sums of 128 threads
    assert (found["aligned_M"], found["aligned_N"]) == (0, 1)
    assert found["ratio"] == pytest.approx(100 / 128)


def test_words_are_columns_and_strides_have_no_tiles() -> None:
    key, choices = ("M", "stride_m", "ACT"), {"ACT": ["relu", "gelu"]}
    configs = [{"BLOCK_M": 16}, {"BLOCK_M": 32}]
    family = TritonFamily("gated", key, configs, NO_LOOPS, "3.0", choices=choices)
    found = features(family, "M=64 stride_m=4096 ACT=gelu")
    assert (found["ACT_relu"], found["ACT_gelu"]) == (0, 1)
    assert (found["log_stride_m"], found["log_elements"], found["log_programs"]) == (12, 6, 2)
    assert check_family(family, DEVICE).breaches == ()


def kernel(x, size, BLOCK: int):
    """Text that does not count."""
    for start in range(0, size, BLOCK):  # nor does a comment
        x += start * SCALE


def test_a_source_is_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    before = source_of(kernel)
    assert before.looped == {"BLOCK"}
    assert source_of(kernel) == before
    monkeypatch.setitem(globals(), "SCALE", 3)
    assert source_of(kernel).digest != before.digest


def test_a_source_has_what_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    before = source_of(kernel).digest

    class Jitted:
        fn = staticmethod(features)

    monkeypatch.setitem(globals(), "SCALE", Jitted())
    assert source_of(kernel).digest != before


def test_a_family_is_introduced_once_under_its_name() -> None:
    """In a process of its own, as the registry keeps it."""
    assert made_up_kernel.FAMILY is FAMILY
    program = """
from made_up_kernel import CONFIGS, FAMILY
from confpred.errors import InvalidInput
from confpred.families.registry import all_families, introduce, operation_named
from confpred.predict.predictor import Predictor
from confpred.triton.triton_family import TritonFamily
from confpred.triton.source import Source
assert "product" not in all_families()
introduce(FAMILY)
introduce(TritonFamily("product", FAMILY.key, CONFIGS, Source("", frozenset()), "3.0"))
assert all_families()["product"] is FAMILY and operation_named("product") is FAMILY.operation
call = FAMILY.operation.problem(M=512, N=512, K=512)
choice = Predictor.load(operation="product").choose(call, "h100")
assert (choice.source, choice.family) == ("heuristic", "product"), choice
try: introduce(TritonFamily("product", FAMILY.key, CONFIGS[1:], Source("", frozenset()), "3.0"))
except InvalidInput as error: print(error)
"""
    assert "a name that no other kernel has" in python_says("-c", program, PYTHONPATH="tests")
