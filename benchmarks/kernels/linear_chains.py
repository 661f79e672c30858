"""How long do chains of linear layers take, eager and as CUDA graphs, and how large are the errors?

    python -m benchmarks.kernels.linear_chains [--out FOLDER] [--seconds 1500] [--quick]

By PyTorch's operators, by a fused epilogue and by Strassen's algorithm: widths of 128 to 4096,
batches of 1 to 512, 1, 4 and 8 layers with bias and ReLU, in float32 with and without TF32 and in
float16. All ways of one chain are timed in turns in one run; eager steps include what the host
takes, CUDA graphs do not. Errors are those of the result in the 2-norm against float64. A run that
is cut short leaves a fair sample, and goes on where it stopped when it is started again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.kernels.im2col_chunks import graph_of, in_turns
from benchmarks.provenance import RESULTS, provenance, write
from confpred import products as chains
from confpred.families.protocol import Candidate, Family
from confpred.problem.device import get_device
from confpred.problem.limits import Limits
from confpred.problem.linear_chain import LinearChain
from confpred.products import epilogue, strassen

NAME = "linear_chains"
WIDTHS = (128, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 8, 32, 128, 512)
LAYERS = (1, 4, 8)
PRECISIONS = ("float32", "tf32", "float16")
#: The ways: PyTorch's operators as they are called, and confpred's.
EAGER = "pytorch"
FAMILIES: dict[str, Family] = {"epilogue": epilogue.FAMILY, "strassen": strassen.FAMILY}
QUICK_WIDTHS, QUICK_BATCHES = (512, 2048), (8, 512)


def problems(*, quick: bool) -> list[LinearChain]:
    """In a random order that is always the same."""
    found = [
        LinearChain(
            batch,
            width,
            width,
            width,
            layers,
            dtype="float32" if precision == "tf32" else precision,
            tf32=precision == "tf32",
        )
        for width in (QUICK_WIDTHS if quick else WIDTHS)
        for batch in (QUICK_BATCHES if quick else BATCHES)
        for layers in LAYERS
        for precision in PRECISIONS
    ]
    random.Random(0).shuffle(found)
    return found


def precision_of(problem: LinearChain) -> str:
    return "tf32" if problem.tf32 else problem.dtype


def candidates(problem: LinearChain) -> Iterator[tuple[str, Family, int]]:
    """Yield confpred's ways, by name; of a family the first config that is legal."""
    for name, family in FAMILIES.items():
        legal = family.legal(problem, get_device("h100"))
        if legal.any():
            yield name, family, int(legal.argmax())


def measure(problem: LinearChain) -> dict[str, Any]:
    """Milliseconds and errors of all ways of one chain."""
    import torch

    from confpred.launch.assignment import Assignment
    from confpred.measure.pytorch import operands
    from confpred.problem.linear_chain import LINEAR_CHAIN
    from confpred.problem.precision import matmul_tf32
    from confpred.pytorch.linear_chain import operands as chain_operands
    from confpred.pytorch.run.loading import ready_launch

    torch.manual_seed(0)
    (tensors,) = operands(LINEAR_CHAIN, problem, 1)
    weights = [tensors[f"weight{i}"] for i in range(problem.layers)]
    biases = [tensors[f"bias{i}"] for i in range(problem.layers)]
    x = tensors["in"]
    calls: dict[str, Callable[[], Any]] = {EAGER: lambda: LINEAR_CHAIN.pytorch(problem, tensors)}
    row: dict[str, Any] = {
        "problem": str(problem),
        "width": problem.hidden,
        "batch": problem.batch,
        "layers": problem.layers,
        "precision": precision_of(problem),
        "workspace_bytes": {EAGER: 0},
        "stated_error": {EAGER: chains.ordinary_error(problem)},
    }
    for name, family, config in candidates(problem):
        launch = family.launch(problem, config)
        run = ready_launch(Assignment(problem, Candidate(family.name, config)), 0).run
        calls[name] = lambda run=run: run(x, *chain_operands(weights, biases))[0]
        row["workspace_bytes"][name] = launch.workspace_bytes
        row["stated_error"][name] = launch.error
    right = x.double()
    for weight, bias in zip(weights, biases, strict=True):
        right = torch.relu(right @ weight.double().T + bias.double())
    with torch.no_grad(), matmul_tf32(problem.tf32):
        row["error"] = {
            name: float((call().double() - right).norm() / right.norm())
            for name, call in calls.items()
        }
        del right
        eager = in_turns(list(calls.values()))
        graphs = in_turns([graph_of(call) for call in calls.values()])
    row["eager_ms"] = dict(zip(calls, eager, strict=True))
    row["graph_ms"] = dict(zip(calls, graphs, strict=True))
    return row


def chosen(row: dict[str, Any], kind: str, limits: Limits) -> str:
    """Return the fastest way of a row whose stated error keeps within `limits`, in hindsight."""
    problem = LinearChain.parse(row["problem"])
    ordinary = chains.ordinary_error(problem)
    bound = ordinary if limits.max_error is None else limits.max_error
    allowed = {
        n: ms for n, ms in row[kind].items() if row["stated_error"][n] <= max(bound, ordinary)
    }
    return min(allowed, key=allowed.__getitem__)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each precision and length: speeds over eager and over a CUDA graph of eager, the largest
    errors, and where Strassen's algorithm is the fastest."""
    lines = []
    for precision in PRECISIONS:
        for layers in LAYERS:
            here = [r for r in rows if r["precision"] == precision and r["layers"] == layers]
            if not here:
                continue
            line: dict[str, Any] = {"precision": precision, "layers": layers, "chains": len(here)}
            for name in FAMILIES:
                some = [r for r in here if name in r["eager_ms"]]
                for kind in ("eager_ms", "graph_ms"):
                    speeds = [r[kind][EAGER] / r[kind][name] for r in some]
                    line[f"{name}_{kind[:-3]}"] = geometric_mean(speeds) if speeds else None
                    line[f"{name}_{kind[:-3]}_best"] = max(speeds, default=None)
                graph = [r["eager_ms"][EAGER] / r["graph_ms"][name] for r in some]
                line[f"{name}_graph_over_eager"] = geometric_mean(graph) if graph else None
                line[f"{name}_error"] = max((r["error"][name] for r in some), default=None)
            line["pytorch_error"] = max(r["error"][EAGER] for r in here)
            for bound, limits in (("exact", Limits()), ("bounded", Limits(max_error=0.01))):
                picks = [chosen(r, "graph_ms", limits) for r in here]
                speeds = [
                    r["graph_ms"][EAGER] / r["graph_ms"][pick]
                    for r, pick in zip(here, picks, strict=True)
                ]
                line[f"{bound}_best_graph"] = geometric_mean(speeds)
                line[f"{bound}_strassen_wins"] = picks.count("strassen")
            lines.append(line)
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Return the summary of CUDA graphs as Markdown; speeds are geometric means over PyTorch's."""
    heads = (
        "precision", "layers", "chains", "epilogue", "Strassen", "Strassen's best", "fastest",
        "chains that Strassen wins", "PyTorch's error", "epilogue's", "Strassen's",
    )  # fmt: skip
    text = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    speeds = ("epilogue_graph", "strassen_graph")
    for line in lines:
        cells = [line["precision"], str(line["layers"]), str(line["chains"])]
        for name in (*speeds, "strassen_graph_best", "bounded_best_graph"):
            cells.append("" if line[name] is None else f"{line[name]:.2f}x")
        cells.append(str(line["bounded_strassen_wins"]))
        for name in ("pytorch_error", "epilogue_error", "strassen_error"):
            cells.append("" if line[name] is None else f"{line[name]:.1e}")
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Speeds over a CUDA graph of eager, by batch: a panel a precision and length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(LAYERS), 2.6 * len(PRECISIONS)), layout="constrained")
    axes = figure.subplots(len(PRECISIONS), len(LAYERS), squeeze=False, sharex=True, sharey=True)
    widths = sorted({row["width"] for row in rows})
    styles = {"epilogue": "--", "strassen": "-"}
    for line, precision in zip(axes, PRECISIONS, strict=True):
        for ax, layers in zip(line, LAYERS, strict=True):
            for shade, width in enumerate(widths):
                for name, style in styles.items():
                    points = sorted(
                        (row["batch"], row["graph_ms"][EAGER] / row["graph_ms"][name])
                        for row in rows
                        if (row["precision"], row["layers"], row["width"])
                        == (precision, layers, width)
                        and name in row["graph_ms"]
                    )
                    if points:
                        color = f"C{shade}"
                        ax.plot(*zip(*points, strict=True), style, color=color, linewidth=1)
            ax.axhline(1.0, color="black", linewidth=0.8)
            ax.set_xscale("log", base=2)
            ax.set_title(f"{precision}, {layers} layer{'s' if layers > 1 else ''}", fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("batch", fontsize=8)
    for line in axes:
        line[0].set_ylabel("speed over PyTorch, graphs", fontsize=8)
    from matplotlib.lines import Line2D

    legend = [Line2D([], [], color=f"C{i}", label=f"width {w}") for i, w in enumerate(widths)]
    legend += [Line2D([], [], color="gray", linestyle=s, label=n) for n, s in styles.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=7)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=1500.0, help="begin no chain after these")
    parser.add_argument("--quick", action="store_true", help="a few sizes")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    import torch

    former = arguments.out / f"{NAME}.json"
    rows = json.loads(former.read_text())["rows"] if former.exists() else []
    timed = {row["problem"] for row in rows}
    facts = provenance("torch", gpu=True) | {"cublas": torch.version.cuda}
    for problem in problems(quick=arguments.quick):
        if str(problem) in timed:
            continue
        if time.monotonic() > deadline:
            break
        rows.append(measure(problem))
        torch.cuda.empty_cache()
    lines = summary(rows)
    print(table(lines))
    path = write(NAME, facts | {"summary": lines, "rows": rows}, arguments.out)
    plot(rows, path.with_suffix(".png"))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
