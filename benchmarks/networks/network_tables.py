"""Tables of whole networks, from the rows that ``benchmarks/networks/networks.py`` records.

A function takes what was recorded, None where it was not, and `markdown`, which lays out a table.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.networks.networks import BROAD, MODES

Markdown = Callable[[Sequence[str], Sequence[Sequence[str]]], str]
Row = dict[str, Any]
#: Ways whose wall time is shown beside eager PyTorch's, and their names in a table.
WAYS = {
    "optimize": "`optimize`",
    "inductor=False": "`inductor=False`",
    "freeze": "with `freeze`",
    "compile": "`torch.compile`",
    "reduce-overhead": "its mode `reduce-overhead`",
}
#: Runs whose losses are compared with eager PyTorch's.
RUNS = {
    "deterministic": "PyTorch, deterministic",
    "channels first": "PyTorch, channels first",
    **WAYS,
}


def summary(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate the default way over all networks, by mode and batch, beside the noise."""
    heads = (
        "step, batch", "networks", "wall time over eager: geomean", "least",
        "GPU time over eager: geomean", "least", "over Inductor: geomean", "least",
        "eager over itself",
    )  # fmt: skip
    rows = []
    for name, group in _groups(result["rows"]):
        if not any(row["way"] == "optimize" for row in group):
            continue
        cells = [_count(group, "optimize")]
        for field in ("over_eager", "graph_over_eager", "graph_over_compile"):
            cells += _mean_and_least(_values(group, "optimize", field))
        rows.append((name, *cells, _noise(group)))
    return _filled(heads, rows, markdown)


def broad(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate the default way on networks of many kinds, over eager and over what PyTorch offers:
    its compiler with CUDA graphs in wall time, its compiler in GPU time."""
    heads = (
        "networks: geomean, least", "steps; compared", "wall time over eager",
        "over `reduce-overhead`", "GPU time over Inductor", "eager over itself",
    )  # fmt: skip
    fields = ("over_eager", "over_reduce-overhead", "graph_over_compile")
    rows = result["rows"]
    groups: dict[str, list[Row]] = {kind.kind.partition(",")[0]: [] for kind in BROAD.values()}
    for row in rows:
        groups[BROAD[row["network"]].kind.partition(",")[0]].append(row)
    groups |= {f"all, {mode}": [r for r in rows if r["mode"] == mode] for mode in MODES}
    cells = []
    for name, group in groups.items():
        means = [_pair(_values(group, "optimize", field)) for field in fields]
        compared = len(_values(group, "optimize", fields[1]))
        counted = _count(group, "optimize")
        if compared < len(_values(group, "optimize", fields[0])):
            counted += f"; {compared}"
        cells.append((name, counted if counted != "0" else "", *means, _noise(group)))
    return _filled(heads, cells, markdown)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw how many times as fast as ``reduce-overhead`` each step of the broad suite is."""
    from matplotlib.figure import Figure

    names = [name for name in reversed(BROAD) if any(r["network"] == name for r in result["rows"])]
    figure = Figure(figsize=(8, 0.8 + 0.22 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    for mode, marker in zip(MODES, "os", strict=True):
        steps = [row for row in result["rows"] if (row["mode"], row["way"]) == (mode, "optimize")]
        found = [
            (speed, names.index(row["network"]))
            for row in steps
            if (speed := row.get("over_reduce-overhead"))
        ]
        axes.scatter(*zip(*found, strict=True), s=22, marker=marker, label=mode)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    ticks = (0.9, 1, 1.2, 1.5, 2, 3, 5, 10, 15)
    axes.set_xticks(ticks, [f"{tick}x" for tick in ticks], minor=False)
    axes.set_xticks((), minor=True)
    axes.set_yticks(range(len(names)), [f"{name} ({BROAD[name].kind})" for name in names])
    axes.set_xlabel("times as fast as torch.compile(mode='reduce-overhead')", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(loc="center right", fontsize=8)
    figure.savefig(path, dpi=130)


def _noise(group: Sequence[Row]) -> str:
    noise = _values(group, "again", "over_eager")
    return f"{min(noise):.2f}x to {max(noise):.2f}x" if noise else ""


def _filled(heads: Sequence[str], rows: Sequence[Sequence[str]], markdown: Markdown) -> str:
    """Lay out a table without columns, and without rows, that no figure was recorded of; the first
    column says what a row is of."""
    whole = [row for row in rows if any(row[1:])]
    kept = [i for i in range(len(heads)) if any(row[i] for row in whole)]
    cut = [[row[i] for i in kept] for row in whole]
    return markdown([heads[i] for i in kept], cut) if whole else ""


def first_steps(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate how many times as fast as `torch.compile`'s first steps are, and the slowest, where
    both ways were measured."""
    ways, rows = ("compile", "optimize"), []
    for mode in MODES:
        ratios: dict[str, dict[str, float]] = {"cold_s": {}, "first_s": {}}
        for (network, _), found in _by_step(result["rows"], mode):
            for figure, by_network in ratios.items():
                seconds = [found.get(way, {}).get(figure) for way in ways]
                if all(seconds):
                    by_network[network] = seconds[0] / seconds[1]
        if all(ratios.values()):
            cells = [str(len(ratios["cold_s"]))]
            for by_network in ratios.values():
                slowest = min(by_network, key=by_network.__getitem__)
                cells += [_pair(list(by_network.values())), slowest]
            rows.append((mode, *cells))
    heads = ("first steps", "networks", "cold: geomean, least", "of", "warm: geomean, least", "of")
    return _filled(heads, rows, markdown)


def losses(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate how far runs of training are from eager PyTorch's, as a mean over the seeds."""
    rows: list[Row] = result["rows"]
    names = list(dict.fromkeys(row["network"] for row in rows))

    def mean(way: str, name: str) -> float:
        return statistics.mean(row["distances"][way] for row in rows if row["network"] == name)

    ways = [way for way in rows[0]["distances"] if way != "eager"]
    cells = [(RUNS[way], *(f"{100 * mean(way, name):.2g}%" for name in names)) for way in ways]
    return markdown(("run", *names), cells)


def unknown(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate `unknown_board`: GPU time of Inductor over that of each way, and shares of the
    model's gain."""
    ways = {
        "optimize": "with the model", "tune=60": "without, `tune=60`", "tune=15": "`tune=15`",
        "part tune=60": "a part's model, `tune=60`",
    }  # fmt: skip

    def shown(name: str, figures: dict[str, float | None], unit: str = "") -> list[str]:
        found = [figures.get(way) for way in ways]
        return [name, *("" if figure is None else f"{figure:.2f}{unit}" for figure in found)]

    networks = sorted(result["networks"].items())
    rows = [shown(name, facts["gpu_over_compile"], "x") for name, facts in networks]
    rows.append(shown("share of the gain", result["summary"]["gpu_share"]))
    return _filled(("network", *ways.values()), rows, markdown)


def captured(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate `captured_networks`: how many networks compute what they did."""
    heads = ("step", "networks", "compared", "right", "how captured", "wrong or failed")
    rows = []
    for mode, counts in result["counts"].items():
        wrong = [
            r["network"] for r in result["networks"] if r["mode"] == mode and not r["is_right"]
        ]
        kinds = ", ".join(f"{kind}: {count}" for kind, count in counts["captured"].items())
        numbers = (str(counts[key]) for key in ("networks", "compared", "right"))
        rows.append((mode, *numbers, kinds, ", ".join(wrong) or "none"))
    return _filled(heads, rows, markdown)


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each mode and batch, with their name."""
    for mode in MODES:
        for batch in sorted({row["batch"] for row in rows if row["mode"] == mode}):
            group = [row for row in rows if (row["mode"], row["batch"]) == (mode, batch)]
            yield f"{mode}, {batch}", group


def _by_step(rows: Sequence[Row], mode: str) -> list[tuple[tuple[str, int], dict[str, Row]]]:
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        if row["mode"] == mode:
            found.setdefault((row["network"], row["batch"]), {})[row["way"]] = row
    return sorted(found.items())


def _values(rows: Iterable[Row], way: str, field: str) -> list[float]:
    found = (row.get(field) for row in rows if row["way"] == way)
    return [value for value in found if value is not None]


def _count(rows: Sequence[Row], way: str) -> str:
    """Return the number of networks, and of how many where some failed."""
    errors = ["error" in row for row in rows if row["way"] == way]
    good = errors.count(False)
    return str(good) if good == len(errors) else f"{good} of {len(errors)}"


def _mean_and_least(values: Sequence[float]) -> list[str]:
    if not values:
        return ["", ""]
    return [f"{statistics.geometric_mean(values):.2f}x", f"{min(values):.2f}x"]


def _pair(values: Sequence[float]) -> str:
    return ", ".join(_mean_and_least(values)) if values else ""


#: Table -> its result files, and the function that makes it.
OF_NETWORKS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "broad": (("broad.json",), broad),
    "networks": (("networks.json",), summary),
    "first-steps": (("broad_first.json",), first_steps),
    "losses": (("losses.json",), losses),
    "captured-networks": (("captured_networks.json",), captured),
    "unknown-board": (("unknown_board.json",), unknown),
}
