"""Charts as SVG that lies inside a page and takes the page's colours, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from confpred.report.importances import Importance
from confpred.report.judged import COVERAGE, Evaluated, Group

#: Colours that no reader sees: each stands for one of the page's.
_INK, _GRID = "#010101", "#010102"
_SERIES = ("#010103", "#010104", "#010105", "#010106")
_COLOURS = {
    _INK: "currentColor",
    _GRID: "var(--rule)",
    **{colour: f"var(--series-{i})" for i, colour in enumerate(_SERIES, 1)},
}
_STYLE: Any = {
    "svg.hashsalt": "confpred",
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
}
_LARGEST_SHOWN = 2.0  # regret at the right edge of the curves
_TICKS = (1.0, 1.05, 1.1, 1.2, 1.4, 1.6, 2.0)
_FEATURES = 12


def regret_curves(evaluations: Sequence[Evaluated]) -> str:
    """The share of layers whose regret is at most x, a curve an evaluation."""

    def draw(axes: Any) -> None:
        for i, evaluation in enumerate(evaluations):
            regret = np.sort([layer.regret for layer in evaluation.layers])
            share = np.arange(1, len(regret) + 1) / len(regret)
            axes.step(
                [1.0, *regret.tolist(), max(_LARGEST_SHOWN, float(regret[-1]))],
                [0.0, *share.tolist(), 1.0],
                where="post",
                color=_SERIES[i % len(_SERIES)],
                linewidth=2,
                label=evaluation.name,
            )
        axes.set_xscale("log")
        axes.set_xlim(1.0, _LARGEST_SHOWN)
        axes.set_ylim(0.0, 1.0)
        axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axes.minorticks_off()
        axes.set_xlabel("regret: time of the choice / time of the best measured config")
        axes.set_ylabel("share of judged layers")
        axes.legend(loc="lower right")

    return _chart("regret-curves", "Share of layers by regret", (7.2, 3.6), draw)


def regret_by_family(families: Mapping[str, Sequence[Group]]) -> str:
    """Geometric mean and 95 % quantile of each family, by the name of the evaluation."""
    names = sorted({group.name for groups in families.values() for group in groups}, reverse=True)

    def draw(axes: Any) -> None:
        for i, (evaluation, groups) in enumerate(families.items()):
            offset = 0.14 * (i - (len(families) - 1) / 2)
            places = [names.index(group.name) - offset for group in groups]
            colour = _SERIES[i % len(_SERIES)]
            means, quantiles = ([getattr(g, f) for g in groups] for f in ("geomean", "p95"))
            axes.hlines(places, means, quantiles, color=colour, linewidth=2)
            axes.plot(means, places, "o", color=colour, label=f"{evaluation}: geomean")
            axes.plot(quantiles, places, "|", color=colour, markersize=10, markeredgewidth=2,
                      label=f"{evaluation}: 95 % quantile")  # fmt: skip
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(left=1.0)
        axes.set_xlabel("regret")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2 * len(families), fontsize=8)

    return _chart("regret-by-family", "Regret by family", (7.2, 0.9 + 0.34 * len(names)), draw)


def coverage(families: Mapping[str, Sequence[Group]]) -> str:
    """The share of each family's layers that keep to their bounds, with the interval in which such
    a share lies by chance (Wilson's, 95 %)."""
    names = sorted({group.name for groups in families.values() for group in groups}, reverse=True)

    def draw(axes: Any) -> None:
        for i, (evaluation, groups) in enumerate(families.items()):
            offset = 0.14 * (i - (len(families) - 1) / 2)
            colour = _SERIES[i % len(_SERIES)]
            for number, group in enumerate(groups):
                place = names.index(group.name) - offset
                axes.hlines(place, *_wilson(group.covered, group.layers), color=colour, linewidth=2)
                label = evaluation if number == 0 else None
                axes.plot(group.covered, place, "o", color=colour, label=label)
        axes.axvline(COVERAGE, color=_INK, linewidth=1, linestyle="--")
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(right=1.0)
        axes.set_xlabel(f"share of layers within their bound (wanted: {COVERAGE:.0%})")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(families), fontsize=8)

    return _chart("coverage", "Coverage of the bound by family",
                  (7.2, 0.9 + 0.34 * len(names)), draw)  # fmt: skip


def importance(pool: str, found: Sequence[Importance]) -> str:
    """The features that move a pool's order most."""
    shown = list(found[:_FEATURES])[::-1]

    def draw(axes: Any) -> None:
        axes.barh(range(len(shown)), [100 * f.moved for f in shown], color=_SERIES[0], height=0.7)
        axes.set_yticks(range(len(shown)), [f"{f.feature} ({f.theme})" for f in shown])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("predicted ratio of two configs moves by, %")

    return _chart(f"importance-{pool}", f"Features of {pool}",
                  (7.2, 0.8 + 0.26 * len(shown)), draw)  # fmt: skip


def noise(by_time: Mapping[str, Sequence[Any]]) -> str:
    """Median and 95 % quantile of the noise by how long a config takes, by device."""
    names = list(dict.fromkeys(group.name for groups in by_time.values() for group in groups))

    def draw(axes: Any) -> None:
        for i, (device, groups) in enumerate(by_time.items()):
            places = [names.index(group.name) for group in groups]
            colour = _SERIES[i % len(_SERIES)]
            axes.plot(places, [100 * g.median for g in groups], "o-", color=colour,
                      label=f"{device}: median")  # fmt: skip
            axes.plot(places, [100 * g.p95 for g in groups], "o--", color=colour,
                      markerfacecolor="none", label=f"{device}: 95 % quantile")  # fmt: skip
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("time of the config")
        axes.set_ylabel("interquartile range / median, %")
        axes.legend()

    return _chart("noise", "Noise of measurements by time", (7.2, 3.2), draw)


def _wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * ((share * (1 - share) + z * z / (4 * count)) / count) ** 0.5 / (1 + z * z / count)
    return middle - half, min(1.0, middle + half)


def _chart(name: str, title: str, size: tuple[float, float], draw: Callable[[Any], None]) -> str:
    """What `draw` draws as an SVG element called `name`, the same bytes each time."""
    with rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.add_subplot(facecolor="none")
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    for colour, page in _COLOURS.items():
        text = text.replace(colour, page)
    # Names in a page are one another's neighbours: those of each chart bear its own.
    prefix = re.sub(r"\W+", "-", name)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r'xlink:href="#', f'xlink:href="#{prefix}-', text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
