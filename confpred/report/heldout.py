"""The verdict by a hold-out, where an evaluation has one: networks that no model is trained on,
with every legal config measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from confpred.report.judged import Evaluated
from confpred.report.tables import Cell, Table, count, number, share

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
    """Regret, coverage and the worst answers; empty where no evaluation has a hold-out."""
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
    """What the hold-out of `evaluation` is, in words; empty where it has none."""
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
