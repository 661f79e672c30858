"""One HTML page of what is known of models and measurements, with all that it needs inside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import confpred
from confpred.files import write_whole
from confpred.model.folder import Model
from confpred.report import charts, tables
from confpred.report.heldout import holdout_facts, holdout_tables
from confpred.report.importances import importances
from confpred.report.inputs import Inputs
from confpred.report.judged import COVERAGE, Evaluated, by_family
from confpred.report.noise import noise_by_family, noise_by_time
from confpred.report.worst import WorstLayer, worst_layers

WORST = 20  # layers of each evaluation that are told of one by one
_FOLDER = Path(__file__).parent


def write_page(inputs: Inputs, path: Path, *, replace: bool = True) -> None:
    """Write a page that needs no network, no other file and no program but a browser. The same
    inputs give the same bytes; `replace` is as `write_whole` has it.

    Raises:
        StorageError: the file system refused the write.
    """
    text = page(inputs)
    write_whole(path, lambda file: file.write(text.encode()), replace=replace)


def page(inputs: Inputs) -> str:
    """The text of the page."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    evaluations = inputs.evaluations
    families = {e.name: by_family(e.layers) for e in evaluations}
    noise = {key: noise_by_time(d.timings) for key, d in inputs.datasets.items()}
    return environment.get_template("page.html").render(
        title=_title(inputs),
        version=confpred.__version__,
        style=Markup((_FOLDER / "page.css").read_text()),
        script=Markup((_FOLDER / "page.js").read_text()),
        inputs=inputs,
        held_out=holdout_tables(evaluations),
        held_out_facts=[(e.name, holdout_facts(e)) for e in evaluations],
        summary=tables.summary_table(evaluations) if evaluations else None,
        whole=tables.whole_table(evaluations),
        speeds=[(e.name, e.figures["whole"]) for e in evaluations if e.figures.get("whole")],
        curves=_svg(charts.regret_curves(evaluations)) if evaluations else None,
        family_chart=_svg(charts.regret_by_family(families)) if evaluations else None,
        methods=tables.method_table(evaluations),
        regrets=tables.regret_tables(evaluations),
        coverage=tables.coverage_table(evaluations),
        coverage_chart=_svg(charts.coverage(families)) if evaluations else None,
        wanted=COVERAGE,
        constant=[e.name for e in evaluations if not e.own_bounds],
        worst=_worst(inputs),
        importances=[
            (model, [(n, _svg(charts.importance(f"{model.version}-{n}", f))) for n, f in pools])
            for model, pools in ((m, importances(m).items()) for m in inputs.models)
        ],
        noise=tables.noise_table(
            {key: noise_by_family(d.timings) for key, d in inputs.datasets.items()}
        ),
        noise_chart=_svg(charts.noise(noise)) if noise else None,
        evaluation_facts=[(e, _evaluation_facts(e)) for e in evaluations],
        model_facts=[(m, _model_facts(m)) for m in inputs.models],
    )


def _svg(text: str) -> Markup:
    return Markup(text)


def _title(inputs: Inputs) -> str:
    devices = [e.device.key for e in inputs.evaluations] + [m.device.key for m in inputs.models]
    return "confpred on " + " and ".join(dict.fromkeys([*devices, *inputs.datasets]))


def _worst(inputs: Inputs) -> list[tuple[Evaluated, list[WorstLayer]]]:
    return [
        (e, worst_layers(e, inputs.datasets.get(e.device.key), WORST)) for e in inputs.evaluations
    ]


def _evaluation_facts(evaluation: Evaluated) -> Mapping[str, str]:
    figures = evaluation.figures
    noise = figures.get("noise", {})
    return {
        "measurements": f"{figures.get('data', '')}, {figures.get('rows', 0):,} configs timed",
        "rows by status": _pairs(figures.get("statuses", {})),
        "seed": str(figures.get("seed", "")),
        "folds": "; ".join(
            f"{len(fold['networks'])} networks held out, {fold['train']:,} to train on, "
            f"{fold['test']:,} judged"
            for fold in figures.get("folds", [])
        ),
        "noise": "" if not noise else f"{noise['median']:.2%} median, {noise['p95']:.2%} at p95",
        "methods that could not run": _pairs(figures.get("missing", {})) or "none",
    }


def _model_facts(model: Model) -> Mapping[str, str]:
    card, regret = model.card, model.card.metrics["regret"]
    return {
        "device": model.device.key,
        "card, SHA-256": model.digest,
        "made": f"{card.created} with {_pairs(card.libraries)}; seed {card.seed}",
        "measurements": _pairs({k: v for k, v in card.content["data"].items() if k != "statuses"}),
        "regret on held-out networks": (
            f"geomean {regret['geomean']:.3f}, p95 {regret['p95']:.3f}, worst "
            f"{regret['worst']:.3f} of {regret['problems']} ({card.metrics['folds']} folds)"
        ),
        "families": "; ".join(
            f"{name}: kernel {entry.source} ({' and '.join(entry.source_digests)})"
            for name, entry in card.families.items()
        ),
        "hyperparameters": _pairs(card.hyperparameters),
        "changed since": "; ".join(model.stale) or "nothing",
    }


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_plain(value)}" for name, value in values.items())


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return f"{value:,}" if type(value) is int else str(value)
