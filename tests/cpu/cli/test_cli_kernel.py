"""``confpred kernel`` where there is no GPU: it compiles, names mistakes, and says the command of a
profiler."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command_line import confpred, named, worked
from layers import H100
from slow import slow_but

from confpred.cli.kernel import _compile_with_lines, _row
from confpred.cuda import compiler
from confpred.cuda.cache import KernelCache
from confpred.families.protocol import Candidate
from confpred.families.registry import all_families, config_ids, config_words
from confpred.measure.timing import Outcome, Status
from confpred.problem.conv2d import Problem

WORDS = "n=8 c=64 h=28 w=28 k=64 r=3 s=3 padding=1 groups=8"
LAYER = ("--layer", WORDS)
CHAIN = ("--layer", "batch=16 inputs=128 hidden=64 outputs=64 layers=2")
FAMILY = all_families()["grouped_fprop"]


@pytest.mark.parametrize(
    "name",
    slow_but(["row_norm"], ["grouped_fprop", "depthwise_wgrad", "line_wgrad"], "kernels compile"),
)
def test_check_compiles_where_there_is_no_gpu(name: str) -> None:
    done = worked("kernel", name, "check")
    assert re.match(rf"{name}: ok; 8 layers, \d+ kernels compiled for sm_90a\n", done.stdout)
    assert done.stderr == f"{name}: no config was run: this machine has no such GPU\n"


def test_check_is_of_the_layer_that_is_given() -> None:
    done = worked("kernel", FAMILY.name, "check", *LAYER)
    assert done.stdout.startswith("grouped_fprop: ok; 1 layers, ")
    wrong = confpred("kernel", "grouped_wgrad", "check", *LAYER)
    assert wrong.returncode == 1
    assert wrong.stdout.startswith("grouped_wgrad: legal: no config is legal for any of 1 problems")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("grouped_fprp", "check"), "family='grouped_fprp' is not allowed; allowed: grouped_fprop"),
        (("cudnn", "check"), "family='cudnn' is not allowed"),
        (("grouped_fprop", "tame"), "'tame' is not one of 'check', 'time', 'profile'"),
        (("grouped_fprop", "check", "--lineinfo"), "--lineinfo are for time and profile"),
        (("linear_epilogue", "profile", *CHAIN), "allowed: a family with kernels of its own"),
        (("grouped_fprop", "time"), "time needs a layer: --layer WORDS"),
        (("grouped_fprop", "profile"), "profile needs a layer: --layer WORDS"),
        (("grouped_fprop", "time", *LAYER), "no CUDA device can be used here"),
        (("grouped_fprop", "time", *LAYER, "--device", "gpu"), "such as cuda:0"),
        (("grouped_fprop", "time", "--layer", "n=0"), "is not allowed"),
        (("grouped_wgrad", "profile", *LAYER), "allowed: a layer that grouped_wgrad has a config"),
        (("grouped_fprop", "profile", *LAYER, "--config", "stages=9"), "allowed: block_n="),
    ],
)
def test_a_mistake_is_named(words: tuple[str, ...], message: str) -> None:
    named(confpred("kernel", *words), message)


def test_without_ncu_its_command_is_said() -> None:
    done = confpred("kernel", FAMILY.name, "profile", *LAYER, "--lineinfo")
    assert done.returncode == 1
    assert "ncu of Nsight Compute is not installed" in done.stderr
    words = shlex.split(done.stdout)
    assert words[0] == "ncu"
    assert words[words.index("--kernel-name") + 1] == "regex:^(grouped_rows)$"
    timed = words[words.index("confpred") :]
    assert timed[:4] == ["confpred", "kernel", "grouped_fprop", "time"]
    assert timed[timed.index("--layer") + 1] == str(Problem.parse(WORDS))
    assert timed[-1] == "--lineinfo"


def test_the_config_is_the_one_given_or_the_best_of_the_family() -> None:
    problem = Problem.parse(WORDS)
    row = _row(FAMILY, problem, None, H100)
    assert FAMILY.legal(problem, H100)[row]
    for other in (row, row + 1):
        words = config_words(Candidate(FAMILY.name, other))
        if FAMILY.legal(problem, H100)[other]:
            assert _row(FAMILY, problem, words, H100) == other
    # A family that no model knows goes by its estimate.
    wide = Problem.parse("n=2 c=48 h=14 w=14 k=48 r=3 s=3 padding=1 groups=2")
    assert all_families()["anywidth_fprop"].legal(wide, H100)[
        _row(all_families()["anywidth_fprop"], wide, None, H100)
    ]


@pytest.mark.parametrize("status", ["ok", "wrong_result"])
def test_time_says_floor_and_share(monkeypatch: pytest.MonkeyPatch, status: Status) -> None:
    def measured(problem: Problem, family: object, rows: list[int], **_: object) -> list[Outcome]:
        return [Outcome(rows[0], status, 0.02, 0.001, registers=64, message="3 elements are off")]

    # There is no GPU: its description, and a time on it.
    monkeypatch.setattr("confpred.cli.kernel._gpu", lambda _: (0, H100))
    monkeypatch.setattr("confpred.measure.kernels.measure", measured)
    done = confpred("kernel", FAMILY.name, "time", *LAYER)
    if status != "ok":
        named(done, "grouped_fprop: wrong_result: 3 elements are off", 1)
        return
    floor_ms = H100.roofline_s(Problem.parse(WORDS)) * 1e3
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert facts["family"] == "grouped_fprop on NVIDIA H100 80GB HBM3"
    assert facts["config"] in config_ids(FAMILY.name)
    assert facts["floor"] == f"{floor_ms:.4f} ms, by bytes"
    assert facts["share"] == f"{floor_ms / 0.02:.0%} of the floor"


def test_lines_are_known_and_change_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CONFPRED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    problem = Problem.parse(WORDS)
    launch = FAMILY.launch(problem, _row(FAMILY, problem, None, H100))
    (spec,) = launch.kernels
    key = compiler.cache_entry(spec, H100.arch)
    plain = compiler.compile_kernel(spec, H100.arch, KernelCache(tmp_path / "plain")).cubin
    try:
        _compile_with_lines(launch, H100.arch)
        (folder,) = tmp_path.glob("confpred-lines-*")
        lined = compiler.compile_kernel(spec, H100.arch)
        other = FAMILY.operation.reference(problem, "out").kernel
        assert compiler.read_bundled(other, H100.arch) is None
    finally:
        for bundle in compiler._opened:
            compiler.close_kernels(bundle)
    assert lined.cached
    assert caplog.records == []  # a reference is never in it
    for word in (str(folder).encode(), b"grouped_rows.cu"):
        assert word in lined.cubin
        assert word not in plain
    assert (folder / "grouped_rows.cu").read_text() == compiler.file_text("grouped_rows.cu")
    assert compiler.cache_entry(spec, H100.arch) == key
    assert not list(tmp_path.glob("cache/**/*.cubin"))
    assert compiler.compile_kernel(spec, H100.arch, KernelCache(tmp_path / "plain")).cubin == plain
