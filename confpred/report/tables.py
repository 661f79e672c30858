"""Tables of a page: cells with their text, and the value that they are sorted by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confpred.report.judged import (
    SLOW,
    Evaluated,
    Group,
    Noise,
    by_batch,
    by_direction,
    by_dtype,
    by_family,
    by_network,
)

Groups = Callable[[Sequence[Any]], list[Group]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Attributes:
        text: what is read.
        value: what a number is sorted by; None for a text.
    """

    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose columns can be sorted by.

    Attributes:
        title: above it.
        columns: the headings; of a column of numbers the cells have a value.
        rows: the cells, in the order in which they are shown first.
        note: a sentence below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


def number(value: float, form: str = "{:.3f}") -> Cell:
    """Return a cell of a number; empty if it is not finite."""
    return Cell("") if not math.isfinite(value) else Cell(form.format(value), value)


def count(value: int) -> Cell:
    return Cell(f"{value:,}", value)


def share(value: float) -> Cell:
    return number(value, "{:.1%}")


def regret_tables(evaluations: Sequence[Evaluated]) -> list[Table]:
    """Return the figures by family, direction, dtype, batch and network."""
    subjects: tuple[tuple[str, str, Groups], ...] = (
        ("By kernel family", "family", by_family),
        ("By direction", "direction", by_direction),
        ("By dtype", "dtype", by_dtype),
        ("By batch size", "batch", by_batch),
        ("By network", "network", by_network),
    )
    tables = [_regret_table(title, head, groups, evaluations) for title, head, groups in subjects]
    return [table for table in tables if table.rows]


def _regret_table(title: str, head: str, groups: Groups, evaluations: Sequence[Evaluated]) -> Table:
    rows = [
        (Cell(e.name), Cell(g.name), count(g.layers), *regret_cells(g))
        for e in evaluations
        for g in groups(e.layers)
    ]
    return Table(title, ("device", head, "layers", *REGRET_COLUMNS), tuple(rows))


#: The headings of `regret_cells`.
REGRET_COLUMNS = (
    "geomean",
    "p95",
    "worst",
    f"above {SLOW:g}",
    "efficiency",
    "efficiency p10",
)


def regret_cells(group: Group) -> tuple[Cell, ...]:
    return (
        number(group.geomean),
        number(group.p95),
        number(group.worst),
        share(group.slow),
        number(group.efficiency),
        number(group.efficiency_p10),
    )


def summary_table(evaluations: Sequence[Evaluated]) -> Table:
    rows = []
    for e in evaluations:
        top = e.figures.get("methods", {}).get("model", {}).get("top", {})
        best_of = (number(float(top.get(k, math.nan))) for k in ("3", "8"))
        group = Group.of(e.name, e.layers)
        rows.append((Cell(e.name), count(group.layers), *regret_cells(group), *best_of))
    columns = ("device", "layers", *REGRET_COLUMNS, "best of 3", "best of 8")
    return Table("Our configs among one another", columns, tuple(rows))


def whole_table(evaluations: Sequence[Evaluated]) -> Table:
    """Return the figures of whole answers, PyTorch's operator included, where it was measured."""
    rows = []
    for e in evaluations:
        whole = e.figures.get("whole")
        for name, regret in (whole or {}).get("regret", {}).items():
            cells = (number(float(regret[key])) for key in ("geomean", "p95", "worst"))
            rows.append((Cell(e.name), Cell(name), count(int(regret["problems"])), *cells))
    columns = ("device", "answer", "problems", "geomean", "p95", "worst")
    return Table("Whole answers, PyTorch's operator included", columns, tuple(rows))


def method_table(evaluations: Sequence[Evaluated]) -> Table:
    rows = []
    for e in evaluations:
        for name, s in e.figures.get("methods", {}).items():
            cells = (number(float(s[key])) for key in ("geomean", "p90", "p95", "worst"))
            configs = number(float(s["candidates"]), "{:.0f}")
            rows.append((Cell(e.name), Cell(name), *cells, configs))
    columns = ("device", "method", "geomean", "p90", "p95", "worst", "configs")
    return Table("The model beside other ways to choose", columns, tuple(rows))


def coverage_table(evaluations: Sequence[Evaluated]) -> Table:
    """Return how often the bound holds, by facts that it should not depend on."""
    rows = []
    for e in evaluations:
        everything = [Group.of("all", e.layers)]
        subjects: Mapping[str, Iterable[Group]] = {
            "": everything,
            "family": by_family(e.layers),
            "direction": by_direction(e.layers),
            "batch": by_batch(e.layers),
        }
        for subject, groups in subjects.items():
            rows += [
                (
                    Cell(e.name),
                    Cell(f"{subject} {g.name}".strip()),
                    count(g.layers),
                    number(g.bound),
                    share(g.covered),
                )
                for g in groups
            ]
    columns = ("device", "layers of", "layers", "mean bound", "covered")
    return Table("How often the bound holds", columns, tuple(rows))


def noise_table(noise: Mapping[str, Sequence[Noise]]) -> Table:
    rows = [
        (
            Cell(device),
            Cell(n.name),
            count(n.configs),
            number(n.median, "{:.2%}"),
            number(n.p95, "{:.2%}"),
        )
        for device, groups in noise.items()
        for n in groups
    ]
    columns = ("device", "family", "configs", "median", "95 % quantile")
    return Table("Interquartile range over median, by family", columns, tuple(rows))


_SPREAD = (
    ("geomean", number),
    ("p95", number),
    ("worst", number),
    ("efficiency_mean", number),
    ("efficiency_p10", number),
    ("efficiency_min", number),
    ("far", share),
)
_FACTS = (
    ("model", "model"),
    ("checked", "unseen by"),
    ("networks", "networks"),
    ("problems", "problems"),
    ("configs", "configs timed"),
    ("complete", "share of all legal configs"),
    ("weighted", "time of all answers over that of the best"),
    ("pytorch", "left to PyTorch's operator"),
    ("wrongly_pytorch", "of these, ours was faster by more than 5 %"),
)


def holdout_tables(evaluations: Sequence[Evaluated]) -> list[Table]:
    """Return regret, coverage and the worst answers; empty if no evaluation has a hold-out."""
    verdicts = [(e.name, e.figures["holdout"]) for e in evaluations if e.figures.get("holdout")]
    if not verdicts:
        return []
    tables = [
        _spreads(verdicts),
        _bounds(verdicts),
        _worst(verdicts),
    ]
    return [table for table in tables if table.rows]


def holdout_facts(evaluation: Evaluated) -> dict[str, str]:
    """Return the hold-out of `evaluation` in words; empty if it has none."""
    verdict = evaluation.figures.get("holdout") or {}
    facts = {words: _plain(verdict[key]) for key, words in _FACTS if key in verdict}
    for mode, speed in verdict.get("speed", {}).items():
        slower = verdict.get("slower", {}).get(mode, "?")
        facts[f"over PyTorch's operator, {mode}"] = f"{speed:.3f} times; slower on {slower}"
    return facts


def _spreads(verdicts: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    rows = []
    for name, verdict in verdicts:
        spreads = {"our configs": verdict.get("ours"), "whole answers": verdict.get("whole")}
        spreads |= {f"chosen {family}": s for family, s in verdict.get("families", {}).items()}
        spreads |= verdict.get("origins", {})
        for of, spread in spreads.items():
            if spread:
                cells = (form(float(spread.get(key, math.nan))) for key, form in _SPREAD)
                rows.append((Cell(name), Cell(of), count(int(spread["problems"])), *cells))
    columns = ("device", "regret of", "problems", "geomean", "p95", "worst", "efficiency",
               "efficiency p10", "least", "above 1.1")  # fmt: skip
    return Table("Regret against every legal config", columns, tuple(rows))


def _bounds(verdicts: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    rows = [
        (
            Cell(name),
            Cell(provider),
            count(int(found["problems"])),
            number(float(found["median"])),
            share(float(found["covered"])),
        )
        for name, verdict in verdicts
        for provider, found in verdict.get("bounds", {}).items()
    ]
    columns = ("device", "answers by", "problems", "median bound", "covered")
    return Table("How often the bound holds for whole answers", columns, tuple(rows))


def _worst(verdicts: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    rows = [
        (
            Cell(name),
            number(float(worst[2])),
            *(Cell(str(part)) for part in (*worst[:2], *worst[3:])),
        )
        for name, verdict in verdicts
        for worst in verdict.get("worst", [])
    ]
    width = max((len(row) for row in rows), default=0)
    columns = ("device", "regret", "problem", "networks", "answer")[:width]
    return Table("The worst whole answers", columns, tuple(rows))


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
