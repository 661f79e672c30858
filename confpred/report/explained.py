"""A layer's explanation as a plot."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from confpred.families.registry import config_words
from confpred.files import write_whole
from confpred.predict.explain import Comparison, LayerExplanation

_OURS, _THEIRS, _FLOOR, _WORSE = "#3b6fb6", "#8a8a8a", "#b8432f", "#c98b2b"
#: The least part of the roofline that the plot of it has room for.
_LOWEST = 0.02
_TITLE_WIDTH, _CONFIG_WIDTH = 100, 56  # characters on one line


def plot_explanation(explanation: LayerExplanation, path: Path, *, replace: bool = True) -> None:
    """Write a PNG, or an SVG where the name of `path` ends in ``.svg``: the candidates' expected
    times beside PyTorch's and the roofline, what speaks for the choice, and where the layer lies
    under the roofline. `replace` is as `write_whole` has it.

    Raises:
        StorageError: the file system refused the write.
    """
    kind = "svg" if path.suffix.lower() == ".svg" else "png"
    # The same explanation is to give the same bytes.
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
    bars = [
        (
            _wrapped(f"{rank}  {choice.provider} {config_words(choice.candidate)}"),
            choice.predicted_ms,
        )
        for rank, choice in enumerate(explanation.choices, 1)
    ]
    colors = [_OURS if c.family else _THEIRS for c in explanation.choices]
    if not any(choice.family is None for choice in explanation.choices):
        bars.append(("PyTorch's operator", explanation.pytorch_ms))
        colors.append(_THEIRS)
    times = [ms or 0.0 for _, ms in bars]
    axes.barh(range(len(bars)), times, color=colors, height=0.7)
    for place, (_, ms) in enumerate(bars):
        text = " no prediction" if ms is None else f" {ms:.4f}"
        axes.text(ms or 0.0, place, text, va="center", fontsize=8)
    axes.axvline(explanation.roofline.floor_ms, color=_FLOOR, linewidth=1.5, label="roofline")
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max([*times, explanation.roofline.floor_ms]))
    axes.set_xlabel("expected time, ms")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    _plain(axes)


def _plot_contributions(axes: Any, explanation: LayerExplanation) -> None:
    comparison = _telling(explanation)
    if comparison is None:
        axes.text(0.5, 0.5, "no model compares configs here", ha="center", va="center")
        axes.set_axis_off()
        return
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


def _telling(explanation: LayerExplanation) -> Comparison | None:
    """The comparison with the largest ratio, as that of near equals tells little."""
    found = explanation.comparisons
    return max(found, key=lambda c: abs(math.log(c.ratio))) if found else None


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
    axes.set_ylim(bottom=min(rate * left / ridge, ceiling * _LOWEST))
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
    """`text` on lines of at most `width` characters, broken at blanks."""
    return "\n".join(textwrap.wrap(text, width))
