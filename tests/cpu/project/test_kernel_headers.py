"""The kernels explain themselves: headers, measured shares, and headings in long bodies."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from layers import H100

from benchmarks.kernels import shares
from benchmarks.provenance import DATASETS, RESULTS
from confpred.families.kernel_text import meaning
from confpred.families.registry import all_families
from confpred.measure.contract import _random_problems

#: Kernels too small for a drawing: sums of what blocks left, and the epilogue's twin.
SMALLEST = {"depthwise_wgrad_sum", "grouped_wgrad_sum", "row_norm_sum", "scale_shift"}
SERVING = [
    path
    for path in sorted(shares.KERNELS.glob("*.cu"))
    if path.stem not in {"rates", *SMALLEST} and not path.stem.startswith("reference")
]
LONGEST = 150  # lines of a body without headings
SECTION = 100  # lines below a heading
HEADING = re.compile(r"^ {4,}// ---- \w.*$", re.MULTILINE)


def result() -> dict[str, object]:
    return json.loads((RESULTS / f"{shares.NAME}.json").read_text())


def header(path: Path) -> str:
    return re.match(r"(?://.*\n)*", path.read_text(encoding="utf-8"))[0]


def headers(name: str) -> str:
    """Return the header of a kernel and those of what it includes."""
    text = (shares.KERNELS / name).read_text(encoding="utf-8")
    included = re.findall(r'^#include "([\w.]+)"', text, re.MULTILINE)
    return "".join([header(shares.KERNELS / name), *map(headers, included)])


@pytest.mark.parametrize("path", SERVING, ids=lambda path: path.stem)
def test_a_header_has_its_parts(path: Path) -> None:
    text = header(path)
    labels = ("Parts:", "Bound: ", "Instructions: ", "Share of the floor:")
    places = [text.find(f"\n// {label}") for label in labels]
    assert places[0] > 0
    assert places == sorted(places)
    assert re.search(r"^//   block   .+\n(?:// .+\n)*//   (?:row|thread|warp) +\w", text, re.M)
    drawings = [
        line for line in headers(path.name).splitlines() if re.match(r"//  .*[|+\[<]", line)
    ]
    assert len(drawings) >= 2
    assert re.search(r"^// .* = |^// Formulas: ", text, re.MULTILINE)
    assert shares.block(path.name, result()) in text


@pytest.mark.parametrize("path", sorted(shares.KERNELS.glob("*.cu*")), ids=lambda path: path.name)
def test_a_source_begins_with_a_sentence(path: Path) -> None:
    assert re.match(r"// [A-Z].*\n", path.read_text(encoding="utf-8"))


@cache
def names_of_macros() -> dict[str, set[str]]:
    """Return the macros that launches of random problems give each kernel."""
    found: dict[str, set[str]] = {}
    for family in all_families().values():
        for problem in _random_problems(family.operation.problem)[:100]:
            for row in np.flatnonzero(family.legal(problem, H100))[:1]:
                for step in family.launch(problem, int(row)).steps:
                    found.setdefault(step.kernel.file, set()).update(dict(step.kernel.defines))
    return found


def test_a_header_names_what_is_compiled_in() -> None:
    serving, read = {path.name for path in SERVING}, 0
    for kernel, names in names_of_macros().items():
        text = headers(kernel)
        for name in (name for name in names if not name.startswith("HOST_")):
            plain = re.sub(r"_[DHW]$", "", name)
            assert kernel not in serving or re.search(rf"\b{plain}", text), (kernel, name)
            read += 1
    assert read > 100


def test_shares_are_those_of_the_result() -> None:
    assert shares.stale(result()) == {}
    path = SERVING[0]
    stale = path.read_text().replace(
        shares.block(path.name, result()), "// Share of the floor: 1\n"
    )
    assert shares.filled(path.name, stale, result()) == path.read_text()


def test_the_result_is_of_the_committed_measurements() -> None:
    found = shares.shares([DATASETS / "holdout" / "group_norm" / "h200"])["families"]
    assert found
    assert {name: result()["families"][name] for name in found} == found


@pytest.mark.slow(reason="it reads all measurements")
def test_the_whole_result_is_of_the_committed_measurements() -> None:
    assert shares.shares() == result()


def test_shares_count_the_layers_of_the_most_bytes() -> None:
    fewer = set()
    for name, family in result()["families"].items():
        shown = [layer["share"] for layer in family["layers"]]
        problems = {layer["problem"] for layer in family["layers"]}
        assert 1 < len(problems) == len(shown)
        if len(shown) != len(shares.QUANTILES):
            fewer.add(name)
        assert shown == sorted(shown)
        assert 0 < shown[0] <= shown[-1] < 1.1
        for layer in family["layers"]:
            assert layer["share"] == pytest.approx(layer["floor_ms"] / layer["time_ms"], rel=0.02)
    assert fewer == {"dense_volume_fprop"}  # two layers of its hold-out


def bodies(text: str) -> list[str]:
    return re.findall(r"__global__.*?\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", sorted(shares.KERNELS.glob("*.cu")), ids=lambda path: path.stem)
def test_a_long_body_has_headings(path: Path) -> None:
    found = bodies(path.read_text(encoding="utf-8"))
    assert found
    for body in found:
        if body.count("\n") > LONGEST:
            sections = HEADING.split(body)
            assert len(sections) > 3
            assert max(section.count("\n") for section in sections) <= SECTION


def test_comments_do_not_count_in_a_kernel() -> None:
    for path in SERVING:
        text = path.read_text(encoding="utf-8")
        bare = "\n".join(line for line in text.splitlines() if not re.match(r"\s*//", line))
        assert meaning(text) == meaning(bare)
