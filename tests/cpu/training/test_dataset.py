"""Measurement files become timings, or a clear error."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic

from confpred.data.measurements import problem_of_row
from confpred.data.parquet import read, schema
from confpred.errors import DataError, UnknownDevice
from confpred.families.protocol import PYTORCH, Candidate
from confpred.families.registry import config_words
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.training.dataset import data_files, read_dataset

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


def test_repeated_measurements_of_pytorchs_operator_are_too(tmp_path):
    theirs = next(row for row in ROWS if row["family"] == PYTORCH)
    rows = [*ROWS, *(theirs | {"time_ms": theirs["time_ms"] * times} for times in (4, 9))]
    found = read_dataset([write(tmp_path / "rows.parquet", rows)]).pytorch_ms
    assert 4 * theirs["time_ms"] in found.values()


def test_networks_of_repeated_measurements_are_joined(tmp_path):
    rows = [ROWS[0] | {"networks": names} for names in ("b", "a,c", "")]
    (timings,) = read_dataset([write(tmp_path / "rows.parquet", rows)]).timings
    assert timings.networks == ("a", "b", "c")


def test_rows_of_configs_that_are_not_legal_are_left_out_and_counted(tmp_path):
    rows = changed(0, groups=1)  # a layer that the family does not handle
    dataset = read_dataset([write(tmp_path / "rows.parquet", rows)])
    assert dataset.skipped == 1
    assert dataset.rows == read_dataset([write(tmp_path / "all.parquet", ROWS)]).rows - 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"time_ms": float("nan")}, "time_ms=nan is not allowed; allowed: a number above 0 where"),
        ({"time_ms": None}, "time_ms is missing; allowed: a number above 0 where"),
        ({"time_ms": 0.0}, "time_ms=0.0 is not allowed; allowed: a number above 0 where"),
        ({"time_ms": float("inf")}, "time_ms=inf is not allowed"),
        ({"status": "fine"}, "status='fine' is not allowed; allowed: ok or illegal or"),
        ({"status": None}, "status is missing; allowed: a value in every row"),
        ({"c": None}, "c is missing; allowed: a value in every row"),
        ({"c": -64}, "c=-64 is not allowed; allowed: an integer from 1 to 65536"),
        ({"dtype": "int4"}, "dtype='int4' is not allowed; allowed: float16 or"),
        ({"k": 65}, "k=65 is not allowed; allowed: a multiple of groups="),
        ({"family": "grouped_frop"}, "family='grouped_frop' .* the nearest is 'grouped_fprop'"),
        ({"family": "linear_chain"}, "family='linear_chain' is not allowed; allowed: pytorch or"),
        (
            {"config": "block_n=3"},
            "config='block_n=3' .* a config of this .* grouped_fprop;",
        ),
        (
            {"config": ROWS[3]["config"] + "7"},
            f"config='.* is not allowed; .* the nearest is '{ROWS[3]['config']}'",
        ),
        ({"family": PYTORCH}, "config='.* is not allowed; allowed: a config of this .* pytorch;"),
        ({"family": "winograd", "status": "illegal"}, "family='winograd' is not allowed"),
    ],
)
def test_impossible_values_are_refused_by_place_and_name(tmp_path, columns, message):
    """The second of two files, so that rows are counted from the start of their own."""
    first = write(tmp_path / "first.parquet", ROWS)
    second = write(tmp_path / "second.parquet", changed(3, **columns))
    with pytest.raises(DataError, match=rf"second\.parquet: row 3: {message}"):
        read_dataset([first, second])


def test_a_problem_that_is_impossible_is_named_by_its_first_row(tmp_path):
    rows = [row | {"s": 0} if i in (4, 5) else row for i, row in enumerate(ROWS)]
    path = write(tmp_path / "rows.parquet", rows)
    with pytest.raises(DataError, match="row 4: s=0 is not allowed"):
        read_dataset([path])


def test_times_of_pytorch_are_in_the_order_of_the_files(tmp_path):
    """The model of PyTorch's operator depends on the order of its problems."""
    rows = list(synthetic.rows(networks=4, configs=2))
    problems = dict.fromkeys(problem_of_row(row, Problem) for row in rows)
    dataset = read_dataset([write(tmp_path / "rows.parquet", rows)])
    assert list(dataset.pytorch_ms) == list(problems)


def test_spreads_that_are_missing_do_not_count(tmp_path):
    rows = [ROWS[0] | {"spread_ms": ms} for ms in (float("nan"), 1.0, 3.0)]
    rows += [ROWS[1] | {"spread_ms": float("nan")} for _ in range(2)]
    (timings,) = read_dataset([write(tmp_path / "rows.parquet", rows)]).timings
    assert sorted(timings.spread_ms.tolist(), key=repr) == [2.0, pytest.approx(np.nan, nan_ok=True)]


def foreign(path: Path) -> None:
    pq.write_table(pa.table({"name": ["a"], "time_ms": [1.0]}), path)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(write(path, ROWS).read_bytes()[:2000]),
        foreign,
        lambda path: path.write_text("n,c,h\n1,2,3\n"),
        lambda path: None,
    ],
    ids=["damaged", "foreign", "text", "missing"],
)
def test_files_that_are_not_ours_are_named(tmp_path, make):
    make(tmp_path / "strange.parquet")
    with pytest.raises(DataError, match=r"strange\.parquet"):
        read_dataset([tmp_path / "strange.parquet"])


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(DataError, match=r"holds no \.parquet files"):
        read_dataset([tmp_path])


def test_control_configs_of_the_sampler_teach_nothing(tmp_path):
    for name in ("rows-1", "anchors-1", "part-1"):
        (tmp_path / f"{name}.parquet").touch()
    names = [file.stem for file in data_files([tmp_path])]
    assert names == ["part-1", "rows-1"]
    assert len(data_files([tmp_path], anchors=True)) == 3


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


@pytest.mark.slow(reason="all committed measurements are read")
def test_the_committed_rows_are_read_as_columns(repository: Path) -> None:
    """All of them, with every check, in a small multiple of the processor's time that it
    takes to decode the file: 6 times; row by row it was 80 times."""
    path = repository / "datasets" / "h200" / "part-2026-11-23.parquet"
    read_dataset([path])  # loads the families, and Arrow's code
    begun = time.process_time()
    read(path, CONVOLUTION)
    decoded = time.process_time()
    assert sum(read_dataset([path]).statuses.values()) == 291_387
    assert time.process_time() - decoded < 25 * (decoded - begun)
