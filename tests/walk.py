"""The blocks of docs/adding-a-kernel.md, and a folder to run them in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

#: The commands are those of the interpreter that runs the tests, wherever it is installed.
_COMMANDS = """
python() { "$TESTED_PYTHON" "$@"; }
confpred() { python -c 'from confpred.cli import main; main()' "$@"; }
"""
_BLOCK = re.compile(r"<!-- (.+?) -->\n```(\w+)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code.

    Attributes:
        mark: the comment before it: a file that it is a piece of, or how it is run.
        language: such as ``sh``.
        text: whole lines.
    """

    mark: str
    language: str
    text: str


def blocks(repository: Path) -> list[Block]:
    """All marked blocks, in order."""
    page = (repository / "docs" / "adding-a-kernel.md").read_text(encoding="utf-8")
    return [Block(*found) for found in _BLOCK.findall(page)]


def run(block: Block, repository: Path, folder: Path) -> str:
    """Standard output of `block`, run in `folder` in the environment that the walk sets up."""
    (environment,) = (b.text for b in blocks(repository) if b.mark == "environment")
    script = block.text
    if block.language == "python":
        script = f"python - <<'END'\n{block.text}END\n"
    result = subprocess.run(
        ["sh", "-ec", _COMMANDS + environment + script],
        cwd=folder,
        env=os.environ
        | {"TESTED_PYTHON": sys.executable, "CONFPRED_CACHE_DIR": str(folder / "kernels")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"{block.text}\n{result.stdout}\n{result.stderr}"
    return result.stdout
