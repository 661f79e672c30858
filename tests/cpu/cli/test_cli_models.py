"""`confpred models` beside models that are damaged or half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import confpred


@pytest.fixture
def users(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of this user's models: whole, half-written and damaged ones."""
    monkeypatch.setenv("CONFPRED_MODELS_DIR", str(tmp_path))
    for name in ("whole", ".whole.2.x1y2.tmp", "damaged"):
        shutil.copytree(model_folder, tmp_path / name)
    (tmp_path / "damaged" / "card.json").write_text('{"format": "confpred-model/5"}')
    (tmp_path / "begun").mkdir()
    return tmp_path


def test_the_others_are_listed(users: Path) -> None:
    done = confpred("models", "list", "--json")
    assert done.returncode == 0
    listed = [model["name"] for model in json.loads(done.stdout)]
    assert "whole" in listed
    assert not any(name.startswith((".", "damaged", "begun")) for name in listed)
    assert done.stderr == f"confpred: {users}/damaged/card.json is damaged: KeyError('operation')\n"


def test_a_damaged_one_is_not_verified(users: Path) -> None:
    done = confpred("models", "verify")
    assert done.returncode == 1
    assert "whole: whole, " in done.stdout.splitlines()[0]
    assert done.stderr.endswith("confpred: not verified: damaged\n")
