"""The benchmarks of launches with matrix products: what they ask for is there, what they compute is
right, and what they record is summed up."""

from __future__ import annotations

import sys

import pytest

from benchmarks.kernels import im2col_chunks, linear_chains
from confpred.problem.limits import Limits
from confpred.problem.linear_chain import LinearChain


@pytest.mark.slow(reason="all configs of the published cases are computed")
def test_all_configs_of_the_published_cases_are_right(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["im2col_chunks.py", "--cpu"])  # as from a command line
    im2col_chunks.main()
    assert capsys.readouterr().out.count("configs") == len(im2col_chunks.CASES)


def test_a_wrong_config_is_seen(monkeypatch):
    problem = im2col_chunks.problem_of((16, 8, 8), "float32")
    (row, *_) = im2col_chunks.configs(problem, tf32=False)
    family = im2col_chunks.FAMILY
    launch = family.launch(problem, row)
    halved = type(launch).of_program(launch.program[:1], scratch_bytes=launch.scratch_bytes)
    monkeypatch.setattr(type(family), "launch", lambda *_: halved)  # a family with a fault
    assert not im2col_chunks.difference_on_cpu(problem, row) < 1e-6  # NaN


def test_chunks_are_compared_with_the_loop():
    case = (16, 16, 4)
    problem = im2col_chunks.problem_of(case, "float32")
    rows = [
        im2col_chunks.row_of(case, problem, config)
        for config in im2col_chunks.configs(problem, tf32=False)
    ]
    assert sorted((row["samples"], row["batched"]) for row in rows) == [
        (1, False), (2, False), (2, True), (4, False), (4, True),
    ]  # fmt: skip
    for row in rows:
        ms = 8.0 / row["samples"] * (1.5 if row["batched"] else 1.0)
        row |= {"eager_ms": ms, "graph_ms": ms / 2}
    theirs = {"channels": 16, "side": 16, "batch": 4, "samples": None, "batched": None}
    rows.append(theirs | {"eager_ms": 1.0, "graph_ms": 1.0})
    (line,) = im2col_chunks.summary(rows)
    assert line["published"] == 2.6
    assert line["eager_one_product"] == pytest.approx(4.0)
    assert line["eager_batched"] == pytest.approx(4 / 1.5)
    assert line["graph_over_pytorch"] == pytest.approx(1.0)
    assert line["loop_workspace_bytes"] == 16 * 16 * 16 * 9 * 4
    assert line["all_workspace_bytes"] == 4 * line["loop_workspace_bytes"]
    assert "2.60x" in im2col_chunks.table([line])


def test_chains_of_every_size_are_measured():
    found = linear_chains.problems(quick=False)
    assert len(found) == len(set(found)) == 6 * 5 * 3 * 3
    assert {p.hidden for p in found} >= {128, 4096}
    assert {p.batch for p in found} >= {1, 512}
    assert {p.layers for p in found} == {1, 4, 8}
    assert {linear_chains.precision_of(p) for p in found} == {"float32", "tf32", "float16"}
    assert set(linear_chains.problems(quick=True)) <= set(found)
    for problem in found:
        names = [name for name, *_ in linear_chains.candidates(problem)]
        assert names == ["epilogue", "strassen"][: 1 if problem.batch == 1 else 2]


def test_a_bound_decides_who_may_win(tmp_path):
    problem = LinearChain(32, 256, 256, 256, 4)
    row = {
        "problem": str(problem),
        "width": 256,
        "batch": 32,
        "layers": 4,
        "precision": "float16",
        "stated_error": {"pytorch": 1e-3, "epilogue": 1e-3, "strassen": 3e-3},
        "error": {"pytorch": 4e-4, "epilogue": 4e-4, "strassen": 1.3e-3},
        "eager_ms": {"pytorch": 2.0, "epilogue": 1.0, "strassen": 4.0},
        "graph_ms": {"pytorch": 1.0, "epilogue": 0.8, "strassen": 0.5},
    }
    assert linear_chains.chosen(row, "graph_ms", Limits()) == "epilogue"
    assert linear_chains.chosen(row, "graph_ms", Limits(max_error=0.01)) == "strassen"
    (line,) = linear_chains.summary([row])
    assert line["epilogue_eager"] == pytest.approx(2.0)
    assert line["strassen_graph"] == pytest.approx(2.0)
    assert line["exact_best_graph"] == pytest.approx(1.25)
    assert (line["exact_strassen_wins"], line["bounded_strassen_wins"]) == (0, 1)
    assert "float16" in linear_chains.table([line])
    linear_chains.plot([row], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
