"""The plot of ``benchmarks/results/<device>/networks.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from network_results import HELPS, WAYS

COLORS = {"enable": "tab:blue", "optimize": "tab:green"}
#: Shades of a color, from the smallest batch to the largest.
SHADES = (0.45, 0.7, 1.0)


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Bars of the ratios, network by network: a panel a mode and way, a bar a batch and help."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [row for row in result["steps"] if "ratio" in row]
    if not rows:
        return
    modes = sorted({row["mode"] for row in rows})
    ways = [way for way in WAYS if any(row["way"] == way for row in rows)]
    networks = sorted({row["network"] for row in rows})
    batches = sorted({row["batch"] for row in rows})
    ratios = {
        (row["mode"], row["way"], row["network"], row["batch"], row["with"]): row["ratio"]
        for row in rows
    }
    size = (max(6.0, 1.1 * len(networks)) * len(modes), 2.4 * len(ways) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(ways), len(modes), squeeze=False, sharex=True, sharey=True)
    bars = [(helped, batch) for helped in HELPS for batch in batches]
    width = 0.85 / len(bars)
    for line, way in zip(axes, ways, strict=True):
        for ax, mode in zip(line, modes, strict=True):
            for index, (helped, batch) in enumerate(bars):
                for place, network in enumerate(networks):
                    ratio = ratios.get((mode, way, network, batch, helped))
                    if ratio is not None:
                        left = place + (index - (len(bars) - 1) / 2) * width
                        shade = SHADES[min(batches.index(batch), len(SHADES) - 1)]
                        ax.bar(left, ratio, width, color=COLORS[helped], alpha=shade)
            ax.axhline(1.0, color="black", linewidth=0.8)
            ax.set_title(f"{mode}, {WAYS[way]}", fontsize=9)
            ax.set_xticks(range(len(networks)), networks, rotation=40, ha="right", fontsize=7)
            ax.set_ylim(bottom=0.5)
    for line in axes:
        line[0].set_ylabel("without / with", fontsize=8)
    legend = [
        Patch(
            color=COLORS[helped],
            alpha=SHADES[min(batches.index(batch), len(SHADES) - 1)],
            label=f"{helped}(), batch {batch}",
        )
        for helped, batch in bars
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(bars), fontsize=7)
    figure.savefig(path, dpi=130)
