"""Whole networks: what is recorded is merged, refused and shown, and a trial runs on the CPU."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import python_says

import confpred
from benchmarks import tables
from benchmarks.networks import losses, network_tables, networks, unknown_board
from confpred.cuda import driver
from confpred.problem.device import get_device
from confpred.pytorch.run import choosing

FACTS = {
    "date": "2026-01-01",
    "commit": "abc",
    "python": "3.12",
    "processor": "one",
    "versions": {"torch": "2"},
}


def _row(network: str, way: str, over: float | None = None, **others: Any) -> dict[str, Any]:
    row = {"network": network, "mode": "training", "batch": 32, "way": way}
    return row | ({} if over is None else {"over_eager": over}) | others


# Merging


def test_a_later_run_replaces_its_own_rows_only() -> None:
    first = networks.merged({}, [_row("a", "eager", 1.0), _row("b", "eager", 1.5)], FACTS)
    later = FACTS | {"commit": "def"}
    new = [_row("b", "eager", 2.0), _row("b", "eager", 3.0, batch=1), _row("b", "again", 4.0)]
    both = networks.merged(first, new, later)
    shown = [(row["network"], row["batch"], row["way"], row["over_eager"]) for row in both["rows"]]
    assert shown == [
        ("a", 32, "eager", 1.0), ("b", 1, "eager", 3.0), ("b", 32, "again", 4.0),
        ("b", 32, "eager", 2.0),
    ]  # fmt: skip
    commits = [both["runs"][row["run"]]["commit"] for row in both["rows"]]
    assert commits == ["abc", "def", "def", "def"]
    assert both["commit"] == "def"
    last = networks.merged(both, [_row("a", "eager", 1.1)], later)
    assert [facts["commit"] for facts in last["runs"].values()] == ["def"]
    third = networks.merged(last, [_row("c", "eager", 1.2)], FACTS | {"commit": "ghi"})
    commits = [third["runs"][row["run"]]["commit"] for row in third["rows"]]
    assert commits == ["def", "def", "def", "def", "ghi"]


def test_an_error_takes_the_place_of_a_figure() -> None:
    known = networks.merged({}, [_row("a", "optimize", 2.0)], FACTS)
    both = networks.merged(known, [_row("a", "optimize", error="no")], FACTS)
    (row,) = both["rows"]
    assert row["error"] == "no"
    assert "over_eager" not in row


# Processes


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--networks", "alexnet"], "none of"),
        (["--ways", "enable"], "none of"),
        (["--modes", "serving"], "none of"),
        (["--device", "cpu"], "--out"),
        (["--size", "64"], "--out"),
    ],
)
def test_what_is_no_result_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    with pytest.raises(SystemExit):
        networks.parsed(words)
    assert told in capsys.readouterr().err


# On the CPU


def _trial(repository: Path, folder: Path, script: Any, words: str) -> None:
    """Run a benchmark's script beside a stub of torchvision."""
    (folder / "stub" / "torchvision").mkdir(parents=True, exist_ok=True)
    stub = folder / "stub" / "torchvision" / "__init__.py"
    stub.write_text("from timm_networks import stand_in; stand_in()")
    path = os.pathsep.join(map(str, (stub.parents[1], repository, repository / "tests")))
    python_says(script.__file__, *words.split(), "--out", folder / "out", PYTHONPATH=path)


@pytest.mark.slow(reason="a network is captured in inference and training, in bfloat16")
def test_a_trial_runs_on_the_cpu(repository: Path, tmp_path: Path) -> None:
    words = "--device cpu --size 32 --networks resnet18 --batches 2 --ways eager,optimize"
    _trial(repository, tmp_path, networks, f"{words} --rounds 1 --turn 0.001")
    result = json.loads((tmp_path / "out" / "networks.json").read_text())
    shown = {(row["mode"], row["way"]): row.get("error") for row in result["rows"]}
    modes, ways = ("inference", "training"), ("eager", "optimize")
    assert shown == {(mode, way): None for mode in modes for way in ways}
    assert all(row["ms"] > 0 and row["first_s"] > 0 for row in result["rows"])
    made = tables.TABLES["h100-networks"][1](result).splitlines()
    assert [line.split(" | ")[:2] for line in made[2:]] == [
        ["| inference, 2", "1"],
        ["| training, 2", "1"],
    ]


@pytest.mark.slow(reason="a network is captured by two processes, one after the other")
def test_a_first_step_is_measured_with_empty_caches_and_with_what_it_compiled(
    repository: Path, tmp_path: Path
) -> None:
    words = "--device cpu --size 32 --networks resnet18 --modes inference --batches 2 --first"
    _trial(repository, tmp_path, networks, f"{words} --ways compile")
    (row,) = json.loads((tmp_path / "out" / "networks_first.json").read_text())["rows"]
    assert 0 < row["first_s"] < row["cold_s"]  # or the second process found nothing


@pytest.mark.slow(reason="two networks are captured beside each other")
def test_what_is_compiled_ahead_is_not_measured(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tmp_path / "inductor" / "ab" / "kernel.best_config"
    chosen.parent.mkdir(parents=True)
    chosen.write_text("{}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("CONFPRED_CACHE_DIR", str(tmp_path / "confpred"))
    words = "--device cpu --size 32 --networks resnet18 --batches 2 --ways eager,optimize"
    _trial(repository, tmp_path, networks, f"{words} --ahead 2")
    assert not (tmp_path / "out").exists()
    assert chosen.exists()
    _trial(repository, tmp_path, networks, f"{words} --compiled --budget 0")
    assert not chosen.exists()


# Tables


def _result() -> dict[str, Any]:
    rows = []
    for network, over in (("a", 2.0), ("b", 8.0)):
        rows += [
            _row(network, "eager", 1.0, ms=10.0, graph_ms=5.0),
            _row(network, "again", over / 2),
            _row(network, "optimize", over, graph_over_eager=1.5, graph_over_compile=1.2),
            _row(network, "compile", 1.5, graph_over_compile=1.0),
            _row(network, "reduce-overhead", error="OutOfMemoryError: no"),
        ]
    rows += [_row("a", "eager", 1.0, mode="inference", batch=batch, ms=1.0) for batch in (1, 16)]
    rows += [_row("a", "optimize", mode="inference", batch=1, error="no")]
    rows += [_row("a", "inductor=False", 3.0)]
    return {"rows": rows}


def _lines(name: str, *results: Any) -> list[str]:
    made: str = tables.TABLES[f"h100-{name}"][1](*results)
    return made.splitlines()[2:]


def test_the_summary_has_means_leasts_and_the_noise() -> None:
    assert _lines("networks", _result()) == [
        "| inference, 1 | 0 of 1 |  |  |  |  |  |  |  |",
        "| training, 32 | 2 | 4.00x | 2.00x | 1.50x | 1.50x | 1.20x | 1.20x | 1.00x to 4.00x |",
    ]


def test_first_steps_are_shown_beside_those_of_torch_compile() -> None:
    rows = [
        _row("a", "optimize", cold_s=20.0, first_s=3.0),
        _row("a", "compile", cold_s=30.0, first_s=5.0),
        _row("b", "optimize", cold_s=40.0, first_s=3.0),
        _row("b", "compile", error="out of memory"),
        _row("c", "optimize", cold_s=30.0, first_s=2.0),
        _row("c", "compile", cold_s=20.0, first_s=4.0),
    ]
    assert _lines("first-steps", {"rows": rows}) == [
        "| training | 2 | 1.00x, 0.67x | c | 1.83x, 1.67x | a |"
    ]


@pytest.mark.slow(reason="a network is captured in training")
def test_losses_are_compared_with_eagers_on_the_cpu(repository: Path, tmp_path: Path) -> None:
    """cuDNN's algorithms are nothing to it: eager twice is the same there, to the bit."""
    words = "--device cpu --networks resnet18 --steps 3 --seeds 1 --batch 4 --size 32"
    _trial(repository, tmp_path, losses, words)
    (row,) = json.loads((tmp_path / "out" / "losses.json").read_text())["rows"]
    assert set(row["losses"]) == set(losses.WAYS)
    assert row["distances"]["deterministic"] == 0.0
    assert row["distances"]["optimize"] < 0.05
    assert all(len(run) == 3 for run in row["losses"].values())


def test_a_result_not_measured_yet_leaves_its_tables_empty(tmp_path: Path) -> None:
    for name in ("networks", "first-steps"):
        text = f"<!-- table:h100-{name} -->\n<!-- /table -->\n"
        assert tables.filled(text, tmp_path) == text


def test_the_defaults_are_what_is_published() -> None:
    told: argparse.Namespace = networks.parsed([])
    assert (told.device, told.size, told.rounds) == ("cuda", 224, 9)
    assert set(network_tables.WAYS) == set(told.ways) - {"eager", "again"}


def test_the_broad_suite_has_batches_and_shapes_of_its_own() -> None:
    words = ["--suite", "broad", "--networks", "detector,x3d", "--modes", "inference"]
    tasks = networks.tasks_of(networks.parsed(words), {})
    assert [(task["network"], task["batch"], task["shape"]) for task in tasks] == [
        ("detector", 1, (3, 640, 640)), ("detector", 16, (3, 640, 640)),
        ("x3d", 8, (3, 13, 160, 160)),
    ]  # fmt: skip
    assert sum(len(kind.steps) for kind in networks.BROAD.values()) >= 30
    assert len({kind.kind for kind in networks.BROAD.values()}) >= 10


def test_first_steps_alone_take_a_process_each() -> None:
    words = ["--networks", "resnet50", "--modes", "training", "--batches", "1", "--resume"]
    told = networks.parsed([*words, "--ways", "eager,optimize", "--first"])
    row = {"network": "resnet50", "mode": "training", "batch": 1}
    tasks = networks.tasks_of(told, {"rows": [row | {"way": "eager"}]})
    assert [(task["ways"], task["rounds"]) for task in tasks] == [(["optimize"], 1)]
    tasks = networks.first_steps_of("folder", told, {})
    assert [task["ways"] for task in tasks] == [["eager"], ["optimize"]]
    assert len({path for task in tasks for path in task["environment"].values()}) == 4


def test_a_way_without_a_part_is_not_a_graph_that_was_kept_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._functorch._aot_autograd.autograd_cache import should_use_local_autograd_cache

    from benchmarks.networks import network_steps
    from confpred.pytorch import backend

    def states() -> tuple[Any, bool]:
        return backend.layouts._saved_ms(), should_use_local_autograd_cache()  # type: ignore

    # Stands for a captured model; only what holds in its calls is tested.
    monkeypatch.setitem(network_steps.WAYS, "optimize", lambda _: states)  # type: ignore
    way = network_steps.without("without volumes")
    assert way(torch.nn.Identity())() == (0, False)
    assert should_use_local_autograd_cache()


@pytest.mark.parametrize(
    "name", ["detector", "unet_volumes", "video_decoder", "hifigan", "short_lines"]
)
def test_networks_of_the_broad_suite_run(name: str) -> None:
    from benchmarks.networks import broad_models

    model = getattr(broad_models, name)().eval()
    shape = {
        "detector": (3, 64, 64), "unet_volumes": (1, 16, 16, 16), "video_decoder": (16, 1, 3, 5),
        "hifigan": (80, 4), "short_lines": (5, 1024),
    }[name]  # fmt: skip
    with torch.no_grad():
        out = model(torch.randn(1, *shape))
    assert all(x.isfinite().all() for x in (out if isinstance(out, list) else [out]))


def test_the_broad_suite_is_shown_by_kind_and_by_step(tmp_path: Path) -> None:
    rows = [
        {"network": "detector", "mode": "inference", "batch": 1, "way": way} | figures
        for way, figures in {
            "again": {"over_eager": 1.0},
            "optimize": {
                "over_eager": 2.0, "over_reduce-overhead": 1.2, "graph_over_compile": 1.1,
            },
        }.items()
    ]  # fmt: skip
    numbers = "1 | 2.00x, 2.00x | 1.20x, 1.20x | 1.10x, 1.10x | 1.00x to 1.00x |"
    assert _lines("broad", {"rows": rows}) == [
        f"| {n} | {numbers}" for n in ("detection", "all, inference")
    ]
    network_tables.plot(
        {"rows": [*rows, *({**row, "mode": "training"} for row in rows)]}, tmp_path / "broad.png"
    )
    assert (tmp_path / "broad.png").stat().st_size > 10_000


# A board without a model


def test_the_share_of_the_gain_is_of_logarithms() -> None:
    assert unknown_board.share(1.21, 1.21) == 1.0
    assert unknown_board.share(1.1, 1.21) == pytest.approx(0.5)
    assert unknown_board.share(0.9, 1.21) < 0.0
    assert unknown_board.share(1.3, 1.02) is None  # there is little to share


def test_rows_of_an_unknown_board_are_summed_up() -> None:
    def row(network: str, way: str, over: float, first_s: float) -> dict[str, Any]:
        ratios = {"over_compile": over, "graph_over_compile": over**2}
        return _row(network, way, first_s=first_s, **ratios)

    ways = (("compile", 1.0), ("optimize", 1.21), ("tune=60", 1.21), ("tune=15", 1.1))
    rows = [row("a", way, over, 9.0) for way, over in ways]
    rows += [row("b", way, over, 9.0) for way, over in (*ways[:2], ("tune=15", 0.9))]
    rows += [_row("b", "tune=60", error="out of memory")]
    seconds = zip(unknown_board.SECOND, (4.0, 4.5), strict=True)
    rows += [row("a", way, 1.0, first_s) for way, first_s in seconds]
    found = unknown_board.summed({"rows": rows})
    a, b = found["networks"].values()
    assert a["wall_share"] == a["gpu_share"] == pytest.approx({"tune=60": 1.0, "tune=15": 0.5})
    assert a["second_extra_s"] == 0.5
    assert set(b["wall_share"]) == {"tune=15"}
    assert found["summary"]["wall_share"] == pytest.approx({"tune=60": 1.0, "tune=15": 0.005**0.5})
    assert found["summary"]["second_extra_s"] == 0.5
    assert unknown_board.summed(found) == found
    heads, *shown = network_tables.unknown(found, lambda heads, rows: [heads, *rows])
    assert heads == ["network", "with the model", "without, `tune=60`", "`tune=15`"]
    assert shown == [
        ["a", "1.46x", "1.46x", "1.21x"], ["b", "1.46x", "", "0.81x"],
        ["share of the gain", "", "1.00", "0.07"],
    ]  # fmt: skip


def test_processes_of_an_unknown_board_are_those_that_are_left(tmp_path: Path) -> None:
    told = unknown_board.parsed(["--networks", "regnety_016", "--cache", str(tmp_path)])
    told.folder = told.cache
    tasks = unknown_board.tasks_of(told, {})
    ways = [list(unknown_board.WAYS), *([way] for way in unknown_board.SECOND)]
    assert [task["ways"] for task in tasks] == ways
    folder = {unknown_board.CACHE: str(tmp_path / "regnety_016")}
    assert {(task["batch"], task["device"]) for task in tasks} == {(128, "cuda")}
    assert all(task["environment"] == folder for task in tasks)
    where = {"network": "regnety_016", "mode": "inference", "batch": 128}
    some = {"rows": [where | {"way": way} for way in unknown_board.WAYS]}
    assert [task["ways"] for task in unknown_board.tasks_of(told, some)] == ways[1:]
    told.cache = None  # nothing is kept from the first process
    assert len(unknown_board.tasks_of(told, some)) == 3
    every = {"rows": [where | {"way": way} for each in ways for way in each]}
    assert unknown_board.tasks_of(told, every) == []
    with pytest.raises(SystemExit):
        unknown_board.parsed(["--networks", "conv_tasnet"])  # which is trained alone


def test_an_unknown_board_is_measured_as_networks_are(tmp_path: Path, capsys: Any) -> None:
    told = unknown_board.parsed(["--networks", "x3d", "--budget", "0", "--out", str(tmp_path)])
    told.folder, told.device = tmp_path, "cpu"
    networks.run("unknown_board", unknown_board.tasks_of, told, unknown_board.summed)
    left_out = ["left out for want of time: x3d inference 8"] * 3
    assert capsys.readouterr().out.splitlines() == left_out


def test_models_are_hidden_while_a_network_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.networks.network_steps import ALL_WAYS

    # No GPU is here: the driver says what a GPU would.
    monkeypatch.setattr(driver, "device_of", lambda _: get_device("h100"))
    monkeypatch.setattr(driver, "describe", lambda _: ("NVIDIA H100", "580.1"))  # of it
    monkeypatch.setenv(unknown_board.CACHE, str(tmp_path))
    (tmp_path / "tune=60" / "tuned").mkdir(parents=True)  # of a process that was cut off
    seen = []

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            models = {n: dict(choosing.current_predictor(n).models) for n in choosing._predictors}
            seen.append((driver.device_of(0).key, models, os.environ.get("CONFPRED_CACHE_DIR")))
            return x

    monkeypatch.setattr(confpred, "optimize", lambda model, **_: model)  # nothing is captured
    step, x = ALL_WAYS["tune=60"](Layer()), torch.ones(1)
    assert not (tmp_path / "tune=60").exists()
    before = os.environ.get("CONFPRED_CACHE_DIR")
    step(x), step(x)
    (board, models, cache), (after, _, then) = seen
    assert {"conv2d", "batch_norm", "linear_chain"} <= models.keys()
    assert (board, cache) == ("unknown-board", str(tmp_path / "tune=60"))
    assert not any(models.values())
    assert (after, then) == ("h100", before)
    assert not choosing._predictors
    kept = tmp_path / "tune=60" / "tuned"
    kept.mkdir()
    ALL_WAYS["second tune=60"](Layer())
    assert kept.exists()
