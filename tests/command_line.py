"""The command line as scripts see it: the options of each command, and what mistakes mean."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from confpred.cli import cli, main

#: Properties of an option that a script relies on.
FACTS = ("name", "opts", "secondary_opts", "required", "multiple", "nargs", "default", "envvar")
#: Command lines with a mistake each; ``FILE`` exists, ``NEW`` does not, ``FULL`` is a folder.
MISTAKES = """
nothing
--nothing
predict
predict --device h100
predict LAYER
predict --device h100 --layer 'n=0 c=1 h=1 w=1 k=1 r=1 s=1'
predict --device h100 --layer 'n=1 c=1 h=1 w=1 k=1 r=1'
predict --device h100 --layer 'n=1 c=1 h=1 w=1 k=1 r=1 s=1 x=1'
predict --device h100 --layer 'n=1 c=1 h=1 w=1 k=1 r=1 s=one'
predict --device h100 --layer n
predict --device rtx4091 LAYER
predict --device h100 --top 0 LAYER
predict --device h100 --max-regret 0.5 LAYER
predict --device h100 --max-error -1 LAYER
predict --device h100 --model NEW LAYER
predict --device h100 --model FULL LAYER
predict --device h100 --plan FILE LAYER
predict --device h100 --operation conv3d LAYER
predict --device h100 --network FILE
predict --device h100 --network FILE LAYER
explain --device h100 --plot FILE LAYER
explain --device h100 --plot NEW.png LAYER LAYER
explain --device h100 --plot FULL --force LAYER
explain --device h100
devices h101
devices --model NEW
plan export --device h100 --out FILE LAYER
plan export --device h100 --kernels --out FULL LAYER
plan export --device h100 LAYER
plan show FILE
plan check FILE
plan show NEW
sample --suite FILE --out NEW
sample --suite FILE --out FILE
sample --suite NEW --out NEW
sample --suite SUITE --out NEW --budget 8
sample --suite SUITE --out NEW --timeout 0s
sample --suite SUITE --out NEW --family nothing --plan h100
sample --suite SUITE --out NEW --archive NEW
sample --suite SUITE --out NEW --model FULL
sample --suite SUITE --out NEW --plan h101
sample --suite SUITE --out NEW --anchors FILE --plan h100
sample --suite SUITE --out NEW
merge FULL FILE
merge FULL FULL/part.parquet
merge NEW FILE
merge FULL
train FILE --out NEW
train FULL --out NEW
train FILE --out FULL
train FILE
retrain --device cuda:x --no-pytorch
retrain --budget 1x
retrain --suite FILE
drift --device gpu
drift --count 1
drift --model NEW
evaluate FILE
evaluate FULL
evaluate FILE --holdout-only
evaluate FILE --model FULL
evaluate FILE --json FILE
report FILE --out FILE
report FULL --out NEW
report FILE --out NEW
serve --config FILE
serve --model NEW
serve --port x
serve --workers 0
token --tokens FILE name
token --tokens NEW --revoke name
token name
"""
_WORDS = {
    "LAYER": "--layer 'n=32 c=64 h=56 w=56 k=64 r=3 s=3 groups=8 padding=1'",
    "SUITE": str(Path(__file__).parents[1] / "datasets" / "suites" / "smoke.json"),
}


def confpred(*words: object, prelude: str = "", **how: Any) -> subprocess.CompletedProcess[str]:
    """Run ``confpred`` with these words: in this process, or after the program `prelude`, or `how`
    `subprocess.run` is told, in one of its own."""
    if not (prelude or how):
        return _here([*map(str, words)])
    program = f"{prelude}\nfrom confpred.cli import main; main()"
    given = {"capture_output": True, "text": True, "check": False, **how}
    return subprocess.run([sys.executable, "-c", program, *map(str, words)], **given)


def _here(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, and leave its signals and thresholds as they were."""
    out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threshold, code = gc.get_threshold(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["confpred", *words])
        patch.setattr(sys, "path", [*sys.path])
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            gc.set_threshold(*threshold)
            for number, handler in handlers.items():
                signal.signal(number, handler)
    said = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(words, code, *said)


def worked(*words: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run ``confpred``, which has to end well."""
    done = confpred(*words, **how)
    assert done.returncode == 0, done.stderr
    return done


def named(done: subprocess.CompletedProcess[str], message: str, *codes: int) -> None:
    """Assert that a command has named what is wrong, and done nothing else."""
    assert done.returncode in (codes or (1, 2)), done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def options(command: click.Command = cli, name: str = "confpred") -> dict[str, Any]:
    """Return the parameters of each command, by the command's name."""
    found: dict[str, Any] = {name: [_facts(param) for param in command.params]}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            sub = command.get_command(context, each)
            assert sub is not None
            found |= options(sub, f"{name} {each}")
    return found


def _facts(param: click.Parameter) -> dict[str, Any]:
    facts = param.to_info_dict()
    kind = {key: value for key, value in facts["type"].items() if key != "name"}
    return {name: repr(facts.get(name)) for name in FACTS} | {"type": repr(sorted(kind.items()))}


def mistakes() -> dict[str, list[Any]]:
    """Return what each of `MISTAKES` ends as: exit code or error, and the field that is named."""
    found: dict[str, list[Any]] = {}
    here = Path.cwd()
    for line in MISTAKES.splitlines():
        words = " ".join(_WORDS.get(word, word) for word in line.split(" "))
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                Path("FILE").write_text("{}")
                Path("FULL").mkdir()
                Path("FULL/other").touch()
                result = CliRunner().invoke(cli, words)
            finally:
                os.chdir(here)
        error = result.exception
        kind = "" if error is None else type(error).__name__
        found[line] = [result.exit_code, kind, getattr(error, "field", "")]
    return found
