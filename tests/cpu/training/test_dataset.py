"""Measurement files become timings, or a clear error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic

from confpred.data.measurements import problem_of_row
from confpred.data.parquet import schema
from confpred.errors import DataError, UnknownDevice
from confpred.families.candidate import PYTORCH, Candidate
from confpred.families.registry import config_words
from confpred.problem.conv2d import Problem
from confpred.problem.conv2d_operation import CONVOLUTION
from confpred.training.dataset import read_dataset

ROWS = [r for r in synthetic.rows(networks=1, configs=6) if r["networks"]]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema(CONVOLUTION)), path)
    return path


def changed(index: int, **columns: object) -> list[dict[str, object]]:
    return [row | columns if i == index else row for i, row in enumerate(ROWS)]


def test_every_timed_row_is_there(tmp_path):
    dataset = read_dataset([write(tmp_path / "rows.parquet", ROWS)])
    expected = {
        (problem_of_row(row, Problem), row["config"]): row["time_ms"]
        for row in ROWS
        if row["status"] == "ok" and row["family"] != PYTORCH
    }
    found = {
        (t.problem, config_words(Candidate(t.family, int(row)))): ms
        for t in dataset.timings
        for row, ms in zip(t.rows, t.time_ms, strict=True)
    }
    assert found == expected
    assert dataset.rows == len(expected)
    assert dataset.pytorch_ms == {
        problem_of_row(row, Problem): row["time_ms"] for row in ROWS if row["family"] == PYTORCH
    }
    assert dataset.statuses == {
        status: sum(row["status"] == status for row in ROWS) for status in ("ok", "wrong_result")
    }
    assert dataset.skipped == 0
    assert dataset.device == synthetic.DEVICE
    assert {t.networks for t in dataset.timings} == {("net0",)}
    assert dataset.kernels == {"grouped_fprop": (ROWS[0]["source_digest"],)}


def test_files_and_order_do_not_matter(tmp_path):
    whole = read_dataset([write(tmp_path / "whole.parquet", ROWS)])
    folder = tmp_path / "shards"
    folder.mkdir()
    shuffled = [ROWS[i] for i in np.random.default_rng(0).permutation(len(ROWS))]
    for i in range(3):
        write(folder / f"rows-{i}.parquet", shuffled[i::3])
    assert read_dataset([folder]).digest == whole.digest
    other = write(tmp_path / "other.parquet", changed(0, time_ms=1.0))
    assert read_dataset([other]).digest != whole.digest


def test_repeated_measurements_are_combined_by_their_median(tmp_path):
    rows = [ROWS[0] | {"time_ms": ms} for ms in (1.0, 5.0, 2.0)]
    (timings,) = read_dataset([write(tmp_path / "rows.parquet", rows)]).timings
    assert timings.time_ms.tolist() == [2.0]


def test_networks_of_repeated_measurements_are_joined(tmp_path):
    rows = [ROWS[0] | {"networks": names} for names in ("b", "a,c", "")]
    (timings,) = read_dataset([write(tmp_path / "rows.parquet", rows)]).timings
    assert timings.networks == ("a", "b", "c")


@pytest.mark.parametrize(
    "columns",
    [
        {"family": "winograd"},
        {"config": "block_n=3"},
        {"config": ROWS[0]["config"] + " more=1"},
        {"groups": 1},  # a layer that the family does not handle
    ],
)
def test_rows_of_other_versions_are_left_out_and_counted(tmp_path, columns):
    dataset = read_dataset([write(tmp_path / "rows.parquet", changed(0, **columns))])
    assert dataset.skipped == 1
    assert dataset.rows == read_dataset([write(tmp_path / "all.parquet", ROWS)]).rows - 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"time_ms": float("nan")}, "row 0 has status ok, and a time that is not positive"),
        ({"time_ms": 0.0}, "a time that is not positive"),
        ({"time_ms": float("inf")}, "a time that is not positive"),
        ({"status": "fine"}, "row 0 has a status other than ok"),
        ({"c": None}, "row 0 has an empty field"),
        ({"c": -64}, "a measured problem is impossible: c=-64"),
        ({"dtype": "int4"}, "dtype='int4' is not allowed"),
    ],
)
def test_impossible_values_are_refused_by_name(tmp_path, columns, message):
    path = write(tmp_path / "rows.parquet", changed(0, **columns))
    with pytest.raises(DataError, match=message):
        read_dataset([path])


def damaged(path: Path) -> Path:
    whole = write(path, ROWS).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path


def foreign(path: Path) -> Path:
    pq.write_table(pa.table({"name": ["a"], "time_ms": [1.0]}), path)
    return path


def text(path: Path) -> Path:
    path.write_text("n,c,h\n1,2,3\n")
    return path


@pytest.mark.parametrize("make", [damaged, foreign, text, lambda path: path])
def test_files_that_are_not_ours_are_named(tmp_path, make):
    path = make(tmp_path / "strange.parquet")
    with pytest.raises(DataError, match=r"strange\.parquet"):
        read_dataset([path])


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(DataError, match=r"holds no \.parquet files"):
        read_dataset([tmp_path])


def test_data_of_several_devices_needs_a_choice(tmp_path):
    path = write(tmp_path / "rows.parquet", changed(0, device="a100"))
    with pytest.raises(DataError, match="a100 and h100: choose one device"):
        read_dataset([path])
    assert read_dataset([path], "a100").rows == 1
    with pytest.raises(DataError, match="no measurements of h200"):
        read_dataset([path], "h200")
    with pytest.raises(UnknownDevice):
        read_dataset([write(path, changed(0, device="tpu"))], "tpu")


def test_failures_alone_are_nothing_to_learn_from(tmp_path):
    rows = [row for row in ROWS if row["status"] != "ok"]
    with pytest.raises(DataError, match="nothing to learn from"):
        read_dataset([write(tmp_path / "rows.parquet", rows)])
