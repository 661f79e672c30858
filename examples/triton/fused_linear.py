"""A fused linear layer and activation as a Triton kernel: ``activation(x @ w.T + bias)``.

``@confpred.tuned`` stands in place of ``@triton.autotune``, ``example`` and ``reference`` are
added, and all else is as anyone writes it. ``docs/triton.md`` walks through this file.
"""

from __future__ import annotations

from itertools import product

import torch
import triton
import triton.language as tl

import confpred

CONFIGS = [
    triton.Config(
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=warps, num_stages=stages
    )
    for m, n, k, warps, stages in product(
        (16, 32, 64, 128), (32, 64, 128, 256), (32, 64), (4, 8), (2, 3, 4)
    )
    # A warp has some of the tile's sums to do, and a thread at most 256.
    if 16 <= m * n // (32 * warps) <= 256
]


def example(M: int, N: int, K: int, dtype: str) -> torch.Tensor:
    """Call the kernel for ``confpred sample``."""
    of = {"device": "cuda" if torch.cuda.is_available() else "cpu", "dtype": getattr(torch, dtype)}
    return linear_gelu(torch.randn(M, K, **of), torch.randn(N, K, **of), torch.randn(N, **of))


def reference(x, w, bias, **_) -> dict[str, torch.Tensor]:
    """Return what the kernel computes, for ``confpred sample``."""
    total = torch.nn.functional.linear(x.float(), w.float(), bias.float())
    return {"out": total * torch.sigmoid(1.702 * total)}


@confpred.tuned(
    configs=CONFIGS, key=["M", "N", "K"], model="models", example=example, reference=reference
)
@triton.jit
def fused_linear(
    x, w, bias, out, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Each program has a tile of the output; GROUP_M rows of tiles share what is in L2."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    group = program // (GROUP_M * tiles_n) * GROUP_M
    rows = tl.minimum(tiles_m - group, GROUP_M)
    tile_m = group + program % (GROUP_M * tiles_n) % rows
    tile_n = program % (GROUP_M * tiles_n) // rows

    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_x, in_w = (m[:, None] < M) & (k[None, :] < K), (n[None, :] < N) & (k[:, None] < K)
        part_x = tl.load(x + m[:, None] * K + k[None, :], mask=in_x, other=0.0)
        part_w = tl.load(w + n[None, :] * K + k[:, None], mask=in_w, other=0.0)
        total = tl.dot(part_x, part_w, total)
    total += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    total *= tl.sigmoid(1.702 * total)  # the short form of GELU
    in_out = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=in_out)


def linear_gelu(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``gelu(x @ w.T + bias)`` of contiguous matrices ``(M, K)`` and ``(N, K)``."""
    (M, K), N = x.shape, w.shape[0]
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)

    def grid(meta):
        return (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)

    fused_linear[grid](x, w, bias, out, M, N, K)
    return out
