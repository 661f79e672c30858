"""``confpred sample --submit``: a real command and a real service, and a GPU that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import sampler_run
from served import eventually, running
from shared import python_says

from confpred.data.suites import write_suite


@pytest.mark.slow(reason="a service, its keeper and a sampler start")
def test_shards_are_sent_while_others_are_measured(tmp_path: Path) -> None:
    """Times are made up in place of the measurement; it waits for a shard to be sent."""
    suite, out = tmp_path / "suite.json", tmp_path / "out"
    write_suite(sampler_run.suite_of(4), suite)
    script = Path(sampler_run.__file__).with_name("submit_run.py")
    with running(tmp_path, "--exchange", str(tmp_path / "exchange")) as server:
        words = ("sample", "--suite", suite, "--out", out, "--submit", server.url, "--jobs", "0")
        more = ("--no-pytorch", "--configs", "3", "--family", "grouped_fprop")
        python_says(script, *words, *more, SENT=str(out / ".submitted"))
        assert [row["status"] for row in sampler_run.rows(out)] == ["ok"] * 12
        shards = sorted(path.name for path in out.glob("rows-*.parquet"))
        assert sorted((out / ".submitted").read_text().split()) == shards

        def rows() -> int:
            listed = server.get("/v1/measurements").json()["measurements"]
            return sum(each["rows"] for each in listed)

        eventually(lambda: rows() == 12, server.said)
    assert len(shards) > 1
