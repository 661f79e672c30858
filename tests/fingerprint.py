"""Everything that a change of form must leave as it is, to the bit, in one JSON file.

    python tests/fingerprint.py before.json     # ... the change ...
    python tests/fingerprint.py after.json && cmp before.json after.json

For a seventh of the suites' problems and 150 random ones a family, on the devices that have a model
and a board of each architecture: the first eight choices, and digests of what each family says is
legal, of its features, estimates and launches; the options of each command, and what mistakes mean;
what the HTTP service replies to 200 questions and 67 mistakes. It takes some minutes. With
``--graphs`` as the last argument the captured graphs of twenty networks follow, as confpred
rewrites them, and what `confpred.explain` says of them: some minutes more.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command_line
import numpy as np
from fastapi.testclient import TestClient
from layers import ARCHITECTURES, CONVOLUTIONS, random_layer

from confpred import Predictor
from confpred.data.suites import read_suite
from confpred.families.protocol import Family
from confpred.problem.conv2d import DIRECTIONS, Problem
from confpred.problem.device import KNOWN, Device
from confpred.problem.record import Record
from confpred.service import Settings, tokens
from confpred.service.app import create_app

SUITES = Path(__file__).parents[1] / "datasets" / "suites"
DEVICES = {key: KNOWN[key] for key in ("h100", "h200")}
DEVICES |= {board.key: board for board in ARCHITECTURES.values()}
LOCAL = ("127.0.0.1", 1)
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
    for name, family in CONVOLUTIONS.items():
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


def served(sample: list[Record], predictor: Predictor) -> dict[str, Any]:
    """Return what the HTTP service replies: 200 answers by digest, errors in full, its description
    (OpenAPI, the page, the names of metrics), and what a server with tokens refuses."""
    layers = [problem.to_json() for problem in sample if isinstance(problem, Problem)]
    with TestClient(create_app(Settings(max_batch=20), predictor), client=LOCAL) as client:
        answers = [_reply(client, "POST", "/v1/predict", body) for body in _questions(layers)]
        paths = ("/v1/devices", "/v1/models", "/healthz", "/readyz", "/openapi.json", "/docs")
        described = {path: _reply(client, "GET", path) for path in paths}
        described["HEAD /readyz"] = _reply(client, "HEAD", "/readyz")
        errors = [_reply(client, *asked) for asked in _mistakes(layers[0])]
        numbers = re.compile(r"^([^#].*) \S+$", re.MULTILINE)
        metrics = numbers.sub(r"\1", client.get("/metrics").text).splitlines()
    known = (tokens.Token("reader", "read", hashlib.sha256(b"secret").hexdigest()),)
    guarded = create_app(Settings(tokens="tokens.json"), predictor, known)
    with TestClient(guarded, client=LOCAL) as client:
        for path in ("/v1/models", "/v1/models/reload", "/healthz", "/no/such/path"):
            for bearer in (None, "Bearer other", "Bearer secret"):
                headers = {} if bearer is None else {"authorization": bearer}
                errors.append(_reply(client, "POST", path, headers=headers))
        described["with tokens"] = _reply(client, "GET", "/openapi.json", headers=headers)
    return {
        "answers": answers,
        "described": described,
        "errors": errors,
        # Those of a process are the operating system's.
        "metrics": sorted(
            line
            for line in set(metrics)
            if "confpred_process" not in line and "_bucket" not in line
        ),
    }


def _questions(layers: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield 200 bodies: one layer and many, all devices, each option."""
    devices = ["h100", "NVIDIA H200", "a100", *KNOWN]
    options = [
        {},
        {"top": 3},
        {"max_regret": 1.05},
        {"limits": {"workspace_bytes": 0, "deterministic": True}},
        {"limits": {"tf32": False, "max_error": 0.001}, "top": 32},
    ]
    for number in range(200):
        body = {"device": devices[number % len(devices)], **options[number % len(options)]}
        some = [layers[(7 * number + i) % len(layers)] for i in range(1 + number % 20)]
        yield body | ({"problem": some[0]} if number % 2 else {"problems": some})


def _mistakes(layer: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield requests that are refused: method, path and body."""
    one = {"device": "h100", "problem": layer}
    for method, path in (
        ("GET", "/v2/predict"),
        ("POST", "/v1/predict/"),
        ("GET", "/v1/predict"),
        ("DELETE", "/v1/devices"),
        ("POST", "/metrics"),
        ("POST", "/v1/predict?version=none"),
        ("POST", "/v1/models/reload"),
        ("POST", "/v1/models/rollback"),
    ):
        yield method, path, one
    for text in (
        *(b"", b"{device: h100}", b"{} {}", b'{"device": "\xff"}', b'{"top": NaN}', b"[" * 20_000),
        *(b'{"top": -Infinity}', b'{"top": ' + b"9" * 5000 + b"}", b'{"top": 1, "top": 2}'),
        *(b" " * 100_000, json.dumps(one).encode("utf-16")),
    ):
        yield "POST", "/v1/predict", text
    for change in (
        *({"device": None}, {"device": 3}, {"device": "h900"}, {"device": ["h100"]}),
        *({"problems": [layer]}, {"gpu": "h100"}, {"x" * 9000: 1}),
        *({"top": 0}, {"top": 33}, {"top": True}, {"top": 1.0}, {"top": None}),
        *({"max_regret": 0.5}, {"max_regret": "1.1"}, {"limits": None}, {"limits": {"tf32": 1}}),
        *({"limits": {"memory": 1}}, {"limits": {"workspace_bytes": -1}}),
        *({"problem": [layer]}, {"problem": None}, {"problem": {"c": 64}}),
    ):
        yield "POST", "/v1/predict", one | change
    for change in (
        *({"c": 65}, {"batch": 1}, {"padding": [1, 1, 1]}, {"padding": [1, -1]}, {"bias": 1}),
        *({"dtype": "fp64"}, {"n": 10**30}, {"n": "\ud800"}, {"activation": []}, {"y" * 9000: "z"}),
    ):
        yield "POST", "/v1/predict", {"device": "h100", "problems": [layer, layer | change]}
    for many in ([], None, layer, [layer] * 21, [layer, 7]):
        yield "POST", "/v1/predict", {"device": "h100", "problems": many}


def _reply(
    client: TestClient, method: str, path: str, body: Any = None, headers: Any = None
) -> dict[str, Any]:
    """Ask, and return the reply by meaning: an error in full, all else by its digest."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    fixed = {"x-request-id": "1", "content-type": "application/json", **(headers or {})}
    reply = client.request(method, path, content=text, headers=fixed)
    said = reply.json() if reply.status_code >= 400 else hashlib.sha256(reply.content).hexdigest()
    return {
        "status": reply.status_code,
        "headers": dict(sorted(reply.headers.items())),
        "says": said,
    }


def of_networks() -> dict[str, Any]:
    """Return the rewritten graphs of ``NETWORKS`` on an H100."""
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
            for name, family in CONVOLUTIONS.items()
            for key, device in DEVICES.items()
        },
        "cli": {
            "options": command_line.options(),
            "mistakes": command_line.mistakes(),
        },
        "service": served(sample, predictor),
    }
    if graphs:
        result["graphs"] = of_networks()
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(sample)} problems, {len(result['choices'])} answers: {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["--graphs"])
