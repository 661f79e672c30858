"""``confpred devices``: what it lists is the table of boards and the cards of the models."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import confpred, named, worked

from confpred.families.registry import all_operations
from confpred.model.folder import NewestModels, load_model
from confpred.problem.device import KNOWN


def test_every_board_has_a_line_those_with_a_model_first() -> None:
    done = confpred("devices")
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    assert head.split() == [
        "device", "product", "arch", "SMs", "GB/s", "TFLOP/s", "model", "layers",
    ]  # fmt: skip
    shipped = sorted(
        (key, operation != "conv2d", operation, model.version)
        for operation in all_operations()
        for key, model in NewestModels(operation=operation).items()
    )
    assert ("h100", True) in {each[:2] for each in shipped}
    keys = [line.split()[0] for line in lines]
    assert keys[: len(shipped)] == [key for key, *_ in shipped]
    assert set(keys) == set(KNOWN)
    assert len(lines) == len(KNOWN) + len(shipped) - len({key for key, *_ in shipped})
    for key, line in zip(keys, lines, strict=True):
        assert f" {KNOWN[key].product.removeprefix('NVIDIA ')} " in line
    for (*_, version), line in zip(shipped, lines, strict=False):
        assert f" {version} " in line
    assert all(line.endswith(" none") for line in lines[len(shipped) :])


def test_a_device_is_told_of_in_full(model_folder: Path) -> None:
    model = load_model(model_folder)
    done = worked("devices", "h100", "--model", model_folder)
    data = model.card.content["data"]
    for text in (
        "h100: NVIDIA H100 80GB HBM3, sm_90a",
        f"model            {model.version}",
        "operation        conv2d",
        f"families         {' '.join(model.families)}",
        "; not dense",
        f"{data['rows']:,} rows of {data['problems']:,} problems of {data['networks']:,} networks",
        " or ".join(model.card.measured_with["driver"]),
    ):
        assert text in done.stdout
    done = confpred("devices", "NVIDIA A100-SXM4-80GB", "--model", model_folder)
    assert done.stdout.splitlines()[0] == "a100: NVIDIA A100-SXM4-80GB, sm_80"
    assert "model            none: that of the nearest device answers" in done.stdout
    assert "families" not in done.stdout


def test_json_has_the_same(model_folder: Path) -> None:
    model = load_model(model_folder)
    done = confpred("devices", "--json", "--model", model_folder)
    found = {each["device"]["key"]: each for each in json.loads(done.stdout)["devices"]}
    assert set(found) == set(KNOWN)
    known, unknown = found["h100"], found["a100"]
    assert (known["model"], known["operation"]) == (model.version, "conv2d")
    assert known["families"] == list(model.families)
    for name in ("rows", "problems", "networks"):
        assert known[name] == model.card.content["data"][name]
    assert known["cudnn"] == model.card.measured_with["cudnn"]
    assert (unknown["model"], unknown["families"], unknown["rows"]) == (None, [], None)


def test_an_unknown_device_is_named_with_the_nearest() -> None:
    named(confpred("devices", "rtx-4091"), "device='rtx-4091' is not allowed; allowed: rtx-4090", 2)
