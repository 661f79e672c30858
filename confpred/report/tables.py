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
    by_batch,
    by_direction,
    by_dtype,
    by_family,
    by_network,
)
from confpred.report.noise import Noise

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
    """A number, or nothing where it is none."""
    return Cell("") if not math.isfinite(value) else Cell(form.format(value), value)


def count(value: int) -> Cell:
    return Cell(f"{value:,}", value)


def share(value: float) -> Cell:
    return number(value, "{:.1%}")


def regret_tables(evaluations: Sequence[Evaluated]) -> list[Table]:
    """The figures by family, direction, dtype, batch and network."""
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
    """A row an evaluation."""
    rows = []
    for e in evaluations:
        top = e.figures.get("methods", {}).get("model", {}).get("top", {})
        best_of = (number(float(top.get(k, math.nan))) for k in ("3", "8"))
        group = Group.of(e.name, e.layers)
        rows.append((Cell(e.name), count(group.layers), *regret_cells(group), *best_of))
    columns = ("device", "layers", *REGRET_COLUMNS, "best of 3", "best of 8")
    return Table("Our configs among one another", columns, tuple(rows))


def whole_table(evaluations: Sequence[Evaluated]) -> Table:
    """The whole answers, PyTorch's operator included, where it was measured."""
    rows = []
    for e in evaluations:
        whole = e.figures.get("whole")
        for name, regret in (whole or {}).get("regret", {}).items():
            cells = (number(float(regret[key])) for key in ("geomean", "p95", "worst"))
            rows.append((Cell(e.name), Cell(name), count(int(regret["problems"])), *cells))
    columns = ("device", "answer", "problems", "geomean", "p95", "worst")
    return Table("Whole answers, PyTorch's operator included", columns, tuple(rows))


def method_table(evaluations: Sequence[Evaluated]) -> Table:
    """The model beside the baselines."""
    rows = []
    for e in evaluations:
        for name, s in e.figures.get("methods", {}).items():
            cells = (number(float(s[key])) for key in ("geomean", "p90", "p95", "worst"))
            configs = number(float(s["candidates"]), "{:.0f}")
            rows.append((Cell(e.name), Cell(name), *cells, configs))
    columns = ("device", "method", "geomean", "p90", "p95", "worst", "configs")
    return Table("The model beside other ways to choose", columns, tuple(rows))


def coverage_table(evaluations: Sequence[Evaluated]) -> Table:
    """How often the bound holds, by what it should not depend on."""
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
    """By family, for each device."""
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
