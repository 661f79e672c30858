"""Tables of choices, the devices side by side: what ``confpred evaluate`` writes.

A function takes an evaluation of each device, by its name; None stands for one without a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Results = Mapping[str, dict[str, Any]]
#: Cells by the first cell of their row.
Rows = dict[str, Sequence[str]]


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    rule = ["---"] + ["---:"] * (len(heads) - 1)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rule, *rows))


def side_by_side(first: str, heads: Sequence[str], rows: Mapping[str, Rows]) -> str:
    """Return a table with the columns `heads` of each device that has `rows`."""
    shown = {device: cells for device, cells in rows.items() if cells}
    if not shown:
        return ""
    names = dict.fromkeys(name for cells in shown.values() for name in cells)
    empty = [""] * len(heads)
    lines = [
        (name, *(cell for cells in shown.values() for cell in cells.get(name, empty)))
        for name in names
    ]
    return markdown((first, *(f"{d}: {head}".rstrip(": ") for d in shown for head in heads)), lines)


def holdout(results: Results) -> str:
    """Tabulate the regret of choices on the hold-out."""
    return side_by_side(
        "choice",
        ("problems", "geomean", "p95", "worst", "> 10 % off"),
        {device: _holdout(result.get("holdout")) for device, result in results.items()},
    )


def layer_kinds(result: dict[str, Any]) -> str:
    """Tabulate how many times as fast choices for kinds of layers are as PyTorch's operator."""
    directions = {"fprop": "forward", "dgrad": "input gradient", "wgrad": "filter gradient"}
    kinds: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        if row["direction"] in directions and not row["kind"].startswith("all of"):
            kinds.setdefault(row["kind"], {})[row["direction"]] = row
    cells = []
    for kind, rows in kinds.items():
        found = list(rows.values())
        layers, slower = (str(sum(row[name] for row in found)) for name in ("problems", "slower"))
        speeds = (f"{rows[name]['speed']:.2f}x" for name in directions)
        cells.append((kind, layers, *speeds, slower))
    return markdown(("layers", "judged", *directions.values(), "> 5 % slower"), cells)


def _holdout(found: dict[str, Any] | None) -> Rows:
    if found is None:
        return {}
    parts = {"among confpred kernels": found["ours"]}
    parts |= {f"the same, {name}": part for name, part in found["origins"].items()}
    parts["with PyTorch's operator"] = found["whole"]
    return {
        name: (
            str(part["problems"]),
            *(f"{part[key]:.3f}" for key in ("geomean", "p95", "worst")),
            f"{part['far']:.1%}",
        )
        for name, part in parts.items()
    }


def answers(results: Results) -> str:
    """Tabulate what else a hold-out says of the answers, and how it was measured."""
    return side_by_side(
        "figure", ("",), {device: _answers(result) for device, result in results.items()}
    )


def _answers(result: dict[str, Any]) -> Rows:
    found = result.get("holdout")
    if found is None:
        return {}
    first, bounds = found["first"], found["bounds"]
    rows = {
        "model": found["model"],
        "configs timed, of the legal ones": f"{found['configs']:,}, {found['complete']:.1%}",
        "best of the first 3, of the first 8": f"{first['3']:.3f}, {first['8']:.3f}",
        "regret weighted by time": f"{found['weighted']:.3f}",
        "layers left to PyTorch's operator": str(found["pytorch"]),
        "of these, a confpred kernel > 5 % faster": str(found["wrongly_pytorch"]),
    }
    for mode, speed in found["speed"].items():
        figure = f"{speed:.2f}x, {found['slower'][mode]}"
        rows[f"speed over PyTorch ({mode}), layers > 5 % slower"] = figure
    for name, shown in (("all", "all answers"), ("pytorch", "PyTorch's operator")):
        if part := bounds.get(name):
            figure = f"{part['covered']:.1%} of {part['problems']}, {part['median']:.3f}"
            rows[f"bound on regret holds, median bound: {shown}"] = figure
    if noise := result.get("sittings"):
        rows["standard deviation between runs"] = f"{noise['deviation']:.2%}, {noise['runs']} runs"
    return {name: (cell,) for name, cell in rows.items()}


def methods(results: Results) -> str:
    """Tabulate the cross-validated regret of the model and of each baseline."""
    keys = ("geomean", "p95", "worst")
    return side_by_side(
        "method",
        keys,
        {
            device: {
                _named(method, result["methods"]): [f"{found[key]:.3f}" for key in keys]
                for method, found in result["methods"].items()
            }
            for device, result in results.items()
        },
    )


def _named(method: str, methods: Mapping[str, Any]) -> str:
    """Return the name of a row: until decision 166 `model` chose among a part of the configs."""
    if "no portfolio" not in methods:
        return method
    names = {"model": "model, part of the configs", "no portfolio": "model, all configs"}
    return names.get(method, method)


def whole(results: Results) -> str:
    """Tabulate the cross-validated choice with PyTorch's operator among the candidates."""
    heads = (
        "device",
        "problems",
        "speed over PyTorch",
        "worst",
        "> 5 % slower",
        "left to PyTorch's operator",
        "regret",
    )
    rows = []
    for device, result in results.items():
        part = result["whole"]
        regret = part["regret"]["the predicted fastest"]
        speeds = (f"{part['speed']:.2f}x", f"{part['worst_speed']:.2f}x")
        counts = (str(part["slower"]), str(part["pytorch"]))
        rows.append((device, str(regret["problems"]), *speeds, *counts, f"{regret['geomean']:.3f}"))
    return markdown(heads, rows)


def dense(results: Results) -> str:
    """Tabulate the choices for dense layers of kinds of networks that training lacks."""
    rows = {}
    for device, result in results.items():
        held = result["holdout"]
        rows[device] = {
            "layers": (str(held["whole"]["problems"]),),
            "regret: geomean, p95": (_figures(held["whole"], ("geomean", "p95")),),
            "by confpred, best of the first 3, of the first 8": (_figures(held["first"], "138"),),
            "left to PyTorch's operator": (str(held["pytorch"]),),
        }
        for mode, speed in held["speed"].items():
            shown = f"{speed:.2f}x, {held['slower'][mode]}"
            rows[device][f"over PyTorch ({mode}), > 5 % slower"] = (shown,)
    return side_by_side("figure", ("",), rows)


def chains(results: Results) -> str:
    """Tabulate the choices for chains of linear layers, by precision."""
    rows = {
        device: {
            name: (
                f"{found['chosen_for']} of {found['chains']}", f"{found['gain']:.2f}x",
                f"{found['least']:.2f}x", str(found["slower"]),
            )
            for name, found in result["precisions"].items()
        }
        for device, result in results.items()
    }  # fmt: skip
    return side_by_side("precision", ("chosen for", "gain", "least", "> 3 % slower"), rows)


def norms(choices: Results, kernels: Results) -> str:
    """Tabulate batch norm: the choices on its hold-out, and the fastest kernels of some layers."""
    rows = {}
    for device, found in choices.items():
        held, layers = found["holdout"], kernels[device]["summary"]
        (_, speed), (_, slower) = (next(iter(held[key].items())) for key in ("speed", "slower"))
        rows[device] = {
            "model": (held["model"],),
            "problems held out": (str(held["problems"]),),
            "regret: geomean, p95, worst": (_figures(held["ours"], ("geomean", "p95", "worst")),),
            "best of the first 3, of the first 8": (_figures(held["first"], ("3", "8")),),
            "over PyTorch's operators, > 5 % slower": (f"{speed:.2f}x, {slower}",),
        }
        for direction, part in layers.items():
            name = f"{part['layers']} layers, {direction}"
            speeds = f"{part['speedup']:.2f}x, {part['least']:.2f}x"
            rows[device][f"{name}: over PyTorch's, least"] = (speeds,)
            shares = f"{part['share']:.2f}, {part['least_share']:.2f}"
            rows[device][f"{name}: share of the bytes' floor, least"] = (shares,)
    return side_by_side("figure", ("",), rows)


def _figures(found: Mapping[str, float], keys: Sequence[str]) -> str:
    return ", ".join(f"{found[key]:.3f}" for key in keys)


#: Table -> the function that makes it from every device's ``evaluation.json``.
OF_CHOICES: dict[str, Callable[[Results], str]] = {
    "holdout": holdout,
    "holdout-answers": answers,
    "evaluation": methods,
    "whole": whole,
}
