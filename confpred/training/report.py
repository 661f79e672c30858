"""An evaluation as tables for people and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from confpred.files import write_whole
from confpred.training.evaluate import CHOSEN, MODEL, SLOWER, Evaluation, Summary
from confpred.training.holdout import Verdict
from confpred.training.methods import TOPS
from confpred.training.sittings import Noise

_LARGEST_SHOWN = 4.0  # regret at the right edge of the plot


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Print the tables of `evaluation`."""
    data, judged = evaluation.dataset, evaluation.judged
    statuses = ", ".join(f"{count} {status}" for status, count in data.statuses.items())
    console.print(
        f"{data.device.key}: {data.rows} configs timed over {len(data.timings)} problems "
        f"(rows: {statuses}); {len(judged.timings)} problems judged in {len(evaluation.folds)} "
        f"folds, each by models that saw none of its layers",
        f"timing noise (interquartile range / median): {evaluation.noise[0]:.2%} median, "
        f"{evaluation.noise[1]:.2%} at the 95 % quantile",
        sep="\n",
    )
    if data.skipped:
        console.print(
            f"{data.skipped} timed rows are of configs that this version does not allow for them"
        )
    families = sorted({t.family for t in judged.timings})
    for family in families:
        summaries = {m: judged.summary(m, family) for m in judged.scores}
        console.print(_table(f"{family}: time of the choice / time of the best config", summaries))
    for method, reason in judged.missing.items():
        console.print(f"{method}: not installed ({reason})")
    if whole := evaluation.whole:
        console.print(
            _whole_table(whole.regret, whole.time),
            f"over PyTorch's own operator: {whole.speed:.3f}x, worst {whole.worst_speed:.2f}x; "
            f"slower by more than {SLOWER:.0%}: {whole.slower} of {whole.regret[CHOSEN].problems} "
            f"problems; left to it: {whole.pytorch}, of which ours is faster by more than "
            f"{SLOWER:.0%} on {whole.given_away}",
            sep="\n",
        )
    bounds = evaluation.bounds
    shares = ", ".join(f"{name} {share:.1%}" for name, share in bounds.coverage.items())
    console.print(f"answers within their bound on regret (median {bounds.median:.3f}): {shares}")


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Print what a hold-out says of a model."""
    v = verdict
    console.print(
        f"hold-out: {v.problems} problems of {v.networks} networks, {v.configs} configs timed, "
        f"{v.complete:.1%} of the legal ones; {v.sittings} problems took more than one run",
        f"model {v.model}, which has seen none of the layers, by {v.checked}",
        sep="\n",
        soft_wrap=True,
    )
    table = Table(title="time of the answer / time of the fastest", title_justify="left")
    table.add_column("answer")
    heads = ("problems", "geomean", "p95", "worst", "efficiency", "p10", "min", "> 10 % off")
    for column in heads:
        table.add_column(column, justify="right")
    of_families = {f"{name}, among its own": s for name, s in v.families.items()}
    of_origins = {f"ours, {name}": s for name, s in v.origins.items()}
    for name, s in {"ours": v.ours, **of_origins, "whole": v.whole, **of_families}.items():
        regrets = (f"{value:.3f}" for value in (s.geomean, s.p95, s.worst))
        efficiency = (s.efficiency_mean, s.efficiency_p10, s.efficiency_min)
        cells = (*regrets, *(f"{value:.3f}" for value in efficiency), f"{s.far:.1%}")
        table.add_row(name, str(s.problems), *cells)
    console.print(table)
    lines = [
        f"best of the first 3 / 8: ours {v.first['3']:.3f} / {v.first['8']:.3f}, whole "
        f"{v.whole_first['3']:.3f} / {v.whole_first['8']:.3f}; weighted by time {v.weighted:.3f}",
        f"left to PyTorch's operator: {v.pytorch}; ours is more than 5 % faster on "
        f"{v.wrongly_pytorch} of them",
    ]
    lines += [
        f"over PyTorch's operator ({mode}): {speed:.3f}x; slower by more than 5 %: {v.slower[mode]}"
        for mode, speed in v.speed.items()
    ]
    lines += [
        f"bound on regret, {name}: holds for {b.covered:.1%} of {b.problems}, median {b.median:.3f}"
        for name, b in v.bounds.items()
    ]
    lines += [
        f"with {k} random configs a family as the oracle, ours would be called {geomean:.3f}, p95 "
        f"{p95:.3f}"
        for k, (geomean, p95) in v.thinned.items()
    ]
    if v.unmeasured:
        lines.append(f"first choices that could not be timed: {v.unmeasured}")
    console.print(*lines, sep="\n", soft_wrap=True)


def print_sittings(noise: Noise, console: Console) -> None:
    """Print how times differ from run to run."""
    console.print(
        f"noise across {noise.runs} runs: {noise.repeated} configs were timed in more than one; "
        f"standard deviation {noise.deviation:.2%} of their time, {noise.largest:.2%} at most",
        soft_wrap=True,
    )


def _table(title: str, summaries: Mapping[str, Summary]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    columns = ("geomean", "p90", "p95", "worst", *(f"top-{k}" for k in TOPS[1:]), "configs")
    for column in columns:
        table.add_column(column, justify="right")
    for method, s in summaries.items():
        figures = (s.geomean, s.p90, s.p95, s.worst, *(s.top[str(k)] for k in TOPS[1:]))
        cells = (method, *(f"{value:.3f}" for value in figures), f"{s.candidates:.0f}")
        table.add_row(*cells, style="bold" if method == MODEL else None)
    return table


def _whole_table(summaries: Mapping[str, Summary], time: Mapping[str, float]) -> Table:
    title = "among all families and PyTorch's operator: time / time of the fastest"
    table = Table(title=title, title_justify="left")
    table.add_column("choice")
    for column in ("problems", "geomean", "p95", "worst", "all time together"):
        table.add_column(column, justify="right")
    for name, s in summaries.items():
        figures = (s.geomean, s.p95, s.worst, time[name])
        table.add_row(name, str(s.problems), *(f"{value:.3f}" for value in figures))
    return table


def plot_regret(evaluation: Evaluation, path: Path, *, replace: bool = True) -> None:
    """Write a PNG: for each method, the share of problems whose regret is at most x; `replace` as
    `write_whole` has it.

    Raises:
        StorageError: the file system refused the write.
    """
    from matplotlib.figure import Figure  # without pyplot, which looks for a display

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for method in evaluation.judged.scores:
        regret = np.sort(evaluation.judged.regret(method))
        share = np.arange(1, len(regret) + 1) / len(regret)
        axes.step(
            [1.0, *regret, _LARGEST_SHOWN],
            [0.0, *share, 1.0],
            where="post",
            label=method,
            linewidth=2.5 if method == MODEL else 1.2,
        )
    axes.set_xscale("log")
    axes.set_xlim(1.0, _LARGEST_SHOWN)
    axes.set_ylim(0.0, 1.0)
    ticks = [1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 4.0]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("regret: time of the choice / time of the best config")
    axes.set_ylabel("share of problems of held-out networks")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=150), replace=replace)
