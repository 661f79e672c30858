"""Fill the tables of `PAGES` from ``benchmarks/results``, so that no figure is typed by hand.

    python -m benchmarks.tables           # rewrite the pages
    python -m benchmarks.tables --check   # exit 1 if a page would change

A table stands between ``<!-- table:NAME -->`` and ``<!-- /table -->``; `TABLES` says what each NAME
is made from. The tables of a result that has not been measured yet (`OPTIONAL`) are left empty.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.model.choice_tables import (
    OF_CHOICES,
    Results,
    Rows,
    chains,
    dense,
    layer_kinds,
    markdown,
    norms,
    side_by_side,
)
from benchmarks.networks.network_tables import OF_NETWORKS
from confpred.families.registry import all_families
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.problem.norm_of_groups import Norm

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    "README.md", "docs/devices.md", "docs/programs.md", "docs/pytorch.md", "docs/results.md",
    "docs/sampling.md", "docs/triton.md",
)  # fmt: skip
DEVICES = ("h100", "h200")
DIRECTIONS = {"fprop": "forward", "dgrad": "input gradient", "wgrad": "filter gradient"}
NOTABLE = 1.05  # a layer this many times as fast or as slow counts as faster or slower
_MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def columns(text: str) -> tuple[str, ...]:
    return tuple(text.split(" | "))


def kernels(results: Results) -> str:
    """Tabulate confpred's choice against cuDNN's better mode, by kind of layer and direction."""
    heads = columns(
        "layers | device | problems | median | geomean | worst | > 5 % slower | share of floor | "
        "cuDNN's share"
    )
    rows = []
    for device, result in results.items():
        speeds: dict[tuple[str, str], list[float]] = {}
        for layer in result["layers"]:
            sizes = dict(word.split("=") for word in layer["problem"].split())
            kind = "depthwise" if sizes["groups"] == sizes["c"] else "grouped"
            group = speeds.setdefault((kind, sizes.get("direction", "fprop")), [])
            group.append(layer["speedup"])
        for part in result["summary"]:
            shares = [f"{part[key]:.2f}" for key in ("floor_share", "cudnn_floor_share")]
            name = f"{part['kind']}, {DIRECTIONS[part['direction']]}"
            rows.append((name, device, *_speeds(speeds[part["kind"], part["direction"]]), *shares))
        every = [speed for group in speeds.values() for speed in group]
        rows.append(("all", device, *_speeds(every), "", ""))
    return markdown(heads, rows)


def _speeds(found: list[float]) -> list[str]:
    means = (statistics.median(found), statistics.geometric_mean(found), min(found))
    slower = sum(s < 1 / NOTABLE for s in found)
    return [str(len(found)), *(f"{mean:.2f}x" for mean in means), str(slower)]


#: Kinds of layers, and words of one of each.
_KINDS = {
    "depthwise": "c=64 k=64 groups=64 r=3 s=3 padding=1",
    "depthwise 13x13": "c=64 k=64 groups=64 r=13 s=13 padding=6",
    "groups of 2 to 64": "c=64 k=64 groups=8 r=3 s=3 padding=1",
    "wider groups": "c=256 k=256 groups=2 r=3 s=3 padding=1",
    "dense": "c=128 k=128 r=3 s=3 padding=1",
}


def served() -> str:
    """Tabulate the families that have configs for a layer, by its kind and dtype."""
    families = [f for f in all_families().values() if f.operation.problem is Problem]
    device, rows = get_device(DEVICES[0]), []
    for kind, words in _KINDS.items():
        cells = [kind]
        for dtype in ("float16", "float32"):
            names: dict[str, None] = {}
            for direction in DIRECTIONS:
                p = Problem.parse(f"n=8 h=28 w=28 direction={direction} dtype={dtype} {words}")
                found = [f.name for f in families if f.legal(p, device).any()]
                names |= dict.fromkeys(name.removesuffix(f"_{direction}") for name in found)
            cells.append(", ".join(sorted(names)))
        rows.append(cells)
    return markdown(columns("2-d layer | float16, bfloat16 | float32"), rows)


def service(result: dict[str, Any]) -> str:
    """Tabulate the round trips of the HTTP service; the file also has those with tokens and logs,
    beside a no-op of their own."""
    heads, latency = columns("request | p50, ms | p99, ms | requests a second"), result["latency"]
    cells = "{p50_ms:.2f}|{p99_ms:.2f}|{requests_per_s:,}"
    shown = {n: t for n, t in latency.items() if "JSON log" not in n and "next two" not in n}
    return markdown(heads, [(name, *cells.format(**t).split("|")) for name, t in shown.items()])


def latency(results: Results) -> str:
    """Tabulate how long an answer takes on one core, beside its budget."""
    rows = {device: _latency(result) for device, result in results.items()}
    budgets = next(iter(results.values()))["budgets"]
    names = dict.fromkeys(name for cells in rows.values() for name in cells)
    by_first_word = {"1": "unseen_p50_ms", "50": "network_ms", "repeated": "repeated_p50_us",
                     "cold": "cold_p50_s"}  # fmt: skip
    rows["budget"] = {name: [f"{budgets[by_first_word[name.split()[0]]]:g}"] for name in names}
    return side_by_side("median of", ("",), rows)


def _latency(result: dict[str, Any]) -> Rows:
    found: dict[str, list[str]] = {}
    for count, part, time in (("1", "unseen", "p50_ms"), ("50", "network", "least_ms")):
        for kind, times in result.get(part, {}).items():
            layer, _, direction = kind.partition(", ")
            name = f"{count} unseen, {layer}{': each direction' if direction else ''}, ms"
            found.setdefault(name, []).append(f"{times[time]:.3g}")
    found["repeated layer, us"] = [f"{result['repeated']['p50_us']:.3g}"]
    found["cold process, s"] = [f"{result['cold']['p50_s']:.3g}"]
    return {name: [", ".join(times)] for name, times in found.items()}


def fleet(result: dict[str, Any]) -> str:
    """Tabulate what Ray costs, and what killed actors do."""
    budgets, kills = result["budgets"], result["kills"]
    rows = [
        (name, f"{found[key]:.2f}{unit}", f"{sign} {budgets[key]:g}{unit}")
        for name, found, key, unit, sign in (
            ("Ray over the local engine", result["engines"], "ray_over_local", "x", ">="),
            ("eight GPUs over one", result["gpus"], "eight_over_one", "x", ">="),
            ("run with killed actors over its work", kills, "over_lost_work", "x", "<="),
            ("merge of 300,000 rows of 1,000 shards", result["merge"], "merge_s", " s", "<="),
        )
    ]
    for words in ("missing rows", "rows stored twice"):
        count = kills[words.replace(" ", "_")]
        rows.append((f"{words} after {kills['kills']} kills", str(count), "0"))
    real, least = result["real"], budgets["ray_over_local"]
    name = f"Ray over the local engine, one real {real['device']}"
    rows.append((name, f"{real['ray_over_local']:.2f}x", f">= {least:g}x"))
    return markdown(columns("figure | measured | goal"), rows)


def sampling_plans(result: dict[str, Any]) -> str:
    """Tabulate the regret of models that learned from parts of the data."""
    heads = columns("configs a problem and family | rows | geomean | p95 | worst | difference, %")
    rows = []
    for name, plan in result["plans"].items():
        regrets = (f"{plan[key]:.3f}" for key in ("geomean", "p95", "worst"))
        off = f"{plan['difference_percent']:+.2f} ± {plan['standard_error_percent']:.2f}"
        rows.append((name, f"{plan['rows']:,}", *regrets, off))
    return markdown(heads, rows)


def transfer_holdout(result: dict[str, Any]) -> str:
    """Tabulate what models are worth on a device by the share of its problems that they learned
    from, beside those of another device."""
    heads = columns("from | to | its problems | geomean | p95 | worst")
    rows = []
    for row in result["rows"]:
        named = " and ".join(row["from"]).upper(), row["to"].upper()
        share, kernels = (*named, f"{row['share']:.0%}"), row["ours"]
        regrets = (kernels[name] for name in ("geomean", "p95", "worst"))
        figures = (*regrets, row["whole"]["geomean"], row["weighted"])
        rows.append((*share, *(f"{value:.3f}" for value in figures)))
    return markdown((*heads, "with PyTorch's operator", "by time"), rows)


def partitions(result: dict[str, Any]) -> str:
    """Tabulate what a model of the whole GPU is worth on parts of its multiprocessors."""
    heads = columns(
        "multiprocessors | PyTorch | transferred, p95, worst | 8 measured, p95 | "
        "time over expected | bound held"
    )
    rows = []
    for part in result["parts"].values():
        pytorch, first, tuned = (part[name] for name in ("pytorch", "first", "tuned"))
        rows.append((
            str(part["sm_count"]), f"{pytorch['geomean']:.3f}",
            "{geomean:.3f}, {p95:.3f}, {worst:.3f}".format(**first),
            "{geomean:.3f}, {p95:.3f}".format(**tuned),
            f"{part['time']['median_ratio']:.2f}", f"{part['bound']['held']:.0%}",
        ))  # fmt: skip
    return markdown(heads, rows)


def group_norms(result: dict[str, Any]) -> str:
    """Tabulate the fastest kernels of norms of groups against PyTorch's and Inductor's, by kind."""
    heads = columns("norms | over eager | over Inductor: geomean, least | share of floor, > 64 MiB")
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in result["layers"]:
        norm = Norm.parse(row["problem"])
        kind = "instance" if norm.groups == norm.c else "group"
        kind = "layer and RMS" if norm.is_of_rows else kind
        kinds.setdefault(f"{kind}, {norm.direction}", []).append(row)
    rows = []
    for kind, found in sorted(kinds.items()):
        eager, inductor = ([row[name] for row in found] for name in ("speedup", "over_inductor"))
        shares = [row["share"] for row in found if row["tensor_bytes"] > 2**26]
        means = [statistics.geometric_mean(values) for values in (eager, inductor)]
        figures = (f"{means[0]:.2f}x", f"{means[1]:.2f}x, {min(inductor):.2f}x")
        share = f"{statistics.geometric_mean(shares):.2f}" if shares else ""
        rows.append((kind, *figures, share))
    return markdown(heads, rows)


#: Results that a device may lack.
OPTIONAL = (
    *("broad.json", "captured_networks.json", "group_norm.json", "layer_kinds.json"),
    *("losses.json", "networks.json", "broad_first.json", "sampling_plans.json"),
)
#: Table -> the result of every device, and the function that makes the table from them by device.
_OF_DEVICES: dict[str, tuple[str, Callable[[Results], str]]] = {
    "kernels": ("conv_vs_cudnn.json", kernels),
    "latency": ("predict_latency.json", latency),
    "chains": ("chain_choices.json", chains),
    "dense": ("evaluation_dense.json", dense),
} | {name: ("evaluation.json", make) for name, make in OF_CHOICES.items()}
#: Table -> its result files, and the function that makes it; for each device a table of its own.
_OF_A_DEVICE: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "sampling-plans": (("sampling_plans.json",), sampling_plans),
    "layer-kinds": (("layer_kinds.json",), layer_kinds),
    "group-norm": (("group_norm.json",), group_norms),
} | {name: (files, partial(make, markdown=markdown)) for name, (files, make) in OF_NETWORKS.items()}


def _by_device(make: Callable[[Results], str], *found: dict[str, Any]) -> str:
    return make({device.upper(): result for device, result in zip(DEVICES, found, strict=True)})


def _of_norms(*found: dict[str, Any]) -> str:
    names = [device.upper() for device in DEVICES]
    choices, kernels = found[: len(names)], found[len(names) :]
    return norms(dict(zip(names, choices, strict=True)), dict(zip(names, kernels, strict=True)))


def _versions() -> tuple[str, ...]:
    """Return the records of ``tests/torch_versions.py``, the oldest PyTorch first."""
    names = [path.relative_to(RESULTS).as_posix() for path in RESULTS.glob("torch/*.json")]
    return tuple(sorted(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]))


def pytorch_versions(*records: dict[str, Any]) -> str:
    """Tabulate how many tests pass with which PyTorch."""
    fields = columns("torch | device | passed | failed | skipped | date | commit")
    return markdown(fields, [[str(record[field]) for field in fields] for record in records])


def triton(found: dict[str, Any]) -> str:
    """Tabulate regrets over the best config, of the model and of what people have without one."""
    others = columns("nearest measured shape | ten configs, all tried | fixed config")
    rows = []
    for name, kernel in found["kernels"].items():
        model = kernel["methods"]["model"]
        own = (model[figure] for figure in ("geomean", "p95", "first three"))
        rest = (kernel["methods"][method]["geomean"] for method in others)
        whose = (name, kernel["device"].upper(), str(kernel["problems"]))
        rows.append((*whose, *(f"{x:.3f}" for x in (*own, *rest))))
    names = "kernel | GPU | shapes | model | p95 | first three | nearest | ten tried | one fixed"
    return markdown(columns(names), rows)


TABLES: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = (
    {
        "triton": (("triton.json",), triton),
        "service": (("service_latency.json",), service),
        "served": ((), served),
        "fleet": (("fleet.json",), fleet),
        "partitions": (("partitions.json",), partitions),
        "transfer-holdout": (("transfer_holdout.json",), transfer_holdout),
        "torch": (_versions(), pytorch_versions),
        "batch-norm": (
            tuple(f"{d}/{kind}_norm.json" for kind in ("evaluation", "batch") for d in DEVICES),
            _of_norms,
        ),
    }
    | {
        name: (tuple(f"{device}/{file}" for device in DEVICES), partial(_by_device, make))
        for name, (file, make) in _OF_DEVICES.items()
    }
    | {
        f"{device}-{name}": (tuple(f"{device}/{file}" for file in files), make)
        for device in DEVICES
        for name, (files, make) in _OF_A_DEVICE.items()
    }
)


def filled(text: str, results: Path = RESULTS) -> str:
    """Return `text` with every marked table made anew.

    Raises:
        KeyError: a marker's name is not in `TABLES`, or a result lacks a figure.
        OSError: a marked table's result file cannot be read.
    """

    def table(match: re.Match[str]) -> str:
        files, make = TABLES[match[2]]
        contents = [_content(results / file) for file in files]
        is_missing = bool(files) and all(content is None for content in contents)
        made = "" if is_missing else make(*contents)
        return match[1] + made + match[3]

    return _MARKED.sub(table, text)


def _content(path: Path) -> Any:
    """Return the result in a file; None for one of `OPTIONAL` that does not exist."""
    if path.name in OPTIONAL and not path.exists():
        return None
    return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill the pages' tables from the results.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    check = parser.parse_args().check
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    stale = [page for page, text in texts.items() if filled(text) != text]
    if check and stale:
        sys.exit(f"stale: {', '.join(stale)}; run python -m benchmarks.tables")
    for page in stale:
        (ROOT / page).write_text(filled(texts[page]), encoding="utf-8")


if __name__ == "__main__":
    main()
