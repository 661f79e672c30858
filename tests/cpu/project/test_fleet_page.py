"""docs/fleet.md: its commands and job files run as far as a machine without a GPU goes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml
from test_readme import FENCED, Block, run, said

PAGE = (Path(__file__).parents[3] / "docs" / "fleet.md").read_text(encoding="utf-8")
BLOCKS = {block.mark: block for block in (Block(*found) for found in FENCED.findall(PAGE))}
MOST_WORDS = 900
_PROBLEMS = re.compile(r"^(\d+) problems on h200", re.MULTILINE)


@pytest.fixture
def folder(repository: Path, tmp_path: Path) -> Path:
    (tmp_path / "datasets").symlink_to(repository / "datasets")
    return tmp_path


def problems(out: str) -> list[int]:
    return [int(number) for number in _PROBLEMS.findall(out)]


def test_the_page_is_short_and_each_block_is_run_here() -> None:
    assert len(PAGE.split()) <= MOST_WORDS
    marks = ("parts", "slurm", "kubernetes", "install", "head", "driver")
    assert set(BLOCKS) == {f"run: {mark}" for mark in marks}


@pytest.mark.slow(reason="a suite is planned in five processes")
def test_parts_share_the_problems(folder: Path) -> None:
    whole = "confpred sample --suite datasets/suites/smoke.json --out runs/all --plan h200"
    (every,) = problems(said(run(whole, folder)))
    assert sum(problems(said(run(BLOCKS["run: parts"].text, folder)))) == every


@pytest.mark.slow(reason="a part of a suite is planned")
def test_a_task_of_the_slurm_array_plans_its_part(folder: Path) -> None:
    script = BLOCKS["run: slurm"].text
    (last,) = re.findall(r"--array=1-(\d+)", script)
    assert f"/{last}" in script
    done = run(script.rstrip() + " --plan h200\n", folder, SLURM_ARRAY_TASK_ID="3")
    (some,) = problems(said(done))
    assert some > 0


@pytest.mark.slow(reason="a part of a suite is planned")
def test_a_pod_of_the_kubernetes_job_plans_its_part(folder: Path) -> None:
    job = yaml.safe_load(BLOCKS["run: kubernetes"].text)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    assert container["command"] == ["sh", "-ec"]
    assert f"/{job['spec']['completions']}" in script
    assert job["spec"]["completionMode"] == "Indexed"
    plan = script.replace("s3://bucket", "memory://bucket") + " --plan h200"
    (some,) = problems(said(run(plan, folder, JOB_COMPLETION_INDEX="15")))
    assert some > 0


def test_the_extra_is_there() -> None:
    """`test_readme.py` runs such a command."""
    (extras,) = re.findall(r"^pip install -e '\.\[([a-z,]+)\]'$", BLOCKS["run: install"].text, re.M)
    assert set(extras.split(",")) <= set(metadata("confpred").get_all("Provides-Extra"))


@pytest.mark.slow(reason="a Ray cluster starts and ends")
def test_a_cluster_with_a_token_takes_who_has_it(folder: Path) -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    start = BLOCKS["run: head"].text.replace("6379", port)
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # names of sockets may not be long
        own = {"HOME": str(folder), "RAY_TMPDIR": short}
        with subprocess.Popen(
            ["sh", "-ec", start],
            cwd=folder,
            env=environment(own),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as head:
            try:
                for line in head.stdout:
                    if "--block" in line:
                        break
                driver = BLOCKS["run: driver"].text.replace("auto", f"127.0.0.1:{port}")
                found = run(driver, folder, **own)
                assert "the Ray cluster has none" in found.stderr  # it has no GPU, and is reached
                refused = run(driver, folder, **own | {"RAY_AUTH_TOKEN": "0" * 64})
                assert "cannot reach the Ray cluster" in refused.stderr
                assert "its token is that of RAY_AUTH_TOKEN" in refused.stderr
            finally:
                os.killpg(head.pid, signal.SIGKILL)  # it would drain for long


def environment(own: dict[str, str]) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""} | own
