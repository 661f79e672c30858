"""``confpred.tuned`` with a model of what trials left: its choices, and where it is not asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from shared import once_a_run, python_says
from tuned_programs import KNOWN, TRIALS

pytestmark = pytest.mark.slow(reason="a model is trained first, in processes of their own")

TRAIN = """
import sys
from dataclasses import replace
from pathlib import Path
from synthetic import SMALL
from confpred.training.dataset import read_dataset
from confpred.training.train import train
if __name__ == "__main__":
    data = read_dataset([Path(sys.argv[1])])
    assert len(data.timings) == 12 and all(len(t.rows) == 16 for t in data.timings)
    train(data, Path(sys.argv[2]), hyper=replace(SMALL, min_data_in_leaf=5))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a model that was trained on what trials had left."""

    def make(folder: Path) -> None:
        kept = folder / "kept"
        python_says("-c", TRIALS, **KNOWN, TUNED_KEEP=str(kept))
        (folder / "fit.py").write_text(TRAIN)
        python_says(folder / "fit.py", kept, folder / "adding-1", **KNOWN)

    return str(once_a_run(tmp_path_factory, "tuned-model", make) / "adding-1")


def with_model(program: str, model: str, **environment: str) -> str:
    """Return what a program says with the model; log lines too."""
    start = """
import logging, sys
logging.getLogger("confpred").addHandler(logging.StreamHandler(sys.stdout))
import torch, tuned_kernels
from tuned_kernels import CONFIGS, add, adding, launched, made_up_ms, tried, tuned
"""
    return python_says("-c", start + program, **KNOWN, TUNED_MODEL=model, **environment)


def test_a_model_of_what_trials_left_chooses_without_a_trial(model: str, tmp_path: Path) -> None:
    program = """
x, out = torch.randn(450), torch.ones(450)
add(x, out)
assert torch.equal(out, x + 1)
chosen = made_up_ms(450, *launched())
best = min(made_up_ms(450, c.kwargs["BLOCK"], c.num_warps) for c in CONFIGS)
assert tried == [] and chosen <= 1.3 * best, (launched(), chosen, best)
add(x, out)
assert torch.equal(out, x + 1 + x) and len(adding.cache) == 1 and tried == []
assert adding._predictor.choose(adding.family.operation.problem(450, "float32"), "h100").config
"""
    assert with_model(program, model, TUNED_KEEP=str(tmp_path / "none")) == ""
    assert not (tmp_path / "none").exists()


def test_the_first_three_are_timed_and_kept(model: str, tmp_path: Path) -> None:
    program = """
kernel = tuned(top_k=3, pre_hook=tuned_kernels.remember, name="adding")(adding.fn)
add(torch.randn(450), torch.ones(450), kernel)
assert len(tried) == 3
times = {made_up_ms(450, t["BLOCK"], t["num_warps"]) for t in tried}
assert made_up_ms(450, *launched(kernel)) == min(times)
assert len(kernel.warmup(torch.randn(450), torch.ones(450), 450, grid=(1,))) == 3
"""
    with_model(program, model, TUNED_KEEP=str(tmp_path))
    assert len([*tmp_path.glob("rows-*.parquet")]) == 1


def test_tensors_are_reset_for_trials_alone(model: str) -> None:
    program = """
for options, expected in (({}, 1.0), ({"model": None}, 0.0)):
    options = {"do_bench": lambda call, quantiles: (call(), [1.0] * 3)[1], **options}
    kernel = tuned(reset_to_zero=["out"], name="adding", **options)(adding.fn)
    x, out = torch.randn(450), torch.ones(450)
    add(x, out, kernel)
    assert torch.equal(out, x + expected), options
"""
    with_model(program, model)


def test_the_next_config_runs_where_the_gpu_refuses_one(model: str) -> None:
    """A stand-in for the kernel refuses one, as a GPU does whose shared memory is too small."""
    program = """
from triton.runtime.errors import OutOfResources
two = tuned(top_k=2, name="adding")(adding.fn)
first, second = two.order(two.call_of({"size": 450, "x": torch.ones(1)}))
run = adding.fn.run
def refusing(*args, **kwargs):
    if kwargs["BLOCK"] == first.kwargs["BLOCK"] and kwargs["num_warps"] == first.num_warps:
        raise OutOfResources(300_000, 232_448, "shared memory")
    return run(*args, **kwargs)
adding.fn.run = refusing
x, out = torch.randn(450), torch.ones(450)
add(x, out)
assert torch.equal(out, x + 1) and adding.best_config == second
adding.fn.run = lambda *args, **kwargs: (_ for _ in ()).throw(OutOfResources(1, 0, "registers"))
try: add(torch.randn(451), torch.ones(451))
except OutOfResources as error: print(error)
"""
    told = with_model(program, model)
    assert told.count("the GPU refuses") > 1
    assert "out of resource: registers" in told


def test_a_model_of_something_else_is_not_asked(model: str) -> None:
    program = """
import triton
from dataclasses import replace
from confpred.problem.device import get_device
def tries(kernel):
    tried.clear()
    add(torch.randn(450), torch.ones(450), kernel)
    return len(tried)
def kernel(**options):
    return tuned(pre_hook=tuned_kernels.remember, name="adding", **options)(adding.fn)
other = kernel()
other.family.digest = "0" * 16
assert tries(other) == 16
tuned_kernels.autotuner.current_device = lambda: get_device("h200")
assert tries(kernel()) == 16 and tries(kernel(transfer=True)) == 0
tuned_kernels.autotuner.current_device = lambda: tuned_kernels.DEVICE
triton.__version__ = "2.0"
assert tries(kernel()) == 16 and tries(kernel(transfer=True)) == 0
assert tries(kernel(model="no/such/folder")) == 16
named = tuned(pre_hook=tuned_kernels.remember, name="another")(adding.fn)
assert tries(named) == 16
"""
    told = with_model(program, model)
    for reason in (
        "is of another source of the kernel", "is of h100: transfer=True takes it on h200",
        "and this is Triton 2.0: transfer=True", "no/such/folder", "is of another kernel",
    ):  # fmt: skip
        assert reason in told


def test_the_compiler_of_pytorch_takes_the_chosen_config(model: str) -> None:
    """Dynamo looks for a GPU before it knows Triton; the graph is looked at, and not run."""
    program = """
import os
import torch.utils._triton
from confpred.problem.device import get_device
import triton
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
torch.utils._triton.has_triton = lambda: True
del os.environ["TRITON_INTERPRET"]
def configs_for(kernel, *sizes):
    found = []
    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if "kernel_idx" in node.kwargs:
                configs = kernel_side_table.get_kernel(node.kwargs["kernel_idx"]).configs
                found.append([(c.kwargs["BLOCK"], c.num_warps) for c in configs])
        return lambda *args: [torch.zeros(1)]
    def program(x, out):
        add(x.relu(), out, kernel)
        return out * 2
    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    for size in sizes: compiled(torch.ones(size), torch.ones(size))
    return found
plain = triton.jit(adding.fn.fn)
kernel = tuned(name="adding")(plain)
calls = [kernel.call_of({"size": size, "x": torch.ones(1)}) for size in (450, 1000)]
chosen = [kernel.order(call)[0] for call in calls]
expected = [[(c.kwargs["BLOCK"], c.num_warps)] for c in chosen]
assert expected[0] != expected[1], expected
found = configs_for(kernel, 450, 1000)
assert found == expected, (found, expected)  # the second size is a symbol, and made constant
assert len(configs_for(tuned(model=None)(plain), 450)[0]) == 16
tuned_kernels.autotuner.current_device = lambda: get_device("h200")
assert len(configs_for(tuned(name="adding")(plain), 450)[0]) == 16
"""
    with_model(program, model)
