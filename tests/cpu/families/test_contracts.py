"""Facts that a launch and its kernel must agree on: the kernel's parameters, their names and their
order; and what both work out of the kernel's macros, which the kernel asserts.

The kernel's side is read out of the CUDA text, as NVRTC's preprocessor would leave it: a parameter
list may have conditions on macros, and macros that stand for parameters.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import softmax
from layers import CONVOLUTIONS, H100, OTHER_RANKS, random_legal_conv, random_legal_layer
from ptx.launch import ptx_of
from ptx.text import PtxError

from confpred.families.kernel_text import file_text
from confpred.families.protocol import Family
from confpred.problem.conv2d import CONVOLUTION, DIRECTIONS, Problem
from confpred.problem.operation import REFERENCE, KernelSpec, Operation, Step
from confpred.problem.record import Record

FAMILIES = {**CONVOLUTIONS, **OTHER_RANKS}
LAYERS = 12  # of each family

#: Kernels name an operand by its role: those that compute an image make the gradient of the input
#: (`out`) from that of the output (`in`), and a workspace is called by its contents.
_IMAGE = {"in_grad": "out", "out_grad": "in"}
_SUMS = {"zeroed": "sums", "scratch": "partials"}
ROLES: Mapping[str, Mapping[str, str]] = {
    "anywidth": _IMAGE,
    "anywidth_wgrad": _SUMS,
    "depthwise": _IMAGE,
    "depthwise_banded": _IMAGE,
    "grouped_rows": _IMAGE,
    "dense_tiles": _IMAGE,
    "dense_volume": _IMAGE,
    "dense_volume_wgrad": _SUMS,
    "depthwise_wgrad": _SUMS,
    "depthwise_banded_wgrad": _SUMS,
    "depthwise_wgrad_sum": _SUMS,
    "depthwise_large": _IMAGE,
    "depthwise_large_wgrad": _SUMS,
    "depthwise_multiplied_wgrad": _SUMS,
    "line": _IMAGE,
    "line_wgrad": _SUMS,
    "volume": _IMAGE,
    "volume_wgrad": _SUMS,
    "grouped_wgrad_sum": {"scratch": "sums"},
    "reference_bias_grad": {REFERENCE: "bias_grad"},
    **{
        f"{reference}_{output}": {REFERENCE: output}
        for reference in ("reference", "reference_dense")
        for output in ("out", "in_grad", "filter_grad")
    },
    "reference_softmax": {REFERENCE: "out"},
}


def chosen_lines(text: str, defines: Mapping[str, int | str]) -> str:
    """`text` without the lines that ``#if MACRO``, ``#if !MACRO`` and ``#else`` leave out; one with
    any other condition is refused."""
    kept, conditions = [], []
    for line in text.split("\n"):
        words = line.split()
        if line.startswith("#if "):
            name = words[1].removeprefix("!")
            assert len(words) == 2, line
            conditions.append(bool(defines[name]) != words[1].startswith("!"))
        elif line.startswith("#else"):
            conditions[-1] = not conditions[-1]
        elif line.startswith("#endif"):
            conditions.pop()
        elif all(conditions):
            assert not line.startswith("#"), line
            kept.append(line)
    return "\n".join(kept)


def parameters(text: str, spec: KernelSpec) -> list[tuple[str, str]]:
    """Return the type and the name of each parameter of the kernel of `spec`, whose file is
    `text`."""
    text = re.sub(r"//.*|\\\n", "", text)
    macros = dict(re.findall(r"^#define (\w+) +(.+)$", text, re.MULTILINE))
    head = (
        rf'extern "C" __global__ void (?:__(?:launch_bounds|maxnreg)__\([^()]*\) )?{spec.entry}\('
    )
    (found,) = re.finditer(head + r"([^()]*)\)", text)
    listed = chosen_lines(found[1], dict(spec.defines))
    listed = re.sub(r"\b[A-Z]+\b", lambda name: macros.get(name[0], name[0]), listed)
    result = []
    for parameter in listed.split(","):
        kind, name = re.fullmatch(r"\s*(.*?)(\w+)\s*", parameter, re.DOTALL).groups()
        words = kind.replace("__restrict__", "").replace("const", "").split()
        result.append((" ".join(words), name))
    return result


def breaches(step: Step, text: str) -> list[str]:
    """Return the ways in which `step` and the kernel in `text` differ; empty if they agree."""
    found = parameters(text, step.kernel)
    roles = ROLES.get(step.kernel.entry, {})
    expected = [("*", roles.get(name, name)) for name in step.operands]
    expected += [("int", name) for name in step.scalars]
    kinds = [("*" if kind.endswith("*") else kind, name) for kind, name in found]
    differ = [
        f"parameter {i}: the kernel has {kernel}, the launch {launch}"
        for i, (kernel, launch) in enumerate(zip(kinds, expected, strict=False))
        if kernel != launch
    ]
    if len(kinds) != len(expected):
        differ.append(f"the kernel has {len(kinds)} parameters, the launch {len(expected)}")
    return differ


def random_problem(rng: random.Random, family: Family) -> Record:
    """Return a random problem that `family` has configs for."""
    drawn = random_legal_conv if family.name in OTHER_RANKS else random_legal_layer
    return drawn(rng, family, H100)


def steps_of(family: Family) -> list[Step]:
    """Return a launch of each kernel of `family` with each setting of the macros that its
    parameters may depend on, as far as random layers meet them."""
    rng = random.Random(family.name)
    found: dict[tuple[object, ...], Step] = {}
    for _ in range(LAYERS):
        problem = random_problem(rng, family)
        rows = np.flatnonzero(family.legal(problem, H100)).tolist()
        for row in rng.sample(rows, min(20, len(rows))):
            for step in family.launch(problem, row).steps:
                kernel = step.kernel
                conditions = [d for d in kernel.defines if d[0] in ("DGRAD", "HAS_RESIDUAL")]
                found.setdefault((kernel.file, *conditions), step)
    return list(found.values())


def references(operation: Operation, *problems: Record) -> list[Step]:
    return [
        operation.reference(problem, operand.name)
        for problem in problems
        for operand in operation.operands(problem)
        if operand.terms
    ]


LAYERS_OF_REFERENCES = [
    Problem(2, 16, 9, 9, 16, 3, 3, groups=groups, direction=direction, bias=direction == "wgrad")
    for groups in (1, 2)
    for direction in DIRECTIONS
]
SOFTMAX = softmax.SoftmaxProblem(32, 96)
STEPS = [
    *itertools.chain.from_iterable(map(steps_of, FAMILIES.values())),
    *references(CONVOLUTION, *LAYERS_OF_REFERENCES),
    softmax.FAMILY.launch(SOFTMAX, int(np.argmax(softmax.FAMILY.legal(SOFTMAX, H100)))).steps[0],
    *references(softmax.FAMILY.operation, SOFTMAX),
]
every_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.kernel.entry)


def test_every_kernel_is_here() -> None:
    assert {step.kernel.file for step in STEPS} == {
        "anywidth.cu",
        "anywidth_wgrad.cu",
        "dense_tiles.cu",
        "dense_volume.cu",
        "dense_volume_wgrad.cu",
        "depthwise.cu",
        "depthwise_banded.cu",
        "depthwise_banded_wgrad.cu",
        "depthwise_large.cu",
        "depthwise_large_wgrad.cu",
        "depthwise_multiplied.cu",
        "depthwise_multiplied_wgrad.cu",
        "depthwise_wgrad.cu",
        "depthwise_wgrad_sum.cu",
        "grouped_rows.cu",
        "grouped_wgrad.cu",
        "grouped_wgrad_sum.cu",
        "reference.cu",
        "reference_dense.cu",
        "softmax.cu",
        "line.cu",
        "line_wgrad.cu",
        "volume.cu",
        "volume_wgrad.cu",
    }


@every_step
def test_a_launch_passes_what_the_kernel_takes(step: Step) -> None:
    assert breaches(step, file_text(step.kernel.file)) == []


@every_step
def test_a_swapped_pair_is_seen(step: Step) -> None:
    text, names = file_text(step.kernel.file), list(step.scalars)
    for i in range(len(names) - 1):
        swapped = [*names[:i], names[i + 1], names[i], *names[i + 2 :]]
        other = replace(step, scalars={name: step.scalars[name] for name in swapped})
        assert len(breaches(other, text)) == 2
    if len(step.operands) > 1:
        first, second, *rest = step.operands
        assert len(breaches(replace(step, operands=(second, first, *rest)), text)) == 2


@every_step
def test_a_missing_or_unknown_name_is_seen(step: Step) -> None:
    text = file_text(step.kernel.file)
    for name in step.scalars:
        less = {other: value for other, value in step.scalars.items() if other != name}
        assert breaches(replace(step, scalars=less), text)
        renamed = {("size" if n == name else n): value for n, value in step.scalars.items()}
        assert len(breaches(replace(step, scalars=renamed), text)) == 1
    assert breaches(replace(step, scalars={**step.scalars, "size": 1}), text)
    assert breaches(replace(step, operands=step.operands[:-1]), text)


def test_a_parameter_that_is_no_int_is_seen() -> None:
    step = references(CONVOLUTION, LAYERS_OF_REFERENCES[0])[0]
    text = file_text(step.kernel.file).replace("int groups", "float groups")
    assert len(breaches(step, text)) == 1


def test_the_kernels_side_is_read_under_the_launchs_macros() -> None:
    dgrad = steps_of(FAMILIES["grouped_dgrad"])[0]
    text = file_text(dgrad.kernel.file)
    names = [name for _, name in parameters(text, dgrad.kernel)]
    assert names[:4] == ["out", "in", "filter", "n"]
    forward = replace(dgrad.kernel, defines=(("DGRAD", 0),))
    assert ("u16*", "residual") in parameters(text, forward)


def agreed(kernel: KernelSpec) -> dict[str, int]:
    """Values that the host computes and `kernel` asserts."""
    return {name: int(value) for name, value in kernel.defines if name.startswith("HOST_")}


WITH_AGREED = [step.kernel for step in STEPS if agreed(step.kernel)]


def test_every_kernel_of_a_family_asserts_what_the_host_works_out() -> None:
    ours = {step.kernel.file for family in FAMILIES.values() for step in steps_of(family)}
    assert {kernel.file for kernel in WITH_AGREED} == ours
    for kernel in WITH_AGREED:
        for name in agreed(kernel):
            assert re.search(rf"static_assert\(.*\b{name}\b", file_text(kernel.file)), name


@pytest.mark.parametrize("kernel", WITH_AGREED, ids=lambda kernel: kernel.entry)
def test_a_kernel_that_differs_from_the_host_does_not_compile(kernel: KernelSpec) -> None:
    for name in agreed(kernel):
        wrong = ((n, int(v) + 1 if n == name else v) for n, v in kernel.defines)
        with pytest.raises(PtxError, match="static assertion failed"):
            ptx_of(replace(kernel, defines=tuple(wrong)), H100.arch)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_what_is_asserted_makes_no_more_kernels(family: Family) -> None:
    """It follows from the other macros, so kernels that differ in it differ in those too."""
    rng = random.Random(f"{family.name} again")
    kernels = set()
    for _ in range(LAYERS):
        problem = random_problem(rng, family)
        rows = np.flatnonzero(family.legal(problem, H100)).tolist()
        for row in rng.sample(rows, min(100, len(rows))):
            kernels.update(step.kernel for step in family.launch(problem, row).steps)
    others = {
        replace(kernel, defines=tuple(d for d in kernel.defines if d[0] not in agreed(kernel)))
        for kernel in kernels
    }
    assert len(others) == len(kernels) > 10
