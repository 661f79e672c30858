"""Everything that a change of form must leave as it is, to the bit, in one JSON file.

    python tests/fingerprint.py before.json     # ... the change ...
    python tests/fingerprint.py after.json && cmp before.json after.json

For a seventh of the suites' problems and 150 random ones a family, on the devices that have a model
and a board of each architecture: the first eight choices, and digests of what each family says is
legal, of its features, estimates and launches; and the options of each command, and what mistakes
mean. It takes about twenty seconds. With ``--graphs`` as the last argument the captured graphs of
twenty networks follow, as confpred rewrites them, and what `confpred.explain` says of them: some
minutes more.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import command_line
import numpy as np
from layers import ARCHITECTURES, random_layer

from confpred import Predictor
from confpred.data.suites import read_suite
from confpred.families.protocol import Family
from confpred.families.registry import all_kernels
from confpred.problem.conv2d import DIRECTIONS
from confpred.problem.device import KNOWN, Device
from confpred.problem.record import Record

SUITES = Path(__file__).parents[1] / "datasets" / "suites"
DEVICES = {key: KNOWN[key] for key in ("h100", "h200")}
DEVICES |= {board.key: board for board in ARCHITECTURES.values()}
EACH, RANDOM, TOP = 7, 150, 8
ROWS, LAUNCHES = 24, 6  # of the legal configs of a problem, how many are described and launched
#: Networks of as many kinds, with the side of their images; of some the gradients, too.
NETWORKS = {
    "coatnet_0_rw_224": 224, "convnext_atto": 64, "cs3darknet_focus_s": 64, "densenet121": 64,
    "dpn48b": 64, "edgenext_xx_small": 64, "efficientnet_b0": 64, "fastvit_t8": 64,
    "ghostnet_100": 64, "hrnet_w18_small": 64, "inception_next_atto": 64, "levit_conv_128s": 224,
    "mixnet_s": 64, "mnasnet_small": 64, "mobilenetv3_small_100": 64, "regnety_002": 64,
    "resnet18": 64, "rexnet_100": 64, "skresnet18": 64, "xception41": 64,
}  # fmt: skip
TRAINED = ("densenet121", "ghostnet_100", "mnasnet_small", "regnety_002", "resnet18", "rexnet_100")


def problems() -> list[Record]:
    entries = [e for d in DIRECTIONS for e in read_suite(SUITES / f"{d}.json").entries]
    found = [entry.problem for entry in entries[::EACH]]
    for name, family in all_kernels().items():
        rng = random.Random(name)
        found += [random_layer(rng, family) for _ in range(RANDOM)]
    return found


def of_family(family: Family, device: Device, sample: list[Record]) -> dict[str, str]:
    parts = {name: hashlib.sha256() for name in ("legal", "features", "estimates", "launches")}
    rng = random.Random(f"{family.name} {device.key}")
    for problem in sample:
        legal = family.legal(problem, device)
        parts["legal"].update(np.packbits(legal).tobytes())
        rows = np.flatnonzero(legal).tolist()
        some = np.array(sorted(rng.sample(rows, min(ROWS, len(rows)))), np.intp)
        if not len(some):
            continue
        parts["features"].update(family.features(problem, device, some).tobytes())
        parts["estimates"].update(family.estimate_s(problem, device, some).tobytes())
        for row in some[:LAUNCHES]:
            parts["launches"].update(repr(family.launch(problem, int(row))).encode())
    digests = {name: part.hexdigest() for name, part in parts.items()}
    return {"configs": hashlib.sha256(family.configs.tobytes()).hexdigest(), **digests}


def of_networks() -> dict[str, Any]:
    """What the graphs of ``NETWORKS`` become on an H100."""
    import torch
    from timm_networks import made

    from confpred.pytorch import explain

    class Written(explain.Recorder):
        """Keeps the rewritten graphs as text."""

        def _run(self, gm: Any, *more: Any, **told: Any) -> Any:
            run = super()._run(gm, *more, **told)
            graphs.append(hashlib.sha256(gm.code.encode()).hexdigest())
            return run

    found: dict[str, Any] = {}
    explain.Recorder = Written  # type: ignore[misc]
    for name, side in NETWORKS.items():
        for training in (False, True)[: 1 + (name in TRAINED)]:
            model, images = made(name, side)
            model = model.to(memory_format=torch.channels_last)
            graphs: list[str] = []
            said = explain.explain(model, images, training=training, dtype=torch.half)
            found[f"{name} {training}"] = {"graphs": graphs, "explained": said.to_json()}
            print(name, training, len(graphs), flush=True)
    return found


def main(out: Path, graphs: bool) -> None:
    sample, predictor = problems(), Predictor.load()
    result = {
        "choices": {
            f"{device} {problem}": [c.to_json() for c in predictor.rank(problem, device, TOP)]
            for device in DEVICES
            for problem in sample
        },
        "families": {
            f"{name} {key}": of_family(family, device, sample)
            for name, family in all_kernels().items()
            for key, device in DEVICES.items()
        },
        "cli": {
            "options": command_line.options(),
            "mistakes": command_line.mistakes(),
        },
    }
    if graphs:
        result["graphs"] = of_networks()
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(sample)} problems, {len(result['choices'])} answers: {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["--graphs"])
