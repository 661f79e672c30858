"""Charts as SVG inside a page, in the page's colours, light or dark."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from confpred.families.registry import config_words
from confpred.files import write_whole
from confpred.report import COVERAGE
from confpred.report.judged import noise_by_time
from confpred.training.evaluate import draw_regrets

if TYPE_CHECKING:
    from confpred.predict.explain import LayerExplanation
    from confpred.report.judged import Evaluated, Group, Importance
    from confpred.training.dataset import Dataset

#: Placeholder colours, each replaced by one of the page's.
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
_TICKS = (1.0, 1.05, 1.1, 1.2, 1.4, 1.6, 2.0)  # of regret in the curves
_FEATURES = 12
Families = Mapping[str, Sequence["Group"]]


def regret_curves(evaluations: Sequence[Evaluated]) -> str:
    """Draw the share of layers whose regret is at most x, a curve an evaluation."""

    def draw(axes: Any) -> None:
        curves = (
            (
                [layer.regret for layer in e.layers],
                {"color": colour, "linewidth": 2, "label": e.name},
            )
            for e, colour in zip(evaluations, cycle(_SERIES), strict=False)
        )
        draw_regrets(axes, curves, _TICKS)
        axes.set_xlabel("regret: time of the choice / time of the best measured config")
        axes.set_ylabel("share of judged layers")
        axes.legend(loc="lower right")

    return _chart("regret-curves", "Share of layers by regret", (7.2, 3.6), draw)


def regret_by_family(families: Families) -> str:
    """Draw geometric mean and 95 % quantile of each family, by the name of the evaluation."""

    def draw(axes: Any) -> None:
        for name, groups, places, color in _lines(axes, families):
            means, quantiles = ([getattr(g.regret, f) for g in groups] for f in ("geomean", "p95"))
            axes.hlines(places, means, quantiles, color=color, linewidth=2)
            axes.plot(means, places, "o", color=color, label=f"{name}: geomean")
            axes.plot(quantiles, places, "|", color=color, markersize=10, markeredgewidth=2,
                      label=f"{name}: 95 % quantile")  # fmt: skip
        axes.set_xlim(left=1.0)
        axes.set_xlabel("regret")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2 * len(families), fontsize=8)

    return _chart("regret-by-family", "Regret by family", _size(families), draw)


def coverage(families: Families) -> str:
    """Draw the share of each family's layers within their bounds, with Wilson's 95 % interval."""

    def draw(axes: Any) -> None:
        for name, groups, places, color in _lines(axes, families):
            for label, group, place in zip_longest([name], groups, places):
                axes.hlines(
                    place, *_wilson(group.covered, group.regret.problems), color=color, linewidth=2
                )
                axes.plot(group.covered, place, "o", color=color, label=label)
        axes.axvline(COVERAGE, color=_INK, linewidth=1, linestyle="--")
        axes.set_xlim(right=1.0)
        axes.set_xlabel(f"share of layers within their bound (wanted: {COVERAGE:.0%})")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(families), fontsize=8)

    return _chart("coverage", "Coverage of the bound by family", _size(families), draw)


def _names(families: Families) -> list[str]:
    return sorted({group.name for groups in families.values() for group in groups}, reverse=True)


def _size(families: Families) -> tuple[float, float]:
    return 7.2, 0.9 + 0.34 * len(_names(families))


def _lines(
    axes: Any, families: Families
) -> Iterator[tuple[str, Sequence[Group], list[float], str]]:
    """Yield each evaluation, its groups, their positions among the lines of the families, and a
    colour."""
    names = _names(families)
    axes.set_yticks(range(len(names)), names)
    for i, (evaluation, groups) in enumerate(families.items()):
        offset = 0.14 * (i - (len(families) - 1) / 2)
        places = [names.index(group.name) - offset for group in groups]
        yield evaluation, groups, places, _SERIES[i % len(_SERIES)]


def importance(pool: str, importances: Sequence[Importance]) -> str:
    """Draw the features with the most effect on a pool's order."""
    shown = list(importances[:_FEATURES])[::-1]

    def draw(axes: Any) -> None:
        axes.barh(range(len(shown)), [100 * f.moved for f in shown], color=_SERIES[0], height=0.7)
        axes.set_yticks(range(len(shown)), [f"{f.feature} ({f.theme})" for f in shown])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("predicted ratio of two configs moves by, %")

    return _chart(f"importance-{pool}", f"Features of {pool}",
                  (7.2, 0.8 + 0.26 * len(shown)), draw)  # fmt: skip


def noise(datasets: Mapping[str, Dataset]) -> str:
    """Draw median and 95 % quantile of the noise by the time of a config, by device."""
    by_time = {device: noise_by_time(dataset.timings) for device, dataset in datasets.items()}
    names = list(dict.fromkeys(group.name for groups in by_time.values() for group in groups))

    def draw(axes: Any) -> None:
        for (device, groups), color in zip(by_time.items(), cycle(_SERIES), strict=False):
            places = [names.index(group.name) for group in groups]
            medians, quantiles = ([100 * getattr(g, f) for g in groups] for f in ("median", "p95"))
            axes.plot(places, medians, "o-", color=color, label=f"{device}: median")
            label = f"{device}: 95 % quantile"
            axes.plot(places, quantiles, "o--", color=color, markerfacecolor="none", label=label)
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
    """Return the drawing as an SVG element called `name`, the same bytes each time."""
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
    # Names must be unique in the page, so those of each chart begin with the chart's own.
    prefix = re.sub(r"\W+", "-", name)
    text = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\1{prefix}-", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


_OURS, _THEIRS, _FLOOR, _WORSE = "#3b6fb6", "#8a8a8a", "#b8432f", "#c98b2b"
#: Least share of the roofline that its plot has room for.
_LOWEST = 0.02
_TITLE_WIDTH, _CONFIG_WIDTH = 100, 56  # characters on one line


def plot_explanation(explanation: LayerExplanation, path: Path, *, replace: bool = True) -> None:
    """Write a PNG, or an SVG where the name of `path` ends in ``.svg``: the candidates' expected
    times beside PyTorch's and the roofline, the reasons for the choice, and the layer's point under
    the roofline. For `replace`, see `write_whole`.

    Raises:
        StorageError: the file system refused the write.
    """
    kind = "svg" if path.suffix.lower() == ".svg" else "png"
    # The same explanation gives the same bytes.
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    figure = _figure(explanation)
    with rc_context({"svg.hashsalt": "confpred", "svg.fonttype": "none"}):
        write_whole(
            path,
            lambda file: figure.savefig(file, format=kind, dpi=150, metadata=metadata),
            replace=replace,
        )


def _figure(explanation: LayerExplanation) -> Figure:
    bars = len(explanation.choices) + 1
    figure = Figure(figsize=(10, 4.6 + 0.34 * bars), layout="constrained")
    figure.suptitle(
        f"{_wrapped(str(explanation.problem), _TITLE_WIDTH)}\non {explanation.device}", fontsize=10
    )
    rows: Any = figure.subfigures(2, 1, height_ratios=[0.34 * bars + 0.9, 3.4])
    _plot_times(rows[0].add_subplot(), explanation)
    below = rows[1].subplots(1, 2, width_ratios=[3, 2])
    _plot_contributions(below[0], explanation)
    _plot_roofline(below[1], explanation)
    return figure


def _plot_times(axes: Any, explanation: LayerExplanation) -> None:
    choices = explanation.choices
    bars = [(c.predicted_ms, _OURS if c.family else _THEIRS) for c in choices]
    labels = [f"{i}  {c.provider} {config_words(c.candidate)}" for i, c in enumerate(choices, 1)]
    if all(choice.family is not None for choice in choices):
        bars.append((explanation.pytorch_ms, _THEIRS))
        labels.append("PyTorch's operator")
    times = [ms or 0.0 for ms, _ in bars]
    axes.barh(range(len(bars)), times, color=[color for _, color in bars], height=0.7)
    for place, (ms, _) in enumerate(bars):
        text = " no prediction" if ms is None else f" {ms:.4f}"
        axes.text(ms or 0.0, place, text, va="center", fontsize=8)
    axes.axvline(explanation.roofline.floor_ms, color=_FLOOR, linewidth=1.5, label="roofline")
    axes.set_yticks(range(len(bars)), list(map(_wrapped, labels)), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max([*times, explanation.roofline.floor_ms]))
    axes.set_xlabel("expected time, ms")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    _plain(axes)


def _plot_contributions(axes: Any, explanation: LayerExplanation) -> None:
    if not explanation.comparisons:
        axes.text(0.5, 0.5, "no model compares configs here", ha="center", va="center")
        axes.set_axis_off()
        return
    # A comparison of nearly equal configs explains little.
    comparison = max(explanation.comparisons, key=lambda c: abs(math.log(c.ratio)))
    parts = comparison.contributions
    percent = [100 * (part.ratio - 1) for part in parts]
    colors = [_OURS if value >= 0 else _WORSE for value in percent]
    axes.barh(range(len(parts)), percent, color=colors, height=0.7)
    for place, value in enumerate(percent):
        side = "left" if value >= 0 else "right"
        axes.text(value, place, f" {value:+.1f} % ", va="center", ha=side, fontsize=8)
    axes.set_yticks(range(len(parts)), [part.theme for part in parts], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.margins(x=0.2)
    axes.set_xlabel("effect on the time, %", fontsize=8)
    axes.set_title(
        f"Why not {_wrapped(config_words(comparison.other))}:\n"
        f"expected to take {comparison.ratio:.3f} times as long",
        fontsize=8,
    )
    _plain(axes)


def _plot_roofline(axes: Any, explanation: LayerExplanation) -> None:
    floor = explanation.roofline
    intensity = floor.flops / floor.bytes
    rate = floor.flops / (floor.arithmetic_ms * 1e9)  # TFLOP/s, as a millisecond is a thousandth
    ridge = rate / (floor.bytes / (floor.memory_ms * 1e9))  # FLOP a byte where both limits meet
    left, right = min(intensity, ridge) / 8, max(intensity, ridge) * 8
    axes.plot([left, ridge, right], [rate * left / ridge, rate, rate], color=_FLOOR, linewidth=1.5)
    ceiling = floor.flops / (floor.floor_ms * 1e9)
    marks = [("choice", explanation.choice.predicted_ms, _OURS, "o")]
    if explanation.choice.family is not None:
        marks.append(("PyTorch", explanation.pytorch_ms, _THEIRS, "s"))
    for label, ms, color, marker in marks:
        if ms:
            reached = floor.flops / (ms * 1e9)
            text = f"{label}: {floor.floor_ms / ms:.0%}"
            axes.plot(intensity, reached, marker, color=color, label=text)
    axes.plot(intensity, ceiling, "_", color=_FLOOR, markersize=12)
    axes.set_xscale("log")
    axes.set_yscale("log")
    lowest = [floor.flops / (ms * 2e9) for _, ms, _, _ in marks if ms]  # in full
    axes.set_ylim(bottom=min(rate * left / ridge, ceiling * _LOWEST, *lowest))
    axes.set_xlabel("FLOP / byte", fontsize=8)
    axes.set_ylabel("TFLOP/s", fontsize=8)
    axes.set_title(f"Limited by {floor.limit}; share of the roofline", fontsize=8)
    axes.tick_params(labelsize=8)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="lower right")
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _wrapped(text: str, width: int = _CONFIG_WIDTH) -> str:
    return "\n".join(textwrap.wrap(text, width))
