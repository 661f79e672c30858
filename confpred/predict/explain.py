"""Why a layer gets the config that it gets: `explain_layers`.

A model's trees see two configs as two rows of features. Features that differ are grouped by themes.
The logarithm of the ratio of times is shared among the themes by their Shapley values: the mean,
over all orders in which themes can be exchanged one by one, of the change that one of them makes.
The shares add up to the whole exactly, and need the trees' predictions alone.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import PYTORCH, PYTORCH_OPERATOR, Candidate
from confpred.families.registry import config_words, operation_of
from confpred.model.folder import Model
from confpred.model.rank import FamilyModel
from confpred.predict.choice import LAUNCH_MS, MAX_TOP, Choice, check_top
from confpred.predict.predictor import Predictor
from confpred.problem.device import Device, get_device
from confpred.problem.record import Record

NEAREST = 5  # measured layers that an explanation names


@dataclass(frozen=True, slots=True)
class Roofline:
    """Bound that no kernel can beat: bytes that must cross device memory, multiplications plus
    additions, and the milliseconds of each alone."""

    bytes: int
    flops: int
    memory_ms: float
    arithmetic_ms: float

    @property
    def floor_ms(self) -> float:
        """Return the larger of the two, milliseconds."""
        return max(self.memory_ms, self.arithmetic_ms)

    @property
    def limit(self) -> str:
        """Return which of the two it is: ``memory`` or ``arithmetic``."""
        return "memory" if self.memory_ms >= self.arithmetic_ms else "arithmetic"

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "floor_ms": self.floor_ms, "limit": self.limit}


@dataclass(frozen=True, slots=True)
class LayerExplanation:
    """Why a layer gets the config that it gets. ``str()`` of it is a page for people.

    Attributes:
        problem: the layer.
        device: key of the device that was asked about.
        choices: the choice, and after it the runners-up.
        roofline: lower bound on the time of any kernel.
        pytorch_ms: expected time of PyTorch's own operator; None if no model predicts it.
        comparisons: the choice beside the next best config of its family, and the median one.
        model: version of the model that was asked, or None.
        nearest: the measured layers nearest to this one; empty without a model.
    """

    problem: Record
    device: str
    choices: tuple[Choice, ...]
    roofline: Roofline
    pytorch_ms: float | None
    comparisons: tuple[Comparison, ...]
    model: str | None
    nearest: tuple[Neighbour, ...]

    @property
    def choice(self) -> Choice:
        """The choice."""
        return self.choices[0]

    @property
    def roofline_share(self) -> float | None:
        """The part of the roofline that the choice is expected to reach; None without a time."""
        ms = self.choice.predicted_ms
        return self.roofline.floor_ms / ms if ms else None

    def to_json(self) -> dict[str, Any]:
        """Return the one JSON form of an explanation, printed by ``confpred explain --json``."""
        return {
            "problem": self.problem.to_json(),
            "device": self.device,
            "choices": [choice.to_json() for choice in self.choices],
            "regret_bound": self.choice.regret_bound,
            "roofline": self.roofline.to_json() | {"share": self.roofline_share},
            "pytorch_ms": self.pytorch_ms,
            "model": self.model,
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
            "nearest": [neighbour.to_json() for neighbour in self.nearest],
        }

    def __str__(self) -> str:
        return "\n".join(page(self))


def explain_layer(
    problem: Record,
    device: str | Device = "h100",
    *,
    top: int = 5,
    predictor: Predictor | None = None,
) -> LayerExplanation:
    """Explain why `problem` gets its config on `device`; needs no GPU.

    Args:
        problem: the layer.
        device: name of a GPU, such as ``"h100"``.
        top: how many choices to list, the best one included.
        predictor: whose choice is explained; None: that of the newest models.

    Raises:
        InvalidInput: `problem` is no problem, or `top` is not from 1 to 32.
        UnknownDevice: no description of `device` is known.
        ModelError: a model is damaged.
    """
    asked = predictor or Predictor.load(operation=operation_of(problem).name)
    return next(explain_layers([problem], device, top=top, predictor=asked))


def explain_layers(
    problems: Iterable[Record],
    device: str | Device = "h100",
    *,
    top: int = 5,
    predictor: Predictor | None = None,
    layers: dict[str, NearestLayers] | None = None,
) -> Iterator[LayerExplanation]:
    """Yield the `explain_layer` of each of `problems`, in order. `layers` caches the measured
    layers of a model, by its version, for later calls with the same predictor."""
    gpu, asked = get_device(device), predictor or Predictor.load()
    check_top(top)
    layers = {} if layers is None else layers
    for problem in problems:
        ranked = asked.rank(problem, gpu, MAX_TOP)
        model = asked.own_model(type(problem), gpu)
        if model is not None and model.version not in layers:
            layers[model.version] = NearestLayers(model)
        memory_ms, arithmetic_ms = gpu.memory_s(problem) * 1e3, gpu.arithmetic_s(problem) * 1e3
        yield LayerExplanation(
            problem=problem,
            device=gpu.key,
            choices=tuple(ranked[:top]),
            roofline=Roofline(problem.minimum_bytes, problem.flops, memory_ms, arithmetic_ms),
            pytorch_ms=asked.expected_ms(problem, gpu, PYTORCH_OPERATOR),
            comparisons=tuple(_comparisons(problem, gpu, model, ranked)),
            model=None if model is None else model.version,
            nearest=layers[model.version].nearest(problem, NEAREST) if model else (),
        )


def _comparisons(
    problem: Record, device: Device, model: Model | None, ranked: list[Choice]
) -> Iterator[Comparison]:
    chosen = ranked[0].candidate
    learned = model.families.get(chosen.provider) if model else None
    if learned is None:
        return
    others = [c.candidate for c in ranked[1:] if c.provider == chosen.provider][:1]
    others.append(median_config(learned, problem, device))
    for other in dict.fromkeys(others):
        if other != chosen:
            yield compare(learned, problem, device, chosen, other)


_SOURCES: Mapping[str, str] = {
    "pinned": "as the user pinned it",
    "measured": "the fastest candidate measured for this layer",
    "predicted": "as predicted",
    "transferred": "predicted by the model of another device, as this one has none",
    "heuristic": "by the families' own estimates, as this device has no model of them",
    "fallback": "as no confpred kernel is legal",
}
#: Features shown of each cause in a comparison; the JSON form has all.
FEATURES_SHOWN = 6


class Listing(NamedTuple):
    """A part of an explanation: headings and rows, after a title and a remark, either of which may
    be empty. The first `right` columns are numbers."""

    title: str
    remark: str
    right: int
    rows: Sequence[Sequence[str]]


def page(explanation: LayerExplanation) -> Iterator[str]:
    """Yield the lines of a page, in about 100 columns where the layer's words allow it."""
    yield from (f"{explanation.problem} on {explanation.device}", "")
    yield from (f"{name:10}{text}" for name, text in summary(explanation))
    for table in tables(explanation):
        yield from ("", *filter(None, (table.title, table.remark)), *_aligned(table))
    if remark := remark_on(explanation):
        yield from ("", remark)


def remark_on(explanation: LayerExplanation) -> str:
    """Return a sentence on the data behind a guess; empty for other choices."""
    if explanation.nearest or not explanation.choice.is_guess:
        return ""
    if on := explanation.choice.measured_on:
        return f"The times are predicted from measurements on {on}: this device has none."
    return "No model covers this layer: the times are rough estimates."


def summary(explanation: LayerExplanation) -> Iterator[tuple[str, str]]:
    """Yield the choice, its bound, the roofline and PyTorch's operator: a name, and a sentence."""
    choice, floor = explanation.choice, explanation.roofline
    expected = "" if choice.predicted_ms is None else f", {choice.predicted_ms:.4f} ms"
    by = f" (model {choice.model})" if choice.model else ""
    yield "chosen", f"{choice.provider}{expected}: {_SOURCES[choice.source]}{by}"
    if choice.regret_bound is not None:
        slow = f"at most {choice.regret_bound:.3f} times as slow as the best config"
        yield "bound", f"with 95 % confidence {slow}"
    elif choice.extrapolated:
        yield "bound", "none, out of distribution: no similar layer was measured"
    elif choice.is_guess:
        yield "bound", "none: no bound is calibrated for this device"
    share = explanation.roofline_share
    reached = "" if share is None else f"; the choice reaches {share:.0%} of it"
    if floor.floor_ms < LAUNCH_MS:
        reached = f"; a launch takes {LAUNCH_MS} ms"
    least = f"{_amount(floor.bytes, 'B')} and {_amount(floor.flops, 'FLOP')} take at least"
    yield "roofline", f"{least} {floor.floor_ms:.4f} ms, limited by {floor.limit}{reached}"
    yield "PyTorch", _pytorch(explanation)


def _pytorch(explanation: LayerExplanation) -> str:
    pytorch_ms, choice = explanation.pytorch_ms, explanation.choice
    if pytorch_ms is None:
        return "no model predicts the time of its operator"
    text = f"its operator is expected to take {pytorch_ms:.4f} ms"
    if choice.provider == PYTORCH:
        times = [c.predicted_ms for c in explanation.choices if c.family and c.predicted_ms]
        if times and choice.source in ("predicted", "transferred"):
            text += f", the best confpred kernel {times[0]:.4f} ms; PyTorch is chosen because the"
            text += " predicted gain is within the model's error"
    elif choice.predicted_ms:
        text += f", {pytorch_ms / choice.predicted_ms:.2f} times as long"
    return text


def tables(explanation: LayerExplanation) -> Iterator[Listing]:
    """Yield the choices, each comparison, and the nearest measured layers."""
    best, rows = explanation.choice.predicted_ms, [("rank", "ms", "ratio", "source", "candidate")]
    for rank, choice in enumerate(explanation.choices, 1):
        ms = choice.predicted_ms
        times = ("", "") if ms is None else (f"{ms:.4f}", f"{ms / best:.3f}" if best else "")
        rows.append((str(rank), *times, choice.source, _words(choice.candidate)))
    yield Listing("", "", 3, rows)
    yield from map(_comparison, explanation.comparisons)
    if explanation.nearest:
        rows = [("distance", "ms", "of roofline", "fastest", "layer")]
        for n in explanation.nearest:
            figures = (f"{n.distance:.2f}", f"{n.time_ms:.4f}", f"{n.roofline_share:.0%}")
            rows.append((*figures, _words(n.candidate), str(n.problem)))
        yield Listing(f"Nearest layers that model {explanation.model} has measured", "", 3, rows)


def _comparison(comparison: Comparison) -> Listing:
    rows = [("factor", "from", "values: chosen -> other")]
    for part in comparison.contributions:
        shown = [f"{name} {a:.4g} -> {b:.4g}" for name, (a, b) in part.features.items()]
        if len(shown) > FEATURES_SHOWN:
            shown[FEATURES_SHOWN:] = [f"and {len(shown) - FEATURES_SHOWN} more"]
        rows.append((f"{part.ratio:.3f}", part.theme, ", ".join(shown)))
    remark = f"It is expected to take {comparison.ratio:.3f} times as long. The factors of that:"
    return Listing(f"Why not {_words(comparison.other)}", remark, 1, rows)


def _words(candidate: Candidate) -> str:
    return f"{candidate.provider} {config_words(candidate)}".rstrip()


def _amount(count: int, unit: str) -> str:
    """Return such as ``18.4 MB``."""
    value, prefixes = float(count), ["", "k", "M", "G", "T", "P"]
    while value >= 999.5 and len(prefixes) > 1:
        value, prefixes = value / 1000, prefixes[1:]
    return f"{value:.3g} {prefixes[0]}{unit}"


def _aligned(table: Listing) -> Iterator[str]:
    """Yield the rows with aligned columns, headings first."""
    widths = [max(map(len, column)) for column in zip(*table.rows, strict=True)]
    sides = [">" if i < table.right else "<" for i in range(len(widths))]
    for row in table.rows:
        cells = zip(row, sides, widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()


#: Themes of features, by patterns of their names; the first that matches counts. Config fields come
#: before these. The exact shares of g groups take 2^g predictions, so there are to be few.
THEMES = {
    "occupancy": r"(blocks|warps)_per_sm|registers|smem_bytes|(block_)?threads|bytes_in_flight",
    "waves": r"waves|wave_waste|log_blocks.*|rounds|round_waste|steps|.*at_once",
    "wasted work": r".*_waste|.*_tail|bands_cut",
    "memory access": r"halo.*|log_(load|filter|sum)_bytes|run_bytes|pixel_alignment|loads|in_x"
    "|fragment_bytes",
    "work": r".*products|(log_)?work|band_.*|.*_items|.*_tiles|warp_groups|lanes|block_r|parts|sums"
    "|slice_rows|[ck]_blocks|in_turn|warp_columns|warp_units|passes|pieces",
    "estimate": r"log_estimate",
}
CONFIG, OTHER = "config", "other"


@dataclass(frozen=True, slots=True)
class Contribution:
    """One cause of the difference between two configs.

    Attributes:
        theme: one of `THEMES`, ``config`` for the config's own fields, or ``other``.
        ratio: the factor on the time of the other config over that of the chosen one. The factors
            of all causes multiply to the whole ratio.
        features: the values that differ, of the chosen config and of the other, by name.
    """

    theme: str
    ratio: float
    features: Mapping[str, tuple[float, float]]

    def to_json(self) -> dict[str, Any]:
        features = [
            {"name": name, "chosen": chosen, "other": other}
            for name, (chosen, other) in self.features.items()
        ]
        return {"theme": self.theme, "ratio": self.ratio, "features": features}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two configs of a family, and why the model prefers one.

    Attributes:
        other: the config that the chosen one is compared with.
        ratio: expected time of the other over that of the chosen; below 1 where the model itself
            would prefer the other, as it may where the choice was measured or pinned.
        contributions: the causes, the one with the largest effect first.
    """

    other: Candidate
    ratio: float
    contributions: tuple[Contribution, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "provider": self.other.provider,
            "config": config_words(self.other),
            "ratio": self.ratio,
            "contributions": [contribution.to_json() for contribution in self.contributions],
        }


def median_config(learned: FamilyModel, problem: Record, device: Device) -> Candidate:
    """Return the median of the legal configs in the model's order; of two, the faster one."""
    rows = learned.legal(problem, device)
    cost = learned.ordering.predict(learned.features(problem, device, rows))
    row = rows[np.lexsort((rows, cost))[(len(rows) - 1) // 2]]
    return Candidate(learned.family.name, int(row))


def compare(
    learned: FamilyModel, problem: Record, device: Device, chosen: Candidate, other: Candidate
) -> Comparison:
    """Return why `chosen` is expected to be faster than `other`; `learned` is their family's."""
    rows = np.array([chosen.config_id, other.config_id], np.intp)
    chosen_row, other_row = learned.features(problem, device, rows)
    names, fields = learned.pool.feature_names, learned.family.configs.dtype.names or ()
    same = (chosen_row == other_row) | (np.isnan(chosen_row) & np.isnan(other_row))
    groups: dict[str, list[int]] = {}
    for i in np.flatnonzero(~same).tolist():
        groups.setdefault(theme_of(names[i], fields), []).append(i)
    shares, whole = _shapley(learned, chosen_row, other_row, list(groups.values()))
    contributions = []
    for (theme, columns), share in zip(groups.items(), shares, strict=True):
        values = {names[i]: (float(chosen_row[i]), float(other_row[i])) for i in columns}
        contributions.append(Contribution(theme, math.exp(share), values))
    contributions.sort(key=lambda c: -abs(math.log(c.ratio)))
    return Comparison(other, math.exp(whole), tuple(contributions))


def theme_of(name: str, config_fields: Sequence[str]) -> str:
    """Return the theme of the feature `name`, of a family whose configs have `config_fields`."""
    if name in config_fields:
        return CONFIG
    return next((theme for theme, words in THEMES.items() if re.fullmatch(words, name)), OTHER)


def _shapley(
    learned: FamilyModel,
    chosen_row: NDArray[np.float32],
    other_row: NDArray[np.float32],
    groups: Sequence[list[int]],
) -> tuple[list[float], float]:
    """Return each group's Shapley share of the change in cost, and the whole change."""
    count = len(groups)
    mixed = np.tile(chosen_row, (2**count, 1))
    # Bit g of a row's number: whether it has group g of `other_row`.
    exchanged = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    for group, columns in enumerate(groups):
        mixed[np.ix_(exchanged[:, group] == 1, columns)] = other_row[columns]
    cost = learned.ordering.predict(mixed)
    sizes = exchanged.sum(axis=1)
    shares = []
    for group in range(count):
        without = np.flatnonzero(exchanged[:, group] == 0)
        weights = [1 / (count * math.comb(count - 1, size)) for size in sizes[without].tolist()]
        shares.append(float((cost[without + 2**group] - cost[without]) @ weights))
    return shares, float(cost[-1] - cost[0])


#: Distance of problems that differ in direction, dtype or epilogue: as with four times the batch.
_OTHER_KIND = 2.0


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A layer that was measured for the model, in full or by dozens of configs.

    Attributes:
        problem: the layer.
        distance: from the layer asked about, in doublings (see `NearestLayers`).
        candidate: the fastest candidate measured.
        time_ms: its time, milliseconds.
        roofline_share: the part of the roofline that it reaches.
    """

    problem: Record
    distance: float
    candidate: Candidate
    time_ms: float
    roofline_share: float

    def to_json(self) -> dict[str, Any]:
        numbers = {"time_ms": self.time_ms, "roofline_share": self.roofline_share}
        words = {"provider": self.candidate.provider, "config": config_words(self.candidate)}
        return {"problem": self.problem.to_json(), "distance": self.distance, **words, **numbers}


class NearestLayers:
    """The measured layers of a model's data, to be searched for those nearest to a problem.

    The distance of two problems is the root of the sum of squares over their fields: of a size, the
    binary logarithm of the ratio; of a pair, those of both members plus one; of any other field, 2
    where they differ.
    """

    def __init__(self, model: Model) -> None:
        self._device, self._best = model.device, tuple(model.measured.values())
        kind = model.operation.problem
        self._problems = [kind.parse(words) for words in model.measured]
        places = [_place(problem) for problem in self._problems]
        self._sizes = np.array([sizes for sizes, _ in places])
        self._kinds = np.array([kinds for _, kinds in places], object)

    def nearest(self, problem: Record, count: int) -> tuple[Neighbour, ...]:
        """Return the `count` nearest, nearest first, or all if there are fewer. A problem that was
        measured itself is its own neighbour, at distance 0."""
        if not self._problems:
            return ()
        sizes, kinds = _place(problem)
        squares = ((self._sizes - np.array(sizes)) ** 2).sum(axis=1)
        differing = (self._kinds != np.array(kinds, object)).sum(axis=1)
        distance = np.sqrt(squares + _OTHER_KIND**2 * differing)
        layers = []
        for i in np.argsort(distance, kind="stable")[:count].tolist():
            near, best = self._problems[i], self._best[i]
            share = self._device.roofline_s(near) * 1e3 / best.time_ms
            layers.append(Neighbour(near, float(distance[i]), best.candidate, best.time_ms, share))
        return tuple(layers)


def _place(problem: Record) -> tuple[list[float], list[object]]:
    """Return the logarithms of a problem's sizes, and the values of its other fields."""
    sizes: list[float] = []
    kinds: list[object] = []
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        if field.name in problem.TUPLES:
            sizes += (math.log2(1 + member) for member in value)
        elif field.name in problem.LIMITS:
            sizes.append(math.log2(max(value, 1)))
        else:
            kinds.append(value)
    return sizes, kinds
