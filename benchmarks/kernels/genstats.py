"""Statistics of a batch norm from the convolution before it: what cuDNN's pattern for it costs.

    python -m benchmarks.kernels.genstats [--out FOLDER] [--plans 8] [--seconds 150]

For dense layers of networks in float16, each followed by a batch norm, all in the same rounds and
with cold caches: cuDNN's plans for the convolution alone, its plans that also add up each channel's
sum and sum of squares, and confpred's launch of a batch norm's statistics, which reads the output
once more. A convolution with statistics pays where its best plan takes less than the other two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kernels.conv_vs_cudnn import interleaved_ms
from benchmarks.kernels.norms import call_of
from benchmarks.provenance import folder_of, provenance, write
from confpred.errors import ConfpredError
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.norm import BatchNorm

NAME = "genstats"
#: Batch, input channels, height and width, output channels, filter, stride.
LAYERS: tuple[tuple[int, int, int, int, int, int], ...] = (
    (128, 64, 56, 256, 1, 1),  # resnet50
    (128, 64, 56, 64, 3, 1),
    (128, 512, 28, 128, 1, 1),
    (128, 256, 14, 1024, 1, 1),
    (128, 256, 14, 256, 3, 1),
    (128, 512, 7, 2048, 1, 1),
    (128, 24, 56, 72, 1, 1),  # mnasnet_100
    (128, 80, 14, 480, 1, 1),
    (128, 128, 56, 32, 3, 1),  # densenet121
    (128, 256, 28, 128, 1, 1),
)
_SUMS, _SQUARES = 100, 101  # numbers of these tensors in cuDNN's graph


def layer(n: int, c: int, side: int, k: int, size: int, stride: int) -> Problem:
    return Problem(n, c, side, side, k, size, size, stride=stride, padding=size // 2)


def norm_after(problem: Problem) -> BatchNorm:
    """Return the batch norm of a convolution's output."""
    return BatchNorm(problem.n, problem.p, problem.q, problem.k, problem.dtype)


def graph_of(problem: Problem, *, with_sums: bool, **where: Any) -> Any:
    """Return cuDNN's graph of a convolution with its plans, and the sums of its output."""
    from confpred.cudnn import plans

    cudnn = plans.front_end()
    half, wide = cudnn.data_type.HALF, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=half, intermediate_data_type=wide, compute_data_type=wide, **where
    )
    made, *given = CONVOLUTION.operands(problem)
    uids = plans.operand_uids(problem)
    image, weight = (
        graph.tensor(
            name=o.name, data_type=half, uid=uids[o.name],
            dim=plans._sizes(o), stride=plans._strides(o),
        )
        for o in given
    )  # fmt: skip
    pairs = {name: list(getattr(problem, name)) for name in plans.PAIRS}
    out = graph.conv_fprop(image=image, weight=weight, **pairs)
    out.set_output(True).set_data_type(half).set_uid(uids[made.name])
    out.set_dim(plans._sizes(made)).set_stride(plans._strides(made))
    if with_sums:
        for uid, each in zip((_SUMS, _SQUARES), graph.genstats(out), strict=True):
            each.set_output(True).set_data_type(wide).set_uid(uid)
            each.set_dim([1, problem.k, 1, 1]).set_stride([problem.k, 1, problem.k, problem.k])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph


def calls_of(
    problem: Problem, *, with_sums: bool, most: int
) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Return the first `most` plans that can be built, by name: functions of tensors by name that
    return the output, the sums and the sums of squares."""
    import torch

    from confpred.cudnn import plans

    handle = plans._handle(0)
    graph = graph_of(problem, with_sums=with_sums, handle=handle)
    uids = plans.operand_uids(problem)
    shape = CONVOLUTION.operands(problem)[0].shape
    found: dict[str, Callable[[dict[str, Any]], Any]] = {}
    for index in range(graph.get_execution_plan_count()):
        if len(found) == most:
            break
        try:
            graph.build_plan_at_index(index)
            size = graph.get_workspace_size_plan_at_index(index)
        except (RuntimeError, plans.front_end().cudnnGraphNotSupportedError):
            continue
        space = torch.empty(size + 1, dtype=torch.uint8, device="cuda")

        def call(tensors: dict[str, Any], index: int = index, space: Any = space) -> Any:
            out = torch.empty(shape, dtype=torch.float16, device="cuda")
            sums = torch.empty(2, problem.k, device="cuda")
            given = {uids["in"]: tensors["in"], uids["filter"]: tensors["filter"]}
            given |= {uids["out"]: out}
            given |= {_SUMS: sums[0], _SQUARES: sums[1]} if with_sums else {}
            stream = torch.cuda.current_stream().cuda_stream
            plans.front_end().set_stream(handle=handle, stream=stream)
            pointers = {uid: t.data_ptr() for uid, t in given.items()}
            graph._execute_plan_at_index(pointers, space.data_ptr(), index, handle)
            return out, sums

        found[graph.get_plan_name_at_index(index)] = call
    return found


def statistics_calls(norm: BatchNorm, most: int) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Return configs of the first launch of a batch norm in two, which takes the statistics: `most`
    of them, evenly from the order of their estimates."""
    import numpy as np

    from confpred.cuda import driver
    from confpred.families.registry import all_families

    family, device = all_families()["batch_norm_two_pass"], driver.device_of(0)
    rows = np.flatnonzero(family.legal(norm, device))
    rows = rows[np.argsort(family.estimate_s(norm, device, rows))]
    kept = [int(row) for row in rows[:: max(1, len(rows) // most)]][:most]
    return {f"statistics {row}": call_of(family, norm, row, steps=1) for row in kept}


def one(problem: Problem, most: int, evict: Any) -> dict[str, Any]:
    """Return the times of one layer, and how far the sums are from those of the output."""
    import torch

    from confpred.cuda import driver
    from confpred.measure import pytorch as operator
    from confpred.measure import timing
    from confpred.problem.norm import BATCH_NORM

    norm = norm_after(problem)
    launches = timing.launches_a_replay(2 * driver.device_of(0).roofline_s(problem))
    inputs = operator.operands(CONVOLUTION, problem, 2)
    norms = operator.operands(BATCH_NORM, norm, 2)
    kinds = {
        "alone": (calls_of(problem, with_sums=False, most=most), inputs),
        "with sums": (calls_of(problem, with_sums=True, most=most), inputs),
        "statistics": (statistics_calls(norm, most), norms),
    }
    names, turned, errors = [], [], []
    for kind, (calls, sets) in kinds.items():
        for name, call in calls.items():
            if kind == "with sums":
                out, sums = call(sets[0])
                wide = out.double()
                wanted = torch.stack([wide.sum((0, 1, 2)), wide.square().sum((0, 1, 2))])
                errors.append(float((sums.double() - wanted).norm() / wanted.norm()))
            turned.append(lambda i, call=call, sets=sets: call(sets[i % 2]))
            names.append((kind, name))
    times = interleaved_ms(turned, range(launches), evict)
    found: dict[str, Any] = {"problem": str(problem), "largest_error": max(errors, default=None)}
    for kind in kinds:
        here = [(ms, name) for (k, name), ms in zip(names, times, strict=True) if k == kind]
        if here:
            found[kind] = {"ms": min(here)[0], "best": min(here)[1], "plans": len(here)}
    if all(kind in found for kind in kinds):
        apart = found["alone"]["ms"] + found["statistics"]["ms"]
        found["gain"] = apart / found["with sums"]["ms"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="default: the device's folder of results")
    parser.add_argument("--plans", type=int, default=8, help="of each kind, cuDNN's first")
    parser.add_argument("--seconds", type=float, default=150.0, help="begin nothing after these")
    arguments = parser.parse_args()

    from confpred.cuda import driver
    from confpred.measure import pytorch as operator

    driver.make_current(0)
    start, results = time.time(), []
    evict = operator.Evictor(driver.device_of(0).l2_bytes)
    for sizes in LAYERS:
        if time.time() - start > arguments.seconds:
            break
        try:
            results.append(one(layer(*sizes), arguments.plans, evict))
        except (ConfpredError, RuntimeError) as error:  # the others still count
            results.append({"problem": str(layer(*sizes)), "failed": str(error)[:300]})
        print(results[-1], flush=True)
    facts = provenance("torch", "nvidia-cudnn-frontend", gpu=True)
    path = write(NAME, facts | {"layers": results}, folder_of(arguments.out))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
