"""Host time of a launch of a remembered shape: ``confpred.tuned`` beside ``triton.autotune``.

    python -m benchmarks.host.triton_launch [--out FOLDER]

Both have the kernel and the configs of ``examples/triton/fused_linear.py``, and a shape that they
have met. Without a GPU a stand-in of Triton's driver compiles for an H100 and launches nothing.
That leaves Python's part, which is all that differs. The two take turns in one process, and the
processor's time of a launch is the least of its turns, as others lengthen it only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

import confpred
from benchmarks.provenance import RESULTS, ROOT, provenance

TURNS, LAUNCHES = 15, 2000
M, N, K = 512, 1024, 768


class NoLaunch:
    """Stand-in of Triton's driver, its utilities and its launcher."""

    launcher_cls = staticmethod(lambda source, metadata: lambda *arguments: None)

    @property
    def utils(self) -> NoLaunch:
        return self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def load_binary(self, *about: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024


def launches() -> dict[str, Callable[[], Any]]:
    """Return a launch of each decorator, after its first one."""
    sys.path.insert(0, str(ROOT / "examples" / "triton"))
    import fused_linear

    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        triton.runtime.driver.set_active(NoLaunch())
    key, configs = ["M", "N", "K"], fused_linear.CONFIGS[:2]
    bench = {"do_bench": lambda call, quantiles: (call(), [1.0] * 3)[1]}
    kernels = {
        "triton.autotune": triton.autotune(configs, key, **bench)(fused_linear.fused_linear.fn),
        "confpred.tuned": confpred.tuned(configs, key, **bench)(fused_linear.fused_linear.fn),
    }
    options = {"device": "cuda" if has_gpu else "cpu", "dtype": torch.float16}
    x, w, bias, out = (torch.zeros(s, **options) for s in ((M, K), (N, K), (N,), (M, N)))

    def launch(kernel: Any) -> Callable[[], Any]:
        bound = kernel[
            lambda meta: (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)
        ]
        bound(x, w, bias, out, M, N, K)
        return lambda: bound(x, w, bias, out, M, N, K)

    return {name: launch(kernel) for name, kernel in kernels.items()}


def microseconds(launch: Callable[[], Any]) -> float:
    began = time.process_time()
    for _ in range(LAUNCHES):
        launch()
    return (time.process_time() - began) / LAUNCHES * 1e6


def measure() -> dict[str, float]:
    found = launches()
    turns = [{name: microseconds(launch) for name, launch in found.items()} for _ in range(TURNS)]
    least = {name: min(turn[name] for turn in turns) for name in found}
    ratio = least["confpred.tuned"] / least["triton.autotune"]
    return {name: round(us, 2) for name, us in least.items()} | {"ratio": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of a Triton launch.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    found = {"microseconds": measure(), "launched": torch.cuda.is_available()}
    facts = {"provenance": provenance("torch", "triton", gpu=torch.cuda.is_available())}
    (out / "triton_launch.json").write_text(json.dumps(facts | found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
