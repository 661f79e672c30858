"""`make kernels` goes on where it stopped, and trusts no result of another source or compiler."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import compile_kernels
import pytest
from compile_kernels import Kernel, Result, read_results, report
from layers import H100, first_kernel
from rich.console import Console

from confpred.cuda.compiler import nvrtc_version
from confpred.families.kernel_text import source_digest
from confpred.families.registry import all_families

FAMILY = all_families()["grouped_dgrad"]
SOURCE = first_kernel(FAMILY)
KERNEL = Kernel(FAMILY.name, SOURCE, source_digest(SOURCE.file), H100.arch, nvrtc_version())
DONE = Result(KERNEL, registers=128, stack_bytes=16)


def lines(*results: Result) -> str:
    return "".join(json.dumps(asdict(result)) + "\n" for result in results)


def test_what_is_read_is_what_was_written_less_failures_and_torn_lines(tmp_path):
    path = tmp_path / "results.jsonl"
    assert read_results(path) == {}
    older = Result(replace(KERNEL, nvrtc="1.0"), 99)
    failed = Result(replace(KERNEL, arch="sm_80"), error="no such\nname")
    whole = lines(older, Result(KERNEL, 1), failed, DONE)
    expected = {KERNEL: DONE, older.kernel: older}
    for torn in ("", lines(DONE)[:40], lines(DONE)[:-2]):
        path.write_text(whole + torn)
        assert read_results(path) == expected
        with path.open("a") as file:
            file.write("\n" + lines(Result(failed.kernel, 64)))
        assert read_results(path) == expected | {failed.kernel: Result(failed.kernel, 64)}


@pytest.mark.slow(reason="the command compiles in fresh processes, three times")
def test_a_second_run_compiles_what_is_missing_or_stale(tmp_path, capsys):
    path = tmp_path / "build" / "results.jsonl"
    words = f"--family {FAMILY.name} --arch {H100.arch} --sample 3 --jobs 1 --out {path}".split()

    def run(left: int) -> dict[Kernel, Result]:
        assert compile_kernels.main(words) == 0
        out = capsys.readouterr().out
        assert f"{left} of 3 results are not in" in out
        assert "3 kernels compiled, 0 did not" in out
        return read_results(path)

    first = run(left=3)
    assert len(first) == 3
    assert all(16 < result.registers <= 255 for result in first.values())
    one, two, three = first.values()
    other_source = replace(one, kernel=replace(one.kernel, digest="0" * 16))
    other_compiler = replace(two, kernel=replace(two.kernel, nvrtc="1.0"))
    path.write_text(lines(other_source, other_compiler) + lines(three)[:-5])
    assert run(left=3).items() >= first.items()
    path.write_text(lines(one, three))
    assert run(left=1) == first


def test_the_report_counts_by_family_and_target_and_shows_failures():
    console = Console(record=True, width=120)
    found = [DONE, Result(KERNEL, 64), Result(replace(KERNEL, arch="sm_80"), error="no_such_name")]
    assert report(found, console) == 1
    text = console.export_text()
    assert "2 kernels compiled, 1 did not" in text
    assert "no_such_name" in text
    (row,) = (line for line in text.splitlines() if H100.arch in line and FAMILY.name in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")][2:] == ["2", "128", "1", "16"]


@pytest.mark.slow(reason="all kernels of a family are listed")
def test_each_config_is_compiled_for_some_layers():
    kernels, _ = compile_kernels.kernels_of(FAMILY)
    fields = {name.upper() for name in FAMILY.configs.dtype.names}

    def configs(sources):
        return {tuple(d for d in source.defines if d[0] in fields) for source in sources}

    for count in (1, 2):
        some = compile_kernels.of_each_config(FAMILY, kernels, count)
        assert configs(some) == configs(kernels)
        assert len(set(some)) == len(some) <= count * len(configs(kernels))
