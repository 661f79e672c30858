"""Run the PyTorch tests with one PyTorch, and record what passes.

    python tests/torch_versions.py --version 2.9.1      # in an environment of its own
    python tests/torch_versions.py --here tests/gpu     # in this environment
    python tests/torch_versions.py --here -k norms --out runs

Further arguments are pytest's; without any, it runs `TESTS`. Environments are kept in `build/torch`
or `--environments`. They have what development needs, and a PyTorch whatever the extra `gpu` asks
for. The record is ``benchmarks/results/torch/VERSION.json``, with ``-gpu`` where there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/cpu/pytorch", "--numprocesses", "auto", "--dist", "worksteal")
#: Asks an environment's Python for facts of its machine.
_FACTS = """import json, torch; from benchmarks.provenance import provenance
gpu = torch.cuda.is_available()
facts = {"torch": torch.__version__, "device": "cpu", **provenance("numpy", gpu=gpu)}
print(json.dumps(facts))"""


def uv(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run uv with the index and certificates that pip is set to use, and with no other setting of
    this machine, such as a constraint."""
    command = (sys.executable, "-m", "pip", "config", "list")
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    settings = dict(re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UV_")}
    for variable, name in (("UV_DEFAULT_INDEX", "index-url"), ("SSL_CERT_FILE", "cert")):
        if name in settings:
            environment.setdefault(variable, settings[name])
    command = (sys.executable, "-m", "uv", "--no-config", "--quiet", *map(str, words))
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def make(version: str, folder: Path) -> Path:
    """Make the environment of a PyTorch, or bring it up to this checkout; return its Python."""
    environment = folder.resolve() / version
    python = environment / "bin" / "python"
    if not python.exists():
        uv("venv", "--python", sys.executable, environment).check_returncode()
    # PyTorch 2.10 asks for CUDA 12's bindings, which no test on a CPU needs.
    (environment / "overrides.txt").write_text(f"torch=={version}\ncuda-bindings>=13\n")
    pinned = (ROOT / "constraints-dev.txt").read_text()
    constraints = re.sub(r"^(?:torch|triton)==.*\n", "", pinned, flags=re.MULTILINE)
    (environment / "constraints.txt").write_text(constraints)
    files = [f"--{name[:-1]}={environment / name}.txt" for name in ("overrides", "constraints")]
    done = uv("pip", "install", "--python", python, *files, "--editable", ".[dev]")
    if done.returncode:
        sys.exit(done.stderr)
    return python


def counts(results: Path) -> dict[str, object]:
    """Count the tests of a file in JUnit's form, and name those that failed."""
    ends: dict[str, set[str]] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        ends[name] = {part.tag for part in case} & {"failure", "error", "skipped"}
    failed = sorted(name for name, end in ends.items() if end & {"failure", "error"})
    skipped = sum(end == {"skipped"} for end in ends.values())
    passed = len(ends) - len(failed) - skipped
    return {"passed": passed, "failed": len(failed), "skipped": skipped, "failed_tests": failed}


def main(words: Sequence[str] | None = None) -> int:
    """Return pytest's exit code."""
    parser = argparse.ArgumentParser(description="Run the PyTorch tests with one PyTorch.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--version", help="of PyTorch, such as 2.9.1")
    which.add_argument("--here", action="store_true", help="use this environment")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "torch")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "torch")
    options, rest = parser.parse_known_args(words)
    tests = rest or list(TESTS)
    python = sys.executable if options.here else make(options.version, options.environments)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        pytest = (python, "-m", "pytest", "-q", f"--junitxml={results}", *tests)
        code = subprocess.run(pytest, cwd=ROOT).returncode
        facts = json.loads(subprocess.check_output((python, "-c", _FACTS), cwd=ROOT))
        record = {**facts, "tests": tests, **counts(results)}
    name = facts["torch"].partition("+")[0] + "-gpu" * (facts["device"] != "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
