"""Tables of a page: cells with their text, and the value to sort them by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from confpred.report.judged import SUBJECTS, Evaluated, Group, groups_of, noise_by_family
from confpred.training.dataset import Dataset
from confpred.training.regret import FAR


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: its text, and the value that a number is sorted by."""

    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table whose columns can be sorted."""

    title: str
    columns: tuple[str, ...]  # headings; the cells of a column of numbers have a value
    rows: tuple[tuple[Cell, ...], ...]  # rows in their first order


def made(title: str, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> ReportTable:
    """Return a table; a value that is no cell becomes one of its text."""
    cells = (tuple(c if isinstance(c, Cell) else Cell(str(c)) for c in row) for row in rows)
    return ReportTable(title, tuple(columns), tuple(cells))


def number(value: float, form: str = "{:.3f}") -> Cell:
    """Return a cell of a number; empty if it is not finite."""
    return Cell("") if not math.isfinite(value) else Cell(form.format(value), value)


def count(value: int) -> Cell:
    return Cell(f"{value:,}", value)


def share(value: float) -> Cell:
    return number(value, "{:.1%}")


def numbers(figures: Mapping[str, Any], keys: Iterable[str]) -> list[Cell]:
    """Return some figures of an evaluation; a cell is empty where there is none."""
    return [(share if k == "far" else number)(float(figures.get(k, math.nan))) for k in keys]


#: Headings of the figures of regret.
REGRET = {
    "geomean": "geomean",
    "p95": "p95",
    "worst": "worst",
    "far": f"above {FAR:g}",
    "efficiency_mean": "efficiency",
    "efficiency_p10": "efficiency p10",
}


def regret_cells(group: Group) -> list[Cell]:
    return [count(group.regret.problems), *numbers(asdict(group.regret), REGRET)]


def regret_tables(evaluations: Sequence[Evaluated]) -> list[ReportTable]:
    """Return the figures by family, direction, dtype, batch and network."""
    tables = [
        made(
            f"By {title}",
            ("device", subject, "layers", *REGRET.values()),
            (
                (e.name, g.name, *regret_cells(g))
                for e in evaluations
                for g in groups_of(e.layers, subject)
            ),
        )
        for subject, title in SUBJECTS.items()
    ]
    return [table for table in tables if table.rows]


def summary_table(evaluations: Sequence[Evaluated]) -> ReportTable:
    rows = []
    for e in evaluations:
        top = e.figures.get("methods", {}).get("model", {}).get("top", {})
        group = Group.of(e.name, e.layers)
        rows.append((e.name, *regret_cells(group), *numbers(top, ("3", "8"))))
    columns = ("device", "layers", *REGRET.values(), "best of 3", "best of 8")
    return made("Our configs among one another", columns, rows)


def whole_table(evaluations: Sequence[Evaluated]) -> ReportTable:
    """Return the figures of the choices among all families and PyTorch's operator, if they were
    judged."""
    figures = ("geomean", "p95", "worst")
    return made(
        "Whole answers, PyTorch's operator included",
        ("device", "answer", "problems", *figures),
        (
            (e.name, name, count(int(regret["problems"])), *numbers(regret, figures))
            for e in evaluations
            for name, regret in (e.figures.get("whole") or {}).get("regret", {}).items()
        ),
    )


def method_table(evaluations: Sequence[Evaluated]) -> ReportTable:
    figures = ("geomean", "p90", "p95", "worst")
    return made(
        "The model beside other ways to choose",
        ("device", "method", *figures, "configs"),
        (
            (e.name, name, *numbers(s, figures), number(float(s["candidates"]), "{:.0f}"))
            for e in evaluations
            for name, s in e.figures.get("methods", {}).items()
        ),
    )


def coverage_table(evaluations: Sequence[Evaluated]) -> ReportTable:
    """Return how often the bound holds, by properties that it should not depend on."""
    rows: list[tuple[object, ...]] = []
    for e in evaluations:
        groups = [("all", Group.of("all", e.layers))]
        for subject in ("family", "direction", "batch"):
            groups += [(f"{subject} {g.name}", g) for g in groups_of(e.layers, subject)]
        rows += [
            (e.name, name, count(g.regret.problems), number(g.bound), share(g.covered))
            for name, g in groups
        ]
    columns = ("device", "layers of", "layers", "mean bound", "covered")
    return made("How often the bound holds", columns, rows)


def noise_table(datasets: Mapping[str, Dataset]) -> ReportTable:
    return made(
        "Interquartile range over median, by family",
        ("device", "family", "configs", "median", "95 % quantile"),
        (
            (device, n.name, count(n.configs), *(number(x, "{:.2%}") for x in (n.median, n.p95)))
            for device, dataset in datasets.items()
            for n in noise_by_family(dataset.timings)
        ),
    )


#: Headings of the figures of a hold-out, with the least efficiency.
_SPREAD = {key: words for key, words in REGRET.items() if key != "far"} | {
    "efficiency_min": "least",
    "far": REGRET["far"],
}
_FACTS = {
    "model": "model",
    "checked": "unseen by",
    "networks": "networks",
    "problems": "problems",
    "configs": "configs timed",
    "complete": "share of all legal configs",
    "weighted": "time of all answers over that of the best",
    "pytorch": "left to PyTorch's operator",
    "wrongly_pytorch": "of these, confpred's config was faster by more than 5 %",
}


def holdout_tables(evaluations: Sequence[Evaluated]) -> list[ReportTable]:
    """Return regret, coverage and the worst answers; empty if no evaluation has a hold-out."""
    verdicts = [(e.name, e.figures["holdout"]) for e in evaluations if e.figures.get("holdout")]
    worst = [
        (name, number(float(regret)), problem, networks, *answer)
        for name, verdict in verdicts
        for problem, networks, regret, *answer in verdict.get("worst", [])
    ]
    columns = ("device", "regret", "problem", "networks", "answer")
    tables = [
        made(
            "Regret against every legal config",
            ("device", "regret of", "problems", *_SPREAD.values()),
            (
                (name, of, count(int(spread["problems"])), *numbers(spread, _SPREAD))
                for name, verdict in verdicts
                for of, spread in _spreads(verdict).items()
                if spread
            ),
        ),
        made(
            "How often the bound holds for whole answers",
            ("device", "answers by", "problems", "median bound", "covered"),
            (
                (
                    name,
                    provider,
                    count(int(coverage["problems"])),
                    number(float(coverage["median"])),
                    share(float(coverage["covered"])),
                )
                for name, verdict in verdicts
                for provider, coverage in verdict.get("bounds", {}).items()
            ),
        ),
        # Older evaluations do not have the answer.
        made("The worst whole answers", columns[: max(map(len, worst), default=0)], worst),
    ]
    return [table for table in tables if table.rows]


def _spreads(verdict: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "our configs": verdict.get("ours"),
        "whole answers": verdict.get("whole"),
        **{f"chosen {family}": s for family, s in verdict.get("families", {}).items()},
        **verdict.get("origins", {}),
    }


def holdout_facts(evaluation: Evaluated) -> dict[str, str]:
    """Return the hold-out of `evaluation` in words; empty if it has none."""
    verdict = evaluation.figures.get("holdout") or {}
    facts = {words: _plain(verdict[key]) for key, words in _FACTS.items() if key in verdict}
    for mode, speed in verdict.get("speed", {}).items():
        slower = verdict.get("slower", {}).get(mode, "?")
        facts[f"over PyTorch's operator, {mode}"] = f"{speed:.3f} times; slower on {slower}"
    return facts


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
