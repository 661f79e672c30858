"""Six Triton kernels, five of them of packages of others: imported, given configs of their tile
sizes, warps and stages, and an example. ``CONFPRED_FAMILIES=published`` makes them known.

    kernel               of                          | the choice
    expert_product       written here                | grouped product of experts
    attention_keys       fla-core 0.6.0              | attention's backward pass, keys and values
    rms_norm_backward    liger-kernel 0.8.5          | a norm's backward pass
    logsumexp_of_linear  cut-cross-entropy 25.1.1    | linear layer, softmax and cross-entropy
    states               fla-core 0.6.0              | scan of a state-space block's chunks
    two_bit_product      liger-kernel 0.8.5          | product with weights of 2 bits
"""

from __future__ import annotations

from itertools import product

import torch
import triton
import triton.language as tl
from cut_cross_entropy import cce_lse_forward
from fla.ops.attn import parallel
from fla.ops.common import chunk_h
from liger_kernel.ops import rms_norm
from liger_kernel.ops.experimental import mm_int8int2

import confpred

PACKAGES = {"fla-core": "0.6.0", "liger-kernel": "0.8.5", "cut-cross-entropy": "25.1.1"}
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_SMALL, _LARGE = (16, 32, 64, 128), (32, 64, 128, 256)


def configs(least: int, most: int, **values) -> list[triton.Config]:
    """Return the configs of these values of each field; a thread has `least` to `most` elements of
    the tile of the first two fields."""
    found = []
    for row in product(*values.values()):
        fields = dict(zip(values, row, strict=True))
        how = {name: fields.pop(name) for name in ("num_warps", "num_stages") if name in fields}
        first, second = list(fields.values())[:2]
        if least <= first * second // (32 * how["num_warps"]) <= most:
            found.append(triton.Config(fields, **how))
    return found


def of(*shape: int, dtype: str) -> torch.Tensor:
    return torch.randn(shape, device=_DEVICE, dtype=torch.float32).to(getattr(torch, dtype))


_BLOCKS = {"num_warps": (4, 8), "num_stages": (2, 3, 4)}


def expert_example(tokens: int, experts: int, N: int, K: int, dtype: str) -> None:
    """Experts of random popularity, as of a router that is not balanced."""
    generator = torch.Generator().manual_seed(tokens + experts)
    weights = torch.rand(experts, generator=generator) + 0.1
    of_token = torch.multinomial(weights, tokens, replacement=True, generator=generator)
    starts = torch.zeros(experts + 1, dtype=torch.int32)
    starts[1:] = torch.bincount(of_token, minlength=experts).cumsum(0)
    x, w, out = (of(*s, dtype=dtype) for s in ((tokens, K), (experts, N, K), (tokens, N)))

    def grid(meta):
        tiles = triton.cdiv(tokens, meta["BLOCK_M"]) + experts
        return (tiles, triton.cdiv(N, meta["BLOCK_N"]))

    expert_product[grid](x, w, out, starts.to(_DEVICE), tokens, experts, N, K)


def expert_reference(x, w, starts, experts, **_):
    ends = starts.tolist()
    parts = [x[ends[e] : ends[e + 1]].double() @ w[e].double().T for e in range(experts)]
    return {"out": torch.cat(parts)}


@confpred.tuned(
    configs(16, 256, BLOCK_M=_SMALL, BLOCK_N=_LARGE, BLOCK_K=(32, 64), **_BLOCKS),
    ["tokens", "experts", "N", "K"],
    example=expert_example,
    reference=expert_reference,
    features={
        "rows_a_tile": lambda tokens, experts, BLOCK_M, **_: tokens / experts / BLOCK_M,
        "tiles": lambda tokens, experts, N, BLOCK_M, BLOCK_N, **_: (
            (experts + tokens / BLOCK_M) * N / BLOCK_N
        ),
    },
)
@triton.jit(do_not_specialize=["tokens", "experts"])
def expert_product(
    x, w, out, starts, tokens, experts, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of `x` are sorted by expert; a program looks for the expert of its tile of rows."""
    tile = tl.program_id(0)
    expert, before, start = tile * 0, tile * 0, tile * 0
    end = tl.load(starts + 1)
    tiles = tl.cdiv(end - start, BLOCK_M)
    while (tile >= before + tiles) & (expert < experts - 1):
        before += tiles
        expert += 1
        start = end
        end = tl.load(starts + expert + 1)
        tiles = tl.cdiv(end - start, BLOCK_M)
    m = start + (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if tile < before + tiles:
        matrix = w + expert.to(tl.int64) * N * K
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            in_x, in_w = (m[:, None] < end) & (k[None, :] < K), (n[None, :] < N) & (k[:, None] < K)
            part_x = tl.load(x + m[:, None] * K + k[None, :], mask=in_x, other=0.0)
            part_w = tl.load(matrix + n[None, :] * K + k[:, None], mask=in_w, other=0.0)
            total = tl.dot(part_x, part_w, total)
        in_out = (m[:, None] < end) & (n[None, :] < N)
        tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=in_out)


def attention_example(T: int, HQ: int, K: int, dtype: str) -> None:
    q, k, v, do, dk, dv = (of(1, T, HQ, K, dtype=dtype) for _ in range(6))
    scores = torch.full(
        (1, T, HQ), 10.0, device=_DEVICE
    )  # log-sums, so that no exponential is large
    delta = torch.zeros_like(scores)
    sizes = {"T": T, "W": None, "B": 1, "H": HQ, "HQ": HQ, "G": 1, "K": K, "V": K}
    attention_keys[lambda meta: (triton.cdiv(T, meta["BT"]), HQ)](
        q=q, k=k, v=v, g_cumsum=None, lse=scores, delta=delta, do=do, dk=dk, dv=dv, dg_cumsum=None,
        cu_seqlens=None, chunk_indices=None, scale=K**-0.5, **sizes, BK=K, BV=K,
    )  # fmt: skip


def with_heuristics(kernel):
    """Return a kernel of ``triton.heuristics`` without the autotuner inside."""
    inner = kernel.fn
    while isinstance(inner, triton.runtime.Autotuner):
        inner = inner.fn
    return triton.heuristics(kernel.values)(inner)


attention_keys = confpred.tuned(
    [  # its mask of a tile of queries wants no more of them than keys
        config
        for config in configs(
            8, 128, BT=(32, 64, 128), BS=(16, 32, 64, 128), num_warps=(4, 8), num_stages=(1, 2, 3)
        )
        if config.kwargs["BS"] <= config.kwargs["BT"]
    ],
    ["T", "HQ", "K"],
    example=attention_example,
    features={
        "programs": lambda T, HQ, BT, **_: HQ * T / BT,
        "steps": lambda T, BS, **_: T / BS,
    },
    name="attention_keys",
)(with_heuristics(parallel.parallel_attn_bwd_kernel_dkv))


def norm_example(n_rows: int, n_cols: int, dtype: str) -> None:
    dy, x, dx = (of(n_rows, n_cols, dtype=dtype) for _ in range(3))
    w, programs = of(n_cols, dtype=dtype), 132
    rstd, dw = torch.ones(n_rows, device=_DEVICE), torch.zeros(programs, n_cols, device=_DEVICE)
    rms_norm_backward[(programs,)](
        dy, n_cols, dx, n_cols, x, n_cols, rms_norm.torch_to_triton_dtype[x.dtype], w, 1, rstd, 1,
        dw, n_cols, n_rows, n_cols, 0.0, rms_norm._CASTING_MODE_LLAMA.value,
        elementwise_affine=True, BLOCK_SIZE=triton.next_power_of_2(n_cols),
    )  # fmt: skip


def norm_reference(X_ptr, dY_ptr, W_ptr, RSTD_ptr, **_):
    """Return the input's gradient; the weights' are a program's sums, which vary."""
    scaled = dY_ptr.double() * W_ptr.double()
    x, rstd = X_ptr.double(), RSTD_ptr.double()[:, None]
    return {"dX_ptr": rstd * (scaled - rstd**2 * (scaled * x).mean(1, keepdim=True) * x)}


rms_norm_backward = confpred.tuned(
    [
        triton.Config({"BLOCK_ROW": rows}, num_warps=warps, num_stages=stages)
        for rows, warps, stages in product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (1, 2))
        if rows <= 2 * warps  # a thread of more elements compiles for minutes
    ],
    ["n_rows", "n_cols"],
    example=norm_example,
    reference=norm_reference,
    features={
        "elements_a_thread": lambda n_cols, BLOCK_ROW, num_warps, **_: (
            BLOCK_ROW * triton.next_power_of_2(n_cols) / (32 * num_warps)
        ),
        "steps": lambda n_rows, BLOCK_ROW, **_: n_rows / (132 * BLOCK_ROW),
    },
    name="rms_norm_backward",
)(rms_norm._block_rms_norm_backward_kernel)


def logsumexp_example(B: int, V: int, D: int, dtype: str) -> None:
    e, c = of(B, D, dtype=dtype), of(V, D, dtype=dtype) / D**0.5
    lse = torch.full((B,), -float("inf"), device=_DEVICE)
    locks = torch.zeros(triton.cdiv(B, 128), dtype=torch.uint32, device=_DEVICE)
    logsumexp_of_linear[
        lambda meta: (triton.cdiv(B, meta["BLOCK_B"]) * triton.cdiv(V, meta["BLOCK_V"]),)
    ](e, c, lse, None, locks, None, None, B, V, D, D, 1, D, 1, 1, 1, num_locks=len(locks), B_BIN=0)


def logsumexp_reference(E, C, **_):
    return {"LSE": torch.logsumexp(E.float() @ C.float().T, 1)}


logsumexp_of_linear = confpred.tuned(
    configs(
        *(16, 256),
        BLOCK_B=(32, 64, 128, 256), BLOCK_V=(32, 64, 128, 256), BLOCK_D=(32, 64),
        num_warps=(4, 8), num_stages=(2, 4),
    ),
    ["B", "V", "D"],
    example=logsumexp_example,
    reference=logsumexp_reference,
    name="logsumexp_of_linear",
)(cce_lse_forward._cce_lse_forward_kernel.fn)  # fmt: skip


def states_example(T: int, H: int, K: int, V: int, dtype: str) -> None:
    block = 64
    k, v = of(1, T, H, K, dtype=dtype), of(1, T, H, V, dtype=dtype)
    h = torch.zeros(1, triton.cdiv(T, block), H, K, V, device=_DEVICE, dtype=k.dtype)
    g = -torch.rand(1, T, H, device=_DEVICE).cumsum(1) / 64
    switches = {"USE_G": True, "USE_G_GAMMA": False, "USE_GK": False, "USE_GV": False}
    states[lambda meta: (triton.cdiv(K, meta["BK"]) * triton.cdiv(V, meta["BV"]) * H,)](
        k=k, v=v, h=h, g=g, g_gamma=None, gk=None, gv=None, h0=None, ht=None, cu_seqlens=None,
        split_offsets=None, T=T, H=H, K=K, V=V, BT=block, BS=block, STATE_V_FIRST=False, **switches,
    )  # fmt: skip


states = confpred.tuned(
    configs(8, 128, BK=(32, 64, 128), BV=(32, 64, 128), num_warps=(2, 4, 8), num_stages=(2, 3, 4)),
    ["T", "H", "K", "V"],
    example=states_example,
    features={"programs": lambda H, K, V, BK, BV, **_: H * K * V / (BK * BV)},
    name="states",
)(with_heuristics(chunk_h.chunk_fwd_kernel_h))


def two_bit_example(M: int, N: int, K: int, dtype: str) -> None:
    a = torch.randint(-128, 128, (M, K), dtype=torch.int8, device=_DEVICE)
    b = torch.randint(0, 256, (K // 4, N), dtype=torch.uint8, device=_DEVICE)
    mm_int8int2.matmul_kernel = two_bit_product
    mm_int8int2.matmul(a, b)


def two_bit_reference(a_ptr, b_ptr, **_):
    shifts = [(b_ptr >> 2 * i) & 3 for i in range(4)]  # the i-th quarter of the rows
    w = torch.cat(shifts).double() - 1
    return {"c_ptr": (a_ptr.double() @ w).int()}


two_bit_product = confpred.tuned(
    configs(
        *(16, 256),
        BLOCK_SIZE_M=_SMALL, BLOCK_SIZE_N=_LARGE, BLOCK_SIZE_K=(32, 64, 128), GROUP_SIZE_M=(8,),
        num_warps=(4, 8), num_stages=(3,),
    ),
    ["M", "N", "K"],
    example=two_bit_example,
    reference=two_bit_reference,
    name="two_bit_product",
)(mm_int8int2.matmul_kernel.fn)  # fmt: skip

#: Shapes that are sampled, as `confpred sample --ranges` reads them. Sizes that Triton compiles
#: apart are few.
RANGES = {
    "expert_product": "tokens=64:8192,experts=8/16/64,N=512:8192:128,K=512:4096:64",
    "attention_keys": "T=256:4096,HQ=16,K=64/128,dtype=bfloat16",
    "rms_norm_backward": "n_rows=64:32768,n_cols=256:4096:64,dtype=bfloat16",
    "logsumexp_of_linear": "B=256:2048:128,V=2048:16384:128,D=512:2048:128",
    "states": "T=512:32768,H=16,K=64/128,V=64/128,dtype=bfloat16",
    "two_bit_product": "M=16:4096,N=512:8192:64,K=2048/4096/8192,dtype=int8",
}
