"""The tables of a hold-out: what `confpred evaluate --holdout` writes under ``holdout``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Markdown = Callable[[Sequence[str], Sequence[Sequence[str]]], str]


def holdout(result: dict[str, Any], markdown: Markdown) -> str:
    """Regret and efficiency of our choice, of the whole answer, and by family."""
    found = result.get("holdout")
    if found is None:
        return ""
    heads = (
        "answer",
        "problems",
        "geomean",
        "p95",
        "worst",
        "efficiency",
        "p10",
        "min",
        "> 10 % off",
    )
    parts = {"ours, among all families": found["ours"]}
    parts |= {f"ours, {name}": part for name, part in found["origins"].items()}
    parts["whole, with PyTorch's"] = found["whole"]
    parts |= {f"{name}, among its own": part for name, part in found["families"].items()}
    rows = []
    for name, part in parts.items():
        regrets = (f"{part[key]:.3f}" for key in ("geomean", "p95", "worst"))
        shares = (f"{part[f'efficiency_{key}']:.3f}" for key in ("mean", "p10", "min"))
        rows.append((name, str(part["problems"]), *regrets, *shares, f"{part['far']:.1%}"))
    return markdown(heads, rows)


def answers(result: dict[str, Any], markdown: Markdown) -> str:
    """What else a hold-out says of the answers, and how it was measured."""
    found = result.get("holdout")
    if found is None:
        return ""
    first, whole = found["first"], found["whole_first"]
    rows = [
        ("model", found["model"]),
        ("problems, of networks", f"{found['problems']}, {found['networks']}"),
        ("configs timed, of the legal ones", f"{found['configs']:,}, {found['complete']:.1%}"),
        ("problems that took more than one run", str(found["sittings"])),
        ("best of the first 3 / 8, ours", f"{first['3']:.3f} / {first['8']:.3f}"),
        ("best of the first 3 / 8, whole", f"{whole['3']:.3f} / {whole['8']:.3f}"),
        ("whole, weighted by time", f"{found['weighted']:.3f}"),
        (
            "left to PyTorch's operator, ours more than 5 % faster",
            f"{found['pytorch']}, {found['wrongly_pytorch']}",
        ),
    ]
    for mode, speed in found["speed"].items():
        figure = f"{speed:.2f}x, {found['slower'][mode]}"
        rows.append((f"over PyTorch's operator ({mode}), slower by more than 5 %", figure))
    for name, part in found["bounds"].items():
        figure = f"{part['covered']:.1%} of {part['problems']}, {part['median']:.3f}"
        rows.append((f"bound on regret holds, its median: {name}", figure))
    if noise := result.get("sittings"):
        figure = f"{noise['deviation']:.2%} over {noise['runs']} runs"
        rows.append(("noise across runs, standard deviation", figure))
    return markdown(("figure", "value"), rows)


def thinning(result: dict[str, Any], markdown: Markdown) -> str:
    """What regret would be called with an oracle of few configs; cross-validated beside it."""
    found = result.get("holdout")
    if found is None:
        return ""
    rows = [
        (f"{k} random ones a family, the hold-out", f"{geomean:.3f}", f"{p95:.3f}")
        for k, (geomean, p95) in found["thinned"].items()
    ]
    ours, model = found["ours"], result["methods"]["model"]
    rows.append(("every legal one, the hold-out", f"{ours['geomean']:.3f}", f"{ours['p95']:.3f}"))
    cross = (f"{model['geomean']:.3f}", f"{model['p95']:.3f}")
    rows.append(("those of the training data, cross-validated", *cross))
    return markdown(("configs measured", "geomean", "p95"), rows)


#: Table -> the function that makes it from ``evaluation.json``.
OF_HOLDOUTS = {"holdout": holdout, "holdout-answers": answers, "thinning": thinning}
