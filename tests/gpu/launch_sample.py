"""Launches a few configs of one family on small layers; run under compute-sanitizer.

Each operand is an allocation of exactly its size, so that the sanitizer sees every access beyond
it; outputs and scratch are not initialised, so that it sees every read of what nobody wrote.
Imports no PyTorch: its libraries would take the sanitizer minutes.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from cuda.bindings import driver as cuda

sys.path.insert(0, str(Path(__file__).parents[1]))
from layers import NORMS, OTHER_RANKS, random_legal_conv, random_legal_layer, random_norm

from confpred.cuda import driver
from confpred.families.protocol import Family
from confpred.families.registry import all_families
from confpred.launch.runner import bound, workspaces
from confpred.problem.conv2d import Problem
from confpred.problem.operation import ZEROED

LAYERS, CONFIGS = 4, 4
_ONES = 0x3C  # repeated, a small number in every dtype


def allocate(size: int, fill: int | None) -> int:
    """Address of `size` bytes, which hold `fill` or nothing in particular."""
    code, address = cuda.cuMemAlloc(size)
    if code:
        raise SystemExit(f"no memory: {code.name}")
    if fill is not None:
        cuda.cuMemsetD8(address, fill, size)
    return int(address)


def launch(family: Family, problem: Problem, row: int, stream: int) -> None:
    """One config, on memory of its own."""
    launch = family.launch(problem, row)
    operands = {
        o.name: allocate(o.bytes, None if o.terms else _ONES)
        for o in family.operation.operands(problem)
    }
    for name, size in workspaces(launch).items():
        operands[name] = allocate(size, 0 if name == ZEROED else None)
    enqueue = bound(launch, list(operands), 0)
    cuda.cuCtxSynchronize()  # the stream below does not wait for what filled the memory
    enqueue(stream, list(operands.values()))
    (code,) = cuda.cuCtxSynchronize()
    if code:
        raise SystemExit(f"{family.name} row {row} of {problem}: {code.name}")
    for address in operands.values():
        cuda.cuMemFree(address)


def main() -> None:
    """Launch configs of the family that the command line names."""
    family = all_families()[sys.argv[1]]
    device = driver.device_of(0)
    stream = driver.make_current(0).create_stream()  # kept: it is destroyed with its object
    rng = random.Random(0)
    launched = 0
    for index in range(LAYERS):
        if family.name in NORMS:
            problem = random_norm(rng, family)
        elif family.name in OTHER_RANKS:
            problem = random_legal_conv(rng, family, device)
        else:
            problem = random_legal_layer(rng, family, device)
            problem = replace(problem, n=min(problem.n, 2))
        if problem.direction == "wgrad":  # half of them as fast as can be, half repeatable
            problem = replace(problem, deterministic=bool(index % 2))
        rows = np.flatnonzero(family.legal(problem, device)).tolist()
        for row in rng.sample(rows, min(CONFIGS, len(rows))):
            launch(family, problem, row, int(stream.handle))
            launched += 1
    print(f"launched {launched}")


if __name__ == "__main__":
    main()
