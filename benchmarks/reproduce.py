"""Make the shipped models and the evaluations anew from the committed measurements.

    python -m benchmarks.reproduce models     # also: make models
    python -m benchmarks.reproduce results    # also: make results

A model is trained as its card says, and its files are compared with those of its folder. If they
are the same but for the date, the folder is left as it is; otherwise it is replaced, and the files
that differ are named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.provenance import (
    ANCHORS,
    CHAINS,
    DATASETS,
    DENSE_RANKS,
    GROUPS,
    HOLDOUT,
    NORMS,
    RANKS,
    ROOT,
    measured,
    measured_devices,
)
from confpred.model.card import CARD
from confpred.model.folder import model_folders
from confpred.problem.conv import CONV
from confpred.problem.norm import BATCH_NORM
from confpred.problem.norm_of_groups import NORM

CONFPRED = Path(sys.executable).with_name("confpred")
EXAMPLE = ROOT / "examples" / "softmax"


def confpred(*arguments: str | Path) -> None:
    example = {"CONFPRED_FAMILIES": "softmax", "PYTHONPATH": str(EXAMPLE)}
    subprocess.run([CONFPRED, *arguments], check=True, cwd=ROOT, env=os.environ | example)


def differing(old: Path, new: Path) -> list[str]:
    """Names of the files that are not the same in both model folders; the date in the card does not
    count."""
    names = {path.name for folder in (old, new) for path in folder.glob("*")}
    return sorted(name for name in names if _content(old / name) != _content(new / name))


def _content(path: Path) -> Any:
    if not path.exists():
        return None
    if path.name == CARD:
        return json.loads(path.read_text()) | {"created": None}
    return path.read_bytes()


def models() -> None:
    """Train each model of ``models/``, and the example's, again under its name."""
    data_of = {
        "conv2d": (DATASETS,), "linear_chain": (CHAINS,), "batch_norm": (NORMS,),
        "conv": (RANKS, DENSE_RANKS), "norm": (GROUPS,), "softmax": (EXAMPLE,),
    }  # fmt: skip
    found = (*ROOT.glob(f"models/*/{CARD}"), *ROOT.glob(f"models/*/*/{CARD}"))
    for card in (*sorted(found), *EXAMPLE.glob(f"*/{CARD}")):
        shipped = card.parent
        facts = json.loads(card.read_text())
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / shipped.name
            excluded = [f"--exclude-network={name}" for name in facts["data"]["excluded_networks"]]
            device, others = facts["device"], facts["data"]["other_devices"]
            folders = data_of[facts["operation"]]
            data = [measured(n, where) for n in (device, *sorted(others)) for where in folders]
            options = ("--device", device, "--out", made, f"--seed={facts['seed']}")
            confpred("train", *data, *options, *excluded)
            changed = differing(shipped, made)
            if changed:
                shutil.rmtree(shipped)
                shutil.copytree(made, shipped)
        print(f"{shipped.name}: {'changed ' + ', '.join(changed) if changed else 'as shipped'}")


def results() -> None:
    """Evaluate for each device that was measured, learning from all of them, and by its hold-out
    where that is measured; dense layers, other ranks and norms by their hold-outs; and fill the
    tables and the headers of the kernels."""
    newest = model_folders(ROOT / "models")
    devices = measured_devices()
    data = [measured(device) for device in devices]
    for device in devices:
        out = ROOT / "benchmarks" / "results" / device
        files = ("--json", out / "evaluation.json", "--plot", out / "evaluation.png")
        more: list[str | Path] = []
        if (held := measured(device, HOLDOUT)).exists():
            more += ["--holdout", held, "--model", newest[device]]
        if (anchors := measured(device, ANCHORS)).exists():
            more += ["--anchors", anchors]
        confpred("evaluate", *data, "--device", device, *more, *files, "--force")
    ranks = (RANKS, DENSE_RANKS), model_folders(ROOT / "models" / CONV.name)
    for name, folders, models in (
        ("dense", (DATASETS,), newest),
        ("norm", (NORMS,), model_folders(ROOT / "models" / BATCH_NORM.name)),
        ("rank", *ranks),
        ("rank_dense", *ranks),
        ("group_norm", (GROUPS,), model_folders(ROOT / "models" / NORM.name)),
    ):
        data = [measured(device, where) for where in folders for device in measured_devices(where)]
        for device in measured_devices(HOLDOUT / name):
            held = ("--holdout", measured(device, HOLDOUT / name), "--model", models[device])
            out = ROOT / "benchmarks" / "results" / device / f"evaluation_{name}.json"
            judged = (*data, "--device", device, *held, "--holdout-only")
            confpred("evaluate", *judged, "--json", out, "--force")
    for module in (
        "benchmarks.model.chain_choices",
        "benchmarks.model.layer_kinds",
        "benchmarks.kernels.shares",
        "benchmarks.tables",
    ):
        subprocess.run([sys.executable, "-m", module], check=True, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("models", "results"))
    {"models": models, "results": results}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
