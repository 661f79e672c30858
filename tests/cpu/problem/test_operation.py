"""Operations beside families: convolution's operands and references, and plug-ins of others."""

from __future__ import annotations

import os
import textwrap
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import softmax
import torch
from hypothesis import given
from sampler_rows import ROW
from shared import python_says
from strategies import problems

from confpred.cuda.cache import KernelCache
from confpred.cuda.compiler import compile_kernel
from confpred.data.parquet import merge, operation_in, read, schema
from confpred.errors import DataError
from confpred.families.registry import all_families, all_operations, families_of, operation_of
from confpred.problem.conv import CONV, ConvNd
from confpred.problem.conv2d import CONVOLUTION, DTYPES, Problem
from confpred.problem.device import get_device
from confpred.problem.linear_chain import LINEAR_CHAIN, LinearChain
from confpred.problem.norm import BATCH_NORM, BatchNorm
from confpred.problem.norm_of_groups import NORM, Norm
from confpred.problem.operation import REFERENCE, Operand, Operation
from confpred.sampler.store import open_store
from confpred.training.dataset import read_dataset

OUTPUTS = {"fprop": {"out"}, "dgrad": {"in_grad"}, "wgrad": {"filter_grad", "bias_grad"}}
SMALL = "n=2 c=6 h=7 w=5 k=12 r=3 s=2 groups=3 padding=1 stride=2x1 "


def test_every_family_here_computes_one_operation() -> None:
    assert isinstance(CONVOLUTION, Operation)
    operations = [CONVOLUTION, LINEAR_CHAIN, BATCH_NORM, NORM, CONV]
    assert all_operations() == {operation.name: operation for operation in operations}
    problems = (
        Problem.parse(SMALL),
        LinearChain(1, 8, 8, 8, 2),
        BatchNorm(2, 3, 3, 8),
        Norm(2, 9, 8),
        ConvNd(1, 8, 8, 8, 3),
    )
    assert [operation_of(p) for p in problems] == operations
    families = [name for problem in problems for name in families_of(problem)]
    assert sorted(families) == sorted(all_families())


@given(problems())
def test_operands_are_the_tensors_of_the_direction(problem: Problem) -> None:
    operands = {o.name: o for o in CONVOLUTION.operands(problem)}
    outputs = {name for name, o in operands.items() if o.terms}
    assert outputs <= OUTPUTS[problem.direction]
    assert ("bias_grad" in outputs) == (problem.direction == "wgrad" and problem.bias)
    assert ("bias" in operands) == (problem.direction == "fprop" and problem.bias)
    assert ("residual" in operands) == problem.residual
    unread = sum(o.bytes for o in operands.values()) - problem.minimum_bytes
    gaps = max(*problem.stride, *problem.dilation) > 1
    assert unread == 0 or (gaps and 0 < unread <= operands["in"].bytes)
    assert {o.dtype for o in operands.values()} == {problem.dtype}
    largest = max(o.terms for o in operands.values())
    if problem.direction == "fprop":  # one product for each term
        assert problem.flops == 2 * operands["out"].elements * largest
    assert next(iter(operands)) in outputs, "outputs first"
    row = CONVOLUTION.features(problem, get_device("h100"))
    assert row.shape == (1, len(CONVOLUTION.feature_names))
    assert row.dtype == np.float32
    assert np.isfinite(row).all()


def test_an_operand_counts_its_bytes() -> None:
    assert Operand("x", (2, 3), "float32").bytes == 24
    assert Operand("x", (2, 3), "bfloat16").bytes == 12
    assert Operand("x", (), "float16").elements == 1


REFERENCES = product(sorted(set().union(*OUTPUTS.values())), (1, 3))


@pytest.mark.parametrize(("case", "dtype"), list(zip(REFERENCES, cycle(DTYPES), strict=False)))
def test_reference_kernels_compile(case: tuple[str, int], dtype: str, tmp_path: Path) -> None:
    output, groups = case
    direction = next(d for d in OUTPUTS if output in OUTPUTS[d])
    layer = Problem.parse(f"{SMALL} direction={direction} bias={direction == 'wgrad'}")
    step = CONVOLUTION.reference(replace(layer, dtype=dtype, groups=groups), output)
    assert REFERENCE in step.operands
    assert compile_kernel(step.kernel, "sm_90a", KernelCache(tmp_path)).cubin


@pytest.mark.parametrize(
    "words",
    [
        "bias=true residual=true activation=hardswish",
        "activation=relu6",
        "direction=dgrad",
        "direction=wgrad",
        "direction=wgrad bias=true deterministic=true",
    ],
)
def test_pytorchs_answer_has_the_shapes_of_the_operands(words: str) -> None:
    """Activations are channels last: what PyTorch gives, permuted, is the operand."""
    problem = Problem.parse(f"{SMALL} {words} dtype=float32")
    operands = CONVOLUTION.operands(problem)
    inputs = {o.name: torch.rand(o.shape) for o in operands if not o.terms}
    answer = CONVOLUTION.pytorch(problem, inputs)
    tensors = [t for t in (answer if isinstance(answer, tuple) else (answer,)) if t is not None]
    shapes = [tuple(t.permute(0, 2, 3, 1).shape if t.dim() == 4 else t.shape) for t in tensors]
    assert shapes == [o.shape for o in operands if o.terms]


def with_plugins(folder: Path, plugins: str, program: str) -> str:
    """Run `program` where ``CONFPRED_FAMILIES`` names `plugins`, modules of `folder` or the example
    of ``docs/adding-a-kernel.md``."""
    (folder / "empty.py").write_text("")
    (folder / "broken.py").write_text("import no_such_module\n")
    (folder / "failing.py").write_text("1 / 0\n")
    (folder / "unfinished.py").write_text("FAMILY = (\n")
    (folder / "odd.py").write_text("FAMILY = 7\n")
    (folder / "taken.py").write_text(
        "from confpred.families.dense.dense_tiles import FAMILIES as FAMILIES\n"
    )
    example = str(Path(softmax.__file__).parent)
    paths = [str(folder), example, *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"CONFPRED_FAMILIES": plugins, "PYTHONPATH": os.pathsep.join(paths)}
    return python_says("-c", textwrap.dedent(program), **variables)


def test_a_plugged_in_family_is_chosen_for_its_problems_alone(tmp_path: Path) -> None:
    program = """
        from softmax import SoftmaxProblem
        from confpred import Predictor, Problem
        from confpred.families.registry import all_families, all_operations, families_of
        assert list(all_families())[-1] == "softmax"
        names = ["batch_norm", "conv", "conv2d", "linear_chain", "norm", "softmax"]
        assert sorted(all_operations()) == names
        rows = SoftmaxProblem(40, 64)
        assert list(families_of(rows)) == ["softmax"]
        choice = Predictor.load().choose(rows, "h100")
        assert (choice.source, choice.family) == ("heuristic", "softmax")
        layer = Problem.parse("n=8 c=64 h=28 w=28 k=64 r=3 s=3 padding=1 groups=8")
        choices = Predictor({}).rank(layer, "h100", 32)
        assert "softmax" not in {choice.family for choice in choices}
    """
    with_plugins(tmp_path, "softmax", program)


def test_a_plugin_that_is_none_is_named(tmp_path: Path) -> None:
    messages = {
        **{
            plugins: f"CONFPRED_FAMILIES='{plugins}' is not allowed"
            for plugins in ("no_such_module", "empty", "broken", "failing", "unfinished")
        },
        "odd": "a module whose FAMILY is a kernel family of a new name",
        "taken": "a module whose FAMILY is a kernel family of a new name",
        "softmax,softmax": "CONFPRED_FAMILIES='softmax' is not allowed",
    }
    program = f"""
        import os
        from confpred.errors import InvalidInput
        from confpred.families.registry import all_families
        for plugins in {[*messages]}:
            os.environ["CONFPRED_FAMILIES"] = plugins
            all_families.cache_clear()
            try: all_families()
            except InvalidInput as error: print(error)
    """
    lines = with_plugins(tmp_path, "", program).splitlines()
    for said, message in zip(lines, messages.values(), strict=True):
        assert message in said


def foreign(path: Path) -> Path:
    """Return a file of the same columns, whose metadata names another operation."""
    table = pa.Table.from_pylist([ROW.to_row()], schema(CONVOLUTION))
    pq.write_table(table.replace_schema_metadata({"operation": "softmax"}), path)
    return path


def test_tables_of_another_operation_are_refused(tmp_path: Path) -> None:
    path = foreign(tmp_path / "rows-x-00000.parquet")
    assert operation_in(path) == "softmax"
    words = r"rows-x-00000\.parquet .*'softmax'"
    with pytest.raises(DataError, match=words):
        read(path, CONVOLUTION)
    with pytest.raises(DataError, match=words):
        merge([tmp_path], tmp_path / "all.parquet")
    with pytest.raises(DataError, match=words):
        read_dataset([path])
    with open_store(tmp_path, "r", CONVOLUTION) as store, pytest.raises(DataError, match=words):
        store.measured("h100")
