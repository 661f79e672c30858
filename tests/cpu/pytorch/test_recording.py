"""Recorded choices are written when a block ends without an error, and only then. Here choices are
announced without the calls on a GPU that tests/gpu makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

import confpred
from confpred.errors import InvalidInput, StorageError, UnknownDevice
from confpred.predict.choice import Choice
from confpred.predict.plan import read_plan
from confpred.predict.predictor import Predictor
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.norm_of_groups import Norm
from confpred.problem.operation import KernelSpec
from confpred.pytorch import plan as plan_module
from confpred.pytorch.plan import further_kernels
from confpred.pytorch.run import choosing

LAYER = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1")
LAYERS = [replace(LAYER, n=n) for n in (1, 2, 3)]


def run(*layers: Problem, then: str | None = None) -> None:
    """Choose for each layer on an H100, and for the last on device `then` too."""
    for device, some in (("h100", layers), (then, layers[-1:])):
        for choice in Predictor({}).choose_many(some, device) if device else ():
            choosing.announce(replace(choice, source="predicted", model="made-up-1"))


def test_what_a_block_chooses_is_written_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    with confpred.record_plan(path):
        run(*LAYERS)
        run(*LAYERS[:2])
        assert not path.exists()
    plan = read_plan(path, "h100")
    assert [c.problem for c in plan.choices] == LAYERS
    assert plan.model == "made-up-1"
    assert not choosing._watchers
    pinned = Predictor.load(plan=path)
    assert pinned.choose(Problem.parse(str(LAYERS[0])), "h100").source == "pinned"


def test_a_block_that_raises_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("as before")
    with pytest.raises(UnknownDevice), confpred.record_plan(path):
        run(LAYER, then="tpu")
    assert path.read_text() == "as before"
    assert not choosing._watchers
    with confpred.record_plan(str(path)):
        run(LAYER)
    assert read_plan(path).choices[0].problem == LAYER


def test_a_block_without_a_convolution_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidInput, match="runs on a CUDA device; none was seen"),
        confpred.record_plan(tmp_path / "plan.json"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_two_kinds_of_device_are_recorded(tmp_path: Path) -> None:
    with confpred.record_plan(tmp_path / "plan.json"):
        run(LAYERS[0], LAYERS[1], then="h200")
    plan = read_plan(tmp_path / "plan.json")
    assert [(c.problem, c.device) for c in plan.choices] == [
        (LAYERS[0], "h100"), (LAYERS[1], "h100"), (LAYERS[1], "h200"),
    ]  # fmt: skip


def test_compiled_kernels_go_along(tmp_path: Path) -> None:
    with confpred.record_plan(tmp_path / "plan", kernels=True):
        run(LAYERS[0])
    (choice,) = read_plan(tmp_path / "plan", "h100").choices
    assert choice.family is not None
    assert len(list((tmp_path / "plan" / "kernels").rglob("*.cubin"))) > 1, "the network's too"
    with (
        pytest.raises(InvalidInput, match="device='sm_80 and sm_90a' is not allowed"),
        confpred.record_plan(tmp_path / "both", kernels=True),
    ):
        run(LAYERS[0], then="a100")
    assert not (tmp_path / "both").exists()


def test_two_recordings_go_to_two_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    outer, inner = tmp_path / "outer.json", tmp_path / "inner.json"
    with confpred.record_plan(outer):
        run(LAYERS[0])
        with (
            pytest.raises(InvalidInput, match="no other recording"),
            confpred.record_plan("outer.json"),
        ):
            pytest.fail("the same file twice")
        with confpred.record_plan(inner):
            run(LAYERS[1])
    assert [c.problem for c in read_plan(outer).choices] == LAYERS[:2]
    assert [c.problem for c in read_plan(inner).choices] == LAYERS[1:2]


def test_choices_of_all_threads_are_recorded(tmp_path: Path) -> None:
    layers = [replace(LAYER, n=n) for n in range(1, 65)]
    with confpred.record_plan(tmp_path / "plan.json"):
        threads = [Thread(target=run, args=tuple(layers[i::4])) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {c.problem for c in read_plan(tmp_path / "plan.json").choices} == set(layers)


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(64, 64, 3, padding=1, groups=64, bias=False)
        self.norm = nn.GroupNorm(8, 64)
        self.planes = nn.Conv3d(64, 64, (1, 3, 3), padding=(0, 1, 1), groups=64)

    def forward(self, x: Tensor) -> Tensor:
        return self.planes(nn.functional.silu(self.norm(self.first(x))))


@pytest.mark.parametrize("training", [False, True])
def test_layers_of_any_rank_and_norms_are_recorded_and_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    """An explanation chooses as `optimize` does."""
    monkeypatch.setattr(choosing, "_predictors", {})  # others keep theirs
    path, model, x = tmp_path / "plan.json", Volumes().half(), torch.rand(2, 64, 16, 56, 56).half()
    with confpred.record_plan(path):
        chosen = confpred.explain(model, x, "h200", training=training)
    plan = read_plan(path, "h200")
    assert [operation.name for operation in plan.operations] == ["conv", "conv2d", "norm"]
    undo = confpred.use_plan(path)
    followed = confpred.explain(model, x, "h200", training=training)
    undo()
    layers = [row for row in chosen.rows if row.problem is not None]
    assert {row.provider.split("_")[0] for row in layers} >= {"volume", "grouped", "group"}
    assert [replace(row, reason="pinned") for row in layers] == [
        row for row in followed.rows if row.problem is not None
    ]
    assert choosing._predictors.keys() == {"conv", "conv2d", "norm"}
    assert not any(p.planned for p in choosing._predictors.values())


def test_what_is_chosen_in_any_rank_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[KernelSpec] = []

    def compile_them(kernels: list[KernelSpec], arch: str) -> dict[str, bytes]:
        compiled.extend(kernels)
        return {}

    monkeypatch.setattr(plan_module, "compiled_files", compile_them)  # it takes seconds
    volumes = torch.rand(2, 64, 16, 56, 56).half()
    plan = confpred.prepare(Volumes().half(), volumes, tmp_path / "made", device="h200")
    assert {type(choice.problem) for choice in plan.choices} == {ConvNd, Problem, Norm}
    written = read_plan(tmp_path / "made", "h200").choices
    assert [(c.problem, c.candidate) for c in written] == [
        (choice.problem, choice.candidate) for choice in plan.choices
    ]
    assert {"volume.cu", "group_norm.cu"} <= {spec.file for spec in compiled}
    fused = ConvNd(1, 8, 9, 8, 3, d=9, h=9, t=3, r=3, bias=True, activation="relu")
    pass_after, *others = further_kernels([Choice(fused, "h200", "fallback")])[1:]
    assert (pass_after.entry, [spec.entry for spec in others]) == ("scale_shift", ["epilogue"])


def test_a_disk_that_refuses_is_an_error() -> None:
    with pytest.raises(StorageError), confpred.record_plan("/dev/null/plan.json"):
        run(LAYER)
