"""A model of linear chains is trained from measurements, and chooses, as of any operation, on
made-up times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shared import python_says

PROGRAM = """
import json, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from confpred.data.measurements import Measurement, Run
from confpred.data.parquet import schema
from confpred.data.suites import read_suite
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.kernel_text import identity_of
from confpred.families.registry import families_of
from confpred.measure.timing import Outcome
from confpred.predict.predictor import Predictor
from confpred.problem.device import get_device
from confpred.problem.limits import Limits
from confpred.problem.linear_chain import LINEAR_CHAIN
from confpred.training.dataset import read_dataset
from confpred.training.fit import Hyperparameters
from confpred.training.train import train

suite, folder = Path(sys.argv[1]), Path(sys.argv[2])
device, run = get_device("h100"), Run("t", "h100", "NVIDIA H100 80GB HBM3", "0", "13.0", "test")
noise = np.random.default_rng(0)
rows, best = [], {}

def row(entry, candidate, digest, ms):
    outcome = Outcome(candidate.config_id, "ok", ms, ms * 0.01, 20, 32, 0, 0, 1e-4, 1980)
    return Measurement(entry.problem, entry.networks, candidate.provider, digest, run, outcome,
        "2026-01-01T00:00:00Z").to_row()

for entry in read_suite(suite).entries:
    problem, times = entry.problem, []
    for family in families_of(problem).values():
        legal = np.flatnonzero(family.legal(problem, device))
        seconds = family.estimate_s(problem, device, legal) * noise.normal(1.0, 0.01, len(legal))
        for number, s in zip(legal.tolist(), seconds.tolist()):
            digest = identity_of(family.launch(problem, number).source)
            rows.append(row(entry, Candidate(family.name, number), digest, s * 1e3))
            times.append(s * 1e3)
    if times:
        slower = 1.4 if problem.activation == "relu" else 0.7
        theirs = row(entry, PYTORCH_OPERATOR, "", min(times) * slower)
        rows.append(theirs | {"cudnn": "9.19.0", "cudnn_mode": "benchmark"})
path = folder / "chains.parquet"
pq.write_table(pa.Table.from_pylist(rows, schema(LINEAR_CHAIN)), path)
small = Hyperparameters(trees=60, num_leaves=15, min_data_in_leaf=10, time_trees=60,
    time_leaves=15, pytorch_trees=40)
train(read_dataset([path]), folder / "chains-1", hyper=small)
predictor = Predictor.load(folder / "chains-1")
problem = LINEAR_CHAIN.problem.parse("batch=300 inputs=2000 hidden=2000 outputs=2000 layers=4")
bounded = predictor.within(Limits(max_error=0.01))
print(json.dumps({
    "rows": len(rows),
    "families": sorted(predictor.models["h100"].families),
    "default": [c.provider for c in predictor.rank(problem, "h100", 9)],
    "bounded": [c.provider for c in bounded.rank(problem, "h100", 9)],
    "source": predictor.choose(problem, "h100").source,
    "gelu": predictor.choose(replace(problem, activation="gelu", batch=64), "h100").provider,
}))
"""


@pytest.mark.slow(reason="a model is trained")
def test_a_model_of_chains_is_trained_and_chooses(repository: Path, tmp_path: Path) -> None:
    suite = repository / "datasets" / "suites" / "linear_chains.json"
    found = json.loads(python_says("-c", PROGRAM, suite, tmp_path).splitlines()[-1])
    assert found["rows"] > 1000
    assert found["families"] == ["linear_epilogue", "linear_strassen"]
    assert found["source"] == "predicted"
    assert set(found["default"]) == {"linear_epilogue", "pytorch"}  # no less exact than PyTorch's
    assert found["default"][0] == "linear_epilogue"
    assert "linear_strassen" in found["bounded"]
    assert found["gelu"] == "pytorch"  # only Strassen's would be there, and is not asked for


def test_the_suite_is_what_its_script_makes(repository: Path, monkeypatch, tmp_path: Path) -> None:
    file = repository / "datasets" / "suites" / "linear_chains.json"
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import chain_suite; "
        "from pathlib import Path; "
        "from confpred.data.suites import write_suite; "
        "write_suite(chain_suite.suite(), Path(sys.argv[2]))"
    )
    made = tmp_path / "made.json"
    python_says("-c", program, repository / "datasets", made)
    assert made.read_text() == file.read_text()
    problems = json.loads(file.read_text())["problems"]
    assert len(problems) > 400
    assert len({name for problem in problems for name in problem["networks"]}) >= 30
    assert {1, 4, 8} <= {problem["layers"] for problem in problems}
    assert any(problem["hidden"] % 2 for problem in problems)
