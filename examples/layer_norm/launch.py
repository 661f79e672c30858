"""Layer norm of PyTorch tensors by the config that a model chooses, beside PyTorch's own.

python examples/layer_norm/launch.py MODEL
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from layer_norm import FAMILY, LayerNormProblem

from confpred import Predictor
from confpred.cuda import driver
from confpred.launch.kernels import bound


def layer_norm(
    predictor: Predictor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """`F.layer_norm` over the last dimension of the contiguous matrix `x`, on its GPU."""
    rows, columns = x.shape
    problem = LayerNormProblem(rows, columns, str(x.dtype).removeprefix("torch."))
    device = driver.device_of(x.device.index)
    choice = predictor.choose(problem, device)
    if choice.config_id is None:  # PyTorch's own is expected to be faster
        return F.layer_norm(x, (columns,), weight, bias)
    launch = FAMILY.launch(problem, choice.config_id)
    enqueue = bound(launch, ("out", "in", "weight", "bias"), x.device.index)
    out = torch.empty_like(x)
    addresses = [tensor.data_ptr() for tensor in (out, x, weight, bias)]
    enqueue(torch.cuda.current_stream(x.device).cuda_stream, addresses)
    return out


def main(model: str) -> None:
    predictor = Predictor.load(model)
    for rows, columns, dtype in (
        (25_088, 192, torch.float16),
        (8_192, 4_096, torch.bfloat16),
        (197, 768, torch.float32),
    ):
        x = torch.randn(rows, columns, device="cuda", dtype=dtype)
        weight, bias = torch.randn(2, columns, device="cuda", dtype=dtype)
        out = layer_norm(predictor, x, weight, bias)
        expected = F.layer_norm(x, (columns,), weight, bias)
        error = torch.linalg.norm((out - expected).float()) / torch.linalg.norm(expected.float())
        print(f"{rows} x {columns} {dtype}: relative difference {error.item():.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
