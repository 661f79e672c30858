"""The suites of batch norm: made from the committed layers, and apart in their networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from confpred.data.suites import read_suite
from confpred.problem.conv2d import ACTIVATIONS, DTYPES
from confpred.problem.device import get_device
from confpred.problem.norm import DIRECTIONS


@pytest.fixture(scope="module")
def shipped(repository):
    folder = repository / "datasets" / "suites" / "norm"
    return {name: read_suite(folder / f"{name}.json").entries for name in ("training", "holdout")}


def test_the_files_are_those_that_the_command_writes(script, made_again):
    made = made_again(script("norm_suite").main, "norm", "build")
    assert sorted(made) == ["holdout.json", "training.json"]


def test_the_holdout_shares_no_layer_and_no_network(shipped):
    names, layers = (
        [
            {f(entry, name) for entry in entries for name in entry.networks or ("",)} - {""}
            for entries in shipped.values()
        ]
        for f in (lambda _, name: name, lambda entry, _: entry.problem.layer())
    )
    assert not names[0] & names[1]
    assert not layers[0] & layers[1]
    assert len(names[0]) >= 60
    assert len(names[1]) >= 12


def test_there_is_something_of_everything(shipped):
    for entries in shipped.values():
        problems = [entry.problem for entry in entries]
        assert len(problems) == len(set(problems)) >= 70
        assert {p.direction for p in problems} == set(DIRECTIONS)
        assert {p.dtype for p in problems} == set(DTYPES)
        assert {p.residual for p in problems} == {p.frozen for p in problems} == {True, False}
        assert {p.n for p in problems} >= {32, 128}
    training = [entry.problem for entry in shipped["training"]]
    assert {p.activation for p in training} == set(ACTIVATIONS[:6])  # those that were measured
    fast = get_device("h100").l2_bytes
    assert sum(p.tensor_bytes > fast for p in training) > 100


class Block(nn.Module):
    """A shortcut of its own norm, two activations, and a norm whose output two layers read."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))

    def forward(self, x):
        first, second, third, fourth = self.norms
        a, b, c, d, e = self.convolutions
        shortcut = second(b(x))
        x = torch.relu(first(a(x)).add_(shortcut))
        x = nn.functional.silu(third(c(x)), inplace=True)
        y = fourth(d(x))
        return torch.relu(e(y)) + y


def test_layers_are_read_with_what_follows_them(script):
    with torch.device("meta"), torch.no_grad():
        found = script("norm_suite").watched(Block().train(), torch.empty(2, 8, 4, 4))
    layers = [(layer["activation"], layer["residual"]) for layer in found]
    assert layers == [("none", False), ("relu", True), ("silu", False), ("none", False)]
    assert {(layer["h"], layer["w"], layer["c"]) for layer in found} == {(4, 4, 8)}
