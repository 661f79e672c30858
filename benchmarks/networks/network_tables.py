"""Tables of whole networks, from the rows that ``benchmarks/networks/networks.py`` records.

A function takes what was recorded, None where it was not, and `markdown`, which lays out a table.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

Markdown = Callable[[Sequence[str], Sequence[Sequence[str]]], str]
Row = dict[str, Any]
MODES = ("inference", "training")
#: Ways whose wall time is shown beside eager PyTorch's, and their names in a table.
WAYS = {
    "optimize": "`optimize`",
    "freeze": "with `freeze`",
    "compile": "`torch.compile`",
    "reduce-overhead": "its mode `reduce-overhead`",
    "compile+confpred": "`inductor_options`",
}


def summary(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate `optimize` over all networks, by mode and batch, beside the noise."""
    heads = (
        "step, batch", "networks", "wall time over eager: geomean", "least",
        "GPU time over eager: geomean", "least", "over Inductor: geomean", "least",
        "eager over itself",
    )  # fmt: skip
    rows = []
    for name, group in _groups(result["rows"]):
        cells = [_count(group, "optimize")]
        for field in ("over_eager", "graph_over_eager", "graph_over_compile"):
            cells += _mean_and_least(_values(group, "optimize", field))
        noise = _values(group, "again", "over_eager")
        cells.append(f"{min(noise):.2f}x to {max(noise):.2f}x" if noise else "")
        rows.append((name, *cells))
    return _filled(heads, rows, markdown)


def ways(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate the geometric mean of each way's wall time over eager, by mode and batch."""
    return _by_way(result, markdown, "over_eager", list(WAYS))


def over_inductor(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate the same of GPU time over Inductor's."""
    names = ["optimize", "freeze", "compile+confpred"]
    return _by_way(result, markdown, "graph_over_compile", names)


def _filled(
    heads: Sequence[str], rows: Sequence[Sequence[str]], markdown: Markdown, labels: int = 1
) -> str:
    """Lay out a table without columns, and without rows, that no figure was recorded of; the first
    `labels` columns say what a row is of."""
    whole = [row for row in rows if any(row[labels:])]
    kept = [i for i in range(len(heads)) if any(row[i] for row in whole)]
    cut = [[row[i] for i in kept] for row in whole]
    return markdown([heads[i] for i in kept], cut) if whole else ""


def _by_way(result: dict[str, Any], markdown: Markdown, field: str, names: list[str]) -> str:
    heads = ["step, batch"]
    for name in names:
        heads += [f"{WAYS[name]}: geomean", "least"]
    rows = []
    for name, group in _groups(result["rows"]):
        cells = [cell for way in names for cell in _mean_and_least(_values(group, way, field))]
        rows.append((name, *cells))
    return _filled(heads, rows, markdown)


def per_network(result: dict[str, Any], markdown: Markdown, mode: str) -> str:
    """Tabulate each network and batch of `mode`: times of eager, and ratios of the other ways."""
    names = [way for way in WAYS if way != "freeze" or mode == "inference"]
    heads = ["network", "batch", "eager, ms", "in a graph, ms", "eager over itself"]
    heads += [f"{WAYS[way]}, wall" for way in names]
    heads += ["`optimize`, GPU", "over Inductor", "`inductor_options`, over Inductor"]
    rows = []
    for (network, batch), found in _by_step(result["rows"], mode):
        eager = found.get("eager", {})
        cells = [
            network,
            str(batch),
            _shown(eager, "ms", "{:.2f}"),
            _shown(eager, "graph_ms", "{:.2f}"),
        ]
        cells += [_shown(found.get(way, {}), "over_eager") for way in ("again", *names)]
        cells.append(_shown(found.get("optimize", {}), "graph_over_eager"))
        for way in ("optimize", "compile+confpred"):
            cells.append(_shown(found.get(way, {}), "graph_over_compile"))
        rows.append(cells)
    return _filled(heads, rows, markdown)


def inference(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate the steps of inference."""
    return per_network(result, markdown, "inference")


def training(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate the steps of training."""
    return per_network(result, markdown, "training")


def first_steps(
    warm: dict[str, Any] | None, cold: dict[str, Any] | None, markdown: Markdown
) -> str:
    """Tabulate the seconds of the first step at each network's largest batch."""
    names = ("eager", "optimize", "compile", "compile+confpred")
    shown = {"eager": "eager"} | WAYS
    heads = ["network", "step", "batch"]
    heads += [f"{shown[way]}, {kind}" for way in names for kind in ("cold", "warm")]
    both = [_of_largest_batch(each["rows"] if each else []) for each in (cold, warm)]
    rows = []
    for key in sorted(both[0].keys() | both[1].keys()):
        found = [part.get(key, {}) for part in both]
        cells = [_shown(ways.get(way, {}), "first_s", "{:.1f}") for way in names for ways in found]
        rows.append((key[0], key[1], str(key[2]), *cells))
    return _filled(heads, rows, markdown, 3)


def memory(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate what a step allocates at most, at each network's largest batch."""
    shown = {"eager": "eager"} | WAYS
    heads = ["network", "step", "batch", *(f"{name}, MiB" for name in shown.values())]
    rows = []
    for (network, mode, batch), found in sorted(_of_largest_batch(result["rows"]).items()):
        cells = [_shown(found.get(way, {}), "peak_mb", "{:.0f}") for way in shown]
        rows.append((network, mode, str(batch), *cells))
    return _filled(heads, rows, markdown, 3)


def captured(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate `captured_networks`: how many networks compute what they did."""
    heads = ("step", "networks", "compared", "right", "how captured", "wrong or failed")
    rows = []
    for mode, counts in result["counts"].items():
        wrong = [
            r["network"] for r in result["networks"] if r["mode"] == mode and not r["is_right"]
        ]
        kinds = ", ".join(f"{kind}: {count}" for kind, count in counts["captured"].items())
        numbers = (str(counts[key]) for key in ("networks", "compared", "right"))
        rows.append((mode, *numbers, kinds, ", ".join(wrong) or "none"))
    return _filled(heads, rows, markdown)


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each mode and batch, with their name."""
    for mode in MODES:
        for batch in sorted({row["batch"] for row in rows if row["mode"] == mode}):
            group = [row for row in rows if (row["mode"], row["batch"]) == (mode, batch)]
            yield f"{mode}, {batch}", group


def _by_step(rows: Sequence[Row], mode: str) -> list[tuple[tuple[str, int], dict[str, Row]]]:
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        if row["mode"] == mode:
            found.setdefault((row["network"], row["batch"]), {})[row["way"]] = row
    return sorted(found.items())


def _of_largest_batch(rows: Sequence[Row]) -> dict[tuple[str, str, int], dict[str, Row]]:
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    for mode in MODES:
        for (network, batch), row in _by_step(rows, mode):  # batches ascend
            for other in [key for key in found if key[:2] == (network, mode)]:
                del found[other]
            found[network, mode, batch] = row
    return found


def _values(rows: Iterable[Row], way: str, field: str) -> list[float]:
    found = (row.get(field) for row in rows if row["way"] == way)
    return [value for value in found if value is not None]


def _count(rows: Sequence[Row], way: str) -> str:
    """Return the number of networks, and of how many where some failed."""
    errors = ["error" in row for row in rows if row["way"] == way]
    good = errors.count(False)
    return str(good) if good == len(errors) else f"{good} of {len(errors)}"


def _mean_and_least(values: Sequence[float]) -> list[str]:
    if not values:
        return ["", ""]
    return [f"{statistics.geometric_mean(values):.2f}x", f"{min(values):.2f}x"]


def _shown(row: Row, field: str, form: str = "{:.2f}x") -> str:
    if "error" in row:
        return "error"
    return "" if row.get(field) is None else form.format(row[field])


def fused_operators(result: dict[str, Any], markdown: Markdown) -> str:
    """Tabulate the gain of PyTorch's fused operators over a convolution and another pass."""
    kinds: dict[tuple[str, int], list[float]] = {}
    for row in result["rows"]:
        p, us = row["problem"], row["us"]
        way = "pixel" if p["h"] == p["w"] == 1 else "cudnn" if "cudnn" in us else "gemm"
        even = p["c"] % 8 == p["k"] % 8 == 0 and p["activation"] == "none" and not p["residual"]
        if way not in us or (way == "gemm" and not even):
            continue
        name = {
            "pixel": "one pixel an image, a product",
            "cudnn": "bias, residual, ReLU: cuDNN" if p["residual"] else "bias, ReLU: cuDNN",
            "gemm": "1 x 1 and bias: cuBLAS",
        }[way]
        kinds.setdefault((name, p["n"]), []).append(us["epilogue"] / us[way])
    heads = ("layers", "batch", "count", "gain: geomean", "least", "slower by more than 5 %")
    rows = [
        (
            name, str(batch), str(len(gains)), f"{statistics.geometric_mean(gains):.2f}x",
            f"{min(gains):.2f}x", str(sum(gain < 1 / 1.05 for gain in gains)),
        )
        for (name, batch), gains in sorted(kinds.items())
    ]  # fmt: skip
    return markdown(heads, rows)


#: Table -> its result files, and the function that makes it.
OF_NETWORKS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "networks": (("networks.json",), summary),
    "networks-ways": (("networks.json",), ways),
    "networks-over-inductor": (("networks.json",), over_inductor),
    "networks-inference": (("networks.json",), inference),
    "networks-training": (("networks.json",), training),
    "networks-first-steps": (("networks.json", "networks_cold.json"), first_steps),
    "networks-memory": (("networks.json",), memory),
    "captured-networks": (("captured_networks.json",), captured),
    "fused-operators": (("pytorch_epilogues.json",), fused_operators),
}
