"""Softmax of PyTorch tensors by the config that a model chooses, beside PyTorch's own.

python examples/softmax/launch.py MODEL
"""

from __future__ import annotations

import sys

import torch
from softmax import FAMILY, SoftmaxProblem

from confpred import Predictor
from confpred.cuda import driver
from confpred.launch.runner import bound


def softmax(predictor: Predictor, x: torch.Tensor) -> torch.Tensor:
    """`x.softmax(-1)` of the contiguous matrix `x`, on its GPU."""
    rows, columns = x.shape
    problem = SoftmaxProblem(rows, columns, str(x.dtype).removeprefix("torch."))
    device = driver.device_of(x.device.index)
    choice = predictor.choose(problem, device)
    if choice.config_id is None:  # PyTorch's own is expected to be faster
        return x.softmax(-1)
    launch = FAMILY.launch(problem, choice.config_id)
    enqueue = bound(launch, ("out", "in"), x.device.index)
    out = torch.empty_like(x)
    addresses = [tensor.data_ptr() for tensor in (out, x)]
    enqueue(torch.cuda.current_stream(x.device).cuda_stream, addresses)
    return out


def main(model: str) -> None:
    predictor = Predictor.load(model)
    for rows, columns, dtype in (
        (98_304, 512, torch.float16),
        (8_192, 4_096, torch.bfloat16),
        (64, 1_000, torch.float32),
    ):
        x = torch.randn(rows, columns, device="cuda", dtype=dtype)
        out, expected = softmax(predictor, x), x.softmax(-1)
        error = torch.linalg.norm((out - expected).float()) / torch.linalg.norm(expected.float())
        print(f"{rows} x {columns} {dtype}: relative difference {error.item():.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
