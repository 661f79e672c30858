"""``confpred sample`` and ``confpred merge`` as a user meets them, on a machine without a GPU."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import confpred, named
from sampler_rows import ROW, fill

from confpred.cli.sample import parse_duration, parse_part, sample
from confpred.data.parquet import read, schema
from confpred.errors import ConfpredError, InvalidInput
from confpred.problem.conv2d import CONVOLUTION
from confpred.sampler.progress import duration, state, summary
from confpred.sampler.run import Sampling, Tally
from confpred.training.dataset import data_files


def test_every_option_is_explained() -> None:
    """The help is the one list of them."""
    arguments = {"kernel"}  # the help's own text has it
    assert {p.name for p in sample.params if not getattr(p, "help", None)} == arguments


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def suite(repository: Path) -> Path:
    return repository / "datasets" / "suites" / "smoke.json"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "8"), "budget='8' is not allowed; allowed: a number above 0 with s, m or h"),
        (("--timeout", "0s"), "timeout='0s'"),
        (("--part", "0/4"), "part='0/4' is not allowed; allowed: I/N with I from 1 to N"),
        (("--address", "auto"), "address='auto' is not allowed; allowed: an option of --engine"),
        (("--device", "h100"), "device='h100' is not allowed; allowed: an option of --engine ray"),
        (("--engine", "ray", "--gpus", "0"), "gpus='0' is not allowed; allowed: all with"),
        (("--engine", "slurm"), "'slurm' is not one of 'local', 'ray'"),
        (("--out", "moon://a"), "folder='moon://a' is not allowed; allowed: a folder, or a URL"),
        (("--configs", "0"), "0 is not in the range"),
        (("--configs", "many"), "'many' is not a valid integer"),
        (("--jobs", "-1"), "-1 is not in the range"),
        (("--picked", "0"), "0 is not in the range"),
        (("--cudnn-mode", "fast"), "'fast' is not one of 'benchmark', 'heuristics'"),
        (("--anchors", "none.json"), "File 'none.json' does not exist"),
        (("--seed", "-1"), "-1 is not in the range"),
        (("--suite", "none.json"), "'--suite': File 'none.json' does not exist"),
        (
            ("--family", "grouped_fprop", "--family", "grouped"),
            "family='grouped' is not allowed; allowed: grouped_wgrad or grouped_fprop",
        ),
        (("--model", "none"), "none"),
        (("--model", "."), "model='.' is not allowed; allowed: a model that picks"),
    ],
)
def test_bad_options_are_named(suite, tmp_path, words, message):
    done = confpred("sample", "--suite", suite, "--out", tmp_path / "out", *words)
    named(done, message)
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_the_error_says_so(suite, tmp_path):
    done = confpred("sample", "--suite", suite, "--out", tmp_path / "out")
    said = "confpred: measuring needs an NVIDIA GPU, and no CUDA device can be used here\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.slow(reason="Ray starts")
def test_a_ray_without_a_gpu_is_an_error(suite, tmp_path):
    words = ("sample", "--suite", suite, "--out", tmp_path / "out", "--engine", "ray")
    done = confpred(*words, env=os.environ)
    said = "confpred: measuring needs an NVIDIA GPU, and the Ray cluster has none\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "cannot reach the Ray cluster at 127.0.0.1:1: "),
        ("auto", "cannot reach the Ray cluster at auto: "),
        ("ray://host:10001", "address='ray://host:10001' is not allowed; allowed: auto, or HOST"),
    ],
)
def test_a_ray_cluster_that_is_not_there_is_an_error(address, message):
    pytest.importorskip("ray")
    from confpred.sampler.fleet import Fleet

    with pytest.raises(ConfpredError, match=f"^{re.escape(message)}"):
        Fleet(Sampling(), address)


@pytest.mark.parametrize("target", ["all.parquet", "parts"])
def test_the_operation_is_supplied_where_another_program_dropped_it(tmp_path, target):
    """As pandas and polars write a file; DuckDB keeps the strings, and drops the metadata, too."""
    shards, out = tmp_path / "a", tmp_path / target
    fill(shards, [ROW])
    (shard,) = shards.glob("rows-*.parquet")
    table = pq.read_table(shard)
    large = [pa.large_string() if kind == pa.string() else kind for kind in table.schema.types]
    of_pandas = pa.schema(zip(table.schema.names, large, strict=True), {"pandas": "{}"})
    pq.write_table(table.cast(of_pandas), shard)
    done = confpred("merge", shards, out)
    assert done.returncode == 2
    assert f"{shard} lacks the metadata 'operation'" in done.stderr
    assert "confpred merge --operation conv2d" in done.stderr
    done = confpred("merge", "--operation", "conv2", shards, out)
    assert (done.returncode, "conv2d" in done.stderr) == (2, True)
    assert "is not a whole file" in confpred("merge", "--operation=batch_norm", shards, out).stderr
    assert not out.exists()
    assert confpred("merge", "--operation", "conv2d", shards, out).returncode == 0
    (file,) = data_files([out])
    assert read(file, CONVOLUTION).equals(table.cast(schema(CONVOLUTION)))
    fill(tmp_path / "c", [ROW])
    foreign = confpred("merge", "--operation", "batch_norm", tmp_path / "c", tmp_path / "d")
    assert "holds measurements of 'conv2d', not of 'batch_norm'" in foreign.stderr


def test_durations():
    assert [parse_duration("budget", text) for text in ("90s", "8m", "1.5h")] == [90, 480, 5400]


@pytest.mark.parametrize("text", ["", "8", "-1m", "nanm", "m", "1e3s", "8 m", "1h30m", "0m", "٣m"])
def test_bad_durations(text):
    with pytest.raises(InvalidInput, match="budget="):
        parse_duration("budget", text)


def test_parts():
    assert [parse_part(text) for text in ("1/1", "3/16", "16/16")] == [(1, 1), (3, 16), (16, 16)]


@pytest.mark.parametrize("text", ["0/4", "5/4", "x", "1/0", "1/2/3", "-1/2", "1", "1.5/2", "٣/4"])
def test_bad_parts(text):
    with pytest.raises(InvalidInput, match=r"part=.*I/N with I from 1 to N, such as 3/16"):
        parse_part(text)


def test_progress_says_rate_time_left_and_failures():
    tally = Tally(
        1000, 10, 50, rows=200, statuses=Counter(ok=190, timeout=2, wrong_result=8), elapsed_s=10.0
    )
    assert state(tally, None) == "20 rows/s, 40s left, 2 timeout, 8 wrong_result"
    assert state(tally, 15.0).startswith("20 rows/s, 5s left")
    assert state(Tally(), None) == ""
    assert [duration(s) for s in (0, 59.6, 3723)] == ["0s", "1m00s", "1h02m03s"]


def test_summary_gives_the_rate_of_measuring_alone():
    tally = Tally(1000, 10, 50, rows=200, tasks=2, kernels=40, elapsed_s=100.0)
    tally.measured_rows, tally.measuring_s = 200, 4.0
    text = summary(tally, Path("out"), 2)
    assert "200 of 1000 rows, 2 of 10 problems in 1m40s, 40 kernels" in text
    assert "100 rows/s once compiled, on 2 GPUs" in text
    assert "failures: none" in text
    assert text.endswith("measurements are in out")
