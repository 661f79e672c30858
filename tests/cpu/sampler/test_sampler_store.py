"""Shards on a real disk: whole or absent, locked, complete, and described by their README."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sampler_rows import LAYER, ROW, RUN, fill, other
from shared import room_for

from confpred.data.measurements import problem_of_row
from confpred.data.parquet import (
    add_part,
    merge,
    operation_in,
    read,
    schema,
)
from confpred.errors import DataError, FolderBusy, InvalidInput, StorageError
from confpred.families.registry import config_ids
from confpred.problem.conv import CONV
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.sampler.store import FLUSH_ROWS, open_store
from confpred.sampler.tasks import RowKey
from confpred.training.dataset import data_files


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Return a file of one row."""
    fill(tmp_path, [ROW])
    (path,) = tmp_path.glob("rows-*.parquet")
    return path


def test_a_row_comes_back_as_it_was(shard):
    assert read(shard, CONVOLUTION).to_pylist() == [ROW.to_row()]
    assert problem_of_row(read(shard, CONVOLUTION).to_pylist()[0], Problem) == LAYER
    assert list(ROW.to_row()) == schema(CONVOLUTION).names


def test_the_readme_lists_exactly_the_columns(repository):
    text = (repository / "datasets" / "README.md").read_text()
    every, further = (
        re.findall(r"^\| `(\w+)` \| (\w+) \| [^|]*\| [^|]+ \|$", part, re.MULTILINE)
        for part in text.split("### Convolutions of any rank")
    )
    own, of_conv = ([(f.name, str(f.type)) for f in schema(o)] for o in (CONVOLUTION, CONV))
    assert every == own
    assert sorted(further) == sorted({*of_conv} - {*own})


def test_the_readme_tells_of_every_file(repository):
    folder = repository / "datasets"
    text = " ".join((folder / "README.md").read_text().split())
    measured = ("h100", "h200", "holdout/h100", "holdout/h200", "holdout/dense/h200")
    for name in measured:
        rows = sum(pq.read_metadata(path).num_rows for path in (folder / name).glob("*.parquet"))
        assert f"| `{name}` | {rows:,} |" in text
    names = ["networks.json", *(f"suites/{p.name}" for p in folder.glob("suites/*.json"))]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_shards_are_compressed_and_dictionary_encoded(tmp_path):
    fill(tmp_path, [other(n) for n in range(1, 300)])
    (path,) = tmp_path.glob("rows-*.parquet")
    columns = pq.ParquetFile(path).metadata.row_group(0)
    for index in range(columns.num_columns):
        column = columns.column(index)
        assert column.compression == "ZSTD"
        assert column.physical_type == "BOOLEAN" or column.has_dictionary_page


def test_rows_wait_for_a_shard_of_some_size(tmp_path):
    with open_store(tmp_path, "r", CONVOLUTION) as store:
        store.add([ROW])
        store.flush(only_if_due=True)
        assert not list(tmp_path.glob("rows-*"))
        store.add([ROW] * FLUSH_ROWS)
        store.flush(only_if_due=True)
        assert len(list(tmp_path.glob("rows-*"))) == 1
        store.flush()
        assert len(list(tmp_path.glob("rows-*"))) == 1, "nothing is left to write"


def test_what_a_killed_sampler_was_writing_is_removed(tmp_path):
    """Also its control configs; a file that another command writes there stays."""
    for name in ("rows-x", "anchors-x", "merged"):
        (tmp_path / f".{name}.parquet.1.tmp").write_bytes(b"half")
    with open_store(tmp_path, "r", CONVOLUTION):
        assert [path.name for path in tmp_path.glob(".*.tmp")] == [".merged.parquet.1.tmp"]


def test_measured_configs_are_found_by_device_and_kernel(tmp_path):
    rows = [
        ROW,
        other(2, config_id=4),
        other(3, status="timeout"),
        other(3, source_digest="e" * 16),
    ]
    elsewhere = other(4, run=replace(RUN, device="a100"))
    fill(tmp_path, rows[:2], [*rows[2:], elsewhere])
    with open_store(tmp_path, "r", CONVOLUTION) as store:
        found = store.measured("h100")
    three, words = replace(LAYER, n=3), list(config_ids("grouped_fprop"))
    assert found == {
        RowKey(LAYER, "grouped_fprop", "f" * 16): {words[3], words[4]},
        RowKey(three, "grouped_fprop", "f" * 16): {words[3]},
        RowKey(three, "grouped_fprop", "e" * 16): {words[3]},
    }


HOLD = """
    import sys
    from pathlib import Path
    from confpred.problem.conv2d import CONVOLUTION
    from confpred.sampler.store import open_store
    with open_store(Path(sys.argv[1]), "a", CONVOLUTION):
        print("held", flush=True)
        sys.stdin.read()
"""


def test_a_folder_is_held_by_one_process_and_freed_by_its_death(tmp_path):
    program = [sys.executable, "-c", textwrap.dedent(HOLD), str(tmp_path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(FolderBusy, match=str(tmp_path)), open_store(tmp_path, "b", CONVOLUTION):
            pass
        holder.kill()
        holder.wait()
        with open_store(tmp_path, "b", CONVOLUTION) as store:
            assert store.measured("h100") == {}


def test_a_full_disk_is_an_error_that_leaves_nothing_half_written(tmp_path):
    with open_store(tmp_path, "r", CONVOLUTION) as store:
        store.add([ROW])
        store.flush()
        store.add([other(n, message=f"{n} " * n) for n in range(1, 300)])
        full = pytest.raises(StorageError, match=f"cannot write {tmp_path}.*File too large")
        with room_for(2_000), full:
            store.flush()
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "rows-r-00000.parquet"]
        store.flush()
    assert read(tmp_path / "rows-r-00000.parquet", CONVOLUTION).to_pylist() == [ROW.to_row()]
    assert read(tmp_path / "rows-r-00001.parquet", CONVOLUTION).num_rows == 299, "nothing is lost"


def test_a_folder_that_is_a_file_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StorageError, match="cannot use"),
        open_store(tmp_path / "file", "r", CONVOLUTION),
    ):
        pass


WRONG = {
    "text": ("n", pa.array(["many"])),
    "wrong type": ("time_ms", pa.array([[1.0]])),
    "no UTF-8": ("config", pa.array([b"\xff"]).view(pa.string())),
}


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign", *WRONG])
def test_a_damaged_shard_is_named(tmp_path, shard, damage):
    table = read(shard, CONVOLUTION)
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
        refused = pytest.raises(DataError, match=shard.name)
        with open_store(tmp_path, "r", CONVOLUTION) as store, refused:
            store.measured("h100")
    elif damage == "empty":
        shard.write_bytes(b"")
    elif damage == "foreign":
        pq.write_table(pa.table({"x": [1]}), shard)
    else:
        name, values = WRONG[damage]
        pq.write_table(table.set_column(table.column_names.index(name), name, values), shard)
    with pytest.raises(DataError, match=shard.name):
        read(shard, CONVOLUTION)
    with pytest.raises(DataError, match=shard.name):
        merge([tmp_path], tmp_path / "merged.parquet")
    assert not (tmp_path / "merged.parquet").exists()


def test_any_changed_byte_is_found_or_changes_nothing(tmp_path):
    """Data pages carry checksums; what they do not cover is structure, padding and statistics."""
    fill(tmp_path, [other(n, message=f"{n} " * n) for n in range(1, 60)])
    (path,) = tmp_path.glob("rows-*.parquet")
    whole, table = path.read_bytes(), read(path, CONVOLUTION)
    refused = 0
    for at in range(0, len(whole), 41):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            assert read(path, CONVOLUTION).equals(table)
        except DataError:
            refused += 1
    assert refused > 50


def test_merge_sorts_the_rows_of_all_folders(tmp_path):
    fill(tmp_path / "a", [other(3), other(1, config_id=9)], [other(1)])
    fill(tmp_path / "b", [other(2)])
    file = tmp_path / "merged.parquet"
    assert merge([tmp_path / "a", tmp_path / "b"], file) == 4
    rows = read(file, CONVOLUTION).to_pylist()
    words = config_ids("grouped_fprop")
    found = [(row["n"], words[row["config"]]) for row in rows]
    assert sorted(found) == [(1, 3), (1, 9), (2, 3), (3, 3)]
    assert [n for n, _ in found] == [1, 1, 2, 3]
    assert rows[0]["config"] < rows[1]["config"]
    again = file.read_bytes()
    merge([tmp_path / "b", tmp_path / "a"], file)
    assert file.read_bytes() == again


def test_a_folder_of_parts_gets_what_no_part_has(tmp_path):
    parts = tmp_path / "h100"
    fill(tmp_path / "a", [other(3), other(1)])
    first, rows = add_part([tmp_path / "a"], parts)
    assert re.fullmatch(r"part-\d{4}-\d\d-\d\d\.parquet", first.name)
    assert rows == 2
    before = first.read_bytes()
    assert add_part([tmp_path / "a"], parts) is None, "nothing is new"
    again = other(1, time="2026-01-03T00:00:00+00:00")  # the same config, timed another day
    fill(tmp_path / "b", [other(3), other(2), again, other(1)])
    second, rows = add_part([tmp_path / "a", tmp_path / "b"], parts)
    fill(tmp_path / "c", [other(9, time_ms=math.nan, status="timeout")])
    third, last = add_part([tmp_path / "c"], parts)
    assert (rows, last) == (2, 1)
    assert sorted(parts.iterdir()) == data_files([parts]) == [first, second, third]
    assert first.read_bytes() == before
    assert [row["n"] for row in read(second, CONVOLUTION).to_pylist()] == [1, 2]
    assert operation_in(second) == CONVOLUTION.name
    assert add_part([tmp_path / name for name in "abc"], parts) is None
    assert merge([parts], tmp_path / "all.parquet") == 5, "parts are joined as shards are"


def test_parts_of_a_day_are_in_the_order_of_their_names(tmp_path):
    made = []
    for n in range(1, 13):
        fill(tmp_path / str(n), [other(n)])
        made.append(add_part([tmp_path / str(n)], tmp_path / "parts")[0])
    assert made == data_files([tmp_path / "parts"])


def test_anchors_are_added_with_each_time_that_they_were_measured(tmp_path):
    with open_store(tmp_path / "a", "r", CONVOLUTION) as store:
        store.add([ROW, ROW], anchors=True)
        store.flush()
    assert add_part([tmp_path / "a"], tmp_path / "parts", anchors=True)[1] == 2
    assert add_part([tmp_path / "a"], tmp_path / "parts", anchors=True) is None


def test_a_samplers_folder_gets_no_parts(tmp_path):
    fill(tmp_path / "a", [ROW])
    fill(tmp_path / "b", [other(1)])
    before = sorted((tmp_path / "b").iterdir())
    with pytest.raises(InvalidInput, match="without a sampler's shards"):
        add_part([tmp_path / "a"], tmp_path / "b")
    assert sorted((tmp_path / "b").iterdir()) == before


def test_merging_nothing_is_an_error(tmp_path):
    with pytest.raises(DataError, match="holds no measurements"):
        merge([tmp_path], tmp_path / "x.parquet")
    with pytest.raises(InvalidInput, match="a folder of measurements"):
        merge([tmp_path / "none"], tmp_path / "x.parquet")


def test_a_file_of_before_the_columns_of_cudnn_is_read(shard):
    now = read(shard, CONVOLUTION)
    pq.write_table(now.drop_columns(["cudnn", "cudnn_mode"]), shard)
    assert read(shard, CONVOLUTION).equals(now)
    assert read(shard, CONVOLUTION, ["n", "cudnn"]).to_pylist() == [{"n": 2, "cudnn": ""}]
