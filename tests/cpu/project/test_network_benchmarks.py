"""Whole networks and the host's time: what is recorded is merged, summed up and shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def benchmarks(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(repository / "benchmarks")


@pytest.fixture
def results() -> ModuleType:
    return __import__("network_results")


@pytest.fixture
def networks() -> ModuleType:
    return __import__("networks")


@pytest.fixture
def tables() -> ModuleType:
    return __import__("tables")


def _found(ms: float) -> dict[str, Any]:
    slow = (1.0, 3.0, 1.0)  # the host, in each round
    times = [ms * factor for factor in slow]
    return {"times_ms": times, "peak_mb": 10.0 * ms, "difference": 0.01}


def _batch() -> dict[str, dict[str, Any]]:
    return {
        "eager": _found(6.0),
        "eager again": _found(5.0),
        "eager + enable": _found(3.0),
        "graph": {"error": "OutOfMemoryError: no"},
        "graph + optimize": _found(2.0),
    }


FACTS = {
    "date": "2026-01-01",
    "commit": "abc",
    "python": "3.12",
    "processor": "one",
    "versions": {"torch": "2"},
}


def _row(network: str, ratio: float, **others: Any) -> dict[str, Any]:
    row = {"network": network, "mode": "training", "batch": 32, "way": "eager", "with": "enable"}
    return row | {"ratio": ratio, "without_ms": 1.0, "noise": 0.01, "sampled": True} | others


def test_a_pair_has_its_ratio_its_noise_or_its_errors(results: ModuleType) -> None:
    eager, graph = results.pairs("net", "training", 32, _batch())
    assert (eager["way"], eager["with"]) == ("eager", "enable")
    assert eager["ratio"] == pytest.approx(2.0)
    assert eager["without_ms"] == pytest.approx(6.0)
    assert eager["noise"] == pytest.approx(0.2)
    assert (eager["peak_without_mb"], eager["peak_with_mb"]) == (60.0, 30.0)
    assert graph["errors"] == {"graph": "OutOfMemoryError: no"}
    assert "ratio" not in graph


def test_a_ratio_is_of_times_of_one_round(results: ModuleType) -> None:
    found = _batch()
    found["eager"]["times_ms"] = [6.0, 60.0, 600.0]
    found["eager + enable"]["times_ms"] = [3.0, 20.0, 600.0]
    found["eager again"]["times_ms"] = [6.0, 60.0, 599.0]
    (eager, _) = results.pairs("net", "training", 32, found)
    assert eager["ratio"] == 2.0
    assert eager["noise"] == 0.0


def test_each_way_has_a_noise_of_its_own(results: ModuleType) -> None:
    found = _batch() | {"graph": _found(4.0), "graph again": _found(5.0)}
    eager, graph = results.pairs("net", "training", 32, found)
    assert (eager["way_noise"], graph["noise"]) == (eager["noise"], eager["noise"])
    assert graph["way_noise"] == pytest.approx(0.2)


def test_a_process_that_ended_early_is_an_error_of_every_pair(results: ModuleType) -> None:
    rows = results.failed("net", "training", 1, results.VARIANTS, "exit status -11: none")
    assert len(rows) == 6
    assert all("exit status -11: none" in row["errors"].values() for row in rows)


def test_a_later_run_replaces_its_own_rows_only(results: ModuleType) -> None:
    first = results.merged({}, {"steps": [_row("a", 1.0), _row("b", 1.5)]}, FACTS)
    later = FACTS | {"commit": "def"}
    both = results.merged(first, {"steps": [_row("b", 2.0), _row("b", 3.0, batch=1)]}, later)
    shown = [(row["network"], row["batch"], row["ratio"]) for row in both["steps"]]
    assert shown == [("a", 32, 1.0), ("b", 1, 3.0), ("b", 32, 2.0)]
    commits = [both["runs"][row["run"]]["commit"] for row in both["steps"]]
    assert commits == ["abc", "def", "def"]
    assert both["commit"] == "def"
    last = results.merged(both, {"steps": [_row("a", 1.1)]}, later)
    assert [facts["commit"] for facts in last["runs"].values()] == ["def"]
    kinds = results.merged(last, {"losses": [{"network": "a"}]}, later)
    assert kinds["steps"] == last["steps"]
    assert kinds["losses"] == [{"network": "a", "run": next(iter(last["runs"]))}]


def test_a_run_goes_on_with_what_its_commit_lacks(results: ModuleType) -> None:
    failed = _row("a", 1.0, **{"with": "optimize"})
    del failed["ratio"]
    known = results.merged({}, {"steps": [_row("a", 1.0), failed]}, FACTS)
    wanted = ["eager", "eager + enable", "eager + optimize"]
    left = results.outstanding(known, "abc", "a", "training", 32, wanted)
    assert left == ["eager", "eager + optimize"]
    assert results.outstanding(known, "def", "a", "training", 32, wanted) == wanted
    assert results.outstanding(known, "abc", "a", "training", 1, wanted) == wanted
    assert results.outstanding(known, "abc", "a", "training", 32, wanted[:2]) == []


def test_the_summary_counts_large_batches(results: ModuleType) -> None:
    rows = [_row("a", 2.0), _row("b", 0.5), _row("c", 4.0, batch=128), _row("d", 9.0, batch=1)]
    (part,) = results.summary(rows)
    assert (part["count"], part["worst"], part["best"]) == (3, 0.5, 4.0)
    assert part["geomean"] == pytest.approx(4 ** (1 / 3))


def test_loss_curves_are_compared_step_by_step(results: ModuleType) -> None:
    assert results.curve_difference([1.0, 2.0], [1.5, 1.0]) == 0.75
    with pytest.raises(ValueError, match="argument 2"):
        results.curve_difference([1.0], [1.0, 2.0])


def test_a_variant_brings_what_it_is_compared_with(networks: ModuleType, tmp_path: Path) -> None:
    words = ["--variants", "graph + enable,compile + optimize", "--out", str(tmp_path)]
    variants = networks.parsed(words).variants
    assert variants == ["graph", "graph + enable", "compile", "compile + optimize"]


@pytest.mark.parametrize(
    "words", [["--networks", "alexnet"], ["--device", "cpu"], ["--size", "64"]]
)
def test_what_is_no_result_is_refused(networks: ModuleType, words: list[str]) -> None:
    with pytest.raises(SystemExit):
        networks.parsed(words)


def test_a_network_that_was_never_sampled_is_among_them(networks: ModuleType) -> None:
    sampled = networks.sampled_networks()
    assert "efficientnet_b0" in sampled
    assert set(networks.NETWORKS) - sampled


def test_only_what_is_wanted_becomes_a_task(networks: ModuleType, tmp_path: Path) -> None:
    words = ["--networks", "regnetx_016", "--modes", "training", "--batches", "1,32"]
    words += ["--variants", "eager + enable", "--out", str(tmp_path)]
    (task,) = networks.tasks(networks.parsed(words), {})
    assert (task["network"], task["mode"], task["batches"]) == ("regnetx_016", "training", [1, 32])
    assert task["variants"] == ["eager", "eager + enable"]


def test_the_tables_show_ratios_errors_and_gaps(results: ModuleType, tables: ModuleType) -> None:
    rows = [row | {"sampled": False} for row in results.pairs("net", "training", 32, _batch())]
    result = results.merged({}, {"steps": rows}, FACTS)
    shown = tables.TABLES["h200-networks-training"][1](result).splitlines()[2]
    figures = "6.00 | 20.0% | 2.00x |  |  |  |  | error |"
    assert shown.startswith(f"| net (never sampled) | 32 | {figures}")
    assert tables.TABLES["h200-networks-inference"][1](result) == ""
    summary = tables.TABLES["h200-networks"][1](result).splitlines()[2:]
    assert summary == ["| training, eager | 1 | 2.00x | 2.00x | 2.00x |  |  |  |"]
    memory = tables.TABLES["h200-networks-memory"][1](result).splitlines()[2:]
    assert memory == ["| net | training | 32 | 60 | 30 |  |"]


def test_first_steps_and_losses_are_shown(tables: ModuleType) -> None:
    step = {"network": "a", "mode": "inference", "batch": 32, "seconds": {"cold": 0.5}}
    loss = {"network": "a", "steps": 2, "first": 2.0, "last": 1.0, "mean_difference": {"b": 0.5}}
    result = {"first_steps": [step, {"network": "b", "error": "x"}], "losses": [loss]}
    shown = tables.TABLES["h200-networks-first-steps"][1](result).splitlines()[2:]
    assert shown == ["| a, inference | 0.50 |"]
    shown = tables.TABLES["h200-networks-losses"][1](result).splitlines()[2:]
    assert shown == ["| a | 2 | 2.000 | 1.000 | 0.5 |"]


def test_a_result_not_measured_yet_leaves_its_tables_empty(
    tables: ModuleType, tmp_path: Path
) -> None:
    text = "<!-- table:h200-networks -->\n<!-- /table -->\n"
    assert tables.filled(text, tmp_path) == text
    (tmp_path / "h200").mkdir()
    for file in tables._RUNS:
        if file not in tables.OPTIONAL:
            (tmp_path / "h200" / file).write_text(json.dumps(FACTS))
    made = tables.filled("<!-- table:h200-runs -->\n<!-- /table -->\n", tmp_path)
    assert "host_overhead.json" in made
    assert "networks.json" not in made


def test_host_times_are_compared_with_the_same_call_without_confpred(tables: ModuleType) -> None:
    rows = [
        {"layer": "dense", "mode": "forward", "who": "F.conv2d", "us": 10.0, "ratio": 1.0},
        {"layer": "dense", "mode": "forward", "who": "confpred", "us": 5.0, "ratio": 0.5},
    ]
    shown = tables.TABLES["h200-host-layers"][1]({"layers": rows}).splitlines()[2:]
    assert shown == ["| dense, forward | 10.0 (1.00x) | 5.0 (0.50x) |"]
    assert tables.TABLES["h200-host-layers"][1]({"call_us": {}}) == ""


def test_a_process_that_fails_or_is_stopped_says_so(
    networks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('why')\n")
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)\n")
    (tmp_path / "works.py").write_text("import sys; open(sys.argv[2], 'w').write(sys.argv[1])\n")
    monkeypatch.setattr(networks, "HERE", tmp_path)
    assert networks.run_script("works.py", {"a": 1}, 60) == ({"a": 1}, "")
    assert networks.run_script("fails.py", {}, 60) == (None, "exit status 1: ValueError: why")
    assert networks.run_script("sleeps.py", {}, 0.5) == (None, networks.STOPPED)


def becomes(stopped: bool, process: subprocess.Popen[bytes]) -> bool:
    """Whether a process is stopped, or goes on, as Linux tells it; a signal takes its time."""
    for _ in range(1000):
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if (state == "T") is stopped:
            return True
        time.sleep(0.01)
    return False


def test_one_process_of_a_group_is_alone(tmp_path: Path) -> None:
    group = __import__("network_group").Group(tmp_path / "group")
    group.path.touch()
    others = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        for process in others:
            with group.locked():
                group.add(process.pid)
        with group.alone():
            assert all(becomes(True, process) for process in others)
        assert all(becomes(False, process) for process in others)
        os.kill(others[0].pid, signal.SIGSTOP)  # by one that ended while it was alone
        assert becomes(True, others[0])
        with group.locked():
            group.remove(os.getpid())
        assert becomes(False, others[0])
    finally:
        for process in others:
            process.kill()
            process.wait()


def test_nothing_is_timed_while_a_file_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, models, group = map(__import__, ("network_steps", "network_models", "network_group"))
    hold, timed = tmp_path / "hold", []
    hold.touch()
    (tmp_path / "group").touch()
    monkeypatch.setattr(steps.time, "sleep", lambda seconds: hold.unlink())
    monkeypatch.setattr(steps, "reference", lambda *_: torch.zeros(1))
    monkeypatch.setattr(steps, "make", lambda *_: steps.Variant(None, None, None, None, 0.0, []))
    monkeypatch.setattr(steps, "time_interleaved", lambda *_: timed.append(hold.exists()) or {})
    setting = models.Setting("mobilenetv3_large_100", "inference", 1, 32, "cpu")
    one = group.Group(tmp_path / "group")
    found = steps.measure(torch.nn.Identity(), setting, ["eager"], 1, 0.01, one, hold)
    assert timed == [False]
    assert found["eager"]["times_ms"] == []


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_eager_steps_with_enable_are_of_the_model_without(mode: str) -> None:
    steps, models = map(__import__, ("network_steps", "network_models"))
    setting = models.Setting("unet", mode, 1, 32, "cpu")
    base, data = torch.nn.Conv2d(3, 8, 3), (torch.zeros(1, 3, 8, 8), torch.zeros(1))
    plain = steps.Variant(*steps.started("eager", base, setting, data, None), None, 0.0, [])
    for name in ("eager + enable", "eager again", "graph + enable"):
        torch.nn.init.zeros_(plain.model.weight)  # as if it had been trained meanwhile
        model = steps.started(name, base, setting, data, plain)[0]
        assert (model is plain.model) is (name == "eager + enable")
        assert torch.equal(model.weight, base.weight.to(model.weight.dtype))


def test_dense_networks_have_a_result_of_their_own(
    networks: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, dense = (networks.parsed([*words]) for words in ([], ["--dense"]))
    assert (plain.name, dense.name) == ("networks", "dense_networks")
    assert dense.networks == list(networks.DENSE_NETWORKS)
    assert dense.modes == ["inference"]
    for words, told in (
        (["--networks", "unet"], "none of"),
        (["--dense", "--networks", "regnetx_016"], "none of"),
        (["--dense", "--modes", "training"], "inference"),
    ):
        with pytest.raises(SystemExit):
            networks.parsed(words)
        assert told in capsys.readouterr().err


def test_networks_of_our_own_compute() -> None:
    own = __import__("network_own").OWN
    shapes = {"unet": (2, 64, 64), "detector": (85, 64 + 16 + 4)}
    assert own.keys() == shapes.keys()
    for name, shape in shapes.items():
        with torch.inference_mode():
            (out,) = own[name]().eval()(torch.zeros(1, 3, 64, 64))
        assert out.isfinite().all()
        assert out.shape == shape


@pytest.mark.slow(reason="whole networks run")
def test_the_hosts_time_in_a_network_is_told_by_kind_of_layer(tables: ModuleType) -> None:
    host, models = map(__import__, ("host_in_networks", "network_models"))
    forward = torch.nn.Conv2d.forward
    rows = host.measure(models.Setting("detector", "inference", 1, 32, "cpu"), 2, 1)
    assert torch.nn.Conv2d.forward is forward
    assert [row["way"] for row in rows] == list(host.WAYS)
    assert rows[0]["ratio"] == 1.0
    layers = sum(isinstance(m, torch.nn.Conv2d) for m in models.OWN["detector"]().modules())
    for row in rows:
        assert row["step_ms"] >= row["host_ms"] > 0
        assert row["calls"]["dense"]["layers"] == layers
        assert row["calls"]["grouped"] == {"layers": 0, "us": 0}
        assert row["calls"]["dense"]["us"] > 0
    _, made = tables.TABLES["h200-host-in-networks"]
    lines = made({"rows": rows}).splitlines()
    assert len(lines) == 2 + len(host.WAYS)
    assert lines[2].startswith("| detector, batch 1: eager |")


def test_a_trial_of_the_hosts_time_is_no_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = __import__("host_in_networks")
    monkeypatch.setattr("sys.argv", ["host_in_networks.py", "--device", "cpu"])
    with pytest.raises(SystemExit):
        host.parsed()
    assert "--out" in capsys.readouterr().err
