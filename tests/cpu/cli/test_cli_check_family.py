"""``confpred check-family``: a family that breaks the protocol is told which member, and how."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import softmax
from command_line import confpred, named, worked
from layers import H100
from slow import slow_but

from confpred.families.registry import all_families
from confpred.measure.contract import _find_misspelt, _random_problems, check_family

GOOD = softmax.FAMILY


class Changed:
    """The example's family with some members replaced."""

    def __init__(self, **members: object) -> None:
        self._members = members

    def __getattr__(self, name: str) -> object:
        if name in self._members:
            return self._members[name]
        return getattr(GOOD, name)


def legal_of(length: int, dtype: type = np.bool_) -> Changed:
    return Changed(legal=lambda problem, device: np.ones(length, dtype))


def step_with(**changes: object) -> Changed:
    def launch(problem: object, row: int) -> object:
        found = GOOD.launch(problem, row)
        return replace(found, steps=(replace(found.steps[0], **changes),))

    return Changed(launch=launch)


def without(name: str) -> object:
    members = ("name", "operation", "configs", "feature_names", "legal", "estimate_s", "features")
    members = (*members, "launch")
    return type("Part", (), {m: getattr(GOOD, m) for m in members if m != name})()


def swapped_grid() -> Changed:
    def launch(problem: object, row: int) -> object:
        (step,) = GOOD.launch(problem, row).steps
        x, y, z = step.grid
        return replace(GOOD.launch(problem, row), steps=(replace(step, grid=(y, x, z)),))

    return Changed(launch=launch)


class Misspelt(type(GOOD)):
    def alowed(self, problem: object, rows: object, limits: object) -> object:
        """Return what `allowed` would."""


class Hooked(type(GOOD)):
    def _costly_rule(self) -> None:
        """Look like a hook of a table's."""


CONFIGS, NAMES = GOOD.configs, GOOD.feature_names
STEP = GOOD.launch(softmax.SoftmaxProblem(32, 96), 0).steps[0]
BREACHES = {
    "missing": (without("estimate_s"), "estimate_s: is missing"),
    "name": (Changed(name="layer norm"), "name: is 'layer norm', not a word"),
    "operation": (Changed(operation="softmax"), "operation: is no"),
    "configs": (Changed(configs=[(1,)]), "configs: is no structured NumPy array"),
    "rows twice": (Changed(configs=np.repeat(CONFIGS, 2)), "configs: some rows are equal"),
    "floats": (Changed(configs=np.zeros(1, [("a", "f4")])), "configs: the field 'a' is float32"),
    "feature names": (Changed(feature_names=(*NAMES, NAMES[0])), f"feature_names: has {NAMES[0]}"),
    "short": (legal_of(3), f"legal: returns an array of shape (3,), not ({len(CONFIGS)},)"),
    "long": (legal_of(99), f"legal: returns an array of shape (99,), not ({len(CONFIGS)},)"),
    "bytes": (legal_of(len(CONFIGS), np.int8), "legal: returns int8, not bool"),
    "a list": (Changed(legal=lambda *_: [True]), "legal: returns list, not a NumPy array"),
    "none": (
        Changed(legal=lambda *_: np.zeros(len(CONFIGS), np.bool_)),
        "legal: no config is legal for any of",
    ),
    "an error": (Changed(legal=lambda *_: 1 / 0), "legal: raises ZeroDivisionError"),
    "seconds": (
        Changed(estimate_s=lambda p, d, rows: np.zeros(len(rows))),
        "estimate_s: has a value that is not above 0",
    ),
    "a matrix": (
        Changed(features=lambda p, d, rows: GOOD.features(p, d, rows).T[:, :1]),
        "features: returns an array of shape",
    ),
    "nan": (
        Changed(features=lambda p, d, rows: GOOD.features(p, d, rows) * np.float32("nan")),
        "features: has a value that is no finite number",
    ),
    "a launch": (Changed(launch=lambda *_: None), "launch: returns NoneType, not a Launch"),
    "grid": (step_with(grid=(0, 1, 1)), "grid is (0, 1, 1), not three integers above 0"),
    "block": (step_with(block=(2048, 1, 1)), "block has 2048 threads, over 1024"),
    "scalar": (step_with(scalars={"rows": 2**31}), "scalar rows is 2147483648, not an integer"),
    "output": (step_with(operands=("in",)), "launch: no kernel takes the output out"),
    "too few": (
        step_with(scalars=dict([*STEP.scalars.items()][:-1])),
        f"parameters, and the launch {len(STEP.operands) + len(STEP.scalars) - 1}",
    ),
    "other kinds": (
        step_with(scalars={}, operands=(*STEP.operands, *STEP.scalars)),
        "has 32 bits, and the launch passes pointer",
    ),
    "entry": (
        step_with(kernel=replace(STEP.kernel, entry="other")),
        'has no extern "C" kernel called other',
    ),
    "macros": (
        step_with(kernel=replace(STEP.kernel, defines=(("float", "="),))),
        "does not compile",
    ),
    "swapped operands": (
        step_with(operands=(STEP.operands[1], STEP.operands[0], *STEP.operands[2:])),
        "launch: operands are in, out, ",
    ),
    "swapped grid": (swapped_grid(), "reads no blockIdx.y"),
    "misspelt": (Misspelt(), "alowed: is no member of a family, and allowed is not overridden"),
    "misspelt hook": (Hooked(), "_costly_rule: is no member of a family, and _costly_rules is not"),
    "file": (step_with(kernel=replace(STEP.kernel, file="no.cu")), "no CUDA source no.cu"),
}


@pytest.mark.parametrize(("family", "message"), BREACHES.values(), ids=BREACHES)
def test_a_breach_names_the_member(family: object, message: str) -> None:
    breaches = check_family(family, H100).breaches
    assert message in breaches[0], breaches
    assert breaches[0].split(":")[0] in (*dir(GOOD), *dir(type(family)), "operation")


@pytest.mark.parametrize(
    "name",
    slow_but([], ["depthwise_wgrad", "grouped_fprop", "dense_dgrad"], "kernels are compiled"),
)
def test_a_kernel_of_this_package_keeps_the_protocol(name: str) -> None:
    report = check_family(all_families()[name], H100)
    assert report.breaches == ()
    assert min(report.problems, report.launches, report.kernels) >= 8
    assert report.runs == 0
    assert report.skipped == ("no config was run: this machine has no such GPU",)


def test_random_layers_have_some_of_every_family() -> None:
    for name, family in all_families().items():
        layers = _random_problems(family.operation.problem)
        assert any(family.legal(layer, H100).any() for layer in layers), name


def test_no_family_of_this_package_is_called_misspelt() -> None:
    found = {name: [*_find_misspelt(type(family))] for name, family in all_families().items()}
    assert {name: said for name, said in found.items() if said} == {}


def test_the_command_names_family_and_member(tmp_path: Path) -> None:
    (tmp_path / "short_legal.py").write_text(
        "from softmax import FAMILY\n"
        "short = type(FAMILY).legal\n"
        "type(FAMILY).legal = lambda self, problem, device: short(self, problem, device)[:-1]\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = confpred("check-family", "short_legal", env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("softmax: legal: returns an array of shape")
    words = ("softmax", "--layer", "rows=8 columns=64", "--device", "a100")
    assert worked("check-family", *words).stdout.startswith("softmax: ok; 1 problems, ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("no_such_module",), "module='no_such_module' is not allowed; allowed: a module that can"),
        (("json",), "allowed: a module that defines FAMILY or FAMILIES"),
        (("softmax", "--layer", "rows=0 columns=8"), "rows=0 is not allowed"),
        (("softmax", "--device", "h10"), "h100"),
    ],
)
def test_bad_input_is_named(words: tuple[str, ...], message: str) -> None:
    named(confpred("check-family", *words), message, 2)
