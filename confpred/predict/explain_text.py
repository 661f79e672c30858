"""An explanation as a page for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from confpred.families.protocol import PYTORCH, Candidate
from confpred.families.registry import config_words

if TYPE_CHECKING:
    from confpred.predict.choice import Choice
    from confpred.predict.contributions import Comparison
    from confpred.predict.explain import LayerExplanation

_SOURCES: Mapping[str, str] = {
    "pinned": "as the user pinned it",
    "measured": "the fastest of what was measured of this very layer",
    "predicted": "as predicted",
    "transferred": "predicted by the model of another device, as this one has none",
    "heuristic": "by the families' own estimates, as no model knows them on this device",
    "fallback": "as no kernel of ours is legal",
}
_PREDICTED = ("predicted", "transferred")
#: Of each cause in a comparison; the JSON form has all.
FEATURES_SHOWN = 6


def page(explanation: LayerExplanation) -> Iterator[str]:
    """The lines of a page, in about 100 columns where the layer's words allow it."""
    choice = explanation.choice
    yield f"{explanation.problem} on {explanation.device}"
    yield ""
    yield from _summary(explanation)
    yield ""
    yield from _candidates(explanation.choices)
    for comparison in explanation.comparisons:
        yield ""
        yield from _comparison(comparison)
    if explanation.nearest:
        yield ""
        yield f"Nearest layers that model {explanation.model} has measured"
        rows = [("distance", "ms", "of roofline", "fastest", "layer")]
        rows += [
            (
                f"{n.distance:.2f}",
                f"{n.time_ms:.4f}",
                f"{n.roofline_share:.0%}",
                _words(n.candidate),
                str(n.problem),
            )
            for n in explanation.nearest
        ]
        yield from _table(rows, right=3)
    elif choice.source == "heuristic":
        yield ""
        yield "Nothing was learned or measured here: the times are rough estimates."
    elif choice.source == "transferred":
        yield ""
        yield f"Nothing was learned or measured on this device, but on {choice.measured_on}."


def _summary(explanation: LayerExplanation) -> Iterator[str]:
    choice, floor = explanation.choice, explanation.roofline
    expected = "" if choice.predicted_ms is None else f", {choice.predicted_ms:.4f} ms"
    by = f" (model {choice.model})" if choice.model else ""
    yield f"chosen    {choice.provider}{expected}: {_source(choice)}{by}"
    if choice.regret_bound is not None:
        yield (
            f"bound     with 95 % confidence at most {choice.regret_bound:.3f} times as slow as "
            "the best config"
        )
    elif choice.is_guess:
        yield "bound     none, with no confidence: nothing was calibrated for this device"
    share = explanation.roofline_share
    reached = "" if share is None else f"; the choice reaches {share:.0%} of it"
    yield (
        f"roofline  {_amount(floor.bytes, 'B')} and {_amount(floor.flops, 'FLOP')} take at least "
        f"{floor.floor_ms:.4f} ms, limited by {floor.limit}{reached}"
    )
    yield f"PyTorch   {_pytorch(explanation)}"


def _source(choice: Choice) -> str:
    return _SOURCES.get(choice.source, choice.source)


def _pytorch(explanation: LayerExplanation) -> str:
    theirs, choice = explanation.pytorch_ms, explanation.choice
    if theirs is None:
        return "nothing predicts the time of its operator"
    text = f"its operator is expected to take {theirs:.4f} ms"
    if choice.provider == PYTORCH:
        best = next((c for c in explanation.choices if c.family and c.predicted_ms), None)
        if best is not None and best.predicted_ms is not None and choice.source in _PREDICTED:
            text += (
                f", the best of ours {best.predicted_ms:.4f} ms: it goes first wherever ours may "
                "be the slower one, by what the ratio's prediction has erred"
            )
    elif choice.predicted_ms:
        text += f", {theirs / choice.predicted_ms:.2f} times as long"
    return text


def _candidates(choices: Sequence[Choice]) -> Iterator[str]:
    best = choices[0].predicted_ms
    rows = [("rank", "ms", "ratio", "source", "candidate")]
    for rank, choice in enumerate(choices, 1):
        ms = choice.predicted_ms
        rows.append(
            (
                str(rank),
                "" if ms is None else f"{ms:.4f}",
                "" if ms is None or not best else f"{ms / best:.3f}",
                choice.source,
                _words(choice.candidate),
            )
        )
    yield from _table(rows, right=3)


def _comparison(comparison: Comparison) -> Iterator[str]:
    yield f"Why not {_words(comparison.other)}"
    yield f"It is expected to take {comparison.ratio:.3f} times as long. The factors of that:"
    rows = [("factor", "from", "values: chosen -> other")]
    for part in comparison.contributions:
        shown = [f"{name} {a:.4g} -> {b:.4g}" for name, (a, b) in part.features.items()]
        if len(shown) > FEATURES_SHOWN:
            shown[FEATURES_SHOWN:] = [f"and {len(shown) - FEATURES_SHOWN} more"]
        rows.append((f"{part.ratio:.3f}", part.theme, ", ".join(shown)))
    yield from _table(rows, right=1)


def _words(candidate: Candidate) -> str:
    return f"{candidate.provider} {config_words(candidate)}".rstrip()


def _amount(count: int, unit: str) -> str:
    """Such as ``18.4 MB``."""
    value, prefixes = float(count), iter(("", "k", "M", "G", "T", "P"))
    prefix = next(prefixes)
    while value >= 999.5 and prefix != "P":
        value, prefix = value / 1000, next(prefixes)
    return f"{value:.3g} {prefix}{unit}"


def _table(rows: Sequence[Sequence[str]], right: int) -> Iterator[str]:
    """Aligned columns, the first `right` of them to the right, under headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if i < right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
