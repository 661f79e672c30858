"""Random convolutions against float64, on memory that was full of NaN.

    python -m benchmarks.kernels.random_convolutions    # on a GPU, 5,000 of them
    python -m benchmarks.kernels.random_convolutions --device cpu --count 40 --workers 2

Sizes, strides, paddings, dilations, groups, dtypes, epilogues and layouts are drawn. One half goes
through `confpred.conv2d`, with or without gradients, the other half through the operators that
captured graphs call. For one part the model chooses, and for the other (``--forced``) a kernel of
confpred serves every convolution that one is legal for. A result may be as far from float64 as
``ALLOWED`` says, or three times as far as PyTorch's result in the same dtype. The record is in
``benchmarks/results/DEVICE/random_convolutions.json``; exit status 1 says that a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

#: Largest error in the 2-norm, relative: a few roundings, and TF32 for float32.
ALLOWED = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-3, "float64": 1e-9}
TIMES = 3.0
WAYS = ("conv2d", "gradients", "operator", "backward")
LAYOUTS = ("last", "last", "last", "last", "first", "misaligned", "gaps", "expanded", "negative")
ACTIVATIONS = ("none", "relu", "silu", "gelu", "relu6", "hardswish")
_MOST = 2**21  # elements of the input, and of the output
_TOGETHER = 64  # convolutions whose kernels are compiled in parallel


@dataclass(frozen=True, slots=True)
class Case:
    """One convolution.

    Attributes:
        seed: of its numbers.
        way: one of ``WAYS``.
        image, filters: N, C, H, W and K, C / groups, R, S.
        geometry: stride, padding, dilation, groups.
        dtype, layout, activation: of the input.
        bias, residual: whether there is one.
        mask: which gradients are asked for.
    """

    seed: int
    way: str
    image: tuple[int, ...]
    filters: tuple[int, ...]
    geometry: Any
    dtype: str
    layout: str
    activation: str
    bias: bool
    residual: bool
    mask: tuple[bool, bool, bool]

    @staticmethod
    def drawn(seed: int) -> Case:
        """Return the convolution of a number; its output is not empty."""
        rng = random.Random(seed)
        while True:
            width = rng.choice((1, 1, 1, 2, 4, 8, 8, 16, 16, 32, 32, 5, 24, 64))
            groups = rng.choice((1, 2, 3, 4, 8, 16)) * (rng.choice((8, 4, 3)) if width == 1 else 1)
            multiple = rng.choice((width, width, width, 1, 2, 2 * width))
            r, s = rng.choice(
                ((1, 1), (3, 3), (3, 3), (3, 3), (5, 5), (7, 7), (1, 3), (7, 1), (2, 2))
            )
            stride = (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2)))
            dilation = (rng.choice((1, 1, 1, 2)), rng.choice((1, 1, 1, 3)))
            padding = (rng.randrange(r + 1), rng.randrange(s + 1))
            n, h, w = rng.choice((1, 1, 2, 3, 8, 32)), rng.randint(1, 64), rng.randint(1, 64)
            sizes = [
                (x + 2 * p - d * (f - 1) - 1) // t + 1
                for x, p, d, f, t in zip((h, w), padding, dilation, (r, s), stride, strict=True)
            ]
            k = multiple * groups
            if (
                min(sizes) < 1
                or n * h * w * width * groups > _MOST
                or n * k * sizes[0] * sizes[1] > _MOST
            ):
                continue
            way = WAYS[seed % len(WAYS)]
            mask = rng.choice(((True, True, True), (True, True, False), (True, False, False),
                               (False, True, False), (False, True, True)))  # fmt: skip
            layout = rng.choice(LAYOUTS)
            if way in ("operator", "backward") and layout == "negative":
                layout = "last"  # a captured graph has none
            return Case(
                seed, way, (n, width * groups, h, w), (k, width, r, s),
                (stride, padding, dilation, groups),
                rng.choice(("float16",) * 4 + ("bfloat16",) * 2 + ("float32",) * 2 + ("float64",)),
                layout, rng.choice(ACTIVATIONS), rng.random() < 0.5, rng.random() < 0.4, mask,
            )  # fmt: skip


def main() -> int:
    """Run what the command line names."""
    kind = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--forced", type=float, default=0.5, help="part by kernels where legal")
    parser.add_argument("--workers", type=int, default=8, help="processes")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        seeds = range(args.first + args.worker, args.first + args.count, args.workers)
        for row in records(seeds, args.device, args.forced):
            print(json.dumps(row), flush=True)
        return 0
    start = time.perf_counter()
    with ThreadPoolExecutor(args.workers) as pool:
        parts = list(pool.map(lambda worker: run_worker(worker, args), range(args.workers)))
    rows = [row for part, _ in parts for row in part]
    crashed = [why for _, why in parts if why]
    return report(rows, crashed, args, time.perf_counter() - start)


def run_worker(worker: int, args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Return the records of one process, and how it ended if not as it should."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.kernels.random_convolutions",
        "--worker",
        str(worker),
        "--device",
        args.device,
    ]
    for name in ("count", "first", "forced", "workers"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    why = f"exit status {done.returncode}: {done.stderr[-500:]}" if done.returncode else ""
    return rows, why


def report(
    rows: list[dict[str, Any]], crashed: list[str], args: argparse.Namespace, seconds: float
) -> int:
    """Write what `rows` come to, and print it."""
    from benchmarks import provenance

    wrong = [row for row in rows if not row["is_right"]]
    largest: dict[str, float] = {}
    for row in rows:
        if row.get("error") is not None:
            key = f"{row['served']} {row['dtype']}"
            largest[key] = max(largest.get(key, 0.0), row["error"])
    gpu = args.device == "cuda"
    result = {
        "provenance": provenance.provenance("torch", gpu=gpu),
        "count": len(rows),
        "asked": args.count,
        "forced": args.forced,
        "seconds": round(seconds, 1),
        "served": dict(Counter(row["served"] for row in rows)),
        "ways": dict(Counter(row["way"] for row in rows)),
        "allowed": ALLOWED,
        "largest_error": dict(sorted(largest.items())),
        "wrong": wrong,
        "crashed": crashed,
    }
    if args.out or gpu:
        print(provenance.write("random_convolutions", result, provenance.folder_of(args.out)))
    shown = {k: v for k, v in result.items() if k not in ("provenance", "wrong")}
    print(json.dumps(shown, indent=1))
    for row in wrong[:20]:
        print(row)
    return 1 if wrong or crashed or len(rows) != args.count else 0


# ---------------------------------------------------------------------------------- in a worker


def records(seeds: Iterable[int], device: str, forced: float) -> Iterable[dict[str, Any]]:
    """Yield the record of each number."""
    import torch

    import confpred

    confpred.use_predictor(predictor(forced))
    cases = [Case.drawn(seed) for seed in seeds]
    for start in range(0, len(cases), _TOGETHER):
        group = cases[start : start + _TOGETHER]
        if device == "cuda":
            compile_together(group)
        for case in group:
            row = {"seed": case.seed, "way": case.way, "dtype": case.dtype, "layout": case.layout}
            try:
                found = checked(case, device)
            except Exception as error:
                found = {
                    "served": "-",
                    "is_right": False,
                    "why": f"{type(error).__name__}: {error}",
                }
            yield row | found if found["is_right"] else row | found | {"case": repr(case)}
            if "CUDA error" in found.get("why", ""):
                raise SystemExit("the GPU is lost")
    if device == "cuda":
        torch.cuda.synchronize()


def predictor(forced: float) -> Any:
    """Return what chooses: a kernel wherever one is legal for a part of the problems."""
    from confpred.predict.predictor import Predictor

    class Partly(Predictor):
        def __init__(self, own: Predictor, guess: Predictor) -> None:
            super().__init__({})
            self._own, self._guess = own, guess

        def within(self, limits: Any) -> Partly:
            return Partly(self._own.within(limits), self._guess.within(limits))

        def choose(self, problem: Any, device: Any, **more: Any) -> Any:
            if random.Random(repr(problem)).random() >= forced:
                return self._own.choose(problem, device, **more)
            choice = self._guess.choose(problem, device)
            known = choice.source in ("transferred", "heuristic")
            return replace(choice, source="pinned") if known else choice

        def choose_many(self, problems: Any, device: Any, **more: Any) -> Any:
            return [self.choose(problem, device, **more) for problem in problems]

        def rank(self, *given: Any, **more: Any) -> Any:
            return self._own.rank(*given, **more)

        def expected_ms(self, *given: Any) -> Any:
            return self._own.expected_ms(*given)

    return Partly(Predictor.load(), Predictor({}))


def compile_together(cases: list[Case]) -> None:
    """Compile in parallel what `cases` are going to launch."""
    import torch

    from confpred.cuda import driver
    from confpred.pytorch.run import choosing, loading
    from confpred.pytorch.run.convolve import problem_of, sums_bias

    problems = []
    for case in cases:
        if case.dtype == "float64" or case.layout == "first":
            continue
        given = (case.image, case.filters, getattr(torch, case.dtype), case.geometry)
        if case.way in ("conv2d", "operator"):
            epilogue = {
                "bias": case.bias, "activation": case.activation, "residual": case.residual,
            }  # fmt: skip
            problems.append(problem_of("fprop", *given, **epilogue))
            continue
        if case.way == "gradients":
            problems.append(problem_of("fprop", *given, bias=case.bias))
        if case.mask[0]:
            problems.append(problem_of("dgrad", *given))
        if case.mask[1]:
            bias = case.mask[2] and sums_bias(case.geometry[3])
            problems.append(problem_of("wgrad", *given, bias=bias))
    known = [problem for problem in problems if problem is not None]
    choices = choosing.choose_many(known, driver.device_of(0))
    loading.compile_ahead([c for c in choices if c is not None], 0)


def checked(case: Case, device: str) -> dict[str, Any]:
    """Return who served `case`, and how far the worst of its results is from float64."""
    import torch

    from confpred.pytorch.run.loading import aligned

    served: list[bool] = []
    with listening(served):
        given = tensors(case, device)
        mine = results(case, given, ours=True)
    given = [None if t is None else aligned(t) for t in given]  # PyTorch fails on some that are not
    theirs = results(case, given, ours=False)
    exact = results(case, [None if t is None else t.double() for t in given], ours=False)
    error, is_right = 0.0, True
    for a, b, right in zip(mine, theirs, exact, strict=True):
        if a.dtype is not b.dtype or a.shape != b.shape:
            raise TypeError(f"{a.dtype} {a.shape} in place of {b.dtype} {b.shape}")
        own, off = distance(b, right), distance(a, right)
        error = max(error, off)
        is_right &= off <= max(ALLOWED[case.dtype], TIMES * own)
    del given
    if device == "cuda":
        torch.cuda.synchronize()  # an error of a kernel is of this case
    kernels = "kernels" if served and all(served) else "both" if any(served) else "PyTorch"
    return {"served": kernels, "error": error, "is_right": is_right}


@contextmanager
def listening(served: list[bool]) -> Iterator[None]:
    """Record each launch that is looked up inside the block: whether it is a chosen one."""
    from confpred.pytorch.run import convolve, loading

    find = convolve._find_launch

    def noting(*given: Any) -> Any:
        found = find(*given)
        served.append(isinstance(found, loading.ReadyLaunch))
        return found

    convolve._find_launch = noting
    try:
        yield
    finally:
        convolve._find_launch = find


def tensors(case: Case, device: str) -> list[Any]:
    """Return input, filter, bias, residual and the output's gradient."""
    import torch
    import torch.nn.functional as F

    dtype = getattr(torch, case.dtype)
    numbers = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=numbers, device=device).to(dtype)

    last = torch.channels_last
    x = laid(normal(*case.image).contiguous(memory_format=last), case.layout)
    weight = normal(*case.filters) / (case.filters[1] * case.filters[2] * case.filters[3]) ** 0.5
    weight = weight.contiguous(memory_format=last) if case.seed % 3 else weight
    bias = (
        normal(case.filters[0]) if case.bias or (case.way == "backward" and case.mask[2]) else None
    )
    shape = F.conv2d(x.float(), weight.float(), None, *case.geometry).shape
    residual = normal(*shape).contiguous(memory_format=last) if case.residual else None
    grad = normal(*shape)
    grad = grad.contiguous(memory_format=last) if case.seed % 5 else grad
    return [x, weight, bias, residual, grad]


def laid(x: Any, layout: str) -> Any:
    """Return the numbers of `x` in a layout; of ``expanded``, those of its first image."""
    import torch

    n, c, h, w = x.shape
    if layout == "first":
        return x.contiguous()
    if layout == "misaligned":
        spare = x.new_empty(x.numel() + 1)[1:].view(n, h, w, c).permute(0, 3, 1, 2)
        return spare.copy_(x)
    if layout == "gaps":
        return torch.cat((x, x), 1)[:, :c]
    if layout == "expanded":
        return x[:1].expand(n, c, h, w)
    return torch._neg_view(x) if layout == "negative" else x


def results(case: Case, given: list[Any], ours: bool) -> list[Any]:
    """Return what `case` computes, by confpred or by PyTorch."""
    import torch
    import torch.nn.functional as F

    import confpred
    from confpred.problem.activation import activated
    from confpred.pytorch.run import operators  # noqa: F401 - they are called below
    from confpred.pytorch.run.convolve import Call

    x, weight, bias, residual, grad = given
    geometry, act = case.geometry, case.activation
    if ours:
        poison(x.device)
    if case.way == "backward":
        call = Call(geometry, mask=case.mask)
        if ours:
            found = torch.ops.confpred.conv2d_backward(grad, x, weight, call.text())
        else:
            stride, padding, dilation, groups = geometry
            sizes = [weight.shape[0]] if case.mask[2] else None
            found = torch.ops.aten.convolution_backward(
                grad, x, weight, sizes, stride, padding, dilation, False, (0, 0), groups,
                list(case.mask),
            )  # fmt: skip
        return [g for g, asked in zip(found, case.mask, strict=True) if asked]
    if case.way == "operator" and ours:
        call = Call(geometry, act)
        return [torch.ops.confpred.conv2d(x, weight, None, bias, residual, call.text())]
    named = dict(zip(("stride", "padding", "dilation", "groups"), geometry, strict=True))
    needs = case.way == "gradients"
    leaves = [None if t is None else t.detach().requires_grad_(needs) for t in (x, weight, bias)]
    if ours:
        out = confpred.conv2d(*leaves, **named, activation=act, residual=residual)
    else:
        out = F.conv2d(*leaves, **named)
        out = activated(act, out if residual is None else out + residual)
    if not needs:
        return [out]
    asked = [t for t, wanted in zip(leaves, case.mask, strict=True) if t is not None and wanted]
    return [out.detach(), *torch.autograd.grad(out, asked, grad)]


def poison(device: Any) -> None:
    """Leave NaN in the memory that the next allocations get."""
    import torch

    if device.type == "cuda":
        sizes = (*(2**k for k in range(9, 21, 2) for _ in range(2)), 2**23, 2**24, 2**25)
        kept = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes]
        del kept


def distance(a: Any, exact: Any) -> float:
    """Return the norm of the difference as a part of the norm; infinite with a NaN."""
    if not a.isfinite().all():
        return float("inf")
    return float((a.double() - exact).norm() / exact.norm().clamp_min(1e-3 * a.numel() ** 0.5))


if __name__ == "__main__":
    sys.exit(main())
