"""The tables of ``networks.json`` and of the host times of layers, for `tables`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from network_results import HELPS, WAYS, Row, summary

Markdown = Callable[[Sequence[str], Sequence[Sequence[str]]], str]


def whole_networks(result: dict[str, Any], markdown: Markdown) -> str:
    """The summary: one row for inference and training, each way of running."""
    heads = ["from batch 32 on", "networks"]
    for helped in HELPS:
        heads += [f"`{helped}()`: geomean", "worst", "best"]
    parts = {(p["mode"], p["way"], p["with"]): p for p in summary(result["steps"])}
    rows = []
    for mode, way in dict.fromkeys((mode, way) for mode, way, _ in parts):
        counted = {
            row["network"]
            for row in result["steps"]
            if (row["mode"], row["way"]) == (mode, way) and "ratio" in row
        }
        cells = [f"{mode}, {WAYS[way]}", str(len(counted))]
        for helped in HELPS:
            part = parts.get((mode, way, helped))
            figures = [part[key] for key in ("geomean", "worst", "best")] if part else []
            cells += [f"{value:.2f}x" for value in figures] or ["", "", ""]
        rows.append(cells)
    return markdown(heads, rows)


def steps(result: dict[str, Any], markdown: Markdown, *, mode: str) -> str:
    """Every network and batch of a mode: the times without confpred, and the ratios."""
    heads = ["network", "batch"]
    for name in WAYS.values():
        heads += [f"{name}, ms", "noise", *(f"`{helped}()`" for helped in HELPS)]
    found: dict[tuple[str, int], dict[tuple[str, str], Row]] = {}
    for row in result["steps"]:
        if row["mode"] == mode:
            ways = found.setdefault((row["network"], row["batch"]), {})
            ways[row["way"], row["with"]] = row
    rows = []
    for (network, batch), ways in sorted(found.items()):
        sampled = all(row["sampled"] for row in ways.values())
        cells = [network if sampled else f"{network} (never sampled)", str(batch)]
        for way in WAYS:
            pair = [ways.get((way, helped), {}) for helped in HELPS]
            cells.append(_first(pair, "without_ms", "{:.2f}"))
            cells.append(_first(pair, "noise" if way == "eager" else "way_noise", "{:.1%}"))
            cells += [_ratio(row) for row in pair]
        rows.append(cells)
    return markdown(heads, rows) if rows else ""


def _first(rows: Sequence[Row], key: str, form: str) -> str:
    return next((form.format(row[key]) for row in rows if key in row), "")


def _ratio(row: Row) -> str:
    if "ratio" in row:
        return f"{row['ratio']:.2f}x"
    return "error" if "errors" in row else ""


def memory(result: dict[str, Any], markdown: Markdown) -> str:
    """Peak memory of an eager step at each network's largest batch."""
    largest: dict[tuple[str, str], int] = {}
    for row in result["steps"]:
        if row["way"] == "eager" and row.get("peak_without_mb") is not None:
            key = (row["network"], row["mode"])
            largest[key] = max(largest.get(key, 0), row["batch"])
    rows = []
    for (network, mode), batch in sorted(largest.items()):
        of_batch = {
            row["with"]: row
            for row in result["steps"]
            if (row["network"], row["mode"], row["batch"], row["way"])
            == (network, mode, batch, "eager")
            and "ratio" in row
        }
        plain = _first(list(of_batch.values()), "peak_without_mb", "{:.0f}")
        helped = [_first([of_batch.get(h, {})], "peak_with_mb", "{:.0f}") for h in HELPS]
        rows.append((network, mode, str(batch), plain, *helped))
    heads = ("network", "mode", "batch", "eager, MiB", *(f"`{h}()`, MiB" for h in HELPS))
    return markdown(heads, rows) if rows else ""


def first_steps(result: dict[str, Any], markdown: Markdown) -> str:
    """Seconds of the first step in a new process."""
    rows = [row for row in result["first_steps"] if row.get("seconds")]
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    table = [
        (
            f"{row['network']}, {row['mode']}",
            *(f"{row['seconds'][n]:.2f}" if n in row["seconds"] else "error" for n in names),
        )
        for row in rows
    ]
    return markdown((f"batch {rows[0]['batch']}, seconds", *names), table) if rows else ""


def losses(result: dict[str, Any], markdown: Markdown) -> str:
    """How far loss curves are from that of PyTorch by cuDNN's heuristics."""
    rows = [row for row in result["losses"] if row.get("mean_difference")]
    names = list(dict.fromkeys(name for row in rows for name in row["mean_difference"]))
    table = [
        (
            row["network"],
            str(row["steps"]),
            f"{row['first']:.3f}",
            f"{row['last']:.3f}",
            *(
                f"{row['mean_difference'][n]:.2g}" if n in row["mean_difference"] else "error"
                for n in names
            ),
        )
        for row in rows
    ]
    heads = ("network", "steps", "first loss", "last loss", *names)
    return markdown(heads, table) if rows else ""


def host_layers(result: dict[str, Any], markdown: Markdown) -> str:
    """Host time of each call by layer and mode, and its ratio to the one without confpred."""
    rows = result.get("layers", [])
    names = list(dict.fromkeys(row["who"] for row in rows))
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(f"{row['layer']}, {row['mode']}", {})[row["who"]] = row
    table = []
    for place, calls in found.items():
        cells = [f"{calls[n]['us']:.1f} ({calls[n]['ratio']:.2f}x)" for n in names]
        table.append((place, *cells))
    return markdown(("host time of a call, us", *names), table) if rows else ""


def mechanisms(result: dict[str, Any], markdown: Markdown) -> str:
    """What the ways into PyTorch and back cost, without work inside."""
    parts = result.get("mechanisms", {})
    rows = [
        (f"{part}, {mode}: {name}", f"{us:.1f}")
        for part, modes in parts.items()
        if part.startswith("ways")
        for mode, times in modes.items()
        for name, us in times.items()
    ]
    return markdown(("mechanism", "us a call"), rows) if rows else ""


def host_in_networks(result: dict[str, Any], markdown: Markdown) -> str:
    """What the host takes for a step and, of that, for its convolutions."""
    heads = (
        "eager step",
        "host, ms",
        "step, ms",
        "ratio",
        "dense layers, us",
        "grouped layers, us",
    )
    rows = []
    for row in result["rows"]:
        times = (f"{row['host_ms']:.2f}", f"{row['step_ms']:.2f}", f"{row['ratio']:.3f}x")
        kinds = (row["calls"][kind] for kind in ("dense", "grouped"))
        calls = (f"{kind['us']:.0f} of {kind['layers']}" for kind in kinds)
        name = f"{row['network']}, batch {row['batch']}: {row['way']}"
        rows.append((name, *times, *calls))
    return markdown(heads, rows)


#: Table -> the function that makes it from ``networks.json``.
OF_NETWORKS: dict[str, Callable[..., str]] = {
    "networks": whole_networks,
    "networks-inference": partial(steps, mode="inference"),
    "networks-training": partial(steps, mode="training"),
    "networks-memory": memory,
    "networks-first-steps": first_steps,
    "networks-losses": losses,
}
