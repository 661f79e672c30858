"""One HTML page about models and measurements, with all that it needs inside it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow as pa
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from confpred._version import __version__
from confpred.data.parquet import operation_of_file, read
from confpred.errors import DataError
from confpred.files import raising, write_whole
from confpred.model.card import CARD
from confpred.model.folder import Model, load_model, model_folders
from confpred.report import COVERAGE, charts, judged, tables
from confpred.report.judged import Evaluated, evaluated, read_evaluation
from confpred.training import Said, unsaid
from confpred.training.dataset import Dataset, data_files, read_dataset
from confpred.training.evaluate import evaluate
from confpred.training.fit import usual

WORST = 20  # layers of each evaluation that are listed
_FOLDER = Path(__file__).parent


def write_page(inputs: Inputs, path: Path, *, replace: bool = True, say: Said = unsaid) -> None:
    """Write a page that needs no network, no other file and no program but a browser. The same
    inputs give the same bytes; for `replace`, see `write_whole`.

    Raises:
        StorageError: the file system refused the write.
    """
    text = page(inputs, say)
    write_whole(path, lambda file: file.write(text.encode()), replace=replace)


def page(inputs: Inputs, say: Said = unsaid) -> str:
    """Return the page; `page.html` calls `judged`, `tables` and `charts` for its parts."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=_title(inputs),
        version=__version__,
        style=Markup(files("confpred").joinpath("page.css").read_text()),
        script=Markup((_FOLDER / "page.js").read_text()),
        inputs=inputs,
        evaluations=inputs.evaluations,
        families={e.name: judged.groups_of(e.layers, "family") for e in inputs.evaluations},
        wanted=COVERAGE,
        listed=WORST,
        judged=judged,
        importances=partial(judged.importances, say=say),
        tables=tables,
        charts=charts,
        evaluation_facts=_evaluation_facts,
        model_facts=_model_facts,
    )


def _title(inputs: Inputs) -> str:
    devices = [e.device.key for e in inputs.evaluations] + [m.device.key for m in inputs.models]
    return "confpred on " + " and ".join(dict.fromkeys([*devices, *inputs.datasets]))


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


#: Columns that all rows of a run share.
_RUN = ("device", "device_name", "driver", "cuda", "project", "run_id")


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file that a page is made from; of a model it is the card, which has the digests of its
    other files."""

    path: str  # path as the user wrote it
    kind: str  # ``model``, ``evaluation`` or ``measurements``
    sha256: str  # SHA-256 of its content


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Inputs of a page."""

    evaluations: tuple[Evaluated, ...]  # evaluations that were read, then those made here
    datasets: Mapping[str, Dataset]  # measurements by device
    models: tuple[Model, ...]  # in the order of their devices
    files: tuple[InputFile, ...]  # files of all these
    #: Facts of each run of the sampler: a dictionary of ``_RUN``, ``rows`` (how many), ``first``
    #: and ``last``.
    runs: tuple[Mapping[str, Any], ...]


def read_inputs(
    paths: Sequence[Path],
    device: str | None,
    judge: Callable[[Dataset], Evaluated],
    say: Said = unsaid,
) -> Inputs:
    """Read the inputs at `paths`.

    Args:
        paths: model folders and folders of them; evaluations (``.json``); Parquet files of
            measurements and folders of them.
        device: use the measurements of this device alone; None for all.
        judge: evaluates the measurements of a device that has no evaluation.
        say: reports progress.

    Raises:
        DataError: a file is damaged or foreign, or an evaluation is of other measurements than
            those at `paths`.
        ModelError: a model is damaged or foreign.
        UnknownDevice: `device` has no description.
    """
    models: list[Model] = []
    evaluations: list[Evaluated] = []
    data: list[Path] = []
    files: list[InputFile] = []
    for done, path in enumerate(paths):
        say("reading", done, len(paths))
        folders = model_folders(path) if path.is_dir() else {}
        if folders:
            for _, folder in sorted(folders.items()):
                models.append(load_model(folder))
                files.append(_file(folder / CARD, "model"))
        elif path.suffix == ".json":
            evaluations.append(read_evaluation(path))
            files.append(_file(path, "evaluation"))
        else:
            data.append(path)
    read_from = data_files(data)
    files += [_file(file, "measurements") for file in read_from]
    runs = _runs(read_from)
    devices = sorted({run["device"] for run in runs}) if device is None else [device]
    datasets = {d.device.key: d for d in (read_dataset(data, key) for key in devices if data)}
    for done, (key, dataset) in enumerate(datasets.items()):
        say("judging", done, len(datasets))
        of_device = [evaluation for evaluation in evaluations if evaluation.device.key == key]
        for evaluation in of_device:
            _check_digest(evaluation, dataset)
        if not of_device:
            evaluations.append(judge(dataset))
    runs = tuple(run for run in runs if run["device"] in datasets)
    return Inputs(tuple(_named(evaluations)), datasets, tuple(models), tuple(files), runs)


def judge_here(folds: int, seed: int) -> Callable[[Dataset], Evaluated]:
    """Return a function that judges as ``confpred evaluate`` does, in minutes."""

    def judge(dataset: Dataset) -> Evaluated:
        figures = evaluate(dataset, usual(dataset.operation), folds, seed).to_json()
        return evaluated(figures, f"the evaluation on {dataset.device.key}")

    return judge


def _check_digest(evaluation: Evaluated, dataset: Dataset) -> None:
    of_digest = evaluation.figures["data"]
    if of_digest != dataset.digest:
        raise DataError(
            f"the evaluation on {evaluation.device.key} is of measurements {of_digest}, and those "
            f"given are {dataset.digest}: give the files that were judged, or judge these"
        )


def _named(evaluations: Sequence[Evaluated]) -> list[Evaluated]:
    """Return the evaluations, with a number where a device has more than one."""
    counts: Counter[str] = Counter()
    named = []
    for evaluation in evaluations:
        key = evaluation.device.key
        counts[key] += 1
        name = key if counts[key] == 1 else f"{key} ({counts[key]})"
        named.append(replace(evaluation, name=name))
    return named


def _file(path: Path, kind: str) -> InputFile:
    with raising(DataError, f"read {path}"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return InputFile(str(path), kind, digest)


def _runs(files: Sequence[Path]) -> tuple[Mapping[str, Any], ...]:
    if not files:
        return ()
    counted = (
        pa.concat_tables(read(file, operation_of_file(file), [*_RUN, "time"]) for file in files)
        .group_by(list(_RUN), use_threads=False)
        .aggregate([("time", "count"), ("time", "min"), ("time", "max")])
        .select([*_RUN, "time_count", "time_min", "time_max"])
    )
    rows = counted.rename_columns([*_RUN, "rows", "first", "last"]).to_pylist()
    return tuple(sorted(rows, key=lambda row: (row["device"], row["first"], row["run_id"])))
