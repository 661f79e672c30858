"""docs/triton.md: its blocks are the example's, and its commands run as far as they need no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from shared import python_says

from confpred.cli.export import export as export_command

_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
_CONFPRED = 'confpred() { "$TESTED_PYTHON" -c "from confpred.cli import main; main()" "$@"; }\n'
#: All configs of made-up calls, as `confpred sample` would leave them.
MEASURE = """
import sys
from pathlib import Path
import made_up_kernel
import numpy as np
from confpred.families.registry import all_families
made_up_kernel.FAMILY = all_families()["fused_linear"]
made_up_kernel.CONFIGS = made_up_kernel.FAMILY.kwargs
made_up_kernel.write_measurements(str(Path(sys.argv[1], "rows-made-up-00000.parquet")), count=12)
"""


def blocks(repository: Path, language: str) -> list[str]:
    page = (repository / "docs" / "triton.md").read_text(encoding="utf-8")
    return [text for kind, text in _BLOCK.findall(page) if kind == language]


def test_the_blocks_are_those_of_the_example(repository: Path) -> None:
    example = (repository / "examples" / "triton" / "fused_linear.py").read_text(encoding="utf-8")
    decorated, called, added = blocks(repository, "python")
    assert decorated in example
    assert called in example
    assert added.startswith("features = {")


@pytest.mark.slow(reason="a model of made-up measurements is trained and judged")
def test_the_commands_run(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    folder = tmp_path / "examples" / "triton"
    folder.mkdir()
    (folder / "fused_linear.py").symlink_to(repository / "examples" / "triton" / "fused_linear.py")
    sample, others, export = blocks(repository, "sh")
    environment = os.environ | {"TESTED_PYTHON": sys.executable}

    def run(script: str) -> str:
        done = subprocess.run(
            ["sh", "-ec", _CONFPRED + script],
            cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    assert "8280 of fused_linear" in run(f"{sample.strip()} --plan h100")
    words = [word for word in export.split() if word.startswith("--")]
    assert set(words) <= {name for option in export_command.params for name in option.opts}
    runs = tmp_path / "runs" / "linear"
    runs.mkdir(parents=True)
    paths = os.pathsep.join(map(str, (folder, repository / "tests")))
    python_says("-c", MEASURE, runs, CONFPRED_FAMILIES="fused_linear", PYTHONPATH=paths)
    told = run(others)
    assert "fused_linear: time of the choice / time of the best config" in told
    assert "BLOCK_M=" in told
    files = [*(folder / "models" / "h100-2").iterdir()]
    assert sum(file.stat().st_size for file in files) < 2e6


def test_the_model_beside_the_example_is_of_its_kernel(repository: Path) -> None:
    folder = repository / "examples" / "triton"
    program = "from fused_linear import fused_linear as kernel; print(kernel.family.digest)"
    known = {"CONFPRED_FAMILIES": "fused_linear", "PYTHONPATH": str(folder)}
    digest = python_says("-c", program, **known).strip()
    for model in (folder / "models").iterdir():
        card = json.loads((model / "card.json").read_text(encoding="utf-8"))
        (source,) = card["families"]["fused_linear"]["source_digests"]
        assert source.split()[-1] == digest
        assert sum(file.stat().st_size for file in model.iterdir()) < 2e6
