"""What ``benchmarks/networks.py`` records: rows, how runs are merged, and what they are summed up
to. Nothing here needs PyTorch.

A result is an object of ``runs`` (provenance, by a text that rows refer to), ``steps``,
``first_steps`` and ``losses``; the last three are lists of rows. A row of ``steps`` compares one
way of running a network with and without confpred, both timed in the same rounds of one process.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WAYS = {"eager": "eager", "graph": "CUDA graph", "compile": "torch.compile"}
HELPS = ("enable", "optimize")
VARIANTS = tuple(
    f"{way}{helped}" for way in WAYS for helped in ("", *(f" + {name}" for name in HELPS))
)
#: Each way without confpred a second time: what the two differ by is the noise.
AGAIN = {way: f"{way} again" for way in WAYS}
#: The fields that tell rows of a kind apart; a later row of the same takes an earlier one's place.
KEYS = {
    "steps": ("network", "mode", "batch", "way", "with"),
    "first_steps": ("network", "mode"),
    "losses": ("network",),
}
MANY = 32  # from this batch on, a row counts in the summary

Row = dict[str, Any]
Result = dict[str, Any]


def split(name: str) -> tuple[str, str | None]:
    """``graph + enable`` is ``graph`` with ``enable``; ``graph again`` is ``graph``."""
    way, _, helped = name.partition(" + ")
    return way.removesuffix(" again"), helped or None


def pairs(network: str, mode: str, batch: int, found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The rows of one batch, from what was found of each variant: its ``times_ms``, one for each
    round, ``peak_mb`` and ``difference``, or its ``error``."""
    rows = []
    noises = {way: _noise(found.get(way, {}), found.get(AGAIN[way], {})) for way in WAYS}
    for name, helped in found.items():
        way, kind = split(name)
        if kind is None:
            continue
        plain = found.get(way, {"error": "not measured"})
        row: Row = {"network": network, "mode": mode, "batch": batch, "way": way, "with": kind}
        errors = {n: f["error"] for n, f in ((way, plain), (name, helped)) if "error" in f}
        if errors:
            rows.append(row | {"errors": errors})
            continue
        row |= {
            "without_ms": statistics.median(plain["times_ms"]),
            "with_ms": statistics.median(helped["times_ms"]),
            "ratio": _ratio(plain["times_ms"], helped["times_ms"]),
            "peak_without_mb": plain["peak_mb"],
            "peak_with_mb": helped["peak_mb"],
            "difference_without": plain["difference"],
            "difference_with": helped["difference"],
        }
        if noises["eager"] is not None:
            eager_ms = statistics.median(found["eager"]["times_ms"])
            row |= {"eager_ms": eager_ms, "noise": noises["eager"]}
        if noises[way] is not None:
            row["way_noise"] = noises[way]
        rows.append(row)
    return rows


def _noise(once: Mapping[str, Any], again: Mapping[str, Any]) -> float | None:
    """By how much two copies of the same variant differ; None if either was not timed."""
    if "times_ms" not in once or "times_ms" not in again:
        return None
    return abs(_ratio(once["times_ms"], again["times_ms"]) - 1)


def _ratio(without: Sequence[float], helped: Sequence[float]) -> float:
    """The median of the rounds' ratios: a host that is slower for some seconds is so for both."""
    return statistics.median(a / b for a, b in zip(without, helped, strict=True))


def failed(network: str, mode: str, batch: int, variants: Iterable[str], error: str) -> list[Row]:
    """The rows of a batch whose process ended before it was measured."""
    found = {name: {"error": error} for name in variants}
    return pairs(network, mode, batch, found)


def merged(old: Result, new: Mapping[str, Sequence[Row]], facts: Mapping[str, Any]) -> Result:
    """`old` with the rows of `new` in place of those of the same key, and the others kept.

    Each new row refers to `facts`, the provenance of its run, and so do the result's own fields. A
    run that no row refers to any more is dropped.
    """
    runs = dict(old.get("runs", {}))
    name = _run_name(runs, facts)
    runs[name] = dict(facts)
    lists = {}
    for kind, keys in KEYS.items():
        rows = {tuple(row[key] for key in keys): row for row in old.get(kind, ())}
        rows |= {tuple(row[key] for key in keys): row | {"run": name} for row in new.get(kind, ())}
        lists[kind] = [rows[key] for key in sorted(rows)]
    used = {row["run"] for rows in lists.values() for row in rows}
    return dict(facts) | {"runs": {n: f for n, f in runs.items() if n in used}} | lists


def _run_name(runs: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The name of the earlier run with the same facts, or a new one."""
    same = [name for name, known in runs.items() if known == dict(facts)]
    number = 1 + max((int(name) for name in runs), default=0)
    return same[0] if same else str(number)


def outstanding(
    result: Mapping[str, Any], commit: str, network: str, mode: str, batch: int, variants: list[str]
) -> list[str]:
    """Those of `variants` that `commit` has no figures of yet, with the variants that they are
    compared with."""
    known = {
        (row["way"], row["with"])
        for row in result.get("steps", ())
        if (row["network"], row["mode"], row["batch"]) == (network, mode, batch)
        and "ratio" in row
        and result["runs"][row["run"]]["commit"] == commit
    }
    return complete([v for v in variants if split(v)[1] and split(v) not in known])


def complete(variants: Iterable[str]) -> list[str]:
    """`variants` in the order of `VARIANTS`, with those that they are compared with."""
    wanted = set(variants)
    wanted |= {split(name)[0] for name in wanted}
    return [name for name in VARIANTS if name in wanted]


def summary(rows: Sequence[Row], *, least_batch: int = MANY) -> list[Row]:
    """Geomean, worst and best ratio by mode, way and help, over rows of at least `least_batch`."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["batch"] >= least_batch and "ratio" in row:
            key = (row["mode"], row["way"], row["with"])
            found.setdefault(key, []).append(row["ratio"])
    return [
        {
            "mode": mode,
            "way": way,
            "with": helped,
            "count": len(found[mode, way, helped]),
            "geomean": statistics.geometric_mean(found[mode, way, helped]),
            "worst": min(found[mode, way, helped]),
            "best": max(found[mode, way, helped]),
        }
        for mode in ("inference", "training")
        for way in WAYS
        for helped in HELPS
        if (mode, way, helped) in found
    ]


def curve_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Mean absolute difference of two loss curves of as many steps; NaN if either has one."""
    return statistics.fmean(abs(x - y) for x, y in zip(a, b, strict=True))
