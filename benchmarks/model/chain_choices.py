"""Linear chains that the model chooses for: their gain over PyTorch's operators, by precision.

    python -m benchmarks.model.chain_choices [--out FOLDER]

Both are measured as CUDA graphs. Each chain is chosen for by models that saw none of its networks,
within the error of PyTorch's own operators.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.provenance import CHAINS, RESULTS, measured, measured_devices, provenance, write
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.training import unsaid
from confpred.training.calibrate import Answer
from confpred.training.cross_validate import cross_validate
from confpred.training.dataset import read_dataset
from confpred.training.evaluate import folds_of
from confpred.training.fit import Hyperparameters

FOLDS, SEED = 5, 0
#: A choice is slower than PyTorch's operators if it takes this much longer.
SLOWER = 1.03


def precision(answer: Answer) -> str:
    problem: Any = answer.problem
    return "TF32" if problem.tf32 else problem.dtype


def figures(answers: list[Answer]) -> dict[str, Any]:
    """Return what is chosen, and the time of PyTorch's operators over that of the choice."""
    ours = [a for a in answers if a.chosen != PYTORCH_OPERATOR and a.pytorch_ms]
    gains = [(a.pytorch_ms or 0.0) / a.ours_ms for a in ours]
    return {
        "chains": len(answers),
        "chosen_for": len(ours),
        "gain": geometric_mean(gains),
        "least": min(gains),
        "slower": sum(gain < 1 / SLOWER for gain in gains),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    for device in measured_devices(CHAINS):
        dataset = read_dataset([measured(device, CHAINS)], device)
        split = folds_of(dataset, FOLDS, SEED)
        _, held_out = cross_validate(dataset, split, Hyperparameters(), SEED, unsaid)
        found: dict[str, list[Answer]] = defaultdict(list)
        for answer in held_out.answers:
            if answer.pytorch_ms is not None:
                found[precision(answer)].append(answer)
        rows = {name: figures(answers) for name, answers in sorted(found.items())}
        facts = provenance("lightgbm", "scikit-learn", gpu=False)
        write("chain_choices", facts | {"precisions": rows}, out / device)


if __name__ == "__main__":
    main()
