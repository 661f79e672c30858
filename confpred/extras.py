"""How an optional part of confpred is installed, said once for all messages.

No package index has confpred, so a command that names it alone would fail: it is installed again
from where it came from, or else the packages of the extra are named.
"""

from __future__ import annotations

import json
import re
import shlex
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

_NAME = "confpred"
_CLONE = Path(__file__).parents[1]
_OF_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


def install_command(extra: str) -> str:
    """Return the shell command that adds `extra`, such as ``train``, to this installation."""
    if (_CLONE / "pyproject.toml").exists():
        return _pip("--editable", f"{_CLONE}[{extra}]")
    installed = distribution(_NAME)
    url = urlsplit(json.loads(installed.read_text("direct_url.json") or "{}").get("url", ""))
    source = Path(url2pathname(url.path))
    if url.scheme == "file" and source.exists():  # a clone, or a wheel
        return _pip(f"{source}[{extra}]")
    return _pip(*_packages(extra, installed.requires or []))


def _packages(extra: str, requirements: list[str]) -> list[str]:
    """What `requirements`, as metadata has them, say of `extra` and of the extras in it."""
    found: list[str] = []
    for requirement in requirements:
        package, _, marker = (part.strip() for part in requirement.partition(";"))
        of = _OF_EXTRA.search(marker)
        if of is None or of[1] != extra:
            continue
        inner = re.fullmatch(rf"{_NAME}\[(.+)\]", package)
        parts = [name.strip() for name in inner[1].split(",")] if inner else []
        found += [p for part in parts for p in _packages(part, requirements)] or [package]
    return list(dict.fromkeys(found))


def _pip(*words: str) -> str:
    return f"pip install {shlex.join(words)}"
