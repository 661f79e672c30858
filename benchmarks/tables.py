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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kernels import im2col_chunks, linear_chains
from benchmarks.model.holdout_tables import OF_HOLDOUTS
from benchmarks.networks.network_tables import OF_NETWORKS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/results.md", "docs/sampling.md")
DIRECTIONS = {"fprop": "forward", "dgrad": "input gradient", "wgrad": "filter gradient"}
NOTABLE = 1.05  # a layer this many times as fast or as slow counts as faster or slower
_MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    rule = ["---"] + ["---:"] * (len(heads) - 1)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rule, *rows))


def evaluation(result: dict[str, Any]) -> str:
    """Regret of the model and of each baseline (``confpred evaluate --json``)."""
    heads = ("method", "geomean", "p90", "p95", "worst", "best of 3", "best of 8", "candidates")
    rows = []
    for method, m in result["methods"].items():
        regrets = (m["geomean"], m["p90"], m["p95"], m["worst"], m["top"]["3"], m["top"]["8"])
        rows.append((method, *(f"{value:.3f}" for value in regrets), f"{m['candidates']:.0f}"))
    return markdown(heads, rows)


def families(result: dict[str, Any]) -> str:
    """Regret of the model, family by family."""
    heads = (
        "kernel family",
        "problems",
        "geomean",
        "p95",
        "worst",
    )
    rows = []
    for family, methods in result["families"].items():
        # Until decision 166 a model was judged with and without a portfolio.
        model = methods.get("no portfolio", methods["model"])
        figures = [model[key] for key in ("geomean", "p95", "worst")]
        cells = [f"{value:.3f}" for value in figures]
        rows.append((family, str(model["problems"]), *cells))
    return markdown(heads, rows)


def whole(result: dict[str, Any]) -> str:
    """The whole choice, PyTorch's own operator included (``confpred evaluate --json``)."""
    part = result["whole"]
    heads = (
        "problems",
        "over PyTorch's operator",
        "worst",
        "slower by more than 5 %",
        "left to PyTorch's operator",
        "regret",
        "worst regret",
    )
    regret = part["regret"]["the predicted fastest"]
    speeds = (f"{part['speed']:.2f}x", f"{part['worst_speed']:.2f}x")
    row = (str(regret["problems"]), *speeds, str(part["slower"]), str(part["pytorch"]))
    return markdown(heads, [(*row, f"{regret['geomean']:.3f}", f"{regret['worst']:.2f}")])


def cudnn(result: dict[str, Any]) -> str:
    """Our choice against cuDNN's best, by kind of layer and direction."""
    heads = (
        "layers",
        "problems",
        "over cuDNN's better mode",
        "worst",
        "slower by more than 5 %",
        "PyTorch's operator chosen",
        "share of floor",
        "cuDNN's share",
    )
    rows = []
    for part in result["summary"]:
        speeds = (f"{part['speedup']:.2f}x", f"{part['worst']:.2f}x")
        counts = (str(part["slower"]), str(part["pytorch_chosen"]))
        shares = (f"{part['floor_share']:.2f}", f"{part['cudnn_floor_share']:.2f}")
        name = f"{part['kind']}, {part['direction']}"
        rows.append((name, str(part["problems"]), *speeds, *counts, *shares))
    return markdown(heads, rows)


def dense(result: dict[str, Any]) -> str:
    """Our choice for dense layers of kinds of networks that nothing was learned from."""
    heads = (
        "layers",
        "problems",
        "over PyTorch's default",
        "worst",
        "over its benchmark mode",
        "worst",
        "slower by more than 5 %",
        "not left to PyTorch",
    )
    rows = []
    for part in result["summary"]:
        name = f"{part['kind']}, {'with' if part['fused'] else 'without'} an epilogue"
        modes = [part[mode] for mode in ("heuristics", "benchmark")]
        speeds = [f"{mode[key]:.2f}x" for mode in modes for key in ("speedup", "worst")]
        slower = max(mode["slower"] for mode in modes)
        rows.append((name, str(part["problems"]), *speeds, str(slower), str(part["launched"])))
    return markdown(heads, rows)


def evidence(result: dict[str, Any]) -> str:
    """Our choice against cuDNN's better mode, layer by layer, in few and plain words."""
    heads = (
        "layers",
        "problems",
        "median",
        "geomean",
        "worst",
        "faster by more than 5 %",
        "slower by more than 5 %",
    )
    parts: dict[str, list[float]] = {}
    for part in result["summary"]:  # the order of the rows
        parts[f"{part['kind']}, {DIRECTIONS[part['direction']]}"] = []
    for layer in result["layers"]:
        sizes = dict(word.split("=") for word in layer["problem"].split())
        kind = "depthwise" if sizes["groups"] == sizes["c"] else "grouped"
        name = f"{kind}, {DIRECTIONS[sizes.get('direction', 'fprop')]}"
        parts[name].append(layer["speedup"])
    parts["all"] = [speed for speeds in parts.values() for speed in speeds]
    rows = []
    for name, speeds in parts.items():
        means = (statistics.median(speeds), statistics.geometric_mean(speeds), min(speeds))
        faster = sum(speed > NOTABLE for speed in speeds)
        slower = sum(speed < 1 / NOTABLE for speed in speeds)
        figures = [f"{value:.2f}x" for value in means]
        rows.append((name, str(len(speeds)), *figures, str(faster), str(slower)))
    return markdown(heads, rows)


def in_situ(result: dict[str, Any]) -> str:
    """Whether times alone rank configs as times inside a network do."""
    heads = (
        "layer",
        "configs",
        "Spearman's rho",
        "Kendall's tau",
        "in-situ regret of the fastest alone",
        "of the predicted",
    )
    agreements = ("spearman", "kendall")
    regrets = ("regret_of_fastest_alone", "regret_of_predicted")
    rows = []
    for layer in result["layers"]:
        cells = [f"{layer['network']}: `{layer['problem']}`", str(len(layer["configs"]))]
        cells += [f"{layer[key]:.2f}" for key in agreements]
        cells += [f"{layer[key]:.3f}" for key in regrets]
        rows.append(cells)
    means = ["mean (regrets: geomean)", ""]
    means += [f"{result[f'mean_{key}']:.2f}" for key in agreements]
    means += [f"{result[f'geomean_{key}']:.3f}" for key in regrets]
    return markdown(heads, [*rows, means])


def service(result: dict[str, Any]) -> str:
    """Round trips of the HTTP service."""
    heads = ("request", "p50, ms", "p99, ms", "requests a second")
    return markdown(
        heads,
        [
            (name, f"{t['p50_ms']:.2f}", f"{t['p99_ms']:.2f}", f"{t['requests_per_s']:,}")
            for name, t in result["latency"].items()
        ],
    )


def latency(result: dict[str, Any]) -> str:
    """How long an answer takes on one core, beside its budget."""
    budgets = result["budgets"]
    rows = [
        (
            f"unseen problem, {kind} ({times['candidates']:.0f} candidates), ms",
            f"{times['p50_ms']:.3g}",
            f"{budgets['unseen_p50_ms']:g}",
        )
        for kind, times in result["unseen"].items()
    ]
    for kind, times in result.get("network", {}).items():
        figures = f"{times['least_ms']:.3g}", f"{budgets['network_ms']:g}"
        rows.append((f"50 unseen layers in one call, {kind}, ms", *figures))
    for name, part, unit in (
        ("repeated problem", "repeated", "us"),
        ("cold process, from start to exit", "cold", "s"),
    ):
        figure, budget = result[part][f"p50_{unit}"], budgets[f"{part}_p50_{unit}"]
        rows.append((f"{name}, {unit}", f"{figure:.3g}", f"{budget:g}"))
    return markdown(("p50 of", "measured", "budget"), rows)


def runs(*results: dict[str, Any] | None) -> str:
    """On what, when and with which versions each result was measured, if it was; of a result of
    several runs, the last of them."""
    heads = ("result", "date", "commit", "device", "driver", "software", "model", "host")
    rows = []
    for file, result in zip(_RUNS, results, strict=True):
        if result is None:
            continue
        versions = dict(result["versions"])
        if "nvrtc" in result:
            versions["NVRTC"] = result["nvrtc"]
        if "cudnn" in result:
            versions["cuDNN"] = str(result["cudnn"])
        software = [f"Python {result['python']}", *(f"{n} {v}" for n, v in versions.items())]
        where = (result.get("device", "no GPU"), result.get("driver", ""))
        when = (result["date"], result["commit"][:7])
        model = result.get("model", "")
        rows.append((f"`{file}`", *when, *where, ", ".join(software), model, result["processor"]))
    return markdown(heads, rows)


def sampling(result: dict[str, Any]) -> str:
    """The sampler's rate."""
    heads = ("rows", "problems", "seconds", "rows a second")
    row = (str(result["rows"]), str(result["problems"]), f"{result['seconds']:.1f}")
    return markdown(heads, [(*row, f"{result['rows_per_s']:.0f}")])


def sampling_plans(result: dict[str, Any]) -> str:
    """Regret of models that learned from parts of the data (`benchmarks.model.sampling_plans`)."""
    heads = ("configs a problem and family", "rows", "geomean", "p95", "worst", "difference, %")
    rows = []
    for name, plan in result["plans"].items():
        regrets = (f"{plan[key]:.3f}" for key in ("geomean", "p95", "worst"))
        off = f"{plan['difference_percent']:+.2f} ± {plan['standard_error_percent']:.2f}"
        rows.append((name, f"{plan['rows']:,}", *regrets, off))
    return markdown(heads, rows)


def transfer(result: dict[str, Any]) -> str:
    """Regret on a device by the share of its problems that were learned from, with and without
    those of another device (``benchmarks/model/transfer.py``)."""
    told = ("from", "to", "its problems", "learned from", "rows of it")
    heads = (*told, "geomean", "p95", "worst", "best of 3", "best of 8")
    rows = []
    for direction in (result["there"], result["back"]):
        giver, asker = (direction[name].upper() for name in ("giver", "asker"))
        for row in direction["curve"]:
            both = row["learned_from"] == "both devices"
            told = (giver if both else "none", asker, f"{row['share']:.0%}", row["learned_from"])
            regrets = (row[name] for name in ("geomean", "p95", "worst", "top3", "top8"))
            rows.append((*told, f"{row['rows']:,}", *(f"{value:.3f}" for value in regrets)))
    return markdown(heads, rows)


def transfer_holdout(result: dict[str, Any]) -> str:
    """What whole models are worth on a device by the share of its problems that were learned from
    (``benchmarks/model/transfer_holdout.py``)."""
    heads = ("from", "to", "its problems", "rows of it", "ours: geomean", "p95", "worst")
    rows = []
    for row in result["rows"]:
        named = " and ".join(row["from"]).upper(), row["to"].upper()
        share, ours = (*named, f"{row['share']:.0%}", f"{row['rows']:,}"), row["ours"]
        figures = [*(ours[name] for name in ("geomean", "p95", "worst")), row["first"]["3"]]
        whole = (row["whole"]["geomean"], row["weighted"])
        rows.append((*share, *(f"{value:.3f}" for value in (*figures, *whole))))
    return markdown((*heads, "best of 3", "whole: geomean", "by time"), rows)


_RUNS = (
    "conv_vs_cudnn.json",
    "in_situ.json",
    "predict_latency.json",
    "sampling_rate.json",
    "networks.json",
    "dense.json",
)


def chunks(result: dict[str, Any]) -> str:
    """What samples a chunk gain, and the memory that they cost."""
    return im2col_chunks.table(result["summary"]) + "\n"


def chains(result: dict[str, Any]) -> str:
    """Linear chains by each way, over PyTorch's operators."""
    return linear_chains.table(result["summary"]) + "\n"


#: Results that a device may lack.
OPTIONAL = (
    *("networks.json", "networks_cold.json", "sampling_plans.json", "dense.json"),
    *(
        "captured_networks.json",
        "pytorch_epilogues.json",
        "im2col_chunks.json",
        "linear_chains.json",
    ),
)
#: Table -> its result files, and the function that makes the table from them.
_OF_A_DEVICE: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = (
    {
        "evidence": (("conv_vs_cudnn.json",), evidence),
        "evaluation": (("evaluation.json",), evaluation),
        "families": (("evaluation.json",), families),
        "whole": (("evaluation.json",), whole),
        "cudnn": (("conv_vs_cudnn.json",), cudnn),
        "dense": (("dense.json",), dense),
        "in-situ": (("in_situ.json",), in_situ),
        "latency": (("predict_latency.json",), latency),
        "sampling": (("sampling_rate.json",), sampling),
        "sampling-plans": (("sampling_plans.json",), sampling_plans),
        "runs": (_RUNS, runs),
        "im2col-chunks": (("im2col_chunks.json",), chunks),
        "linear-chains": (("linear_chains.json",), chains),
    }
    | {
        name: (files, partial(make, markdown=markdown))
        for name, (files, make) in OF_NETWORKS.items()
    }
    | {
        name: (("evaluation.json",), partial(make, markdown=markdown))
        for name, make in OF_HOLDOUTS.items()
    }
)
TABLES: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "service": (("service_latency.json",), service),
    "transfer": (("transfer.json",), transfer),
    "transfer-holdout": (("transfer_holdout.json",), transfer_holdout),
} | {
    f"{device}-{name}": (tuple(f"{device}/{file}" for file in files), make)
    for device in ("h100", "h200")
    for name, (files, make) in _OF_A_DEVICE.items()
}


def filled(text: str, results: Path = RESULTS) -> str:
    """`text` with every marked table made anew.

    Raises:
        KeyError: a marker's name is not in `TABLES`, or a result lacks a figure.
        OSError: a marked table's result file cannot be read.
    """

    def table(match: re.Match[str]) -> str:
        files, make = TABLES[match[2]]
        contents = [_content(results / file) for file in files]
        made = "" if all(content is None for content in contents) else make(*contents)
        return match[1] + made + match[3]

    return _MARKED.sub(table, text)


def _content(path: Path) -> Any:
    """The result in a file; None for one of `OPTIONAL` that does not exist."""
    if path.name in OPTIONAL and not path.exists():
        return None
    return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill the pages' tables from the results.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    check = parser.parse_args().check
    stale = []
    for page in PAGES:
        old = (ROOT / page).read_text(encoding="utf-8")
        new = filled(old)
        if new != old:
            stale.append(page)
            if not check:
                (ROOT / page).write_text(new, encoding="utf-8")
    if check and stale:
        sys.exit(f"stale: {', '.join(stale)}; run python -m benchmarks.tables")


if __name__ == "__main__":
    main()
