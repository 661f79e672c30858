"""Triton kernels under ``confpred.tuned``, with made-up times, for programs that tests start with
``TRITON_INTERPRET=1``. ``TUNED_MODEL`` is the folder of the model, ``TUNED_KEEP`` that of what is
timed.

A test's process would keep their families, so each test has a process of its own.
"""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

import confpred
from confpred.problem.device import get_device
from confpred.pytorch import autotuner

DEVICE = get_device("h100")
autotuner.current_device = lambda: DEVICE  # there is no GPU
CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block, warps in product((16, 32, 64, 128), (1, 2, 4, 8))
]
tried: list[dict[str, Any]] = []  # arguments of each launch of a trial


def made_up_ms(size: int, block: int, warps: int) -> float:
    """Return a time that is least for blocks of about an eighth of the size."""
    return 0.01 * (1 + abs(3 + (block.bit_length() - size.bit_length())) + 0.1 * abs(warps - 4))


def remember(arguments: dict[str, Any], reset_only: bool = False) -> None:
    if not reset_only:
        tried.append(arguments)


def made_up_bench(call: Any, quantiles: Any) -> list[float]:
    call()
    told = tried[-1] if tried else {"size": 1, "BLOCK": 1, "num_warps": 4}
    ms = made_up_ms(told["size"], told["BLOCK"], told["num_warps"])
    return [ms, 0.99 * ms, 1.01 * ms]


def example(size: int, dtype: str) -> None:
    add(torch.randn(size, dtype=getattr(torch, dtype)), torch.zeros(size))


def tuned(**options: Any) -> Any:
    """Return ``confpred.tuned`` for these kernels."""
    common = {"model": os.environ.get("TUNED_MODEL"), "keep": os.environ.get("TUNED_KEEP")}
    return confpred.tuned(CONFIGS, ["size"], **{**common, "do_bench": made_up_bench, **options})


@tuned(pre_hook=remember, example=example)
@triton.jit
def adding(x, out, size, BLOCK: tl.constexpr):  # noqa: N803
    """Add a vector to another."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at, mask=at < size) + tl.load(out + at, mask=at < size)
    tl.store(out + at, total, mask=at < size)


@tuned(model=None, keep=None)
@triton.heuristics({"EVEN": lambda arguments: arguments["size"] % arguments["BLOCK"] == 0})
@triton.jit
def filling(out, size, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # noqa: N803
    """Fill a vector with 2 where blocks fit in it, and else with 1."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.full((BLOCK,), 2.0 if EVEN else 1.0, tl.float32), mask=at < size)


@confpred.tuned(
    CONFIGS, ["size", "OUT"], choices={"OUT": [tl.float16, "float32"]}, do_bench=made_up_bench
)
@triton.jit
def casting(x, out, size, OUT: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Copy a vector to one of another dtype."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < size).to(OUT), mask=at < size)


def add(x: torch.Tensor, out: torch.Tensor, kernel: Any = adding) -> None:
    size = out.numel()
    kernel[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](x, out, size)


def launched(kernel: Any = adding) -> tuple[int, int]:
    """Return the block and the warps of the last launch."""
    return kernel.best_config.kwargs["BLOCK"], kernel.best_config.num_warps
