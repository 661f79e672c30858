"""From measurements of a Triton kernel to a model and its choices, as for any family."""

from __future__ import annotations

from pathlib import Path

import made_up_kernel
import pytest
from shared import once_a_run, python_says

from confpred.training.tuning_lists import TUNING_BASELINES

KNOWN = {
    "CONFPRED_FAMILIES": "made_up_kernel",
    "PYTHONPATH": str(Path(made_up_kernel.__file__).parent),
}
TRAIN = """
import sys
from pathlib import Path
from synthetic import SMALL
from confpred.training.dataset import read_dataset
from confpred.training.train import train
if __name__ == "__main__":
    print(train(read_dataset([Path(sys.argv[1])]), Path(sys.argv[2]), hyper=SMALL).geomean)
"""
CHOOSE = """
import sys
import numpy as np
from made_up_kernel import FAMILY, calls, true_ms
from confpred import Predictor
predictor, regret = Predictor.load(sys.argv[1]), []
for call in calls(20, seed=9):
    choice = predictor.choose(call, "h100")
    assert (choice.source, choice.family) == ("predicted", "product"), choice
    regret.append(true_ms(call)[choice.config_id] / true_ms(call).min())
known = calls(1)[0]
assert predictor.choose(known, "h100").source == "measured"
(entry,) = predictor.models["h100"].card.families.values()
assert entry.source_digests == [FAMILY.source] == [entry.source]
print(np.exp(np.mean(np.log(regret))))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of made-up measurements."""

    def make(folder: Path) -> None:
        write = "import sys, made_up_kernel; made_up_kernel.write_measurements(sys.argv[1])"
        python_says("-c", write, folder / "product.parquet", **KNOWN)

    return once_a_run(tmp_path_factory, "kernel-measurements", make) / "product.parquet"


@pytest.mark.slow(reason="it trains a model, in processes of its own")
def test_a_model_learns_a_kernel_and_chooses_for_calls_that_nobody_measured(
    measured: Path, tmp_path: Path
) -> None:
    (tmp_path / "fit.py").write_text(TRAIN)
    held_out = python_says(tmp_path / "fit.py", measured, tmp_path / "product-1", **KNOWN)
    assert float(held_out.split()[-1]) < 1.08
    assert float(python_says("-c", CHOOSE, tmp_path / "product-1", **KNOWN)) < 1.08
    words = ("-m", "confpred", "predict", "--operation", "product", "--device", "h100")
    layer = ("--layer", "M=100 N=2000 K=300 dtype=bfloat16", "--model", tmp_path / "product-1")
    assert "BLOCK_M=" in python_says(*words, *layer, **KNOWN)


DRIFT = """
import sys
from pathlib import Path
from confpred.data.measurements import Run
from confpred.model.folder import load_model
from confpred.retraining.drift import time_again
from confpred.sampler.run import Sampling
from kernel_jobs import MEASURE
if __name__ == "__main__":
    run = Run("0a1b", "h100", "NVIDIA H100 80GB HBM3", "0", "13.0", "test")
    settings, model = Sampling(processes=0, measure=MEASURE), load_model(Path(sys.argv[1]))
    found = time_again(model, {0: run}, settings, count=12, seed=0, cudnn="")
    print(found.state, len(found.retimed), {each.provider for each in found.retimed})
"""


@pytest.mark.slow(reason="it trains a model, in processes of its own")
def test_drift_is_looked_for(measured: Path, tmp_path: Path) -> None:
    for name, program in (("fit", TRAIN), ("drift", DRIFT)):
        (tmp_path / f"{name}.py").write_text(program)
    python_says(tmp_path / "fit.py", measured, tmp_path / "product-1", **KNOWN)
    drift = (tmp_path / "drift.py", tmp_path / "product-1")
    assert python_says(*drift, **KNOWN).split("{")[0] == "ok 12 "
    assert python_says(*drift, **KNOWN, SLOWER="1.3").split("{")[0] == "drifted 12 "


FLEET = """
import sys
from pathlib import Path
import fleet_jobs, kernel_jobs, ray
from made_up_kernel import calls
from confpred.data.suites import suite_of_calls
from confpred.sampler.fleet import Fleet
from confpred.sampler.run import Sampling, sample
if __name__ == "__main__":
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init("local", num_gpus=2, num_cpus=4, **quiet)
    settings = Sampling(configs=5, processes=0, measure=kernel_jobs.MEASURE, silence_s=60.0)
    with Fleet(settings, describe=fleet_jobs.DESCRIBE) as engine:
        tally = sample(suite_of_calls("product", calls(6)), Path(sys.argv[1]), engine, settings)
    print(tally.finished, tally.statuses["ok"], tally.gpus, len(tally.given_up))
"""


@pytest.mark.slow(reason="Ray is started")
def test_a_fleet_measures_a_kernel(tmp_path: Path) -> None:
    (tmp_path / "fleet.py").write_text(FLEET)
    jobs = Path(__file__).parents[1] / "sampler"
    paths = {"PYTHONPATH": f"{KNOWN['PYTHONPATH']}:{jobs}", "RAY_USAGE_STATS_ENABLED": "0"}
    told = python_says(tmp_path / "fleet.py", tmp_path / "runs", **{**KNOWN, **paths})
    assert told.split() == ["True", "30", "2", "0"]


@pytest.mark.slow(reason="it cross-validates, in processes of its own")
def test_evaluation_has_its_table(measured: Path) -> None:
    told = python_says("-m", "confpred", "evaluate", measured, **KNOWN)
    assert "product: time of the choice / time of the best config" in told
    assert all(name in told for name in ("model", "fixed config", *TUNING_BASELINES))
