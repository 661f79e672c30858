"""PyTorch's operator is sampled in both modes of cuDNN, each in a process that knows no other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
from command_line import worked

from confpred.data.parquet import read
from confpred.data.suites import Entry, Suite, write_suite
from confpred.problem.conv2d import CONVOLUTION, Problem

LAYER = Problem(8, 64, 28, 28, 64, 3, 3, padding=1, groups=64)


def test_rows_of_both_modes_and_of_anchors(tmp_path: Path, repository: Path) -> None:
    suite, folder = tmp_path / "suite.json", tmp_path / "out"
    write_suite(Suite("one", (Entry(LAYER),)), suite)
    words = ["sample", "--suite", suite, "--out", folder, "--configs", 2, "--gpus", 0]
    words += ["--cudnn-mode", "benchmark", "--cudnn-mode", "heuristics"]
    words += ["--anchors", repository / "datasets" / "anchors" / "anchors.json"]
    worked(*words, timeout=280)
    rows = pa.concat_tables(read(p, CONVOLUTION) for p in folder.glob("rows-*")).to_pylist()
    modes = Counter(row["cudnn_mode"] for row in rows if row["family"] == "pytorch")
    assert modes == {"benchmark": 1, "heuristics": 1}
    assert {row["status"] for row in rows} == {"ok"}
    anchors = pa.concat_tables(read(p, CONVOLUTION) for p in folder.glob("anchors-*")).to_pylist()
    assert [row["status"] for row in anchors] == ["ok"] * 4
