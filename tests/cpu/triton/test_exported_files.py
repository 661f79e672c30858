"""``confpred export``: the files' form, from a model of a made-up kernel of an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shared import python, python_says

from confpred.cli.export import BATCHES, FIELDS, file_name
from confpred.errors import InvalidInput

H100 = "NVIDIA H100 80GB HBM3"
#: The made-up kernel, with configs as the engines' experts have them.
MODULE = """
from itertools import product
import made_up_kernel
from confpred.triton.source import Source
from confpred.triton.triton_family import TritonFamily
names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
sizes = ((16, 32, 64), (64, 128), (32, 64), (1, 8), (4, 8), (2, 3))
CONFIGS = [dict(zip(names, row)) for row in product(*sizes)]
SOURCE = Source("1" * 16, frozenset({"BLOCK_SIZE_K"}))
FAMILY = TritonFamily("experts", ("M", "E", "N", "K"), CONFIGS, SOURCE, "3.7.1")
"""
FIT = """
import sys
from pathlib import Path
import numpy as np
import engine_kernel, made_up_kernel
from synthetic import SMALL
from confpred.training.dataset import read_dataset
from confpred.training.train import train
if __name__ == "__main__":
    made_up_kernel.FAMILY, made_up_kernel.CONFIGS = engine_kernel.FAMILY, engine_kernel.CONFIGS
    problem = engine_kernel.FAMILY.operation.problem
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.uniform(3, 12, (12, 4))).astype(int).tolist()
    made_up_kernel.calls = lambda count: [problem(*row, "bfloat16") for row in sizes]
    made_up_kernel.write_measurements(sys.argv[1])
    train(read_dataset([Path(sys.argv[1])]), Path(sys.argv[2]), hyper=SMALL)
"""


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("E=8,N=7168", H100, None, None), "E=8,N=7168,device_name=NVIDIA_H100_80GB_HBM3.json"),
        (
            ("N=7168,K=4096", "NVIDIA H200", "fp8_w8a8", "128,128"),
            "N=7168,K=4096,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
        ),
    ],
)
def test_names_are_those_that_the_engines_look_for(words: tuple, name: str) -> None:
    assert file_name(*words) == name


@pytest.mark.parametrize(("sizes", "block"), [("E=8", None), ("N=8,E=8", None), ("E=8,N=8", "8")])
def test_other_names_are_refused(sizes: str, block: str | None) -> None:
    with pytest.raises(InvalidInput):
        file_name(sizes, H100, None, block)


@pytest.mark.slow(reason="a model is trained first")
def test_a_file_has_a_config_for_each_batch_size(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "engine_kernel.py").write_text(MODULE)
    (tmp_path / "fit.py").write_text(FIT)
    known = {"CONFPRED_FAMILIES": "engine_kernel"}
    known["PYTHONPATH"] = f"{tmp_path}:{repository / 'tests'}"
    python_says(tmp_path / "fit.py", tmp_path / "rows.parquet", tmp_path / "experts-1", **known)
    command = ("-m", "confpred", "export")
    options = ("--kernel", "experts", "--model", tmp_path / "experts-1", "--device", "h100")
    options += ("--sizes", "E=8,N=7168", "--out", tmp_path / "tuned")
    layer = ("--layer", "E=8 N=14336 K=4096 dtype=bfloat16")
    python_says(*command, "vllm", *options, *layer, **known)
    python_says(*command, "sglang", *options, *layer, **known)
    name = "E=8,N=7168,device_name=NVIDIA_H100_80GB_HBM3.json"
    text = (tmp_path / "tuned" / name).read_text()
    assert (tmp_path / "tuned" / "configs" / "triton_3_7_1" / name).read_text() == text
    configs = {int(size): config for size, config in json.loads(text).items()}
    assert tuple(configs) == BATCHES
    assert all(tuple(config) == FIELDS for config in configs.values())
    again = python(*command, "vllm", *options, *layer, **known)
    assert "exists" in again.stderr
    wrong = python(*command, "vllm", *options, "--force", "--layer", "E=8 N=14336", **known)
    assert "K is missing" in wrong.stderr
    other = python(*command, "vllm", *options, "--force", *layer, "--kernel", "cudnn", **known)
    assert "a Triton kernel of a module in CONFPRED_FAMILIES" in other.stderr
