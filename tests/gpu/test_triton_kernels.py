"""The example of docs/triton.md on a GPU: sampled, trained, chosen, captured and compiled."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from shared import python, python_says

REPOSITORY = Path(__file__).parents[2]
KERNEL = REPOSITORY / "examples" / "triton" / "fused_linear.py"
KNOWN = {
    "CONFPRED_FAMILIES": "fused_linear",
    "PYTHONPATH": os.pathsep.join(
        map(str, filter(None, [KERNEL.parent, REPOSITORY / "tests", os.environ.get("PYTHONPATH")]))
    ),
}
SHAPES = [
    {"M": m, "N": n, "K": k, "dtype": dtype}
    for m, n, k in ((64, 512, 256), (100, 300, 500), (512, 1024, 1024), (2048, 768, 512))
    for dtype in ("float16", "bfloat16")
]
TRAIN = """
import sys
from pathlib import Path
from synthetic import SMALL
from confpred.training.dataset import read_dataset
from confpred.training.train import train
if __name__ == "__main__":
    train(read_dataset([Path(sys.argv[1])]), Path(sys.argv[2]), hyper=SMALL)
"""
CHOOSE = """
import sys
import confpred, fused_linear, torch, triton
tuned = confpred.tuned(fused_linear.CONFIGS, ["M", "N", "K"], model=sys.argv[1])
fused_linear.fused_linear = kernel = tuned(fused_linear.fused_linear.fn)
trials = []
kernel._do_bench = lambda call, quantiles: trials.append(call) or [1.0] * 3
def layer(x, w, bias): return fused_linear.linear_gelu(x, w, bias)
def expected(x, w, bias):
    total = (x.double() @ w.double().T + bias).float()
    return (total * torch.sigmoid(1.702 * total)).to(x.dtype)
def tensors(m):
    shapes = ((m, 512), (640, 512), (640,))
    return [torch.randn(shape, device="cuda", dtype=torch.float16) / 8 for shape in shapes]
for m in (80, 333, 1000):
    inputs = tensors(m)
    torch.testing.assert_close(layer(*inputs), expected(*inputs), rtol=1e-2, atol=1e-2)
assert trials == [] and len(kernel.cache) == 3
inputs = tensors(80)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): out = layer(*inputs)
inputs[0].mul_(0.5)
graph.replay()
torch.testing.assert_close(out, expected(*inputs), rtol=1e-2, atol=1e-2)
compiled = torch.compile(layer, fullgraph=True)
for m in (80, 333):
    inputs = tensors(m)
    torch.testing.assert_close(compiled(*inputs), expected(*inputs), rtol=1e-2, atol=1e-2)
"""


@pytest.mark.slow(reason="1,104 configs are compiled and measured")
def test_the_example_is_sampled_learned_and_launched(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text(json.dumps(SHAPES))
    sample = ("sample", f"{KERNEL}:fused_linear", "--shapes", tmp_path / "shapes.json")
    done = python("-m", "confpred", *sample, "--out", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    (tmp_path / "fit.py").write_text(TRAIN)
    python_says(tmp_path / "fit.py", tmp_path / "runs", tmp_path / "model-1", **KNOWN)
    python_says("-c", CHOOSE, tmp_path / "model-1", **KNOWN)
