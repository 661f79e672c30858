"""`confpred.explain` and the problems of a network, on a machine without a GPU."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from network_blocks import BLOCKS, InvertedResidual, Network, images, made
from torch import nn

import confpred
from confpred.errors import ConfpredError, InvalidInput, UnknownDevice
from confpred.families.candidate import PYTORCH_OPERATOR
from confpred.network.problems import network_problems
from confpred.predict.predictor import Predictor
from confpred.pytorch import choosing


class Wide(nn.Module):
    """A layer that our kernels win, between one that they cannot compute and one that is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 128, 1)
        self.norm = nn.BatchNorm2d(128)
        self.deep = nn.Conv2d(128, 128, 3, padding=1, groups=16, bias=False)
        self.up = nn.ConvTranspose2d(128, 8, 2)

    def forward(self, x):
        x = self.stem(x)
        return self.up(torch.relu(self.norm(self.deep(x)) + x))


def picture(batch: int = 32) -> torch.Tensor:
    return torch.empty(batch, 3, 56, 56, dtype=torch.float16)


def test_rows_say_what_runs_and_why() -> None:
    model = Wide().half()
    before = copy.deepcopy(model.state_dict())
    found = confpred.explain(model, picture())
    stem, deep, up = found.rows
    assert [row.layer for row in found.rows] == ["stem", "deep", "up"]
    assert (stem.provider, stem.reason, stem.expected_ms) == (
        "pytorch", "no kernel of ours is legal", None,
    )  # fmt: skip
    assert up.problem is None
    assert up.reason == "transposed"
    layer = confpred.Problem(
        n=32, c=128, h=56, w=56, k=128, r=3, s=3, padding=1, groups=16, bias=True,
        activation="relu", residual=True,
    )  # fmt: skip
    assert deep.problem == layer
    predictor = confpred.Predictor.load()
    choice = predictor.choose(layer, "h100")
    assert (deep.provider, deep.expected_ms) == (choice.provider, choice.predicted_ms)
    assert deep.pytorch_ms == predictor.expected_ms(layer, "h100", PYTORCH_OPERATOR)
    assert (found.total_ms, found.pytorch_total_ms) == (deep.expected_ms, deep.pytorch_ms)
    assert found.unpredicted == 2
    table = str(found).splitlines()
    assert len(table) == 5
    assert table[2].startswith("deep")
    assert "2 without a prediction" in table[-1]
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["rows"][1]["provider"] == deep.provider
    assert plain["total_ms"] == found.total_ms
    assert model.training
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )


def test_a_training_step_has_three_directions() -> None:
    rows = confpred.explain(Wide().half(), picture(), training=True).rows
    assert [(row.layer, row.direction) for row in rows] == [
        ("stem", "fprop"),
        ("stem", "wgrad"),  # nobody asks for the gradient of the image
        ("deep", "fprop"),
        ("deep", "dgrad"),
        ("deep", "wgrad"),
        ("up", "fprop"),
    ]
    assert rows[0].problem.bias
    assert not rows[1].problem.bias  # of a dense layer it is summed apart
    assert not rows[2].problem.bias
    assert rows[2].problem.activation == "none"


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (None, "float32")],
)
def test_dtypes(dtype: torch.dtype | None, expected: str) -> None:
    rows = confpred.explain(Wide(), picture().float(), dtype=dtype).rows
    assert rows[1].problem.dtype == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = confpred.explain(Wide(), picture().float(), dtype=dtype).rows
    assert rows[1].problem.dtype == (expected if dtype else "bfloat16")
    rows = confpred.explain(Wide().double(), picture().double()).rows
    assert rows[1].reason == "dtype float64"
    assert rows[1].problem is None


def test_layouts_and_devices() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep = nn.Conv2d(128, 128, 3, padding=1, groups=16)

        def forward(self, x):
            return self.deep(x.contiguous() if x.sum() is None else x * 1)

    x = torch.empty(32, 128, 56, 56, dtype=torch.float16)
    (row,) = confpred.explain(First().half(), x).rows
    assert row.reason == "predicted"
    (row, *_) = confpred.explain(First().half(), x, training=True).rows
    assert (row.provider, row.reason) == ("pytorch", "layout NCHW")
    assert row.expected_ms == row.pytorch_ms
    (row,) = confpred.explain(First().half(), x, "a100").rows
    unknown = "no model for this device, and not measured on it"
    assert (row.provider, row.reason) == ("pytorch", unknown)
    with pytest.raises(UnknownDevice):
        confpred.explain(First(), x, "gtx")


def test_a_layer_of_one_pixel_is_left_to_pytorch() -> None:
    """Its tensors have either layout, which is not what our kernels are launched for."""
    rows = confpred.explain(
        made(Network(InvertedResidual(8))).half(), images(torch.half), "h200"
    ).rows
    pixels = [row for row in rows if (row.problem.h, row.problem.w) == (1, 1)]
    assert len(pixels) == 2
    for row in pixels:
        assert (row.provider, row.reason) == ("pytorch", "one pixel or one channel")
    assert all(row.reason != "one pixel or one channel" for row in rows if row not in pixels)


def test_a_pin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = network_problems(Wide().half(), picture())[1].problem
    pins = {(problem, confpred.get_device("h100")): PYTORCH_OPERATOR}
    monkeypatch.setattr(choosing, "_predictor", Predictor(Predictor.load().models, pins))
    rows = confpred.explain(Wide().half(), picture()).rows
    assert (rows[1].provider, rows[1].reason) == ("pytorch", "pinned")


@pytest.mark.parametrize("kind", BLOCKS)
def test_problems_are_those_of_the_optimized_network(kind: str) -> None:
    model = made(BLOCKS[kind]())
    calls = network_problems(model, images())
    confpred.optimize(model)
    with torch.no_grad():
        model(images())
    sites = model.__dict__["forward"]._program.sites.values()
    assert sorted((c.name, c.problem.activation, c.problem.residual) for c in calls) == sorted(
        (site.name, site.activation, site.residual) for site in sites
    )
    assert network_problems(model, images()) == calls


def test_functions_and_computed_filters_are_seen() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x):
            weight = self.weight - self.weight.mean()
            return nn.functional.conv2d(x, weight, self.bias, groups=self.groups)

    (call,) = network_problems(nn.Sequential(Standardised(3, 3, 3, groups=3)), images())
    assert (call.name, call.problem.groups) == ("", 3)
    (call,) = network_problems(nn.Sequential(nn.Conv1d(19, 4, 1)), images()[0])
    assert (call.name, call.problem, call.hindrance) == ("0", None, "one-dimensional")


def test_inputs_by_name_and_optional_ones() -> None:
    model = made(Network(InvertedResidual(8)))
    by_name = network_problems(model, {"x": images()})
    assert by_name == network_problems(model, [images()])


def test_what_cannot_be_explained() -> None:
    class ByValue(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ConfpredError, match="ByValue does not run"):
        confpred.explain(ByValue(), images())
    with pytest.raises(InvalidInput, match="model"):
        confpred.explain(lambda x: x, images())
    with pytest.raises(InvalidInput, match="example_inputs"):
        confpred.explain(Wide(), "an image")
    with pytest.raises(InvalidInput, match="dtype"):
        confpred.explain(Wide(), images(), dtype="float16")
